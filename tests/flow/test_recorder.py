"""The recorder loses nothing that fits, counts what does not, and never hands out a half-written span."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.flow import recorder as recorder_module
from penstock.flow.recorder import Recorder
from penstock.trace.schema import NO_PLACE, SOURCE, SPAN, Kind, Spans, join_spans


def a_clock_standing_at(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def test_a_recorded_span_comes_back_field_by_field_in_seconds_since_the_origin() -> None:
    recorder = Recorder(4, rank=7, clock=a_clock_standing_at(100.0))

    recorder.ring(3).record(
        Kind.READ, 101.5, 103.25, 42, 118_304, 2, 9, SOURCE, samples=64, peer=5, flow=2**63
    )

    (span,) = recorder.drain()
    assert dict(zip(SPAN.names or (), span.tolist(), strict=True)) == {
        "start": 1.5,
        "end": 3.25,
        "sample": 42,
        "bytes": 118_304,
        "flow": 2**63,
        "epoch": 2,
        "step": 9,
        "samples": 64,
        "peer": 5,
        "kind": Kind.READ,
        "place": SOURCE,
        "worker": 3,
        "rank": 7,
    }


def test_what_a_span_does_not_name_is_marked_as_not_applying() -> None:
    recorder = Recorder(4, clock=a_clock_standing_at(0.0))

    recorder.ring(0).record(Kind.WAIT, 0.0, 1.0, epoch=1, step=2)

    assert (
        recorder.drain().tolist()
        == spans_of([(0.0, 1.0, -1, 0, 1, 2, Kind.WAIT, NO_PLACE, 0, 0, 1)]).tolist()
    )


def test_spans_of_all_threads_come_sorted_by_their_end() -> None:
    recorder = Recorder(8, clock=a_clock_standing_at(0.0))
    for worker, ends in enumerate([[1.0, 4.0], [2.0, 3.0], [0.5, 5.0]]):
        for end in ends:
            recorder.ring(worker).record(Kind.STEP, 0.0, end)

    assert recorder.drain()["end"].tolist() == [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_worker_that_asks_twice_goes_on_in_the_same_ring() -> None:
    recorder = Recorder(8)

    assert recorder.ring(5) is recorder.ring(5)
    assert recorder.ring(5) is not recorder.ring(6)


def test_a_recorder_nobody_wrote_to_drains_no_spans_of_the_right_type() -> None:
    spans = Recorder(8).drain()

    assert spans.dtype == SPAN
    assert spans.size == 0


class TheLastFew:
    """What a ring must do, said with lists: of the undrained spans, the last `capacity` are handed out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.undrained: list[int] = []
        self.dropped = 0

    def record(self, samples: list[int]) -> None:
        self.undrained += samples

    def drain(self) -> list[int]:
        kept = self.undrained[-self.capacity :]
        self.dropped += len(self.undrained) - len(kept)
        self.undrained = []
        return kept


@given(
    capacity=st.integers(1, 7), actions=st.lists(st.one_of(st.just("drain"), st.integers(1, 20)), max_size=30)
)
def test_a_ring_hands_out_the_newest_and_counts_the_overwritten(
    capacity: int, actions: list[str | int]
) -> None:
    recorder = Recorder(capacity, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0)
    model = TheLastFew(capacity)
    sample = 0

    for action in [*actions, "drain"]:
        if action == "drain":
            assert recorder.drain()["sample"].tolist() == model.drain()
            assert recorder.dropped == model.dropped
        else:
            assert isinstance(action, int)
            for _ in range(action):
                ring.record(Kind.READ, 0.0, 0.0, sample)
                model.record([sample])
                sample += 1


def test_overwritten_spans_are_counted_before_the_next_drain_too() -> None:
    recorder = Recorder(2)
    for _ in range(5):
        recorder.ring(0).record(Kind.STEP, 0.0, 1.0)

    assert recorder.dropped == 3


def test_a_span_overwritten_while_the_drain_copies_is_given_up_and_not_handed_out_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer laps the drainer: held open by writing once the drainer has chosen what to copy."""
    recorder = Recorder(4, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0)
    for sample in range(4):
        ring.record(Kind.READ, 0.0, float(sample), sample)

    def write_two_more_then_join(parts: Iterable[Spans]) -> Spans:
        if not isinstance(parts, list):  # of all rings, before this one's is copied
            return join_spans(parts)
        monkeypatch.undo()
        ring.record(Kind.READ, 0.0, 4.0, 4)
        ring.record(Kind.READ, 0.0, 5.0, 5)
        return join_spans(parts)

    monkeypatch.setattr(recorder_module, "join_spans", write_two_more_then_join)
    first = recorder.drain()
    second = recorder.drain()

    assert first["sample"].tolist() == [2, 3]
    assert second["sample"].tolist() == [4, 5]
    assert recorder.dropped == 2


def test_one_writer_and_one_drainer_at_once_lose_nothing_but_what_is_counted() -> None:
    recorder = Recorder(256, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0)
    count = 40_000
    done = threading.Event()

    def write() -> None:
        for sample in range(count):
            ring.record(Kind.READ, sample, sample, sample, 3 * sample)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    drained: list[Spans] = []
    while not done.is_set():
        drained.append(recorder.drain())
    writer.join()
    drained.append(recorder.drain())

    spans = np.concatenate(drained)
    assert spans.size + recorder.dropped == count
    assert (np.diff(spans["sample"]) > 0).all()
    assert (spans["bytes"] == 3 * spans["sample"]).all()
    assert (spans["end"] == spans["sample"]).all()


def test_a_value_too_large_for_its_field_is_refused_and_leaves_the_ring_usable() -> None:
    recorder = Recorder(2, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0)

    with pytest.raises(struct.error):
        ring.record(Kind.READ, 0.0, 1.0, 2**63)
    ring.record(Kind.READ, 0.0, 1.0, 5)

    assert recorder.drain()["sample"].tolist() == [5]


def test_a_ring_without_space_and_numbers_outside_their_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_spans is 0"):
        Recorder(0)
    with pytest.raises(ConfigError, match="rank is -1"):
        Recorder(1, rank=-1)
    with pytest.raises(ConfigError, match="worker is 65536"):
        Recorder(1).ring(65536)


def test_the_ids_of_groups_come_once_by_their_flows() -> None:
    recorder = Recorder(8, rank=3)
    first, second = recorder.next_flow(), recorder.next_flow()
    ids = np.array([5, 3, 9])
    recorder.ring(1).record_ids(first, ids)
    ids[:] = 0  # the caller's array is the caller's
    recorder.ring(2).record_ids(second, [7])

    drained = {group: ids.tolist() for group, ids in recorder.drain_ids().items()}

    assert 0 < first < second
    assert drained == {(3, first): [5, 3, 9], (3, second): [7]}
    assert recorder.drain_ids() == {}


def test_ids_that_nobody_drains_are_bounded_and_a_drain_is_due_long_before() -> None:
    recorder = Recorder(100)
    ring = recorder.ring(0)
    due = []
    for flow in range(1, 400):
        ring.record_ids(flow, np.arange(1000))
        due.append(ring.is_half_full)

    kept = recorder.drain_ids()
    ring.record_ids(400, [1])

    assert due.index(True) == 131  # of 262, each of 1000 ids, that are kept
    assert [flow for _, flow in kept] == list(range(1, 263))
    assert not ring.is_half_full
    assert [flow for _, flow in recorder.drain_ids()] == [400]


def test_a_ring_says_when_a_drain_is_due() -> None:
    recorder = Recorder(100, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0, capacity_spans=4)

    due = []
    for _ in range(3):
        ring.record(Kind.READ, 0.0, 1.0)
        due.append(ring.is_half_full)
    recorder.drain()
    due.append(ring.is_half_full)

    assert due == [False, True, True, False]


def test_a_ring_of_another_size_holds_as_many_spans() -> None:
    recorder = Recorder(100, clock=a_clock_standing_at(0.0))
    ring = recorder.ring(0, capacity_spans=4)
    for _ in range(5):
        ring.record(Kind.READ, 0.0, 1.0)

    assert recorder.drain().size == 4
    assert recorder.dropped == 1
