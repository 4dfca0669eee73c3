"""The compiled loop of `penstock.policy.push`. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel
from penstock.policy._space_kernels import tier_with_space


@kernel
def _push_heap(heap: NDArray[np.int64], count: int, value: int) -> None:
    """Add a value to a heap of `count` values whose largest is heap[0]."""
    place = count
    while place > 0:
        above = (place - 1) // 2
        if heap[above] >= value:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = value


@kernel
def _pop_heap(heap: NDArray[np.int64], count: int) -> int:
    """Take the largest value out of a heap of `count` values."""
    largest = int(heap[0])
    value = heap[count - 1]
    place, below = 0, 1
    while below < count - 1:
        if below + 1 < count - 1 and heap[below + 1] > heap[below]:
            below += 1
        if heap[below] <= value:
            break
        heap[place] = heap[below]
        place, below = below, 2 * below + 1
    heap[place] = value
    return largest


@kernel
def keep_nearest(
    arriving: NDArray[np.int64],
    arrives: NDArray[np.int64],
    steps: NDArray[np.int64],
    sizes_bytes: NDArray[np.int64],
    space: NDArray[np.int64],
    tiers: NDArray[np.int8],
    given_up: NDArray[np.int64],
) -> None:
    """Keep samples from their arrival to their read; where space is short, give up what is read last.

    A read is named by its index into the access string, so a larger index is a farther use.

    arriving: int64[m], the reads whose samples arrive, in the order of arrival, each before the step of its read.
    arrives, steps, sizes_bytes: int64[reads], step at whose end it arrives and step of the read, bytes of the sample.
    space: int64[tiers], free bytes, changed. tiers, given_up: written as `Handed` has them, from -1.
    Complexity: O(reads log reads). The heap is not cleared of what was read: such entries are smaller than all that
        can still be given up, so they lie below them and never come out first.
    """
    heap = np.empty(arriving.size, np.int64)
    taken = np.empty(arriving.size, np.int64)
    in_heap = 0
    come = 0
    for read in range(steps.size):
        while come < arriving.size and arrives[arriving[come]] < steps[read]:
            new = arriving[come]
            come += 1
            size_bytes = sizes_bytes[new]
            tier = tier_with_space(space, size_bytes)
            count = 0
            while tier < 0 and in_heap > 0 and heap[0] > new:
                farthest = _pop_heap(heap, in_heap)
                in_heap -= 1
                taken[count] = farthest
                count += 1
                space[tiers[farthest] - 1] += sizes_bytes[farthest]
                tier = tier_with_space(space, size_bytes)
            for index in range(count):
                farthest = taken[index]
                if tier >= 0:
                    tiers[farthest] = -1
                    given_up[farthest] = arrives[new]
                else:  # all that is farther would not make enough space: it stays
                    space[tiers[farthest] - 1] -= sizes_bytes[farthest]
                    _push_heap(heap, in_heap, farthest)
                    in_heap += 1
            if tier < 0:
                given_up[new] = arrives[new]
                continue
            space[tier] -= size_bytes
            tiers[new] = tier + 1
            _push_heap(heap, in_heap, new)
            in_heap += 1
        if tiers[read] > 0:
            space[tiers[read] - 1] += sizes_bytes[read]
