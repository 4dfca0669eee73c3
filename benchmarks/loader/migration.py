"""Samples per second of `pt.Loader(dataset)` beside PyTorch's DataLoader on the same data set, nothing changed.

    python benchmarks/loader/make_images.py      # once: photographs
    python benchmarks/loader/migration.py [--quick] [--rounds N] [--data NAME...] [--sides NAME...]

Data sets as their users write them (Pillow and torch, as torchvision does): photographs to RandomResizedCrop 224,
64 x 64 JPEGs, files of 4 KB, rows of 1 KB in memory one by one and by __getitems__, and samples that each wait 20 ms;
"folder of ..." gives Penstock the folder in place of the data set. Page cache warm, batches of 64.

Sides: a DataLoader with 0, 1, 2 and 4 persistent workers, Penstock with its own number of threads, and with 1, 2, 4 and
16. Each is a process of its own, in turn, in another order each round; nothing of the others runs meanwhile. First both
must give the same samples. A turn times whole epochs for a second, at least one. Penstock's loader is made anew for it,
and has run epochs for ten seconds before, in which it finds its number of threads (for five with a fixed number), and
longer while it tries worker processes or the training's own thread; what it has read ahead when the time begins, it has
read ahead when it ends.
Printed: samples per second (median, least, most over rounds), processor milliseconds a sample, and Penstock's ratios
to the best DataLoader and to the best fixed number of threads, round by round.
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
from pathlib import Path

from images import HERE, Contender
from peer_protocol import CACHE, IMAGES

DATA = (
    "photographs", "thumbnails", "files", "rows", "row lists", "sleeping", "folder of thumbnails",
    "folder of files",
)  # fmt: skip
#: Name, side and workers (0 of Penstock: as it likes).
SIDES = (
    *((f"DataLoader, {workers} workers", "torch", workers) for workers in (0, 1, 2, 4)),
    ("Penstock", "penstock", 0),
    *((f"Penstock, decoders={threads}", "penstock", threads) for threads in (1, 2, 4, 16)),
)
#: A DataLoader that reads these in its own process would take minutes.
_LEAST_WORKERS = {"sleeping": 4}
#: Pillow gives the same pixels; Penstock rounds the normalised numbers once instead of three times.
_TOLERANCES = {"folder of thumbnails": 1e-5}


def contenders(data: str, images: Path, chosen: list[str]) -> list[Contender]:
    command = [sys.executable, "peer_migration.py", "--images", str(images), "--data", data]
    return [
        Contender(name, [*command, "--side", side, "--workers", str(workers)])
        for name, side, workers in SIDES
        if side != "torch" or workers >= _LEAST_WORKERS.get(data, 0)
        if not chosen or name in chosen
    ]


def check(data: str, images: Path) -> None:
    """End the program unless both sides give the same samples."""
    command = [sys.executable, "peer_migration.py", "--images", str(images), "--data", data]
    told = subprocess.run(
        [*command, "--side", "check", "--workers", "0"],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src")},
        capture_output=True,
        text=True,
    )
    if told.returncode or float(told.stdout) > _TOLERANCES.get(data, 0.0):
        raise SystemExit(f"{data}: the two sides give other samples: {told.stdout}{told.stderr}")


def report(data: str, sides: list[Contender]) -> None:
    print(f"\n{data:34} {'samples/s':>10} {'least':>8} {'most':>8} {'CPU ms/sample':>14}")
    for side in sides:
        milliseconds = statistics.median(side.processor_milliseconds)
        print(
            f"{side.name:34} {statistics.median(side.rates):10,.0f} {min(side.rates):8,.0f} {max(side.rates):8,.0f} "
            f"{milliseconds:14.3f}"
        )
    (own,) = (side for side in sides if side.name == "Penstock")
    for kind in ("DataLoader", "Penstock, decoders="):
        others = [side for side in sides if side.name.startswith(kind)]
        if not others:
            continue
        best = max(others, key=lambda side: statistics.median(side.rates))
        ratios = sorted(mine / other for mine, other in zip(own.rates, best.rates, strict=True))
        print(
            f"Penstock / {best.name}: {statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--sides", nargs="+", default=[], help="names of sides, Penstock always")
    parser.add_argument("--quick", action="store_true", help="one round: shows that it runs, not how fast")
    options = parser.parse_args(argv)
    if not options.images.exists():
        raise SystemExit("no images: run benchmarks/loader/make_images.py first")
    cores = len(os.sched_getaffinity(0))
    print(f"{datetime.date.today()}  {platform.machine()}, {cores} cores, Python {platform.python_version()}")
    order = random.Random(0)
    for data in options.data:
        check(data, options.images)
        sides = contenders(data, options.images, [*options.sides, "Penstock"] if options.sides else [])
        try:
            for side in sides:
                side.start(CACHE / "migration.log")
            for _ in range(1 if options.quick else options.rounds):
                for side in order.sample(sides, len(sides)):
                    side.run()
        finally:
            for side in sides:
                side.stop()
        report(data, sides)


if __name__ == "__main__":
    main()
