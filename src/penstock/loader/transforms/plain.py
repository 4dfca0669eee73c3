"""What `penstock.loader.transforms.kernels` does, in NumPy and bit for bit: it serves until those are compiled.

Functions have the same names and arguments as there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = 22
_HALF = np.int32(1 << (_BITS - 1))
#: A large picture's rows are taken so many at a time, so that what is in between takes little memory.
_STRIP_ROWS = 64


def weigh(axis: Any, antialias: bool) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return which pixels of one axis make up each pixel of the result: int64[pixels], and int32[pixels, taps].

    axis: the first seven arguments of `kernels.weigh`.
    """
    start, extent, length, resized, window_start, window_length, is_flipped = axis
    scale = extent / resized
    stretch = max(scale, 1.0) if antialias else 1.0
    centers = start + (window_start + np.arange(window_length) + 0.5) * scale
    firsts = np.maximum(0, (centers - stretch + 0.5).astype(np.int64))
    counts = np.minimum(length, (centers + stretch + 0.5).astype(np.int64)) - firsts
    taps = np.arange(max(math.ceil(stretch) * 2 + 1, counts.max()))
    offsets = taps[:, None] + firsts - centers + 0.5
    shares = np.maximum(0.0, 1.0 - abs(offsets * (1.0 / stretch)))
    shares[taps[:, None] >= counts] = 0.0
    # One after the other: another order would round elsewhere.
    total = np.zeros(window_length)
    for share in shares:
        total += share
    weights = (0.5 + shares / total * (1 << _BITS)).astype(np.int32).T[:, : counts.max()]
    return (firsts[::-1], weights[::-1]) if is_flipped else (firsts, weights)


def resample_to_float32(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    antialias: bool,
    most_taps: int,
    scratch: Any,
    scale: NDArray[np.float32],
    bias: NDArray[np.float32],
    out: NDArray[np.float32],
    channels_last: bool,
) -> None:
    """Write byte * scale + bias, by channel."""
    picture = _resampled(pixels, offset, stride, across, down, antialias)
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = picture[:, :, channel].astype(np.float32) * scale[channel] + bias[channel]


def resample_to_table(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    antialias: bool,
    most_taps: int,
    scratch: Any,
    table: NDArray[np.uint16],
    out: NDArray[np.uint16],
    channels_last: bool,
) -> None:
    """Write what the table holds for each byte."""
    picture = _resampled(pixels, offset, stride, across, down, antialias)
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = table[channel][picture[:, :, channel]]


def resample_to_uint8(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    antialias: bool,
    most_taps: int,
    scratch: Any,
    out: NDArray[np.uint8],
    channels_last: bool,
) -> None:
    """Write the bytes."""
    picture = _resampled(pixels, offset, stride, across, down, antialias)
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = picture[:, :, channel]


def _planes(out: NDArray[Any], channels_last: bool) -> list[NDArray[Any]]:
    return [out[:, :, channel] if channels_last else out[channel] for channel in range(3)]


def _resampled(
    pixels: NDArray[np.uint8], offset: int, stride: int, across: Any, down: Any, antialias: bool
) -> NDArray[np.uint8]:
    """Return uint8[height, width, 4], of which the last is without meaning."""
    column_firsts, column_weights = weigh(across, antialias)
    row_firsts, row_weights = weigh(down, antialias)
    lowest, highest = row_firsts.min(), min(down[2], (row_firsts + row_weights.shape[1]).max())
    shape = (highest - lowest, across[2], 3)
    rows = np.lib.stride_tricks.as_strided(pixels[offset + lowest * stride :], shape, (stride, 3, 1))
    # What weighs nothing may lie beyond the last.
    places = np.minimum(column_firsts[:, None] + np.arange(column_weights.shape[1]), across[2] - 1)
    lines = np.empty((shape[0], column_firsts.size, 4), np.uint8)
    for begin in range(0, shape[0], _STRIP_ROWS):
        strip = slice(begin, begin + _STRIP_ROWS)
        lines[strip] = _blended_across(rows[strip], places, column_weights)
    places = np.minimum(row_firsts[:, None] + np.arange(row_weights.shape[1]), highest - 1) - lowest
    total = np.full((row_firsts.size, *lines.shape[1:]), _HALF)
    for place, weight in zip(places.T, row_weights.T, strict=True):
        total += lines[place] * weight[:, None, None]
    return (total >> _BITS).astype(np.uint8)


def _blended_across(
    rows: NDArray[np.uint8], places: NDArray[np.int64], weights: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """Return uint8[rows, columns, 4]. rows: uint8[rows, :, 3]. places, weights: [columns, taps]."""
    # Pixels of four bytes: NumPy gathers a word much faster than three bytes.
    words = np.zeros((*rows.shape[:2], 4), np.uint8)
    words[:, :, :3] = rows
    columns = words.view(np.uint32)[:, :, 0]
    total = np.full((rows.shape[0], places.shape[0], 4), _HALF)
    for place, weight in zip(places.T, weights.T, strict=True):
        taken = columns.take(place, axis=1)
        total += taken.view(np.uint8).reshape(total.shape) * weight[:, None]
    return (total >> _BITS).astype(np.uint8)
