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
#: look up, and many end on the next one.
_AHEAD = 2
#: Of smaller ones all lines, where none of the caches is for what is copied: 1 and 2 KB take 0.88 of the time then.
#: Larger ones the processor loads ahead by itself.
_LINES_AHEAD_BYTES = 4096
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


@inlined
def _piece(
    k: int, ids: Ints, ends: Ints, origins: Ints, step: int, places: Ints, offsets: Ints, sizes: Ints
) -> tuple[int, int, int]:
    """Return the file of a piece, where it begins there, and its bytes; see `read_pieces`."""
    if places.size > 0:
        return places[k], offsets[k], sizes[k]
    sample, place, last = ids[k], 0, ends.size - 1
    while place < last:
        middle = (place + last) >> 1
        if ends[middle] > sample:
            last = middle
        else:
            place = middle + 1
    size = sizes[0] if sizes.size == 1 else sizes[sample]
    offset = offsets[sample] if offsets.size > 0 else origins[place] + sample * step
    return place, offset, size


@inlined
def _size(k: int, ids: Ints, sizes: Ints) -> int:
    """Return the bytes of a piece; see `read_pieces`."""
    size: int = sizes[0] if sizes.size == 1 else sizes[ids[k]] if ids.size > 0 else sizes[k]
    return size


@inlined
def _has_space(ids: Ints, ends: Ints, sizes: Ints, into: Bytes, begins: Ints) -> bool:
    """Return whether there are these samples, and each has space."""
    for k in range(ids.size):
        if not 0 <= ids[k] < ends[ends.size - 1]:
            return False
        size = sizes[0] if sizes.size == 1 else sizes[ids[k]]
        if not 0 <= begins[k] <= begins[k + 1] <= into.size or begins[k + 1] - begins[k] < size:
            return False
    return True


@entry
def read_pieces(
    files: Ints,
    ids: Ints,
    ends: Ints,
    origins: Ints,
    step: int,
    places: Ints,
    offsets: Ints,
    sizes: Ints,
    into: Bytes,
    begins: Ints,
    failed: Ints,
) -> int:
    """Read pieces of files; return how many of them failed, or -1 where there is no such sample, or no space for it.

    files: int64[files, 3], of each its descriptor; where it is mapped, and how many bytes, or 0 and 0.
    ids, ends, origins, step, offsets, sizes: the samples that the pieces are, int64[n], and `Layout`; or
    places, offsets, sizes: int64[n], of each piece its row of `files`, where it begins, its bytes; then the others are
        empty, and that all pieces fit is checked before.
    into: uint8[...], written: piece k goes to the front of into[begins[k]:begins[k + 1]].
    begins: int64[n + 1]; int64[n] does for places.
    failed: int64[n], written: in front, which pieces are empty or could not be read to their end; ascending.

    Measured: benchmarks/loader/records.py.
    """
    vector = stack_zeros(np.int64, 2)  # a `struct iovec`
    target, count, pieces = into.ctypes.data, 0, max(ids.size, places.size)
    if not _has_space(ids, ends, sizes, into, begins):
        return -1
    is_large = False
    if pieces > 0:
        size = _piece(pieces - 1, ids, ends, origins, step, places, offsets, sizes)[2]
        is_large = begins[pieces - 1] + size - begins[0] >= _PAST_CACHES_BYTES
    # Where each piece is mapped, or 0, in the place of failures, which are no more than the pieces before. In one loop
    # with the copies, finding the places held these up: 0.14 us for each 2 KB.
    for k in range(pieces):
        place, offset, size = _piece(k, ids, ends, origins, step, places, offsets, sizes)
        is_there = size > 0 and 0 <= offset <= files[place, 2] - size
        failed[k] = files[place, 1] + offset if is_there else 0
    for k in range(pieces):
        if k + _AHEAD < pieces:
            ahead, last = failed[k + _AHEAD], _size(k + _AHEAD, ids, sizes) - 1
            load_ahead(ahead)
            load_ahead(ahead + last)
            for at in range(LINE_BYTES, last if is_large and last < _LINES_AHEAD_BYTES else 0, LINE_BYTES):
                load_ahead(ahead + at)
        address = failed[k]
        if address != 0:
            size = _size(k, ids, sizes)
            if is_large:
                _copy_past_caches(target + begins[k], address, size)
            else:
                _memcpy(target + begins[k], address, size)
            continue
        place, offset, size = _piece(k, ids, ends, origins, step, places, offsets, sizes)
        descriptor = files[place, 0]
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
