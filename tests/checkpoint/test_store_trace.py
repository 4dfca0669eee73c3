"""A loader and a store write one trace, which then tells which waits fell into a save, a drain or none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint import opened as opened_module
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier, LocalWriter
from penstock.errors import DataError
from penstock.flow.recorder import Recorder
from penstock.loader import Loader
from penstock.trace import Kind, read_trace
from penstock.trace.schema import NO_PLACE
from penstock.trace.verdict import limiting

BEGIN_SECONDS = 0.1


def state(step: int = 0) -> dict[str, Any]:
    return {"weights": np.arange(10_000, dtype=np.float32) + step}


def rows(spans: Any, kind: Kind) -> list[tuple[int, int, int]]:
    """Return step, tier and bytes of the spans of a kind, pieces of one snapshot joined."""
    found: dict[tuple[int, int], int] = {}
    for span in spans[spans["kind"] == kind]:
        key = int(span["step"]), int(span["place"])
        found[key] = found.get(key, 0) + int(span["bytes"])
    return [(step, tier, nbytes) for (step, tier), nbytes in found.items()]


def test_each_save_write_drain_and_restore_is_a_span_with_its_bytes_step_and_tier(
    folder: Path, tmp_path: Path
) -> None:
    recorder = Recorder(64)
    with SnapshotStore(
        folder, fast=tmp_path / "fast", threads=1, trace=recorder, keep=Keep(last=None), report=None
    ) as store:
        for step in (1, 2):
            store.save(step, state(step)).wait()
            store.drain()
        store.restore(step=1)
        stored = [
            [(tier / f"step-{step:012d}" / "part-00000.pst").stat().st_size for step in (1, 2)]
            for tier in (tmp_path / "fast", folder)
        ]
    with SnapshotStore(folder, threads=1, trace=recorder, report=None) as store:
        store.restore(step=2)

    spans = recorder.drain()
    assert rows(spans, Kind.SAVE) == [(1, NO_PLACE, 40_000), (2, NO_PLACE, 40_000)]
    written = {}
    for kind, tier in ((Kind.WRITE, 0), (Kind.DRAIN, 1)):
        written[kind] = rows(spans, kind)
        assert [(step, where) for step, where, _ in written[kind]] == [(1, tier), (2, tier)]
        for (_, _, nbytes), nbytes_of_file in zip(written[kind], stored[tier], strict=True):
            assert 0.8 * nbytes_of_file < nbytes < nbytes_of_file, "the table of blocks comes on top"
    loads = rows(spans, Kind.LOAD)
    assert [(step, tier) for step, tier, _ in loads] == [(1, 0), (2, 0)]
    assert loads[1][2] >= sum(nbytes for _, _, nbytes in written[Kind.DRAIN]), (
        "a difference is read with its baseline"
    )
    assert (spans["start"] <= spans["end"]).all()


def test_a_store_records_into_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "saves.trace"
    with SnapshotStore(folder, trace=path, report=None) as store:
        assert not path.exists(), "it is made with the first span"
        store.save(1, state())

    trace = read_trace(path)
    assert trace.is_complete
    assert rows(trace.spans, Kind.SAVE) == [(1, NO_PLACE, 40_000)]
    assert [(step, tier) for step, tier, _ in rows(trace.spans, Kind.WRITE)] == [(1, 0)]


def test_a_trace_that_cannot_be_written_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trace is .*missing/saves\.trace.*, which cannot be written"):
        SnapshotStore(folder, trace=tmp_path / "missing" / "saves.trace")


def test_a_save_that_is_refused_is_in_the_trace_without_bytes(folder: Path) -> None:
    recorder = Recorder(64)
    store = SnapshotStore(folder, trace=recorder, report=None)
    with store, pytest.raises(ValueError, match="does not hold"):
        store.save(1, {"odd": object()})

    spans = recorder.drain()
    assert spans["kind"].tolist() == [Kind.SAVE]
    assert spans["bytes"].tolist() == [0]


class SlowTier(LocalTier):
    """A folder to which a drain writes only once it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_draining, self.may_end = threading.Event(), threading.Event()

    def begin(self, folder: str, uid: str, *, join: bool = False) -> LocalDraft:
        draft = super().begin(folder, uid, join=join)
        create = draft.create

        def create_later(file: str) -> LocalWriter:
            self.is_draining.set()
            assert self.may_end.wait(60)
            return create(file)

        draft.create = create_later  # type: ignore[method-assign]
        return draft


class Numbers:
    """A data set on the disk that a drain writes to: its last sample comes while one is under way."""

    def __init__(self, tier: SlowTier) -> None:
        self.tier = tier
        self.read = 0
        self.counting = threading.Lock()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        with self.counting:
            self.read += 1
            is_last = self.read == len(self)
        if is_last:
            assert self.tier.is_draining.wait(60)
            # Both hold each other up for so long; events alone take no time that a trace could show.
            threading.Event().wait(BEGIN_SECONDS)
            self.tier.may_end.set()
        return np.full(100, sample)


def test_a_stall_in_a_drain_is_told_as_such(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTier(folder)
    monkeypatch.setattr(opened_module, "open_tier", lambda folder, options=None: slow)
    path = tmp_path / "run.trace"
    loader = Loader(Numbers(slow), batch_size=4, epochs=1, memory="1 MB", trace=path, report=lambda _: None)
    with (
        loader,
        SnapshotStore(folder, fast=tmp_path / "fast", threads=1, trace=loader.recorder, report=None) as store,
    ):
        for step, _ in enumerate(loader):
            if step == 3:
                store.save(step, state()).wait()
        store.drain()

    trace = read_trace(path)
    assert trace.is_complete
    (epoch,) = trace.epochs()
    assert epoch.save_seconds > 0
    assert epoch.meanwhile[Kind.DRAIN].stall_seconds > 0.9 * BEGIN_SECONDS
    assert "of the waiting while a snapshot was drained" in limiting(epoch) or (
        "a snapshot was drained nearly all the time" in limiting(epoch)
    )
    assert rows(trace.spans, Kind.SAVE) == [(3, NO_PLACE, 40_000)]
