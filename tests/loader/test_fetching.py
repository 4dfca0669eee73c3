"""When samples that lie near each other are read together, and which sample is under way then."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.interpreters import Interpreters

from penstock.errors import DataError
from penstock.flow.work import Failed, Request
from penstock.loader import fetching, opened
from penstock.loader.fetching import Near, SourceFetcher
from penstock.loader.opened import all_extents
from penstock.policy import Extents
from penstock.store import Records, extents_of
from penstock.store.calls import Calls

Ids = NDArray[np.int64]

TEN = np.arange(10)


def rows(hole_bytes: int) -> Extents:
    """Rows of 100 bytes in one file."""
    return Extents(np.zeros(10, np.int64), (100 + hole_bytes) * TEN, np.full(10, 100))


def near(hole_bytes: int) -> Near:
    """A request takes a millisecond and a byte 10 ns, as the machine has it."""
    return Near(rows(hole_bytes), lambda requests, nbytes: 1e-3 * requests + 1e-8 * nbytes, 1e8)


def test_the_machine_says_what_pays_until_reads_have_been_seen() -> None:
    merged = near(hole_bytes=50_000).merged(TEN)

    assert merged is not None
    assert [read.which.tolist() for read in merged] == [TEN.tolist()]
    assert near(hole_bytes=200_000).merged(TEN) is None


def test_reads_that_take_less_than_the_machine_says_are_merged_over_smaller_holes() -> None:
    found = near(hole_bytes=50_000)
    found.observe(10, 10 * 100e-6)
    closer = near(hole_bytes=5_000)
    closer.observe(10, 10 * 100e-6)

    assert found.merged(TEN) is None
    assert closer.merged(TEN) is not None


def test_now_and_then_a_millisecond_of_reads_is_tried_one_by_one_and_one_at_least() -> None:
    found = near(hole_bytes=0)
    found.observe(10, 10 * 100e-6)
    slow = near(hole_bytes=0)
    slow.observe(10, 10 * 5e-3)

    assert [found.count_to_try() for _ in range(6)] == [0, 10, 10, 0, 10, 0]
    assert [slow.count_to_try() for _ in range(6)] == [0, 1, 1, 0, 1, 0]


def test_samples_were_resident_if_they_are_copied_from_mapped_pages_that_nobody_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(1000).tofile(tmp_path / "a.bin")
    source = Records(tmp_path / "a.bin", "<i8", 10)
    fetcher = SourceFetcher(source, {})

    def fetched() -> Any:
        return fetcher.fetch(Request(TEN, lambda sample: None))

    fetched()  # loads what is compiled, which may wait for a disk
    assert fetched().was_resident
    with monkeypatch.context() as waiting:
        waiting.setattr(fetching, "_major_faults", itertools.count().__next__)
        assert not fetched().was_resident
    monkeypatch.setattr(source, "_maps", False)
    assert not fetched().was_resident


def test_nothing_is_merged_where_a_request_takes_next_to_nothing() -> None:
    found = near(hole_bytes=0)
    found.observe(1000, 1e-3)

    assert found.merged(TEN) is None


@pytest.mark.parametrize("seconds", [1e-3, 5e-3])
def test_a_store_that_gets_slower_is_found_out(seconds: float) -> None:
    found = near(hole_bytes=50_000)
    found.observe(10, 10 * 2e-6)
    assert found.merged(TEN) is None

    for _ in range(70):
        found.observe(10, 10 * seconds)

    assert found.merged(TEN) is not None


def test_merging_ends_where_a_sample_read_by_itself_takes_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merged read of a large file takes long however fast the store is, which must not be taken for its requests."""
    seconds = itertools.count(step=1e-6)
    monkeypatch.setattr(fetching, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    source = Units(40)
    fetcher = source.fetcher()

    for _ in range(3):
        source.found.clear()
        fetcher.fetch(Request(np.array([31, 33, 35]), source.note))

    assert source.found == [(3, 31), (3, 33), (3, 35)]


class Units:
    """Samples of one byte, ten to a unit. It notes which sample a thread was said to be at when a unit was read.

    broken: a unit that cannot be read. misplaced: a sample that it says lies beyond its unit's end.
    """

    def __init__(self, samples: int, broken: int = -1, misplaced: int = -1) -> None:
        self.sizes_bytes = np.ones(samples, np.int64)
        self.labels, self.classes = np.full(samples, -1), ()
        self.broken, self.misplaced = broken, misplaced
        self.at = -1
        self.found: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.sizes_bytes.size

    def describe(self, sample: int) -> str:
        return f"sample {sample}"

    def read(self, sample: int) -> bytes:
        content = bytearray(1)
        self.read_into(sample, memoryview(content))
        return bytes(content)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        self.read_ranges(sample // 10, np.array([[sample % 10, sample % 10 + 1]]), [buffer[:1]])
        return 1

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        return ids // 10, np.where(ids == self.misplaced, 99, ids % 10), self.sizes_bytes[ids]

    def unit_bytes(self, units: Ids) -> Ids:
        return np.full(units.size, 10)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        self.found.append((unit, self.at))
        if unit == self.broken:
            raise DataError("cannot be read")

    def fetcher(self, request_seconds: float = 1e-3) -> SourceFetcher:
        """Return what fetches them as a loader does that merges reads."""
        where = extents_of(self, np.arange(len(self)))
        assert where is not None
        near = Near(where[0], lambda requests, nbytes: 1e-3 * requests + 1e-8 * nbytes, 1e8)
        near.observe(1, request_seconds)
        return SourceFetcher(self, {}, near)

    def fetch(self, samples: list[int], request_seconds: float = 1e-3) -> list[Any]:
        return list(self.fetcher(request_seconds).fetch(Request(np.array(samples), self.note, lasting=True)))

    def note(self, sample: int) -> None:
        self.at = sample


@pytest.mark.parametrize(("misplaced", "table"), [(-1, (4, 4)), (33, (40, 2))])
def test_where_samples_lie_is_kept_by_the_run_until_runs_take_more_than_samples(
    monkeypatch: pytest.MonkeyPatch, misplaced: int, table: tuple[int, int]
) -> None:
    monkeypatch.setattr(opened, "_ASKED_AT_ONCE", 20)
    source, ids = Units(40, misplaced=misplaced), np.arange(40)

    kept = all_extents(source, Calls())

    assert kept is not None
    assert kept.table.shape == table
    found = kept.of(ids)
    assert found.units.tolist() == np.where(ids == misplaced, -1, ids // 10).tolist()
    assert found.offsets.tolist() == np.where(ids == misplaced, 99, ids % 10).tolist()
    assert found.lengths.tolist() == [1] * 40


def test_a_thread_is_said_to_be_at_the_first_sample_of_each_read() -> None:
    """A unit that hangs must not be reported as the one that was read before it."""
    source = Units(40, broken=2)

    found = source.fetch([33, 31, 25, 2, 24, 3])

    assert [isinstance(each, Failed) for each in found] == [False, False, True, False, True, False]
    assert source.found == [(3, 31), (2, 24), (2, 24), (2, 25), (0, 2)]


def test_samples_are_read_to_memory_of_samples_that_nobody_refers_to_any_more(tmp_path: Path) -> None:
    content = np.arange(80_000, dtype=np.int64)
    content.tofile(tmp_path / "a.bin")
    fetcher = SourceFetcher(Records(tmp_path / "a.bin", "<i8", 20_000), {})

    def read(samples: list[int]) -> list[Any]:
        return list(fetcher.fetch(Request(np.array(samples), lambda sample: None, lasting=True)))

    first, held = read([0, 1]), read([2, 3])
    place = first[0].ctypes.data
    del first
    last = read([1, 3])
    fetcher.close()

    assert last[0].ctypes.data == place
    found = np.concatenate([*held, *last]).view(np.int64).reshape(4, -1)
    assert (found == content.reshape(4, -1)[[2, 3, 1, 3]]).all()


def test_a_forked_process_reads_to_memory_of_its_own(tmp_path: Path, interpreters: Interpreters) -> None:
    """And when it frees the buffer that its thread had, nothing else goes."""
    np.arange(160_000, dtype=np.int64).tofile(tmp_path / "a.bin")
    code = """
        import mmap, os, sys
        import numpy as np
        from penstock.flow.work import Request
        from penstock.loader.fetching import SourceFetcher
        from penstock.store import Records
        source = Records(sys.argv[1], "<i8", 40_000)
        fetcher = SourceFetcher(source, {})
        def is_right():
            found = list(fetcher.fetch(Request(np.array([2, 3]), lambda sample: None)))
            return (np.concatenate(found).view(np.int64) == np.arange(80_000, 160_000)).all()
        assert is_right()
        forked = os.fork()
        if not forked:
            others = [mmap.mmap(-1, 2 << 20) for _ in range(8)]
            right = is_right()
            del fetcher
            for other in others:
                other[:] = bytes(len(other))
            os._exit(not right)
        sys.exit(os.waitpid(forked, 0)[1] != 0 or not is_right())
    """
    assert interpreters.start(code, str(tmp_path / "a.bin")).wait() == 0


@pytest.mark.parametrize(("samples", "group"), [(4, 1), (16, 2)], ids=["mapped", "buffered"])
def test_a_process_and_one_forked_from_it_read_to_different_memory(
    tmp_path: Path, interpreters: Interpreters, samples: int, group: int
) -> None:
    """What each has read stays as it is while the other reads, and what the first gave back is free for neither."""
    length = 160_000 // samples
    np.repeat(np.arange(samples, dtype=np.int64), length).tofile(tmp_path / "a.bin")
    code = """
        import os, sys
        import numpy as np
        from penstock.flow.work import Request
        from penstock.loader.fetching import SourceFetcher
        from penstock.store import Records
        length, group = map(int, sys.argv[2:])
        fetcher = SourceFetcher(Records(sys.argv[1], "<i8", length), {})
        def read(first):
            return list(fetcher.fetch(Request(np.arange(first, first + group), lambda sample: None)))
        def is_first(samples, first):
            return [sample.view(np.int64)[0] for sample in samples] == list(range(first, first + group))
        read(0)
        held, (told, tell), (done, end) = read(0) if group == 1 else None, os.pipe(), os.pipe()
        forked = os.fork()
        if not forked:
            mine = read(group)
            os.write(tell, b"x")
            os.read(done, 1)
            os._exit(not (is_first(mine, group) and (held is None or is_first(held, 0))))
        os.read(told, 1)
        del held
        also = [read(2), read(3)] if group == 1 else [read(4)]
        os.write(end, b"x")
        sys.exit(os.waitpid(forked, 0)[1] != 0)
    """
    assert interpreters.start(code, str(tmp_path / "a.bin"), str(length), str(group)).wait() == 0


def test_a_sample_read_next_to_merged_ones_is_named_too() -> None:
    source = Units(40, broken=-1)

    source.fetch([33, 31, 12])

    assert sorted(source.found) == [(1, 12), (3, 31)]


@pytest.mark.parametrize("request_seconds", [1e-7, 1e-3])
def test_a_misplaced_sample_fails_however_fast_requests_are(request_seconds: float) -> None:
    found = Units(40, misplaced=15).fetch(list(range(40)), request_seconds)

    failed = {index: str(each.error) for index, each in enumerate(found) if isinstance(each, Failed)}
    assert list(failed) == [15]
    assert "the source says unit 1, offset 99" in failed[15]
