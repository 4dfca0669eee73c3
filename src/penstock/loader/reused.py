"""Memory of arrays that are handed out, used again once nobody refers to them."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Smaller arrays are the C library's: it keeps their memory by itself.
_LEAST_BYTES = 64 << 10
#: Sizes are rounded up to so many steps between powers of two, so that memory fits arrays of about one size.
_STEPS = 8
#: Of all of them, so that a fork finds none at work.
_LOCK = threading.Lock()
_ALL: weakref.WeakSet[Reused] = weakref.WeakSet()


class _Lent(weakref.ref["NDArray[Any]"]):
    """A weak reference to an array over some memory."""

    __slots__ = ("memory",)

    memory: mmap.mmap


class Reused:
    """Makes arrays. Together with what waits to be used again they take no more than arrays did at one time before.

    A page that the kernel has to supply takes longer than what is copied there, and of memory that one thread allocates
    and another frees the C library gives most back at once. Any thread may call it. A pickled copy begins empty.

    Memory of arrays that there are at a fork, which both processes then share, is used again in neither.

    Measured: docs/benchmarks.md, "Arrays of unequal length".
    """

    def __init__(self) -> None:
        #: Kept here, as a weak reference that is gone itself calls nobody.
        self._lent: dict[int, _Lent] = {}
        #: References whose arrays are gone. The callback is the queue's own: in a Python frame Ctrl-C would be lost.
        self._returned: deque[_Lent] = deque()
        #: Memory that waits, by size.
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lent_bytes = self._idle_bytes = self._most_bytes = 0
        _ALL.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reused, ()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of this shape and type, C-contiguous, whose items nobody has written."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        step = 1 << (nbytes.bit_length() - 1) >> _STEPS.bit_length() - 1
        size = -(-nbytes // step) * step
        with _LOCK:
            memory = self._memory_of(size)
        # Over a mapping: a view of an array refers to the array, unless the memory is an array, too.
        array: NDArray[Any] = np.ndarray(shape, dtype, memory)
        lent = _Lent(array, self._returned.append)
        lent.memory = memory
        self._lent[id(lent)] = lent
        return array

    def close(self) -> None:
        """Keep no memory any more, and take none back: it goes with the arrays."""
        with _LOCK:
            self._clear()

    def _clear(self) -> None:
        self._forget()
        self._idle.clear()
        self._idle_bytes = self._most_bytes = 0

    def _forget(self) -> None:
        """Take no memory back that is lent."""
        self._lent.clear()
        self._returned.clear()
        self._lent_bytes = 0

    def _memory_of(self, size: int) -> mmap.mmap:
        while self._returned:
            lent = self._returned.popleft()
            if self._lent.pop(id(lent), None) is None:
                continue
            returned = len(lent.memory)
            self._lent_bytes, self._idle_bytes = self._lent_bytes - returned, self._idle_bytes + returned
            self._idle.setdefault(returned, []).append(lent.memory)
        self._lent_bytes += size
        if found := self._idle.get(size):
            self._idle_bytes -= size
            return found.pop()
        self._most_bytes = max(self._most_bytes, self._lent_bytes)
        for other in [each for each, memories in self._idle.items() for _ in memories]:
            if self._lent_bytes + self._idle_bytes <= self._most_bytes:
                break
            self._idle[other].pop()
            self._idle_bytes -= other
        return mmap.mmap(-1, size)


def _after_fork(forget: Callable[[Reused], None]) -> None:
    try:
        for each in list(_ALL):
            forget(each)
    finally:
        _LOCK.release()


os.register_at_fork(
    before=_LOCK.acquire,
    after_in_parent=partial(_after_fork, Reused._forget),
    after_in_child=partial(_after_fork, Reused._clear),
)
