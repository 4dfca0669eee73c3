"""The compiled loops of `penstock.policy.homes`: one pass over samples or their reads each. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel
from penstock.policy._space_kernels import tier_with_space


@kernel
def find_favourites(
    starts: NDArray[np.int64],
    ranks: NDArray[np.int32],
    sizes_bytes: NDArray[np.int64],
    space: NDArray[np.int64],
    best: NDArray[np.int32],
    uses: NDArray[np.int32],
    total: NDArray[np.int32],
) -> None:
    """Find for each sample the rank with space that reads it most often; of several, the first to read it.

    starts, ranks: sample i is read by ranks[starts[i]:starts[i + 1]], in the order of time, -1 being nobody.
    sizes_bytes: int64[n], of these samples. space: int64[ranks, tiers].
    best, uses, total: int32[n], written: that rank (-1: no reader has space), its reads, the reads of all.
    """
    counts = np.zeros(space.shape[0], np.int32)
    for sample in range(sizes_bytes.size):
        best[sample], uses[sample], total[sample] = -1, 0, 0
        for read in range(starts[sample], starts[sample + 1]):
            if ranks[read] >= 0:
                counts[ranks[read]] += 1
                total[sample] += 1
        for read in range(starts[sample], starts[sample + 1]):
            rank = ranks[read]
            if rank < 0:
                continue
            if counts[rank] > uses[sample] and tier_with_space(space[rank], sizes_bytes[sample]) >= 0:
                best[sample], uses[sample] = rank, counts[rank]
        for read in range(starts[sample], starts[sample + 1]):
            if ranks[read] >= 0:
                counts[ranks[read]] = 0


@kernel
def settle(
    samples: NDArray[np.int64],
    ranks: NDArray[np.int32],
    sizes_bytes: NDArray[np.int64],
    space: NDArray[np.int64],
    rank_of: NDArray[np.int32],
    tier_of: NDArray[np.int8],
) -> None:
    """Give samples[i] a home on ranks[i] if it has space, in this order, in the fastest tier with space.

    sizes_bytes: int64[F]. space, rank_of, tier_of: written.
    """
    for index in range(samples.size):
        sample, rank = samples[index], ranks[index]
        if rank < 0:
            continue
        tier = tier_with_space(space[rank], sizes_bytes[sample])
        if tier >= 0:
            space[rank, tier] -= sizes_bytes[sample]
            rank_of[sample] = rank
            tier_of[sample] = tier + 1


@kernel
def settle_anywhere(
    samples: NDArray[np.int64],
    sizes_bytes: NDArray[np.int64],
    space: NDArray[np.int64],
    rank_of: NDArray[np.int32],
    tier_of: NDArray[np.int8],
) -> None:
    """Give each sample a home on the first rank that has space, looking on from where the last one found it."""
    ranks = space.shape[0]
    first = 0
    for sample in samples:
        for turn in range(ranks):
            rank = (first + turn) % ranks
            tier = tier_with_space(space[rank], sizes_bytes[sample])
            if tier >= 0:
                space[rank, tier] -= sizes_bytes[sample]
                rank_of[sample] = rank
                tier_of[sample] = tier + 1
                first = rank
                break
