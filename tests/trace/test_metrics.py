"""The sums over a trace: evident by hand on small runs, equal to a slow count of seconds on random ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests import spans

from penstock.trace import (
    NO_EPOCH,
    NO_FLOW,
    NO_PEER,
    NO_PLACE,
    SOURCE,
    SPAN,
    Cause,
    Kind,
    Meanwhile,
    Spans,
    Trace,
    epoch_metrics,
    limiting,
)
from penstock.trace.metrics import overlap_seconds


class Row(NamedTuple):
    """One span, field by field as in `tests.spans`."""

    start: float
    end: float
    sample: int = -1
    bytes: int = 0
    epoch: int = 0
    step: int = 0
    kind: int = Kind.WAIT
    place: int = NO_PLACE
    worker: int = 0
    rank: int = 0
    samples: int = 1
    peer: int = NO_PEER
    flow: int = NO_FLOW


def spans_of(*rows: Row) -> Spans:
    return spans.spans_of(rows)


def causes_of(*rows: Row) -> dict[Cause, float]:
    """The causes of the stall of a trace of one epoch, without those that are zero."""
    (metrics,) = epoch_metrics(spans_of(*rows))
    return {cause: seconds for cause, seconds in metrics.stall_by_cause.items() if seconds}


# A batch of one sample, whose life takes ten seconds: slot wanted at 1, granted at 3, read from 5 to 7,
# decoded from 8 to 9, handed over at 10.
SLOT = Row(1, 3, kind=Kind.SLOT)
READ = Row(5, 7, sample=4, bytes=100, kind=Kind.READ, place=SOURCE, worker=1)
DECODE = Row(8, 9, sample=4, kind=Kind.DECODE)


def test_a_wait_over_the_whole_life_of_a_batch_is_split_over_all_its_phases() -> None:
    assert causes_of(SLOT, READ, DECODE, Row(1, 10)) == {
        Cause.NO_FREE_SLOT: 2,
        Cause.SOURCE_READ: 4,
        Cause.DECODE: 2,
        Cause.HAND_OVER: 1,
    }


def test_a_wait_counts_only_what_happened_while_it_lasted() -> None:
    assert causes_of(SLOT, READ, DECODE, Row(6.5, 9.25)) == {
        Cause.SOURCE_READ: 0.5,
        Cause.DECODE: 2,
        Cause.HAND_OVER: 0.25,
    }


def test_a_batch_that_was_ready_before_it_was_asked_for_costs_only_the_hand_over() -> None:
    assert causes_of(SLOT, READ, DECODE, Row(20, 20.5)) == {Cause.HAND_OVER: 0.5}


def test_time_before_the_loader_even_wanted_a_slot_is_the_loaders_own() -> None:
    assert causes_of(SLOT, READ, DECODE, Row(0, 9)) == {
        Cause.HAND_OVER: 1,
        Cause.NO_FREE_SLOT: 2,
        Cause.SOURCE_READ: 4,
        Cause.DECODE: 2,
    }


def test_a_read_from_a_tier_is_told_apart_from_a_read_of_the_source() -> None:
    from_disk = READ._replace(place=2)

    assert causes_of(SLOT, from_disk, DECODE, Row(3, 9)) == {Cause.TIER_READ: 4, Cause.DECODE: 2}


def test_waiting_for_a_thread_that_reads_and_decodes_counts_as_decode() -> None:
    own_read = READ._replace(worker=DECODE.worker)

    assert causes_of(SLOT, own_read, DECODE, Row(3, 9)) == {Cause.SOURCE_READ: 2, Cause.DECODE: 4}


def test_without_a_slot_span_the_read_is_waited_for_from_the_beginning() -> None:
    assert causes_of(READ, DECODE, Row(0, 9)) == {Cause.SOURCE_READ: 7, Cause.DECODE: 2}


def test_a_sample_in_memory_that_waited_for_a_thread_counts_as_decode() -> None:
    """All is cached and decoding too slow: samples have a slot, but no thread for them."""
    taken_at_once = Row(7, 7, sample=4, kind=Kind.HIT, place=1)

    assert causes_of(SLOT, taken_at_once, DECODE, Row(3, 9)) == {Cause.DECODE: 6}


def test_a_hit_that_takes_time_counts_as_a_read_of_its_tier() -> None:
    copied_out = Row(5, 7, sample=4, kind=Kind.HIT, place=1, worker=1)

    assert causes_of(SLOT, copied_out, DECODE, Row(3, 9)) == {Cause.TIER_READ: 4, Cause.DECODE: 2}


def test_a_hit_that_the_decoding_thread_takes_itself_was_waited_for_by_its_decoding_until_it_began() -> None:
    own = Row(5, 7, sample=4, kind=Kind.HIT, place=1)

    assert causes_of(SLOT, own, DECODE, Row(3, 9)) == {Cause.TIER_READ: 2, Cause.DECODE: 4}


def test_a_hit_on_a_sample_that_a_background_fill_was_still_reading_waited_for_the_source() -> None:
    background = READ._replace(step=-1)
    hit = Row(7.5, 7.5, sample=4, kind=Kind.HIT, place=1)

    assert causes_of(SLOT, background, hit, DECODE, Row(3, 9)) == {Cause.SOURCE_READ: 4, Cause.DECODE: 2}


def test_a_read_of_an_earlier_epoch_is_no_reason_to_wait_in_this_one() -> None:
    earlier = Row(0, 1, sample=4, kind=Kind.READ, place=SOURCE, epoch=-3)
    later = Row(100, 101, sample=4, kind=Kind.READ, place=SOURCE, epoch=-3)
    metrics = epoch_metrics(spans_of(earlier, later, SLOT, DECODE, Row(3, 9)))[-1]

    assert metrics.stall_by_cause[Cause.DECODE] == 6


def test_what_happened_after_the_decoding_is_no_part_of_the_life() -> None:
    """The sample is read once more for a later batch, and the batch asked for again after a `break`."""
    again = [SLOT._replace(start=9.2, end=9.4), READ._replace(start=9.4, end=9.8, place=2, step=7)]

    assert causes_of(SLOT, READ, DECODE, *again, Row(3, 10)) == causes_of(SLOT, READ, DECODE, Row(3, 10))


def test_the_sample_that_was_decoded_last_decides() -> None:
    quick = [Row(3, 4, 1, 10, kind=Kind.READ, place=SOURCE), Row(4, 5, 1, kind=Kind.DECODE)]

    assert causes_of(*quick, SLOT, READ, DECODE, Row(3, 9)) == {Cause.SOURCE_READ: 4, Cause.DECODE: 2}
    assert causes_of(SLOT, READ, DECODE, *quick, Row(3, 9)) == {Cause.SOURCE_READ: 4, Cause.DECODE: 2}


def test_a_wait_of_a_loader_that_records_nothing_else_is_unseen() -> None:
    assert causes_of(Row(0, 3), Row(3, 5, kind=Kind.STEP)) == {Cause.UNSEEN: 3}


def test_a_wait_that_got_no_batch_has_no_other_cause() -> None:
    """Not even where work of the background, which is for no batch either, ended in it."""
    background = [row._replace(step=-1) for row in (SLOT, READ, DECODE)]

    assert causes_of(*background, Row(1, 10, step=-1)) == {Cause.NO_BATCH: 9}


def test_spans_of_another_rank_explain_nothing() -> None:
    assert causes_of(SLOT, READ, DECODE, Row(1, 10, rank=1)) == {Cause.UNSEEN: 9}


def test_an_epoch_is_summed_up() -> None:
    spans = spans_of(
        Row(0, 2, step=0),
        Row(2, 5, step=0, kind=Kind.STEP),
        Row(5, 5.5, step=1),
        Row(5.5, 7, step=1, kind=Kind.STEP),
        Row(7, 8, step=-1),
        Row(0, 1, 7, 100, kind=Kind.READ, place=SOURCE),
        Row(0, 1, 8, 50, step=-1, kind=Kind.READ, place=SOURCE),
        Row(2, 3, 9, 25, step=1, kind=Kind.READ, place=2),
        Row(3, 3, 8, 50, step=1, kind=Kind.HIT, place=1),
        Row(1, 2, 7, kind=Kind.DECODE),
        Row(3, 4, 8, step=1, kind=Kind.DECODE),
        Row(4, 4.5, 9, step=1, kind=Kind.DECODE),
        Row(10, 11, 5, 60, epoch=1, kind=Kind.READ, place=SOURCE),
    )

    whole, begun = Trace(spans).epochs()

    assert (whole.epoch, whole.seconds, whole.steps, whole.samples) == (0, 8.0, 2, 3)
    assert (whole.stall_seconds, whole.own_seconds) == (3.5, 4.5)
    assert sum(whole.stall_by_cause.values()) == 3.5
    assert whole.reads_by_place == {SOURCE: 2, 2: 1}
    assert whole.bytes_by_place == {SOURCE: 150, 1: 50, 2: 25}
    assert whole.hits_by_place == {1: 1}
    assert whole.samples_per_second == 3 / 8
    assert (begun.epoch, begun.seconds, begun.steps, begun.reads_by_place) == (1, 0.0, 0, {SOURCE: 1})
    assert begun.samples_per_second == 0.0


def test_a_group_counts_as_its_samples_and_is_found_by_its_flow_whatever_its_first_sample() -> None:
    """64 samples read by one call and loaded by two: the later half was waited for, and its own first id was never
    read as such. An earlier read of that id is no part of it."""
    group = Row(0, 6, 100, 6400, kind=Kind.READ, place=SOURCE, samples=64, flow=9, worker=1)
    halves = [
        Row(6, 7, 100, kind=Kind.DECODE, samples=32, flow=9, worker=2),
        Row(6, 8, 132, kind=Kind.DECODE, samples=32, flow=9, worker=3),
    ]
    earlier = Row(0, 5, 132, 100, epoch=-5, kind=Kind.READ, place=2, flow=3, worker=1)

    _, metrics = epoch_metrics(spans_of(group, *halves, earlier, Row(0, 8, samples=64)))

    assert (metrics.samples, metrics.steps) == (64, 1)
    assert (metrics.reads_by_place, metrics.bytes_by_place) == ({SOURCE: 64}, {SOURCE: 6400})
    assert {cause: part for cause, part in metrics.stall_by_cause.items() if part} == {
        Cause.SOURCE_READ: 6,
        Cause.DECODE: 2,
    }


def test_a_group_whose_samples_were_read_one_by_one_waited_for_the_last_of_them() -> None:
    """Not for that of its first sample, nor for one that came after it was begun, nor for one of another batch."""
    reads = [
        Row(0, end, sample, step=step, kind=Kind.READ, place=SOURCE, flow=flow, worker=1)
        for end, sample, step, flow in ((2, 10, 0, 1), (6, 11, 0, 2), (9, 12, 0, 3), (7, 13, 1, 4))
    ]
    group = Row(7, 9, 10, kind=Kind.DECODE, samples=2, flow=5, worker=2)

    assert causes_of(*reads, group, Row(0, 9)) == {Cause.SOURCE_READ: 6, Cause.DECODE: 3}


def test_what_has_no_flow_is_never_taken_for_another_sample_without_one() -> None:
    """Beside a batch of a group, one of a sample alone; a later read of the group's first id has no flow either."""
    group = [
        Row(0, 1, 100, kind=Kind.READ, place=SOURCE, samples=64, flow=9, worker=1),
        Row(1, 2, 100, kind=Kind.DECODE, samples=64, flow=9, worker=2),
        Row(0, 2, samples=64),
    ]
    alone = [
        Row(2, 3, 5, step=1, kind=Kind.READ, place=SOURCE, worker=1),
        Row(2, 7, 100, step=-1, kind=Kind.READ, place=2, worker=1),
        Row(7, 8, 5, step=1, kind=Kind.DECODE, worker=2),
        Row(2, 8, step=1),
    ]

    assert causes_of(*group, *alone) == {Cause.SOURCE_READ: 2, Cause.DECODE: 6}


def test_bytes_are_added_as_integers() -> None:
    huge = 2**60 + 1
    (metrics,) = epoch_metrics(spans_of(*[Row(0, 1, 1, huge, kind=Kind.READ, place=SOURCE)] * 3))

    assert metrics.bytes_by_place == {SOURCE: 3 * huge}


def test_a_trace_without_spans_has_no_epochs() -> None:
    assert epoch_metrics(np.empty(0, SPAN)) == []


def slow_causes(rows: list[Row], wait: Row) -> dict[Cause, float]:
    """Ask of every second of a wait, one at a time, what the critical sample was doing, in whole seconds."""

    def last(kinds: Kind, by: tuple[str, ...], like: Row, until: float) -> Row | None:
        best = None
        for row in rows:
            equal = all(getattr(row, name) == getattr(like, name) for name in by)
            zero_hit = kinds == Kind.HIT and row.start == row.end
            if row.kind != kinds or not equal or row.end > until or zero_hit:
                continue
            if best is None or row.end >= best.end:
                best = row
        return best

    causes, asked = dict.fromkeys(Cause, 0.0), wait
    if wait.step == -1:
        return {**causes, Cause.NO_BATCH: wait.end - wait.start}
    joint = [row for row in rows if row.kind == Kind.DECODE and row.bytes and row.step <= wait.step]
    joint = [row for row in joint if (row.rank, row.epoch) == (wait.rank, wait.epoch)]
    first = max(reversed(joint), key=lambda row: row.step, default=wait)
    if wait.step <= first.step + first.bytes:
        wait = wait._replace(step=first.step)
    critical = last(Kind.DECODE, ("rank", "epoch", "step"), wait, wait.end)
    if critical is None:
        return {**causes, Cause.UNSEEN: wait.end - wait.start}
    slot = last(Kind.SLOT, ("rank", "epoch", "step"), wait, critical.end)
    by: tuple[str, ...] = ("rank", "sample")
    until = critical.end
    if critical.samples > 1:
        by, until = (("rank", "epoch", "step"), critical.start)
    read, hit = (
        (critical.flow and last(kind, ("rank", "flow"), critical, critical.end))
        or last(kind, by, critical, until)
        for kind in (Kind.READ, Kind.HIT)
    )
    for second in range(int(wait.start), int(wait.end)):
        if slot and second < slot.start:
            cause = Cause.HAND_OVER
        elif slot and second < slot.end:
            cause = Cause.NO_FREE_SLOT
        elif read and read.worker == critical.worker and second < read.start and second < read.end:
            cause = Cause.DECODE
        elif read and second < read.end:
            cause = Cause.SOURCE_READ if read.place == SOURCE else Cause.TIER_READ
        elif hit and hit.worker == critical.worker and second < hit.start and second < hit.end:
            cause = Cause.DECODE
        elif hit and second < hit.end:
            cause = Cause.TIER_READ
        elif second < critical.end:
            cause = Cause.DECODE
        else:
            cause = Cause.HAND_OVER
        causes[cause] += 1
    if started := last(Kind.START, ("rank", "epoch", "step"), asked, wait.end):
        both = max(0, min(started.end, wait.end) - max(started.start, wait.start))
        causes[Cause.START] = min(both, causes[Cause.DECODE])
        causes[Cause.DECODE] -= causes[Cause.START]
    return causes


OF_BATCHES = [*(kind for kind in Kind if kind <= Kind.SLOT), Kind.START]


def random_row() -> st.SearchStrategy[Row]:
    mostly_zero = st.sampled_from([0, 0, 0, 1])

    def made(start: int, seconds: int, nbytes: int, more: int, **fields: int) -> Row:
        of_kind = more if fields["kind"] == Kind.DECODE else nbytes
        return Row(start, start + seconds, bytes=of_kind, **fields)

    return st.builds(
        made,
        st.integers(0, 15),
        st.integers(0, 8),
        st.integers(0, 1000),
        mostly_zero,
        epoch=mostly_zero,
        step=st.sampled_from([0, 0, 0, 1, 2, -1]),
        kind=st.sampled_from(OF_BATCHES).map(int),
        sample=mostly_zero,
        place=st.sampled_from([SOURCE, 1, 2]),
        rank=mostly_zero,
        worker=mostly_zero,
        samples=st.sampled_from([1, 1, 5]),
        flow=st.sampled_from([0, 0, 1, 2]),
    )


def samples_of(rows: Iterable[Row]) -> int:
    return sum(row.samples for row in rows)


@given(st.lists(random_row(), max_size=40))
@example([SLOT, READ, DECODE, Row(0, 12)])
def test_the_vectorised_sums_equal_those_of_a_slow_count(rows: list[Row]) -> None:
    metrics = {epoch.epoch: epoch for epoch in epoch_metrics(spans_of(*rows))}

    assert sorted(metrics) == sorted({row.epoch for row in rows})
    for epoch, found in metrics.items():
        here = [row for row in rows if row.epoch == epoch]
        waits = [row for row in here if row.kind == Kind.WAIT]
        steps = [row for row in here if row.kind == Kind.STEP]
        reads = [row for row in here if row.kind == Kind.READ]
        hits = [row for row in here if row.kind == Kind.HIT]
        causes = dict.fromkeys(Cause, 0.0)
        for wait in waits:
            for cause, seconds in slow_causes(rows, wait).items():
                causes[cause] += seconds
        assert found.stall_by_cause == causes
        assert found.stall_seconds == sum(row.end - row.start for row in waits) == sum(causes.values())
        assert found.own_seconds == sum(row.end - row.start for row in steps)
        consumer = waits + steps
        first = min((row.start for row in consumer), default=0)
        assert found.seconds == max((row.end for row in consumer), default=0) - first
        assert found.steps == sum(row.step != -1 for row in waits)
        assert found.samples == samples_of(row for row in here if row.kind == Kind.DECODE)
        for place in (SOURCE, 1, 2):
            assert found.reads_by_place.get(place, 0) == samples_of(
                row for row in reads if row.place == place
            )
            assert found.hits_by_place.get(place, 0) == samples_of(row for row in hits if row.place == place)
            taken = sum(row.bytes for row in reads + hits if row.place == place)
            assert found.bytes_by_place.get(place, 0) == taken


@given(st.lists(random_row(), max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_spans_that_end_apart_does_not_matter(rows: list[Row], random: Random) -> None:
    apart = [row._replace(start=row.start + 0.001 * n, end=row.end + 0.001 * n) for n, row in enumerate(rows)]
    shuffled = random.sample(apart, len(apart))

    for one, other in zip(epoch_metrics(spans_of(*apart)), epoch_metrics(spans_of(*shuffled)), strict=True):
        assert one.stall_by_cause == pytest.approx(other.stall_by_cause, abs=1e-9)
        assert one.reads_by_place == other.reads_by_place


def line_of(*rows: Row) -> str:
    (metrics,) = epoch_metrics(spans_of(*rows))
    return limiting(metrics)


def test_the_line_of_an_epoch_names_what_limits_it_and_by_how_much() -> None:
    step = Row(10, 21, kind=Kind.STEP)

    assert line_of(SLOT, READ, DECODE, Row(1, 10), step) == (
        "epoch 0: storage limits it: waited 45.0 % of 20 s (4 s source read, 2 s decode, 2 s no free slot, "
        "1 s hand-over); without, 1.82 x as fast"
    )
    assert line_of(DECODE, Row(1, 10), step).startswith("epoch 0: decode limits it: waited 45.0 % of 20 s")
    assert line_of(Row(1, 10), step).startswith("epoch 0: the loader limits it")


def test_the_line_of_an_epoch_that_hardly_waited_names_the_training() -> None:
    assert line_of(DECODE, Row(9, 9.5), Row(9.5, 209, kind=Kind.STEP)) == (
        "epoch 0: the training itself limits it: waited 0.2 % of 200 s (500 ms hand-over)"
    )
    assert line_of(DECODE, Row(0, 10), Row(10, 210, kind=Kind.STEP)).startswith(
        "epoch 0: the training itself limits it: waited 4.8 % of 210 s ("
    )
    assert line_of(DECODE, Row(0, 10), Row(10, 200, kind=Kind.STEP)).startswith("epoch 0: decode limits it")
    assert line_of(Row(5, 5), Row(5, 10, kind=Kind.STEP)) == (
        "epoch 0: the training itself limits it: waited 0.0 % of 5 s"
    )


def test_a_loop_without_training_is_told_what_was_loaded_and_no_gain() -> None:
    empty = Row(10, 10.000002, kind=Kind.STEP)

    assert line_of(DECODE, Row(1, 10), empty) == (
        "epoch 0: no training between batches; decode limits it: 1 sample in 9 s (8 s decode, 1 s hand-over)"
    )
    assert line_of(Row(1, 10), empty).endswith("the loader limits it: 1 batch in 9 s (9 s unseen)")
    assert line_of(Row(1, 5), Row(5, 9, step=1)).endswith(
        "the loader limits it: 2 batches in 8 s (8 s unseen)"
    )


def test_the_start_of_worker_processes_is_not_called_decoding() -> None:
    def line_until(ready: float) -> str:
        return line_of(DECODE, Row(1, ready, kind=Kind.START), Row(1, 10), Row(10, 21, kind=Kind.STEP))

    assert line_until(7) == (
        "epoch 0: the start of worker processes limits it: waited 45.0 % of 20 s (6 s start of worker processes, "
        "2 s decode, 1 s hand-over); without, 1.82 x as fast"
    )
    assert line_until(4).startswith("epoch 0: decode limits it")
    assert "(8 s start of worker processes, 1 s hand-over)" in line_until(10)


def test_a_loop_that_hardly_does_anything_but_wait_is_told_its_time_a_step_and_no_gain() -> None:
    """A program beside it makes an empty step take 0.3 ms, and so does a step that a GPU does by itself: "97.67 x as
    fast" says nothing, and "no training" may not be so."""
    assert line_of(DECODE, Row(1, 10), Row(10, 10.0003, kind=Kind.STEP)).startswith(
        "epoch 0: hardly any time between batches (300 us a step); decode limits it: 1 sample in 9 s"
    )
    assert "a step itself takes 1.1 ms" in line_of(DECODE, Row(1, 10), Row(10, 10.0011, kind=Kind.STEP))


def test_one_name_for_reading_and_decoding_sums_them_up() -> None:
    (metrics,) = epoch_metrics(spans_of(SLOT, READ, DECODE, Row(1, 10), Row(10, 21, kind=Kind.STEP)))

    assert limiting(metrics, "the data set", "the data set").startswith(
        "epoch 0: the data set limits it: waited 45.0 % of 20 s (6 s in the data set, 2 s no free slot, 1 s hand-over)"
    )


def test_where_nearly_all_was_waiting_the_step_is_told_and_no_huge_factor() -> None:
    assert line_of(DECODE, Row(1, 10), Row(10, 10.05, kind=Kind.STEP)).endswith(
        "decode limits it: waited 99.4 % of 9.05 s (8 s decode, 1 s hand-over); a step itself takes 50 ms"
    )


def test_an_epoch_of_milliseconds_is_too_short_to_judge() -> None:
    milliseconds = [
        row._replace(start=row.start / 1000, end=row.end / 1000)
        for row in (DECODE, Row(1, 10), Row(10, 10.5, kind=Kind.STEP))
    ]

    assert line_of(*milliseconds) == (
        "epoch 0: too short to judge: waited 94.7 % of 9.5 ms (8 ms decode, 1 ms hand-over)"
    )


def test_a_wait_that_got_no_batch_is_told_first_and_not_judged() -> None:
    step, in_vain = Row(10, 21, kind=Kind.STEP), Row(21, 50, step=-1)
    judged = "decode limits it: waited 45.0 % of 20 s (8 s decode, 1 s hand-over); without, 1.82 x as fast"

    assert line_of(DECODE, Row(1, 10), step) == f"epoch 0: {judged}"
    assert line_of(DECODE, Row(1, 10), step, in_vain) == (
        f"epoch 0: waited 29 s and got no batch; otherwise {judged}"
    )
    assert line_of(DECODE, Row(1, 10), step, Row(21, 21.125, step=-1)) == f"epoch 0: {judged}"
    assert line_of(in_vain) == "epoch 0: no batch was consumed in 29 s of waiting"


def test_an_epoch_of_which_nothing_was_consumed_says_so() -> None:
    """As when a run is cut off while the next epoch is being read ahead."""
    assert line_of(READ._replace(epoch=1), DECODE._replace(epoch=1)) == "epoch 1: no batch was consumed"


def test_reads_of_source_and_tiers_count_together_as_storage() -> None:
    waits = [Row(0, 3, step=0), Row(3, 6, step=1), Row(6, 10, step=2)]
    lives = [
        Row(0, 3, 1, step=0, kind=Kind.READ, place=SOURCE),
        Row(3, 3, 1, step=0, kind=Kind.DECODE),
        Row(3, 6, 2, step=1, kind=Kind.READ, place=2),
        Row(6, 6, 2, step=1, kind=Kind.DECODE),
        Row(6, 10, 3, step=2, kind=Kind.DECODE),
    ]

    assert line_of(*waits, *lives, Row(10, 15, step=2, kind=Kind.STEP)) == (
        "epoch 0: storage limits it: waited 66.7 % of 15 s (4 s decode, 3 s source read, 3 s tier read); "
        "without, 3.00 x as fast"
    )


# -- Snapshots beside the training -------------------------------------------------------------------------


def save_of(start: float, end: float, kind: Kind, rank: int = 0) -> Row:
    """As a store records it: of no epoch, with the step of the run."""
    return Row(start, end, epoch=NO_EPOCH, step=1000, bytes=10**9, kind=kind, place=0, rank=rank)


def test_a_save_is_of_no_epoch_and_no_read_or_wait() -> None:
    rows = [Row(0, 4), Row(4, 10, kind=Kind.STEP)]
    saves = [
        save_of(5, 7, Kind.SAVE),
        save_of(7, 9, Kind.WRITE),
        save_of(9, 12, Kind.DRAIN),
        save_of(0, 1, Kind.LOAD),
    ]

    (alone,), (metrics,) = epoch_metrics(spans_of(*rows)), epoch_metrics(spans_of(*rows, *saves))

    assert replace(metrics, save_seconds=0.0, meanwhile={}) == alone
    assert epoch_metrics(spans_of(*saves)) == []


def test_the_time_that_saves_held_the_training_is_part_of_its_own() -> None:
    """Of its own rank only; a save after the epoch, as at its end, is part of none."""
    step = Row(2, 10, kind=Kind.STEP)
    saves = [save_of(3, 5, Kind.SAVE), save_of(8, 11, Kind.SAVE), save_of(2, 9, Kind.SAVE, rank=1)]

    (metrics,) = epoch_metrics(spans_of(Row(0, 2), step, *saves))

    assert (metrics.own_seconds, metrics.save_seconds) == (8, 4)


def test_waits_while_snapshots_drain_are_told_apart_from_the_others() -> None:
    """Two pieces that overlap, on another rank of the same machine."""
    rows = [Row(0, 4), Row(4, 5, kind=Kind.STEP), Row(5, 6, step=1), Row(6, 20, step=1, kind=Kind.STEP)]
    drains = [save_of(2, 4.5, Kind.DRAIN, rank=1), save_of(3, 4.25, Kind.DRAIN, rank=1)]

    (metrics,) = epoch_metrics(spans_of(*rows, *drains))

    assert metrics.meanwhile == {Kind.DRAIN: Meanwhile(2, 0.5)}


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=8),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=8),
)
def test_overlaps_are_those_counted_second_by_second(
    spans: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    found = overlap_seconds(
        spans_of(*(Row(start, start + length) for start, length in spans)),
        spans_of(*(Row(start, start + length) for start, length in others)),
    )

    covered = {second for start, length in others for second in range(start, start + length)}
    assert found.tolist() == [len(covered & set(range(start, start + length))) for start, length in spans]


def test_the_line_of_an_epoch_says_when_a_stall_fell_into_a_drain() -> None:
    rows = [SLOT, READ, DECODE, Row(1, 10), Row(10, 50, kind=Kind.STEP)]

    assert line_of(*rows, save_of(4, 14, Kind.DRAIN), save_of(40, 44, Kind.SAVE)).endswith(
        "; without, 1.23 x as fast; saves held the training for 4 s of 49 s; 6 s of the waiting while a snapshot was "
        "drained: 60.0 % of that time, 7.7 % of the other"
    )
    assert line_of(*rows, save_of(4, 14, Kind.WRITE)).endswith(
        "; 6 s of the waiting while a snapshot was written: 60.0 % of that time, 7.7 % of the other"
    )


def test_what_does_not_explain_a_stall_is_not_told() -> None:
    """Less was waited while the snapshot drained than otherwise; the save was short; or it drained all the time."""
    rows = [SLOT, READ, DECODE, Row(1, 10), Row(10, 50, kind=Kind.STEP)]
    plain = line_of(*rows)

    assert line_of(*rows, save_of(9, 49, Kind.DRAIN)) == plain
    assert line_of(*rows, save_of(20, 20.25, Kind.SAVE)) == plain
    assert (
        line_of(*rows, save_of(0, 60, Kind.DRAIN)) == f"{plain}; a snapshot was drained nearly all the time"
    )


def test_a_training_that_saves_all_the_time_is_told_so() -> None:
    rows = [DECODE, Row(9, 9.5), Row(9.5, 209, kind=Kind.STEP)]

    assert line_of(*rows, save_of(20, 120, Kind.SAVE)).endswith(
        "epoch 0: the training itself limits it: waited 0.2 % of 200 s (500 ms hand-over); saves held the training for "
        "100 s of 200 s"
    )
