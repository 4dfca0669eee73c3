"""The random numbers of the built-in transforms, drawn for a whole batch at once.

Each number is keyed by seed, transform, epoch and sample (`penstock.plan.random`), so that a sample gets
the same crop on any thread, in any batch, on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.geometry import TRIES
from penstock.loader.transforms.steps import RandomResizedCrop
from penstock.plan.random import draw_uniform


class Draws:
    """All random numbers of the samples of one batch, for one pipeline.

    epoch, samples: int64[n], what they are for.
    draw: called for them when they are first asked for: a compiled loop draws its own.
    """

    def __init__(
        self, epoch: int, samples: NDArray[np.int64], draw: Callable[[], NDArray[np.float64]]
    ) -> None:
        self.epoch = epoch
        self.samples = samples
        self._draw = draw
        self._numbers: NDArray[np.float64] | None = None

    @property
    def numbers(self) -> NDArray[np.float64]:
        """float64[n, numbers], of each sample those of all transforms, one after the other (`StepNumbers.column`)."""
        if self._numbers is None:  # two threads may both draw: the same numbers
            self._numbers = self._draw()
        return self._numbers


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
    low, high = log_ratio(crop)
    logs = low + (high - low) * uniform[:, TRIES : 2 * TRIES]
    # The C library's: NumPy's own differs in the last bit, and from processor to processor.
    ratio = np.array([math.exp(each) for each in logs.ravel().tolist()]).reshape(logs.shape)
    shape = np.stack([np.sqrt(share * ratio), np.sqrt(share / ratio)], axis=2)
    return np.concatenate([shape.reshape(len(uniform), 2 * TRIES), uniform[:, 2 * TRIES :]], axis=1)


def log_ratio(crop: RandomResizedCrop) -> tuple[float, float]:
    """Return the logarithms of a crop's least and largest ratio of width to height."""
    low, high = np.log(crop.ratio).tolist()
    return low, high
