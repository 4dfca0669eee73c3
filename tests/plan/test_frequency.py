"""How often, by whom and when first samples are read: counts and the lemmas of the thesis."""

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.plan.small_plans import plans

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, FullShuffle, Sequential
from penstock.plan import frequency as module
from penstock.plan.access import first_steps
from penstock.plan.frequency import (
    blocks_of_samples,
    first_reads,
    readers_by_sample,
    readers_of_epoch,
    steps_of_reads,
    uses_of,
    uses_of_ranks,
)


def _all_reads(plan: AccessPlan) -> list[tuple[int, int, int]]:
    """(step over all epochs, rank, sample) of every read, step by step and rank by rank."""
    reads, step = [], 0
    for epoch in range(plan.epochs):
        for local in range(plan.steps(epoch)):
            for rank in range(plan.ranks):
                reads += [(step, rank, int(k)) for k in plan.local_batch(rank, epoch, local)]
            step += 1
    return reads


def _counts(plan: AccessPlan) -> NDArray[np.int64]:
    """How often each rank reads each sample: int64[ranks, F]."""
    return np.array([plan.uses(rank)[0] for rank in range(plan.ranks)])


# Lemmas 3.1 and 3.2


@given(st.integers(1, 60), st.integers(1, 30), st.integers(2, 6), st.integers(0, 99))
def test_who_reads_a_sample_often_leaves_another_rank_that_reads_it_seldom(
    samples: int, epochs: int, ranks: int, seed: int
) -> None:
    """Lemma 3.1, with the delta that the rank's count stands for."""
    counts = _counts(AccessPlan(FullShuffle(samples, seed), 7, epochs, ranks))

    for rank, sample in zip(*np.nonzero(counts * ranks >= epochs), strict=True):
        delta = Fraction(int(counts[rank, sample]) * ranks, epochs) - 1
        assert ceil((1 + delta) * Fraction(epochs, ranks)) == counts[rank, sample]
        at_most = ceil((ranks - 1 - delta) / (ranks - 1) * Fraction(epochs, ranks))
        assert np.delete(counts[:, sample], rank).min() <= at_most


@given(st.integers(1, 60), st.integers(1, 30), st.integers(2, 6), st.integers(0, 99))
def test_who_reads_a_sample_seldom_leaves_another_rank_that_reads_it_often(
    samples: int, epochs: int, ranks: int, seed: int
) -> None:
    """Lemma 3.2, likewise."""
    counts = _counts(AccessPlan(FullShuffle(samples, seed), 7, epochs, ranks))

    for rank, sample in zip(*np.nonzero(counts * ranks <= epochs), strict=True):
        delta = 1 - Fraction(int(counts[rank, sample]) * ranks, epochs)
        assert floor((1 - delta) * Fraction(epochs, ranks)) == counts[rank, sample]
        at_least = floor((ranks - 1 + delta) / (ranks - 1) * Fraction(epochs, ranks))
        assert np.delete(counts[:, sample], rank).max() >= at_least


# What a plan is asked


@given(plans(), st.integers(1, 200))
def test_uses_are_those_of_the_access_string(plan: AccessPlan, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READS_AT_ONCE", at_once)
        of_ranks = list(uses_of_ranks(plan, range(plan.ranks)))

    for rank in range(plan.ranks):
        string = plan.string(rank).tolist()
        assert plan.reads(rank) == len(string)
        for uses in (uses_of(plan, rank), of_ranks[rank]):
            assert uses.samples.tolist() == sorted(set(string))
            assert uses.counts.tolist() == [string.count(sample) for sample in uses.samples]
            assert uses.first.tolist() == [string.index(sample) for sample in uses.samples]


@given(plans())
def test_every_read_has_its_step_and_its_reader(plan: AccessPlan) -> None:
    reads = _all_reads(plan)
    begins = first_steps(plan).tolist()
    found = []
    for epoch in range(plan.epochs):
        samples, ranks = readers_of_epoch(plan, epoch)
        steps = begins[epoch] + np.arange(samples.size) // plan.batch_size
        found += list(zip(steps.tolist(), ranks.tolist(), samples.tolist(), strict=True))

    assert sorted(found) == sorted(reads)
    for rank in range(plan.ranks):
        assert steps_of_reads(plan, rank).tolist() == [step for step, by, _ in reads if by == rank]


@given(plans())
def test_readers_of_a_sample_are_listed_in_the_order_of_time(plan: AccessPlan) -> None:
    wanted = np.arange(0, plan.samples, 2)

    starts, ranks = readers_by_sample(plan, wanted)

    reads = _all_reads(plan)
    for index, sample in enumerate(wanted.tolist()):
        listed = [rank for rank in ranks[starts[index] : starts[index + 1]].tolist() if rank >= 0]
        steps = {(step, rank) for step, rank, other in reads if other == sample}
        assert sorted(listed) == sorted(rank for _, rank, other in reads if other == sample)
        if len(steps) == len(listed) == len({step for step, _ in steps}):
            assert listed == [rank for _, rank in sorted(steps)]


@given(plans())
def test_the_first_reader_of_a_sample_is_found(plan: AccessPlan) -> None:
    first = first_reads(plan)

    reads = _all_reads(plan)
    for sample in range(plan.samples):
        steps = [(step, rank) for step, rank, other in reads if other == sample]
        if not steps:
            assert (first.rank_of[sample], first.step_of[sample]) == (-1, -1)
        else:
            earliest = min(steps)[0]
            assert first.step_of[sample] == earliest
            assert (earliest, first.rank_of[sample]) in steps


def test_blocks_of_samples_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READERS_AT_ONCE", 100)
    monkeypatch.setattr(module, "_SMALLEST_BLOCK", 8)
    plan = AccessPlan(Sequential(30), 10, 10)
    samples: NDArray[np.int64] = np.arange(30)

    blocks = [samples[block].size for block in blocks_of_samples(plan, samples)]

    assert blocks == [10, 10, 10]


def test_a_split_by_which_ranks_share_samples_is_refused() -> None:
    plan = AccessPlan(Sequential(10), 5, 1, ranks=2, split="replicated")

    with pytest.raises(ConfigError, match="no one reader"):
        first_reads(plan)
