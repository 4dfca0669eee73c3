"""The loop that asks for the sizes of files, without the interpreter's lock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import entry, function_at, machine_code, stack_zeros
from penstock.machine_code import MachineCode
from penstock.store.listing import STAT_SIGNATURE

#: int statx(int directory, const char *path, int flags, unsigned mask, struct statx *found)
_statx = function_at(32, 64, 32, 32, 64)
_TYPE_AND_SIZE = 0x1 | 0x200
_REGULAR = 0o100000

Ints = NDArray[np.int64]


@entry
def stat_files(
    statx: int, directory: int, names: NDArray[np.uint8], starts: Ints, which: Ints, sizes: Ints
) -> None:
    """Ask for the sizes of files.

    statx: address of the C library's function. directory: descriptor of the folder that names are relative to.
    names: uint8[...], each closed by a NUL. starts: int64[files], where each begins. which: int64[n], files.
    sizes: int64[files], written for these: size, or -1 for what is not there, not allowed or no regular file.

    Measured: benchmarks/catalog.py.
    """
    # `struct statx`: type and rights are the upper half of bytes 24 to 31, the size is bytes 40 to 47.
    found = stack_zeros(np.int64, 32)
    for k in range(which.size):
        file = which[k]
        path = names.ctypes.data + starts[file]
        failed = _statx(statx, (directory, path, 0, _TYPE_AND_SIZE, found.ctypes.data))
        is_regular = (found[3] >> 32) & 0o170000 == _REGULAR
        sizes[file] = found[5] if failed == 0 and is_regular else -1


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "stat_files"."""
    return machine_code(globals()[name], STAT_SIGNATURE)
