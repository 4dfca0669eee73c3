"""A folder of images of a published size, made of noise: what figures that time reading are repeated on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.store import FlatFolder

#: Of ImageNet's images on average. Source: Chien et al. 2018, section I.
WIDTH, HEIGHT = 482, 415
#: With this one a file of the noise below has about 112 KB, as the images of section IV.A.
_QUALITY = 90


@contextmanager
def image_files(count: int) -> Iterator[FlatFolder]:
    """Yield so many JPEG files of about 112 KB in a folder of their own, where temporary files go (TMPDIR).

    Smooth noise with a little fine noise, from a fixed seed: such an image takes a decoder as long as a photograph of
    its size and bytes.
    """
    import cv2

    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="penstock-paper-") as folder:
        for number in range(count):
            coarse = draw.integers(0, 256, (HEIGHT // 32, WIDTH // 32, 3), np.uint8)
            smooth = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
            grain = draw.integers(0, draw.integers(40, 96), smooth.shape, np.uint8)
            _, encoded = cv2.imencode(".jpg", cv2.add(smooth, grain), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
            Path(folder, f"{number:06d}.jpg").write_bytes(encoded.tobytes())
        yield FlatFolder(folder)
