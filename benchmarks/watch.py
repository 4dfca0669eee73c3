"""What it costs to watch a loader.

    python benchmarks/watch.py [--quick]

Iterates the same batches bare, through a generator that only hands them on (the least that a wrapper in
Python can cost), and watched; in turns. Prints the cost per step as median, 5th and 95th percentile over
rounds; the bare loop is subtracted round by round. Target: under 20 us a step. Warm: the first round is not
counted, and with it the copies of the first batches, which are made once in a run.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterable, Iterator
from datetime import date

import numpy as np

from penstock.measure.watch import watch


def main(arguments: list[str] | None = None) -> None:
    """Check that batches come out as they are, time the loops, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it runs, not how fast"
    )
    quick = parser.parse_args(arguments).quick
    rounds, steps = (1, 100) if quick else (50, 20_000)
    batches = [np.zeros(64) for _ in range(steps)]
    contenders: dict[str, Iterable[object]] = {
        "bare loop": batches,
        "handed on by a generator": Handed(batches),
        "watched": watch(batches, quiet=True),
    }
    assert all(one is other for one, other in zip(contenders["watched"], batches, strict=True)), (
        "same batches"
    )

    seconds = {name: np.empty(rounds + 1) for name in contenders}
    for number in range(rounds + 1):
        for name, loader in contenders.items():
            begin = time.perf_counter()
            for _ in loader:
                pass
            seconds[name][number] = (time.perf_counter() - begin) / steps

    print(
        f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, {steps} steps x {rounds}"
    )
    print(f"{'cost per step over the bare loop':34}{'median':>9}{'p5':>9}{'p95':>9}")
    for name, each in seconds.items():
        over = each if name == "bare loop" else each - seconds["bare loop"]
        median, low, high = np.percentile(over[1:], [50, 5, 95]) * 1e6
        print(f"{name:34}{median:9.4f}{low:9.4f}{high:9.4f}  us/step")


class Handed:
    """Hands on what it is given."""

    def __init__(self, batches: Iterable[object]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[object]:
        yield from (batch for batch in self.batches)


if __name__ == "__main__":
    main()
