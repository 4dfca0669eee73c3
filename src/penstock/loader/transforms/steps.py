"""The transforms a user names, as values: what they do to a sample, not how.

Meaning and argument order are torchvision's (v0.2x, `torchvision.transforms`); `penstock.loader.transforms`
compiles a list of them into one pass per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from penstock.errors import ConfigError
from penstock.loader.transforms.geometry import shorter_side_to
from penstock.units import is_integer

Size = int | tuple[int, int]


#: Pillow's numbers of interpolations.
_PILLOWS: dict[object, str] = {2: "bilinear", 3: "bicubic"}


def check_size(owner: str, size: object) -> Size:
    if is_integer(size):
        if size > 0:
            return int(size)
    elif isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2:
        height, width = size
        if is_integer(height) and is_integer(width) and height > 0 and width > 0:
            return int(height), int(width)
    raise ConfigError(f"{owner}(size={size!r}): size is one positive integer, or (height, width) of two")


def check_probability(owner: str, p: object) -> None:
    if not isinstance(p, Real) or not 0.0 <= float(p) <= 1.0:
        raise ConfigError(f"{owner}(p={p!r}): p is a probability between 0 and 1")


def numbers_in(values: object) -> tuple[float, ...]:
    """Return a sequence of numbers as such; nothing where it is something else."""
    try:
        return () if isinstance(values, str) else tuple(float(value) for value in values)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return ()


def _check_range(owner: str, name: str, values: object) -> tuple[float, float]:
    match numbers_in(values):
        case (low, high) if 0.0 < low <= high < math.inf:
            return low, high
    raise ConfigError(f"{owner}({name}={values!r}): {name} is (low, high) with 0 < low <= high")


def _check_channels(name: str, values: object) -> tuple[float, float, float]:
    match numbers_in(values):
        case (red, green, blue) if math.isfinite(red + green + blue):
            return red, green, blue
    raise ConfigError(
        f"Normalize({name}={values!r}): {name} is three finite numbers, for red, green and blue"
    )


def _check_interpolation(owner: str, interpolation: object) -> str:
    """Return an interpolation by its name; torchvision's `InterpolationMode` and Pillow's `Resampling` are taken."""
    name = getattr(interpolation, "value", interpolation)
    name = _PILLOWS.get(name, name) if isinstance(name, str | int) else name
    if name not in ("bilinear", "bicubic"):
        raise ConfigError(
            f'{owner}(interpolation={interpolation!r}): interpolation is "bilinear" or "bicubic"'
        )
    return str(name)


@dataclass(frozen=True, slots=True)
class DecodeRaw:
    """Take the stored bytes as the numbers that they are, in place of a picture; TensorFlow's `tf.io.decode_raw`.

    dtype: of the numbers, as NumPy names it; "<f4" and ">f4" say the order of the bytes. Batches have the loader's
        dtype=, and copying is fastest where that is the same.
    shape: of one sample; None for one axis, as long as the first sample's.

    Raises: ConfigError if dtype is no type of real numbers, or shape no tuple of sizes.
    """

    dtype: str
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        try:
            is_real = np.dtype(self.dtype).kind in "biuf"
        except TypeError:
            is_real = False
        if not is_real:
            raise ConfigError(
                f'DecodeRaw(dtype={self.dtype!r}): dtype is a type of real numbers, such as "uint8" or "<f4"'
            )
        if self.shape is not None:
            sizes = (self.shape,) if is_integer(self.shape) else self.shape
            if not isinstance(sizes, Sequence) or not all(is_integer(size) and size > 0 for size in sizes):
                raise ConfigError(
                    f"DecodeRaw(shape={self.shape!r}): shape is a tuple of positive sizes, or None"
                )
            object.__setattr__(self, "shape", tuple(map(int, sizes)))


@dataclass(frozen=True, slots=True)
class Resize:
    """Resample the picture to a size.

    size: (height, width), or one integer: the shorter side gets that length and the longer side follows
        with the picture's aspect ratio, rounded down.
    interpolation: "bilinear" or "bicubic".
    antialias: widen the filter when shrinking, as Pillow and torchvision do by default; False samples two
        pixels per axis (bicubic four) whatever the shrinkage, as `torch.nn.functional.interpolate` does.

    Raises: ConfigError if size is not positive.
    """

    size: Size
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("Resize", self.size))
        object.__setattr__(self, "interpolation", _check_interpolation("Resize", self.interpolation))

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing a picture of this height and width."""
        if not isinstance(self.size, int):
            return self.size
        return shorter_side_to(height, width, self.size)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Keep the central part; a picture smaller than `size` is first padded with zeros, centred.

    size: (height, width), or one integer for a square.

    Raises: ConfigError if size is not positive.
    """

    size: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("CenterCrop", self.size))

    @property
    def target(self) -> tuple[int, int]:
        """(height, width) of what is kept."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Crop a random area of random aspect ratio and resample it to a size.

    size: (height, width), or one integer for a square.
    scale: share of the picture's area to keep, drawn uniformly from (low, high).
    ratio: width over height of the crop, its logarithm drawn uniformly from (low, high). After ten draws
        that do not fit into the picture, the central crop of the nearest allowed ratio.
    interpolation, antialias: as in `Resize`.

    Raises: ConfigError if size, scale or ratio cannot work.
    Source: Szegedy et al., "Going deeper with convolutions", 2015, section 6; parameters as in torchvision.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("RandomResizedCrop", self.size))
        object.__setattr__(self, "scale", _check_range("RandomResizedCrop", "scale", self.scale))
        object.__setattr__(self, "ratio", _check_range("RandomResizedCrop", "ratio", self.ratio))
        interpolation = _check_interpolation("RandomResizedCrop", self.interpolation)
        object.__setattr__(self, "interpolation", interpolation)

    @property
    def target(self) -> tuple[int, int]:
        """(height, width) of the result."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("RandomHorizontalFlip", self.p)


@dataclass(frozen=True, slots=True)
class RandomVerticalFlip:
    """Mirror top and bottom with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("RandomVerticalFlip", self.p)


@dataclass(frozen=True, slots=True)
class ToTensor:
    """Turn the uint8 picture (height, width, 3) into numbers from 0 to 1, (3, height, width)."""


@dataclass(frozen=True, slots=True)
class Normalize:
    """Subtract `mean` and divide by `std`, channel by channel (red, green, blue), after `ToTensor`.

    Raises: ConfigError if there are not three of each, or a std is zero.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _check_channels("mean", self.mean))
        object.__setattr__(self, "std", _check_channels("std", self.std))
        if 0.0 in self.std:
            raise ConfigError(f"Normalize(std={self.std!r}): a std of 0 would divide by zero")
