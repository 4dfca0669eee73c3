"""One epoch from a mounted slow store, with a machine that `penstock calibrate` wrote of it and without.

    make bench NAME=loader/mounted               # about one minute; ARGS="--rounds 5" for more

The store is a FUSE mount (benchmarks/loader/_slow_mount.py): 10 ms per open and 10 ms per read, which overlap, and one
wire of 30 MB/s. Each epoch has a mount of its own, so nothing is in the page cache. Batches of 64, steps of no time:
the wait is what reading and decoding take. The floor is the bytes over the wire.

Exits with a failure if the loader with the machine waits more than a quarter longer than without (medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import _slow_mount

import penstock.torch as pt
from penstock.loader.transforms import RandomResizedCrop, ToTensor
from penstock.measure.calibrate import measure_machine
from penstock.store import ImageFolder

IMAGES = Path(__file__).resolve().parent.parent / ".cache" / "images"
OPEN_SECONDS = READ_SECONDS = 10e-3
WIRE_BYTES_PER_SECOND = 30e6
MOST_LONGER = 0.25


def wait_of_epoch(images: Path, mountpoint: Path, machine: Path | None) -> float:
    """Return how long one epoch's batches were waited for, from construction on, seconds."""
    with (
        _slow_mount.mounted(images, mountpoint, OPEN_SECONDS, READ_SECONDS, WIRE_BYTES_PER_SECOND),
        pt.Loader(
            mountpoint,
            batch_size=64,
            epochs=1,
            transforms=[RandomResizedCrop(64), ToTensor()],
            machine=machine,
            report=None,
        ) as loader,
    ):
        for _ in loader:
            pass
        return loader.metrics[0].stall_seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the calibration")
    parser.add_argument("--images", type=Path, default=IMAGES, help="an image folder")
    options = parser.parse_args(arguments)
    if not options.images.is_dir():
        parser.error(f"{options.images} is missing: run python benchmarks/loader/make_images.py")
    waits: dict[str, list[float]] = {"without a machine": [], "with its machine": []}
    with tempfile.TemporaryDirectory() as folder:
        mountpoint, machine = Path(folder, "mount"), Path(folder, "machine.toml")
        mountpoint.mkdir()
        with _slow_mount.mounted(
            options.images, mountpoint, OPEN_SECONDS, READ_SECONDS, WIRE_BYTES_PER_SECOND
        ):
            source = ImageFolder(mountpoint)
            machine.write_text(measure_machine(source, max_seconds=options.seconds).to_toml())
        print("".join(line for line in machine.read_text().splitlines(keepends=True) if line.startswith("#")))
        for _ in range(options.rounds):
            waits["without a machine"].append(wait_of_epoch(options.images, mountpoint, None))
            waits["with its machine"].append(wait_of_epoch(options.images, mountpoint, machine))
    floor = source.sizes_bytes.sum() / WIRE_BYTES_PER_SECOND
    print(f"waited, seconds: median [least .. most] of {options.rounds} epochs; floor {floor:.2f}")
    for name, seconds in waits.items():
        print(f"{name:18} {statistics.median(seconds):6.2f} [{min(seconds):.2f} .. {max(seconds):.2f}]")
    without, with_machine = map(statistics.median, waits.values())
    if with_machine > (1 + MOST_LONGER) * without:
        sys.exit(f"the loader waited {with_machine / without:.2f} x as long with the machine")


if __name__ == "__main__":
    main()
