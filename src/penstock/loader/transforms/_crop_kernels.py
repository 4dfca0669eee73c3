"""Loops over crops that are kept: a group of them is written to a slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.kernel import array_at, entry, inlined, machine_code
from penstock.loader.transforms.compiled import CROP_SIGNATURES
from penstock.loader.transforms.kernels import LINES, with_short_vectors
from penstock.machine_code import ARRAY, DATA, MachineCode


@inlined
def _address_of(array: Any) -> Any:
    """Return where the items of an array are, of the address of its object."""
    return array_at(array + ARRAY, (1,), np.int64)[DATA]


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
        return machine_code(_WRITERS[name], CROP_SIGNATURES[name])
