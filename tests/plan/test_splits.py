"""Shares of a batch: that they are a partition, and whose they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.test_split_contract import backwards
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import (
    AccessPlan,
    Assigned,
    Balanced,
    FullShuffle,
    Replicated,
    Shares,
    Split,
    Strided,
    Uniform,
)
from penstock.plan.splits import as_split, imbalanced


def split_for(draw: st.DrawFn, ranks: int) -> Split:
    weights = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any)
    known: list[Split] = [Balanced(), Uniform(), Strided(), imbalanced(ranks), Assigned(backwards)]
    return draw(st.one_of(st.sampled_from(known), weights.map(lambda drawn: Shares(tuple(drawn)))))


@st.composite
def splits(draw: st.DrawFn) -> tuple[Split, int, int]:
    ranks = draw(st.integers(1, 12))
    return split_for(draw, ranks), ranks, draw(st.integers(1, 60))


@given(splits())
def test_ranks_partition_the_batch_and_agree_on_who_reads_what(case: tuple[Split, int, int]) -> None:
    split, ranks, batch = case
    shares = [split.offsets(rank, ranks, batch) for rank in range(ranks)]
    offsets = np.arange(batch)

    assert sorted(np.concatenate(shares).tolist()) == offsets.tolist()
    for rank, share in enumerate(shares):
        assert split.size(rank, ranks, batch) == share.size
        assert split.reader(ranks, batch, share).tolist() == [rank] * share.size


def local_batches(split: Split, ranks: int, batch: int) -> list[list[int]]:
    return [split.offsets(rank, ranks, batch).tolist() for rank in range(ranks)]


def test_uniform_slices_are_as_the_thesis_cuts_them() -> None:
    assert local_batches(Uniform(), 4, 10) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert local_batches(Uniform(), 4, 9) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]
    assert local_batches(Uniform(), 4, 2) == [[0], [1], [], []]


@given(st.integers(1, 40), st.integers(1, 300))
def test_balanced_slices_are_those_of_numpy_and_of_uniform_where_the_ranks_divide_the_batch(
    ranks: int, batch: int
) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(batch), ranks)]
    assert local_batches(Balanced(), ranks, batch) == expected
    if batch % ranks == 0:
        assert local_batches(Uniform(), ranks, batch) == expected


@pytest.mark.parametrize(("batch", "ranks"), [(256, 48), (100, 64), (8, 7)])
def test_by_default_every_rank_takes_part_in_every_step(batch: int, ranks: int) -> None:
    plan = AccessPlan(FullShuffle(50_000), batch, epochs=2, ranks=ranks)
    plan.check_equal_steps()

    sizes = [plan.local_batch_size(rank, 0, 0) for rank in range(ranks)]
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) == 1


def test_strided_samples_are_dealt_like_cards() -> None:
    assert local_batches(Strided(), 3, 7) == [[0, 3, 6], [1, 4], [2, 5]]


def test_whole_batches_go_to_every_rank() -> None:
    assert local_batches(Replicated(), 3, 2) == [[0, 1]] * 3
    assert Replicated().reader(3, 2, np.arange(2)).tolist() == [0, 0]


@pytest.mark.parametrize(("ranks", "batch"), [(2, 100), (4, 100), (8, 400)])
def test_imbalanced_gives_half_of_the_ranks_four_times_the_share_of_the_others(
    ranks: int, batch: int
) -> None:
    sizes = [imbalanced(ranks).size(rank, ranks, batch) for rank in range(ranks)]

    assert sum(sizes) == batch
    assert {4 * small for small in sizes[ranks // 2 :]} == set(sizes[: ranks // 2])


def test_one_rank_alone_reads_everything_under_every_split() -> None:
    for name in ("balanced", "uniform", "strided", "replicated", "imbalanced"):
        assert as_split(name, ranks=1).size(0, 1, 7) == 7


def test_shares_that_add_up_to_the_batch_are_the_local_batches() -> None:
    assert [Shares((5, 0, 3)).size(rank, 3, 8) for rank in range(3)] == [5, 0, 3]
    assert [Shares((5, 0, 3)).size(rank, 3, 16) for rank in range(3)] == [10, 0, 6]


def test_a_split_is_meant_by_its_name_its_shares_or_a_function() -> None:
    assert as_split("strided", 2) == Strided()
    assert as_split((3, 1), 2) == Shares((3, 1))
    assert as_split(backwards, 2) == Assigned(backwards)
    assert as_split(Replicated(), 2) == Replicated()


def test_what_is_no_split_is_refused() -> None:
    for wrong in ("unifrom", 4, None):
        with pytest.raises(ConfigError, match=f"split is {wrong!r}; it is one of 'balanced', 'uniform'"):
            as_split(wrong, 2)  # type: ignore[arg-type]


@for_each("weights", [(), (0, 0), (1, -1), (0.5, 0.5)])
def test_shares_that_cannot_be_are_refused(weights: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"split shares are .*; they are integers, one per rank"):
        Shares(weights)


def test_shares_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="split has 2 shares for 3 ranks; each rank needs one"):
        Shares((1, 1)).size(0, 3, 8)


@for_each(
    ("answer", "complaint"),
    [
        ([0, 1, 2], "of shape \\(3,\\) for a batch of 4"),
        ([0.0, 1.0, 0.0, 1.0], "returned float64"),
        ([0, 1, 2, 0], "returned ranks 0 to 2 for 2 ranks"),
        ([0, -1, 1, 0], "returned ranks -1 to 1 for 2 ranks"),
    ],
)
def test_a_function_that_does_not_split_is_refused(answer: list[int], complaint: str) -> None:
    split = Assigned(lambda batch, ranks: answer)

    with pytest.raises(ConfigError, match=complaint):
        split.size(0, 2, 4)
