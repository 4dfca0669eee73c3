"""The loop that looks at NumPy arrays and copies them, over the addresses of their objects."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from penstock.kernel import array_at, c_function, entry, inlined, load_ahead, machine_code
from penstock.loader.gather import SIGNATURE
from penstock.machine_code import (
    ARRAY,
    DATA,
    DESCRIPTION,
    DIMENSIONS,
    FLAGS,
    IS_C_CONTIGUOUS,
    SHAPE,
    MachineCode,
)

_known: Any = types
_memcpy = c_function("memcpy", _known.intp, _known.intp, _known.intp, _known.intp)

Ints = NDArray[np.int64]

#: Where an array's fields begin in its object, and where they end, in words.
_HEAD = ARRAY // 8
_WORDS = _HEAD + FLAGS + 1
#: The bits of a C int in a word.
_OF_INT = 0xFFFFFFFF
#: Arrays begin to be loaded so long before they are copied: they may lie anywhere.
_AHEAD = 4


@inlined
def _fill(target: int, nbytes: int, item: int, item_bytes: int) -> None:
    """Repeat an item: what is written is copied behind itself, each time twice as much."""
    done = min(item_bytes, nbytes)
    if done > 0:
        _memcpy(target, item, done)
    while done < nbytes:
        some = min(done, nbytes - done)
        _memcpy(target + done, target, some)
        done += some


@entry
def gather(
    objects: int, wanted: Ints, found: Ints, item_bytes: int, places: Ints, filler: NDArray[np.uint8]
) -> int:
    """Find where arrays lie, and how long they are, if wanted says something; copy them to places, if there are any.

    Return how many are as wanted, from the front.
    objects: address of the addresses of Python objects, one for each row of found. Nobody may change them meanwhile.
    wanted: int64[4 + n] or empty: addresses of the type and of the dtype; the number of dimensions, n; 1 if the first
        may be of any length, else 0; the shape.
    found: int64[arrays, 2], written or read: address of the items, and length; 1 where all of the shape is fixed.
    item_bytes: of what has length 1.
    places: int64[places, 4], of each: its first row of found, the row behind its last, the address of the array to copy
        to, and the bytes of a row there; 0 where each begins behind the one before. That they fit is the caller's care.
    filler: uint8[item], what the rest of a row is filled with, again and again.

    Measured: benchmarks/loader/ragged.py.
    """
    ndim, first = (wanted[2], wanted[3]) if wanted.size > 0 else (0, 0)
    addresses = array_at(objects, (found.shape[0],), np.int64)
    for sample in range(found.shape[0] if wanted.size > 0 else 0):
        words = array_at(addresses[sample], (_WORDS,), np.int64)
        if words[_HEAD - 1] != wanted[0] or words[_HEAD + DESCRIPTION] != wanted[1]:
            return sample
        if words[_HEAD + DIMENSIONS] & _OF_INT != ndim or not words[_HEAD + FLAGS] & IS_C_CONTIGUOUS:
            return sample
        shape = array_at(words[_HEAD + SHAPE], (ndim,), np.int64)
        for axis in range(first, ndim):
            if shape[axis] != wanted[4 + axis]:
                return sample
        found[sample, 0] = words[_HEAD + DATA]
        found[sample, 1] = shape[0] if first else 1
    for place in range(places.shape[0]):
        at = array_at(places[place, 2], (_WORDS,), np.int64)[_HEAD + DATA]
        row_bytes = places[place, 3]
        for sample in range(places[place, 0], places[place, 1]):
            if sample + _AHEAD < found.shape[0]:
                load_ahead(found[sample + _AHEAD, 0])
            nbytes = found[sample, 1] * item_bytes
            if nbytes > 0:
                _memcpy(at, found[sample, 0], nbytes)
            if row_bytes > 0:
                _fill(at + nbytes, row_bytes - nbytes, filler.ctypes.data, filler.size)
            at += max(nbytes, row_bytes)
    return int(found.shape[0])


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "gather"."""
    return machine_code(globals()[name], SIGNATURE)
