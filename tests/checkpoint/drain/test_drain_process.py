"""Drains by a process of their own: the same bytes, and nothing that is left of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import child
from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint.drain import drain_process as drain_process_module
from penstock.checkpoint.drain import draining as draining_module
from penstock.checkpoint.drain.drain_process import DrainProcess
from penstock.checkpoint.recipe import SnapshotDecision
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import DataError, FormatError


@pytest.fixture(autouse=True)
def all_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a snapshot is."""
    monkeypatch.setattr(draining_module, "_LEAST_APART_BYTES", 0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DrainProcess]]:
    """The processes that were begun, which have all ended when the test has."""
    processes: list[DrainProcess] = []
    begin = DrainProcess.__init__

    def remember(self: DrainProcess, interrupt: threading.Event) -> None:
        begin(self, interrupt)
        processes.append(self)

    monkeypatch.setattr(DrainProcess, "__init__", remember)
    yield processes
    for process in processes:
        assert process._process.returncode is not None, "it was waited for"


def states(steps: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(100_000).astype(np.float32)
    made = []
    for step in range(steps):
        weights = weights + np.float32(1e-4) * rng.standard_normal(weights.size).astype(np.float32)
        made.append({"weights": weights, "step": step, "ids": np.arange(step)})
    return made


def lines_of_two_drains(top: Path) -> list[str]:
    lines: list[str] = []
    with SnapshotStore(top / "slow", fast=top / "fast", report=lines.append) as store:
        for step, state in enumerate(states(2)):
            store.save(step, state).wait()
            store.drain()
    return lines


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.pst") if path.is_file()
    }


def test_a_process_drains_the_same_blocks_as_threads_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: list[DrainProcess]
) -> None:
    lines: list[str] = []
    for name in ("apart", "here"):
        if name == "here":
            monkeypatch.setattr(draining_module, "_LEAST_APART_BYTES", 1 << 60)
        with SnapshotStore(
            tmp_path / name,
            fast=tmp_path / f"{name}-fast",
            drain_bytes_per_second="1 GB/s",
            kept_mantissa_bits=20,
            report=lines.append,
        ) as store:
            for step, state in enumerate(states(3)):
                store.save(step, state).wait()
                store.drain()
    apart, here = (files_below(tmp_path / name) for name in ("apart", "here"))

    assert len(begun) >= 1
    assert apart.keys() == here.keys()
    for name in apart:
        # All but the uid, in the first 32 bytes.
        assert apart[name][32:] == here[name][32:], name
    assert sum("drained" in line for line in lines) == 6
    with SnapshotStore(tmp_path / "apart", report=None) as store:
        kinds = [each.reference_step for each in store.list()]
        restored = store.restore()["weights"]
    assert kinds == [None, 0, 1], "the process read what it was a difference to"
    np.testing.assert_allclose(restored, states(3)[2]["weights"], rtol=2**-20)


def test_damage_on_the_fast_tier_that_the_process_finds_is_told_and_remembered(
    tmp_path: Path, begun: list[DrainProcess]
) -> None:
    folder, fast = tmp_path / "slow", tmp_path / "fast"
    saved, (state, later) = SnapshotStore(fast, codec="stored", report=None), states(2)
    with saved:
        saved.save(0, state).wait()
    (part,) = fast.rglob("*.pst")
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)
    lines: list[str] = []

    with (
        pytest.raises(FormatError, match=r"block 0 .* in tensor 'weights'"),
        SnapshotStore(folder, fast=fast, report=lines.append) as store,
    ):
        store.drain()
    assert any("step 0: NOT drained" in line for line in lines)
    with SnapshotStore(folder, fast=fast, report=lines.append) as store:
        store.save(1, later).wait()
        with pytest.raises(FormatError, match="weights"):
            store.drain()
        store.drain()
        assert [each.tiers for each in store.list()] == [(str(fast),), (str(fast), str(folder))]
    assert len(begun) >= 2


def test_what_would_be_a_difference_to_a_damaged_snapshot_is_drained_whole(
    tmp_path: Path, begun: list[DrainProcess]
) -> None:
    folder, (state, later), lines = tmp_path / "slow", states(2), list[str]()
    with SnapshotStore(folder, fast=tmp_path / "fast", keep=Keep(last=5), report=lines.append) as store:
        store.save(0, state).wait()
        store.drain()
        (part,) = folder.rglob("*.pst")
        data = bytearray(part.read_bytes())
        data[1000] ^= 1
        part.write_bytes(data)
        for near in (tmp_path / "fast").glob("step-*"):
            shutil.rmtree(near)
        store.save(1, later).wait()
        store.drain()
        assert "step 0, to which it was to be a difference, is damaged" in lines[-1]
        np.testing.assert_array_equal(store.restore(1)["weights"], later["weights"])


def test_a_process_that_is_killed_leaves_the_drain_to_threads_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: list[DrainProcess]
) -> None:
    ask = DrainProcess.ask

    def killed(self: DrainProcess, request: Any, **options: Any) -> Any:
        self._process.kill()
        self._process.wait()
        return ask(self, request, **options)

    monkeypatch.setattr(DrainProcess, "ask", killed)
    lines = lines_of_two_drains(tmp_path)
    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", report=None) as store:
        assert len(store.list()[1].tiers) == 2
        np.testing.assert_array_equal(store.restore()["weights"], states(2)[1]["weights"])
    assert len(begun) == 1
    (told,) = [line for line in lines if "threads of this process" in line]
    assert "with code -9; a system that runs out of memory kills processes" in told
    assert not any("NOT drained" in line for line in lines)


def test_what_failed_to_drain_and_was_raised_is_tried_again_by_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: list[DrainProcess]
) -> None:
    (tmp_path / "slow").mkdir()
    begin, full = LocalTier.begin, [True]

    def begin_or_not(self: LocalTier, *those: Any, **options: Any) -> Any:
        if full[0] and self.path.name == "slow":
            raise DataError("no space left on the slow tier")
        return begin(self, *those, **options)

    monkeypatch.setattr(LocalTier, "begin", begin_or_not)
    first, second = states(2)
    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", report=None) as store:
        store.save(0, first).wait()
        with pytest.raises(DataError, match="no space left"):
            store.drain()
        store.save(1, second).wait()
        drainer: Any = store._drainer
        while drainer._thread is not None:
            time.sleep(0.01)
        with pytest.raises(DataError, match="no space left") as caught:
            store.save(2, second)
        assert "step 2 is not saved: save it again" in caught.value.__notes__[-1]
        full[0] = False
    assert len(list((tmp_path / "slow").glob("step-*"))) == 2


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_where_no_process_begins_threads_drain_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    monkeypatch.setattr(child, "_PROGRAM", program)
    lines = lines_of_two_drains(tmp_path)

    told = [line for line in lines if "drained by threads of this process" in line]
    assert len(told) == 1
    assert "has ended, with code" in told[0]
    assert sum("drained after" in line for line in lines) == 2


def test_what_starts_with_every_interpreter_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: list[DrainProcess]
) -> None:
    site = tmp_path / "site\udcff"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys; print('a line', flush=True); print('half of one', end='', flush=True)\n"
        "sys.stdout = sys.stdin = None"
    )
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    lines, (state,) = list[str](), states(1)
    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", report=lines.append) as store:
        store.save(0, state).wait()
        store.drain()

    assert len(begun) == 1
    assert not any("threads" in line for line in lines)


@pytest.mark.parametrize("closed", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
def test_a_training_without_standard_files_is_drained_for_by_a_process(tmp_path: Path, closed: str) -> None:
    """As a daemon that closed them; whatever is opened next gets their numbers."""
    script = f"""
import numpy as np
from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.drain import draining
draining._LEAST_APART_BYTES = 0
lines = []
with SnapshotStore({str(tmp_path / "slow")!r}, fast={str(tmp_path / "fast")!r}, report=lines.append) as store:
    store.save(0, {{"weights": np.arange(100_000)}}).wait()
open({str(tmp_path / "lines")!r}, "w").write("\\n".join(lines))
"""
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", script], check=True)

    told = (tmp_path / "lines").read_text()
    assert "threads" not in told
    assert "drained after" in told


def test_what_a_process_committed_and_died_over_does_not_pass_for_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: list[DrainProcess]
) -> None:
    with SnapshotStore(tmp_path / "fast", codec="stored", report=None) as saved:
        for step, state in enumerate(states(2)):
            saved.save(step, state).wait()
    ask, lines = DrainProcess.ask, list[str]()

    def kill_first(self: DrainProcess, request: Any, **options: Any) -> Any:
        if request["do"] == "check" and len(begun) == 1:
            self._process.kill()
            self._process.wait()
        return ask(self, request, **options)

    monkeypatch.setattr(DrainProcess, "ask", kill_first)
    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", report=lines.append) as store:
        store.drain()
    assert len(begun) == 2, "another drains what comes next"
    assert sum("drained after" in line for line in lines) == 2
    with SnapshotStore(tmp_path / "slow", report=None) as store:
        for step, state in enumerate(states(2)):
            np.testing.assert_array_equal(store.restore(step)["weights"], state["weights"])


def test_what_is_found_damaged_when_it_is_opened_is_what_is_drained_and_not_its_reference(
    tmp_path: Path,
) -> None:
    (state,) = states(1)
    with SnapshotStore(tmp_path / "fast", report=None) as store:
        uid = store.save(0, state).wait().uid
    (part,) = (tmp_path / "fast").rglob("*.pst")
    part.write_bytes(part.read_bytes()[:-1])
    decision = SnapshotDecision(0, uid, 0.0, 0.0, (), None)
    request = {"do": "write", "decision": decision, "links": [[0, 0, uid]], "threads": 1}
    folders = {"fast": str(tmp_path / "fast"), "slow": str(tmp_path / "slow")}

    answer: Any = drain_process_module._answered({**request, **folders})
    assert answer["failed"] == "FormatError"
    assert answer["is_damaged"]


def test_closing_breaks_off_what_the_process_writes(tmp_path: Path, begun: list[DrainProcess]) -> None:
    """At this cap it takes a quarter of an hour."""
    (state,) = states(1)
    store = SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", drain_bytes_per_second=400, report=None)
    store.save(0, state).wait()
    drainer: Any = store._drainer
    while not begun or not (drainer._thread and any((tmp_path / "slow").glob(".unfinished-*/part-*"))):
        time.sleep(0.01)

    begin = time.monotonic()
    drainer.stop()
    assert time.monotonic() - begin < 60
    assert not any((tmp_path / "slow").glob(".unfinished-*")), "and its draft is gone"
    with pytest.raises(DataError, match="broken off: the store is closed"):
        store.close()
    with SnapshotStore(tmp_path / "slow", fast=tmp_path / "fast", report=None) as again:
        again.drain()
        assert again.list()[0].tiers == (str(tmp_path / "fast"), str(tmp_path / "slow"))
