"""What a rank's tiers give up after its last use, and when that leaves space for other samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.plan import AccessPlan
from penstock.plan.frequency import last_batches_of_rank
from penstock.policy import decisions as d
from penstock.policy.decisions import State
from penstock.policy.placement import Placement

#: Space of a tier in which no spare fits.
_NO_SPACE = -(1 << 60)


class Dropping:
    """Samples that no later batch has are evicted, so that spares find space. One rank's, whose state has one row.

    By the rules of `decisions`, a sample gives its space to spares once a Load of its last batch is over. A Load of an
    earlier batch may still read its bytes in memory then. So the space counts here once all batches that have the
    sample are over and the driver has evicted it; what the rules count by themselves is taken back.

    placement: with spares.
    """

    def __init__(self, plan: AccessPlan, rank: int, placement: Placement) -> None:
        assert placement.spares is not None, "nothing is dropped without"
        self.spares = placement.spares
        samples = np.concatenate([placement.fill_order, self.spares])
        #: int32[n], number of the last batch with each sample that is kept, and then with each spare; -1 for none.
        self.last_batches = last_batches_of_rank(plan, rank, samples)
        order = np.argsort(self.last_batches, kind="stable")
        #: By the last batch: samples, and that batch. From `_next` on, some batch may have them still.
        self._samples, self._last = samples[order], self.last_batches[order]
        self._next = 0
        #: Samples whose batches are over, and that were on their way into a tier then.
        self._late: list[int] = []
        self._is_spare = np.zeros(plan.samples, bool)
        self._is_spare[self.spares] = True
        self._has_batch = [plan.local_batch_sizes(rank, epoch) > 0 for epoch in range(plan.epochs)]

    def begin(self, s: State) -> None:
        """Begin with a state that knows `spares` and `last_batches`."""
        rows = range(int(s.ints[d.ROWS]) + d.ROW_COLUMNS, int(s.ints[d.GROUP]), d.ROW_COLUMNS)
        self._spare_row, tiers = rows[0], rows[1 : int(s.ints[d.TIERS]) + 1]
        self._spaces = [row + d.SPACE for row in tiers]
        self._free_bytes = [int(s.ints[space]) for space in self._spaces]
        self.hide_space(s)

    def number_at(self, epoch: int, step: int) -> int:
        """Return the number of the batch of a step: how many are before it."""
        before = sum(map(np.count_nonzero, self._has_batch[:epoch]))
        return int(before + (np.count_nonzero(self._has_batch[epoch][:step]) if step else 0))

    def hide_space(self, s: State) -> None:
        """Let no spare have space."""
        for space in self._spaces:
            s.ints[space] = _NO_SPACE

    def show_space(self, s: State) -> bool:
        """Let spares have what is free; return whether there are both."""
        is_wanted: bool = s.ints[self._spare_row + d.FILL_NEXT] < s.ints[self._spare_row + d.FILL_END]
        if not is_wanted or max(self._free_bytes, default=0) <= 0:
            return False
        for space, free_bytes in zip(self._spaces, self._free_bytes, strict=True):
            s.ints[space] = free_bytes
        return True

    def filled(self, s: State, samples: Sequence[int], rests: Sequence[int]) -> None:
        """Take note that samples are brought into tiers for no batch."""
        for sample, rest in zip(samples, rests, strict=True):
            if self._is_spare[sample]:
                self._free_bytes[rest - 1] -= s.sizes[sample]

    def ended(self, tier: int) -> None:
        """Let no spare have space in a tier from now on."""
        self._free_bytes[tier - 1] = _NO_SPACE

    def to_evict(self, s: State, oldest: int) -> list[int]:
        """Return the samples to evict now; no spare has their space before `evicted`.

        oldest: number of the first batch that is not over.
        """
        if s.ints[self._spare_row + d.FILL_NEXT] == s.ints[self._spare_row + d.FILL_END]:
            return []  # nothing wants the space, and a disk has them for the next run
        until = self._next + int(np.searchsorted(self._last[self._next :], oldest))
        over = self._late + self._samples[self._next : until].tolist()
        self._next, self._late, found = until, [], []
        for sample in over:
            copy = s.copy_begin[sample]
            if s.copies[copy, d.COPY_STATE] in (d.PENDING, d.ON_WAY):
                self._late.append(sample)
            elif s.copies[copy, d.COPY_TIER] > 0:  # a spare that found no space has none
                s.copies[copy, d.COPY_STATE] = d.GONE
                found.append(sample)
        return found

    def evicted(self, s: State, samples: Sequence[int]) -> None:
        """Take note that samples have been evicted."""
        for sample in samples:
            self._free_bytes[s.copies[s.copy_begin[sample], d.COPY_TIER] - 1] += s.sizes[sample]
