"""The loop that reads a group of files, each of a known size.

It calls the C library by itself, so that a thread does not wait for the interpreter's lock between two files.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from penstock.kernel import c_function, entry, machine_code, open_file, stack_zeros
from penstock.machine_code import MachineCode
from penstock.store.files import SIGNATURE

#: Opening never waits here, as for a pipe without a writer. Reading one sample at a time may wait: that can be reported
#: and interrupted, and this loop cannot.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
#: Longest path that Linux opens, with the NUL that closes it.
_PATH_BYTES = 4096
_SLASH = ord("/")

_known: Any = types
_preadv = c_function("preadv", _known.int64, _known.int32, _known.intp, _known.int32, _known.int64)
_close = c_function("close", _known.int32, _known.int32)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@entry
def read_files(
    prefix: Bytes, names: Bytes, starts: Ints, sizes: Ints, ids: Ints, into: Bytes, begins: Ints, failed: Ints
) -> int:
    """Read files; return how many of them failed, or -1, and nothing is read, if an id or the place of one is wrong.

    prefix: uint8[...], put before each name that is not absolute.
    names: uint8[...], each closed by a NUL. starts: int64[samples], where each name begins.
    sizes: int64[samples], size of each file. ids: int64[n], samples.
    into: uint8[...], written: sample k goes to into[begins[k]:begins[k] + sizes[ids[k]]].
    begins: int64[n + 1].
    failed: int64[n], written: in front, which of the ids could not be read, or has not its size; ascending.

    Measured: benchmarks/reading.py.
    """
    if begins.size != ids.size + 1:
        return -1
    for k in range(ids.size):
        if not 0 <= ids[k] < sizes.size:
            return -1
        if not 0 <= begins[k] <= begins[k + 1] <= into.size or begins[k + 1] - begins[k] < sizes[ids[k]]:
            return -1
    path = stack_zeros(np.uint8, 4096)
    begin = min(prefix.size, _PATH_BYTES)
    for at in range(begin):
        path[at] = prefix[at]
    # Two `struct iovec`: where the sample goes, and one byte beyond it, which shows that the file has grown.
    vectors, beyond = stack_zeros(np.int64, 4), stack_zeros(np.uint8, 1)
    vectors[2], vectors[3] = beyond.ctypes.data, 1
    count = 0
    for k in range(ids.size):
        sample = ids[k]
        size, character = sizes[sample], starts[sample]
        at = 0 if names[character] == _SLASH else begin
        while names[character] != 0 and at < _PATH_BYTES:
            path[at] = names[character]
            character += 1
            at += 1
        descriptor = -1
        if size > 0 and at < _PATH_BYTES:
            path[at] = 0
            descriptor = open_file(path.ctypes.data, _OPEN_FLAGS)
        found = 0
        if descriptor >= 0:
            got = 1
            while got > 0 and found < size:  # a read may return less than there is, and is continued
                vectors[0], vectors[1] = into.ctypes.data + begins[k] + found, size - found
                got = _preadv(descriptor, vectors.ctypes.data, 2, found)
                found += max(got, 0)
            _close(descriptor)
        if size == 0 or found != size:
            failed[count] = k
            count += 1
    return count


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "read_files"."""
    return machine_code(globals()[name], SIGNATURE)
