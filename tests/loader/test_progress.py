"""The sums of a run that goes on are those of its whole trace."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import patient
from tests.spans import spans_of

from penstock.flow.recorder import Recorder
from penstock.loader.progress import Collector, RunningMetrics
from penstock.trace import (
    NO_EPOCH,
    NO_PLACE,
    Kind,
    Meanwhile,
    Spans,
    TraceWriter,
    epoch_metrics,
    read_trace,
)


def a_run_with_saves(waits: list[int], saves: list[tuple[Kind, int, int]]) -> Spans:
    """Steps of two seconds, each waited for; what is beside them, in pieces within a second; sorted by end."""
    rows: list[tuple[float, float, int, int, int, int, int, int, int, int]] = []
    now = 0.0
    for number, wait in enumerate(waits):
        epoch, step = divmod(number, 4)
        rows.append((now, now + wait, -1, 0, epoch, step, Kind.WAIT, NO_PLACE, 0, 0))
        rows.append((now + wait, now + wait + 2, -1, 0, epoch, step, Kind.STEP, NO_PLACE, 0, 0))
        now += wait + 2
    for kind, begin, length in saves:
        rows += [
            (begin + piece + 0.125, begin + piece + 0.625, -1, 5, NO_EPOCH, 1000, kind, 0, 9, 0)
            for piece in range(length)
        ]
    spans: Spans = spans_of(rows)
    return spans[np.argsort(spans["end"], kind="stable")]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(
        st.tuples(
            st.sampled_from([Kind.SAVE, Kind.WRITE, Kind.DRAIN]), st.integers(0, 30), st.integers(1, 9)
        ),
        max_size=4,
    ),
)
def test_snapshots_beside_a_run_are_summed_up_as_it_goes_as_from_its_whole_trace(
    waits: list[int], saves: list[tuple[Kind, int, int]]
) -> None:
    """Collected every second, by whichever thread: in the middle of waits and steps as well."""
    spans = a_run_with_saves(waits, saves)
    running = RunningMetrics()
    steps = spans[spans["kind"] == Kind.STEP]
    epoch, step = 0, -1
    for second in range(int(spans["end"].max()) + 1):
        now = second + 0.75
        for ended in steps[(steps["end"] > now - 1) & (steps["end"] <= now)]:
            epoch, step = int(ended["epoch"]), int(ended["step"])
        running.add(spans[(spans["end"] > now - 1) & (spans["end"] <= now)], epoch, step)
    found, whole = running.epochs(), epoch_metrics(spans)

    assert [each.epoch for each in found] == [each.epoch for each in whole]
    for each, expected in zip(found, whole, strict=True):
        assert each.stall_seconds == expected.stall_seconds
        assert each.save_seconds == expected.save_seconds
        for kind in (Kind.WRITE, Kind.DRAIN):
            nothing = Meanwhile(0.0, 0.0)
            assert each.meanwhile.get(kind, nothing) == expected.meanwhile.get(kind, nothing)


def test_what_ran_beside_is_kept_only_as_long_as_it_may_matter() -> None:
    running = RunningMetrics()
    for step in range(1000):
        running.add(
            spans_of(
                [
                    (3.0 * step, 3.0 * step + 1, -1, 0, 0, step, Kind.WAIT, NO_PLACE, 0, 0),
                    (3.0 * step + 1, 3.0 * step + 3, -1, 0, 0, step, Kind.STEP, NO_PLACE, 0, 0),
                    (3.0 * step, 3.0 * step + 1, -1, 5, NO_EPOCH, 0, Kind.DRAIN, 0, 9, 0),
                ]
            ),
            0,
            step,
        )

    assert running.epochs()[0].meanwhile == {Kind.DRAIN: Meanwhile(1000.0, 0.0)}
    assert running._beside.size == 0


def test_the_end_of_a_trace_comes_after_all_that_was_recorded_though_a_thread_still_writes(
    tmp_path: Path,
) -> None:
    """A worker drains the rings in a long step, onto a slow disk, and another records, while the loader is closed."""
    is_writing, gate = threading.Event(), threading.Event()

    class SlowDisk(TraceWriter):
        def append(self, spans: Spans, dropped: int = 0) -> None:
            is_writing.set()
            gate.wait(patient(20))
            super().append(spans, dropped)

    recorder = Recorder(16)
    collector = Collector(recorder, SlowDisk(tmp_path / "run.trace", {}), print)
    ring = recorder.ring(1)
    ring.record(Kind.READ, 0.0, 1.0, sample=1)
    worker = threading.Thread(target=collector.collect)
    worker.start()
    is_writing.wait(patient(20))
    ring.record(Kind.READ, 0.0, 2.0, sample=2)
    closer = threading.Thread(target=collector.close)
    closer.start()
    closer.join(0.1)  # as long as a close that does not wait for the worker may take
    gate.set()
    worker.join()
    closer.join()
    collector.close()

    trace = read_trace(tmp_path / "run.trace")
    assert trace.is_complete
    assert trace.spans["sample"].tolist() == [1, 2]
