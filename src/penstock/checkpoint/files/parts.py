"""Part files: the blocks of a snapshot's tensors, back to back, and a table of them.

    offset 0      magic "PENSTPRT", version u32, part number u32, the snapshot's uid (16 bytes)      32 bytes
    32            the blocks' bytes, in the table's order, without gaps
    ...           the table: one BLOCK of 40 bytes for each
    the last 56   offset of the table u64, blocks u64, xxh3-128 of the table, xxh3-64 of what this footer says
                  before, magic "PENSTEND", 8 zero bytes

Numbers are little-endian. Every byte is covered: the header by comparison, blocks by the table's checksums, the table
by the footer's and by the manifest's, the footer by its own. The table also has a checksum of each block's *decoded*
bytes: a difference that is applied to another reference than it was made to does not pass for a tensor.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.checkpoint.codecs.codec import Kind
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes
from penstock.checkpoint.tiers.tier import Reader, Writer
from penstock.errors import FormatError

VERSION = 1
#: One block: 40 bytes. `stored` and `raw` are lengths in the file and decoded; `checksum` is the xxh3-64 of the
#: former bytes, `raw_checksum` the low half of the xxh3-128 of the latter, by which equal blocks are found, too.
BLOCK = np.dtype(
    [
        ("offset", "<u8"),
        ("checksum", "<u8"),
        ("raw_checksum", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("kind", "u1"),
        ("zero", "V7"),
    ]
)
_MAGIC, _END = b"PENSTPRT", b"PENSTEND"
_HEADER = struct.Struct("<8sII16s")
_FOOTER = struct.Struct("<QQ16s")
_FOOTER_BYTES = _FOOTER.size + 8 + 16
_LARGEST_ITEM_BYTES = 16
_LOW_64 = 2**64 - 1
#: Read at once from the end of a part: footer and table, and all of a small part.
_TAIL_BYTES = 16 << 10
#: Blocks are written so many bytes at a time: in pieces of half a megabyte ext4 takes two to ten times as long.
_WRITE_BYTES = 4 << 20
_MOST_WAITING = 4096
#: What a block of kind REPLICA has: the number of another.
_REPLICA_BYTES = 8


class TornError(FormatError):
    """A file of a snapshot is missing, or not as long as it was."""


class Part(NamedTuple):
    """What a manifest says of a part file.

    nbytes: of the file. table: xxh3-128 of its table of blocks, 32 hexadecimal digits.
    """

    file: str
    nbytes: int
    table: str


def checksum_of(data: Bytes) -> int:
    """Return the checksum of a block's bytes, below 2**64."""
    return xxhash.xxh3_64_intdigest(data.data)


def raw_checksum_of(raw: Bytes) -> int:
    """Return the checksum of a block's decoded bytes, below 2**64."""
    return xxhash.xxh3_128_intdigest(raw.data) & _LOW_64


def can_have_bytes(nbytes: int, blocks: int, raw_bytes: int) -> bool:
    """Return whether a part file of so many blocks, of so many bytes when decoded, can be `nbytes` long."""
    least = _HEADER.size + blocks * BLOCK.itemsize + _FOOTER_BYTES
    return least <= nbytes <= least + raw_bytes + _REPLICA_BYTES * blocks


class PartWriter:
    """Writes one part file. Owned by one thread."""

    def __init__(self, writer: Writer, file: str, number: int, uid: bytes) -> None:
        self._writer = writer
        self._file = file
        self._rows: list[tuple[int, int, int, int, int, int, bytes]] = []
        self._waiting: list[Bytes] = [np.frombuffer(_HEADER.pack(_MAGIC, VERSION, number, uid), np.uint8)]
        #: Of blocks.
        self._waiting_bytes = 0
        #: How many blocks were appended.
        self.blocks = 0
        self._offset = _HEADER.size

    def append(self, kind: Kind, payload: Bytes, checksum: int, raw_bytes: int, raw_hash: int) -> None:
        """Append a block. payload: unchanged until `flush`. raw_hash: xxh3-128 of its decoded bytes."""
        self._waiting.append(payload)
        self._waiting_bytes += payload.size
        row = (self._offset, checksum, raw_hash & _LOW_64, payload.size, raw_bytes, int(kind), b"")
        self._rows.append(row)
        self.blocks += 1
        self._offset += payload.size

    @property
    def is_full(self) -> bool:
        """Return whether so much waits that it is quickest written now."""
        return self._waiting_bytes >= _WRITE_BYTES or len(self._waiting) >= _MOST_WAITING

    def flush(self) -> int:
        """Write the blocks that wait, and return of how many bytes. Raises: DataError naming the file."""
        waiting, self._waiting = self._waiting, []
        nbytes, self._waiting_bytes = self._waiting_bytes, 0
        self._writer.write(*waiting)
        return nbytes

    def finish(self) -> Part:
        """Write the table, and return once the whole file would outlive a loss of power. Raises: DataError."""
        table = np.array(self._rows, BLOCK).tobytes()
        digest = xxhash.xxh3_128_digest(table)
        footer = _FOOTER.pack(self._offset, len(self._rows), digest)
        closing = footer + xxhash.xxh3_64_digest(footer) + _END + bytes(8)
        self._waiting.append(np.frombuffer(table + closing, np.uint8))
        self.flush()
        self._writer.finish()
        return Part(self._file, self._offset + len(table) + len(closing), digest.hex())


class PartReader:
    """A part file, its table read and checked; blocks are read and checked one by one. Used by several threads."""

    def __init__(self, reader: Reader, where: str, number: int, uid: bytes, part: Part) -> None:
        """Read the table.

        where: what messages call the file. number, uid, part: what the manifest says it is.
        Raises: FormatError if it is not that, or damaged; DataError if it cannot be read.
        """
        self.where = where
        self._reader = reader
        #: Fills memory with the file's bytes from an offset on, unchecked.
        self.read = reader.read_into
        if reader.nbytes != part.nbytes or part.nbytes < _HEADER.size + _FOOTER_BYTES:
            raise TornError(
                f"{where} has {reader.nbytes} bytes instead of the {part.nbytes} that its snapshot's manifest says"
            )
        # In one read for a small part: on an object store each is a request.
        tail = self._read(max(0, part.nbytes - _TAIL_BYTES), min(part.nbytes, _TAIL_BYTES))
        header = tail[: _HEADER.size] if len(tail) == part.nbytes else self._read(0, _HEADER.size)
        if header != _HEADER.pack(_MAGIC, VERSION, number, uid):
            raise FormatError(
                f"{where} does not begin as part {number} of its snapshot: another file, or damaged"
            )
        footer = tail[-_FOOTER_BYTES:]
        said = footer[: _FOOTER.size]
        if footer[_FOOTER.size :] != xxhash.xxh3_64_digest(said) + _END + bytes(8):
            raise FormatError(f"{where} is damaged in its last {_FOOTER_BYTES} bytes")
        table_offset, blocks, digest = _FOOTER.unpack(said)
        # Compared, not added up first: the numbers may be any.
        if (
            table_offset > part.nbytes - _FOOTER_BYTES
            or blocks * BLOCK.itemsize != part.nbytes - _FOOTER_BYTES - table_offset
        ):
            raise FormatError(
                f"{where} is damaged: its table of {blocks} blocks at {table_offset} does not fit"
            )
        table_bytes = blocks * BLOCK.itemsize
        if table_bytes + _FOOTER_BYTES <= len(tail):
            table = tail[-_FOOTER_BYTES - table_bytes : -_FOOTER_BYTES]
        else:
            table = self._read(table_offset, table_bytes)
        if digest.hex() != part.table or xxhash.xxh3_128_digest(table) != digest:
            raise FormatError(f"{where} is damaged in its table of blocks")
        self.table: NDArray[np.void] = np.frombuffer(table, BLOCK)
        self._check_table(table_offset)

    def _check_table(self, table_offset: int) -> None:
        table = self.table
        ends = table["offset"] + table["stored"]  # wraps; then it is not in order
        follows = np.concatenate([[_HEADER.size], ends]).astype(np.uint64)
        if not (
            np.array_equal(follows[:-1], table["offset"])
            and int(follows[-1]) == table_offset
            and (table["raw"] <= BLOCK_VALUES * _LARGEST_ITEM_BYTES).all()
            and (table["stored"] <= np.maximum(table["raw"], _REPLICA_BYTES)).all()
            and (table["stored"] == table["raw"])[table["kind"] == Kind.STORED].all()
            and (table["stored"] == 0)[table["kind"] == Kind.EQUAL].all()
            and (table["stored"] == _REPLICA_BYTES)[table["kind"] == Kind.REPLICA].all()
            and not table["zero"].view((np.uint8, 7)).any()
        ):
            raise FormatError(f"{self.where} is damaged: its blocks do not follow each other")

    @property
    def reads_at_once(self) -> int:
        """Return how many reads the file takes at once."""
        return self._reader.reads_at_once

    def place(self, block: int) -> tuple[int, int]:
        """Return where a block's bytes begin in the file, and how many they are."""
        row = self.table[block]
        return int(row["offset"]), int(row["stored"])

    def payload(self, block: int) -> Bytes:
        """Return a block's bytes as stored, checked. Raises: FormatError, DataError; both name the file."""
        offset, nbytes = self.place(block)
        payload = np.empty(nbytes, np.uint8)
        self.read(offset, payload)
        self.check_stored(block, payload)
        return payload

    def check_all_stored(self) -> None:
        """Read all blocks as stored, and check them. Raises: FormatError, DataError; both name the file."""
        offsets, sizes = self.table["offset"].tolist(), self.table["stored"].tolist()
        checksums = self.table["checksum"].tolist()
        space = np.empty(max(sizes, default=0), np.uint8)
        for block, nbytes in enumerate(sizes):
            payload = space[:nbytes]
            self.read(offsets[block], payload)
            if xxhash.xxh3_64_intdigest(payload.data) != checksums[block]:
                raise self._damaged(block, "as stored")

    def check_stored(self, block: int, payload: Bytes) -> None:
        """Check a block's bytes as stored. Raises: FormatError."""
        if xxhash.xxh3_64_intdigest(payload.data) != self.table["checksum"][block]:
            raise self._damaged(block, "as stored")

    def check_raw(self, block: int, raw: Bytes) -> None:
        """Check a block's decoded bytes. Raises: FormatError."""
        if raw_checksum_of(raw) != self.table["raw_checksum"][block]:
            raise self._damaged(block, "as decoded")

    def _damaged(self, block: int, how: str) -> FormatError:
        offset, nbytes = self.place(block)
        return FormatError(
            f"{self.where} is damaged: block {block} (bytes {offset} to {offset + nbytes}) does not have its checksum "
            f"{how}"
        )

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = np.empty(nbytes, np.uint8)
        self._reader.read_into(offset, data)
        return data.tobytes()

    def close(self) -> None:
        """Let go of the file; twice is harmless."""
        self._reader.close()
