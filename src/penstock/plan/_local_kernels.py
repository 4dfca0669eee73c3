"""The compiled loop of `penstock.plan.local`. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def seat(
    holders: NDArray[np.int32],
    batch: int,
    starts: NDArray[np.int64],
    seats: NDArray[np.int64],
    to: NDArray[np.int64],
) -> None:
    """Seat the samples of consecutive batches: each with the rank that holds it while that has seats, then anywhere.

    holders: int32[batches * batch], the rank that holds each sample, -1 for nobody.
    starts, seats: rank r reads the offsets seats[starts[r]:starts[r + 1]] of a batch.
    to: int64[batches * batch], written: the offset within its batch at which each sample is read.
    Complexity: O(batches (batch + ranks)).
    """
    ranks = starts.size - 1
    taken = np.empty(ranks, np.int64)
    for begin in range(0, holders.size, batch):
        taken[:] = starts[:-1]
        for index in range(begin, begin + batch):
            rank = holders[index]
            if rank >= 0 and taken[rank] < starts[rank + 1]:
                to[index] = seats[taken[rank]]
                taken[rank] += 1
            else:
                to[index] = -1
        rank = np.int32(0)
        for index in range(begin, begin + batch):
            if to[index] < 0:
                while taken[rank] == starts[rank + 1]:
                    rank += np.int32(1)
                to[index] = seats[taken[rank]]
                taken[rank] += 1
