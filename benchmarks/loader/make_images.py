"""Make the JPEG folder that the image benchmarks read, from Debian's wallpaper photographs.

    python benchmarks/loader/make_images.py            # writes benchmarks/.cache/images
    python benchmarks/loader/make_images.py --bytes 225000 --out benchmarks/.cache/images-225

Random crops of about 500 x 400 pixels (the mean size of ImageNet's files) of real photographs, saved at a
quality chosen for each so that the files have 100 to 110 KB on average, in an image folder of ten labels. Where
--bytes says otherwise, they have as many more pixels as bytes.
The same seed makes the same files with the same OpenCV. Needs apt-get, dpkg and opencv-python-headless.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

PACKAGES = ("mate-backgrounds", "plasma-workspace-wallpapers", "lomiri-wallpapers-20.04", "ukui-wallpapers")
CACHE = Path(__file__).resolve().parent.parent / ".cache"
IMAGES = CACHE / "images"
SMALLEST_PHOTOGRAPH_PIXELS = 1200 * 900
TARGET_BYTES = 112_000
LABELS = 10


def fetch_photographs(cache: Path) -> list[Path]:
    """Download and unpack the wallpaper packages once; return the paths of their photographs, sorted."""
    packages, unpacked = cache / "packages", cache / "wallpapers"
    if not unpacked.exists():
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=packages, check=True)
        unpacking = cache / "wallpapers.part"
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(unpacking)], check=True)
        unpacking.rename(unpacked)
    return sorted(path for path in unpacked.rglob("*.jpg") if path.is_file() and not path.is_symlink())


def encode_to_size(pixels: NDArray[np.uint8], target_bytes: int) -> bytes:
    """Return the JPEG (4:2:0, as cameras and ImageNet have it) nearest to the target among eleven qualities."""
    candidates = []
    for quality in (70, 75, 80, 84, 87, 90, 92, 94, 96, 97, 98):
        _, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])
        candidates.append(encoded.tobytes())
        if len(candidates[-1]) > target_bytes:
            break
    return min(candidates, key=lambda encoded: abs(len(encoded) - target_bytes))


def make_images(root: Path, cache: Path, count: int, seed: int, target_bytes: int = TARGET_BYTES) -> None:
    """Write `count` crops below root/<label>/; crops whose file would lie far from the target are redrawn."""
    scale = (target_bytes / TARGET_BYTES) ** 0.5
    rng = np.random.default_rng(seed)
    photographs = []
    for path in fetch_photographs(cache):
        pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if pixels is not None and pixels.shape[0] * pixels.shape[1] >= SMALLEST_PHOTOGRAPH_PIXELS:
            photographs.append(pixels.astype(np.uint8, copy=False))
    print(f"{len(photographs)} photographs")
    for label in range(LABELS):
        (root / f"label{label}").mkdir(parents=True, exist_ok=True)
    written, total_bytes = 0, 0
    while written < count:
        photograph = photographs[rng.integers(len(photographs))]
        width, height = int(scale * rng.normal(500, 40)), int(scale * rng.normal(400, 40))
        # Photographs of 4K and more are softer per pixel than ImageNet's: shrink some first.
        shrink = rng.uniform(1.0, max(1.0, min(photograph.shape[0] / 600, photograph.shape[1] / 750)))
        shrunk = cv2.resize(photograph, None, fx=1 / shrink, fy=1 / shrink, interpolation=cv2.INTER_AREA)
        if shrunk.shape[0] < height or shrunk.shape[1] < width:
            continue
        top = rng.integers(shrunk.shape[0] - height + 1)
        left = rng.integers(shrunk.shape[1] - width + 1)
        crop = np.ascontiguousarray(shrunk[top : top + height, left : left + width]).astype(
            np.uint8, copy=False
        )
        encoded = encode_to_size(crop, target_bytes)
        if not 80 / 112 <= len(encoded) / target_bytes <= 180 / 112:
            continue
        (root / f"label{written % LABELS}" / f"{written:05d}.jpg").write_bytes(encoded)
        written, total_bytes = written + 1, total_bytes + len(encoded)
    print(f"{written} files in {root}, {total_bytes / written:,.0f} bytes on average")


def draw_images(root: Path, count: int, height: int, width: int, labels: int = LABELS) -> None:
    """Write JPEG files of smooth random pictures, whose size is about that of photographs, below root/<label>/."""
    rng = np.random.default_rng(0)
    for number in range(count):
        place = root / f"label{number % labels}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        picture = cv2.add(picture, rng.integers(0, 24, picture.shape, np.uint8))
        cv2.imwrite(str(place / f"{number:05d}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 90])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bytes", type=int, default=TARGET_BYTES, help="of a file, about (default: %(default)s)"
    )
    arguments = parser.parse_args()
    make_images(arguments.out, arguments.cache, arguments.count, arguments.seed, arguments.bytes)


if __name__ == "__main__":
    main()
