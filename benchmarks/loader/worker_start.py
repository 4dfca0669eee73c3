"""How soon worker processes give their first batch, and what processor time starting them takes.

    python benchmarks/loader/worker_start.py [--quick] [--workers N] [--rounds N]

PyTorch is imported, as in a training. "anew": N interpreters beside each other, each of which imports what a worker
needs. "first": a loader whose processes are forked from a server that has just been started; "next": from one that was
there. Both are timed from the making of the loader to its first batch. In turns, rounds times; the first round is not
counted.
Printed: seconds and processor seconds, of the processes that are started and this one, median (least to most).
"""

from __future__ import annotations

import argparse
import datetime
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch.utils.data
from workers_data import KINDS

import penstock.torch
from penstock import forkserver

IMPORTS = "import penstock.loader.worker, torch.utils.data"


def anew(workers: int) -> None:
    """Start interpreters that import what worker processes do."""
    for process in [subprocess.Popen([sys.executable, "-c", IMPORTS]) for _ in range(workers)]:
        process.wait()


def first_batch(workers: int) -> None:
    """Make a loader, take a batch and close it."""
    make, _, collate = KINDS["dicts"]
    arguments = {"batch_size": 64, "epochs": 1, "collate_fn": collate, "report": None}
    with penstock.torch.Loader(make(256), workers=workers, **arguments) as loader:
        next(iter(loader))


def first(workers: int) -> None:
    """The same, where no server is there yet."""
    forkserver._end_servers()
    first_batch(workers)


def processor_seconds() -> float:
    """Return what this process and those that have ended took, once the server is among them."""
    forkserver._end_servers()
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main(arguments: list[str] | None = None) -> None:
    """Time the starts, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round: shows that it runs, not how fast")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    words = parser.parse_args(arguments)
    assert torch.utils.data, "as in a training"
    sides: dict[str, Callable[[int], None]] = {"anew": anew, "first": first, "next": first_batch}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(1 if words.quick else words.rounds + 1):
        for name, start in sides.items():
            before = processor_seconds()
            spent_before = 0.0
            if name == "next":
                first_batch(words.workers)
                spent_before = found["first"][-1][1]
            begin = time.perf_counter()
            start(words.workers)
            seconds = time.perf_counter() - begin
            found[name].append((seconds, processor_seconds() - before - spent_before))

    print(f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}")
    print(f"{words.workers} worker processes {'s':>20} {'processor s':>28}")
    for name, rounds in found.items():
        columns = zip(*rounds[min(1, len(rounds) - 1) :], strict=True)
        cells = [f"{statistics.median(each):8.3f} ({min(each):.3f} to {max(each):.3f})" for each in columns]
        print(f"{name:16}{cells[0]:>28}{cells[1]:>28}")


if __name__ == "__main__":
    main()
