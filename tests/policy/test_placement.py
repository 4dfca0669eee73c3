"""A fixed home for the samples that a rank reads most."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import AccessPlan, FullShuffle, Sequential
from penstock.policy import place_by_frequency, placement
from penstock.trace.schema import SOURCE


def test_the_samples_read_most_often_go_to_the_fastest_tier() -> None:
    plan = AccessPlan(FullShuffle(60, 1), 6, 40, ranks=3)
    sizes = np.full(60, 10)

    placement = place_by_frequency(plan, 1, sizes, [100, 200])

    uses = plan.uses(1)[0]
    first, second = placement.samples_in(1), placement.samples_in(2)
    rest = np.flatnonzero(placement.tier_of == SOURCE)
    assert (first.size, second.size, rest.size) == (10, 20, 30)
    assert uses[first].min() >= uses[second].max()
    assert uses[second].min() >= uses[rest].max()


def test_tiers_are_filled_in_the_order_of_first_use() -> None:
    plan = AccessPlan(FullShuffle(50, 3), 5, 4)

    placement = place_by_frequency(plan, 0, np.full(50, 1), [20])

    positions = plan.position_of(0, placement.fill_order)
    assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize(("limit", "most"), [("_EPOCHS_COUNTED", 7), ("_READS_COUNTED", 7 * 20)])
def test_of_a_very_long_run_the_first_epochs_decide(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, limit, most)
    sizes = np.full(60, 10)

    by_few = place_by_frequency(AccessPlan(FullShuffle(60, 1), 6, 7, ranks=3), 1, sizes, [100])
    by_many = place_by_frequency(AccessPlan(FullShuffle(60, 1), 6, 10**9, ranks=3), 1, sizes, [100])

    assert by_many.fill_order.tolist() == by_few.fill_order.tolist()


def test_what_a_rank_never_reads_gets_no_place() -> None:
    plan = AccessPlan(Sequential(10), 10, 3, ranks=2)

    placement = place_by_frequency(plan, 1, np.full(10, 1), [100])

    assert placement.tier_of.tolist() == [SOURCE] * 5 + [1] * 5


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.lists(st.integers(0, 400), max_size=3),
    st.integers(0, 99),
)
def test_no_tier_holds_more_than_its_capacity_and_none_is_left_half_empty(
    sizes: list[int], capacities: list[int], seed: int
) -> None:
    plan = AccessPlan(FullShuffle(len(sizes), seed), 4, 2)
    sizes_bytes = np.array(sizes)

    placement = place_by_frequency(plan, 0, sizes_bytes, capacities)

    for tier, capacity in enumerate(capacities, start=1):
        used = sizes_bytes[placement.tier_of == tier].sum()
        assert used <= capacity
        left_out = sizes_bytes[(placement.tier_of == SOURCE) | (placement.tier_of > tier)]
        if left_out.size:
            assert used + left_out.max() > capacity
    assert sorted(placement.fill_order.tolist()) == np.flatnonzero(placement.tier_of != SOURCE).tolist()
