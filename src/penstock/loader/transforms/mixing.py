"""MixUp and CutMix: each image of a batch mixed with the one before it, and their labels.

Names, arguments and meaning are torchvision's (v0.2x, `torchvision.transforms.v2`). What is drawn belongs to the seed,
the epoch and the step, so that all ranks draw the same, and a run that resumes as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.transforms.sink import decode_bfloat16, encode_bfloat16
from penstock.loader.transforms.steps import check_probability
from penstock.plan.random import derive_key, generator_for
from penstock.units import is_integer


@dataclass(frozen=True, slots=True)
class MixUp:
    """Mix each image of a batch with the one before it: share * image + (1 - share) * other, and their labels likewise.

    num_classes: how many labels there are; those of a batch become float32[batch, num_classes].
    alpha: of the Beta distribution that the share of a step is drawn from. p: the share of steps that are mixed.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2017; as in torchvision.
    """

    num_classes: int
    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        _check("MixUp", self.num_classes, self.alpha, self.p)


@dataclass(frozen=True, slots=True)
class CutMix:
    """Put an area of the image before it into each image of a batch; labels are mixed by its share.

    num_classes, alpha, p: as of `MixUp`. The area is at the same place in all images of a step.

    Source: Yun et al., "CutMix", 2019; as in torchvision.
    """

    num_classes: int
    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        _check("CutMix", self.num_classes, self.alpha, self.p)


def _check(owner: str, num_classes: object, alpha: object, p: object) -> None:
    if not is_integer(num_classes) or num_classes < 1:
        raise ConfigError(f"{owner}(num_classes={num_classes!r}): it is the number of labels, 1 or more")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"{owner}(alpha={alpha!r}): alpha is a number above zero")
    check_probability(owner, p)


def check_mix(mix: Any) -> tuple[MixUp | CutMix, ...]:
    """Return what `mix_images=` names, one of which is drawn for each step; torchvision's as ours.

    Raises: ConfigError for anything else, and for different numbers of classes.
    """
    given = mix.transforms if type(mix).__name__ == "RandomChoice" else mix
    several = given if isinstance(given, Sequence) else [given]
    found = tuple(map(_ours, several))
    if not found or len({each.num_classes for each in found}) > 1:
        raise ConfigError(
            f"mix_images is {mix!r:.200}; it is a MixUp or CutMix, or a list of some for the same num_classes"
        )
    return found


def _ours(step: Any) -> MixUp | CutMix:
    if isinstance(step, MixUp | CutMix):
        return step
    kinds: dict[str, type[MixUp | CutMix]] = {"MixUp": MixUp, "CutMix": CutMix}
    kind = kinds.get(type(step).__name__)
    if kind is None or not hasattr(step, "alpha"):
        raise ConfigError(
            f"mix_images is {step!r:.200}; it is MixUp(num_classes) or CutMix(num_classes) of "
            "penstock.loader.transforms, or torchvision's"
        )
    return kind(step.num_classes, step.alpha)


class Drawn(NamedTuple):
    """What is done to a step.

    share: of an image's own label. area: top, left, bottom, right; None: all of it, by the share.
    """

    share: float
    area: tuple[int, int, int, int] | None


class Mixing:
    """What is drawn for each step of a run.

    layout: of images.
    """

    def __init__(self, steps: tuple[MixUp | CutMix, ...], seed: int, layout: str) -> None:
        self.steps, self._layout = steps, layout
        self.num_classes = steps[0].num_classes
        self._key = derive_key(seed, "mix")

    def draw(self, epoch: int, step: int, height: int, width: int) -> Drawn | None:
        """Return what is done to the images of a step, the same on all ranks; None where nothing is."""
        rng = generator_for(self._key, epoch, step)
        chosen = self.steps[int(rng.integers(len(self.steps)))]
        if rng.random() >= chosen.p:
            return None
        share = float(rng.beta(chosen.alpha, chosen.alpha))
        if isinstance(chosen, MixUp):
            return Drawn(share, None)
        column, row = int(rng.integers(width)), int(rng.integers(height))
        reach = 0.5 * math.sqrt(1.0 - share)
        across, down = int(reach * width), int(reach * height)
        top, bottom = max(row - down, 0), min(row + down, height)
        left, right = max(column - across, 0), min(column + across, width)
        return Drawn(1.0 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))

    def size_of(self, images: NDArray[Any]) -> tuple[int, int]:
        """Return (height, width) of images, [batch, ...] in the layout."""
        height, width = images.shape[2:] if self._layout == "NCHW" else images.shape[1:3]
        return height, width

    def mix(self, drawn: Drawn, images: NDArray[Any], labels: NDArray[np.float32]) -> None:
        """Mix a batch in place. images: [n, ...], bits of bfloat16 as uint16. labels: float32[n, num_classes]."""
        if drawn.area is None:
            _mix_rows(images, drawn.share)
        else:
            top, left, bottom, right = drawn.area
            rows, columns = slice(top, bottom), slice(left, right)
            whole = images if self._layout == "NHWC" else images.transpose(0, 2, 3, 1)
            area = whole[:, rows, columns]
            last = area[-1].copy()
            for place in range(len(area) - 1, 0, -1):
                area[place] = area[place - 1]
            area[0] = last
        _mix_rows(labels, drawn.share)


def _mix_rows(array: NDArray[Any], share: float) -> None:
    """Mix each row with the one before it, the first with the last; from the last on, as none is needed any more."""
    last = _numbers(array[-1]).copy()
    for place in range(len(array) - 1, -1, -1):
        other = _numbers(array[place - 1]) if place else last
        mixed = _numbers(array[place]) * np.float32(share)
        mixed += other * np.float32(1.0 - share)
        array[place] = encode_bfloat16(mixed) if array.dtype == np.uint16 else mixed


def _numbers(row: NDArray[Any]) -> NDArray[np.float32]:
    return decode_bfloat16(row) if row.dtype == np.uint16 else row.astype(np.float32, copy=False)


def one_hot(numbers: NDArray[np.int64], num_classes: int) -> NDArray[np.float32]:
    """Return float32[n, num_classes]. Raises: ConfigError for a label that is none of the classes."""
    wrong = (numbers < 0) | (numbers >= num_classes)
    if wrong.any():
        raise ConfigError(
            f"mix_images= has num_classes={num_classes}, and a sample has the label {int(numbers[wrong][0])}: labels "
            "are from 0 on; -1 stands for none"
        )
    found = np.zeros((numbers.size, num_classes), np.float32)
    found[np.arange(numbers.size), numbers] = 1.0
    return found
