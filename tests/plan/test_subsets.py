"""Ranks that each have samples of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.subsets import own_subset


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_subsets_make_up_the_data_set_and_none_is_larger_than_its_share(samples: int, ranks: int) -> None:
    sizes = [own_subset(samples, 0, rank, ranks).samples for rank in range(ranks)]

    assert sum(sizes) == samples
    assert max(sizes) == -(-samples // ranks)
    assert sizes == sorted(sizes, reverse=True)


def test_every_rank_has_a_seed_of_its_own_that_others_jobs_do_not_have() -> None:
    seeds = [
        own_subset(100, seed, rank, ranks).seed
        for seed in (0, 1)
        for ranks in (2, 3)
        for rank in range(ranks)
    ]

    assert len(set(seeds)) == len(seeds)
    assert own_subset(100, 0, 1, 2) == own_subset(100, 0, 1, 2)
