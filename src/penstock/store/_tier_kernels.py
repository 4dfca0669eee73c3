"""The loop that reads samples of a disk tier: finds where they lie and reads them, past the page cache or through it.

Behind a wait for a disk the caches are cold, and each step of Python takes several times what it does otherwise: 75 us
of a processor went into looking one sample up, as much again into reading it, where a bare read took 40.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from penstock.kernel import c_function, entry, inlined, machine_code, stack_zeros
from penstock.machine_code import MachineCode
from penstock.store.direct import BLOCK_BYTES, SIGNATURE

_known: Any = types
_preadv = c_function("preadv", _known.int64, _known.int32, _known.intp, _known.int32, _known.int64)
_memcpy = c_function("memcpy", _known.intp, _known.intp, _known.intp, _known.intp)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@inlined
def _row_of(rows: NDArray[np.int32], sample: int) -> int:
    return max(rows[sample + 1], 0) if 0 <= sample < rows.size - 1 else 0


@entry
def read_samples(
    file: int,
    ids: Ints,
    rows: NDArray[np.int32],
    places: Ints,
    into: Bytes,
    begins: Ints,
    is_loose: int,
    buffer: Bytes,
    failed: Ints,
) -> int:
    """Read samples in the order in which they lie in the file; return how many of them failed.

    file: descriptor. ids: int64[n], any numbers.
    rows, places: as `SamplePlaces.table` returns them.
    into: uint8[...], written: sample k goes to the front of into[begins[k]:begins[k + 1]]. begins: int64[n + 1].
    is_loose: whether a sample that is read in whole blocks stays where these are: from begins[k] on, which is then
        written: where the sample begins. 0: all are copied to begins[k].
    buffer: uint8[...], written: aligned, of whole blocks, for a file that is open for direct reads; empty for others.
    failed: int64[n], written: in front, which of the ids are not there, have no space, or could not be read.

    Measured: benchmarks/loader/tiers.py.
    """
    for k in range(ids.size):  # `failed` has the order first: fewer have failed than were tried
        begin, at = places[_row_of(rows, ids[k]), 0], k
        while at > 0 and places[_row_of(rows, ids[failed[at - 1]]), 0] > begin:
            failed[at] = failed[at - 1]
            at -= 1
        failed[at] = k
    count, vector = 0, stack_zeros(np.int64, 2)  # a `struct iovec`
    for position in range(ids.size):
        k = failed[position]
        row = _row_of(rows, ids[k])
        begin, end, target = places[row, 0], places[row, 1], begins[k]
        is_read = begin >= 0 and target >= 0 and target + end - begin <= min(begins[k + 1], into.size)
        if is_read and is_loose and buffer.size:
            first = begin % BLOCK_BYTES
            wanted = -(-(first + end - begin) // BLOCK_BYTES) * BLOCK_BYTES
            # No block reaches into the space of the next one: that begins at a block, and so does this one.
            if target % BLOCK_BYTES == 0 and target + wanted <= min(begins[k + 1], into.size):
                vector[0], vector[1] = into.ctypes.data + target, wanted
                if _preadv(file, vector.ctypes.data, 1, begin - first) >= first + end - begin:
                    begins[k] = target + first
                    continue
        while is_read and begin < end:
            if buffer.size == 0:
                vector[0], vector[1] = into.ctypes.data + target, end - begin
                found = _preadv(file, vector.ctypes.data, 1, begin)
            else:
                first = begin % BLOCK_BYTES
                wanted = -(-(first + end - begin) // BLOCK_BYTES) * BLOCK_BYTES
                vector[0], vector[1] = buffer.ctypes.data, min(wanted, buffer.size)
                found = _preadv(file, vector.ctypes.data, 1, begin - first) - first
                found = min(found, end - begin)
                if found > 0:
                    _memcpy(into.ctypes.data + target, buffer.ctypes.data + first, found)
            is_read = found > 0
            begin, target = begin + found, target + found
        if not is_read:
            failed[count] = k
            count += 1
    return count


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "read_samples"."""
    return machine_code(globals()[name], SIGNATURE)
