"""Samples handed on to their next user: against a plain simulation, and against every other choice there is."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Explicit, FullShuffle, Sequential
from penstock.policy import decide_push
from penstock.policy.push import Handed
from penstock.trace.schema import SOURCE

Job = tuple[AccessPlan, list[int], list[list[int]]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    samples = draw(st.integers(1, 30))
    ranks = draw(st.integers(1, 4))
    order: FullShuffle | Explicit = FullShuffle(samples, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, samples - 1), min_size=1, max_size=40)
        order = Explicit([draw(ids) for _ in range(4)], samples)
    plan = AccessPlan(
        order, draw(st.integers(1, 12)), draw(st.integers(1, 4)), ranks, drop_last=draw(st.booleans())
    )
    sizes = draw(st.lists(st.integers(0, 20), min_size=samples, max_size=samples))
    tiers = draw(st.integers(0, 2))
    row = st.lists(st.integers(0, 80), min_size=tiers, max_size=tiers)
    return plan, sizes, draw(st.lists(row, min_size=ranks, max_size=ranks))


def _reads(plan: AccessPlan) -> list[list[tuple[int, int, int]]]:
    """Per step over all epochs, its reads in the order of the batch: (rank, index in the rank's string, sample)."""
    counts = [0] * plan.ranks
    steps = []
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            reads = []
            for rank in range(plan.ranks):
                for sample in plan.local_batch(rank, epoch, step).tolist():
                    reads.append((rank, counts[rank], sample))
                    counts[rank] += 1
            steps.append(reads)
    return steps


def _simulate(plan: AccessPlan, sizes: list[int], capacities: list[list[int]]) -> list[Handed]:
    """Push as its definition reads, step by step with sets."""
    steps = _reads(plan)
    users: dict[int, list[tuple[int, int, int]]] = {}
    for step, reads in enumerate(steps):
        for rank, index, sample in reads:
            users.setdefault(sample, []).append((step, rank, index))
    lengths = [sum(read[0] == rank for reads in steps for read in reads) for rank in range(plan.ranks)]
    handed = [
        Handed(
            rank,
            np.full(lengths[rank], SOURCE, np.int8),
            np.full(lengths[rank], -1, np.int32),
            np.full(lengths[rank], -1, np.int64),
            np.full(lengths[rank], -1, np.int64),
        )
        for rank in range(plan.ranks)
    ]
    waiting: list[dict[int, tuple[int, int]]] = [{} for _ in range(plan.ranks)]  # read -> tier, sample
    for step, reads in enumerate(steps):
        for rank, index, _ in reads:
            waiting[rank].pop(index, None)
        arriving = []
        for rank, index, sample in reads:
            later = users[sample].index((step, rank, index)) + 1
            if later < len(users[sample]):
                at, to, wanted = users[sample][later]
                handed[to].from_rank[wanted] = rank
                handed[to].arrives[wanted] = step
                if at == step:
                    handed[to].given_up[wanted] = step
                else:
                    arriving.append((to, wanted, sample))
        for to, wanted, sample in sorted(arriving):
            _receive(handed[to], waiting[to], capacities[to], sizes, wanted, sample, step)
    return handed


def _receive(
    handed: Handed,
    waiting: dict[int, tuple[int, int]],
    capacities: list[int],
    sizes: list[int],
    wanted: int,
    sample: int,
    step: int,
) -> None:
    remaining = dict(waiting)
    for farthest in [wanted, *sorted((read for read in waiting if read > wanted), reverse=True)]:
        if farthest != wanted:
            del remaining[farthest]
        for tier, capacity in enumerate(capacities, start=1):
            used = sum(sizes[other] for other_tier, other in remaining.values() if other_tier == tier)
            if used + sizes[sample] <= capacity:
                for dropped in waiting.keys() - remaining.keys():
                    handed.tiers[dropped] = SOURCE
                    handed.given_up[dropped] = step
                    del waiting[dropped]
                waiting[wanted] = tier, sample
                handed.tiers[wanted] = tier
                return
    handed.given_up[wanted] = step


@given(jobs())
def test_what_waits_is_what_a_plain_simulation_keeps(job: Job) -> None:
    plan, sizes, capacities = job

    for expected in _simulate(plan, sizes, capacities):
        handed = decide_push(plan, expected.rank, sizes, capacities)

        assert handed.tiers.tolist() == expected.tiers.tolist()
        assert handed.from_rank.tolist() == expected.from_rank.tolist()
        assert handed.arrives.tolist() == expected.arrives.tolist()
        assert handed.given_up.tolist() == expected.given_up.tolist()


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 4), st.integers(0, 99))
def test_no_other_choice_keeps_more_samples_of_equal_size(
    samples: int, ranks: int, space: int, seed: int
) -> None:
    plan = AccessPlan(FullShuffle(samples, seed), 4, 2, ranks)
    handed = decide_push(plan, 0, [1] * samples, [space])

    steps = [step for step, reads in enumerate(_reads(plan)) for rank, _, _ in reads if rank == 0]
    waits = [(handed.arrives[read], steps[read]) for read in np.flatnonzero(handed.arrives >= 0)]

    def fits(chosen: tuple[tuple[int, int], ...]) -> bool:
        return all(
            sum(come <= step < use for come, use in chosen) <= space for step in range(max(steps, default=0))
        )

    best = max(
        count for count in range(len(waits) + 1) if any(fits(chosen) for chosen in combinations(waits, count))
    )
    assert int((handed.tiers > 0).sum()) == best


def test_a_sample_waits_on_one_rank_only_and_is_sent_where_another_read_it() -> None:
    plan = AccessPlan(FullShuffle(400, 1), 40, 5, ranks=4)

    handed = [decide_push(plan, rank, np.ones(400, np.int64), [400]) for rank in range(4)]

    hits = sum(int((each.tiers > 0).sum()) for each in handed)
    sent = sum(int(each.is_sent.sum()) for each in handed)
    assert hits == 4 * 400  # all but the first epoch
    assert abs(sent / hits - 0.75) < 4 * (0.75 * 0.25 / hits) ** 0.5
    for rank, each in enumerate(handed):
        assert not each.is_sent[each.from_rank == rank].any()
        assert (each.given_up == -1).all()


def test_one_rank_keeps_as_much_as_any_policy_can() -> None:
    """Every sample once an epoch: hits per epoch are at most the capacity, and reach it."""
    plan = AccessPlan(FullShuffle(100, 1), 10, 6)

    handed = decide_push(plan, 0, np.ones(100, np.int64), [30])

    assert int((handed.tiers > 0).sum()) == 5 * 30


@given(jobs())
def test_alone_a_rank_hits_as_often_as_min_does(job: Job) -> None:
    """Against MIN told another way: equal sizes, one tier, the cache as the set of next uses."""
    plan, _, capacities = job
    plan = replace(plan, ranks=1)
    space = sum(capacities[0]) // 7
    steps = [[sample for _, _, sample in reads] for reads in _reads(plan)]
    hits, cache = 0, dict[int, int]()
    for step, batch in enumerate(steps):
        hits += sum(sample in cache for sample in set(batch))
        for sample in set(batch):
            cache.pop(sample, None)
        for sample in set(batch):
            uses = (later for later in range(step + 1, len(steps)) if sample in steps[later])
            if (use := next(uses, None)) is not None:
                cache[sample] = use
        for sample in sorted(cache, key=lambda each: cache[each], reverse=True)[: max(0, len(cache) - space)]:
            del cache[sample]

    kept = decide_push(plan, 0, [7] * plan.samples, [space * 7])

    assert int((kept.tiers > 0).sum()) == hits
    assert not kept.is_sent.any()


def test_where_all_ranks_read_everything_nothing_is_handed_on() -> None:
    with pytest.raises(ConfigError, match="no one reader"):
        decide_push(AccessPlan(Sequential(4), 2, 1, ranks=2, split="replicated"), 0, [1] * 4, [4])
