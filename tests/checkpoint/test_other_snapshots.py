"""Two tiers that hold different snapshots of one step, as after a job began anew with another fast folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint.interop.exporting import open_readable
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError, FormatError


def state(run: str, step: int) -> dict[str, Any]:
    return {"run": run, "w": np.full(5000, step + len(run) / 100, np.float32)}


def opened(top: Path, fast: str | None, **settings: Any) -> SnapshotStore:
    arguments: dict[str, Any] = {"threads": 1, "report": None}
    return SnapshotStore(top / "slow", fast=None if fast is None else top / fast, **(arguments | settings))


def save(top: Path, fast: str | None, run: str, steps: Sequence[int], *, drains: bool = True) -> None:
    with opened(top, fast, keep=Keep(last=None)) as store:
        if not drains:
            store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
        for step in steps:
            store.save(step, state(run, step)).wait()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("step-*/*")}


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Killed before it drained, on one node, and begun anew on another one."""
    save(tmp_path, "fast-1", "first", [10, 20], drains=False)
    save(tmp_path, "fast-2", "second run", [10, 20])
    return tmp_path


def test_the_one_that_was_saved_last_is_read_and_the_other_is_told_of(apart: Path) -> None:
    lines: list[str] = []
    store = opened(apart, "fast-1", report=lines.append)

    for step in (10, 20, None):
        assert store.restore(step)["run"] == "second run"
    assert len(lines) == 3
    assert "another snapshot of step 10, saved 2" in lines[0]
    assert f"lies in {apart / 'fast-1'}; the one in {apart / 'slow'}, saved 2" in lines[0]
    assert f"`penstock snapshots delete {apart / 'fast-1'} --step 10` removes it" in lines[0]
    for listed in (store.list(), store.verify()):
        assert [(one.step, one.condition, one.tiers, one.broken_tiers) for one in listed] == [
            (10, "intact", (str(apart / "slow"),), ()),
            (20, "intact", (str(apart / "slow"),), ()),
        ]
        assert all(f"another snapshot of step {one.step}, saved" in one.why for one in listed)
    lines.clear()
    tiers = [LocalTier(apart / "fast-1"), LocalTier(apart / "slow")]
    with open_readable(tiers, 10, report=lines.append) as (_, readable):
        assert readable.read("w").tobytes() == state("second run", 10)["w"].tobytes()
    assert "another snapshot of step 10" in lines[0]


def test_the_other_is_no_copy_to_fall_back_on(apart: Path) -> None:
    part = apart / "slow" / "step-000000000020" / "part-00000.pst"
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    store = opened(apart, "fast-1")

    with pytest.raises(FormatError, match="damaged"):
        store.restore(20)
    [broken] = store.verify(20)
    assert broken.condition == "damaged"
    assert store.restore(fallback=True)["run"] == "second run"


def test_neither_is_destroyed_by_saves_drains_or_retention(apart: Path) -> None:
    """The fast tier is full, too: what is no copy of what is drained makes no space."""
    old, drained = contents(apart / "fast-1"), contents(apart / "slow")
    lines: list[str] = []
    with opened(apart, "fast-1", keep=Keep(last=1), fast_bytes=1_100_000, report=lines.append) as store:
        for step in (30, 40, 50, 60):
            store.save(step, state("third", step)).wait()
        store.drain()

        assert "another snapshot of step 10, saved" in lines[0]
        assert lines[0].endswith("; the same of step 20")
        assert contents(apart / "fast-1").items() >= old.items()
        assert contents(apart / "slow").items() >= drained.items()
        assert [store.restore(step)["run"] for step in (10, 20, 60)] == ["second run", "second run", "third"]
        with pytest.raises(ConfigError, match="hold different snapshots of step 20, and neither"):
            store.delete(20)
        with pytest.raises(ConfigError, match="hold different snapshots of step 20, and neither"):
            store.rewind(10)
        assert store.restore(60)["run"] == "third"
    for folder in ("fast-1", "slow"):
        assert {10, 20} <= {one.step for one in SnapshotStore(apart / folder, report=None).list()}


def test_the_newer_one_is_not_drained_over_the_other_until_that_is_deleted(tmp_path: Path) -> None:
    """fast= was forgotten once: the slow tier has steps of its own, which differences on it refer to."""
    save(tmp_path, None, "first", [10, 20, 30])
    save(tmp_path, "fast", "other", [40], drains=False)
    (tmp_path / "elsewhere").mkdir()
    with SnapshotStore(tmp_path / "elsewhere", fast=tmp_path / "fast", threads=1, report=None) as store:
        store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
        store.save(20, state("second run", 20)).wait()
    lines: list[str] = []

    with opened(tmp_path, "fast", keep=Keep(last=None), report=lines.append) as store:
        store.save(50, state("second run", 50)).wait()
        store.drain()
        assert any(
            line.startswith("step 20: NOT drained: another snapshot of step 20, saved") for line in lines
        )
        # Of step 30 the reference is the step 20 that it was saved after, whatever is newer.
        for step, run in ((10, "first"), (20, "second run"), (30, "first"), (50, "second run")):
            restored = store.restore(step)
            assert restored["run"] == run
            np.testing.assert_array_equal(restored["w"], state(run, step)["w"])

    with SnapshotStore(tmp_path / "slow", keep=Keep(last=None), report=None) as slow:
        for step in (50, 40, 30, 20):
            slow.delete(step)
    lines.clear()
    with opened(tmp_path, "fast", keep=Keep(last=None), report=lines.append) as store:
        store.drain()
        assert any(line.startswith("step 20: drained") for line in lines)
        assert not any("another" in line for line in lines)
    assert opened(tmp_path, None).restore(20)["run"] == "second run"


def test_copies_of_one_snapshot_are_told_of_by_nobody(tmp_path: Path) -> None:
    lines: list[str] = []
    save(tmp_path, "fast", "first", [10, 20])
    with opened(tmp_path, "fast", report=lines.append) as store:
        assert store.restore()["run"] == "first"
        assert [one.why for one in store.verify()] == ["", ""]
        assert len(store.list()[0].tiers) == 2
        store.drain()
        store.delete(20)
    assert lines == []
