"""Loops over crops that are kept: several of each picture made at one decoding, and a group of them written to a slot.

The rules are those by which a picture is decoded for one epoch (`_group_kernels`): the smallest region is decoded in
which all of its crops lie, once for each scale that they ask for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.kernel import array_at, entry, inlined, machine_code, stack_zeros
from penstock.loader.transforms import _group_kernels as group
from penstock.loader.transforms.compiled import CROP_SIGNATURES
from penstock.loader.transforms.geometry import Box
from penstock.loader.transforms.kernels import LINES, resample_to, with_short_vectors
from penstock.machine_code import ARRAY, DATA, MachineCode

_draw, _geometry_of, _header_of, _decode = group._draw, group._geometry_of, group._header_of, group._decode
_bytes_of, _plain, _region_in = group._bytes_of, group._plain, group._region_in
_passes_of, _offset_in = group._passes_of, group._offset_in
_choose_shrink, _pixel_bytes = group._choose_shrink, group._pixel_bytes
_resample_to_uint8 = resample_to("uint8")

# Of the region that is decoded at one scale, in stored pixels: rows TOP to BOTTOM, columns LEFT to RIGHT.
_TOP, _LEFT, _BOTTOM, _RIGHT, _SIDES = 0, 1, 2, 3, 4
#: 1/1, 1/2, 1/4 and 1/8.
_SCALES = 4


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


@inlined
def _address_of(array: Any) -> Any:
    """Return where the items of an array are, of the address of its object."""
    return array_at(array + ARRAY, (1,), np.int64)[DATA]


@entry
def make_crops(
    functions: Any,
    handle: Any,
    steps: Any,
    keys: Any,
    numbers: Any,
    pixels: Any,
    scratch: Any,
    height: Any,
    width: Any,
    files: Any,
    epoch: Any,
    targets: Any,
) -> Any:
    """Make the crops of several epochs, from `epoch` on, of each of some files.

    functions to scratch: as for `_group_kernels`. height, width: of a crop.
    files: int64[3, n], of each the address of the array object that holds it, the sample, and how many crops;
        overwritten: in front of the first line, which ones were left.
    targets: int64[n, most], addresses of the array objects that hold the crops, uint8[height, width, 3]; some of a file
        that was left are written.
    Returns: how many were left.
    """
    count, regions = 0, stack_zeros(np.int64, 16)
    for k in range(files.shape[1]):
        data, sample, crops = _bytes_of(files[0, k]), files[1, k], min(files[2, k], targets.shape[1])
        is_done, header = _header_of(data)
        regions[:] = 0
        for ahead in range(crops):
            if is_done:
                is_done, found = _crop_of(
                    header.height, header.width, steps, keys, epoch + ahead, sample, numbers
                )
                is_done = is_done and found.window.height == height and found.window.width == width
                _widen(regions, _choose_shrink(found), found.box)
        for scale in range(_SCALES):
            shrink, at = 1 << scale, _SIDES * scale
            top, left = regions[at + _TOP], regions[at + _LEFT]
            if not is_done or regions[at + _BOTTOM] == 0:
                continue
            box = Box(top, left, regions[at + _BOTTOM] - top, regions[at + _RIGHT] - left)
            region = _region_in(header, box, shrink)
            is_done = _pixel_bytes(region.height, region.width) <= pixels.size and _decode(
                functions, handle, data, shrink, region, pixels
            )
            for ahead in range(crops):
                _, found = _crop_of(header.height, header.width, steps, keys, epoch + ahead, sample, numbers)
                if not is_done or _choose_shrink(found) != shrink:
                    continue
                across, down, taps, scratch_bytes = _passes_of(found, shrink)
                is_done = scratch_bytes <= scratch.size
                if is_done:
                    _resample_to_uint8(
                        pixels,
                        _offset_in(region, found.box, shrink),
                        3 * region.width,
                        _plain(across),
                        _plain(down),
                        found.resampling,
                        taps,
                        scratch,
                        (),
                        array_at(_address_of(targets[k, ahead]), (height, width, 3), np.uint8),
                        True,
                    )
        if not is_done:
            files[0, count] = k
            count += 1
    return count


def _writer(write_line: Any) -> Any:
    """Return the loop that writes crops into a slot, line by line.

    parameters, channels_last: of `write_line`, one of `kernels.LINES`. height, width: of a crop.
    crops: int64[2, n], of each the address of the array object that holds it, uint8[height, width, 3], and its row.
    out: [batch, *shape of a sample], written.
    Returns: how many were not written: of rows that are not there.
    """

    @entry
    def write(parameters: Any, channels_last: Any, height: Any, width: Any, crops: Any, out: Any) -> Any:
        left = 0
        for k in range(crops.shape[1]):
            row = crops[1, k]
            if row < 0 or row >= out.shape[0]:
                left += 1
                continue
            pixels, image = array_at(_address_of(crops[0, k]), (height, 3 * width), np.uint8), out[row]
            for line in range(height):
                write_line(pixels[line], parameters, image, line, channels_last)
        return left

    return write


_WRITERS = {f"crops_to_{name}": _writer(write_line) for name, write_line in LINES.items()}
_WRITERS["crops_to_numbers"] = _writer(LINES["table"])


def compile_part(name: str) -> MachineCode:
    """Return the machine code of one loop of CROP_SIGNATURES."""
    with with_short_vectors():
        return machine_code(make_crops if name == "make_crops" else _WRITERS[name], CROP_SIGNATURES[name])
