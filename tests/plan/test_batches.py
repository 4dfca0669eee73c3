"""Batches that are listed: what is refused, and what is made of them. Their plans are compared in test_access.py."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Batches, CutOrder, Flat, FullShuffle, Sequential, split_locally
from penstock.plan.serialise import read_plan, write_plan
from penstock.trace import Kind
from penstock.trace.schema import SOURCE

LISTS = [[3, 1, 1], [0], [2, 4]]


def batches_of(plan: AccessPlan, epoch: int = 0) -> list[list[int]]:
    return [
        plan.local_batch(rank, epoch, step).tolist()
        for step in range(plan.steps(epoch))
        for rank in range(plan.ranks)
    ]


def test_lists_are_read_in_every_epoch_and_lists_by_epoch_in_theirs() -> None:
    once = AccessPlan.of_batches(Batches(LISTS, 5), epochs=3)
    by_epoch = AccessPlan.of_batches(Batches([LISTS, [[1]]], 5), epochs=2)
    made = AccessPlan.of_batches(Batches(lambda epoch: [[epoch], LISTS[0]], 5), epochs=3)

    assert [batches_of(once, epoch) for epoch in range(3)] == [LISTS] * 3
    assert [batches_of(by_epoch, epoch) for epoch in range(2)] == [LISTS, [[1]]]
    assert [batches_of(made, epoch) for epoch in range(3)] == [[[epoch], LISTS[0]] for epoch in range(3)]
    assert isinstance(once.order, CutOrder)
    with pytest.raises(ConfigError, match="epochs is 2, and the order has fewer"):
        AccessPlan.of_batches(Batches([LISTS], 5), epochs=2)


def test_arrays_of_any_kind_are_the_lists_that_they_hold() -> None:
    flat = Flat(np.array([3, 1, 1, 0, 2, 4], np.int32), np.array([0, 3, 4, 6]))
    for batches in (flat, [np.array(each) for each in LISTS], [tuple(each) for each in LISTS]):
        assert batches_of(AccessPlan.of_batches(Batches(batches, 5), epochs=1)) == LISTS
    copied = pickle.loads(pickle.dumps(Batches(LISTS, 5)))
    assert batches_of(AccessPlan.of_batches(copied, epochs=1)) == LISTS


@for_each(
    ("batches", "message"),
    [
        ([[0], []], r"batch 1 of epoch 0 is empty"),
        ([], r"epoch 0 has no batch"),
        ([[0, 5]], r"ids of epoch 0 contain 5, which is outside \[0, 5\)"),
        ([[0, -1]], r"ids of epoch 0 contain -1"),
        ([0, 1], r"batches of epoch 0 are no lists of ids"),
        ([[0.5]], r"batches of epoch 0 are no lists of ids"),
        (lambda epoch: [[]], r"batch 0 of epoch 0 is empty"),
    ],
    ids=["an empty batch", "none", "too large", "negative", "ids", "no integers", "of a function"],
)
def test_what_is_no_list_of_batches_is_refused(batches: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(batches, 5)


def test_a_later_batch_larger_than_space_was_taken_for_is_refused_by_name() -> None:
    order = Batches(lambda epoch: [[0], [1, 2, 3][: epoch + 1]], 5)
    plan = AccessPlan.of_batches(order, epochs=3)

    with pytest.raises(ConfigError, match=r"batch 1 of epoch 1 has 2 samples, .* largest=2"):
        plan.steps(1)
    assert AccessPlan.of_batches(Batches(order.batches, 5, largest=3), epochs=3).steps(2) == 2


def test_batches_that_ranks_cannot_share_out_are_refused_or_left_out() -> None:
    order = Batches([[0], [1], [2], [3, 4]], 5)

    with pytest.raises(ConfigError, match=r"has 4 batches for 3 ranks, .* none for rank 1: .* leaves 1 out"):
        AccessPlan.of_batches(order, epochs=1, ranks=3).check_equal_steps()
    assert batches_of(AccessPlan.of_batches(order, 1, ranks=3, drop_last=True)) == [[0], [1], [2]]
    with pytest.raises(
        ConfigError, match="drop_last leaves no batch: the order has fewer batches than 5 ranks"
    ):
        AccessPlan.of_batches(order, 1, ranks=5, drop_last=True).check_equal_steps()


def test_what_a_plan_of_listed_batches_cannot_have_is_refused_by_name() -> None:
    order = Batches(LISTS, 5)

    with pytest.raises(ConfigError, match="batch_size is 4, and Batches says itself"):
        AccessPlan(order, 4, 1)
    with pytest.raises(ConfigError, match=r"split is Strided.*Batches deals its batches"):
        AccessPlan(order, 3, 1, split="strided")
    with pytest.raises(ConfigError, match="split 'local' arranges batches of one size"):
        split_locally(AccessPlan.of_batches(order, 1), [0, 0, 0, 0, 0])


def test_the_batches_of_a_recorded_run_are_replayed_as_they_were() -> None:
    plan = AccessPlan.of_batches(Batches([LISTS, [[1, 2]]], 5), epochs=2)
    reads = [
        (number, number + 1, sample, 0, epoch, step, Kind.DECODE, SOURCE, 0, 0)
        for epoch in range(2)
        for step, batch in enumerate(batches_of(plan, epoch))
        for number, sample in enumerate(batch)
    ]

    read, rank = read_plan(write_plan(plan), 0, spans_of(reads))

    assert (rank, read.epochs) == (0, 2)
    assert [batches_of(read, epoch) for epoch in range(2)] == [LISTS, [[1, 2]]]


def test_other_plans_are_not_cut_by_their_order() -> None:
    for order in (Sequential(10), FullShuffle(10, 1)):
        plan = AccessPlan(order, 4, 1)
        assert not plan.is_cut_by_order
        assert (plan.steps_alike(0), plan.steps(0)) == (2, 3)
        assert [plan.first_position(0, step) for step in range(4)] == [0, 4, 8, 10]
