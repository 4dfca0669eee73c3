"""A disk tier: what is kept is found again by later runs, and whatever happens to its files, nothing wrong is read."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interpreters import Interpreters

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.store.disk import DiskTier, disk_tiers, is_fault_of_disk, remove_tier
from penstock.store.places import SamplePlaces

SIZES = np.array([5, 300, 0, 4096, 17, 100_000, 1, 999], np.int64)
CONTENTS = [np.random.default_rng(sample).bytes(size) for sample, size in enumerate(SIZES.tolist())]
DATA, OTHER = bytes(range(16)), bytes(range(1, 17))
ENOUGH = 1 << 20
#: What a process does that is killed: a sample, and whether it is put or evicted.
STEPS = [
    (int(sample), bool(put))
    for sample, put in zip(
        np.random.default_rng(7).integers(SIZES.size, size=200),
        np.random.default_rng(8).random(200) < 0.6,
        strict=True,
    )
]


def found_in(tier: DiskTier) -> dict[int, bytes]:
    """Read all that a tier says it has, but for what it finds to be wrong."""
    ids = tier.held()
    begins = np.concatenate(([0], np.cumsum(SIZES[ids])))
    into = np.empty(int(begins[-1]), np.uint8)
    failed = {index for index, _ in tier.read_group(ids, into, begins)}
    return {
        int(sample): into[begins[index] : begins[index + 1]].tobytes()
        for index, sample in enumerate(ids)
        if index not in failed
    }


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put_all(tier: DiskTier) -> None:
    for sample, content in enumerate(CONTENTS):
        assert tier.put(sample, content)


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens the tier of the data in a folder, after closing what was opened before."""
    tiers: list[DiskTier] = []

    def open_tier(capacity_bytes: int = ENOUGH, fingerprint: bytes = DATA, **how: Any) -> DiskTier:
        for tier in tiers:
            tier.close()
        tiers.append(DiskTier(tmp_path / "tier", capacity_bytes, fingerprint, SIZES, **how))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


Reopen = Callable[..., DiskTier]


class TestOneRun:
    def test_samples_are_read_in_any_order_into_any_places(self, reopen: Reopen) -> None:
        tier = reopen()
        put_all(tier)

        ids, begins = np.array([5, 0, 3, 0]), np.array([7, 100_007, 100_020, 104_200, 104_205])
        into = np.zeros(104_300, np.uint8)
        assert tier.read_group(ids, into, begins) == []

        for sample, begin in zip(ids.tolist(), begins.tolist(), strict=False):
            assert into[begin : begin + SIZES[sample]].tobytes() == CONTENTS[sample]
        assert found_in(tier) == dict(enumerate(CONTENTS))
        assert tier.used_bytes == SIZES.sum()

    def test_what_is_not_kept_fails_and_the_others_are_read(self, reopen: Reopen) -> None:
        tier = reopen()
        tier.put(4, CONTENTS[4])
        into = np.empty(4_200, np.uint8)

        ((index, error),) = tier.read_group(np.array([3, 4]), into, np.array([0, 4_096, 4_113]))

        assert index == 0
        assert isinstance(error, DataError)
        assert into[4_096:4_113].tobytes() == CONTENTS[4]

    def test_a_sample_that_does_not_fit_is_not_kept(self, reopen: Reopen) -> None:
        tier = reopen(1_000)

        assert tier.put(7, CONTENTS[7])
        assert not tier.put(1, CONTENTS[1])
        tier.evict(np.array([7]))
        assert tier.put(1, CONTENTS[1])
        assert found_in(tier) == {1: CONTENTS[1]}

    def test_bytes_of_another_number_than_the_sample_has_are_an_error(self, reopen: Reopen) -> None:
        with pytest.raises(DataError, match="sample 0 has 5 bytes, not 4"):
            reopen().put(0, b"1234")

    def test_a_closed_tier_is_an_error_and_a_capacity_of_nothing(self, reopen: Reopen) -> None:
        tier = reopen()
        tier.close()
        tier.close()

        with pytest.raises(ClosedError):
            tier.put(0, CONTENTS[0])
        with pytest.raises(ClosedError):
            found_in(tier)
        with pytest.raises(ConfigError, match="capacity_bytes is 0"):
            reopen(0)

    def test_threads_that_write_and_read_find_whole_samples(self, reopen: Reopen) -> None:
        tier = reopen()

        def put(sample: int) -> None:
            tier.put(sample % SIZES.size, CONTENTS[sample % SIZES.size])
            assert found_in(tier).items() <= dict(enumerate(CONTENTS)).items()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, range(64)))

        assert found_in(tier) == dict(enumerate(CONTENTS))


class TestLaterRuns:
    def test_a_later_run_over_the_same_data_has_all_at_once(self, reopen: Reopen) -> None:
        put_all(reopen())

        assert found_in(reopen()) == dict(enumerate(CONTENTS))
        assert reopen().used_bytes == SIZES.sum()

    def test_a_run_over_other_data_finds_nothing_and_leaves_what_is_there(self, reopen: Reopen) -> None:
        put_all(reopen())

        assert found_in(reopen(fingerprint=OTHER)) == {}
        assert found_in(reopen()) == dict(enumerate(CONTENTS))

    def test_a_smaller_capacity_keeps_what_lies_in_it(self, reopen: Reopen, tmp_path: Path) -> None:
        put_all(reopen())

        tier = reopen(5_000)

        assert found_in(tier) == {sample: CONTENTS[sample] for sample in (0, 1, 2, 3, 4)}
        assert tier.samples_path.stat().st_size == 5_000
        tier = reopen()
        assert found_in(tier) == {sample: CONTENTS[sample] for sample in (0, 1, 2, 3, 4)}
        assert not tier.mismatches, "what was given up is not taken for damaged"

    def test_two_processes_have_a_tier_each_and_each_finds_its_own_again(self, tmp_path: Path) -> None:
        first, second = (DiskTier(tmp_path, ENOUGH, DATA, SIZES, number=number) for number in (0, 1))
        first.put(0, CONTENTS[0])
        second.put(1, CONTENTS[1])
        first.close()
        second.close()

        again = DiskTier(tmp_path, ENOUGH, DATA, SIZES, number=1)
        assert found_in(again) == {1: CONTENTS[1]}
        third = DiskTier(tmp_path, ENOUGH, DATA, SIZES, number=1)  # number 1 is in use
        assert third.path != again.path
        again.close()
        third.close()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(steps=st.lists(st.tuples(st.sampled_from("pppper"), st.integers(0, SIZES.size - 1)), max_size=25))
    def test_it_behaves_like_a_dictionary_across_runs(
        self, reopen: Reopen, steps: list[tuple[str, int]]
    ) -> None:
        tier, kept, how = reopen(110_000), dict[int, bytes](), 0
        tier.evict(np.arange(SIZES.size))
        for step, sample in steps:
            if step == "p" and tier.put(sample, CONTENTS[sample]):
                kept[sample] = CONTENTS[sample]
            elif step == "e":
                tier.evict(np.array([sample]))
                kept.pop(sample, None)
            elif step == "r":
                how += 1
                # A smaller file would lose what lies behind its end.
                tier = reopen(110_000, is_direct=how % 2 == 1, padding_bytes=3_000 * how)
            assert found_in(tier) == kept
            assert tier.used_bytes == sum(map(len, kept.values())) <= tier.capacity_bytes

    def test_samples_begin_at_blocks_of_the_disk_as_long_as_space_is_left_for_that(
        self, reopen: Reopen
    ) -> None:
        tier = reopen(int(SIZES.sum()))
        assert tier.put(0, CONTENTS[0])
        assert tier.put(1, CONTENTS[1])
        # What is left in the blocks of all others, and in that of these.
        tier = reopen(int(SIZES.sum()), padding_bytes=int((-SIZES % 4096).sum()))

        def are_at_blocks() -> bool:
            return not (tier._places.of(np.flatnonzero(SIZES)[2:])[:, 0] % 4096).any()

        put_all(tier)
        assert are_at_blocks()
        tier.evict(np.array([4, 5, 7]))
        for sample in (7, 5, 4):
            assert tier.put(sample, CONTENTS[sample])
        assert are_at_blocks()
        assert found_in(tier) == found_in(reopen()) == dict(enumerate(CONTENTS))

    def test_as_many_samples_begin_at_blocks_however_often_others_take_their_places(self) -> None:
        draw = np.random.default_rng(0)
        sizes = draw.integers(20_000, 120_000, 60)
        sizes[0] = 0
        padding_bytes = int((-sizes % 4096).sum())
        places = SamplePlaces(int(sizes.sum()) + padding_bytes, padding_bytes)
        # An earlier version wrote half of them, one behind the other.
        ends, old = np.cumsum(sizes), np.arange(30)
        places.restore(old, (ends - sizes)[old], ends[old])
        for sample in [*range(30, 60), *draw.integers(60, size=3_000)]:
            ids = np.array([sample])
            places.evict(ids)
            if places.take(ids, sizes[ids]) is not None:
                places.keep(ids)

        begins = places.of(np.arange(1, 60))[:, 0]
        assert np.mean(begins[begins >= 0] % 4096 == 0) > 0.7
        assert all(one[1] < other[0] for one, other in pairwise(places._holes))


class TestDamage:
    def test_a_flipped_byte_is_found_at_the_first_read_and_never_handed_out(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = reopen()
        put_all(tier)
        begin = int(SIZES[:5].sum())
        with open(tier.samples_path, "r+b") as file:
            file.seek(begin + 50_000)
            byte = file.read(1)[0]
            file.seek(begin + 50_000)
            file.write(bytes([byte ^ 1]))

        undamaged = {s: content for s, content in enumerate(CONTENTS) if s != 5}
        tier = reopen()
        with monkeypatch.context() as patched:
            read = tier._read

            def read_beside(*arguments: Any) -> list[int]:
                """Another thread reads the same, and finds out, before this one compares."""
                wrong = read(*arguments)
                patched.setattr(tier, "_read", read)
                assert found_in(tier) == undamaged
                return wrong

            patched.setattr(tier, "_read", read_beside)
            assert found_in(tier) == undamaged

        assert found_in(tier) == undamaged
        assert tier.mismatches == 1
        lines = list[str]()
        with (
            monkeypatch.context() as patched
        ):  # each is reported when the first is found, and counted at the end
            patched.setattr(tier, "_report", lines.append)
            tier.mismatches = 3
            tier.close()
        assert lines == [f"3 samples in {tier.samples_path} were damaged or lost, and were read anew"]
        tier = reopen()
        assert tier.put(5, CONTENTS[5])
        assert found_in(tier) == found_in(reopen()) == dict(enumerate(CONTENTS))

    def test_what_is_evicted_and_written_anew_is_not_compared_with_what_an_earlier_run_wrote(
        self, reopen: Reopen
    ) -> None:
        put_all(reopen())
        tier = reopen()
        others = [content[::-1] for content in CONTENTS]

        tier.evict(tier.held())
        for sample, content in enumerate(others):
            tier.put(sample, content)

        assert found_in(tier) == dict(enumerate(others))
        assert not tier.mismatches

    def test_many_that_are_evicted_are_noted_with_one_write(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = reopen()
        put_all(tier)
        writes, write = list[int](), os.write

        def noted(file: int, content: bytes) -> int:
            writes.append(file)
            return write(file, content)

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", noted)
            tier.evict(np.arange(3))

        assert writes == [tier._index]
        assert set(found_in(reopen())) == set(range(3, SIZES.size))

    def test_an_index_that_is_cut_off_anywhere_loses_only_what_is_cut(self, reopen: Reopen) -> None:
        tier = reopen()
        put_all(tier)
        tier.close()
        content = tier.path.read_bytes()

        for size in [*range(4_096, len(content), 7), 0, 100, 4_095]:
            tier.path.write_bytes(content[:size])
            whole = max(0, (size - 4_096) // 40)
            assert found_in(reopen()) == dict(list(enumerate(CONTENTS))[:whole])

    @pytest.mark.parametrize("at", [0, 9, 12, 20, 40, 4_096, 4_100, 4_110, 4_118, 4_126, 4_134])
    def test_a_flipped_byte_of_the_index_makes_nothing_wrong_and_one_of_its_head_is_reported(
        self, reopen: Reopen, at: int
    ) -> None:
        tier = reopen()
        put_all(tier)
        tier.close()
        content = bytearray(tier.path.read_bytes())
        content[at] ^= 0x10
        tier.path.write_bytes(content)

        lines = list[str]()
        found = found_in(reopen(report=lines.append))

        assert found == ({} if at < 4_096 else dict(list(enumerate(CONTENTS))[1:]))
        wanted = f"{tier.path} is damaged, or another version of Penstock wrote it: its samples are read anew"
        assert lines == ([wanted] if at < 4_096 else [])

    def test_samples_that_are_cut_off_are_not_found(self, reopen: Reopen) -> None:
        tier = reopen()
        put_all(tier)
        tier.close()
        os.truncate(tier.samples_path, int(SIZES[:4].sum()))

        assert found_in(reopen()) == {sample: CONTENTS[sample] for sample in range(4)}

    def test_a_file_that_is_cut_off_while_it_is_used_gives_no_zeros(self, reopen: Reopen) -> None:
        tier = reopen()
        for sample in range(4):
            assert tier.put(sample, CONTENTS[sample])
        os.truncate(tier.samples_path, 0)

        assert not tier.put(5, CONTENTS[5]), "in front of it the file would have zeros"
        os.truncate(tier.samples_path, 100_000)  # as a write after it was cut off leaves it

        assert found_in(tier) == {}

    @pytest.mark.parametrize(
        "points", [[0, 7, 23, 52], pytest.param(range(100), marks=pytest.mark.slow)], ids=["some", "all"]
    )
    def test_a_process_that_is_killed_in_any_write_leaves_what_it_had_written_and_the_next_has_it_at_once(
        self, tmp_path: Path, points: Sequence[int], interpreters: Interpreters
    ) -> None:
        """A write that a process is killed in is done, half done or not done, in turn."""
        code = """
            import os, sys
            import numpy as np
            from penstock.store.disk import DiskTier
            from tests.killed_writes import killed_at
            from tests.store.test_disk import CONTENTS, DATA, ENOUGH, SIZES, STEPS
            folder, point = sys.argv[1], int(sys.argv[2])
            killed = killed_at(point)
            os.write, os.pwrite = killed(os.write), killed(os.pwrite)
            tier = DiskTier(folder, ENOUGH, DATA, SIZES)
            for sample, is_put in STEPS:
                tier.put(sample, CONTENTS[sample]) if is_put else tier.evict(np.array([sample]))
        """
        for point in points:
            folder = tmp_path / str(point)
            assert interpreters.start(code, str(folder), str(point)).wait() == -signal.SIGKILL

            # The header is a write, putting a sample two (one of no bytes: one), evicting it one.
            writes, kept, under_way = 1, set[int](), set[int]()
            for sample, is_put in STEPS:
                done = 0 if is_put == (sample in kept) else 1 + (is_put and SIZES[sample] > 0)
                if done and writes <= point < writes + done:
                    under_way = {sample}
                if writes + done > point:
                    break
                writes += done
                if done:
                    kept ^= {sample}
            tier = DiskTier(folder, ENOUGH, DATA, SIZES)
            found = found_in(tier)
            assert found.items() <= dict(enumerate(CONTENTS)).items()
            assert found.keys() - under_way == kept - under_way
            assert tier.path.name.endswith("-0.index")  # the lock went with the process
            tier.close()


class TestDisks:
    def test_a_disk_that_is_full_keeps_what_it_has_and_says_so_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines: list[str] = []
        tier = DiskTier(tmp_path, ENOUGH, DATA, SIZES, report=lines.append)
        tier.put(0, CONTENTS[0])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        assert not tier.put(1, CONTENTS[1])
        assert not tier.put(3, CONTENTS[3])
        monkeypatch.undo()

        assert not tier.put(4, CONTENTS[4])
        assert found_in(tier) == {0: CONTENTS[0]}
        assert [line for line in lines if "No space left on device" in line] == lines
        assert len(lines) == 1
        tier.close()

    def test_a_disk_with_less_space_than_asked_for_gets_a_smaller_tier(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines: list[str] = []
        real = os.statvfs

        def almost_full(file: Path) -> os.statvfs_result:
            fields = list(real(file))
            fields[1], fields[4] = 1_000, 50  # bytes of a block, free blocks
            return os.statvfs_result(fields)

        monkeypatch.setattr(os, "statvfs", almost_full)
        tier = DiskTier(tmp_path, 1 << 40, DATA, SIZES, report=lines.append)

        assert tier.capacity_bytes == 49_000
        assert lines == [
            f"{tmp_path} has 49 kB free of the 1.1 TB that samples were to have: fewer are kept there"
        ]
        assert not tier.put(5, CONTENTS[5])
        assert tier.put(3, CONTENTS[3])
        tier.close()

    def test_a_folder_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")

        for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
            with pytest.raises(DataError, match=f"{folder} can keep no samples"):
                DiskTier(folder, ENOUGH, DATA, SIZES)

    def test_tiers_are_listed_and_those_that_nobody_uses_removed(self, tmp_path: Path) -> None:
        used = DiskTier(tmp_path, ENOUGH, DATA, SIZES, about="photos")
        unused = DiskTier(tmp_path, ENOUGH, OTHER, SIZES, about="texts")
        unused.close()
        (tmp_path / "other.index").write_bytes(b"not ours")

        facts = disk_tiers(tmp_path)
        assert {(each.about, each.is_used) for each in facts} == {("photos", True), ("texts", False)}
        assert all(each.nbytes >= ENOUGH for each in facts)

        (tmp_path / f"penstock-{OTHER.hex()}-9.index").symlink_to(
            facts[0].path
        )  # such as another user's: none of ours
        assert disk_tiers(tmp_path) == facts

        assert [remove_tier(each.path) for each in facts] == [not each.is_used for each in facts]
        assert [each.about for each in disk_tiers(tmp_path)] == ["photos"]
        used.put(0, CONTENTS[0])
        used.close()

    @pytest.mark.parametrize("is_written", [True, False])
    def test_a_tier_that_was_removed_while_it_was_used_is_reported_once(
        self, tmp_path: Path, is_written: bool
    ) -> None:
        lines = list[str]()
        tier = DiskTier(tmp_path, ENOUGH, DATA, SIZES, report=lines.append)
        for path in tmp_path.iterdir():
            path.unlink()

        if is_written:
            tier.put(0, CONTENTS[0])
        tier.close()
        tier.close()

        (line,) = lines
        assert "was removed: this run still reads from it; no later run will find it" in line

    def test_closing_closes_the_files_where_a_server_of_files_has_lost_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = DiskTier(tmp_path, ENOUGH, DATA, SIZES)
        files = [tier._file, tier._index]
        real = os.fstat

        def stale(file: int) -> os.stat_result:
            if file in files:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(file)

        monkeypatch.setattr(os, "fstat", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            tier.close()
        tier.close()
        monkeypatch.undo()

        for file in files:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(file)

    def test_tiers_on_a_disk_that_is_read_only_are_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DiskTier(tmp_path, ENOUGH, DATA, SIZES, about="photos").close()
        real = os.open

        def read_only(path: Path, flags: int) -> int:
            if flags & os.O_RDWR:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags)

        monkeypatch.setattr(os, "open", read_only)
        assert [(each.about, each.is_used) for each in disk_tiers(tmp_path)] == [("photos", False)]

    def test_a_tier_on_a_disk_that_is_read_only_is_read_by_several_and_gets_nothing_new(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(DiskTier(tmp_path, ENOUGH, DATA, SIZES)) as tier:
            put_all(tier)
            tier.evict(np.array([3]))
            index = tier.path
        index.write_bytes(index.read_bytes() + b"half an entry")
        writes = DiskTier(
            tmp_path, ENOUGH, OTHER, SIZES
        )  # such as a process that has the disk under another mount
        before, lines, calls = files_in(tmp_path), list[str](), list[str]()
        log: Any = SimpleNamespace(
            add=lambda *_: calls.append("add"), end=lambda: calls.append("end"), close=lambda: None
        )
        real = os.open

        def read_only(path: str | Path, flags: int, mode: int = 0o777) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", read_only)
        with ExitStack() as stack:
            # The number of the second is that of no tier.
            tiers = [
                stack.enter_context(
                    closing(DiskTier(tmp_path, ENOUGH, DATA, SIZES, number=number, report=lines.append))
                )
                for number in (0, 7)
            ]
            for tier in tiers:
                assert found_in(tier) == {each: content for each, content in enumerate(CONTENTS) if each != 3}
                assert not tier.put(3, CONTENTS[3])
                assert tier.capacity_bytes == ENOUGH
            tiers[0].evict(np.array([5]))
            assert 5 not in found_in(tiers[0])
            tiers[1].tell(log)
            assert calls == ["add", "end"]
        with closing(writes), pytest.raises(DataError, match="Read-only file system") as raised:
            DiskTier(tmp_path, ENOUGH, OTHER, SIZES)

        assert is_fault_of_disk(raised.value)
        assert lines == 2 * [f"{tmp_path} is read-only: it has 7 of the samples and gets no others"]
        assert files_in(tmp_path) == before

    def test_a_tier_that_is_made_where_another_was_removed_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = DiskTier(tmp_path, ENOUGH, DATA, SIZES)
        tier.close()
        lock = fcntl.flock

        def replaced_before(index: int, how: int) -> None:
            tier.path.unlink()
            tier.path.write_bytes(b"new")
            lock(index, how)

        monkeypatch.setattr("penstock.store.disk.fcntl.flock", replaced_before)
        assert not remove_tier(tier.path)
        assert tier.path.read_bytes() == b"new"

    def test_samples_that_another_user_put_there_meanwhile_are_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Replaced:
            """A file for direct reads that was replaced before it was opened."""

            def __init__(self, path: Path) -> None:
                path.unlink()
                path.touch()
                path.chmod(0o666)
                self.file = os.open(path, os.O_RDONLY)

            def close(self) -> None:
                os.close(self.file)

        monkeypatch.setattr("penstock.store.disk.DirectFile", Replaced)
        with pytest.raises(DataError, match="another user may write"):
            DiskTier(tmp_path, ENOUGH, DATA, SIZES, is_direct=True, is_own=True)
