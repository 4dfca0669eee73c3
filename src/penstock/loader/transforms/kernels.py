"""Compiled loops from decoded pixels to a sample's place in the slot.

One call resamples (columns, then rows), crops, mirrors, converts and lays out, without the GIL. The
arithmetic is Pillow's for 8-bit pictures (triangle or cubic filter, weights in fixed point with 22 bits, rounding to
8 bits after each of the two passes), so an antialiased result is Pillow's bit for bit, which is torchvision's
on PIL images. (Pillow 13 turns to rows first where the height shrinks much more than the width: one level of
difference.) Without antialiasing the filter keeps its width of two or four pixels when shrinking, and a cubic one is
that of `torch.nn.functional.interpolate`: another curve, and pixels beyond the edge are those of the edge.

Four bytes are summed in a vector for three channels (decisions/0004; the fourth byte is the next pixel's red, computed
and dropped). Sums stay in int32 by hand, because numba widens int32 products to int64, which halves the speed.

`penstock.loader.transforms.compiled` says when they are compiled, and `plain` what serves until then.

Source: Pillow, src/libImaging/Resample.c, `precompute_coeffs` and `ImagingResampleHorizontal_8bpc`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int32, uint8, uint64
from numba.core import config, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numpy.typing import NDArray

from penstock.kernel import array_at, entry, inlined, kernel, machine_code
from penstock.loader.transforms.compiled import SIGNATURES
from penstock.loader.transforms.geometry import CUBIC, SPARE_BYTES, WIDENED
from penstock.machine_code import MachineCode

_BITS = 22
_ONE = 1 << _BITS
_HALF = np.int32(1 << (_BITS - 1))
#: Taps that are written out. Weights come as two taps, or four or more, the last ones zero where not needed.
_FEW, _SOME = 2, 4
#: The parameter of cubic curves: of Pillow and torch with a filter that is widened, of torch and OpenCV without.
_PILLOWS, _TORCHS = -0.5, -0.75


@inlined
def _cubic(away: Any, curve: Any) -> Any:
    """Return the cubic curve of a parameter, so far from its middle. Source: Keys 1981, equation 15."""
    if away < 1.0:
        return ((curve + 2.0) * away - (curve + 3.0)) * away * away + 1.0
    if away < 2.0:
        return (((away - 5.0) * away + 8.0) * away - 4.0) * curve
    return 0.0


@kernel
def weigh(
    start: float,
    extent: float,
    length: int,
    resized: int,
    window_start: int,
    window_length: int,
    is_flipped: bool,
    resampling: int,
    firsts: NDArray[np.int32],
    weights: NDArray[np.int32],
    shares: NDArray[np.float64],
) -> int:
    """Say which pixels of one axis make up each pixel of the result, and with which weights.

    start, extent: the part of the axis that is resampled, in pixels; fractions are allowed.
    length: pixels of the axis that may contribute, from 0.
    resampling: of `geometry.Geometry`.
    resized: pixels that `extent` becomes; of them window_length from window_start on are wanted.
    firsts: int32[window_length], written: the first contributing pixel.
    weights: int32[window_length * `most_taps`], written as [window_length, taps]: they sum to 2**22 within rounding,
        zeros after the last. shares: float64[`most_taps`], scratch.
    Returns: taps, 2, or 4 or more.
    """
    scale = extent / resized
    is_cubic, is_widened = resampling & CUBIC != 0, resampling & WIDENED != 0
    stretch = max(scale, 1.0) if is_widened else 1.0
    reach = 2.0 * stretch if is_cubic else stretch
    widest = 0
    for place in range(window_length):
        center = start + (window_start + place + 0.5) * scale
        widest = max(widest, min(length, int(center + reach + 0.5)) - max(0, int(center - reach + 0.5)))
    taps = _FEW if widest <= _FEW and not is_cubic else max(widest, _SOME)
    for place in range(window_length):
        center = start + (window_start + place + 0.5) * scale
        first = max(0, int(center - reach + 0.5))
        count = min(length, int(center + reach + 0.5)) - first
        total = 0.0
        for tap in range(count):
            away = abs((tap + first - center + 0.5) * (1.0 / stretch))
            if is_cubic:
                shares[tap] = _cubic(away, _PILLOWS if is_widened else _TORCHS)
            else:
                shares[tap] = max(0.0, 1.0 - away)
            total += shares[tap]
        if is_cubic and not is_widened:
            for beyond in range(4):  # pixels beyond the edges are those of the edges
                tap = math.floor(center - 1.5) + beyond
                if tap < 0 or tap >= length:
                    share = _cubic(abs(tap - center + 0.5), _TORCHS)
                    shares[0 if tap < 0 else count - 1] += share
                    total += share
        target = window_length - 1 - place if is_flipped else place
        firsts[target] = first
        for tap in range(taps):
            share = shares[tap] / total * _ONE if tap < count else 0.0
            weights[target * taps + tap] = int(share + 0.5) if share >= 0.0 else int(share - 0.5)
    return taps


@inlined
def _add(total: Any, weight: Any, pixel: Any) -> Any:
    return int32(total + int32(weight * int32(pixel)))


@inlined
def _in_a_byte(total: Any) -> Any:
    return uint8(min(max(int32(total >> _BITS), int32(0)), int32(255)))


def _blend(taps: int) -> Any:
    """Return an operation that sums pixels times weights into the four bytes of one pixel of the result.

    taps: how many pixels; 0 for a number that is only known in the loop.

    The operation takes the addresses of the first pixel, of its weight and of the result, and the number of taps.
    Pixels are three bytes apart, so the fourth byte is the next pixel's red. It works on vectors of four int32. Written
    in Python and inlined, the same sums were 300 operations, which numba took 4 s longer to compile.
    """
    byte, word, address = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    four_bytes, four_words = ir.VectorType(byte, 4), ir.VectorType(word, 4)
    everywhere = ir.Constant(four_words, [0] * 4)

    def add_tap(builder: Any, total: Any, pixel: Any, weight: Any, tap: Any) -> Any:
        pixel = builder.add(pixel, builder.mul(tap, address(3)))
        weight = builder.add(weight, builder.mul(tap, address(4)))
        colours = builder.load(builder.inttoptr(pixel, four_bytes.as_pointer()))
        colours.align = 1
        factor = builder.load(builder.inttoptr(weight, word.as_pointer()))
        factors = builder.insert_element(ir.Constant(four_words, ir.Undefined), factor, word(0))
        factors = builder.shuffle_vector(factors, factors, everywhere)
        return builder.add(total, builder.mul(builder.zext(colours, four_words), factors))

    def blend(typing: Any, pixel: Any, weight: Any, target: Any, most: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pixel, weight, target, most = arguments
            total = ir.Constant(four_words, [int(_HALF)] * 4)
            for tap in range(taps):
                total = add_tap(builder, total, pixel, weight, address(tap))
            if not taps:
                sums = alloca_once_value(builder, total)  # type: ignore[no-untyped-call]
                with for_range(builder, most) as loop:
                    builder.store(add_tap(builder, builder.load(sums), pixel, weight, loop.index), sums)
                total = builder.load(sums)
            total = builder.ashr(total, ir.Constant(four_words, [_BITS] * 4))
            # Weights of a cubic filter may be below zero. Those of two taps are none.
            for limit, beyond in ((0, "<"), (255, ">")) if taps != _FEW else ():
                limits = ir.Constant(four_words, [limit] * 4)
                total = builder.select(builder.icmp_signed(beyond, total, limits), limits, total)
            builder.store(
                builder.trunc(total, four_bytes), builder.inttoptr(target, four_bytes.as_pointer())
            ).align = 1
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64, types.uint64, types.int64), generate

    return intrinsic(blend)


_blend_few, _blend_some, _blend_many = _blend(_FEW), _blend(_SOME), _blend(0)


@kernel
def blend_columns(
    pixels: Any, offset: int, stride: int, rows: int, firsts: Any, weights: Any, blended: Any
) -> None:
    """Resample every row.

    pixels: uint8[...], rows of red, green, blue from `offset` on, `stride` bytes apart; 3 * taps + 1 bytes
        after the last pixel are read (and weigh nothing).
    firsts, weights: of `weigh`.
    blended: uint8[>= rows, 4 * columns], written: red, green, blue and a byte without meaning.
    """
    columns, taps = weights.shape
    first_pixel = uint64(pixels.ctypes.data) + uint64(offset)
    first_weight, first_target = uint64(weights.ctypes.data), uint64(blended.ctypes.data)
    row_bytes, weight_bytes = uint64(blended.shape[1]), uint64(4 * taps)
    for upper in range(0, rows, 2):  # two rows per turn: 68 us where one took 96
        lower = min(upper + 1, rows - 1)
        row, next_row = first_pixel + uint64(upper * stride), first_pixel + uint64(lower * stride)
        target, next_target = (
            first_target + uint64(upper) * row_bytes,
            first_target + uint64(lower) * row_bytes,
        )
        for column in range(columns):
            at, place = uint64(firsts[column]) * uint64(3), uint64(column) * uint64(4)
            weight = first_weight + uint64(column) * weight_bytes
            if taps == _FEW:
                _blend_few(row + at, weight, target + place, taps)
                _blend_few(next_row + at, weight, next_target + place, taps)
            elif taps == _SOME:
                _blend_some(row + at, weight, target + place, taps)
                _blend_some(next_row + at, weight, next_target + place, taps)
            else:
                _blend_many(row + at, weight, target + place, taps)
                _blend_many(next_row + at, weight, next_target + place, taps)


@kernel
def blend_rows(blended: Any, first: int, weights: Any, totals: Any, line: Any) -> None:
    """Resample one line of the result from rows of `blended`.

    weights: int32[taps] of the line; first: the row that the first weight is for.
    totals: int32[4 * columns], scratch. line: uint8[4 * columns], written.
    """
    row0, row1, w0, w1 = blended[first], blended[first + 1], weights[0], weights[1]
    if weights.size == _FEW:
        for byte in range(line.size):
            line[byte] = uint8(_add(_add(_HALF, w0, row0[byte]), w1, row1[byte]) >> _BITS)
        return
    row2, row3, w2, w3 = blended[first + 2], blended[first + 3], weights[2], weights[3]
    if weights.size == _SOME:
        for byte in range(line.size):
            total = _add(_add(_HALF, w0, row0[byte]), w1, row1[byte])
            line[byte] = _in_a_byte(_add(_add(total, w2, row2[byte]), w3, row3[byte]))
        return
    for byte in range(line.size):
        total = _add(_add(_HALF, w0, row0[byte]), w1, row1[byte])
        totals[byte] = _add(_add(total, w2, row2[byte]), w3, row3[byte])
    for tap in range(_SOME, weights.size):
        weight, row = weights[tap], blended[first + tap]
        for byte in range(line.size):
            totals[byte] = _add(totals[byte], weight, row[byte])
    for byte in range(line.size):
        line[byte] = _in_a_byte(totals[byte])


@inlined
def _after(place: Any, size: Any) -> Any:
    """Return the first address of a cache line that is not before `place` and so many bytes."""
    return (place + uint64(size + 63)) & ~uint64(63)


@inlined
def _weigh_axis(axis: Any, resampling: Any, most_taps: Any, shares: Any, place: Any) -> Any:
    """Weigh an axis; return firsts, weights[window_length, taps], and the place after what they may take."""
    length = axis[5]
    firsts = array_at(place, (length,), np.int32)
    place = _after(place, 4 * length)
    flat = array_at(place, (length * most_taps,), np.int32)
    # mypy takes a star for any number of arguments.
    taps = weigh(*axis, resampling, firsts, flat, shares)  # type: ignore[call-arg]
    return firsts, array_at(place, (length, taps), np.int32), _after(place, 4 * length * most_taps)


@inlined
def _prepare(
    pixels: Any,
    offset: Any,
    stride: Any,
    across: Any,
    down: Any,
    resampling: Any,
    most_taps: Any,
    scratch: Any,
) -> Any:
    """Weigh both axes and blend the columns of the rows that are needed.

    Returns: what `blend_rows` takes: the blended rows, the first of them for each row of the result, its weights,
        totals, and a line.
    """
    columns, rows = across[5], down[5]
    place, end = uint64(scratch.ctypes.data), uint64(scratch.ctypes.data) + uint64(scratch.size)
    if scratch.size < 8 * most_taps + 4 * (columns + rows) * (1 + most_taps) + 20 * columns + SPARE_BYTES:
        raise MemoryError
    shares = array_at(place, (most_taps,), np.float64)
    place = _after(place, 8 * most_taps)
    column_firsts, column_weights, place = _weigh_axis(across, resampling, most_taps, shares, place)
    row_firsts, row_weights, place = _weigh_axis(down, resampling, most_taps, shares, place)
    taps = row_weights.shape[1]
    totals = array_at(place, (4 * columns,), np.int32)
    place = _after(place, 16 * columns)
    line = array_at(place, (4 * columns,), np.uint8)
    place = _after(place, 4 * columns)
    lowest, highest = row_firsts[0], row_firsts[0]  # a loop: numba compiles `min` and `max` for a second
    for row in range(rows):
        lowest, highest = min(lowest, row_firsts[row]), max(highest, row_firsts[row])
    highest = min(down[2], highest + taps)
    for row in range(rows):
        row_firsts[row] -= lowest
    # What weighs nothing may lie beyond the last.
    blended = array_at(place, (highest - lowest + taps, 4 * columns), np.uint8)
    if place + uint64(blended.size) > end:
        raise MemoryError
    blend_columns(
        pixels, offset + lowest * stride, stride, highest - lowest, column_firsts, column_weights, blended
    )
    return blended, row_firsts, row_weights, totals, line


@inlined
def _stays(axis: Any) -> Any:
    """Whether each pixel of an axis of the result is one of the source, in their order."""
    start, extent, resized, is_flipped = axis[0], axis[1], axis[3], axis[6]
    return extent == resized and start == math.floor(start) and not is_flipped


@entry
def resample_to_float32(
    pixels: Any,
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    scale: Any,
    bias: Any,
    out: Any,
    channels_last: bool,
) -> None:
    """Write byte * scale + bias, by channel, of the resampled picture.

    pixels, offset, stride: as in `blend_columns`.
    across, down: the first seven arguments of `weigh` for columns and rows.
    most_taps, scratch: of `most_taps`; uint8[>= `scratch_bytes`].
    scale, bias: float32[3].
    out: float32[3, height, width], or float32[height, width, 3] where channels_last; all of it is written.

    Measured (AMD Zen 5, 320 x 300 to 224 x 224): 110 us antialiased, 70 without; cv2.resize INTER_LINEAR 60
    and INTER_AREA 380, Pillow 472, none of which normalises (52 more). See decisions/0004.
    """
    scale0, scale1, scale2 = scale[0], scale[1], scale[2]
    bias0, bias1, bias2 = bias[0], bias[1], bias[2]
    if _stays(across) and _stays(down) and not channels_last:  # as behind a callable: 45 us where it took 95
        first = offset + (int(down[0]) + down[4]) * stride + 3 * (int(across[0]) + across[4])
        for row in range(down[5]):
            source = pixels[first + row * stride : first + row * stride + 3 * across[5]]
            red, green, blue = out[0, row], out[1, row], out[2, row]
            for column in range(across[5]):
                red[column] = np.float32(source[3 * column]) * scale0 + bias0
                green[column] = np.float32(source[3 * column + 1]) * scale1 + bias1
                blue[column] = np.float32(source[3 * column + 2]) * scale2 + bias2
        return
    rows, row_firsts, row_weights, totals, line = _prepare(
        pixels, offset, stride, across, down, resampling, most_taps, scratch
    )
    columns = line.size // 4
    for row in range(row_firsts.size):
        blend_rows(rows, row_firsts[row], row_weights[row], totals, line)
        if channels_last:
            for column in range(columns):
                out[row, column, 0] = np.float32(line[4 * column]) * scale0 + bias0
                out[row, column, 1] = np.float32(line[4 * column + 1]) * scale1 + bias1
                out[row, column, 2] = np.float32(line[4 * column + 2]) * scale2 + bias2
        else:
            red, green, blue = out[0, row], out[1, row], out[2, row]
            for column in range(columns):
                red[column] = np.float32(line[4 * column]) * scale0 + bias0
                green[column] = np.float32(line[4 * column + 1]) * scale1 + bias1
                blue[column] = np.float32(line[4 * column + 2]) * scale2 + bias2


@entry
def resample_to_table(
    pixels: Any,
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    table: Any,
    out: Any,
    channels_last: bool,
) -> None:
    """Write what `table` (uint16[3, 256], by channel) holds for each byte: the bits of float16 or bfloat16.

    Other arguments as in `resample_to_float32`; out: uint16.
    """
    rows, row_firsts, row_weights, totals, line = _prepare(
        pixels, offset, stride, across, down, resampling, most_taps, scratch
    )
    columns = line.size // 4
    table0, table1, table2 = table[0], table[1], table[2]
    for row in range(row_firsts.size):
        blend_rows(rows, row_firsts[row], row_weights[row], totals, line)
        if channels_last:
            for column in range(columns):
                out[row, column, 0] = table0[line[4 * column]]
                out[row, column, 1] = table1[line[4 * column + 1]]
                out[row, column, 2] = table2[line[4 * column + 2]]
        else:
            red, green, blue = out[0, row], out[1, row], out[2, row]
            for column in range(columns):
                red[column] = table0[line[4 * column]]
                green[column] = table1[line[4 * column + 1]]
                blue[column] = table2[line[4 * column + 2]]


@entry
def resample_to_uint8(
    pixels: Any,
    offset: int,
    stride: int,
    across: Any,
    down: Any,
    resampling: int,
    most_taps: int,
    scratch: Any,
    out: Any,
    channels_last: bool,
) -> None:
    """Write the bytes of the resampled picture. Arguments as in `resample_to_float32`; out: uint8."""
    rows, row_firsts, row_weights, totals, line = _prepare(
        pixels, offset, stride, across, down, resampling, most_taps, scratch
    )
    columns = line.size // 4
    for row in range(row_firsts.size):
        blend_rows(rows, row_firsts[row], row_weights[row], totals, line)
        if channels_last:
            for column in range(columns):
                out[row, column, 0] = line[4 * column]
                out[row, column, 1] = line[4 * column + 1]
                out[row, column, 2] = line[4 * column + 2]
        else:
            red, green, blue = out[0, row], out[1, row], out[2, row]
            for column in range(columns):
                red[column] = line[4 * column]
                green[column] = line[4 * column + 1]
                blue[column] = line[4 * column + 2]


def compile_part(name: str) -> MachineCode:
    """Return the machine code of one kernel: what it writes is "float32", "table" or "uint8"."""
    with with_short_vectors():
        return machine_code(globals()[f"resample_to_{name}"], SIGNATURES[name])


@contextlib.contextmanager
def with_short_vectors() -> Iterator[None]:
    """Have LLVM sum neighbouring bytes in a vector, which numba leaves off."""
    settings: Any = config
    before, settings.SLP_VECTORIZE = settings.SLP_VECTORIZE, 1
    try:
        yield
    finally:
        settings.SLP_VECTORIZE = before
