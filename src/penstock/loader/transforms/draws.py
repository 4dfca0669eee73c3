"""The random numbers of the built-in transforms, drawn for a whole batch at once.

Each number is keyed by seed, transform, epoch and sample (`penstock.plan.random`), so that a sample gets
the same crop on any thread, in any batch, on any rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.geometry import Box
from penstock.loader.transforms.steps import RandomResizedCrop
from penstock.plan.random import draw_uniform

TRIES = 10


class Draws(NamedTuple):
    """All random numbers of the samples of one batch, for one pipeline."""

    epoch: int
    #: int64[n], the samples the rows belong to.
    samples: NDArray[np.int64]
    #: By place of the transform in the list: one row of numbers per sample.
    rows: dict[int, NDArray[np.float64]]


def draw_crops(
    crop: RandomResizedCrop, key: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Draw what `place_crop` needs.

    Returns: float64[n, 22]: per try the crop's width and height as shares of the square root of the
        picture's area, then where it lies, downwards and to the right, each uniform in [0, 1).
    """
    uniform = draw_uniform(key, epoch, samples, 2 * TRIES + 2)
    low, high = crop.scale
    share = low + (high - low) * uniform[:, :TRIES]
    low, high = np.log(crop.ratio)
    ratio = np.exp(low + (high - low) * uniform[:, TRIES : 2 * TRIES])
    shape = np.stack([np.sqrt(share * ratio), np.sqrt(share / ratio)], axis=2)
    return np.concatenate([shape.reshape(len(uniform), 2 * TRIES), uniform[:, 2 * TRIES :]], axis=1)


def place_crop(height: int, width: int, numbers: list[float], ratio: tuple[float, float]) -> Box:
    """Return the crop that a row of `draw_crops` means in a picture of this size."""
    root = (height * width) ** 0.5
    for attempt in range(0, 2 * TRIES, 2):
        crop_width = round(root * numbers[attempt])
        crop_height = round(root * numbers[attempt + 1])
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(numbers[-2] * (height - crop_height + 1))
            left = int(numbers[-1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    low, high = ratio
    if width / height < low:
        crop_width, crop_height = width, max(1, round(width / low))
    elif width / height > high:
        crop_width, crop_height = max(1, round(height * high)), height
    else:
        crop_width, crop_height = width, height
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)
