"""What an image with its mask costs, beside an image alone and a mask alone.

    python benchmarks/loader/pairs.py [--quick] [--rounds N] [--images N]

Photographs and masks of 21 classes, about 500 x 400, RandomResizedCrop 224 and a flip, batches of 32, one decoding
thread, the page cache warm. Images alone and pairs are an epoch of a loader; masks alone a bare loop of the same
library calls: read, decode, resample to the nearest pixels, flip. They are run in turns, in another order each round.
Printed: microseconds of processor time per sample, and the ratio of the pair to the sum of the two others in the same
round as median, min to max. Target: 1.1 at most.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from penstock import Loader
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.store import ImagesAndMasks, Source

STEPS = [RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor(), Normalize((0.5,) * 3, (0.2,) * 3)]
BATCH = 32


def write(folder: Path, count: int) -> None:
    """Write `images` and their `masks`."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(count):
        height, width = int(rng.normal(400, 40)), int(rng.normal(500, 40))
        down, across = np.mgrid[0:height, 0:width]
        waves = [np.sin(across / a + down / b) for a, b in rng.uniform(5, 40, (3, 2))]
        picture = 128 + 90 * np.stack(waves, axis=2) + rng.normal(0, 14, (height, width, 3))
        mask = (10 + 10 * waves[0] * waves[1]).astype(np.uint8)
        pixels = np.clip(picture, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "images" / f"{number}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 88])
        cv2.imwrite(str(folder / "masks" / f"{number}.png"), mask)


def epoch_of(source: str | Source) -> float:
    """Return the processor seconds of an epoch after the first."""
    with Loader(source, batch_size=BATCH, epochs=3, transforms=STEPS, decoders=1, report=None) as loader:
        for _ in loader:
            pass
        began = time.process_time()
        for _ in loader:
            pass
        return time.process_time() - began


def masks_alone(folder: Path, count: int) -> float:
    """Return the processor seconds of reading, decoding and resampling each mask once."""
    began = time.process_time()
    for number in range(count):
        data = np.fromfile(folder / "masks" / f"{number}.png", np.uint8)
        mask = np.asarray(cv2.imdecode(data, cv2.IMREAD_UNCHANGED))
        height, width = (3 * side // 4 for side in mask.shape)
        cv2.flip(cv2.resize(mask[:height, :width], (224, 224), interpolation=cv2.INTER_NEAREST), 1)
    return time.process_time() - began


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not how fast")
    options = parser.parse_args(argv)
    count, rounds = (32, 1) if options.quick else (options.images, options.rounds)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        write(folder, count)
        pairs = ImagesAndMasks(folder / "images", folder / "masks")
        runs = {
            "image": lambda: epoch_of(str(folder / "images")),
            "mask": lambda: masks_alone(folder, count),
            "both": lambda: epoch_of(pairs),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(list(runs), len(runs)):
                seconds[name].append(runs[name]())
    for name, each in seconds.items():
        print(f"{name:6} {1e6 * statistics.median(each) / count:8.0f} us of processor time a sample")
    ratios = sorted(
        both / (image + mask)
        for both, image, mask in zip(seconds["both"], seconds["image"], seconds["mask"], strict=True)
    )
    middle = statistics.median(ratios)
    print(
        f"both / (image + mask): {middle:.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f}), wanted 1.1 at most: "
        f"{'reached' if middle <= 1.1 else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
