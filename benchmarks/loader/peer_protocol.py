"""How a peer is driven: it warms up, says "ready", then runs an epoch for each line it is sent.

Standard library alone, because every peer imports it from its own environment.
"""

from __future__ import annotations

import argparse
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


def arguments(**options: type) -> argparse.Namespace:
    """Parse a peer's command line: the folder of images, and `options` by name and type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, default=IMAGES)
    for name, kind in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser.parse_args()


def serve(run_epoch: Callable[[], int]) -> None:
    """Run one epoch to warm up, then one for each line "epoch" on standard input; answer images and seconds.

    run_epoch: returns how many images it made.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the peer's library prints must not mix with the answers
    run_epoch()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() != "epoch":
            break
        begin = time.perf_counter()
        images = run_epoch()
        print(images, time.perf_counter() - begin, file=answers, flush=True)
