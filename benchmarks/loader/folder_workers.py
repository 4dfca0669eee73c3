"""What workers="auto" chooses for a folder whose transforms are Python code, beside the rates of both choices.

    make bench NAME=loader/folder_workers            # two minutes
    python benchmarks/loader/folder_workers.py [--images FOLDER] [--rounds N] [--quick]

Photographs (make_images.py), RandomResizedCrop 224, then a function that holds the interpreter's lock for some
milliseconds; batches of 64. Three loaders: as it is by default, which has as long as it needs to find out what is
fastest; with threads; with as many worker processes as there are processors. All must give the same bits. They take
turns of some seconds, in another order each round, as in promise.py.

Printed: what the first has reported of its choice; images per second of each (median, least, most over rounds); and the
ratio of the first to the faster of the others, round by round. Nothing else should run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peer_protocol import IMAGES
from promise import Side, settle
from workers import BATCH, are_other, sums_of
from workers_data import levelled

import penstock.torch
from penstock.loader.transforms import RandomResizedCrop, ToTensor

STEPS = [RandomResizedCrop(224), levelled, ToTensor()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs")
    options = parser.parse_args(argv)
    if not options.images.exists():
        raise SystemExit("no images: run benchmarks/loader/make_images.py first")
    rounds, seconds = (1, 0.0) if options.quick else (options.rounds, 1.0)
    count, cores = len(list(options.images.glob("*/*.jpg"))), len(os.sched_getaffinity(0))
    lines: list[str] = []
    how: dict[str, dict[str, Any]] = {
        'workers="auto"': {"report": lines.append},
        "threads": {"workers": "threads", "report": None},
        f"workers={cores}": {"workers": cores, "report": None},
    }
    sides: dict[str, Side] = {}
    with ExitStack() as opened:
        for name, of_side in how.items():
            loader = penstock.torch.Loader(
                options.images, batch_size=BATCH, epochs=None, transforms=STEPS, **of_side
            )
            sides[name] = Side(opened.enter_context(loader), count)
        first, *others = sides.values()
        expected = sums_of(first.batches)
        if any(are_other(sums_of(side.batches), expected) for side in others):
            raise SystemExit("processes give other samples than threads")
        settle(first.batches, 10 * seconds)
        for number in range(rounds):
            for side in random.Random(number).sample([first, *others], len(sides)):
                side.rates.append(side.run(3 * seconds))
    print(f"{datetime.date.today()}  {platform.machine()}, {cores} cores, Python {platform.python_version()}")
    print("\n".join(line for line in lines if line.endswith("from here on")) or "threads, without a trial")
    print(f"\n{'':20} {'images/s':>10} {'least':>8} {'most':>8}")
    for name, side in sides.items():
        print(
            f"{name:20} {statistics.median(side.rates):10,.0f} {min(side.rates):8,.0f} {max(side.rates):8,.0f}"
        )
    ratios = sorted(
        mine / max(theirs)
        for mine, *theirs in zip(first.rates, *(side.rates for side in others), strict=True)
    )
    print(f"auto / the faster: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
