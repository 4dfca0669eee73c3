"""The sums of a run that goes on are those of its whole trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from tests.patience import patient

from penstock.flow import waits
from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.trace import NO_EPOCH, SOURCE, Kind, Spans, TraceWriter, epoch_metrics, read_trace
from penstock.trace.schema import GroupIds
from penstock.trace.summary import RunningMetrics


def test_the_end_of_a_trace_comes_after_all_that_was_recorded_though_a_thread_still_writes(
    tmp_path: Path,
) -> None:
    """A worker drains the rings in a long step, onto a slow disk, and another records, while the loader is closed."""
    is_writing, gate = threading.Event(), threading.Event()

    class SlowDisk(TraceWriter):
        def append(self, spans: Spans, dropped: int = 0, ids: GroupIds = MappingProxyType({})) -> None:
            is_writing.set()
            gate.wait(patient(20))
            super().append(spans, dropped, ids)

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


STEPS, PER_EPOCH, GROUP = 600, 40, 16


def record_step(recorder: Recorder, step: int, now: float) -> None:
    """A step of three seconds, and the read of the batch after the next one: two groups each."""
    consumer, worker = recorder.ring(0), recorder.ring(2)
    for batch in range(step + 2 if step else 0, min(step + 3, STEPS)):
        place = divmod(batch, PER_EPOCH)
        for group in range(2):
            flow, first = recorder.next_flow(), GROUP * (2 * batch + group)
            end = now + 0.25 + (0.5 if batch % 100 == 99 else 0.0)
            worker.record_ids(flow, np.arange(first, first + GROUP))
            worker.record(Kind.READ, now, end, first, 100, *place, SOURCE, samples=GROUP, flow=flow)
            worker.record(Kind.DECODE, end, now + 1, first, 0, *place, samples=GROUP, flow=flow)
    place = divmod(step, PER_EPOCH)
    consumer.record(Kind.WAIT, now, now + 1, -1, 0, *place, samples=2 * GROUP)
    consumer.record(Kind.STEP, now + 1, now + 3, -1, 0, *place, samples=2 * GROUP)
    if step % 50 == 49:
        recorder.ring(9).record(Kind.DRAIN, now + 0.5, now + 4, -1, 9, NO_EPOCH, step, 1, samples=0)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7, 90])
def test_a_run_too_long_for_its_file_keeps_its_last_steps_its_slowest_spans_and_all_sums(
    tmp_path: Path, every: int
) -> None:
    """At any time, as whoever reads the file of a run that goes on, or that was killed, sees it."""
    recorder, path, most_bytes = Recorder(1024, clock=lambda: 0.0), tmp_path / "run.trace", 1 << 15
    whole: list[Spans] = []
    drain = recorder.drain

    def drain_and_keep() -> Spans:
        whole.append(drain())
        return whole[-1]

    recorder.drain = drain_and_keep  # type: ignore[method-assign]
    writer = TraceWriter(path, {"source": "photos"}, most_bytes)
    collector = Collector(
        recorder, writer, print, describe=lambda sample: f"{sample}.jpg", hosts={0: "node0"}
    )
    left_out = 0
    collector.note_choice("processes from here on")
    for step in range(STEPS):
        record_step(recorder, step, 3.0 * step)
        if step % every == every - 1:
            collector.consumed = divmod(step, PER_EPOCH)
            collector.collect()
            if step % 25 and step < STEPS - 100:
                continue
            trace, spans = read_trace(path), np.concatenate(whole)

            assert trace.left_out.spans >= left_out
            left_out = trace.left_out.spans
            for found, expected in zip(trace.epochs(), epoch_metrics(spans), strict=True):
                assert replace(found, meanwhile={}) == replace(expected, meanwhile={})
            kept = {span.tobytes() for span in trace.spans}
            assert len(kept) + left_out == spans.size
            newest = spans[spans["step"] + PER_EPOCH * spans["epoch"] > step - max(20, every)]
            assert {span.tobytes() for span in newest} <= kept
            assert path.stat().st_size < 2 * most_bytes + 100 * every * 64 + 8192
            slow = trace.slowest(2)
            by_seconds = np.sort(spans["end"] - spans["start"])
            assert (slow["end"] - slow["start"]).max() == by_seconds[-1]
            reads = slow[slow["kind"] == Kind.READ]
            assert all(trace.names[int(read["sample"])] == f"{read['sample']}.jpg" for read in reads)
            assert (trace.hosts, trace.choices) == ({0: "node0"}, {0: "processes from here on"})
            for span in trace.spans[trace.spans["flow"] > 0]:
                first = int(span["sample"])
                assert trace.ids[0, int(span["flow"])].tolist() == list(range(first, first + GROUP))
    collector.consumed = divmod(STEPS - 1, PER_EPOCH)
    collector.close()

    trace = read_trace(path)
    assert trace.is_complete
    assert trace.left_out.spans > 1000
    assert sum(each.samples for each in trace.epochs()) == STEPS * 2 * GROUP
    assert len(trace.ids) < STEPS
    assert collector._ids == {}


def test_spans_of_a_second_are_summed_up_together_and_at_once_where_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Epochs of a quarter of a second, each collected at its end."""
    added: list[int] = []
    add = RunningMetrics.add

    def add_and_note(sums: RunningMetrics, spans: Spans, epoch: int, step: int) -> Spans:
        added.append(spans.size)
        return add(sums, spans, epoch, step)

    monkeypatch.setattr(RunningMetrics, "add", add_and_note)
    recorder = Recorder(1024, clock=lambda: 0.0)
    collector = Collector(recorder, None, print)
    for epoch in range(7):
        recorder.ring(0).record(Kind.WAIT, 0.25 * epoch, 0.25 * (epoch + 1), -1, 0, epoch, 0)
        collector.consumed = (epoch, 0)
        collector.collect()

    assert added == [5]
    assert collector.epoch(6) is not None
    assert [each.seconds for each in collector.epochs()] == [0.25] * 7
    assert added[:2] == [5, 2]


def test_a_sample_that_cannot_be_described_is_told_so_and_ends_nothing(tmp_path: Path) -> None:
    recorder = Recorder(16)
    collector = Collector(
        recorder, TraceWriter(tmp_path / "run.trace", {}), print, describe=["0.jpg"].__getitem__
    )
    recorder.ring(2).record(Kind.READ, 0.0, 1.0, 7, 10, 0, 0, SOURCE)
    collector.consumed = (0, 0)
    collector.collect()
    collector.close()

    assert read_trace(tmp_path / "run.trace").names == {7: "which cannot be described (IndexError)"}


def test_ids_of_groups_that_never_come_are_bounded(tmp_path: Path) -> None:
    recorder = Recorder(16)
    collector = Collector(recorder, TraceWriter(tmp_path / "run.trace", {}), print)
    for _ in range(18):
        for _ in range(1000):
            recorder.ring(2).record_ids(recorder.next_flow(), [1])
        collector.collect()

    assert len(collector._ids) == 1 << 14
    assert max(collector._ids) == (0, 18_000)
    collector.close()


def test_how_far_a_run_is_comes_before_its_waits_in_what_it_answers(
    image_folder: Callable[..., Path],
) -> None:
    """Two epochs of three batches, four samples each; the second is left after two."""
    with Loader(
        image_folder(images=12),
        batch_size=4,
        epochs=2,
        transforms=(Resize(8), ToTensor()),
        memory="16 MiB",
        report=None,
    ) as loader:
        loader.start()
        header, *_ = waits.all_waits().splitlines()
        assert header.startswith("penstock: process")
        assert " left at this rate" not in waits.all_waits()
        for _batch in loader:
            pass
        first = loader.metrics[0]
        second = iter(loader)
        next(second)
        begun = waits.all_waits().splitlines()[1]  # no step of this epoch has ended yet
        next(second)
        line = waits.all_waits().splitlines()[1]  # with what nobody has collected yet
        epoch = loader.metrics[1]

    rate = first.samples / (first.stall_seconds + first.own_seconds)
    assert begun.startswith(f"epoch 1 of 2, step 1 of 3: {rate:,.1f} samples/s, waited ")
    # Of two steps that were waited for, the second has not ended.
    rate = 4 / (epoch.stall_seconds / 2 + epoch.own_seconds)
    assert line.startswith(f"epoch 1 of 2, step 2 of 3: {rate:,.1f} samples/s, waited ")
    assert "; samples from memory 100 %; " in line
    assert line.endswith(" left at this rate")
