"""Writing a part: tensors cut into blocks, blocks encoded on several threads, appended in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from penstock.checkpoint.codecs.codec import NEEDS_REFERENCE, SLACK_BYTES, Coder, Kind, Pair
from penstock.checkpoint.files.manifest import Stored
from penstock.checkpoint.files.parts import PartWriter
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, Piece, blocks_of
from penstock.flow.ordered import Workers

#: Encoded together.
GROUP_BYTES = 1 << 20
GROUP_BLOCKS = 64
#: Groups that each thread has before it: while four megabytes are being written it has work. With two, saves took a
#: fifth longer.
_GROUPS_AHEAD = 6
#: Of what waits to be written, where it is hardly anything.
_MOST_BUFFERS = 8
#: A block is looked for among those before it from that size on; a reference to one takes 8 bytes.
_SMALLEST_REPLICA_BYTES = 64


class References(Protocol):
    """The blocks of the snapshot to which another is the difference. Used by several threads at once."""

    def block(self, layout: Layout, number: int, scratch: Scratch) -> Bytes | None:
        """Return a tensor's block, valid until `scratch` is used again; None if there is no such tensor.

        Raises: FormatError, DataError where it is read and cannot be.
        """
        ...


@dataclass(slots=True, eq=False)
class Scratch:
    """Buffer for decoded blocks, of one thread's use at a time."""

    _buffers: list[Bytes] = field(default_factory=list)

    def buffer(self, number: int, nbytes: int) -> Bytes:
        """Return uint8[nbytes]: buffer 0, 1, ...; what was in it before is lost."""
        while len(self._buffers) <= number:
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[number].size < nbytes:
            self._buffers[number] = np.empty(nbytes, np.uint8)
        return self._buffers[number][:nbytes]


#: A block's kind, payload, the checksum of that, and the xxh3-128 of its bytes.
_Encoded: TypeAlias = tuple[Kind, Bytes, int, int]


def pairs_of(pieces: Iterable[Piece], references: References | None) -> Iterator[Pair]:
    """Yield the blocks of a snapshot with those they may be differences to; each is valid until the next."""
    scratch = Scratch()
    for layout, first, data in pieces:
        for number, place in enumerate(blocks_of(data.size, layout.dtype), first):
            reference = None if references is None else references.block(layout, number, scratch)
            yield Pair(data[place], layout.dtype, reference)


class TensorWriter:
    """Appends tensors to a part, each block as the coder stores it, equal blocks once. Owned by one thread."""

    def __init__(
        self,
        writer: PartWriter,
        number: int,
        references: References | None,
        coder: Coder | None,
        workers: Workers,
        written: Callable[[int], None],
    ) -> None:
        """number: of the part. coder: None stores all blocks as they are. workers: encode.

        written: called with the number of bytes as they are written.
        """
        self._writer = writer
        self._number = number
        self._references = references
        self._coder = coder
        self._workers = workers
        self._written = written
        #: Where groups of blocks are encoded: each is taken by a worker, and given back once its bytes are written.
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        #: Where each worker has what a group is a difference to: not of the buffers, for there are many more of these.
        self._own = threading.local()
        #: The first block of these bytes, by their hash.
        self._seen: dict[int, int] = {}
        #: Where each tensor is, in their order.
        self.stored: list[Stored] = []
        #: Whether any block needs the reference to be decoded.
        self.refers = False
        #: Of all threads together, and of what they encoded.
        self.encode_seconds = 0.0
        self.encoded_bytes = 0

    def write(self, pieces: Iterable[Piece]) -> None:
        """Append blocks; what the pieces hold may change once this returns.

        pieces: a tensor's in a row, in the order of its blocks.
        Raises: DataError, FormatError from the file or the reference.
        """
        #: What waits to be written lies there.
        buffers: list[Bytes] = []
        groups = self._groups(pieces)
        for group, encoded, buffer, seconds in self._workers.map(self._encode, groups, _GROUPS_AHEAD):
            self.encode_seconds += seconds
            for block, (kind, payload, checksum, raw_hash) in zip(group, encoded, strict=True):
                size = block.data.size
                self.encoded_bytes += size
                if kind != Kind.EQUAL and size >= _SMALLEST_REPLICA_BYTES:
                    here = self._writer.blocks
                    first = self._seen.setdefault(raw_hash, here)
                    if first != here:
                        kind, payload = Kind.REPLICA, np.frombuffer(first.to_bytes(8, "little"), np.uint8)
                        checksum = xxh3_64_intdigest(payload.data)
                self.refers = self.refers or kind in NEEDS_REFERENCE
                self._writer.append(kind, payload, checksum, size, raw_hash)
            buffers.append(buffer)
            if self._writer.is_full or len(buffers) >= _MOST_BUFFERS:
                self._flush(buffers)
        self._flush(buffers)

    def _groups(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Yield the blocks, some together, and enter where each tensor begins."""
        next_block = self._writer.blocks
        group: list[Piece] = []
        nbytes = 0
        for layout, first, data in pieces:
            if first == 0:
                self.stored.append(Stored(layout, self._number, next_block))
            step = BLOCK_VALUES * layout.dtype.item_bytes
            for number, begin in enumerate(range(0, data.size, step), first):
                values = data[begin : begin + step]
                group.append(Piece(layout, number, values))
                next_block += 1
                nbytes += values.size
                if nbytes >= GROUP_BYTES or len(group) >= GROUP_BLOCKS:
                    yield group
                    group, nbytes = [], 0
        if group:
            yield group

    def _flush(self, buffers: list[Bytes]) -> None:
        self._written(self._writer.flush())
        while buffers:
            self._buffers.put(buffers.pop())

    def _encode(self, group: list[Piece]) -> tuple[list[Piece], list[_Encoded], Bytes, float]:
        begin_seconds = time.perf_counter()
        try:
            buffer = self._buffers.get_nowait()
        except Empty:
            buffer = np.empty(0, np.uint8)
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        if self._coder is not None:
            needed = SLACK_BYTES
            for block in group:
                needed += block.data.size
            if buffer.size < needed:
                buffer = np.empty(needed, np.uint8)
        encoded: list[_Encoded] = []
        used = 0
        for layout, number, values in group:
            raw_hash = xxh3_128_intdigest(values.data)
            kind, payload = Kind.STORED, values
            if self._coder is not None:
                reference = None
                if self._references is not None:
                    reference = self._references.block(layout, number, self._own.scratch)
                out = buffer[used : used + values.size + SLACK_BYTES]
                kind, length = self._coder.encode(Pair(values, layout.dtype, reference), out)
                if kind != Kind.STORED:
                    payload = out[:length]
                    used += length
            encoded.append((kind, payload, xxh3_64_intdigest(payload.data), raw_hash))
        return group, encoded, buffer, time.perf_counter() - begin_seconds
