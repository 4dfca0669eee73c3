"""Whether Penstock is ever more than 10 % slower than PyTorch's DataLoader at its best, on eight kinds of data set.

    python benchmarks/loader/promise.py [--rounds N] [--data NAME...] [--quick]    # about seven minutes

Data sets as their users write them (workers_data.py), batches of 64. First DataLoader alone: with 0, 1, 2 and 4
persistent workers, and 8 and 16 where samples wait for a store, each for half a second after an epoch; the best stays
open. Beside it: `penstock.torch.DataLoader` with the same arguments, the one line to change, and
`penstock.torch.Loader` as it is by default, which has ten seconds to find out what is fastest, and longer where it
tries worker processes or the training's own thread. They take turns, in another order each round: whole epochs for 0.7
seconds. A turn is over when the side has read ahead again what it had read ahead as the turn began: `Loader` loads on
after an epoch, with the processors that the next side is measured on. All give the same samples, which is checked
before.

Printed: samples per second of the best DataLoader, and both ratios to it, as medians with the least and the most over
rounds, and who makes `Loader`'s batches, once that is decided; at the end the least median. Nothing else should run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import sys
import time
import warnings
from contextlib import ExitStack
from typing import Any

import torch.utils.data
from workers import BATCH, are_other, sums_of
from workers_data import KINDS

import penstock.torch

KEPT = 0.9
#: What is said of each kind, and the kind.
PROMISED = {
    "images: JPEGs, resized by PIL": "pictures",
    "PIL and Python, which hold the lock": "PIL and Python",
    "tensors in memory": "small tensors",
    "dicts of arrays, numbers, text": "dicts",
    "unequal lengths, padded by collate_fn": "tokeniser, collate_fn",
    "windows of tokens, a memory map": "windows of tokens",
    "objects of one's own": "objects",
    "files that take 5 ms to open": "waiting for files",
}
_WORKERS = {"waiting for files": (2, 4, 8, 16)}


class Side:
    """A loader, and its rates so far."""

    def __init__(self, batches: Any, count: int) -> None:
        self.batches, self.count, self.rates = batches, count, list[float]()

    def run(self, seconds: float) -> float:
        """Run whole epochs, one at least, until nothing is read ahead any more; return samples a second."""
        begin, epochs = time.perf_counter(), 0
        while not epochs or time.perf_counter() - begin < seconds:
            epochs += 1
            for _ in self.batches:
                pass
            del _  # whose place it loads into, too
        while loads(self.batches):
            time.sleep(1e-3)
        return epochs * self.count / (time.perf_counter() - begin)


def loads(batches: Any) -> bool:
    """Return whether a side loads although nobody asks for a batch: DataLoaders do so within an epoch only."""
    if not isinstance(batches, penstock.torch.Loader):
        return False
    engine = batches._parts.engine
    return engine._scheduler.loads_running > 0 or not engine._loads.empty()


def tries(loader: penstock.torch.Loader) -> bool:
    """Return whether a loader tries worker processes, or the training's own thread, and has not decided yet."""
    trial, own = loader._parts.switching, loader._parts.own_thread
    if own is not None and own.is_trying:
        return True
    return trial is not None and trial._starting is not None and not trial._is_settled


def settle(loader: penstock.torch.Loader, seconds: float) -> None:
    """Run whole epochs for so long, and until the loader has tried nothing for 2 s: one trial may follow another."""
    begin = tried = time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds or now - tried < min(2.0, seconds):
        for _ in loader:
            pass
        tried = time.perf_counter() if tries(loader) else tried


def of_torch(kind: str, count: int, workers: int, made: Any = torch.utils.data.DataLoader) -> Side:
    """Return a DataLoader, PyTorch's or Penstock's."""
    data, _, collate = KINDS[kind]
    how = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    return Side(made(data(count), BATCH, shuffle=True, **how), count)


def best_of_torch(kind: str, count: int, seconds: float) -> tuple[int, Side]:
    """Return DataLoader with as many workers as are fastest."""
    found: list[tuple[float, int, Side]] = []
    for workers in _WORKERS.get(kind, (0, 1, 2, 4)):
        side = of_torch(kind, count, workers)
        side.run(0)
        found.append((side.run(0.5 * seconds), workers, side))
        found = [max(found, key=lambda each: each[0])]  # whose workers end with it
    return found[0][1:]


def measure(kind: str, rounds: int, share: float, seconds: float) -> tuple[int, list[Side], list[str]]:
    """Return DataLoader's best number of workers, the three sides, and what `Loader` said of who makes its batches."""
    data, usual, collate = KINDS[kind]
    count = max(BATCH, int(usual * share))
    lines: list[str] = []
    with ExitStack() as opened:
        workers, best = best_of_torch(kind, count, seconds)
        one_line = of_torch(kind, count, workers, penstock.torch.DataLoader)
        loader = penstock.torch.Loader(
            data(count), batch_size=BATCH, epochs=None, collate_fn=collate, report=lines.append
        )
        sides = [best, one_line, Side(opened.enter_context(loader), count)]
        expected = sums_of(best.batches)
        for side in sides[1:]:
            if are_other(sums_of(side.batches), expected):
                raise SystemExit(f"{kind}: {side.batches!r} gives other samples")
        settle(loader, 10 * seconds)
        for number in range(rounds):
            for side in random.Random(number).sample(sides, len(sides)):
                side.rates.append(side.run(0.7 * seconds))
    return workers, sides, [line for line in lines if line.endswith("from here on")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--data", nargs="+", default=list(PROMISED.values()), choices=list(PROMISED.values()))
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs")
    options = parser.parse_args(argv)
    rounds, share, seconds = (1, 0.01, 0.0) if options.quick else (options.rounds, 0.25, 1.0)
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores, which is tried
    torch.set_num_threads(1)  # as DataLoader's workers do
    print(
        f"{datetime.date.today()}  {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}; rates beside the best DataLoader's\n"
    )
    print(f"{'':38}{'DataLoader: samples/s':>24}{'one line changed':>24}{'Loader':>24}")
    least = 10.0
    for name, kind in PROMISED.items():
        if kind not in options.data:
            continue
        workers, (best, *ours), choices = measure(kind, rounds, share, seconds)
        found = f"{statistics.median(best.rates):,.0f}, {workers} workers"
        for side in ours:
            ratios = sorted(mine / theirs for mine, theirs in zip(side.rates, best.rates, strict=True))
            median = statistics.median(ratios)
            least = min(least, median)
            found += f"{f'{median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})':>24}"
        print("\n    ".join([f"{name:38}{found:>72}", *choices]), flush=True)
    print(f"\nleast of the medians: {least:.2f} (promised {KEPT})")
    if least < KEPT and not options.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
