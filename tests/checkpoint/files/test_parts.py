"""Part files: written as the module says, and read only if every byte is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from tests.checkpoint.snapshot_files import EQUAL, STORED, UID, Block, MadePart, made_part, replica
from tests.for_each import for_each
from xxhash import xxh3_128_intdigest

from penstock.checkpoint.codecs.codec import Kind
from penstock.checkpoint.files.parts import Part, PartReader, PartWriter, TornError, checksum_of
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes
from penstock.errors import DataError, FormatError

RAW = [b"thirteen byte", b"\x00" * 8, b"x" * 100]
BLOCKS = [*map(Block, RAW), replica(2, RAW[2]), Block(b"as before", EQUAL, b"")]


class Memory:
    """A file in memory, as a tier would write and read it."""

    reads_at_once = 1

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.is_finished = self.is_closed = False

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def write(self, *pieces: Bytes) -> None:
        for data in pieces:
            self.data += data.tobytes()

    def finish(self) -> None:
        self.is_finished = True

    def abandon(self) -> None: ...

    def read_into(self, offset: int, out: Bytes) -> None:
        if offset + out.size > len(self.data):
            raise DataError("the file ends before")
        out[:] = np.frombuffer(self.data, np.uint8, out.size, offset)

    def close(self) -> None:
        self.is_closed = True


def as_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def read(made: MadePart, *, number: int = 0, uid: str = UID) -> PartReader:
    part = Part("part-00000.pst", len(made.data), made.table)
    return PartReader(Memory(made.data), "here/part-00000.pst", number, bytes.fromhex(uid), part)


def read_into(found: list[bytes], made: MadePart) -> None:
    """Append the blocks of a part, one after the other."""
    reader = read(made)
    for block in range(len(reader.table)):
        found.append(reader.payload(block).tobytes())


def test_a_part_is_written_byte_for_byte_as_its_description_says() -> None:
    file = Memory()
    writer = PartWriter(file, "part-00000.pst", 0, bytes.fromhex(UID))
    for block in BLOCKS:
        payload = as_bytes(block.stored)
        raw = as_bytes(block.raw)
        writer.append(Kind(block.kind), payload, checksum_of(payload), raw.size, xxh3_128_intdigest(raw.data))
    part = writer.finish()

    by_hand = made_part(BLOCKS)
    assert file.data == by_hand.data
    assert file.is_finished
    assert part == Part("part-00000.pst", len(by_hand.data), by_hand.table)


def test_blocks_are_read_as_they_were_written() -> None:
    reader = read(made_part(BLOCKS))

    assert [reader.payload(block).tobytes() for block in range(5)] == [block.stored for block in BLOCKS]
    for block, raw in enumerate(RAW):
        out = np.empty(len(raw), np.uint8)
        reader.read(reader.place(block)[0], out)
        reader.check_stored(block, out)
        assert out.tobytes() == raw
        reader.check_raw(block, out)


def test_a_part_without_blocks_is_header_and_footer() -> None:
    made = made_part([])
    assert len(made.data) == 32 + 56
    assert len(read(made).table) == 0


def test_the_checksums_are_xxhashs() -> None:
    """Its test vectors of no bytes. Source: xxHash's doc/xxhash_spec.md and its sanity tests."""
    assert checksum_of(as_bytes(b"")) == 0x2D06800538D394C2


@for_each("bit", range(8))
def test_a_flipped_bit_anywhere_is_found_before_a_block_is_given_out(bit: int) -> None:
    made = made_part(BLOCKS)
    for place in range(len(made.data)):
        data = bytearray(made.data)
        data[place] ^= 1 << bit
        found: list[bytes] = []
        with pytest.raises(FormatError, match="here/part-00000"):
            read_into(found, MadePart(bytes(data), made.table))
        assert found == [block.stored for block in BLOCKS[: len(found)]]


def test_a_cut_anywhere_is_torn() -> None:
    made = made_part(BLOCKS)
    part = Part("part-00000.pst", len(made.data), made.table)
    for length in range(len(made.data)):
        with pytest.raises(TornError, match=f"{length} bytes instead of the {len(made.data)}"):
            PartReader(Memory(made.data[:length]), "here", 0, bytes.fromhex(UID), part)


def test_another_part_or_snapshot_in_its_place_is_found() -> None:
    made = made_part(BLOCKS)
    with pytest.raises(FormatError, match="does not begin as part 1"):
        read(made, number=1)
    with pytest.raises(FormatError, match="another file"):
        read(made, uid="0" * 32)
    other = made_part([*BLOCKS[:4], Block(b"as beforE", EQUAL, b"")])
    assert len(other.data) == len(made.data)
    with pytest.raises(FormatError, match="damaged in its table"):
        read(MadePart(other.data, made.table))


def test_a_part_that_is_read_after_it_was_cut_fails_as_data() -> None:
    made = made_part(BLOCKS)
    file = Memory(made.data)
    reader = PartReader(file, "here", 0, bytes.fromhex(UID), Part("p", len(made.data), made.table))
    file.data = file.data[:40]

    with pytest.raises(DataError):
        reader.payload(2)


LIES: dict[str, dict[str, Any]] = {
    "another magic": {"magic": b"PENSTPRX"},
    "a later version": {"version": 2},
    "another end": {"end": b"PENSTENX"},
    "bytes behind the end": {"zeros": b"\0" * 7 + b"\1"},
    "a table before the file": {"footer": {"offset": 0}},
    "a table behind the file": {"footer": {"offset": 10**6}},
    "a table at the last number": {"footer": {"offset": 2**64 - 1}},
    "more blocks": {"footer": {"blocks": 6}},
    "fewer blocks": {"footer": {"blocks": 4}},
    "no blocks": {"footer": {"blocks": 0}},
    "2**64 - 1 blocks": {"footer": {"blocks": 2**64 - 1}},
    # 40 x this is 0 modulo 2**64.
    "blocks that wrap": {"footer": {"blocks": 2**61}},
}


@for_each("lie", LIES)
def test_a_frame_that_lies_is_found(lie: str) -> None:
    made = made_part(BLOCKS, **LIES[lie])

    with pytest.raises(FormatError, match="here/part-00000"):
        read(made)


ROWS: dict[str, dict[str, int]] = {
    "a gap": {"offset": 33},
    "an overlap": {"offset": 31},
    "an offset that wraps": {"offset": 2**64 - 1},
    "more bytes": {"stored": 14},
    "fewer bytes": {"stored": 12},
    "bytes that wrap": {"stored": 2**32 - 1},
    "no bytes": {"stored": 0},
    "a larger block": {"raw": 14},
    "a block beyond any": {"raw": BLOCK_VALUES * 16 + 1},
    "a block that wraps": {"raw": 2**32 - 1},
    "a block smaller than it is stored": {"raw": 1},
    "the last byte of the row": {"zero": 1 << 55},
    "as before, with bytes": {"kind": EQUAL},
    "a repeat of 13 bytes": {"kind": int(Kind.REPLICA)},
}


@for_each("row", ROWS)
def test_a_row_that_lies_is_found(row: str) -> None:
    first = Block(RAW[0], STORED, lies=ROWS[row])

    with pytest.raises(FormatError, match="its blocks do not follow each other"):
        read(made_part([first, *BLOCKS[1:]]))


def test_a_checksum_that_lies_is_found_when_the_block_is_read() -> None:
    made = made_part([Block(b"right", lies={"checksum": 1}), Block(b"wrong", lies={"raw_checksum": 2})])
    reader = read(made)

    with pytest.raises(FormatError, match=r"block 0 \(bytes 32 to 37\) does not have its checksum as stored"):
        reader.payload(0)
    reader.payload(1)
    with pytest.raises(
        FormatError, match=r"block 1 \(bytes 37 to 42\) does not have its checksum as decoded"
    ):
        reader.check_raw(1, as_bytes(b"wrong"))


def test_the_table_is_checked_against_the_manifest_too() -> None:
    made = made_part(BLOCKS)
    assert xxhash.xxh3_128_hexdigest(made.data[-56 - 200 : -56]) == made.table
    with pytest.raises(FormatError, match="damaged in its table"):
        read(MadePart(made.data, "0" * 32))
