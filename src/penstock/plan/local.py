"""The split `local`: every rank reads those samples of the global batch that it holds.

The gradient of a step depends on which samples its global batch has, not on which rank reads them. So each rank takes
the samples that it holds, up to its local batch, and what is left over is shared out among the ranks that are short:

    batch            a b c d e f g h
    held by rank     0 0 0 1 - 1 0 0
    uniform          0 0 0 0 1 1 1 1     d, g and h travel; e, which nobody holds, is read from the store
    local            0 0 0 1 1 1 0 1     only h travels: rank 0 holds more than its share

With B samples drawn at random, a rank holds B/N of them give or take sqrt(B/N), so that a share of about
sqrt(N / B / (2 pi)) is left over and moves, instead of (N-1)/N: 7 % at 32 samples per rank, 5 % at 64, 2.5 % at 256.
It pays where reading from other ranks makes the training wait; not at all where every rank holds the data set.

**What it changes**: which samples share a rank's local batch. Averaged gradients do not notice. What is computed over
a local batch alone does: the statistics of BatchNorm (unless synchronised), losses that compare samples within a
batch. There a rank sees its own samples far more often together than others', every epoch. It is therefore never
chosen by itself.

Why an order and not a `Split`: a split is asked for offsets in a batch of so many, and answers from these numbers
alone; it sees neither epoch nor samples. Given both, every question of an access plan (who reads, when next, at which
position) would need a second form. As a permutation of the positions within each global batch, before a split that
knows nothing of it, all of them are answered as before, `position_of` included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.access import AccessPlan
from penstock.plan.bijection import _groups, as_ids
from penstock.plan.explicit import Explicit
from penstock.plan.frequency import check_partition
from penstock.plan.orders import OfOrder, Order, RepeatingOrder
from penstock.plan.splits import Split

Ids = NDArray[np.int64]

#: Positions arranged at once, and how many such blocks are kept: 64 MB in all.
_BLOCK = 1 << 18
_BLOCKS_KEPT = 16


def split_locally(plan: AccessPlan, rank_of: ArrayLike) -> AccessPlan:
    """Return the plan by which every rank reads the samples of each batch that it holds.

    Global batches and the sizes of local batches stay as they are; every rank computes it alike, without a message.
    Asking for any sample of a batch arranges the whole batch: O(B) instead of O(B / N) a step and rank.

    rank_of: int[F], the rank that holds each sample, -1 for nobody: `Homes.rank_of` of any placement.
    Raises: ConfigError for ranks that are none of the plan's, or a split by which several ranks read a sample.

    >>> from penstock.plan import Sequential
    >>> plan = AccessPlan(Sequential(8), batch_size=8, epochs=1, ranks=2)
    >>> split_locally(plan, [0, 0, 0, 1, -1, 1, 0, 0]).local_batch(rank=1, epoch=0, step=0)
    array([3, 5, 4, 7])
    """
    if plan.is_cut_by_order:
        raise ConfigError(
            f"split 'local' arranges batches of one size, and {type(plan.order).__name__} says itself where batches "
            "begin and end: use another placement"
        )
    check_partition(plan)
    assert isinstance(plan.split, Split), "a plan keeps its split as one"
    arranged = Local(plan.order, plan.batch_size, plan.ranks, plan.split, rank_of)
    if isinstance(plan.order, RepeatingOrder):
        return replace(plan, order=Explicit(arranged.epoch_ids, plan.samples))
    return replace(plan, order=arranged)


@dataclass(frozen=True, slots=True, eq=False)
class Local(OfOrder):
    """An order within whose global batches the samples are where the rank that holds them reads.

    Made by `split_locally`; of use only in a plan with the same batch size, ranks and split.

    order: which samples make a batch; each epoch reads a sample once at most.
    rank_of: int32[F], the rank that holds each sample, -1 for nobody.
    """

    order: Order
    batch_size: int
    ranks: int
    split: Split
    rank_of: ArrayLike = field(repr=False)
    _blocks: Recent[tuple[int, int], tuple[Ids, Ids]] = field(
        default_factory=lambda: Recent(_BLOCKS_KEPT), init=False, repr=False
    )

    def __post_init__(self) -> None:
        rank_of = np.asarray(self.rank_of)
        if rank_of.shape != (self.order.samples,) or rank_of.dtype.kind not in "iu":
            raise ConfigError(
                f"rank_of is {rank_of.dtype} of shape {rank_of.shape}; it holds the rank of each of the "
                f"{self.order.samples:,} samples, or -1"
            )
        if rank_of.min() < -1 or rank_of.max() >= self.ranks:
            raise ConfigError(
                f"rank_of holds ranks {rank_of.min()} to {rank_of.max()}; each is in [0, {self.ranks}), or -1 where "
                "nobody holds the sample: place the samples for this plan"
            )
        object.__setattr__(self, "rank_of", rank_of.astype(np.int32, copy=False))

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        wanted = as_ids(positions, self.length(epoch), "positions")
        return self._by_block(epoch, wanted, lambda block, offsets: block[0][offsets])

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        before = self.order.position_of(epoch, samples)
        found = before >= 0
        after = np.full(before.shape, -1, np.int64)
        after[found] = self._by_block(epoch, before[found], lambda block, offsets: block[1][offsets])
        return after

    def epoch_ids(self, epoch: int) -> Ids:
        """Return all samples of the epoch in their places: int64[length]."""
        return self.at(epoch, np.arange(self.length(epoch)))

    def _by_block(self, epoch: int, positions: Ids, answer: Callable[[tuple[Ids, Ids], Ids], Ids]) -> Ids:
        """Ask each block of batches that the positions lie in."""
        size = self.batch_size * max(1, _BLOCK // self.batch_size)
        flat = positions.ravel()
        answers = np.empty(flat.size, np.int64)
        for number, members in _groups(flat // size):
            block = self._blocks.get((epoch, number), partial(self._arrange, epoch, number * size, size))
            answers[members] = answer(block, flat[members] - number * size)
        return answers.reshape(positions.shape)

    def _arrange(self, epoch: int, begin: int, size: int) -> tuple[Ids, Ids]:
        """The samples at the positions from `begin` on, and where those that the order has there are read."""
        from penstock.plan import _local_kernels as kernels  # loads numba

        before = np.arange(begin, min(begin + size, self.length(epoch)))
        samples = self.order.at(epoch, before)
        holders = np.asarray(self.rank_of, np.int32)[samples]
        to = np.empty(before.size, np.int64)
        full = before.size - before.size % self.batch_size
        for part, batch in ((slice(0, full), self.batch_size), (slice(full, None), before.size - full)):
            if batch:
                kernels.seat(holders[part], batch, *self._seats(batch), to[part])
        after = before - before % self.batch_size + to
        arranged = np.empty_like(samples)
        arranged[after - begin] = samples
        return arranged, after

    def _seats(self, batch: int) -> tuple[Ids, Ids]:
        seats = [self.split.offsets(rank, self.ranks, batch) for rank in range(self.ranks)]
        return np.concatenate(([0], np.cumsum([part.size for part in seats]))), np.concatenate(seats)
