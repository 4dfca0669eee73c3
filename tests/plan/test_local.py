"""The split local: ranks read what they hold, and the global batch stays what it is."""

import pickle
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each
from tests.plan.small_plans import plans

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, FullShuffle, Sequential, split_locally
from penstock.plan import arranged as module
from penstock.plan.frequency import first_reads, readers_of_epoch


@st.composite
def held_plans(draw: st.DrawFn) -> tuple[AccessPlan, list[int]]:
    plan = draw(plans())
    return plan, draw(st.lists(st.integers(-1, plan.ranks - 1), min_size=plan.samples, max_size=plan.samples))


@given(held_plans())
def test_global_batches_and_local_sizes_stay_and_each_rank_reads_what_it_holds(
    case: tuple[AccessPlan, list[int]],
) -> None:
    plan, rank_of = case

    local = split_locally(plan, rank_of)

    for epoch in range(plan.epochs):
        assert local.length(epoch) == plan.length(epoch)
        for step in range(plan.steps(epoch)):
            before = [plan.local_batch(rank, epoch, step).tolist() for rank in range(plan.ranks)]
            after = [local.local_batch(rank, epoch, step).tolist() for rank in range(plan.ranks)]
            assert sorted(chain(*after)) == sorted(chain(*before))
            assert list(map(len, after)) == list(map(len, before))
            holders = [rank_of[sample] for sample in chain(*before)]
            for rank, samples in enumerate(after):
                own = [sample for sample in samples if rank_of[sample] == rank]
                assert len(own) == min(holders.count(rank), len(samples))


@given(held_plans())
def test_every_question_of_a_plan_is_answered_for_the_places_that_samples_have_now(
    case: tuple[AccessPlan, list[int]],
) -> None:
    plan, rank_of = case
    local = split_locally(plan, rank_of)

    for epoch in range(plan.epochs):
        ids = local.sample_at(epoch, np.arange(local.length(epoch))).tolist()
        found = [ids.index(sample) if sample in ids else -1 for sample in range(plan.samples)]
        assert local.position_of(epoch, np.arange(plan.samples)).tolist() == found
        _, readers = readers_of_epoch(local, epoch)
        assert [local.reader_of(epoch, [ids[p]])[0][0] for p in sorted({i for i in found if i >= 0})] == [
            readers[p] for p in sorted({i for i in found if i >= 0})
        ]


def test_blocks_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AccessPlan(FullShuffle(1_000, 2), 30, 2, ranks=3)
    rank_of = np.random.default_rng(0).integers(0, 3, 1_000)
    at_once = split_locally(plan, rank_of)
    monkeypatch.setattr(module, "_BLOCK", 100)

    in_blocks = split_locally(plan, rank_of)

    strings = in_blocks.strings()
    for rank in range(3):
        assert in_blocks.string(rank).tolist() == at_once.string(rank).tolist() == strings[rank].tolist()


@given(held_plans())
def test_the_strings_of_all_ranks_are_those_of_each(case: tuple[AccessPlan, list[int]]) -> None:
    plan, rank_of = case
    local = split_locally(plan, rank_of)

    assert [each.tolist() for each in local.strings()] == [
        local.string(rank).tolist() for rank in range(plan.ranks)
    ]


def test_the_strings_of_all_ranks_arrange_each_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the blocks that are kept, every rank that asks by itself would arrange all of them anew."""
    monkeypatch.setattr(module, "_BLOCK", 30)
    local = split_locally(AccessPlan(FullShuffle(1_000, 2), 30, 2, ranks=3), np.arange(1_000) % 3)
    arranged: list[int] = []
    arrange = module.Arranged._arrange

    def counted(order: module.Arranged, epoch: int, begin: int, size: int) -> tuple[module.Ids, module.Ids]:
        arranged.append(begin)
        return arrange(order, epoch, begin, size)

    monkeypatch.setattr(module.Arranged, "_arrange", counted)

    local.strings()

    assert len(arranged) == 2 * 34


@for_each(
    ("ranks", "local_batch", "share", "target"),
    [
        (4, 32, 0.062, 0.08),
        (4, 64, 0.041, 0.05),
        (32, 64, 0.049, 0.05),
        (32, 256, 0.025, 0.026),
        (256, 32, 0.070, 0.08),
    ],
)
def test_few_samples_move_and_fewer_the_larger_the_batch(
    ranks: int, local_batch: int, share: float, target: float
) -> None:
    """Shares as simulated independently for uniform homes; they vary by a few tenths of a percent with the batches."""
    batch = ranks * local_batch
    plan = AccessPlan(FullShuffle(max(100_000, 20 * batch), 3), batch, 1, ranks, drop_last=True)
    rank_of = np.random.default_rng(1).permutation(np.arange(plan.samples) % ranks)

    samples, readers = readers_of_epoch(split_locally(plan, rank_of), 0)

    moved = float((rank_of[samples] != readers).mean())
    assert moved == pytest.approx(share, abs=0.003)
    assert moved <= target


def test_a_plan_with_local_batches_travels_to_other_processes() -> None:
    plan = split_locally(AccessPlan(FullShuffle(60, 2), 12, 2, ranks=3), np.arange(60) % 3)

    copy = pickle.loads(pickle.dumps(plan))

    assert copy.string(1).tolist() == plan.string(1).tolist()


@for_each(
    ("rank_of", "match"),
    [
        ([0, 1, 2, 0], r"ranks 0 to 2"),
        ([0, 1, -2, 0], "ranks -2 to 1"),
        ([0, 1], "shape"),
        ([0.0] * 4, "float64"),
    ],
)
def test_holders_that_cannot_be_are_refused(rank_of: list[int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        split_locally(AccessPlan(Sequential(4), 2, 1, ranks=2), rank_of)


def test_where_all_ranks_read_everything_there_is_nothing_to_share_out() -> None:
    with pytest.raises(ConfigError, match="no one reader"):
        split_locally(AccessPlan(Sequential(4), 2, 1, ranks=2, split="replicated"), [0, 1, 0, 1])


@given(held_plans())
def test_by_name_a_rank_reads_what_it_read_first_by_balanced_slices(
    case: tuple[AccessPlan, list[int]],
) -> None:
    balanced = replace(case[0], split="balanced")
    holders = first_reads(balanced).rank_of

    plan = replace(balanced, split="local")

    assert plan.order is balanced.order, "what fixes the global batches is as it was"
    for other in (split_locally(balanced, holders), split_locally(plan, holders)):
        assert [each.tolist() for each in plan.strings()] == [each.tolist() for each in other.strings()]
    if isinstance(plan.order, FullShuffle):
        for rank in range(plan.ranks):
            for step in range(plan.steps(0)):
                assert (plan.local_batch(rank, 0, step) == balanced.local_batch(rank, 0, step)).all()
