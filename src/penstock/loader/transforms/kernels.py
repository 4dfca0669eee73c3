"""Compiled loops from decoded pixels to a sample's place in the slot.

One call resamples (columns, then rows), crops, mirrors, converts and lays out, without the GIL. The
arithmetic is Pillow's for 8-bit pictures (triangle or cubic filter, weights in fixed point with 22 bits, rounding to
8 bits after each of the two passes), so an antialiased result is Pillow's bit for bit, which is torchvision's
on PIL images. (Pillow 13 turns to rows first where the height shrinks much more than the width: one level of
difference.) Without antialiasing the filter keeps its width of two or four pixels when shrinking, and a cubic one is
that of `torch.nn.functional.interpolate`: another curve, and pixels beyond the edge are those of the edge.

Sums are vectors of int32, written in LLVM's own terms (decisions/0004): across, of three colours in four rows, which
share their weights; down, of neighbouring bytes.

`penstock.loader.transforms.compiled` says when they are compiled, and `plain` what serves until then.

Source: Pillow, src/libImaging/Resample.c, `precompute_coeffs` and `ImagingResampleHorizontal_8bpc`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import uint64
from numba.core import config, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numpy.typing import NDArray

from penstock.kernel import LINE_BYTES, array_at, compiled_copy, entry, inlined, kernel, machine_code
from penstock.loader.transforms import geometry
from penstock.loader.transforms.compiled import SIGNATURES
from penstock.loader.transforms.geometry import CUBIC, WIDENED
from penstock.machine_code import MachineCode

_BITS = 22
_ONE = 1 << _BITS
_HALF = np.int32(1 << (_BITS - 1))
#: The functions of `geometry`, for compiled loops.
RULES = compiled_copy(geometry)
_row_bytes, _scratch_bytes = RULES["row_bytes"], RULES["scratch_bytes"]
_BYTE, _WORD, _ADDRESS = ir.IntType(8), ir.IntType(32), ir.IntType(64)
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
    block: int,
    firsts: NDArray[np.int32],
    weights: NDArray[np.int32],
    shares: NDArray[np.float64],
) -> int:
    """Say which pixels of one axis make up each pixel of the result, and with which weights.

    start, extent: the part of the axis that is resampled, in pixels; fractions are allowed.
    length: pixels of the axis that may contribute, from 0.
    resampling: of `geometry.Geometry`.
    resized: pixels that `extent` becomes; of them window_length from window_start on are wanted.
    block: more than four taps are filled up to a multiple of it.
    firsts: int32[>= window_length], written: the first contributing pixel.
    weights: int32[>= window_length * `most_taps`], written as [window_length, taps]: they sum to 2**22 within rounding,
        zeros after the last. shares: float64[`most_taps`], scratch.
    Returns: taps, 2 or more, of a cubic filter 4 or more.
    """
    scale = extent / resized
    is_cubic, is_widened = resampling & CUBIC != 0, resampling & WIDENED != 0
    stretch = max(scale, 1.0) if is_widened else 1.0
    reach = 2.0 * stretch if is_cubic else stretch
    widest = 0
    for place in range(window_length):
        center = start + (window_start + place + 0.5) * scale
        widest = max(widest, min(length, int(center + reach + 0.5)) - max(0, int(center - reach + 0.5)))
    taps = max(widest, 4 if is_cubic else 2)
    taps = taps if taps <= 4 else (taps + block - 1) // block * block
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


def _load(builder: Any, kind: Any, place: Any) -> Any:
    value = builder.load(builder.inttoptr(place, kind.as_pointer()))
    value.align = 1
    return value


def _spread(builder: Any, number: Any, count: int) -> Any:
    """Return a vector of the same int32, so many times."""
    kind = ir.VectorType(_WORD, count)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(one, one, ir.Constant(kind, [0] * count))


def _shuffled(builder: Any, first: Any, second: Any, order: Iterable[int]) -> Any:
    places = list(order)
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(places)), places))


def _in_bytes(builder: Any, total: Any) -> Any:
    """Return sums of weights of 22 bits rounded down, and cut off at 0 and 255: those of a cubic filter go beyond."""
    kind = total.type
    total = builder.ashr(total, ir.Constant(kind, [_BITS] * kind.count))
    for limit, beyond in ((0, "<"), (255, ">")):
        limits = ir.Constant(kind, [limit] * kind.count)
        total = builder.select(builder.icmp_signed(beyond, total, limits), limits, total)
    return total


def _add_taps(builder: Any, total: Any, rows: list[Any], weight: Any, taps: int) -> Any:
    """Add neighbouring pixels of four rows, up to four, to the sums of their rows: int32[row, colour], of 4 x 4."""
    parts = [_load(builder, ir.VectorType(_BYTE, 16), row) for row in rows]
    upper, lower = (_shuffled(builder, parts[at], parts[at + 1], range(32)) for at in (0, 2))
    pixels = _shuffled(builder, upper, lower, range(64))
    nothing = ir.Constant(pixels.type, [0] * 64)
    for tap in range(taps):
        # Of each int32 the lowest byte, of processors that have it first.
        order = [
            16 * row + 3 * tap + colour if colour < 3 and byte == 0 else 64
            for row in range(4)
            for colour in range(4)
            for byte in range(4)
        ]
        colours = builder.bitcast(_shuffled(builder, pixels, nothing, order), total.type)
        factor = _load(builder, _WORD, builder.add(weight, _ADDRESS(4 * tap)))
        total = builder.add(total, builder.mul(colours, _spread(builder, factor, 16)))
    return total


def _blend(taps: int) -> Any:
    """Return an operation that makes four pixels of the result in each of four rows.

    taps: how many weights each has, up to four; 0: a multiple of four that is only known in the loop.

    The operation takes four addresses, of rows, and four of results, of which it writes 16 bytes: four pixels and four
    bytes without meaning; and the addresses of `firsts` and `weights`, and the number of taps. It reads 16 bytes from
    the first pixel of each fourth tap on. Rows share their weights, and fill the lanes of a vector.
    """

    def blend(typing: Any, rows: Any, targets: Any, firsts: Any, weights: Any, most: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, targets, firsts, weights, most = arguments
            begins, ends = (
                [builder.extract_value(each, row) for row in range(4)] for each in (rows, targets)
            )
            half = ir.Constant(ir.VectorType(_WORD, 16), [int(_HALF)] * 16)
            merged = None
            for column in range(4):
                first = _load(builder, _WORD, builder.add(firsts, _ADDRESS(4 * column)))
                first = builder.mul(builder.zext(first, _ADDRESS), _ADDRESS(3))
                sources = [builder.add(row, first) for row in begins]
                weight = builder.add(weights, builder.mul(most, _ADDRESS(4 * column)))
                if taps:
                    total = _add_taps(builder, half, sources, weight, taps)
                else:
                    sums = alloca_once_value(builder, half)  # type: ignore[no-untyped-call]
                    with for_range(builder, builder.udiv(most, _ADDRESS(4))) as loop:
                        further = builder.mul(loop.index, _ADDRESS(12))
                        more = builder.add(weight, builder.mul(loop.index, _ADDRESS(16)))
                        at = [builder.add(source, further) for source in sources]
                        builder.store(_add_taps(builder, builder.load(sums), at, more, 4), sums)
                    total = builder.load(sums)
                total = builder.shl(_in_bytes(builder, total), ir.Constant(half.type, [8 * column] * 16))
                merged = total if merged is None else builder.or_(merged, total)
            pixels = builder.bitcast(merged, ir.VectorType(_BYTE, 64))
            order = [*(4 * colour + column for column in range(4) for colour in range(3)), *[15] * 4]
            pixels = _shuffled(builder, pixels, pixels, [16 * row + at for row in range(4) for at in order])
            for row in range(4):
                part = _shuffled(builder, pixels, pixels, range(16 * row, 16 * row + 16))
                builder.store(part, builder.inttoptr(ends[row], part.type.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(rows, targets, types.uint64, types.uint64, types.int64), generate

    return intrinsic(blend)


_blend_two, _blend_three, _blend_four, _blend_many = _blend(2), _blend(3), _blend(4), _blend(0)


def _sum_rows(typing: Any, row: Any, stride: Any, weights: Any, taps: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, stride, weights, taps, target = arguments
        half = ir.Constant(ir.VectorType(_WORD, LINE_BYTES), [int(_HALF)] * LINE_BYTES)
        sums = alloca_once_value(builder, half)  # type: ignore[no-untyped-call]
        with for_range(builder, taps) as loop:
            place = builder.add(row, builder.mul(loop.index, stride))
            pixels = builder.zext(_load(builder, ir.VectorType(_BYTE, LINE_BYTES), place), half.type)
            weight = _load(builder, _WORD, builder.add(weights, builder.mul(loop.index, _ADDRESS(4))))
            product = builder.mul(pixels, _spread(builder, weight, LINE_BYTES))
            builder.store(builder.add(builder.load(sums), product), sums)
        pixels = builder.trunc(_in_bytes(builder, builder.load(sums)), ir.VectorType(_BYTE, LINE_BYTES))
        builder.store(pixels, builder.inttoptr(target, pixels.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.int64, types.uint64), generate


#: Sum LINE_BYTES of some rows times their weights: `(first row, bytes between rows, weights, how many, target)`.
_blend_line: Any = intrinsic(_sum_rows)


@kernel
def blend_columns(
    pixels: Any, offset: int, stride: int, rows: int, firsts: Any, weights: Any, blended: Any
) -> None:
    """Resample every row.

    pixels: uint8[...], rows of red, green, blue from `offset` on, `stride` bytes apart; 3 * taps + 13 bytes
        after the last pixel are read (and weigh nothing).
    firsts, weights: of `weigh`, of a multiple of four columns.
    blended: uint8[>= rows, >= 3 * columns + 4], written: red, green, blue, and four bytes without meaning.
    """
    columns, taps = weights.shape
    first_pixel = uint64(pixels.ctypes.data) + uint64(offset)
    first_target, row_bytes = uint64(blended.ctypes.data), uint64(blended.shape[1])
    for upper in range(0, rows, 4):
        row0, row1 = uint64(upper), uint64(min(upper + 1, rows - 1))
        row2, row3 = uint64(min(upper + 2, rows - 1)), uint64(min(upper + 3, rows - 1))
        sources = (
            first_pixel + row0 * uint64(stride),
            first_pixel + row1 * uint64(stride),
            first_pixel + row2 * uint64(stride),
            first_pixel + row3 * uint64(stride),
        )
        at, weight = uint64(firsts.ctypes.data), uint64(weights.ctypes.data)
        for column in range(0, columns, 4):
            place = first_target + uint64(3 * column)
            targets = (
                place + row0 * row_bytes,
                place + row1 * row_bytes,
                place + row2 * row_bytes,
                place + row3 * row_bytes,
            )
            if taps == 2:
                _blend_two(sources, targets, at, weight, taps)
            elif taps == 3:
                _blend_three(sources, targets, at, weight, taps)
            elif taps == 4:
                _blend_four(sources, targets, at, weight, taps)
            else:
                _blend_many(sources, targets, at, weight, taps)
            at, weight = at + uint64(16), weight + uint64(16 * taps)


@kernel
def blend_rows(blended: Any, first: int, weights: Any, line: Any) -> None:
    """Resample one line of the result from rows of `blended`.

    weights: int32[taps] of the line; first: the row that the first weight is for.
    line: uint8[bytes of a row of `blended`], written, as many as rows have: a multiple of LINE_BYTES.
    """
    stride = uint64(blended.shape[1])
    row, target = uint64(blended.ctypes.data) + uint64(first) * stride, uint64(line.ctypes.data)
    for place in range(0, line.size, LINE_BYTES):
        at = uint64(place)
        _blend_line(row + at, stride, uint64(weights.ctypes.data), weights.size, target + at)


@inlined
def _after(place: Any, size: Any) -> Any:
    """Return the first address of a cache line that is not before `place` and so many bytes."""
    return (place + uint64(size + 63)) & ~uint64(63)


@inlined
def _weigh_axis(axis: Any, resampling: Any, most_taps: Any, block: Any, shares: Any, place: Any) -> Any:
    """Weigh an axis, whose pixels are filled up to a multiple of `block`: those mean nothing.

    Returns: firsts, weights[pixels, taps], and the place after what they may take.
    """
    length = axis[5]
    filled = (length + block - 1) // block * block
    firsts = array_at(place, (filled,), np.int32)
    place = _after(place, 4 * filled)
    flat = array_at(place, (filled * most_taps,), np.int32)
    # mypy takes a star for any number of arguments.
    taps = weigh(*axis, resampling, block, firsts, flat, shares)  # type: ignore[call-arg]
    firsts[length:] = firsts[length - 1]
    return firsts, array_at(place, (filled, taps), np.int32), _after(place, 4 * filled * most_taps)


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

    Returns: what `blend_rows` takes: the blended rows, the first of them for each row of the result, its weights, and
        a line.
    """
    columns, rows = across[5], down[5]
    place, end = _after(uint64(scratch.ctypes.data), 0), uint64(scratch.ctypes.data) + uint64(scratch.size)
    row_bytes = _row_bytes(columns)
    if scratch.size < _scratch_bytes(columns, rows, 0, most_taps):
        raise MemoryError
    shares = array_at(place, (most_taps,), np.float64)
    place = _after(place, 8 * most_taps)
    column_firsts, column_weights, place = _weigh_axis(across, resampling, most_taps, 4, shares, place)
    row_firsts, row_weights, place = _weigh_axis(down, resampling, most_taps, 1, shares, place)
    line = array_at(place, (row_bytes,), np.uint8)
    place = _after(place, row_bytes)
    lowest, highest = row_firsts[0], row_firsts[0]  # a loop: numba compiles `min` and `max` for a second
    for row in range(rows):
        lowest, highest = min(lowest, row_firsts[row]), max(highest, row_firsts[row])
    highest = min(down[2], highest + row_weights.shape[1])
    for row in range(rows):
        row_firsts[row] -= lowest
    # What weighs nothing may lie beyond the last.
    blended = array_at(place, (highest - lowest + row_weights.shape[1], row_bytes), np.uint8)
    if place + uint64(blended.size) > end:
        raise MemoryError
    blend_columns(
        pixels, offset + lowest * stride, stride, highest - lowest, column_firsts, column_weights, blended
    )
    return blended, row_firsts, row_weights, line


@inlined
def _stays(axis: Any) -> Any:
    """Whether each pixel of an axis of the result is one of the source, in their order."""
    start, extent, resized, is_flipped = axis[0], axis[1], axis[3], axis[6]
    return extent == resized and start == math.floor(start) and not is_flipped


@entry
def line_to_float32(line: Any, parameters: Any, out: Any, row: Any, channels_last: Any) -> None:
    """Write byte * scale + bias, by channel.

    line: uint8[3 * width and more]. parameters: scale and bias, float32[3] each.
    row: of `out`, float32[3, height, width], or [height, width, 3] where channels_last; all of it is written.
    """
    scale, bias = parameters
    scale0, scale1, scale2 = scale[0], scale[1], scale[2]
    bias0, bias1, bias2 = bias[0], bias[1], bias[2]
    if channels_last:
        target = out[row]
        for column in range(target.shape[0]):
            target[column, 0] = np.float32(line[3 * column]) * scale0 + bias0
            target[column, 1] = np.float32(line[3 * column + 1]) * scale1 + bias1
            target[column, 2] = np.float32(line[3 * column + 2]) * scale2 + bias2
    else:
        red, green, blue = out[0, row], out[1, row], out[2, row]
        for column in range(red.size):
            red[column] = np.float32(line[3 * column]) * scale0 + bias0
            green[column] = np.float32(line[3 * column + 1]) * scale1 + bias1
            blue[column] = np.float32(line[3 * column + 2]) * scale2 + bias2


@entry
def line_to_table(line: Any, parameters: Any, out: Any, row: Any, channels_last: Any) -> None:
    """Write what a table has for each byte. parameters: the table, [3, 256], by channel; see `line_to_float32`."""
    table = parameters[0]
    table0, table1, table2 = table[0], table[1], table[2]
    if channels_last:
        target = out[row]
        for column in range(target.shape[0]):
            target[column, 0] = table0[line[3 * column]]
            target[column, 1] = table1[line[3 * column + 1]]
            target[column, 2] = table2[line[3 * column + 2]]
    else:
        red, green, blue = out[0, row], out[1, row], out[2, row]
        for column in range(red.size):
            red[column] = table0[line[3 * column]]
            green[column] = table1[line[3 * column + 1]]
            blue[column] = table2[line[3 * column + 2]]


@entry
def line_to_uint8(line: Any, parameters: Any, out: Any, row: Any, channels_last: Any) -> None:
    """Write the bytes. parameters: none; see `line_to_float32`."""
    if channels_last:
        target = array_at(uint64(out[row].ctypes.data), (3 * out.shape[1],), np.uint8)
        for byte in range(target.size):
            target[byte] = line[byte]
    else:
        red, green, blue = out[0, row], out[1, row], out[2, row]
        for column in range(red.size):
            red[column] = line[3 * column]
            green[column] = line[3 * column + 1]
            blue[column] = line[3 * column + 2]


#: How a line of bytes is written: as the names of `compiled.SIGNATURES` say.
LINES = {"float32": line_to_float32, "table": line_to_table, "uint8": line_to_uint8}


def resample_to(name: str) -> Any:
    """Return the loop that writes the resampled picture as one of LINES.

    pixels, offset, stride: as in `blend_columns`.
    across, down: the first seven arguments of `weigh` for columns and rows.
    most_taps, scratch: of `most_taps`; uint8[>= `scratch_bytes`].
    parameters, out, channels_last: of the line.

    Measured (AMD Zen 5, 320 x 300 to 224 x 224): see decisions/0004.
    """
    write_line = LINES[name]

    @entry
    def resample(
        pixels: Any,
        offset: Any,
        stride: Any,
        across: Any,
        down: Any,
        resampling: Any,
        most_taps: Any,
        scratch: Any,
        parameters: Any,
        out: Any,
        channels_last: Any,
    ) -> None:
        if _stays(across) and _stays(down):  # as behind a callable
            first = offset + (int(down[0]) + down[4]) * stride + 3 * (int(across[0]) + across[4])
            for row in range(down[5]):
                at = first + row * stride
                write_line(pixels[at : at + 3 * across[5]], parameters, out, row, channels_last)
            return
        blended, row_firsts, row_weights, line = _prepare(
            pixels, offset, stride, across, down, resampling, most_taps, scratch
        )
        for row in range(down[5]):
            blend_rows(blended, row_firsts[row], row_weights[row], line)
            write_line(line, parameters, out, row, channels_last)

    return resample


def compile_part(name: str) -> MachineCode:
    """Return the machine code of one kernel: what it writes is "float32", "table" or "uint8"."""
    with with_short_vectors():
        return machine_code(resample_to(name), SIGNATURES[name])


@contextlib.contextmanager
def with_short_vectors() -> Iterator[None]:
    """Have LLVM sum neighbouring bytes in a vector, which numba leaves off."""
    settings: Any = config
    before, settings.SLP_VECTORIZE = settings.SLP_VECTORIZE, 1
    try:
        yield
    finally:
        settings.SLP_VECTORIZE = before
