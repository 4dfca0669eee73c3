"""The trace of a store that saves and drains lies over its prediction.

The store is real, and so is what it writes; the clock is not: it is moved on by what is written, read back, copied and
committed, at the rates that the prediction is given. What real disks take is `benchmarks/snapshots/predicted.py`'s.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.checkpoint.slow_tier import state_of

from penstock.checkpoint import opened as opened_module
from penstock.checkpoint import store as store_module
from penstock.checkpoint import writer as writer_module
from penstock.checkpoint.saving import Saved
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.local import LocalDraft, LocalReader, LocalTier, LocalWriter
from penstock.flow.recorder import Recorder
from penstock.machine import Machine, SharedStore, StorageClass
from penstock.machine.curve import Curve
from penstock.policy.retention import Keep
from penstock.simulate.saving import FastTier, SavePlan, predict_saves
from penstock.trace.file import TraceWriter, read_trace
from penstock.trace.schema import NO_EPOCH, Kind

STATE_BYTES = 1 << 20
COPY, FAST, SLOW = 50e6, 4e6, 1e6
#: Reading is so much quicker: what is drained is read while it is written, and here one after the other.
READS_QUICKER = 50
COMMIT_SECONDS = {"fast": 0.02, "slow": 0.05}
STEPS = range(30, 151, 30)
KEEP, SNAP_DIS = Keep(last=2), 3


class Clock:
    """Stands still unless it is moved on. It knows one thing at a time: nothing is written while a state is copied."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self.is_copied = threading.Event()

    def __call__(self) -> float:
        return self.seconds

    def go_on(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


def timed_tier(clock: Clock) -> type[LocalTier]:
    """Return the class of folders on which what is done moves the clock on: of "fast", and of all others."""

    class Writer(LocalWriter):
        rate = SLOW

        def write(self, *pieces: Bytes) -> None:
            super().write(*pieces)
            assert clock.is_copied.wait(60)
            clock.go_on(sum(piece.nbytes for piece in pieces) / self.rate)

    class Reader(LocalReader):
        rate = SLOW * READS_QUICKER

        def read_into(self, offset: int, out: Bytes) -> None:
            super().read_into(offset, out)
            clock.go_on(out.nbytes / self.rate)

    class Tier(LocalTier):
        def _rate(self) -> float:
            return FAST if self.path.name == "fast" else SLOW

        def open(self, folder: str, file: str) -> LocalReader:
            reader = Reader(self.path / folder / file)
            reader.rate = self._rate() * READS_QUICKER
            return reader

        def begin(self, folder: str, uid: str, *, join: bool = False) -> LocalDraft:
            draft = super().begin(folder, uid, join=join)
            create, commit = draft.create, draft.commit

            def timed_create(file: str) -> LocalWriter:
                create(file).abandon()
                (draft.unfinished / file).unlink()
                writer = Writer(draft.unfinished / file)
                writer.rate = self._rate()
                return writer

            def timed_commit(manifest: bytes) -> None:
                commit(manifest)
                clock.go_on(COMMIT_SECONDS.get(self.path.name, COMMIT_SECONDS["slow"]))

            draft.create, draft.commit = timed_create, timed_commit  # type: ignore[method-assign]
            return draft

    return Tier


def trained(top: Path, clock: Clock, **settings: Any) -> tuple[list[Saved], Any]:
    """Train and save; return what the store reports of each save, and the spans of the trace."""
    recorder = Recorder(1 << 10, clock=clock)
    ring = recorder.ring(0)
    saved = []
    with SnapshotStore(
        top / "slow", keep=KEEP, snap_dis=SNAP_DIS, threads=1, trace=recorder, report=None, **settings
    ) as store:
        for step in range(1, STEPS[-1] + 1):
            begin = clock()
            clock.go_on(0.1)
            ring.record(Kind.STEP, begin, clock(), epoch=NO_EPOCH, step=step)
            if step in STEPS:
                clock.is_copied.clear()
                saving = store.save(step, state_of(step, STATE_BYTES))
                clock.is_copied.set()
                saved.append(saving.wait())
                if "fast" in settings:
                    store.drain()
    with TraceWriter(top / "run.trace", {}) as writer:
        writer.append(recorder.drain(), recorder.dropped)
    return saved, read_trace(top / "run.trace").spans


def test_recorded_runs_with_saves_lie_within_a_tenth_of_their_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tier = timed_tier(clock)
    monkeypatch.setattr(opened_module, "LocalTier", tier)
    monkeypatch.setattr(opened_module, "open_tier", lambda folder, options=None: tier(folder))
    for module in (store_module, writer_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time=time.time))
    copy = StagingArea.copy

    def timed_copy(area: StagingArea, cuts: Any, workers: Any = None) -> Any:
        pieces = copy(area, cuts, workers)
        clock.go_on(sum(piece.data.nbytes for piece in pieces) / COPY)
        return pieces

    monkeypatch.setattr(StagingArea, "copy", timed_copy)

    first, _ = trained(tmp_path / "before", clock)  # what a prediction knows: how much is stored of a state
    shares = [one.stored_bytes / one.raw_bytes for one in first]
    plan = SavePlan(
        STEPS,
        STEPS[-1],
        0.1,
        first[0].raw_bytes,
        KEEP,
        snap_dis=SNAP_DIS,
        baseline_share=statistics.mean(shares[::SNAP_DIS]),
        delta_share=statistics.mean(share for number, share in enumerate(shares) if number % SNAP_DIS),
        commit_seconds=COMMIT_SECONDS["slow"],
    )
    staging = StorageClass("staging", 10**9, 1, Curve.flat(COPY))
    near = StorageClass(
        "near", 10**9, 1, Curve.flat(FAST * READS_QUICKER), Curve.flat(FAST), 0.0, "filesystem", "/near"
    )
    store = SharedStore(Curve.flat(SLOW * READS_QUICKER), write=Curve.flat(SLOW))
    for fast in (None, FastTier("near", commit_seconds=COMMIT_SECONDS["fast"])):
        settings: dict[str, Any] = {} if fast is None else {"fast": tmp_path / "two" / "fast"}
        saved, spans = trained(tmp_path / ("one" if fast is None else "two"), clock, **settings)
        predicted = predict_saves(Machine(store, (staging, near)), plan, fast)

        recorded = [[*recorded_of(spans, one.step), one.durable_seconds] for one in saved]
        expected = [
            [one.blocked_seconds, one.drained_seconds or 0.0, one.durable_seconds] for one in predicted.saves
        ]
        assert (expected[0][1] > 0) == (fast is not None)
        for one, other in zip(recorded, expected, strict=True):
            assert one == pytest.approx(other, rel=0.1)


def recorded_of(spans: Any, step: int) -> tuple[float, float]:
    """Return how long a save blocked, and how long after its beginning it was drained and committed; 0: it was not."""
    own = spans[spans["step"] == step]
    saves, drains = own[own["kind"] == Kind.SAVE], own[own["kind"] == Kind.DRAIN]
    drained = drains["end"].max() - saves["start"].min() + COMMIT_SECONDS["slow"] if drains.size else 0.0
    return float(saves["end"].max() - saves["start"].min()), float(drained)
