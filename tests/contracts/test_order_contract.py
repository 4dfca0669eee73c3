"""What every order must do; a new one is added to `ORDERS` and has all of these tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import (
    AccessPlan,
    Batches,
    BundleShuffle,
    CutOrder,
    EvenOrder,
    Explicit,
    FullShuffle,
    Mixture,
    Order,
    RepeatingOrder,
    Scattered,
    Sequential,
    TokenBudget,
    TorchDistributed,
    TorchShuffle,
    TwisterState,
    split_locally,
)

EPOCHS = 4


def local() -> Order:
    plan = AccessPlan(FullShuffle(23, 4), 6, EPOCHS, 3)
    return split_locally(plan, np.arange(23) % 3).order


ORDERS: dict[str, Callable[[], Order]] = {
    "sequential": lambda: Sequential(23),
    "full": lambda: FullShuffle(23, 5),
    "one sample": lambda: FullShuffle(1),
    "bundle": lambda: BundleShuffle(23, 5, 0.3),
    "scattered": lambda: Scattered(BundleShuffle(23, 5, 0.3), 6),
    "local": local,
    "token budget": lambda: TokenBudget(np.arange(23) % 7, 20, seed=3, pool=8),
    "token budget, unsorted": lambda: TokenBudget(np.arange(23) % 7, 20, pool=1, shuffle=False),
    "one list": lambda: Explicit([3, 1, 3, 0, 22], 23),
    "batches": lambda: Batches([[[3, 1], [3, 7]], [[0]], [[2, 2], [2, 2]], [[5, 4]]], 23),
    "list of each epoch": lambda: Explicit([[3, 1, 3], [0], [2, 2, 2, 2], [5, 4]], 23),
    "mixture": lambda: Mixture((13, 4, 6), [3, 1, 1], at_end="repeat", seed=3),
    "mixture, first exhausted": lambda: Mixture((13, 4, 6), [3, 1, 1], at_end="stop"),
    "mixture, all once": lambda: Mixture((13, 4, 6), [3, 1, 1], at_end="drop", seed=3),
    "mixture, scheduled": lambda: Mixture(
        (13, 4, 6), [(0, [1, 0, 1]), (3, [1, 3, 1]), (9, [0, 1, 1])], at_end="repeat", batch_size=4
    ),
    "torch": lambda: TorchShuffle(23, TwisterState.from_seed(7)),
    "torch, distributed": lambda: TorchDistributed(23, 4, 7),
    "torch, distributed, few": lambda: TorchDistributed(3, 8, 7),
    "torch, distributed, last dropped": lambda: TorchDistributed(23, 4, 7, drop_last=True),
}


every_order = for_each("order", [pytest.param(make(), id=name) for name, make in ORDERS.items()])


def listed(order: Order, epoch: int) -> list[int]:
    """The epoch, asked for one position after the other."""
    return [int(order.at(epoch, position)) for position in range(order.length(epoch))]


class TestOrderContract:
    @every_order
    def test_it_is_an_order_and_its_ids_are_those_of_its_samples(self, order: Order) -> None:
        assert isinstance(order, Order)
        for epoch in range(EPOCHS):
            assert set(listed(order, epoch)) <= set(range(order.samples))

    @every_order
    def test_a_sample_is_read_once_an_epoch_unless_the_order_says_that_it_may_repeat_it(
        self, order: Order
    ) -> None:
        for epoch in range(EPOCHS):
            ids = listed(order, epoch)
            assert len(set(ids)) == len(ids) or isinstance(order, RepeatingOrder)

    @every_order
    def test_answers_have_the_shape_of_the_question(self, order: Order) -> None:
        length, expected = order.length(1), listed(order, 1)
        for positions in (np.arange(length), np.arange(length)[::-1].reshape(-1, 1), np.empty(0, np.int64)):
            ids = order.at(1, positions)
            where = order.position_of(1, ids)
            assert ids.dtype == where.dtype == np.int64
            assert ids.shape == where.shape == positions.shape
            assert ids.ravel().tolist() == [expected[position] for position in positions.ravel()]
        assert order.at(1, length - 1).shape == ()

    @every_order
    def test_a_sample_is_where_it_stands_first_or_nowhere(self, order: Order) -> None:
        for epoch in range(EPOCHS):
            ids = listed(order, epoch)
            expected = [ids.index(sample) if sample in ids else -1 for sample in range(order.samples)]
            assert order.position_of(epoch, np.arange(order.samples)).tolist() == expected

    @every_order
    def test_it_answers_the_same_whenever_and_wherever_it_is_asked(self, order: Order) -> None:
        copy = pickle.loads(pickle.dumps(order))

        for epoch in (2, 0, 3, 2):
            positions = np.arange(order.length(epoch))
            assert copy.at(epoch, positions).tolist() == order.at(epoch, positions).tolist()

    @every_order
    def test_what_is_outside_is_refused(self, order: Order) -> None:
        for wrong in (-1, order.length(0), [0, order.length(0) + 5]):
            with pytest.raises(ConfigError, match=r"positions contain -?\d+, which is outside"):
                order.at(0, wrong)
        for wrong in (-1, order.samples, [0, order.samples + 5]):
            with pytest.raises(ConfigError, match=r"samples contain -?\d+, which is outside"):
                order.position_of(0, wrong)
        with pytest.raises(ConfigError, match="positions have dtype float64; they are integers"):
            order.at(0, [0.5])
        with pytest.raises(ConfigError, match="epoch is -1"):
            order.at(-1, 0)

    @every_order
    def test_epochs_are_equally_long_from_where_it_says_so(self, order: Order) -> None:
        if isinstance(order, EvenOrder):
            lengths = [order.length(epoch) for epoch in range(EPOCHS)]
            assert len(set(lengths[order.even_from :])) <= 1

    @every_order
    def test_a_plan_of_it_reads_what_it_lists(self, order: Order) -> None:
        plan = (
            AccessPlan.of_batches(order, EPOCHS)
            if isinstance(order, CutOrder)
            else AccessPlan(order, 6, EPOCHS)
        )

        assert plan.string(0).tolist() == [
            sample for epoch in range(EPOCHS) for sample in listed(order, epoch)
        ]
