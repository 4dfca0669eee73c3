"""Samples per second of `penstock.torch.Loader` beside PyTorch's DataLoader, over kinds of data set.

    python benchmarks/loader/workers.py [--quick] [--rounds N] [--data NAME...] [--sides NAME...]

Data sets as their users write them (workers_data.py). Sides: a DataLoader with 0, 1 and 2 persistent workers;
Penstock as it is by default, with one thread, and with 1 and 2 worker processes. All are open at the same time, with
an epoch or two seconds behind them, and take turns, in another order each round, of as many batches as an epoch has.
They are timed after the first half second of a turn, in which a side uses up what it has read ahead while others had
theirs, so that it has read as far ahead when the time begins as when it ends. First all must give the same samples.
Penstock as it is by default has thirty seconds to find out what is fastest.

Printed: samples per second (median, least, most over rounds); the ratio of Penstock by default to the best DataLoader,
of processes to as many workers of a DataLoader, and of two processes to one thread, round by round. "bare": processes
that ask the data set for samples and drop them. What two of these give, beside one, is the limit for two processors.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from workers_data import KINDS

import penstock.torch

BATCH = 64
#: Of a turn, before it is timed.
LEAD_SECONDS = 0.5
SIDES = {
    "DataLoader, 0 workers": ("torch", 0),
    "DataLoader, 1 worker": ("torch", 1),
    "DataLoader, 2 workers": ("torch", 2),
    "Penstock": ("penstock", {}),
    "Penstock, one thread": ("penstock", {"decoders": 1, "workers": "threads"}),
    "Penstock, workers=1": ("penstock", {"workers": 1}),
    "Penstock, workers=2": ("penstock", {"workers": 2}),
    "bare, 1 process": ("bare", 1),
    "bare, 2 processes": ("bare", 2),
}
#: Both numbers of a ratio, which is worth a line; None: the best DataLoader.
RATIOS = (
    ("Penstock", None),
    ("Penstock, workers=1", "DataLoader, 1 worker"),
    ("Penstock, workers=2", "DataLoader, 2 workers"),
    ("Penstock, workers=2", "Penstock, one thread"),
    ("bare, 2 processes", "bare, 1 process"),
)


class Bare:
    """Processes that ask for all samples in each pass, which is over when all have; it gives none."""

    def __init__(self, kind: str, count: int, processes: int, opened: ExitStack) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.processes = [
            opened.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-c", "import workers_data; workers_data.ask()", kind),
                        *map(str, (count, first, processes)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                    env=environment,
                )
            )
            for first in range(processes)
        ]
        # The end of their input does not reach them: workers of a DataLoader are forked with this end of it.
        opened.callback(self._tell, "end")

    def _tell(self, word: str) -> None:
        for process in self.processes:
            process.stdin.write(f"{word}\n")  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:
        self._tell("go")
        for process in self.processes:
            process.stdout.readline()  # type: ignore[union-attr]
        return iter(())


class Side:
    """One loader, open as long as the benchmark of its kind runs."""

    def __init__(self, kind: str, how: tuple[str, Any], count: int, opened: ExitStack) -> None:
        make, _, collate = KINDS[kind]
        self.count, self.rates = count, list[float]()
        self.is_bare = how[0] == "bare"
        if self.is_bare:
            self.batches: Any = Bare(kind, count, how[1], opened)
        elif how[0] == "torch":
            self.batches = DataLoader(
                make(count),
                BATCH,
                shuffle=True,
                num_workers=how[1],
                persistent_workers=how[1] > 0,
                collate_fn=collate,
            )
        else:
            self.batches = opened.enter_context(
                penstock.torch.Loader(
                    make(count), batch_size=BATCH, epochs=None, collate_fn=collate, report=None, **how[1]
                )
            )
        self.endless = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.batches

    def settle(self, seconds: float) -> None:
        begin = time.perf_counter()
        while True:
            self.epoch()
            if time.perf_counter() - begin >= seconds:
                return

    def epoch(self) -> None:
        for _ in self.batches:
            pass

    def time(self) -> None:
        begin = time.perf_counter()
        while not self.is_bare and time.perf_counter() - begin < LEAD_SECONDS:
            next(self.endless)
        begin = time.perf_counter()
        if self.is_bare:
            self.epoch()
        else:
            deque(islice(self.endless, -(-self.count // BATCH)), maxlen=0)
        self.rates.append(self.count / (time.perf_counter() - begin))


def sums_of(batches: Any) -> list[float]:
    """Return the sum of each tensor of a batch over an epoch, whatever the order."""
    sums: list[float] = []
    for batch in batches:
        numbers = [each.double().sum().item() for each in tensors(batch)]
        sums = [a + b for a, b in zip(sums or [0.0] * len(numbers), numbers, strict=True)]
    return sums


def are_other(sums: list[float], expected: list[float]) -> bool:
    """Return whether these are sums of other samples: the order of adding changes the last digits."""
    return any(abs(a - b) > 1e-6 * abs(a) for a, b in zip(sums, expected, strict=True))


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch. Texts of unequal lengths are padded to others in other batches, by zeros."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from tensors(part)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from tensors(part)


def measure(
    kind: str, names: list[str], rounds: int, share: float, warm_up_seconds: float
) -> dict[str, Side]:
    count = max(BATCH, int(KINDS[kind][1] * share))
    with ExitStack() as opened:
        sides = {name: Side(kind, SIDES[name], count, opened) for name in names}
        expected = None
        for name, side in sides.items():
            sums = sums_of(side.batches)
            expected = expected or sums
            if not side.is_bare and are_other(sums, expected):
                raise SystemExit(f"{kind}: {name} gives other samples")
            side.settle(15 * warm_up_seconds if name == "Penstock" else warm_up_seconds)
        for number in range(rounds):
            for side in random.Random(number).sample(list(sides.values()), len(sides)):
                side.time()
        return sides


def report(kind: str, sides: dict[str, Side]) -> None:
    print(f"\n{kind:34} {'samples/s':>10} {'least':>8} {'most':>8}")
    for name, side in sides.items():
        print(
            f"{name:34} {statistics.median(side.rates):10,.0f} {min(side.rates):8,.0f} {max(side.rates):8,.0f}"
        )
    of_torch = [name for name in sides if name.startswith("DataLoader")]
    for name, other in RATIOS:
        if other is None and of_torch:
            other = max(of_torch, key=lambda each: statistics.median(sides[each].rates))
        if name in sides and other in sides:
            ratios = sorted(a / b for a, b in zip(sides[name].rates, sides[other].rates, strict=True))
            print(
                f"{name} / {other}: {statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it runs, not how fast"
    )
    options = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    print(f"{datetime.date.today()}  {platform.machine()}, {cores} cores, Python {platform.python_version()}")
    rounds, share, seconds = (1, 0.02, 0.0) if options.quick else (options.rounds, 1.0, 2.0)
    for kind in options.data:
        report(kind, measure(kind, options.sides, rounds, share, seconds))


if __name__ == "__main__":
    main()
