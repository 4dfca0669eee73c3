"""Reading ahead: everybody gets the bytes that are theirs, in few reads, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.snapshot_files import UID
from xxhash import xxh3_128_intdigest

from penstock.checkpoint.codecs.codec import Kind
from penstock.checkpoint.files import fetching
from penstock.checkpoint.files.fetching import Fetched, map_fetched
from penstock.checkpoint.files.parts import PartReader, PartWriter, checksum_of
from penstock.checkpoint.state.tensors import Bytes
from penstock.errors import DataError, FormatError
from penstock.flow.ordered import Workers


class CountedFile:
    """A file in memory that counts what is read from it, once it was opened."""

    reads_at_once = 2

    def __init__(self) -> None:
        self.data = bytearray()
        self.reads: list[tuple[int, int]] = []
        self.fails_from = 1 << 60

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def write(self, *pieces: Bytes) -> None:
        for piece in pieces:
            self.data += piece.tobytes()

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def read_into(self, offset: int, out: Bytes) -> None:
        self.reads.append((offset, out.size))
        if offset + out.size > self.fails_from:
            raise DataError("the file: the disk is gone")
        out[:] = np.frombuffer(bytes(self.data[offset : offset + out.size]), np.uint8)

    def close(self) -> None: ...


def part_of(blocks: list[bytes], number: int = 0) -> tuple[PartReader, CountedFile]:
    file = CountedFile()
    writer = PartWriter(file, "part", number, bytes.fromhex(UID))
    for data in blocks:
        block = np.frombuffer(data, np.uint8)
        writer.append(Kind.STORED, block, checksum_of(block), block.size, xxh3_128_intdigest(block.data))
    reader = PartReader(file, f"here/part {number}", number, bytes.fromhex(UID), writer.finish())
    file.reads.clear()
    return reader, file


Need = tuple[int, int]


@given(data=st.data())
def test_each_thing_has_what_it_needs_while_it_is_worked_on(data: st.DataObject) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    sizes = data.draw(
        st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=30), min_size=1, max_size=3)
    )
    blocks = [[draw.bytes(size) for size in of_part] for of_part in sizes]
    parts = [part_of(of_part, number)[0] for number, of_part in enumerate(blocks)]
    everything = [(part, block) for part, of_part in enumerate(blocks) for block in range(len(of_part))]
    things = data.draw(st.lists(st.lists(st.sampled_from(everything), max_size=4), max_size=60))

    def needs(thing: list[Need]) -> Iterator[tuple[PartReader, int]]:
        return ((parts[part], block) for part, block in thing)

    def work(thing: list[Need], fetched: Fetched) -> list[bytes]:
        # What it did not say that it needs is to be had, too.
        return [fetched.payload(parts[part], block).tobytes() for part, block in [*thing, everything[-1]]]

    with pytest.MonkeyPatch.context() as patch, Workers(3, "test") as workers:
        # Many batches: their memory is used again and again.
        patch.setattr(fetching, "_BATCH_BYTES", data.draw(st.integers(1, 500)))
        patch.setattr(fetching, "_GAP_BYTES", data.draw(st.integers(0, 100)))
        found = list(map_fetched(workers, work, things, needs, at_once=data.draw(st.integers(1, 3))))

    assert found == [[blocks[part][block] for part, block in [*thing, everything[-1]]] for thing in things]


def test_neighbours_are_read_together_and_what_is_far_away_is_not_read() -> None:
    reader, file = part_of([bytes([index]) * 1000 for index in range(200)])
    fetched = Fetched()
    for block in (10, 11, 12, 14, 150):
        fetched.want(reader, block)
    fetched.want(reader, 11)

    fetched.fill(np.empty(fetched.nbytes, np.uint8))

    # 32 bytes of header; block 13 lies between and is read along.
    assert file.reads == [(32 + 10_000, 5_000), (32 + 150_000, 1_000)]
    assert fetched.nbytes == 6_000
    assert fetched.payload(reader, 14).tobytes() == bytes([14]) * 1000
    out = np.empty(1000, np.uint8)
    fetched.copy_stored(reader, 150, out)
    assert out.tobytes() == bytes([150]) * 1000
    assert len(file.reads) == 2


def test_what_one_thing_needs_at_the_end_of_many_differences_is_not_all_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = [bytes([index]) * 1000 for index in range(200)]
    reader, _ = part_of(blocks)
    monkeypatch.setattr(fetching, "_BATCH_BYTES", 10_000)

    def work(thing: int, fetched: Fetched) -> int:
        assert [fetched.payload(reader, block).tobytes() for block in range(200)] == blocks
        return fetched.nbytes

    with Workers(2, "test") as workers:
        read_ahead = list(
            map_fetched(
                workers, work, range(5), lambda _: ((reader, block) for block in range(200)), at_once=2
            )
        )

    assert read_ahead == [10_000] * 5


def test_a_flipped_bit_in_what_was_read_ahead_is_found() -> None:
    reader, file = part_of([b"one" * 50, b"two" * 50])
    file.data[32 + 151] ^= 1
    fetched = Fetched()
    fetched.want(reader, 0)
    fetched.want(reader, 1)
    fetched.fill(np.empty(fetched.nbytes, np.uint8))

    assert fetched.payload(reader, 0).tobytes() == b"one" * 50
    with pytest.raises(FormatError, match=r"here/part 0 .* block 1 "):
        fetched.payload(reader, 1)
    with pytest.raises(FormatError, match=r"here/part 0 .* block 1 "):
        fetched.copy_stored(reader, 1, np.empty(150, np.uint8))


@pytest.mark.parametrize("why", ["disk", "work", "left"])
def test_no_thread_is_left_whatever_ends_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_BATCH_BYTES", 100)
    reader, file = part_of([bytes([index]) * 60 for index in range(100)])
    before = set(threading.enumerate())

    def work(block: int, fetched: Fetched) -> int:
        if why == "work" and block == 20:
            raise FormatError("no such thing")
        return int(fetched.payload(reader, block)[0])

    if why == "disk":
        file.fails_from = 32 + 60 * 40
    with Workers(2, "test") as workers:
        results = map_fetched(workers, work, range(100), lambda block: [(reader, block)], at_once=2)
        if why == "left":
            assert [next(results) for _ in range(3)] == [0, 1, 2]
            results.close()
        else:
            with pytest.raises(
                (DataError, FormatError), match="the disk is gone" if why == "disk" else "no such"
            ):
                list(results)

    assert set(threading.enumerate()) <= before
