"""Many small NumPy arrays copied by one compiled call: NumPy looks at each anew, which takes longer than its bytes do.

The call reads the arrays' objects, laid out as `penstock.machine_code` has checked, while it holds the interpreter's
lock. Arrays that it does not take (of another dtype, of a subclass, not contiguous) are left to NumPy.

Decided in docs/decisions/0039-arrays-by-their-addresses.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Part
from penstock.machine_code import Loop, Signature, items_of

Ints = NDArray[np.int64]

SIGNATURE = Signature(
    ("int64", "int64[:]", "int64[:, :]", "int64", "int64[:, :]", "uint8[:]"), results=("int64",)
)
GATHER = Part(
    "penstock.loader._gather_kernels",
    "gather",
    SIGNATURE,
    "how arrays of samples are copied into batches",
    "NumPy copies them, more slowly,",
)

#: Copying more takes longer than having the interpreter's lock back.
_LOCKED_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Found:
    """Arrays that are alike, and where they lie.

    places: int64[arrays, 2], address and length, 1 where all of the shape is fixed; valid until an array is changed.
    item_bytes: of what has length 1.
    """

    arrays: tuple[NDArray[Any], ...]
    places: Ints
    item_bytes: int

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.arrays[index]

    @property
    def lengths(self) -> Ints:
        """int64[arrays]."""
        return self.places[:, 1]

    def copy(
        self, parts: Sequence[slice], outs: Sequence[NDArray[Any]], filler: NDArray[Any] | None = None
    ) -> None:
        """Copy parts of the arrays, each to an array of its own, which has space for them.

        outs: C-contiguous, [sum of lengths, ...], or with a filler [arrays, width] each.
        filler: [1], what stands behind shorter arrays.
        """
        row_bytes = [0 if filler is None else out.shape[1] * out.itemsize for out in outs]
        places = [
            (part.start, part.stop, id(out), width)
            for part, out, width in zip(parts, outs, row_bytes, strict=True)
        ]
        gather: Callable[..., Any] = GATHER.wait()
        if sum(out.nbytes for out in outs) < _LOCKED_BYTES:
            gather = _short(GATHER.wait())
        item = _NO_BYTES if filler is None else filler.view(np.uint8)
        gather(0, _NO_WORDS, self.places, self.item_bytes, np.array(places, np.int64).reshape(-1, 4), item)


#: Where a call does not look, or does not copy.
_NO_WORDS, _NO_PLACES, _NO_BYTES = np.empty(0, np.int64), np.empty((0, 4), np.int64), np.empty(0, np.uint8)


@cache
def _short(loop: Loop) -> Callable[..., Any]:
    """Return the loop, called with the interpreter's lock held: binding takes longer than copying short arrays."""
    return loop.bound_and_short()


def find(
    arrays: Sequence[Any], dtype: np.dtype[Any], shape: Sequence[int], *, is_free: bool = False
) -> Found | None:
    """Return where arrays of a dtype and shape lie; None where one is another, or nothing is compiled yet.

    is_free: whether the first length does not count.
    """
    if not arrays or type(arrays[0]) is not np.ndarray or (gather := GATHER.ask()) is None:
        return None
    # Types of NumPy's own are one object each: the others are compared once, and are that object then.
    if (found_dtype := arrays[0].dtype) != dtype:
        return None
    objects = tuple(arrays)
    wanted = np.array([id(np.ndarray), id(found_dtype), len(shape), is_free, *shape])
    places = np.empty((len(objects), 2), np.int64)
    if _short(gather)(items_of(objects), wanted, places, 0, _NO_PLACES, _NO_BYTES) < len(objects):
        return None
    return Found(objects, places, math.prod(shape[is_free:]) * dtype.itemsize)
