"""A fast tier that vanishes or refuses: where snapshots stay is healthy, and saving goes on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.tiers import local as local_module
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier, LocalWriter
from penstock.errors import DataError
from penstock.files import sync_folder


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(5000, step, np.float32)}


def opened(top: Path, lines: list[str] | None = None, **settings: Any) -> SnapshotStore:
    report = None if lines is None else lines.append
    return SnapshotStore(top / "slow", fast=top / "fast", threads=1, report=report, **settings)


def check(top: Path, *steps: int) -> None:
    slow = SnapshotStore(top / "slow", report=None)
    assert sorted(one.step for one in slow.list()) == list(steps)
    for step in steps:
        np.testing.assert_array_equal(slow.restore(step)["w"], state(step)["w"])


def save_and_lose(store: SnapshotStore, top: Path, step: int) -> None:
    """Save to the fast tier, which is gone before a drain begins."""
    next_to_drain = store._housekeeping.next_to_drain
    store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
    store.save(step, state(step)).wait()
    shutil.rmtree(top / "fast")
    store._housekeeping.next_to_drain = next_to_drain  # type: ignore[method-assign]


def test_one_that_vanishes_is_told_of_at_each_save_with_what_was_lost_with_it(tmp_path: Path) -> None:
    lines: list[str] = []
    with opened(tmp_path, lines) as store:
        store.save(1, state(1)).wait()
        store.drain()
        save_and_lose(store, tmp_path, 2)
        lines.clear()

        for step in (3, 4):
            store.save(step, state(step)).wait()
            assert store.restore()["w"][0] == step

    told = (
        f"; written to {tmp_path / 'slow'} at once: {tmp_path / 'fast'} is gone, and with it what was not drained, "
        "of step 2"
    )
    saves = [line for line in lines if "blocked" in line]
    assert len(saves) == 2
    assert all(line.endswith(told) for line in saves)
    assert not (tmp_path / "fast").exists()
    check(tmp_path, 1, 3, 4)


def test_one_that_vanishes_before_a_drain_began_makes_no_save_fail(tmp_path: Path) -> None:
    lines: list[str] = []
    with opened(tmp_path, lines) as store:
        save_and_lose(store, tmp_path, 1)
        store.drain()
        store.save(2, state(2)).wait()
    assert "step 1: NOT drained: the fast tier is gone" in lines
    check(tmp_path, 2)


@pytest.mark.parametrize("what", ["begins", "is written", "is committed"])
def test_a_snapshot_that_is_refused_goes_to_the_slow_one_and_so_do_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    lines: list[str] = []
    fast = str(tmp_path / "fast")
    begin, write, commit = LocalTier.begin, LocalWriter.write, LocalDraft.commit

    def begins(tier: LocalTier, *arguments: Any, **named: Any) -> Any:
        if tier.name == fast:
            raise DataError(f"{fast}: Read-only file system")
        return begin(tier, *arguments, **named)

    def is_written(writer: LocalWriter, *pieces: Any) -> None:
        if str(writer._path).startswith(fast):
            raise DataError(f"{fast}: Input/output error")
        write(writer, *pieces)

    def is_committed(draft: LocalDraft, manifest: bytes) -> None:
        if str(draft.final).startswith(fast):
            raise DataError(f"{fast}: Input/output error")
        commit(draft, manifest)

    with opened(tmp_path, lines, keep=Keep(last=None)) as store:
        store.save(1, state(1)).wait()
        store.drain()
        lines.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "begin", begins if what == "begins" else begin)
            patch.setattr(LocalWriter, "write", is_written if what == "is written" else write)
            patch.setattr(LocalDraft, "commit", is_committed if what == "is committed" else commit)
            store.save(2, state(2)).wait()
            store.save(3, state(3)).wait()
        assert len(lines) == 2
        assert all(f"; written to {tmp_path / 'slow'} at once: {fast}: " in line for line in lines), lines
        assert store.restore(1)["w"][0] == 1
    check(tmp_path, 1, 2, 3)
    with opened(tmp_path, lines) as store:
        store.save(4, state(4)).wait()
    assert (tmp_path / "fast" / "step-000000000004").is_dir(), "opened anew, it is tried again"


def test_drains_that_fail_with_it_are_told_and_raised_at_the_end_and_stop_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for good: what was written there cannot be read any more."""
    begin = LocalTier.begin
    fast = str(tmp_path / "fast")

    def fails(tier: LocalTier, *arguments: Any, **named: Any) -> Any:
        if tier.name == fast:
            raise DataError(f"{fast}: Input/output error")
        return begin(tier, *arguments, **named)

    lines: list[str] = []
    store = opened(tmp_path, lines)
    drainer = store._drainer
    assert drainer is not None
    with monkeypatch.context() as patch:
        patch.setattr(drainer, "_drain", lambda step: fails(LocalTier(fast)))
        patch.setattr(LocalTier, "begin", fails)
        store._housekeeping.open_for_writing()
        store._housekeeping.give_up_fast(DataError(f"{fast}: Input/output error"))
        drainer._housekeeping.next_to_drain = lambda now: 1  # type: ignore[method-assign, assignment]
        for step in (2, 3, 4):
            store.save(step, state(step)).wait()
            drainer.go_on()
            with drainer._changed:
                drainer._changed.wait_for(lambda: drainer._thread is None, 60)
    with pytest.raises(DataError, match="Input/output error"):
        store.close()
    assert any(line.startswith("step 1: NOT drained: ") for line in lines)
    check(tmp_path, 2, 3, 4)


def test_one_that_cannot_be_opened_for_writing_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fast").mkdir()
    sync = sync_folder

    def of_fast(path: Path) -> None:
        if str(path).endswith("fast"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        sync(path)

    monkeypatch.setattr(local_module, "sync_folder", of_fast)
    lines: list[str] = []
    with opened(tmp_path, lines) as store:
        store.save(1, state(1)).wait()
    assert f"at once: {tmp_path / 'fast'}: Read-only file system" in lines[0]
    check(tmp_path, 1)


def test_what_cannot_leave_the_fast_tier_makes_no_save_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LocalTier.delete

    def of_slow(tier: LocalTier, folder: str) -> None:
        if tier.name.endswith("fast"):
            raise DataError(f"{tier.name}: Read-only file system")
        delete(tier, folder)

    lines: list[str] = []
    with opened(tmp_path, lines, keep=Keep(last=1), scheme="complete") as store:
        store.save(1, state(1)).wait()
        store.drain()
        monkeypatch.setattr(LocalTier, "delete", of_slow)
        for step in (2, 3, 4):
            store.save(step, state(step)).wait()
            store.drain()
        assert store.restore()["w"][0] == 4
        with pytest.raises(DataError, match="Read-only"):
            store.delete(1)
    assert "at once: a snapshot that is to go could not be removed: " in lines[-1]


def test_a_copy_of_the_state_that_was_interrupted_is_no_refusal_of_the_fast_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(StagingArea, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.save(1, state(1))
        assert store.save(2, state(2)).wait().tier == str(tmp_path / "fast")
    check(tmp_path, 2)
