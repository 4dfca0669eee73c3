"""Which pixel of the stored picture each pixel of the result comes from.

Crops, a resize and flips are composed here as a value before a single pixel is decoded, so that they cost
one pass together and only the region that is needed is decoded.

All functions are plain Python over numbers, and a compiled loop calls the same ones (`_group_kernels`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Numbers = Any  # whatever can be indexed: a list uncompiled, an array compiled

TRIES = 10

#: A picture is decoded at 1/2, 1/4 or 1/8 of its size only where it stays this many times larger than the
#: result in both directions (Pillow's `reducing_gap`, whose documentation calls 2 close to fair resampling).
REDUCING_GAP = 2

#: Columns at the edge of a decoded region that differ from the whole picture's: smooth upsampling of the colours
#: looks one colour column (two pixels) further than the region.
EDGE_COLUMNS = 2

#: How pixels are weighed, as a sum of these: by a cubic curve, or else by a triangle of half its width; and whether the
#: width grows as a picture shrinks.
WIDENED, CUBIC = 1, 2

#: What `StepNumbers.what` says.
RESIZE, RESIZE_SHORTER, CENTER_CROP, RANDOM_CROP, MIRROR, TURN_OVER = 0, 1, 2, 3, 4, 5


class Box(NamedTuple):
    """A rectangle of whole pixels: rows top to top + height, columns left to left + width."""

    top: int
    left: int
    height: int
    width: int


class StepNumbers(NamedTuple):
    """A built-in transform that moves pixels, in numbers.

    what: RESIZE and those after it. column: of a sample's random numbers, where its own begin.
    height, width: of its result; RESIZE_SHORTER: of the shorter side, both the same.
    low, high: the least and largest ratio of RANDOM_CROP; high: the probability of a flip.
    resampling: as of `Geometry`.
    least, most: share of the area, log_low, log_high: logarithm of the ratio, that RANDOM_CROP draws from.
    """

    what: int
    column: int = 0
    height: int = 0
    width: int = 0
    low: float = 0.0
    high: float = 0.0
    resampling: int = WIDENED
    least: float = 0.0
    most: float = 0.0
    log_low: float = 0.0
    log_high: float = 0.0


class Geometry(NamedTuple):
    """The picture's `box`, resampled to `resized`, of which `window` is kept, then mirrored.

    picture            resized                 result
    +-----------+      +---------+
    |  +----+   |      | +-----+ |
    |  |box |   |  ->  | |win- | |     ->      window, mirrored as the flags say
    |  +----+   |      | |dow  | |
    +-----------+      +---------+
    """

    box: Box
    #: (height, width)
    resized: tuple[int, int]
    window: Box
    is_mirrored: bool = False
    is_upside_down: bool = False
    #: WIDENED, CUBIC, both or 0.
    resampling: int = WIDENED

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the result."""
        return self.window.height, self.window.width


class Axis(NamedTuple):
    """The first arguments of `kernels.weigh`, for the columns or the rows of a decoded region."""

    start: float
    extent: float
    length: int
    resized: int
    window_start: int
    window_length: int
    is_flipped: bool


def whole(height: int, width: int) -> Geometry:
    """Return the picture as it is."""
    box = Box(0, 0, height, width)
    return Geometry(box, (height, width), box, False, False, WIDENED)


def is_resampled(geometry: Geometry) -> bool:
    return geometry.resized[0] != geometry.box.height or geometry.resized[1] != geometry.box.width


def cropped(geometry: Geometry, crop: Box) -> Geometry:
    """Keep `crop`, a box within the result."""
    box, window = geometry.box, geometry.window
    top, left, height, width = crop.top, crop.left, crop.height, crop.width
    if geometry.is_upside_down:
        top = window.height - top - height
    if geometry.is_mirrored:
        left = window.width - left - width
    if is_resampled(geometry):
        kept = Box(window.top + top, window.left + left, height, width)
        return Geometry(
            box,
            geometry.resized,
            kept,
            geometry.is_mirrored,
            geometry.is_upside_down,
            geometry.resampling,
        )
    return Geometry(
        Box(box.top + top, box.left + left, height, width),
        (height, width),
        Box(0, 0, height, width),
        geometry.is_mirrored,
        geometry.is_upside_down,
        geometry.resampling,
    )


def resized_to(geometry: Geometry, height: int, width: int, resampling: int) -> Geometry:
    """Resample the result, which is not resampled yet, to height x width."""
    assert not is_resampled(geometry), "a picture is resampled once per pass"
    return Geometry(
        geometry.box,
        (height, width),
        Box(0, 0, height, width),
        geometry.is_mirrored,
        geometry.is_upside_down,
        resampling,
    )


def flipped(geometry: Geometry, mirror: bool, turn_over: bool) -> Geometry:
    """Mirror left and right, or top and bottom."""
    return Geometry(
        geometry.box,
        geometry.resized,
        geometry.window,
        geometry.is_mirrored != mirror,
        geometry.is_upside_down != turn_over,
        geometry.resampling,
    )


def numbers_of(what: int) -> int:
    """Return how many random numbers a transform takes for each sample; what: of its `StepNumbers`."""
    if what == RANDOM_CROP:
        return 2 * TRIES + 2
    return 1 if what in (MIRROR, TURN_OVER) else 0


# -- What a transform makes of a geometry ------------------------------------------------------------------


def needs_padding(geometry: Geometry, step: StepNumbers) -> bool:
    """Whether a central crop is larger than the picture."""
    height, width = geometry.window.height, geometry.window.width
    return step.what == CENTER_CROP and (height < step.height or width < step.width)


def without_resize(geometry: Geometry, step: StepNumbers, numbers: Numbers) -> Geometry:
    """Do what a transform does but for resampling. numbers: float64[...], the sample's random ones."""
    height, width = geometry.window.height, geometry.window.width
    if step.what == CENTER_CROP:
        return cropped(geometry, center_box(height, width, step.height, step.width))
    if step.what == RANDOM_CROP:
        return cropped(geometry, place_crop(height, width, numbers, step.column, step.low, step.high))
    if step.what == MIRROR:
        return flipped(geometry, numbers[step.column] < step.high, False)
    if step.what == TURN_OVER:
        return flipped(geometry, False, numbers[step.column] < step.high)
    return geometry


def size_after(geometry: Geometry, step: StepNumbers) -> tuple[int, int]:
    """Return the (height, width) that a transform resamples to, the geometry's own where it does not."""
    height, width = geometry.window.height, geometry.window.width
    if step.what == RESIZE or step.what == RANDOM_CROP:
        return step.height, step.width
    if step.what == RESIZE_SHORTER:
        return shorter_side_to(height, width, step.height)
    return height, width


def shorter_side_to(height: int, width: int, size: int) -> tuple[int, int]:
    """Return (height, width) with a shorter side of `size`, the longer one in proportion, rounded down."""
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def center_box(height: int, width: int, kept_height: int, kept_width: int) -> Box:
    """Return torchvision's central crop: the offset is half the difference, rounded half to even."""
    return Box(
        round((height - kept_height) / 2.0), round((width - kept_width) / 2.0), kept_height, kept_width
    )


def center_border(height: int, width: int, kept_height: int, kept_width: int) -> tuple[int, int, int, int]:
    """Return torchvision's border for a central crop that is larger than the picture: left, above, right, below."""
    down, across = max(0, kept_height - height), max(0, kept_width - width)
    return across // 2, down // 2, across - across // 2, down - down // 2


def place_crop(height: int, width: int, numbers: Numbers, column: int, low: float, high: float) -> Box:
    """Return the crop that a row of `draw_crops` means in a picture of this size.

    numbers: a row that it is part of, from `column` on. low, high: the range of width over height.
    """
    root = math.sqrt(height * width)
    for attempt in range(column, column + 2 * TRIES, 2):
        crop_width = round(root * numbers[attempt])
        crop_height = round(root * numbers[attempt + 1])
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(numbers[column + 2 * TRIES] * (height - crop_height + 1))
            left = int(numbers[column + 2 * TRIES + 1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    crop_height, crop_width = height, width
    if width / height < low:
        crop_height = max(1, round(width / low))
    elif width / height > high:
        crop_width = max(1, round(height * high))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


# -- What is decoded, and how it is resampled --------------------------------------------------------------


def choose_shrink(geometry: Geometry) -> int:
    """Return by how much the decoder may shrink the picture: 1, 2, 4 or 8; a function of sizes alone."""
    if geometry.resampling & WIDENED == 0:
        return 1
    box, resized = geometry.box, geometry.resized
    spare = min(box.height / resized[0], box.width / resized[1]) / REDUCING_GAP
    return 8 if spare >= 8 else 4 if spare >= 4 else 2 if spare >= 2 else 1


def region_of(box: Box, shrink: int, rows: int, columns: int, unit_columns: int) -> Box:
    """Return the part to decode of a JPEG, for the pixels of `box` to be those of the whole picture.

    rows, columns: of the picture at 1/shrink of its size, as the region. unit_columns: of the smallest unit that can be
        decoded on its own, at full size.
    """
    unit = unit_columns // shrink
    top, bottom = box.top // shrink, min(rows, -(-(box.top + box.height) // shrink))
    left = max(0, (box.left // shrink - EDGE_COLUMNS) // unit * unit)
    right = min(columns, -(-(box.left + box.width) // shrink) + EDGE_COLUMNS)
    return Box(top, left, bottom - top, right - left)


def axes_of(geometry: Geometry, shrink: int) -> tuple[Axis, Axis]:
    """Return how columns and rows are resampled, in pixels of the picture at 1/shrink from the first of the box on."""
    box, resized, window = geometry.box, geometry.resized, geometry.window
    first_row, first_column = box.top // shrink, box.left // shrink
    across = Axis(
        box.left / shrink - first_column,
        box.width / shrink,
        -(-(box.left + box.width) // shrink) - first_column,
        resized[1],
        window.left,
        window.width,
        geometry.is_mirrored,
    )
    down = Axis(
        box.top / shrink - first_row,
        box.height / shrink,
        -(-(box.top + box.height) // shrink) - first_row,
        resized[0],
        window.top,
        window.height,
        geometry.is_upside_down,
    )
    return across, down


def most_taps(across: float, down: float, resampling: int) -> int:
    """Return how many pixels of one axis make up a pixel of the result at most, where it is so much smaller."""
    reach = max(across, down) if resampling & CUBIC == 0 else 2 * max(across, down, 1.0)
    return (math.ceil(reach) * 2 + 4) // 4 * 4  # kernels sum four at a time


def row_bytes(columns: int) -> int:
    """Return the bytes of a row in the scratch of the kernels: three for each column, four at a time, and four more."""
    return (3 * columns + 13 + 63) // 64 * 64


def scratch_bytes(columns: int, rows: int, source_rows: int, taps: int) -> int:
    """Return the scratch of the kernels, for a result of so many columns and rows from so many rows of the source.

    taps: of `most_taps`. Each of the seven parts begins at a cache line.
    """
    weights = 8 * taps + 4 * (columns + 3 + rows) * (1 + taps)
    return weights + row_bytes(columns) * (1 + source_rows + taps) + 7 * 64


def pixel_bytes(rows: int, columns: int) -> int:
    """Return the memory of decoded pixels: the widest filter reads two rows' worth beyond the last one it weighs."""
    return (rows + 2) * columns * 3 + 64
