"""The sums of a run that goes on are those of its whole trace, however long it is."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import spans_of

from penstock.trace import (
    NO_EPOCH,
    NO_PLACE,
    SOURCE,
    Cause,
    Durations,
    Kind,
    Meanwhile,
    Spans,
    Stage,
    epoch_metrics,
)
from penstock.trace import summary as summary_module
from penstock.trace.stages import EDGES, stage_durations
from penstock.trace.summary import RunningMetrics, Summary, joined_epochs, slowest_of


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


def test_steps_that_were_loaded_together_are_judged_alike_whenever_they_are_summed_up() -> None:
    """Three steps, loaded together as the first was waited for; the fourth by itself."""
    rows = [(0.0, 2.0, 7, 2, 0, 0, Kind.DECODE, NO_PLACE, 2, 0, 6)]
    rows += [(3.0, 5.0, 9, 0, 0, 3, Kind.DECODE, NO_PLACE, 2, 0, 2)]
    rows += [
        (begin, begin + 1.5, -1, 0, 0, step, Kind.WAIT, NO_PLACE, 0, 0, 2)
        for step, begin in enumerate((0.5, 2.0, 3.5, 5.0))
    ]
    running = RunningMetrics()
    for step in range(4):
        running.add(spans_of([row for row in rows if row[1] == 1.5 * step + 2]), 0, step)
        running.add(spans_of([row for row in rows if 1.5 * step + 2 < row[1] < 1.5 * step + 3.5]), 0, step)
    (found,), (expected,) = running.epochs(), epoch_metrics(spans_of(rows))

    assert found == expected
    assert found.stall_by_cause[Cause.DECODE] == 1.5
    assert found.stall_by_cause[Cause.HAND_OVER] == 4.5
    assert found.stages[Stage(Kind.DECODE, NO_PLACE)].bytes == 0


def test_what_ran_beside_is_kept_only_as_long_as_it_may_matter() -> None:
    running = RunningMetrics()
    for step in range(200):
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

    assert running.epochs()[0].meanwhile == {Kind.DRAIN: Meanwhile(200.0, 0.0)}
    assert running._beside.size == 0


def a_long_run(epochs: int, steps: int = 2) -> Spans:
    """Epochs of steps of three seconds, of which one is waited for a read of 1/128 s; of step s, s samples more."""
    rows = []
    for step in range(epochs * steps):
        epoch, of_epoch = divmod(step, steps)
        now = 3.0 * step
        rows += [
            (now, now + 0.0078125, step, 100, epoch, of_epoch, Kind.READ, SOURCE, 1, 0, 1 + step),
            (now + 0.0078125, now + 0.5, step, 0, epoch, of_epoch, Kind.DECODE, NO_PLACE, 2, 0, 1 + step),
            (now, now + 1, -1, 0, epoch, of_epoch, Kind.WAIT, NO_PLACE, 0, 0, 1 + step),
            (now + 1, now + 3, -1, 0, epoch, of_epoch, Kind.STEP, NO_PLACE, 0, 0, 1 + step),
        ]
    return spans_of(rows)


def test_of_very_many_epochs_the_last_are_known_apart_and_the_earlier_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch of two steps, 250 times: what is kept is bounded, and nothing is lost from the sums."""
    monkeypatch.setattr(summary_module, "_MOST_EPOCHS", 8)
    running, spans = RunningMetrics(), a_long_run(250)
    for epoch in range(250):
        running.add(spans[spans["epoch"] == epoch], epoch, 1)
        assert len(running.epochs()) <= 8

    found, whole = running.epochs(), epoch_metrics(spans)

    assert found[0].epoch == 0
    assert [each.epoch + each.epochs for each in found] == [*(each.epoch for each in found[1:]), 250]
    assert found[-1] == whole[-1]
    assert [each.epochs for each in found[-4:]] == [1, 1, 1, 1]
    assert sum(each.samples for each in found) == 500 * 501 // 2
    assert sum(each.steps for each in found) == 500
    assert sum(each.seconds for each in found) == 1500.0
    assert sum(each.bytes_by_place[SOURCE] for each in found) == 50_000
    (oldest,) = [each for each in found if each.epoch == 0]
    assert oldest.stages[Stage(Kind.READ, SOURCE)].calls == oldest.steps == 2 * oldest.epochs
    assert oldest.name == f"epochs 0 to {oldest.epochs - 1}"
    assert running.epoch(1) == oldest
    assert running.epoch(1000) is None


def test_sums_that_are_written_and_read_are_the_same() -> None:
    spans = np.concatenate([a_long_run(3), a_run_with_saves([1, 2], [(Kind.DRAIN, 0, 9)])])
    before = Summary(7, tuple(epoch_metrics(spans)), spans[:2])

    after = Summary.from_bytes(before.to_bytes(), spans[:2])

    assert (after.spans, after.epochs) == (before.spans, before.epochs)
    assert after.epochs[0].meanwhile


def test_a_summary_that_unpacks_to_more_than_any_run_has_is_not_unpacked() -> None:
    with pytest.raises(ValueError, match="unpacks to too much"):
        Summary.from_bytes(zlib.compress(b" " * (64 << 20) + b"{}"), spans_of([]))


def test_later_sums_are_joined_to_the_epochs_that_they_fall_into() -> None:
    first, then = epoch_metrics(a_long_run(2)), epoch_metrics(a_long_run(4))
    several = summary_module._bounded(first) and [summary_module._joined(first[0], first[1], 2)]

    joined = joined_epochs(several, then)

    assert [(each.epoch, each.epochs, each.steps) for each in joined] == [(0, 2, 8), (2, 1, 2), (3, 1, 2)]


@given(
    st.lists(
        st.tuples(st.sampled_from([Kind.WAIT, Kind.READ]), st.integers(0, 40)), min_size=20, max_size=60
    ),
    st.integers(1, 9),
)
def test_the_slowest_are_those_of_a_sort(calls: list[tuple[Kind, int]], size: int) -> None:
    spans = spans_of((0.0, seconds, 5, 0, 0, 0, kind, SOURCE, 0, 0) for kind, seconds in calls)
    running = RunningMetrics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary_module, "SLOWEST", 4)
        for first in range(0, spans.size, size):
            running.add(spans[first : first + size], 0, 0)
            assert running.slowest.size <= 2 * (2 * 4 + size)
        found = slowest_of(running.slowest, 4)

    for kind in (Kind.WAIT, Kind.READ):
        seconds = sorted((each for of, each in calls if of == kind), reverse=True)[:4]
        assert found["end"][found["kind"] == kind].tolist() == seconds


# -- Histograms --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.0, 2e6), st.integers(1, 300)), min_size=1, max_size=40))
def test_every_call_is_in_the_bucket_of_its_time(calls: list[tuple[float, int]]) -> None:
    spans = spans_of((0.0, seconds, 1, 10, 3, 0, Kind.READ, 2, 0, 0, samples) for seconds, samples in calls)

    found = stage_durations(spans)[3][Stage(Kind.READ, 2)]

    assert (found.calls, found.samples) == (len(calls), sum(samples for _, samples in calls))
    assert found.bytes == 10 * len(calls)
    assert found.seconds == pytest.approx(sum(seconds for seconds, _ in calls))
    assert found.slowest_seconds == max(seconds for seconds, _ in calls)
    for bucket, count in found.counts.items():
        lower = EDGES[bucket - 1] if bucket else 0.0
        upper = EDGES[bucket] if bucket < EDGES.size else np.inf
        assert count == sum(lower <= seconds < upper for seconds, _ in calls)
    ordered = sorted(seconds for seconds, _ in calls)
    for share in (0.5, 0.99, 1.0):
        exact = ordered[max(0, int(np.ceil(share * len(ordered))) - 1)]
        assert exact <= found.quantile(share) <= max(1e-6, 1.19 * exact) or exact > EDGES[-1]


def test_a_call_as_long_as_an_edge_is_in_the_bucket_above_it() -> None:
    spans = spans_of((0.0, float(edge), 1, 0, 0, 0, Kind.READ, 2, 0, 0) for edge in EDGES[[0, 7, 160]])

    assert stage_durations(spans)[0][Stage(Kind.READ, 2)].counts == {1: 1, 8: 1, 161: 1}


def test_reads_of_own_tiers_and_of_other_ranks_are_stages_of_their_own() -> None:
    read = (0.0, 1.0, 5, 10, 0, 0, Kind.READ, 1, 0, 0, 4)

    found = stage_durations(spans_of([read, read, (*read, 3)]))[0]

    assert found[Stage(Kind.READ, 1)].samples == 8
    assert found[Stage(Kind.READ, 1, of_peers=True)] == Durations(1, 4, 10, 1.0, 1.0, {80: 1})


def test_kinds_of_a_later_penstock_are_in_no_sum() -> None:
    spans = a_long_run(1)
    spans["kind"][0] = 200

    (epoch,) = epoch_metrics(spans)

    assert epoch.reads_by_place == {SOURCE: 2}
