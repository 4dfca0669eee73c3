"""Reading samples that lie together in one file by one request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.slow_source import SlowSource
from penstock.plan import BundleShuffle, FullShuffle, Order
from penstock.policy import merge_reads
from penstock.policy.merge import Price
from penstock.store import Source, extents_of, read_merged

Ids = NDArray[np.int64]
CHUNK = 64


class Chunks:
    """Samples in files of 64 each, one behind the other, with a head of 8 bytes. It notes what is read."""

    def __init__(self, folder: Path, contents: list[bytes]) -> None:
        self.sizes_bytes = np.array([len(content) for content in contents], np.int64)
        self.labels, self.classes = np.full(len(contents), -1), ()
        self.units = np.arange(len(contents)) // CHUNK
        self.offsets = np.empty(len(contents), np.int64)
        self.files: list[Path] = []
        self.reads: list[tuple[int, int, int]] = []
        for first in range(0, len(contents), CHUNK):
            chunk = contents[first : first + CHUNK]
            self.offsets[first : first + CHUNK] = 8 + np.cumsum([0, *map(len, chunk[:-1])])
            self.files.append(folder / f"{first // CHUNK}.bin")
            self.files[-1].write_bytes(b"the head" + b"".join(chunk))

    def __len__(self) -> int:
        return self.sizes_bytes.size

    def describe(self, sample: int) -> str:
        return f"sample {sample} of {self.files[self.units[sample]].name}"

    def read(self, sample: int) -> bytes:
        content = bytearray(int(self.sizes_bytes[sample]))
        self.read_into(sample, memoryview(content))
        return bytes(content)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        size = int(self.sizes_bytes[sample])
        begin = int(self.offsets[sample])
        self.read_ranges(int(self.units[sample]), np.array([[begin, begin + size]]), [buffer[:size]])
        return size

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        return self.units[ids], self.offsets[ids], self.sizes_bytes[ids]

    def unit_bytes(self, units: Ids) -> Ids:
        known = np.array([file.stat().st_size for file in self.files])
        return np.where(units < known.size, known[np.minimum(units, known.size - 1)], -1)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        for (begin, end), buffer in zip(ranges.tolist(), into, strict=True):
            assert len(buffer) == end - begin
            self.reads.append((unit, begin, end))
            with self.files[unit].open("rb") as file:
                file.seek(begin)
                if file.readinto(buffer) != end - begin:
                    raise DataError(f"{self.files[unit]} ends before offset {end:,}")


@pytest.fixture
def contents() -> list[bytes]:
    random = np.random.default_rng(3)
    return [random.bytes(int(size)) for size in random.integers(0, 40, 200)]


@pytest.fixture
def chunks(tmp_path: Path, contents: list[bytes]) -> Chunks:
    return Chunks(tmp_path, contents)


def price(request_seconds: float) -> Price:
    return lambda requests, nbytes: request_seconds * requests + nbytes


def read_window(source: Source, ids: Ids, how: Price, space: int = 0) -> dict[int, bytes | Exception]:
    """Return by position what a window's samples are, or their errors. space: bytes between their places."""
    found = extents_of(source, ids)
    assert found is not None
    extents, failed = found
    results: dict[int, bytes | Exception] = dict(failed)
    for read in merge_reads(extents, how):
        its = ids[read.which]
        begins = np.concatenate(([0], np.cumsum(source.sizes_bytes[its] + space)))
        into = np.zeros(begins[-1], np.uint8)
        errors = dict(read_merged(source, read, its, into, begins))
        for index, (position, begin) in enumerate(zip(read.which.tolist(), begins.tolist(), strict=False)):
            content = into[begin : begin + int(source.sizes_bytes[its[index]])].tobytes()
            assert position not in results
            results[position] = errors.get(index, content)
    assert sorted(results) == list(range(ids.size))
    return results


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.integers(0, 199), max_size=60), st.floats(0, 2000), st.integers(0, 2))
def test_what_is_read_together_is_what_is_read_alone(
    chunks: Chunks, contents: list[bytes], samples: list[int], request_seconds: float, space: int
) -> None:
    found = read_window(chunks, np.array(samples, np.int64), price(request_seconds), space)

    assert [found[position] for position in range(len(samples))] == [contents[sample] for sample in samples]


def test_neighbours_in_order_are_one_request_and_go_to_their_places_at_once(
    chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(70, 90)
    monkeypatch.setattr(np, "empty", None)  # no buffer is made

    read_window(chunks, ids, price(0))

    assert chunks.reads == [(1, int(chunks.offsets[70]), int(chunks.offsets[90]))]


def test_a_hole_is_never_written_into_the_place_of_a_sample(tmp_path: Path) -> None:
    """The place is larger than its sample by exactly as much as the hole behind the sample."""
    chunks = Chunks(tmp_path, [b"first", b"hole", b"third"])
    ids = np.array([0, 2])
    extents, _ = extents_of(chunks, ids) or (None, None)
    assert extents is not None
    (read,) = merge_reads(extents, price(1e6))
    into = np.zeros(14, np.uint8)

    assert read_merged(chunks, read, ids, into, np.array([0, 9, 14])) == []

    assert into.tobytes() == b"first\0\0\0\0third"


SAMPLES = 64 * CHUNK


@pytest.mark.parametrize(
    "order", [FullShuffle(SAMPLES, 5), BundleShuffle(SAMPLES, 5)], ids=lambda order: type(order).__name__
)
def test_reads_of_a_window_are_hardly_more_than_the_chunks_that_it_touches(
    order: Order, tmp_path: Path
) -> None:
    """100 MB/s and 5 ms a request, as of a network file system: a hole of half a megabyte is worth reading over."""
    chunks = Chunks(tmp_path, [bytes(256)] * SAMPLES)
    store = SharedStore(None, Curve.flat(100e6), latency_seconds=5e-3, threads=8, request_seconds=5e-3)
    machine = Machine(store, (StorageClass("staging", 10**9, 1, Curve.flat(1e9)),))
    how = partial(machine.source_seconds, clients=1, sample_bytes=256.0)

    touched = 0
    for ids in np.array_split(order.at(0, np.arange(SAMPLES)), 4):
        touched += np.unique(chunks.units[ids]).size
        read_window(chunks, ids, how)

    assert touched <= len(chunks.reads) <= 1.1 * touched


def test_a_slowed_source_tells_what_the_one_behind_it_does(chunks: Chunks, contents: list[bytes]) -> None:
    slept: list[float] = []
    with SlowSource(chunks, 1.0, 2.0, 10.0, clock=lambda: 100.0 + sum(slept), sleep=slept.append) as slow:
        ids = np.array([3, 4, 5])
        nbytes = int(chunks.sizes_bytes[ids].sum())

        found = read_window(slow, ids, price(0))

        assert found == {index: contents[3 + index] for index in range(3)}
        assert slept == [pytest.approx(3 + nbytes / 10)]


@dataclass
class Rows:
    """A source that does not tell where its samples lie."""

    sizes_bytes = labels = np.array([1, 2])
    classes = ()

    def __len__(self) -> int:
        return 2

    def describe(self, sample: int) -> str:
        return f"row {sample}"

    def read(self, sample: int) -> bytes:
        return bytes(sample + 1)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        buffer[: sample + 1] = bytes(sample + 1)
        return sample + 1


def test_a_source_need_not_tell() -> None:
    assert extents_of(Rows(), np.array([0, 1])) is None
    with SlowSource(Rows(), 0, 0, 1e9) as slow:
        assert extents_of(slow, np.array([0, 1])) is None


class TestHostile:
    IDS = np.array([64, 65, 66])

    def expect(self, found: dict[int, bytes | Exception], contents: list[bytes], message: str) -> None:
        """Only sample 65 is bad, and named."""
        assert (found[0], found[2]) == (contents[64], contents[66])
        assert isinstance(found[1], DataError)
        assert str(found[1]).startswith("sample 65 of 1.bin: the source says unit ")
        assert message in str(found[1])

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("units", 9, "unit 9, offset 57, 9 bytes, but there is no such unit"),
            ("offsets", -1, "unit 1, offset -1, 9 bytes, but unit, offset and length cannot be negative"),
            ("offsets", 2**63 - 1, "offset 9,223,372,036,854,775,807, 9 bytes, but the unit ends at"),
            ("offsets", 10**4, "unit 1, offset 10,000, 9 bytes, but the unit ends at"),
            ("lengths", 10, "unit 1, offset 57, 10 bytes, but the sample has 9 bytes"),
            ("lengths", -1, "unit 1, offset 57, -1 bytes, but unit, offset and length cannot be negative"),
        ],
    )
    def test_an_extent_that_cannot_be_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: int, message: str
    ) -> None:
        contents = [bytes([sample]) * 9 for sample in range(64)] + [b"#" * 49, b"x" * 9, b"y" * 9]
        chunks = Chunks(tmp_path, contents)
        true = chunks.extents
        which = ("units", "offsets", "lengths").index(field)

        def hostile(ids: Ids) -> tuple[Ids, Ids, Ids]:
            answer = list(true(ids))
            answer[which] = np.where(ids == 65, value, answer[which])
            return answer[0], answer[1], answer[2]

        monkeypatch.setattr(chunks, "extents", hostile)

        found = read_window(chunks, self.IDS, price(1e6))

        self.expect(found, contents, message)

    def test_a_unit_below_zero_is_named(
        self, chunks: Chunks, contents: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "describe", lambda sample: f"sample {sample} of 1.bin")
        chunks.units[65] = -1

        self.expect(read_window(chunks, self.IDS, price(1e6)), contents, "unit -1, offset")

    def test_an_extent_that_changes_is_named(
        self, chunks: Chunks, contents: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = [0]
        true = chunks.extents

        def changing(ids: Ids) -> tuple[Ids, Ids, Ids]:
            answers[0] += 1
            units, offsets, lengths = true(ids)
            return units, offsets - (ids == 65) * (answers[0] > 1), lengths

        monkeypatch.setattr(chunks, "extents", changing)
        before = int(chunks.offsets[65])

        found = read_window(chunks, self.IDS, price(1e6))

        self.expect(found, contents, f"offset {before - 1:,}")
        assert f"before it said unit 1, offset {before:,}" in str(found[1])

    def test_a_unit_that_has_shrunk_spoils_only_what_is_gone(
        self, chunks: Chunks, contents: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = chunks.unit_bytes(np.arange(4))
        monkeypatch.setattr(chunks, "unit_bytes", lambda units: known[units])
        os.truncate(chunks.files[1], int(chunks.offsets[66]))

        found = read_window(chunks, self.IDS, price(1e6))

        assert (found[0], found[1]) == (contents[64], contents[65])
        assert isinstance(found[2], DataError) != (contents[66] == b"")

    def test_other_answers_than_arrays_of_int64_are_refused(
        self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for answer in (
            (np.zeros(3, np.int64), np.zeros(3, np.int64)),
            (np.zeros(3, np.int64), np.zeros(3, np.int32), np.zeros(3, np.int64)),
            (np.zeros(3, np.int64), np.zeros(2, np.int64), np.zeros(3, np.int64)),
            ([0.5, 0, 0], np.zeros(3, np.int64), np.zeros(3, np.int64)),
        ):
            monkeypatch.setattr(chunks, "extents", lambda ids, answer=answer: answer)
            with pytest.raises(ConfigError, match="must be three arrays int64"):
                extents_of(chunks, self.IDS)
        monkeypatch.setattr(chunks, "extents", lambda ids: np.stack(Chunks.extents(chunks, ids)))
        assert extents_of(chunks, self.IDS) is not None
        monkeypatch.setattr(chunks, "extents", lambda ids: 5)
        with pytest.raises(ConfigError, match=r"must be three arrays int64\[3\], not int64\[\]"):
            extents_of(chunks, self.IDS)

    def test_what_belongs_to_extents_is_asked_for_by_name(
        self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "unit_bytes", lambda units: [1, 2])
        with pytest.raises(
            ConfigError, match=r"unit_bytes\(\) of 3 units must be int64\[3\], not int64\[2\]"
        ):
            extents_of(chunks, self.IDS)
        monkeypatch.setattr(chunks, "unit_bytes", None)
        monkeypatch.setattr(chunks, "read_ranges", None)
        with pytest.raises(ConfigError, match="has no unit_bytes and no read_ranges: give it those of"):
            extents_of(chunks, self.IDS)

    def test_an_error_in_a_sources_own_code_says_what_was_asked(
        self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "extents", lambda ids: ids.nothing)
        with pytest.raises(AttributeError) as raised:
            extents_of(chunks, self.IDS)
        assert raised.value.__notes__ == [f"while asking {chunks!r} for extents of 3 numbers"]

    def test_a_source_that_stops_telling_is_refused(
        self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extents, _ = extents_of(chunks, self.IDS) or (None, None)
        assert extents is not None
        (read,) = merge_reads(extents, price(1e6))
        begins = np.concatenate(([0], np.cumsum(chunks.sizes_bytes[self.IDS])))
        monkeypatch.setattr(chunks, "extents", lambda ids: None)

        with pytest.raises(ConfigError, match="does not tell any more"):
            read_merged(chunks, read, self.IDS, np.zeros(begins[-1], np.uint8), begins)
