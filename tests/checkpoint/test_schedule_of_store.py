"""When a store says that a save is due, and what it makes ready before the first step."""

from __future__ import annotations

import resource
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint import due as due_module
from penstock.checkpoint import store as store_module
from penstock.checkpoint import writer as writer_module
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier
from penstock.errors import ConfigError
from penstock.plan.saves import Auto, EverySteps, daly_seconds


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds

    time = staticmethod(time.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Set the clock that the store looks at when it is asked whether a save is due, and for how long it blocked."""
    clock = Clock()
    for module in (due_module, store_module, writer_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def state(value: float = 0.0, nbytes: int = 4_000) -> dict[str, Any]:
    return {"weights": np.full(nbytes // 4, value, np.float32)}


def test_every_so_many_steps_whatever_the_clock_says_also_after_a_restart(folder: Path, clock: Clock) -> None:
    with SnapshotStore(folder, schedule="100 steps", report=None) as store:
        assert [step for step in range(301) if store.is_due(step)] == [100, 200, 300]
        store.save(100, state()).wait()
        clock.seconds += 1e6
        assert not store.is_due(101)
    with SnapshotStore(folder, schedule=EverySteps(50), report=None) as store:
        assert store.is_due(150)


def test_the_space_that_is_checked_is_that_of_what_is_young_enough_where_a_schedule_tells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour's snapshots of half an hour each, of a run of a month; by steps, nobody knows how long that takes."""
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 40_000)
    keep = Keep(last=None, max_age_seconds=3600.0)
    month = range(10, 10 * 1500, 10)

    with SnapshotStore(folder, keep=keep, schedule="30 min", scheme="complete", report=None) as store:
        needed = store.prepare(state(), month)
        assert needed.kept_bytes == store.prepare(state()).kept_bytes == 3 * needed.largest_bytes
        assert 4_004 < needed.largest_bytes < 6_000
    with (
        SnapshotStore(folder, keep=keep, schedule="10 steps", scheme="complete", report=None) as store,
        pytest.raises(ConfigError, match=r'has 40 kB free.*may be less.*a schedule by time, such as "30'),
    ):
        store.prepare(state(), month)


def test_every_so_many_minutes_from_when_the_training_went_on(folder: Path, clock: Clock) -> None:
    with SnapshotStore(folder, schedule="2 min", report=None) as store:
        clock.seconds += 119
        assert not store.is_due(1)
        clock.seconds += 1
        assert not store.is_due(0), "before the first step there is nothing to save"
        assert store.is_due(2)
        assert store.is_due(3), "until it is saved"
        store.save(3, state()).wait()
        assert not store.is_due(4)
        clock.seconds += 120
        assert store.is_due(5)


def test_automatic_saves_follow_the_cost_that_was_measured(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of the state takes two seconds; the job fails once a day."""
    copy = StagingArea.copy

    def slow_copy(*arguments: Any) -> Any:
        clock.seconds += 2.0
        return copy(*arguments)

    monkeypatch.setattr(StagingArea, "copy", slow_copy)
    best = daly_seconds(2.0, 86_400.0)
    assert 500 < best < 600
    with SnapshotStore(folder, schedule="auto, a failure every 24 h", report=None) as store:
        assert store.is_due(1), "the first one measures"
        saving = store.save(1, state())
        saving.wait()
        assert not store.is_due(2)
        clock.seconds += best - 1
        assert not store.is_due(3)
        clock.seconds += 2
        assert store.is_due(4)


def test_automatic_saves_never_begin_before_the_last_one_is_durable(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_commit = threading.Event()
    commit = LocalDraft.commit

    def commit_later(self: LocalDraft, manifest: bytes) -> None:
        assert may_commit.wait(60)
        commit(self, manifest)

    monkeypatch.setattr(LocalDraft, "commit", commit_later)
    with SnapshotStore(folder, schedule=Auto(3_600.0, least_seconds=0.0), report=None) as store:
        saving = store.save(1, state())
        clock.seconds += 10
        assert not store.is_due(2), "it is still being written"
        may_commit.set()
        saving.wait()
        clock.seconds += 1e5
        assert store.is_due(3)


def test_without_a_schedule_nobody_knows(folder: Path) -> None:
    with (
        SnapshotStore(folder, report=None) as store,
        pytest.raises(ConfigError, match='schedule="1000 steps"'),
    ):
        store.is_due(1)
    with pytest.raises(ConfigError, match="no schedule of saves"):
        SnapshotStore(folder, schedule="often")


# -- Before the first step ---------------------------------------------------------------------------------


def test_a_folder_without_the_space_is_refused_with_the_numbers_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 20_000_000)
    big = state(nbytes=10_000_000)
    with SnapshotStore(folder, keep=Keep(last=3), scheme="complete", report=None) as store:
        with pytest.raises(ConfigError) as raised:
            store.prepare(big, range(1, 10))
        for told in ("has 20 MB free", "will need 40 MB", "30 MB stay", "a new one of 10 MB"):
            assert told in str(raised.value), told
        assert not list(folder.glob("step-*"))
        # Two fit: one stays, and a new one is written.
        needed = store.prepare(state(nbytes=4_000_000), range(1, 3))
    assert needed.peak_bytes <= 20_000_000


def test_space_is_checked_before_the_first_save_without_being_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    free_bytes = 3_900
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: free_bytes)
    with SnapshotStore(folder, scheme="complete", codec="stored", report=lines.append) as store:
        assert [line.partition(": ")[2] for line in lines] == ["free some space before the next save"]
        with pytest.raises(
            ConfigError, match=r"has 3.9 kB free, and the snapshot of step 1 takes up to 5.\d+ kB"
        ):
            store.save(1, state())
        assert [path.name for path in folder.iterdir()] == [".lock"]
        # It fits, and five do not: the training is told, and goes on.
        free_bytes = 20_000
        store.save(1, state()).wait()
        assert lines[1].startswith(
            f"step 1 is saved, but space may run out later: {folder} has 20 kB free, and "
        )
        # Once: what does not fit later is an error of the disk.
        free_bytes = 100
        store.save(2, state()).wait()
        assert len(lines) == 4


def test_a_store_that_is_opened_on_a_disk_that_is_almost_full_tells_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with SnapshotStore(folder, codec="stored", report=None) as store:
        store.save(7, state(nbytes=400_000)).wait()
    for free_bytes in (399_000, 500_000):
        monkeypatch.setattr(LocalTier, "free_bytes", lambda self, free=free_bytes: free)
        SnapshotStore(folder, report=lines.append).close()

    assert lines == [
        f"{folder} has 399 kB free, and the last snapshot there takes 401 kB: free some space before the next save"
    ]


@pytest.mark.parametrize("scheme", ["complete", "progressive"])
def test_what_is_estimated_is_what_is_there_at_most(folder: Path, scheme: Any) -> None:
    """Differences as large as they can be: of the state a few bytes stay as they were."""
    generator = np.random.default_rng(0)
    with SnapshotStore(
        folder, keep=Keep(last=2), scheme=scheme, snap_dis=3, codec="balance", report=None
    ) as store:
        needed = store.prepare(state(nbytes=400_000) | {"rate": np.ones(3)}, range(1, 12))
        most = 0
        for step in range(1, 12):
            weights = generator.integers(0, 256, 400_000, np.uint8)
            store.save(step, {"weights": weights, "rate": np.ones(3)}).wait()
            most = max(most, sum(one.stored_bytes for one in store.list()))
    assert most <= needed.kept_bytes <= needed.peak_bytes
    assert needed.kept_bytes < 1.5 * most, "and not much more than that"


def test_what_tensors_take_beside_their_numbers_is_estimated_too(folder: Path) -> None:
    many = {f"layer {number}": np.full(3, number) for number in range(1000)}
    with SnapshotStore(folder, keep=Keep(last=1), scheme="complete", report=None) as store:
        needed = store.prepare(many, range(1, 3))
        stored_bytes = store.save(1, many).wait().stored_bytes
    assert stored_bytes > 4 * 24_000, "else nothing is tested"
    assert stored_bytes <= needed.largest_bytes < 1.5 * stored_bytes


@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_no_save_takes_memory_for_the_state_once_it_is_prepared(folder: Path, reference: Any) -> None:
    nbytes = 40_000_000
    first = state(1.0, nbytes)
    first["weights"][:] = np.random.default_rng(0).normal(size=nbytes // 4)
    with SnapshotStore(folder, reference=reference, threads=1, report=None) as store:
        store.prepare(first)
        tracemalloc.start()
        try:
            for step in (1, 2):
                first["weights"][::100] += 1
                store.save(step, first).wait()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < nbytes / 2, "but for what encodes"


def test_memory_is_taken_by_prepare_and_its_pages_are_touched(folder: Path) -> None:
    nbytes = 100_000_000
    big = state(1.0, nbytes)
    before = resident_bytes()
    with SnapshotStore(folder, scheme="complete", report=None) as store:
        store.prepare(big)
        assert resident_bytes() - before > 0.95 * nbytes


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_steps_that_are_named_are_counted_and_others_are_as_many_as_are_kept(folder: Path) -> None:
    with SnapshotStore(folder, keep=Keep(last=None), scheme="complete", report=None) as store:
        few = store.prepare(state(), EverySteps(10).steps(until=30))
        many = store.prepare(state(), EverySteps(10).steps(until=3_000))
    assert many.peak_bytes == 100 * few.peak_bytes
