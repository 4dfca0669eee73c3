"""How a peer is driven: it warms up, says "ready", then runs an epoch for each line it is sent.

Standard library alone, because every peer imports it from its own environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
IMAGES = CACHE / "images"
BATCH = 64
SIZE = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
#: Brightness, contrast, saturation and hue.
JITTER = (0.4, 0.4, 0.4, 0.1)


def arguments(**options: type) -> argparse.Namespace:
    """Parse a peer's command line: the folder of images, and `options` by name and type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, default=IMAGES)
    for name, kind in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser.parse_args()


def _nothing() -> None:
    pass


def serve(
    run_epoch: Callable[[], int], prepare: Callable[[], None] = _nothing, rest: Callable[[], None] = _nothing
) -> None:
    """Run one epoch to warm up, then one for each line "epoch" on standard input; answer images, seconds
    and processor seconds.

    run_epoch: returns how many images it made. prepare: called before each, off the clock. rest: called after each,
        off the clock, before the answer: no thread may work on while another peer is timed.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the peer's library prints must not mix with the answers
    prepare()
    run_epoch()
    rest()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() != "epoch":
            break
        prepare()
        begin, worked = time.perf_counter(), processor_seconds()
        images = run_epoch()
        seconds = time.perf_counter() - begin
        worked = processor_seconds() - worked
        rest()
        print(images, seconds, worked, file=answers, flush=True)


def processor_seconds() -> float:
    """Return the processor time of this process and of all below it that are alive."""
    ticks, family = 0, [os.getpid()]
    for process in family:  # grows while it is walked
        folder = Path(f"/proc/{process}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        for children in folder.glob("task/*/children"):
            family.extend(map(int, children.read_text().split()))
    return ticks / os.sysconf("SC_CLK_TCK")
