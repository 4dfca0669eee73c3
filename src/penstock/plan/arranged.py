"""An order of the batches of another, with samples where the ranks that hold them read: see `penstock.plan.local`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.plan._recent import Recent
from penstock.plan.bijection import _groups, as_ids
from penstock.plan.explicit import Explicit
from penstock.plan.orders import OfOrder, Order, RepeatingOrder
from penstock.plan.splits import Split

Ids = NDArray[np.int64]

#: Positions arranged at once, and how many such blocks are kept: 64 MB in all.
_BLOCK = 1 << 18
_BLOCKS_KEPT = 16


def arranged(
    order: Order,
    batch_size: int,
    ranks: int,
    split: Split,
    held: NDArray[np.int32] | Callable[[], NDArray[np.int32]],
) -> Order:
    """Return the order of the same batches, for a plan of these arguments. held: as of `Arranged`."""
    found = Arranged(order, batch_size, ranks, split, held)
    return Explicit(found.epoch_ids, order.samples) if isinstance(order, RepeatingOrder) else found


@dataclass(frozen=True, slots=True, eq=False)
class Arranged(OfOrder):
    """An order within whose global batches the samples are where the rank that holds them reads.

    Of use only in a plan with the same batch size, ranks and split.

    order: which samples make a batch; each epoch reads a sample once at most.
    held: int32[F], the rank that holds each sample, -1 for nobody; or what returns that, asked once.
    """

    order: Order
    batch_size: int
    ranks: int
    split: Split
    held: NDArray[np.int32] | Callable[[], NDArray[np.int32]] = field(repr=False)
    _found: Recent[None, NDArray[np.int32]] = field(default_factory=lambda: Recent(1), init=False, repr=False)
    _blocks: Recent[tuple[int, int], tuple[Ids, Ids]] = field(
        default_factory=lambda: Recent(_BLOCKS_KEPT), init=False, repr=False
    )

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
        holders = self._rank_of()[samples]
        to = np.empty(before.size, np.int64)
        full = before.size - before.size % self.batch_size
        for part, batch in ((slice(0, full), self.batch_size), (slice(full, None), before.size - full)):
            if batch:
                kernels.seat(holders[part], batch, *self._seats(batch), to[part])
        after = before - before % self.batch_size + to
        arranged = np.empty_like(samples)
        arranged[after - begin] = samples
        return arranged, after

    def _rank_of(self) -> NDArray[np.int32]:
        held = self.held
        return self._found.get(None, held) if callable(held) else held

    def _seats(self, batch: int) -> tuple[Ids, Ids]:
        seats = [self.split.offsets(rank, self.ranks, batch) for rank in range(self.ranks)]
        return np.concatenate(([0], np.cumsum([part.size for part in seats]))), np.concatenate(seats)
