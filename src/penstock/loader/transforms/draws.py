"""The random numbers of the built-in transforms, drawn for a whole batch at once.

Each number is keyed by seed, transform, epoch and sample (`penstock.plan.random`), so that a sample gets
the same crop on any thread, in any batch, on any rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.geometry import TRIES
from penstock.loader.transforms.steps import RandomResizedCrop
from penstock.plan.random import draw_uniform


class Draws(NamedTuple):
    """All random numbers of the samples of one batch, for one pipeline."""

    epoch: int
    #: int64[n], the samples the rows belong to.
    samples: NDArray[np.int64]
    #: float64[n, numbers], of each sample those of all transforms, one after the other (`StepNumbers.column`).
    numbers: NDArray[np.float64]


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
