"""What `penstock.loader.transforms.kernels` does, in NumPy and bit for bit: it serves until those are compiled.

Functions have the same names and arguments as there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.geometry import CUBIC, WIDENED

_BITS = 22
_HALF = np.int32(1 << (_BITS - 1))
#: A large picture's rows are taken so many at a time, so that what is in between takes little memory.
_STRIP_ROWS = 64


def weigh(axis: Any, resampling: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return which pixels of one axis make up each pixel of the result: int64[pixels], and int32[pixels, taps].

    axis: the first seven arguments of `kernels.weigh`.
    """
    start, extent, length, resized, window_start, window_length, is_flipped = axis
    scale = extent / resized
    is_cubic, is_widened = resampling & CUBIC != 0, resampling & WIDENED != 0
    stretch = max(scale, 1.0) if is_widened else 1.0
    reach = 2.0 * stretch if is_cubic else stretch
    centers = start + (window_start + np.arange(window_length) + 0.5) * scale
    firsts = np.maximum(0, (centers - reach + 0.5).astype(np.int64))
    counts = np.minimum(length, (centers + reach + 0.5).astype(np.int64)) - firsts
    taps = np.arange(max(math.ceil(reach) * 2 + 1, counts.max()))
    away = abs((taps[:, None] + firsts - centers + 0.5) * (1.0 / stretch))
    shares = _cubic(away, -0.5 if is_widened else -0.75) if is_cubic else np.maximum(0.0, 1.0 - away)
    shares[taps[:, None] >= counts] = 0.0
    if is_cubic and not is_widened:
        _add_what_is_beyond(shares, centers, counts, length)
    # One after the other: another order would round elsewhere.
    total = np.zeros(window_length)
    for share in shares:
        total += share
    scaled = shares / total * (1 << _BITS)
    weights = np.where(scaled >= 0.0, scaled + 0.5, scaled - 0.5).astype(np.int32).T[:, : counts.max()]
    return (firsts[::-1], weights[::-1]) if is_flipped else (firsts, weights)


def _cubic(away: NDArray[np.float64], curve: float) -> NDArray[np.float64]:
    inner = ((curve + 2.0) * away - (curve + 3.0)) * away * away + 1.0
    outer = (((away - 5.0) * away + 8.0) * away - 4.0) * curve
    return np.where(away < 1.0, inner, np.where(away < 2.0, outer, 0.0))


def _add_what_is_beyond(
    shares: NDArray[np.float64], centers: NDArray[np.float64], counts: NDArray[np.int64], length: int
) -> None:
    """Add the shares of pixels beyond the edges to those of the edges."""
    columns = np.arange(centers.size)
    for beyond in range(4):
        tap = np.floor(centers - 1.5).astype(np.int64) + beyond
        share = _cubic(abs(tap - centers + 0.5), -0.75)
        shares[0] += np.where(tap < 0, share, 0.0)
        shares[counts - 1, columns] += np.where(tap >= length, share, 0.0)


def resample_to_float32(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    parameters: tuple[NDArray[np.float32], ...],
    out: NDArray[np.float32],
    channels_last: bool,
) -> None:
    """Write byte * scale + bias, by channel."""
    picture = _resampled(pixels, offset, stride, across, down, resampling)
    scale, bias = parameters
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = picture[:, :, channel].astype(np.float32) * scale[channel] + bias[channel]


def resample_to_table(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    parameters: tuple[NDArray[np.uint16]],
    out: NDArray[np.uint16],
    channels_last: bool,
) -> None:
    """Write what the table holds for each byte."""
    picture = _resampled(pixels, offset, stride, across, down, resampling)
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = parameters[0][channel][picture[:, :, channel]]


def resample_to_uint8(
    pixels: NDArray[np.uint8],
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    parameters: tuple[()],
    out: NDArray[np.uint8],
    channels_last: bool,
) -> None:
    """Write the bytes."""
    picture = _resampled(pixels, offset, stride, across, down, resampling)
    for channel, target in enumerate(_planes(out, channels_last)):
        target[:] = picture[:, :, channel]


def _planes(out: NDArray[Any], channels_last: bool) -> list[NDArray[Any]]:
    return [out[:, :, channel] if channels_last else out[channel] for channel in range(3)]


def _resampled(
    pixels: NDArray[np.uint8], offset: int, stride: int, across: Any, down: Any, resampling: int
) -> NDArray[np.uint8]:
    """Return uint8[height, width, 4], of which the last is without meaning."""
    column_firsts, column_weights = weigh(across, resampling)
    row_firsts, row_weights = weigh(down, resampling)
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
    return _in_bytes(total)


def _in_bytes(total: NDArray[np.int32]) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = np.clip(total >> _BITS, 0, 255).astype(np.uint8)
    return found


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
    return _in_bytes(total)
