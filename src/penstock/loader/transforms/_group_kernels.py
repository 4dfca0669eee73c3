"""The loop that decodes a group of JPEG files into rows of a batch slot, and makes their crops of later epochs.

It calls libjpeg-turbo by the addresses of its functions, so that a thread holds no interpreter's lock from the first
header to the last pixel. Whatever is not plain is left to the one-picture form (`Pipeline.run`), which knows all kinds
of files and says what is wrong with one.

The smallest region is decoded in which all crops of a file lie, once for each scale that they ask for. All rules are
those of `jpeg` and `geometry`, compiled, and pixels are resampled by `kernels`: the bits are those of the
one-picture form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import uint64

from penstock.kernel import array_at, compiled_copy, entry, function_at, inlined, machine_code, stack_zeros
from penstock.loader.transforms import jpeg
from penstock.loader.transforms.compiled import GROUP_SIGNATURES
from penstock.loader.transforms.geometry import TRIES, Box, StepNumbers
from penstock.loader.transforms.jpeg import JpegHeader
from penstock.loader.transforms.kernels import RULES, resample_to, with_short_vectors
from penstock.loader.transforms.turbojpeg import RGB
from penstock.machine_code import ARRAY, DATA, DIMENSIONS, SHAPE, MachineCode

_rules, _headers = RULES, compiled_copy(jpeg)
_whole, _needs_padding, _without_resize = _rules["whole"], _rules["needs_padding"], _rules["without_resize"]
_size_after, _is_resampled, _resized_to = _rules["size_after"], _rules["is_resampled"], _rules["resized_to"]
_choose_shrink, _region_of, _axes_of = _rules["choose_shrink"], _rules["region_of"], _rules["axes_of"]
_most_taps, _scratch_bytes, _pixel_bytes = _rules["most_taps"], _rules["scratch_bytes"], _rules["pixel_bytes"]
_numbers_of = _rules["numbers_of"]
_resample_to_uint8 = resample_to("uint8")
_next_frame, _is_cut_off, _read_frame = _headers["next_frame"], _headers["is_cut_off"], _headers["read_frame"]
_claims_too_much, _is_for_turbojpeg = _headers["claims_too_much"], _headers["is_for_turbojpeg"]

# Of the region that is decoded at one scale, in stored pixels: rows TOP to BOTTOM, columns LEFT to RIGHT.
_TOP, _LEFT, _BOTTOM, _RIGHT, _SIDES = 0, 1, 2, 3, 4
#: 1/1, 1/2, 1/4 and 1/8.
_SCALES = 4

# Structures of 8 and 16 bytes are passed as one and two words: see `turbojpeg.BY_ADDRESS`.
_read_header_of = function_at(64, 64, 64)
_set_scale_of = function_at(64, 64)
_set_region_of = function_at(64, 64, 64)
_decode_of = function_at(64, 64, 64, 64, 32, 32)


@inlined
def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array of them by the address of its object."""
    fields = array_at(array + ARRAY, (3,), np.int64)
    return array_at(fields[DATA], (array_at(fields[SHAPE], (1,), np.int64)[0],), np.uint8)


@inlined
def _picture_of(array: Any) -> Any:
    """Return whether an array, by the address of its object, is decoded pixels, and their rows and columns."""
    fields = array_at(array + ARRAY, (3,), np.int64)
    shape = array_at(fields[SHAPE], (2,), np.int64)
    is_picture = fields[DIMENSIONS] & 0xFF == 3
    return is_picture, shape[0] if is_picture else 0, shape[1] if is_picture else 0


@inlined
def _header_of(data: Any) -> Any:
    """Return whether a file is one for this loop, and its header."""
    at = -1
    if len(data) > 4 and data[0] == 0xFF and data[1] == 0xD8:
        at = _next_frame(data, 2)
    if at < 0 or data[at] != 0xFF or _is_cut_off(data, at):
        return False, JpegHeader(0, 0, 0, 0, False, 8, False, 0, False)
    header = _read_frame(data, at)
    is_whole = header.height * header.width > 0 and header.has_end and not _claims_too_much(data, header)
    return is_whole and _is_for_turbojpeg(header) and header.coefficient_bytes == 0, header


@inlined
def _geometry_of(height: Any, width: Any, steps: Any, numbers: Any) -> Any:
    """Return whether one pass does all steps, and the geometry."""
    found, is_one_pass = _whole(height, width), True
    for place in range(steps.shape[0]):
        of = steps[place]
        step = StepNumbers(
            int(of[0]),
            int(of[1]),
            int(of[2]),
            int(of[3]),
            of[4],
            of[5],
            int(of[6]),
            of[7],
            of[8],
            of[9],
            of[10],
        )
        is_one_pass = is_one_pass and not _needs_padding(found, step)
        if is_one_pass:
            found = _without_resize(found, step, numbers)
            rows, columns = _size_after(found, step)
            if rows != found.window.height or columns != found.window.width:
                is_one_pass = not _is_resampled(found)
                if is_one_pass:
                    found = _resized_to(found, rows, columns, step.resampling)
    return is_one_pass, found


@inlined
def _words(key: Any, epoch: Any, item: Any, block: Any) -> Any:
    """Return four words of `penstock.plan.random.draw_words`: those of one item from the word 4 * block on."""
    low, half = uint64(0xFFFFFFFF), uint64(32)
    word_0, word_1 = uint64(item) & low, uint64(item) >> half
    word_2, word_3 = uint64(epoch) & low, uint64(block)
    key_0, key_1 = uint64(key) & low, uint64(key) >> half
    for _ in range(10):
        product_0, product_1 = word_0 * uint64(0xD2511F53), word_2 * uint64(0xCD9E8D57)
        word_0, word_1 = (product_1 >> half) ^ word_1 ^ key_0, product_1 & low
        word_2, word_3 = (product_0 >> half) ^ word_3 ^ key_1, product_0 & low
        key_0, key_1 = (key_0 + uint64(0x9E3779B9)) & low, (key_1 + uint64(0xBB67AE85)) & low
    return word_0, word_1, word_2, word_3


@entry
def _draw(steps: Any, keys: Any, epoch: Any, item: Any, numbers: Any) -> None:
    """Write an item's random numbers for all steps, as `draws` does for many items."""
    uniform = stack_zeros(np.float64, 24)
    for place in range(steps.shape[0]):
        of, column = steps[place], int(steps[place, 1])
        count = _numbers_of(int(of[0]))
        for block in range((count + 3) // 4):
            words = _words(keys[place], epoch, item, block)
            for k in range(4):
                uniform[4 * block + k] = words[k] * 2.0**-32
        if count == 1:
            numbers[column] = uniform[0]
        elif count > 1:
            for attempt in range(TRIES):
                share = of[7] + (of[8] - of[7]) * uniform[attempt]
                ratio = math.exp(of[9] + (of[10] - of[9]) * uniform[TRIES + attempt])
                numbers[column + 2 * attempt] = math.sqrt(share * ratio)
                numbers[column + 2 * attempt + 1] = math.sqrt(share / ratio)
            for k in range(2 * TRIES, count):
                numbers[column + k] = uniform[k]


@inlined
def _plain(axis: Any) -> Any:
    """Return an axis as a tuple without names, as kernels take it."""
    return (
        axis.start,
        axis.extent,
        axis.length,
        axis.resized,
        axis.window_start,
        axis.window_length,
        axis.is_flipped,
    )


@inlined
def _decode(functions: Any, handle: Any, data: Any, shrink: Any, region: Box, pixels: Any) -> Any:
    """Return whether libjpeg-turbo decoded a region at 1/shrink, without a warning."""
    at, size = data.ctypes.data, data.size
    if _read_header_of(functions[0], (handle, at, size)) != 0:
        _decode_of(functions[3], (handle, 0, 0, 0, 0, RGB))  # as in `TurboJpeg.decode`
        return False
    return (
        _set_scale_of(functions[1], (handle, 1 | shrink << 32)) == 0
        and _set_region_of(
            functions[2], (handle, region.left | region.top << 32, region.width | region.height << 32)
        )
        == 0
        and _decode_of(functions[3], (handle, at, size, pixels.ctypes.data, 0, RGB)) == 0
    )


@inlined
def _region_in(header: Any, box: Any, shrink: Any) -> Any:
    """Return the region to decode at 1/shrink for a box of stored pixels."""
    return _region_of(
        box, shrink, -(-header.height // shrink), -(-header.width // shrink), header.unit_columns
    )


@inlined
def _passes_of(found: Any, shrink: Any) -> Any:
    """Return how a geometry is resampled across and down, the most pixels of a sum, and the scratch bytes it takes."""
    across, down = _axes_of(found, shrink)
    taps = _most_taps(across.extent / across.resized, down.extent / down.resized, found.resampling)
    return across, down, taps, _scratch_bytes(found.window.width, found.window.height, down.length, taps)


@inlined
def _offset_in(region: Any, box: Any, shrink: Any) -> Any:
    """Return where in the bytes of a decoded region a box begins."""
    return 3 * ((box.top // shrink - region.top) * region.width + box.left // shrink - region.left)


@entry
def _crop_of(
    rows: Any, columns: Any, steps: Any, keys: Any, epoch: Any, sample: Any, numbers: Any
) -> tuple[Any, Any]:
    """Return whether one pass makes the crop of a sample for an epoch, and its geometry."""
    _draw(steps, keys, epoch, sample, numbers)
    return _geometry_of(rows, columns, steps, numbers)  # type: ignore[no-any-return]


@entry
def _widen(regions: Any, shrink: Any, box: Any) -> None:
    """Have the region at a scale hold a box. Regions are zeros at first."""
    at = _SIDES * ((shrink > 1) + (shrink > 2) + (shrink > 4))
    bottom, right = box.top + box.height, box.left + box.width
    is_first = regions[at + _BOTTOM] == 0
    regions[at + _TOP] = box.top if is_first else min(regions[at + _TOP], box.top)
    regions[at + _LEFT] = box.left if is_first else min(regions[at + _LEFT], box.left)
    regions[at + _BOTTOM] = max(regions[at + _BOTTOM], bottom)
    regions[at + _RIGHT] = max(regions[at + _RIGHT], right)


def _loop(resample: Any) -> Any:
    """Return the loop that ends in a loop of `kernels.resample_to`.

    functions, handle: of libjpeg-turbo, `TurboJpeg.addresses` and a handle.
    steps: float64[n, fields], `StepNumbers`. keys: uint64[n], of their draws.
    numbers: float64[...], scratch for what is drawn for a sample.
    pixels, scratch: uint8[...], the thread's buffers.
    parameters, channels_last: of `resample`.
    files: int64[3, n], of each the address of the array object that holds it, its row, and its sample; overwritten: in
        front of the first line, which ones were left. Among them may be decoded pictures, uint8[rows, columns, 3],
        C-contiguous.
    epoch: of the draws.
    out: [batch, *shape of a sample], written.
    later: int64[n, most], of each the rows of `crops` where its crops of the epochs behind `epoch` go, below 0 behind
        the last; int64[0, 0] for none. crops: uint8[*, height, width, 3] of the size of a sample, written.
    Returns: how many were left. Some of their crops may be written.
    """

    @entry
    def decode(
        functions: Any,
        handle: Any,
        steps: Any,
        keys: Any,
        numbers: Any,
        pixels: Any,
        scratch: Any,
        parameters: Any,
        channels_last: Any,
        files: Any,
        epoch: Any,
        out: Any,
        later: Any,
        crops: Any,
    ) -> Any:
        left, regions = 0, stack_zeros(np.int64, 16)  # _SCALES times _SIDES
        for k in range(files.shape[1]):
            data, row, sample, count = _bytes_of(files[0, k]), files[1, k], files[2, k], 1
            while count <= later.shape[1] and 0 <= later[k, count - 1] < crops.shape[0]:
                count += 1
            is_picture, rows, columns = _picture_of(files[0, k])
            is_done, header = _header_of(data)
            if not is_picture:
                rows, columns = header.height, header.width
            is_done = (is_done or is_picture) and 0 <= row < out.shape[0]
            found = _whole(rows, columns)
            regions[:] = 0
            for ahead in range(count):
                if is_done:
                    is_done, found = _crop_of(rows, columns, steps, keys, epoch + ahead, sample, numbers)
                    height, width = found.window.height, found.window.width
                    is_done = (
                        is_done
                        and height == (out.shape[1] if channels_last else out.shape[2])
                        and width == (out.shape[2] if channels_last else out.shape[3])
                    )
                    _widen(regions, 1 if is_picture else _choose_shrink(found), found.box)
            for scale in range(_SCALES):
                shrink, at = 1 << scale, _SIDES * scale
                top, left_edge = regions[at + _TOP], regions[at + _LEFT]
                if not is_done or regions[at + _BOTTOM] == 0:
                    continue
                box = Box(top, left_edge, regions[at + _BOTTOM] - top, regions[at + _RIGHT] - left_edge)
                region = Box(0, 0, rows, columns) if is_picture else _region_in(header, box, shrink)
                decoded = data.ctypes.data if is_picture else pixels.ctypes.data
                size = _pixel_bytes(rows, columns) if is_picture else pixels.size
                is_done = _pixel_bytes(region.height, region.width) <= size and (
                    is_picture or _decode(functions, handle, data, shrink, region, pixels)
                )
                for ahead in range(count):
                    if count > 1:
                        _, found = _crop_of(rows, columns, steps, keys, epoch + ahead, sample, numbers)
                    if not is_done or (not is_picture and _choose_shrink(found) != shrink):
                        continue
                    across, down, taps, scratch_bytes = _passes_of(found, shrink)
                    is_done = scratch_bytes <= scratch.size
                    source, offset = (
                        array_at(decoded, (size,), np.uint8),
                        _offset_in(region, found.box, shrink),
                    )
                    stride, axes = 3 * region.width, (_plain(across), _plain(down))
                    how = found.resampling
                    if is_done and ahead == 0:
                        target = out[row]
                        resample(
                            source,
                            offset,
                            stride,
                            *axes,
                            how,
                            taps,
                            scratch,
                            parameters,
                            target,
                            channels_last,
                        )
                    elif is_done:
                        crop = crops[later[k, ahead - 1]]
                        _resample_to_uint8(source, offset, stride, *axes, how, taps, scratch, (), crop, True)
            if not is_done:
                files[0, left] = k
                left += 1
        return left

    return decode


def compile_part(name: str) -> MachineCode:
    """Return the machine code of one loop of GROUP_SIGNATURES."""
    with with_short_vectors():
        return machine_code(_loop(resample_to(name.removeprefix("group_"))), GROUP_SIGNATURES[name])
