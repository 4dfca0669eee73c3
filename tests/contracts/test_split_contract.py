"""What every split must do; a new one is added to `SPLITS` and has all of these tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.plan import (
    AccessPlan,
    Assigned,
    Balanced,
    Replicated,
    Sequential,
    Shares,
    Split,
    Strided,
    Uniform,
)
from penstock.plan.splits import imbalanced


def backwards(batch: int, ranks: int) -> NDArray[np.int64]:
    """A user's own: dealt from the last rank to the first, two samples at a time."""
    return ranks - 1 - np.arange(batch) // 2 % ranks


#: By the number of ranks.
SPLITS: dict[str, Callable[[int], Split]] = {
    "balanced": lambda ranks: Balanced(),
    "uniform": lambda ranks: Uniform(),
    "strided": lambda ranks: Strided(),
    "whole": lambda ranks: Replicated(),
    "imbalanced": imbalanced,
    "shares": lambda ranks: Shares(tuple(range(ranks))) if ranks > 1 else Shares((3,)),
    "assigned": lambda ranks: Assigned(backwards),
}


CASES = [(split_for, ranks) for split_for in SPLITS.values() for ranks in (1, 2, 3, 7)]
every_split = for_each(
    ("split_for", "ranks"), CASES, ids=[f"{name}-{n}" for name in SPLITS for n in (1, 2, 3, 7)]
)


class TestSplitContract:
    @every_split
    def test_every_sample_of_a_batch_has_a_reader(
        self, split_for: Callable[[int], Split], ranks: int
    ) -> None:
        split = split_for(ranks)
        assert isinstance(split, Split)
        for batch in range(1, 30):
            shares = [split.offsets(rank, ranks, batch).tolist() for rank in range(ranks)]
            assert {offset for share in shares for offset in share} == set(range(batch))
            assert all(len(set(share)) == len(share) for share in shares)

    @every_split
    def test_all_answers_agree_on_who_reads_what(self, split_for: Callable[[int], Split], ranks: int) -> None:
        split = split_for(ranks)
        for batch in range(1, 30):
            shares = [split.offsets(rank, ranks, batch).tolist() for rank in range(ranks)]
            everything = np.arange(batch)[::-1]
            readers = split.reader(ranks, batch, everything)
            for rank, share in enumerate(shares):
                assert split.size(rank, ranks, batch) == len(share)
            expected = [
                min(rank for rank in range(ranks) if offset in shares[rank]) for offset in everything.tolist()
            ]
            assert readers.tolist() == expected
            assert readers.dtype == np.int64

    @every_split
    def test_answers_have_the_shape_of_the_question(
        self, split_for: Callable[[int], Split], ranks: int
    ) -> None:
        split, offsets = split_for(ranks), np.arange(12).reshape(3, 4)

        assert split.reader(ranks, 12, offsets).shape == (3, 4)
        assert split.reader(ranks, 12, offsets[:0]).shape == (0, 4)

    @every_split
    def test_a_plan_takes_it(self, split_for: Callable[[int], Split], ranks: int) -> None:
        plan = AccessPlan(Sequential(40), 12, 1, ranks, split_for(ranks))

        for step, batch in ((0, 12), (3, 4)):
            for rank in range(ranks):
                expected = (12 * step + plan.split.offsets(rank, ranks, batch)).tolist()  # type: ignore[union-attr]
                assert plan.local_batch(rank, 0, step).tolist() == expected
