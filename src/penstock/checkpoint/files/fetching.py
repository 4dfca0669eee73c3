"""Reading ahead: which bytes decoding will need is known, so they are read in large pieces before it asks for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from penstock.checkpoint.files.parts import PartReader
from penstock.checkpoint.state.tensors import Bytes
from penstock.flow.ordered import Workers

T = TypeVar("T")
R = TypeVar("R")

#: Read together: a request to an object store takes as long as some megabytes do.
_BATCH_BYTES = 4 << 20
_BATCH_THINGS = 64
#: For each thread that works on them: while the caller hands others over it has work.
_THINGS_AHEAD = 4
#: What lies between two blocks and is not needed is read along with them, as long as it is no more.
_GAP_BYTES = 32 << 10


class Fetched:
    """Stored bytes of some blocks, read together. Filled by one thread, then used by several."""

    def __init__(self) -> None:
        #: Of each stretch of a file: whose, from where, and how many bytes.
        self._stretches: list[tuple[PartReader, int, int]] = []
        #: By file, the stretch that can still grow; by file and block, its stretch and where in it.
        self._last: dict[PartReader, int] = {}
        self._places: dict[tuple[PartReader, int], tuple[int, int, int]] = {}
        self._pieces: list[Bytes] = []
        self.nbytes = 0

    def want(self, part: PartReader, block: int) -> None:
        """Enter a block; before `fill`."""
        if (part, block) in self._places:
            return
        offset, nbytes = part.place(block)
        at = self._last.get(part, -1)
        if at >= 0:
            _, first, length = self._stretches[at]
            if 0 <= offset - first - length <= _GAP_BYTES:
                self._places[part, block] = at, offset - first, nbytes
                self._stretches[at] = part, first, offset + nbytes - first
                self.nbytes += offset + nbytes - first - length
                return
        self._last[part] = len(self._stretches)
        self._places[part, block] = len(self._stretches), 0, nbytes
        self._stretches.append((part, offset, nbytes))
        self.nbytes += nbytes

    def fill(self, buffer: Bytes) -> None:
        """Read all that is wanted. buffer: uint8[nbytes or more], which is kept. Raises: DataError naming the file."""
        used = 0
        for part, offset, nbytes in self._stretches:
            piece = buffer[used : used + nbytes]
            part.read(offset, piece)
            self._pieces.append(piece)
            used += nbytes

    def payload(self, part: PartReader, block: int) -> Bytes:
        """Return a block's bytes as stored, checked; read now if they were not wanted.

        Raises: FormatError, DataError; both name the file.
        """
        stored = self._stored(part, block)
        if stored is None:
            return part.payload(block)
        part.check_stored(block, stored)
        return stored

    def copy_stored(self, part: PartReader, block: int, out: Bytes) -> None:
        """Write a block of kind STORED to where it is wanted, checked. out: uint8[raw]. Raises: as `payload`."""
        stored = self._stored(part, block)
        if stored is None:
            part.read(part.place(block)[0], out)
        else:
            out[:] = stored
        part.check_stored(block, out)

    def _stored(self, part: PartReader, block: int) -> Bytes | None:
        place = self._places.get((part, block))
        if place is None:
            return None
        stretch, first, nbytes = place
        return self._pieces[stretch][first : first + nbytes]


class _Batch(Generic[T]):
    """Some things in a row, what they need, and where it is read to."""

    def __init__(self) -> None:
        self.things: list[T] = []
        self.fetched = Fetched()
        self.buffer: Bytes = np.empty(0, np.uint8)


def map_fetched(
    workers: Workers,
    work: Callable[[T, Fetched], R],
    things: Iterable[T],
    needs: Callable[[T], Iterable[tuple[PartReader, int]]],
    at_once: int,
) -> Generator[R, None, None]:
    """Yield work(thing, what it needs) of each thing, in their order, while what the next ones need is being read.

    What a thing needs beyond such a piece, as at the end of a long row of differences, is read by `work`.

    To be closed by who does not take all of it.

    workers: do the work. needs: returns the blocks of a thing, and in which file each is.
    at_once: how many reads to have under way; twice as many pieces of four megabytes are in memory.
    Raises: what `work` raises, and DataError from reading, when its turn comes.
    """
    buffers: SimpleQueue[Bytes] = SimpleQueue()

    def fetch(batch: _Batch[T]) -> _Batch[T]:
        with suppress(Empty):
            batch.buffer = buffers.get_nowait()
        if batch.buffer.size < batch.fetched.nbytes:
            batch.buffer = np.empty(max(batch.fetched.nbytes, _BATCH_BYTES), np.uint8)
        batch.fetched.fill(batch.buffer)
        return batch

    def do(ready: tuple[T, _Batch[T]]) -> tuple[R, _Batch[T]]:
        thing, batch = ready
        return work(thing, batch.fetched), batch

    with Workers(at_once, "penstock-fetch") as readers:
        batches = readers.map(fetch, _batches(things, needs))
        all_ready = ((thing, batch) for batch in batches for thing in batch.things)
        before: _Batch[T] | None = None
        for result, batch in workers.map(do, all_ready, _THINGS_AHEAD):
            # Nobody looks at a batch any more once the work on the first thing of the next one is done.
            if before is not None and before is not batch:
                buffers.put(before.buffer)
            before = batch
            yield result


def _batches(
    things: Iterable[T], needs: Callable[[T], Iterable[tuple[PartReader, int]]]
) -> Iterator[_Batch[T]]:
    batch: _Batch[T] = _Batch()
    for thing in things:
        batch.things.append(thing)
        for part, block in needs(thing):
            if batch.fetched.nbytes >= _BATCH_BYTES:
                break
            batch.fetched.want(part, block)
        if batch.fetched.nbytes >= _BATCH_BYTES or len(batch.things) >= _BATCH_THINGS:
            yield batch
            batch = _Batch()
    if batch.things:
        yield batch
