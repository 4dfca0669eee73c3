"""The loop that reads pieces of open files.

It calls the C library by itself, so that a thread does not wait for the interpreter's lock between two samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from penstock.kernel import c_function, entry, machine_code, stack_zeros
from penstock.machine_code import MachineCode
from penstock.store.packed import SIGNATURE

_known: Any = types
_preadv = c_function("preadv", _known.int64, _known.int32, _known.intp, _known.int32, _known.int64)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@entry
def read_pieces(
    descriptors: Ints, offsets: Ints, sizes: Ints, into: Bytes, begins: Ints, failed: Ints
) -> int:
    """Read pieces of files; return how many of them failed.

    descriptors, offsets, sizes: int64[n], of each piece an open file, where it begins, its bytes.
    into: uint8[...], written: piece k goes to into[begins[k]:begins[k] + sizes[k]]. That it fits is checked before.
    begins: int64[n].
    failed: int64[n], written: in front, which pieces are empty or could not be read to their end; ascending.

    Measured: benchmarks/loader/records.py.
    """
    vector = stack_zeros(np.int64, 2)  # a `struct iovec`
    count = 0
    for k in range(descriptors.size):
        found, got = 0, 1
        while got > 0 and found < sizes[k]:  # a read may return less than there is, and is continued
            vector[0], vector[1] = into.ctypes.data + begins[k] + found, sizes[k] - found
            got = _preadv(descriptors[k], vector.ctypes.data, 1, offsets[k] + found)
            found += max(got, 0)
        if sizes[k] == 0 or found != sizes[k]:
            failed[count] = k
            count += 1
    return count


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "read_pieces"."""
    return machine_code(globals()[name], SIGNATURE)
