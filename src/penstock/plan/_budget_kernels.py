"""The compiled loops of `penstock.plan.budget`. Loads numba.

Measured: `benchmarks/budget.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def cut(
    lengths: NDArray[np.int64],
    tokens: int,
    largest: int,
    multiple: int,
    padded: bool,
    open_batch: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> int:
    """Cut samples that follow each other into batches, each as long as it fits; return how many were closed.

    lengths: int64[n], in tokens; each counts as the next multiple of `multiple`, one at least.
    tokens: of a batch at most: its samples times the longest of them if padded, else their sum.
    open_batch: int64[4], in and out: of the batch that is not closed yet, samples, the longest, their sum; and what all
        closed ones take when padded.
    sizes: int64[n + 1], written: samples of each closed batch.
    Complexity: O(n).
    """
    count, longest, total, taken = open_batch[0], open_batch[1], open_batch[2], open_batch[3]
    closed = 0
    for index in range(lengths.size):
        length = max(np.int64(1), (lengths[index] + multiple - 1) // multiple * multiple)
        longer = max(longest, length)
        need = (count + 1) * longer if padded else total + length
        if count > 0 and (need > tokens or count >= largest):
            sizes[closed] = count
            taken += count * longest
            closed += 1
            count, longest, total, longer = 0, 0, 0, length
        count += 1
        longest = longer
        total += length
    open_batch[0], open_batch[1], open_batch[2], open_batch[3] = count, longest, total, taken
    return closed


@kernel
def deal(
    by_length: NDArray[np.int64],
    sizes: NDArray[np.int64],
    batches: NDArray[np.int64],
    places: NDArray[np.int64],
) -> None:
    """Put the batches of a pool in their order: write which of the pool's samples stands at each place.

    by_length: int64[n], the pool's samples, batch after batch. sizes: int64[batches]. batches: their order.
    places: int64[n], written. Complexity: O(n).
    """
    begins = np.empty(sizes.size + 1, np.int64)
    begins[0] = 0
    for batch in range(sizes.size):
        begins[batch + 1] = begins[batch] + sizes[batch]
    at = 0
    for batch in batches:
        for index in range(begins[batch], begins[batch + 1]):
            places[at] = by_length[index]
            at += 1
