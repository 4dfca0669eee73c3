"""Whose turn it is in a mixture, against shares that are counted, and what an epoch reads of each source."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Mixture, _mixing_kernels
from penstock.plan.access import epochs_of_steps
from penstock.plan.mixing import LONGEST_PERIOD, LinearWeights, take_turns
from penstock.plan.serialise import read_plan, write_plan
from penstock.trace.schema import SPAN


def sources_of(order: Mixture, epoch: int) -> list[int]:
    turns: list[int] = order.source_at(epoch, np.arange(order.length(epoch))).tolist()
    return turns


def reads_of(order: Mixture, epochs: int) -> list[list[int]]:
    return [order.at(epoch, np.arange(order.length(epoch))).tolist() for epoch in range(epochs)]


def furthest(turns: np.ndarray[Any, Any], shares: list[Fraction]) -> float:
    """How far a source ever is from its share, over all beginnings of some turns."""
    given = np.cumsum(turns[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, turns.size + 1)[:, None] * np.array([float(share) for share in shares])
    return float(np.abs(given - due).max())


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_after_any_number_of_samples_no_source_is_more_than_one_from_its_share(weights: list[int]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    bound = 1 - 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0
    order = Mixture((1_000,) * len(weights), weights, at_end="stop")

    turns = np.array(sources_of(order, 0))
    assert furthest(turns, shares) <= bound + 1e-9

    compiled = np.empty(sum(weights), np.uint16)
    _mixing_kernels.take_turns(np.array(weights), compiled)
    assert compiled.tolist() == take_turns(weights)


def test_decimals_and_thirds_are_exact_however_far_and_other_weights_to_one_in_a_million() -> None:
    sizes = (10**12,) * 3
    far = 10**11 + np.arange(3_000)
    for weights, shares in (
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([12.5, 50, 37.5], [1, 4, 3]),
    ):
        counts = np.bincount(Mixture(sizes, weights, at_end="stop").source_at(0, far[:1000]), minlength=3)
        assert np.abs(counts - 1000 * np.array(shares) / sum(shares)).max() <= 1.5
        given = np.array(Mixture(sizes, weights, at_end="stop").given(0), np.float64)
        assert np.abs(given - given.sum() * np.array(shares) / sum(shares)).max() < 1

    uneven = np.array([12_345_678, 987_654, 3_333_333.7])
    given = np.array(Mixture(sizes, uneven.tolist(), at_end="stop").given(0), np.float64)
    assert np.abs(given / given.sum() - uneven / uneven.sum()).max() < 1 / LONGEST_PERIOD


def test_stop_ends_an_epoch_before_anything_repeats_and_the_next_one_goes_on_where_others_stopped() -> None:
    order = Mixture((100, 7), [3, 1], at_end="stop", seed=2)
    first, second, third, fourth = reads_of(order, 4)

    assert order.given(0) == (23, 7)
    assert sorted(sample - 100 for sample in first if sample >= 100) == list(range(7))
    long = [sample for epoch in (first, second, third, fourth) for sample in epoch if sample < 100]
    assert len(long) == 92 == len(set(long))
    assert [sample for sample in first if sample >= 100] != [sample for sample in second if sample >= 100]


def test_repeat_reads_every_source_to_its_end_and_begins_shorter_ones_anew() -> None:
    order = Mixture((100, 7), [3, 1], at_end="repeat", seed=2)
    for epoch in reads_of(order, 3):
        assert sorted(sample for sample in epoch if sample < 100) == list(range(100))
        assert epoch[-1] < 100
    short = [sample - 100 for epoch in reads_of(order, 3) for sample in epoch if sample >= 100]
    assert len(short) == 3 * order.given(0)[1]
    own_epochs = [short[begin : begin + 7] for begin in range(0, len(short) - 6, 7)]
    assert all(sorted(each) == list(range(7)) for each in own_epochs)
    assert len(set(map(tuple, own_epochs))) > 1


def test_drop_reads_everything_once_and_those_that_are_left_keep_their_proportions() -> None:
    order = Mixture((60, 10, 90), [3, 1, 1], at_end="drop", seed=2)
    for epoch in reads_of(order, 2):
        assert sorted(epoch) == list(range(160))
    turns = np.array(sources_of(order, 0))
    both = turns[np.flatnonzero(turns == 1)[-1] + 1 :]
    both = both[: np.flatnonzero(both == 0)[-1] + 1]
    assert set(both.tolist()) == {0, 2}
    assert furthest(both, [Fraction(3, 4), Fraction(0), Fraction(1, 4)]) <= 1.5
    assert set(turns[np.flatnonzero(turns == 0)[-1] + 1 :].tolist()) == {2}


def test_without_shuffling_sources_come_in_their_own_order() -> None:
    order = Mixture((6, 2), [3, 1], at_end="repeat", shuffle=False)
    assert order.at(0, range(8)).tolist() == [0, 1, 6, 2, 3, 4, 7, 5]


def test_weights_change_at_their_steps_over_the_ends_of_epochs() -> None:
    schedule = [(0, [1, 0]), (10, [1, 1]), (30, [0, 1])]
    order = Mixture((100, 50), schedule, at_end="repeat", batch_size=4)
    plan = AccessPlan(order, 4, epochs=4)

    by_step: list[list[int]] = []
    for epoch in range(4):
        for step in range(plan.steps(epoch)):
            by_step.append((plan.local_batch(0, epoch, step) >= 100).tolist())
    assert not any(map(any, by_step[:10]))
    assert all(1 <= sum(step) <= 3 for step in by_step[10:30] if len(step) == 4)
    assert all(map(all, by_step[30:]))
    assert order.given(order.even_from) == (0, 50)
    # Over an epoch's end: what is counted is steps of the run.
    short = Mixture((9, 9), [(0, [1, 0]), (7, [0, 1])], at_end="stop", batch_size=4)
    assert [short.given(epoch) for epoch in range(4)] == [(9, 0), (9, 0), (4, 9), (0, 9)]
    assert AccessPlan(short, 4, 3).steps(0) == 3
    dropped = Mixture((9, 9), [(0, [1, 0]), (7, [0, 1])], at_end="stop", batch_size=4, drop_last=True)
    assert [dropped.given(epoch)[0] for epoch in range(5)] == [9, 9, 9, 4, 0]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(lambda row: sum(row) > 0),
        ),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 50),
)
def test_shares_change_linearly_and_after_any_step_no_source_is_further_than_one_from_its_sum(
    rows: list[tuple[int, list[int]]], batch_size: int
) -> None:
    steps = [0, *np.cumsum([length for length, _ in rows[1:]]).tolist()]
    weights = LinearWeights([(step, row) for step, (_, row) in zip(steps, rows, strict=True)])
    order = Mixture((10**6,) * 3, weights, at_end="repeat", batch_size=batch_size)

    turns = order.source_at(0, np.arange(steps[-1] * batch_size)).reshape(steps[-1], batch_size)
    given = np.zeros(3)
    due = [Fraction(0)] * 3
    for step, of_step in enumerate(turns):
        which = int(np.searchsorted(steps, step, side="right")) - 1
        along = Fraction(step - steps[which], steps[which + 1] - steps[which])
        (_, low), (_, high) = rows[which : which + 2]
        given += np.bincount(of_step, minlength=3)
        for source in range(3):
            first, last = Fraction(low[source], sum(low)), Fraction(high[source], sum(high))
            due[source] += batch_size * (first + (last - first) * along)
        assert max(abs(a - b) for a, b in zip(given, map(float, due), strict=True)) <= 1 + 1e-9


def test_a_linear_change_over_very_many_steps_stays_near_and_is_found_again() -> None:
    steps, batch_size = 3_000, 100
    weights = LinearWeights([(0, [1, 0]), (steps, [1, 3])])
    order = Mixture((10**9, 10**9), weights, at_end="stop", seed=3, batch_size=batch_size)

    for step in (100, 1_000, 2_999):
        given = order.source_at(0, np.arange(step * batch_size)).sum()
        due = batch_size * 0.75 * step * (step - 1) / 2 / steps
        # Within a stair of 2 or 3 steps, shares are their mean.
        assert abs(given - due) <= 2 + batch_size * 0.75 / steps * 3**2 / 8
    positions = np.arange(10**5, 10**5 + 500)
    assert order.position_of(0, order.at(0, positions)).tolist() == positions.tolist()
    written = json.loads(json.dumps(write_plan(AccessPlan(order, batch_size, epochs=2))))
    assert read_plan(written, 0, np.empty(0, SPAN))[0].order == order


def test_a_schedule_over_very_many_epochs_is_planned_at_once() -> None:
    order = Mixture((5, 7), [(0, [1, 1]), (10**9 + 3, [1, 2])], at_end="stop", batch_size=4)
    lengths = [order.length(epoch) for epoch in (0, 7, order.even_from - 2, order.even_from)]

    assert order.even_from == 10**9 // 3 + 2
    assert lengths[:3] == [10, 10, 10]
    assert order.length(order.even_from + 5) == lengths[3]
    with_all = [order.at(epoch, np.arange(order.length(epoch))) for epoch in range(6)]
    short = np.concatenate([epoch[epoch < 5] for epoch in with_all])
    assert all(sorted(own.tolist()) == list(range(5)) for own in short.reshape(-1, 5))


def test_a_schedule_waits_for_a_source_that_comes_later_and_not_for_one_that_is_out_for_good() -> None:
    late = Mixture((20, 5), [(0, [1, 0]), (40, [3, 1])], at_end="repeat")
    assert late.given(0) == (40 + 15 - 1, 5)
    gone = Mixture((20, 5), [(0, [1, 1]), (4, [0, 1])], at_end="repeat")
    assert gone.given(0) == (2, 5)
    dropped = Mixture((3, 5), [(0, [1, 0]), (40, [0, 1])], at_end="drop")
    assert sources_of(dropped, 0) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_a_run_of_so_many_steps_is_counted_in_epochs() -> None:
    order = Mixture((100, 50), [1, 1], at_end="stop")
    assert epochs_of_steps(order, batch_size=10, steps=25) == (3, 3)  # of 101 samples each, 11 steps


def test_an_order_far_into_a_run_costs_and_holds_no_more() -> None:
    order = Mixture((10**11, 37, 10**9), [5, 1, 2], at_end="repeat", seed=9)
    positions = np.arange(10**11, 10**11 + 500)
    ids = order.at(2**31, positions)

    found = order.position_of(2**31, ids)
    large = ids < 10**11
    assert found[large].tolist() == positions[large].tolist()
    assert (found[~large] <= positions[~large]).all()


def test_the_mixture_of_a_seed_stays_the_one_that_it_was() -> None:
    """Golden: a run that resumes under a later version must go on with the same samples."""
    schedule: Any = [(0, [0.6, 0.3, 0.1]), (40_000, [1, 1, 1])]
    order = Mixture((70_000, 500, 9), schedule, at_end="repeat", seed=5)
    digest = xxhash.xxh3_64()
    for epoch in range(3):
        digest.update(order.at(epoch, np.arange(order.length(epoch))).tobytes())

    assert digest.hexdigest() == "06ace7344ad2d715"


@for_each(
    ("weights", "message"),
    [
        ([1], "weights has 1 number for 2 sources: give one for each"),
        ([1, -1], r"weights has -1 for source 1; a weight is a number, 0 or more"),
        ([1, float("nan")], "weights has nan for source 1"),
        ([1, float("inf")], "weights has inf for source 1"),
        ([1, True], "weights has True for source 1"),
        (["a", 1], "weights has 'a' for source 0"),
        ([0, 0], "weights sum to 0: give one source at least a weight above 0"),
        ([1e-9, 1], "weights has 1e-09 for source 0, less than a millionth"),
        ([], r"weights is \[\]; it is a number for each source"),
        ("ab", "weights is 'ab'; it is a number for each source"),
        (3, "weights is 3; it is a number for each source"),
        ([(5, [1, 1])], r"weights\[0\] begins at step 5; the first begins at step 0"),
        ([(0, [1, 1]), (0, [1, 2])], r"weights\[1\] begins at step 0"),
        ([(0, [1, 1]), (9, [1])], r"weights\[1\] has 1 number for 2 sources"),
        (LinearWeights([(0, [1, 1])]), "rows of LinearWeights are .*two at least"),
        (LinearWeights([1, 2]), "rows of LinearWeights are .*weights by the step"),  # type: ignore[list-item]
    ],
)
def test_weights_that_cannot_work_are_refused_by_name(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture((5, 5), weights, at_end="stop")


def test_what_else_cannot_work_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'at_end is .all_exhausted.; choose .* "repeat": the epoch ends when'
    ):
        Mixture((5, 5), [1, 1], at_end="all_exhausted")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="source 1 of the mixture has 0 samples: leave out"):
        Mixture((5, 0), [1, 1], at_end="stop")
    with pytest.raises(ConfigError, match="a mixture has 0 sources"):
        Mixture((), [], at_end="stop")
