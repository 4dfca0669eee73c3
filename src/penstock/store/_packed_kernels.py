"""The loop that reads pieces of open files, or copies them from where these are mapped.

It calls the C library by itself, so that a thread does not wait for the interpreter's lock between two samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from penstock.kernel import (
    LINE_BYTES,
    c_function,
    copy_line_past_caches,
    entry,
    fence,
    inlined,
    load_ahead,
    machine_code,
    stack_zeros,
)
from penstock.machine_code import MachineCode
from penstock.store.packed import SIGNATURE

_known: Any = types
_preadv = c_function("preadv", _known.int64, _known.int32, _known.intp, _known.int32, _known.int64)
_memcpy = c_function("memcpy", _known.intp, _known.intp, _known.intp, _known.intp)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

#: Pieces of mapped files begin to be loaded so long before they are copied: each is on a page that the processor has to
#: look up.
_AHEAD = 2
#: A group of so many bytes is stored past the caches: it would not stay in them until the training reads it, and each
#: line would first be read, to be overwritten.
_PAST_CACHES_BYTES = 1 << 20


@inlined
def _copy_past_caches(target: int, source: int, size: int) -> None:
    front = min(-target & (LINE_BYTES - 1), size)
    lines_end = front + ((size - front) & -LINE_BYTES)
    if front > 0:
        _memcpy(target, source, front)
    for at in range(front, lines_end, LINE_BYTES):
        copy_line_past_caches(target + at, source + at)
    if lines_end < size:
        _memcpy(target + lines_end, source + lines_end, size - lines_end)


@entry
def read_pieces(
    files: Ints, places: Ints, offsets: Ints, sizes: Ints, into: Bytes, begins: Ints, failed: Ints
) -> int:
    """Read pieces of files; return how many of them failed.

    files: int64[files, 3], of each its descriptor; where it is mapped, and how many bytes, or 0 and 0.
    places, offsets, sizes: int64[n], of each piece its row of `files`, where it begins, its bytes.
    into: uint8[...], written: piece k goes to into[begins[k]:begins[k] + sizes[k]]. That it fits is checked before.
    begins: int64[n].
    failed: int64[n], written: in front, which pieces are empty or could not be read to their end; ascending.

    Measured: benchmarks/loader/records.py.
    """
    vector = stack_zeros(np.int64, 2)  # a `struct iovec`
    target, count, pieces = into.ctypes.data, 0, places.size
    is_large = pieces > 0 and begins[pieces - 1] + sizes[pieces - 1] - begins[0] >= _PAST_CACHES_BYTES
    for k in range(pieces):
        descriptor, address, end = files[places[k], 0], files[places[k], 1], files[places[k], 2]
        size, offset = sizes[k], offsets[k]
        if k + _AHEAD < pieces:
            load_ahead(files[places[k + _AHEAD], 1] + offsets[k + _AHEAD])
        if size > 0 and 0 <= offset <= end - size:
            if is_large:
                _copy_past_caches(target + begins[k], address + offset, size)
            else:
                _memcpy(target + begins[k], address + offset, size)
            continue
        found, got = 0, 1
        while got > 0 and found < size:  # a read may return less than there is, and is continued
            vector[0], vector[1] = target + begins[k] + found, size - found
            got = _preadv(descriptor, vector.ctypes.data, 1, offset + found)
            found += max(got, 0)
        if size == 0 or found != size:
            failed[count] = k
            count += 1
    if is_large:
        fence()
    return count


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "read_pieces"."""
    return machine_code(globals()[name], SIGNATURE)
