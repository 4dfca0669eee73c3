"""Which folders were the fast tier of a store, remembered beside the snapshots of the slow one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.files.fast_folders import FastFolder, remembered
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError


def save(top: Path, fast: str, step: int, *, drains: bool) -> list[str]:
    """Save a snapshot, and return what was told."""
    lines: list[str] = []
    with SnapshotStore(top / "slow", fast=top / fast, threads=1, report=lines.append) as store:
        if not drains:
            store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
        store.save(step, {"w": np.full(100, step)}).wait()
    return lines


def known(top: Path) -> list[FastFolder]:
    return remembered(LocalTier(top / "slow"))


def test_one_that_another_took_the_place_of_stays_known_until_it_is_drained(tmp_path: Path) -> None:
    save(tmp_path, "first", 10, drains=False)
    lines = save(tmp_path, "second", 20, drains=True)

    assert lines[0] == (
        f"{tmp_path / 'first'}, the fast tier of {tmp_path / 'slow'} before, holds what was not drained, of step 10: "
        f"`penstock snapshots drain {tmp_path / 'slow'} --fast {tmp_path / 'first'}` copies it"
    )
    assert [one.path for one in known(tmp_path)] == [str(tmp_path / name) for name in ("second", "first")]
    assert save(tmp_path, "second", 30, drains=True)[0] == lines[0], "at each beginning"

    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "first", report=None) as store:
        store.drain()
    assert [one.path for one in known(tmp_path)] == [str(tmp_path / "first")]
    assert not any("before" in line for line in save(tmp_path, "second", 40, drains=True))
    assert [one.path for one in known(tmp_path)] == [str(tmp_path / "second")]
    assert [one.step for one in SnapshotStore(tmp_path / "slow", report=None).list()] == [10, 20, 30, 40]


def test_one_that_is_gone_is_forgotten_and_one_of_another_host_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "first", 10, drains=False)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    (tmp_path / "first").rename(tmp_path / "of the other host")
    save(tmp_path, "second", 20, drains=True)
    assert [Path(one.path).name for one in known(tmp_path)] == ["second", "first"]

    shutil.rmtree(tmp_path / "second")
    save(tmp_path, "third", 30, drains=True)
    assert [Path(one.path).name for one in known(tmp_path)] == ["third", "first"]


def test_the_two_tiers_are_two_folders_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    monkeypatch.chdir(tmp_path)
    for fast in ("runs/a", str(tmp_path / "runs" / "a"), "link/a", "runs/b/../a"):
        with pytest.raises(ConfigError, match=r"^both tiers are one folder: fast is "):
            SnapshotStore("runs/a", fast=fast)
    with SnapshotStore("runs/a", fast="runs/b", report=None) as store:
        monkeypatch.chdir("link")
        store.save(1, {"w": np.zeros(3)}).wait()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]


@for_each("said", [b"\0 no JSON", b"3", b"[3]", b'[{"path": "a"}]', b'{"path": "a", "host": "b"}', b"null"])
def test_what_cannot_be_read_is_nothing_and_is_written_anew(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / ".fast-tier").write_bytes(said)
    assert known(tmp_path) == []
    save(tmp_path, "fast", 10, drains=True)
    assert [one.path for one in known(tmp_path)] == [str(tmp_path / "fast")]
    assert isinstance(json.loads((tmp_path / "slow" / ".fast-tier").read_bytes()), list)
