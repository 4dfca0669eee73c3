"""Transforms that compute new pixels: colour, blur, rotation, padding, erasing, and the policies made of them.

Each is called as a callable of a user's is, with a picture and a generator that is keyed by seed, place in the list,
epoch and sample; OpenCV and NumPy do the work. Names, arguments and meaning are torchvision's (v0.2x,
`torchvision.transforms.v2`, on PIL images); values differ from Pillow's by a few levels of 255 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.transforms.steps import Size, check_probability, check_size, numbers_in
from penstock.units import is_integer

#: uint8[height, width, 3].
Picture = NDArray[np.uint8]
PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]

#: Pillow's SMOOTH, which sharpness is the distance from.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


class Border(NamedTuple):
    """Pixels around a picture. sides: left, above, right, below. mode: as of `numpy.pad`."""

    sides: tuple[int, int, int, int]
    mode: PaddingMode = "constant"


# -- What a user names ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pad:
    """Add a border.

    padding: pixels on all sides, (left and right, above and below), or (left, above, right, below).
    fill: 0 to 255, or three of them, of a "constant" border. padding_mode: as of `numpy.pad`.
    """

    padding: int | tuple[int, ...]
    fill: int | tuple[int, int, int] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        _sides("Pad", self.padding)
        _check_border("Pad", self.fill, self.padding_mode)

    @property
    def border(self) -> Border:
        return Border(_sides("Pad", self.padding), self.padding_mode)

    def __call__(self, picture: Picture) -> Picture:
        return _padded(picture, self.border, self.fill)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Keep an area of a size, anywhere in the picture.

    size: (height, width), or one integer for a square. padding, fill, padding_mode: as of `Pad`, before the crop.
    pad_if_needed: adds a border where the picture is smaller, in place of an error.
    """

    size: Size
    padding: int | tuple[int, ...] | None = None
    pad_if_needed: bool = False
    fill: int | tuple[int, int, int] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("RandomCrop", self.size))
        if self.padding is not None:
            _sides("RandomCrop", self.padding)
        _check_border("RandomCrop", self.fill, self.padding_mode)

    @property
    def target(self) -> tuple[int, int]:
        """(height, width) of the result."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        for border in self.borders(*picture.shape[:2]):
            picture = _padded(picture, border, self.fill)
        rows, columns = picture.shape[:2]
        top, left, height, width = self.place(rows, columns, rng)
        return np.ascontiguousarray(picture[top : top + height, left : left + width])

    def borders(self, height: int, width: int) -> list[Border]:
        """Return what is put around a picture of this size, one after the other."""
        borders = []
        if self.padding is not None:
            left, above, right, below = sides = _sides("RandomCrop", self.padding)
            borders.append(Border(sides, self.padding_mode))
            height, width = height + above + below, width + left + right
        if self.pad_if_needed:
            down, across = max(0, self.target[0] - height), max(0, self.target[1] - width)
            if down or across:
                borders.append(Border((across, down, across, down), self.padding_mode))
        return borders

    def place(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw what is kept of a picture of this size: the first row and column, height and width.

        Raises: ConfigError if the picture is smaller.
        """
        rows, columns = height - self.target[0], width - self.target[1]
        if rows < 0 or columns < 0:
            raise ConfigError(
                f"{self} was given a picture of {height} x {width}, which is smaller: resize it before, or give "
                "padding= or pad_if_needed=True"
            )
        return int(rng.integers(rows + 1)), int(rng.integers(columns + 1)), *self.target


@dataclass(frozen=True, slots=True)
class Grayscale:
    """Turn the picture to grey, in three equal channels."""

    def __call__(self, picture: Picture) -> Picture:
        return _in_grey(picture)


@dataclass(frozen=True, slots=True)
class RandomGrayscale:
    """Turn the picture to grey with probability p."""

    p: float = 0.1

    def __post_init__(self) -> None:
        check_probability("RandomGrayscale", self.p)

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        return Grayscale()(picture) if rng.random() < self.p else picture


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue, in a random order.

    brightness, contrast, saturation: a factor is drawn uniformly from (1 - value, 1 + value), not below zero, or from
        (low, high).
    hue: the share of the circle of colours to turn by, from (-value, value) or (low, high), at most half of it.
    """

    brightness: float | tuple[float, float] = 0.0
    contrast: float | tuple[float, float] = 0.0
    saturation: float | tuple[float, float] = 0.0
    hue: float | tuple[float, float] = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            object.__setattr__(self, name, _jitter(name, getattr(self, name), 1.0, (0.0, math.inf)))
        object.__setattr__(self, "hue", _jitter("hue", self.hue, 0.0, (-0.5, 0.5)))

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        for change, factor in self.draw(rng):
            picture = change(picture, factor)
        return picture

    def draw(self, rng: np.random.Generator) -> list[tuple[Callable[[Picture, float], Picture], float]]:
        """Draw what is done to a picture, one after the other: a function, and its factor."""
        changes: list[tuple[Callable[[Picture, float], Picture], Any, float]] = [
            (_with_brightness, self.brightness, 1.0),
            (_with_contrast, self.contrast, 1.0),
            (_with_saturation, self.saturation, 1.0),
            (_with_hue, self.hue, 0.0),
        ]
        drawn = []
        for index in rng.permutation(len(changes)).tolist():
            change, (low, high), neutral = changes[index]
            factor = float(rng.uniform(low, high))
            if not low == high == neutral:
                drawn.append((change, factor))
        return drawn


@dataclass(frozen=True, slots=True)
class GaussianBlur:
    """Blur by a Gaussian of random width.

    kernel_size: odd, of both axes. sigma: its standard deviation in pixels, drawn uniformly from (low, high).
    """

    kernel_size: int
    sigma: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        if not is_integer(self.kernel_size) or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ConfigError(
                f"GaussianBlur(kernel_size={self.kernel_size!r}): kernel_size is odd and positive"
            )
        low, high = _pair("GaussianBlur", "sigma", self.sigma)
        if not 0 < low <= high:
            raise ConfigError(
                f"GaussianBlur(sigma={self.sigma!r}): sigma is (low, high) with 0 < low <= high"
            )

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        sigma, size = float(rng.uniform(*self.sigma)), (self.kernel_size, self.kernel_size)
        return _made(_cv2().GaussianBlur(picture, size, sigma, borderType=_cv2().BORDER_REFLECT_101))


@dataclass(frozen=True, slots=True)
class RandomRotation:
    """Turn the picture about its centre; corners that come in have the colour `fill`.

    degrees: (low, high), counter-clockwise, or one number for (-degrees, degrees).
    interpolation: "nearest" or "bilinear".
    """

    degrees: float | tuple[float, float]
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        given = self.degrees
        degrees = (-given, given) if isinstance(given, int | float) else given
        object.__setattr__(self, "degrees", _pair("RandomRotation", "degrees", degrees))
        if self.interpolation not in ("nearest", "bilinear"):
            raise ConfigError(
                f'RandomRotation(interpolation={self.interpolation!r}): it is "nearest" or "bilinear"'
            )
        _check_border("RandomRotation", self.fill, "constant")

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        return _turned(picture, self.draw(rng), self.fill, self.interpolation)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw by how many degrees a picture is turned."""
        low, high = numbers_in(self.degrees)
        return float(rng.uniform(low, high))


@dataclass(frozen=True, slots=True)
class RandomErasing:
    """Overwrite a random area with probability p: of a picture, or of the numbers behind `ToTensor`.

    scale: share of the area, drawn uniformly. ratio: of height to width, its logarithm drawn uniformly. After ten draws
        that do not fit, nothing is erased.
    value: what is written; "random" for normal noise, behind ToTensor alone.

    Source: Zhong et al., "Random erasing data augmentation", 2017, algorithm 1; parameters as in torchvision.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, float, float] | Literal["random"] = 0.0

    def __post_init__(self) -> None:
        check_probability("RandomErasing", self.p)
        low, high = _pair("RandomErasing", "scale", self.scale)
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"RandomErasing(scale={self.scale!r}): scale is (low, high), shares between 0 and 1"
            )
        low, high = _pair("RandomErasing", "ratio", self.ratio)
        if not 0 < low <= high:
            raise ConfigError(
                f"RandomErasing(ratio={self.ratio!r}): ratio is (low, high) with 0 < low <= high"
            )
        is_known = self.value == "random" or isinstance(self.value, Real) or len(numbers_in(self.value)) == 3
        if not is_known:
            raise ConfigError(f'RandomErasing(value={self.value!r}): value is a number, three, or "random"')

    def __call__(self, picture: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        if rng.random() >= self.p:
            return picture
        is_picture = picture.dtype == np.uint8
        height, width = picture.shape[:2] if is_picture else picture.shape[1:]
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < tall < height and 0 < wide < width:
                top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
                picture = picture.copy()
                # A view with the channels last, of either kind.
                whole = picture if is_picture else picture.transpose(1, 2, 0)
                area_of = whole[top : top + tall, left : left + wide]
                if self.value != "random":
                    area_of[:] = self.value
                elif is_picture:
                    raise ConfigError(
                        f"{self} stands before ToTensor, where noise has no unit: put it behind"
                    )
                else:
                    area_of[:] = rng.standard_normal(area_of.shape, np.float32)
                break
        return picture


@dataclass(frozen=True, slots=True)
class RandomApply:
    """Apply steps one after the other with probability p, or none of them.

    transforms: those of the steps that work on computed pixels, such as `ColorJitter` and `GaussianBlur`.
    """

    transforms: Sequence[Any]
    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("RandomApply", self.p)
        object.__setattr__(self, "transforms", tuple(self.transforms))
        for step in self.transforms:
            if not isinstance(step, AUGMENTS):
                names = ", ".join(each.__name__ for each in AUGMENTS)
                raise ConfigError(f"RandomApply([{step}]): it applies {names}; write a function for others")

    def __call__(self, picture: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        if rng.random() < self.p:
            for step in self.transforms:
                picture = step(picture, rng) if is_random(step) else step(picture)
        return picture


@dataclass(frozen=True, slots=True)
class RandAugment:
    """Apply a few operations, drawn from fourteen, at one strength.

    num_ops: how many. magnitude: below num_magnitude_bins, their strength. fill: of corners that come in.

    Source: Cubuk et al., "RandAugment", 2019, section 3; operations and ranges as in torchvision.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    fill: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        for name in ("num_ops", "num_magnitude_bins"):
            if not is_integer(value := getattr(self, name)) or value < (2 if name != "num_ops" else 1):
                raise ConfigError(
                    f"RandAugment({name}={value!r}): {name} is a positive integer, of bins two or more"
                )
        if not is_integer(self.magnitude) or not 0 <= self.magnitude < self.num_magnitude_bins:
            raise ConfigError(
                f"RandAugment(magnitude={self.magnitude!r}): magnitude is an integer from 0 to "
                f"{self.num_magnitude_bins - 1}"
            )
        _check_border("RandAugment", self.fill, "constant")

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        height, width = picture.shape[:2]
        for operation in self.draw(rng, height, width):
            picture = operation(picture)
        return picture

    def draw(self, rng: np.random.Generator, height: int, width: int) -> list[Callable[[Picture], Picture]]:
        """Draw what is done to a picture of a size, one after the other."""
        level = self.magnitude / (self.num_magnitude_bins - 1)
        return [_one_of(_RANGES, height, width, level, rng, self.fill) for _ in range(self.num_ops)]


@dataclass(frozen=True, slots=True)
class TrivialAugmentWide:
    """Apply one operation, drawn from fourteen, at a random strength.

    num_magnitude_bins: how many strengths there are. fill: of corners that come in.

    Source: Müller and Hutter, "TrivialAugment", 2021, section 3, the wide space; as in torchvision.
    """

    num_magnitude_bins: int = 31
    fill: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        if not is_integer(self.num_magnitude_bins) or self.num_magnitude_bins < 2:
            raise ConfigError(
                f"TrivialAugmentWide(num_magnitude_bins={self.num_magnitude_bins!r}): it is an integer, two or more"
            )
        _check_border("TrivialAugmentWide", self.fill, "constant")

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        level = int(rng.integers(self.num_magnitude_bins)) / (self.num_magnitude_bins - 1)
        height, width = picture.shape[:2]
        return _one_of(_WIDE_RANGES, height, width, level, rng, self.fill)(picture)


# -- What is done to pixels -------------------------------------------------------------------------------------


def _cv2() -> Any:
    import cv2

    return cv2


def _made(picture: Any) -> Picture:
    found: Picture = picture
    return found


def _unchanged(picture: Picture) -> Picture:
    return picture


def _by_table(picture: Picture, table: NDArray[Any]) -> Picture:
    """Look values up. table: [256], or [256, 3] of each channel; cut off at 0 and 255, and behind the point."""
    rounded = np.clip(table, 0, 255).astype(np.uint8)
    return _made(_cv2().LUT(picture, rounded if rounded.ndim == 1 else rounded[None]))


def _grey(picture: Picture) -> NDArray[np.uint8]:
    """Return uint8[height, width]: the luma of ITU-R BT.601."""
    return _made(_cv2().cvtColor(picture, _cv2().COLOR_RGB2GRAY))


def _in_grey(picture: Picture) -> Picture:
    return _made(_cv2().cvtColor(_grey(picture), _cv2().COLOR_GRAY2RGB))


def _with_brightness(picture: Picture, factor: float) -> Picture:
    return _by_table(picture, factor * np.arange(256))


def _with_contrast(picture: Picture, factor: float) -> Picture:
    middle = int(_cv2().mean(_grey(picture))[0] + 0.5)
    return _by_table(picture, middle + factor * (np.arange(256) - middle))


def _with_saturation(picture: Picture, factor: float) -> Picture:
    return _made(_cv2().addWeighted(picture, factor, _in_grey(picture), 1 - factor, 0))


def _with_hue(picture: Picture, share: float) -> Picture:
    cv2 = _cv2()
    colours = cv2.cvtColor(picture, cv2.COLOR_RGB2HSV_FULL)
    colours[:, :, 0] += np.uint8(round(share * 255) % 256)
    return _made(cv2.cvtColor(colours, cv2.COLOR_HSV2RGB_FULL))


def _with_sharpness(picture: Picture, factor: float) -> Picture:
    smooth = picture.copy()
    smooth[1:-1, 1:-1] = _cv2().filter2D(picture, -1, _SMOOTH)[1:-1, 1:-1]
    return _made(_cv2().addWeighted(picture, factor, smooth, 1 - factor, 0))


def _with_full_contrast(picture: Picture) -> Picture:
    cv2 = _cv2()
    limits = [cv2.minMaxLoc(channel)[:2] for channel in cv2.split(picture)]
    low, high = np.array(limits).T
    scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1.0)
    shift = np.where(high > low, -low * scale, 0.0)
    return _by_table(picture, np.arange(256)[:, None] * scale + shift)


def _equalized(picture: Picture) -> Picture:
    table = np.empty((256, 3), np.int64)
    for channel in range(3):
        counts = _cv2().calcHist([picture], [channel], None, [256], [0, 256]).ravel().astype(np.int64)
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        before = np.cumsum(counts) - counts
        table[:, channel] = (step // 2 + before) // step if step else np.arange(256)
    return _by_table(picture, table)


def _posterized(picture: Picture, bits: int) -> Picture:
    return _by_table(picture, np.arange(256) & ~(2 ** (8 - bits) - 1))


def _solarized(picture: Picture, threshold: float) -> Picture:
    values = np.arange(256)
    return _by_table(picture, np.where(values < threshold, values, 255 - values))


def pixels_from(
    picture: NDArray[Any],
    matrix: list[list[float]],
    fill: int | Sequence[int],
    interpolation: str = "nearest",
) -> NDArray[Any]:
    """Take each pixel from elsewhere. matrix: 2 x 3, from where a pixel's centre is to where it was, in indices."""
    cv2 = _cv2()
    height, width = picture.shape[:2]
    how = cv2.INTER_LINEAR if interpolation == "bilinear" else cv2.INTER_NEAREST
    border = (fill,) * 3 if isinstance(fill, int) else tuple(fill)
    return _made(
        cv2.warpAffine(
            picture,
            np.array(matrix, np.float64),
            (width, height),
            flags=how | cv2.WARP_INVERSE_MAP,
            borderValue=border,
        )
    )


def _moved(
    picture: Picture, matrix: list[list[float]], fill: int | Sequence[int], interpolation: str = "nearest"
) -> Picture:
    return _made(pixels_from(picture, matrix, fill, interpolation))


def _turned(
    picture: Picture, degrees: float, fill: int | Sequence[int], interpolation: str = "nearest"
) -> Picture:
    height, width = picture.shape[:2]
    return _moved(picture, rotation_matrix(height, width, degrees), fill, interpolation)


def rotation_matrix(height: int, width: int, degrees: float) -> list[list[float]]:
    """Return where the pixels of a picture that is turned about its centre were; see `pixels_from`."""
    down, across = (height - 1) / 2, (width - 1) / 2
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    return [
        [cosine, -sine, across - cosine * across + sine * down],
        [sine, cosine, down - sine * across - cosine * down],
    ]


def _padded(picture: Picture, border: Border, fill: int | Sequence[int]) -> Picture:
    left, above, right, below = border.sides
    widths = ((above, below), (left, right), (0, 0))
    if border.mode != "constant":
        return np.pad(picture, widths, border.mode)
    padded = np.empty((picture.shape[0] + above + below, picture.shape[1] + left + right, 3), np.uint8)
    padded[:] = fill
    padded[above : above + picture.shape[0], left : left + picture.shape[1]] = picture
    return padded


# -- Policies ---------------------------------------------------------------------------------------------------

#: Strength of each operation at level 1 (of its factor's distance from 1, where it has one), and its lowest number of
#: bits: of RandAugment, and of the wide space of TrivialAugment. Translations: of a share of the side, or in pixels.
_RANGES = {"shear": 0.3, "translate": 150 / 331, "turn": 30.0, "factor": 0.9, "bits": 4}
_WIDE_RANGES = {"shear": 0.99, "translate": 32.0, "turn": 135.0, "factor": 0.99, "bits": 6}


def _one_of(
    ranges: dict[str, float],
    height: int,
    width: int,
    level: float,
    rng: np.random.Generator,
    fill: int | Sequence[int],
) -> Callable[[Picture], Picture]:
    """Draw one operation of fourteen, for a picture of a size. level: its strength, 0 to 1."""
    operation, sign = int(rng.integers(14)), (-1.0 if rng.random() < 0.5 else 1.0)
    shear, turn = sign * level * ranges["shear"], sign * level * ranges["turn"]
    factor = 1 + sign * level * ranges["factor"]
    across, down = (
        sign * int(level * ranges["translate"] * (side if ranges["translate"] < 1 else 1))
        for side in (width, height)
    )
    match operation:  # one of them is made: all fourteen take as long as some do to a picture
        case 0:
            return _unchanged
        case 1:
            return partial(_moved, matrix=[[1, shear, 0], [0, 1, 0]], fill=fill)
        case 2:
            return partial(_moved, matrix=[[1, 0, 0], [shear, 1, 0]], fill=fill)
        case 3:
            return partial(_moved, matrix=[[1, 0, across], [0, 1, 0]], fill=fill)
        case 4:
            return partial(_moved, matrix=[[1, 0, 0], [0, 1, down]], fill=fill)
        case 5:
            return partial(_turned, degrees=turn, fill=fill)
        case 6:
            return partial(_with_brightness, factor=factor)
        case 7:
            return partial(_with_saturation, factor=factor)
        case 8:
            return partial(_with_contrast, factor=factor)
        case 9:
            return partial(_with_sharpness, factor=factor)
        case 10:
            return partial(_posterized, bits=8 - round(level * ranges["bits"]))
        case 11:
            return partial(_solarized, threshold=255 * (1 - level))
        case 12:
            return _with_full_contrast
        case _:
            return _equalized


# -- Arguments --------------------------------------------------------------------------------------------------


def _sides(owner: str, padding: object) -> tuple[int, int, int, int]:
    """Return the width of a border: left, above, right, below. Raises: ConfigError."""
    sides = numbers_in((padding,) if is_integer(padding) else padding)
    if len(sides) in (1, 2, 4) and all(side >= 0 and side.is_integer() for side in sides):
        left, above, right, below = (int(sides[index % len(sides)]) for index in range(4))
        return left, above, right, below
    raise ConfigError(
        f"{owner}(padding={padding!r}): padding is an integer from 0 up, two of them (left and right, above and below) "
        "or four (left, above, right, below)"
    )


def _check_border(owner: str, fill: object, mode: object) -> None:
    values = numbers_in((fill,) * 3 if is_integer(fill) else fill)
    if len(values) != 3 or not all(0 <= value <= 255 and value.is_integer() for value in values):
        raise ConfigError(f"{owner}(fill={fill!r}): fill is an integer from 0 to 255, or three of them")
    if mode not in ("constant", "edge", "reflect", "symmetric"):
        raise ConfigError(
            f'{owner}(padding_mode={mode!r}): it is "constant", "edge", "reflect" or "symmetric"'
        )


def _pair(owner: str, name: str, values: object) -> tuple[float, float]:
    match numbers_in(values):
        case (low, high) if low <= high and math.isfinite(low) and math.isfinite(high):
            return low, high
    raise ConfigError(f"{owner}({name}={values!r}): {name} is (low, high) with low <= high")


def _jitter(name: str, value: object, middle: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the range of a factor. Raises: ConfigError."""
    least, most = bounds
    if isinstance(value, Real) and float(value) >= 0:
        low, high = max(least, middle - float(value)), middle + float(value)
    else:
        low, high = _pair("ColorJitter", name, value)
    if not least <= low <= high <= most:
        limits = f"from {least:g} to {most:g}" if most < math.inf else "not below zero"
        raise ConfigError(f"ColorJitter({name}={value!r}): {name} is a number or (low, high), {limits}")
    return low, high


#: Those that a user names.
AUGMENTS = (
    *(Pad, RandomCrop, Grayscale, RandomGrayscale, ColorJitter, GaussianBlur),
    *(RandomRotation, RandomErasing, RandomApply, RandAugment, TrivialAugmentWide),
)
#: Those of them that leave a picture its size; `RandomApply` where its steps do.
SAME_SIZE = tuple(step for step in AUGMENTS if step not in (Pad, RandomCrop))


def is_random(step: object) -> bool:
    """Whether one of AUGMENTS is called with a generator."""
    return not isinstance(step, Pad | Grayscale)
