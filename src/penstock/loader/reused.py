"""Memory of arrays that are handed out, used again once nobody refers to them."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.store.direct import HUGE_BYTES, in_blocks, new_large_pages

#: Smaller arrays are the C library's: it keeps their memory by itself.
_LEAST_BYTES = 64 << 10
#: Sizes are rounded up to so many steps between powers of two, so that memory fits arrays of about one size.
_STEPS = 8
#: Memory that waits may be so many times as large as its array.
_LOOSE = 1.125
#: Of a mapping with large pages: of it, arrays take memory as they come, and the kernel supplies a page when one does.
_REGION_BYTES = 32 << 20
#: Of its pages: what the kernel takes back without breaking one up.
_PAGE_BYTES = HUGE_BYTES
#: Of all of them, so that a fork finds none at work.
_LOCK = threading.Lock()
_ALL: weakref.WeakSet[Reused] = weakref.WeakSet()


class _Piece(NamedTuple):
    """A part of a mapping that is lent to one array."""

    memory: mmap.mmap
    begin: int
    nbytes: int


class _Lent(weakref.ref["NDArray[Any]"]):
    """A weak reference to an array over some memory."""

    __slots__ = ("piece",)

    piece: _Piece


class _Mappings:
    """Lends mappings, each as large as its array; those that come back wait for arrays of about the same size."""

    def __init__(self) -> None:
        #: Memory that waits, by size.
        self._idle: dict[int, list[mmap.mmap]] = {}
        self.lent_bytes = self.idle_bytes = self._most_bytes = 0

    def take(self, nbytes: int) -> _Piece:
        step = 1 << (nbytes.bit_length() - 1) >> _STEPS.bit_length() - 1
        size = -(-nbytes // step) * step
        # One step larger, too: arrays of sizes to both sides of a step would drop each other's memory.
        fitting = [
            each for each, memories in self._idle.items() if memories and size <= each <= size * _LOOSE
        ]
        if fitting:
            size = min(fitting)
            self.lent_bytes += size
            self.idle_bytes -= size
            return _Piece(self._idle[size].pop(), 0, size)
        self.lent_bytes += size
        self._most_bytes = max(self._most_bytes, self.lent_bytes)
        for other in [each for each, memories in self._idle.items() for _ in memories]:
            if self.lent_bytes + self.idle_bytes <= self._most_bytes:
                break
            self._idle[other].pop()
            self.idle_bytes -= other
        return _Piece(mmap.mmap(-1, size), 0, size)

    def give_back(self, piece: _Piece) -> None:
        self.lent_bytes, self.idle_bytes = self.lent_bytes - piece.nbytes, self.idle_bytes + piece.nbytes
        self._idle.setdefault(piece.nbytes, []).append(piece.memory)

    def forget(self) -> None:
        """Take no memory back that is lent."""
        self.lent_bytes = 0

    def clear(self) -> None:
        """Keep none that waits, either."""
        self._idle.clear()
        self.lent_bytes = self.idle_bytes = self._most_bytes = 0


@dataclass(slots=True)
class _Region:
    """A mapping of which pieces are lent.

    first: where the first page begins. holes: begins and ends of what is not lent, ascending; lent_bytes: of what is.
    supplied: numbers of the pages that arrays had and that the kernel did not get back since.
    """

    memory: mmap.mmap
    first: int
    nbytes: int
    holes: list[tuple[int, int]]
    lent_bytes: int = 0
    supplied: set[int] = field(default_factory=set)

    def take(self, nbytes: int) -> _Piece | None:
        for index, (begin, end) in enumerate(self.holes):
            if end - begin >= nbytes:
                self.holes[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self.lent_bytes += nbytes
                within = begin - self.first
                self.supplied.update(range(within // _PAGE_BYTES, -(-(within + nbytes) // _PAGE_BYTES)))
                return _Piece(self.memory, begin, nbytes)
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        self.lent_bytes -= nbytes
        end, at = begin + nbytes, bisect(self.holes, (begin, begin))
        if at < len(self.holes) and self.holes[at][0] == end:
            end = self.holes.pop(at)[1]
        if at and self.holes[at - 1][1] == begin:
            at -= 1
            begin = self.holes.pop(at)[0]
        self.holes.insert(at, (begin, end))

    def drop(self, most: int) -> None:
        """Give so many pages at most back to the kernel, the last of those that lie in holes."""
        for begin, end in reversed(self.holes):
            whole = range(-((self.first - begin) // _PAGE_BYTES), (end - self.first) // _PAGE_BYTES)
            for page in [each for each in reversed(whole) if each in self.supplied][:most]:
                self.memory.madvise(mmap.MADV_DONTNEED, self.first + page * _PAGE_BYTES, _PAGE_BYTES)
                self.supplied.remove(page)
                most -= 1


class _LargePages:
    """Lends pieces of mappings that have pages of 2 MB, each in the first hole in which it fits.

    Of what waits, the kernel has supplied what was in use before: the first holes are used most. It gets pages back of
    which nothing is lent before there are an eighth more than arrays ever took at one time, and so many addresses go
    with mappings of which nothing is lent.
    """

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}
        self.lent_bytes = self._most_bytes = 0

    def take(self, nbytes: int) -> _Piece:
        nbytes = in_blocks(nbytes)
        self.lent_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self.lent_bytes)
        for region in self._regions.values():
            before = len(region.supplied)
            if (piece := region.take(nbytes)) is not None:
                if len(region.supplied) > before:
                    self._drop()
                return piece
        size = -(-nbytes // _REGION_BYTES) * _REGION_BYTES
        for number, region in list(self._regions.items()):
            if size + sum(each.nbytes for each in self._regions.values()) <= self._most_bytes:
                break
            if not region.lent_bytes:
                del self._regions[number]
        memory, first = new_large_pages(size)
        region = self._regions[id(memory)] = _Region(memory, first, size, [(first, first + size)])
        piece = region.take(nbytes)
        assert piece is not None, "it is as large"
        self._drop()
        return piece

    def _drop(self) -> None:
        """Give pages back to the kernel that are beyond what arrays took at one time, and an eighth."""
        most = -(-self._most_bytes * 9 // 8 // _PAGE_BYTES)
        excess = sum(len(each.supplied) for each in self._regions.values()) - most
        for region in reversed(self._regions.values()):
            if excess <= 0:
                break
            before = len(region.supplied)
            region.drop(excess)
            excess -= before - len(region.supplied)

    def give_back(self, piece: _Piece) -> None:
        if (region := self._regions.get(id(piece.memory))) is not None:  # else it was forgotten meanwhile
            self.lent_bytes -= piece.nbytes
            region.give_back(piece.begin, piece.nbytes)

    def forget(self) -> None:
        """Take no memory back that is lent, nor use what lies beside it."""
        self._regions.clear()
        self.lent_bytes = 0

    def clear(self) -> None:
        self.forget()
        self._most_bytes = 0


class Reused:
    """Makes arrays. Together with what waits to be used again they take about as much as arrays did at one time before.

    A page that the kernel has to supply takes longer than what is copied there, and of memory that one thread allocates
    and another frees the C library gives most back at once. Any thread may call it. A pickled copy begins empty.

    Memory of arrays that there are at a fork, which both processes then share, is used again in neither.

    large_pages: arrays begin at blocks of memory as `penstock.store.direct.new_buffer` makes it: for direct reads, and
        zero in forked processes. Between them may be holes, which smaller arrays fill: what waits goes back to the
        kernel by whole pages of 2 MB, so that a small array may hold as much beyond an eighth.

    Measured: docs/benchmarks.md, "Arrays of unequal length".
    """

    def __init__(self, *, large_pages: bool = False) -> None:
        #: Kept here, as a weak reference that is gone itself calls nobody.
        self._lent: dict[int, _Lent] = {}
        #: References whose arrays are gone. The callback is the queue's own: in a Python frame Ctrl-C would be lost.
        self._returned: deque[_Lent] = deque()
        self._has_large_pages = large_pages
        self._space = _LargePages() if large_pages else _Mappings()
        _ALL.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Reused, large_pages=self._has_large_pages), ()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of this shape and type, C-contiguous, whose items nobody has written."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        with _LOCK:
            self._take_back()
            piece = self._space.take(nbytes)
        # Over a mapping: a view of an array refers to the array, unless the memory is an array, too.
        array: NDArray[Any] = np.ndarray(shape, dtype, piece.memory, piece.begin)
        lent = _Lent(array, self._returned.append)
        lent.piece = piece
        self._lent[id(lent)] = lent
        return array

    def close(self) -> None:
        """Keep no memory any more, and take none back: it goes with the arrays."""
        with _LOCK:
            self._clear()

    def _take_back(self) -> None:
        while self._returned:
            lent = self._returned.popleft()
            if self._lent.pop(id(lent), None) is not None:
                self._space.give_back(lent.piece)

    def _clear(self) -> None:
        self._forget()
        self._space.clear()

    def _forget(self) -> None:
        """Take no memory back that is lent."""
        self._lent.clear()
        self._returned.clear()
        self._space.forget()


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
