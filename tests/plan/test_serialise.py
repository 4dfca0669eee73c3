"""A plan survives being written into a trace's header."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.plan import (
    AccessPlan,
    Assigned,
    BundleShuffle,
    Explicit,
    FullShuffle,
    Mixture,
    Order,
    Scattered,
    Sequential,
    TorchDistributed,
    TorchShuffle,
    TwisterState,
)
from penstock.plan.orders import ENDLESS
from penstock.plan.serialise import read_plan, write_plan
from penstock.trace import NO_PLACE, SPAN, Kind, Spans

NOTHING = np.empty(0, SPAN)


class Backwards:
    """An order of a user's own, of six samples."""

    samples = 6

    def length(self, epoch: int) -> int:
        return 6

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        return 5 - np.asarray(positions, np.int64)

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        return 5 - np.asarray(samples, np.int64)


def through_json(plan: AccessPlan, rank: int, spans: Spans = NOTHING) -> tuple[AccessPlan, int]:
    return read_plan(json.loads(json.dumps(write_plan(plan))), rank, spans)


@for_each(
    "order",
    [
        Sequential(13),
        FullShuffle(13, seed=2**64 - 1),
        BundleShuffle(13, seed=5, bundle_ratio=0.3, alternate=False),
        Scattered(BundleShuffle(13, seed=5, bundle_ratio=0.3), seed=6),
        Scattered(Scattered(Sequential(13)), seed=6),
        Mixture(
            (9, 4), [(0, [np.float64(0.3), 1.0]), (5, [1.0, 0.0])], at_end="repeat", seed=4, batch_size=4
        ),
        TorchDistributed(13, ranks=3, seed=4),
        TorchShuffle(13, TwisterState.from_seed(9), persistent_workers=True),
        TorchShuffle(13, TwisterState.from_seed(9), is_global=True),
    ],
)
@for_each("split", ["balanced", "uniform", "strided", "replicated", "imbalanced", "local", [3, 0, 1]])
def test_a_plan_of_known_kinds_reads_the_same_batches_after_json(order: Order, split: Any) -> None:
    plan = AccessPlan(order, 4, 3, ranks=3, split=split, drop_last=True)

    read, rank = through_json(plan, 1)

    assert rank == 1
    assert (read.epochs, read.batch_size, read.ranks, read.drop_last) == (3, 4, 3, True)
    for each in range(3):
        assert read.string(each).tolist() == plan.string(each).tolist()


def test_a_run_of_so_many_steps_and_one_without_end_are_read_as_such() -> None:
    plan = AccessPlan(Sequential(10), 4, 3, last_steps=2)
    assert through_json(plan, 0)[0] == plan
    endless = AccessPlan(Sequential(10), 4, ENDLESS)
    spans = spans_of([(0.0, 1.0, -1, 0, 6, 1, Kind.WAIT, NO_PLACE, 0, 0)])

    assert through_json(endless, 0, spans)[0] == AccessPlan(Sequential(10), 4, 7)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    plan = AccessPlan(BundleShuffle(np.int64(12), 3, np.float32(0.5)), np.int32(4), np.int64(2))  # type: ignore[arg-type]

    read, _ = through_json(plan, 0)

    assert read.string(0).tolist() == plan.string(0).tolist()


@pytest.mark.parametrize(
    ("order", "split"),
    [
        (Explicit([[4, 1, 1, 0, 3, 2], [5, 4, 3, 2, 1, 0]], 6), "uniform"),
        (Scattered(Backwards()), "uniform"),
        (Sequential(6), Assigned(lambda batch, ranks: np.arange(batch) % ranks)),
    ],
)
def test_what_is_no_function_of_a_few_numbers_is_replayed_from_the_spans(order: Order, split: Any) -> None:
    """The rank's part alone, as the only rank of a job: each step has the samples that it had."""
    plan = AccessPlan(order, 4, 2, ranks=2, split=split)
    rows = [
        (now, now + 1, int(sample), 0, epoch, step, Kind.DECODE, NO_PLACE, 3, 1)
        for now, (epoch, step, sample) in enumerate(
            (epoch, step, sample)
            for epoch in range(2)
            for step in range(plan.steps(epoch))
            for sample in plan.local_batch(1, epoch, step)
        )
    ]

    alone, _ = through_json(plan, 1, spans_of(rows))
    groups, ids = as_groups(plan)
    read, rank = read_plan(write_plan(plan), 1, groups, ids)

    assert rank == 0
    assert [alone.string(0).tolist(), alone.batch_size] == [read.string(0).tolist(), read.batch_size]
    assert read.ranks == 1
    for epoch in range(2):
        assert read.steps(epoch) == plan.local_steps(1, epoch)
        for step in range(plan.steps(epoch)):
            assert sorted(read.local_batch(0, epoch, step)) == sorted(plan.local_batch(1, epoch, step))


def as_groups(plan: AccessPlan) -> tuple[Spans, dict[tuple[int, int], NDArray[np.int64]]]:
    """What rank 1 records where each batch is loaded by one call."""
    rows: list[tuple[Any, ...]] = []
    ids: dict[tuple[int, int], NDArray[np.int64]] = {}
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            samples, flow = plan.local_batch(1, epoch, step), 1 + len(ids)
            ids[1, flow] = samples
            group = (int(samples[0]), 0, epoch, step, Kind.DECODE, NO_PLACE, 3, 1, samples.size, -1, flow)
            rows.append((flow, flow + 1, *group))
    return spans_of(rows), ids


def test_a_plan_that_can_only_be_replayed_needs_spans_that_decoded_something() -> None:
    with pytest.raises(ConfigError, match="no sample was decoded"):
        through_json(AccessPlan(Explicit([1, 0], 2), 1, 1), 0)


@for_each("broken", [{}, {"order": {"kind": "Unheard"}}, {"order": 3}, {"split": "whoel"}])
def test_a_plan_that_this_version_did_not_write_is_refused(broken: dict[str, Any]) -> None:
    whole = write_plan(AccessPlan(Sequential(4), 2, 1))

    with pytest.raises(ConfigError, match="not one that this Penstock wrote"):
        read_plan({**whole, **broken} if broken else {}, 0, NOTHING)
