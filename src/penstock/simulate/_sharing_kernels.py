"""The compiled loops of `penstock.simulate.sharing`: one pass over an epoch's reads each. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def group_by_sample(
    samples: NDArray[np.int64],
    ranks: NDArray[np.int32],
    rank_of: NDArray[np.int32],
    starts: NDArray[np.int64],
    keepers: NDArray[np.int32],
) -> None:
    """List who keeps each sample: keepers[starts[k]:starts[k + 1]], its home first.

    samples, ranks: of all that is kept, in any order. rank_of: int32[F], the homes.
    starts: int64[F + 1] of zeros, keepers: int32[samples.size]; both written. Complexity: O(F + kept).
    """
    for sample in samples:
        starts[sample + 1] += 1
    for sample in range(rank_of.size):
        starts[sample + 1] += starts[sample]
    placed = np.zeros(rank_of.size, np.int32)
    for index in range(samples.size):
        sample, rank = samples[index], ranks[index]
        place = starts[sample] + placed[sample]
        placed[sample] += np.int32(1)
        keepers[place] = rank
        if rank == rank_of[sample]:
            keepers[place], keepers[starts[sample]] = keepers[starts[sample]], rank


@kernel
def count_epoch(
    samples: NDArray[np.int64],
    readers: NDArray[np.int64],
    starts: NDArray[np.int64],
    keepers: NDArray[np.int32],
    has_it: NDArray[np.bool_],
    is_agreed: bool,
    local: NDArray[np.int64],
    moved: NDArray[np.int64],
    store: NDArray[np.int64],
    handed: NDArray[np.int64],
    filled: NDArray[np.int64],
) -> None:
    """Go through an epoch's reads in the order of time and count where each is served from.

    samples, readers: int64[length]. starts, keepers: of `group_by_sample`.
    has_it: bool[kept], whether the keeper has the sample by now; written, all False before the first epoch.
    local ... filled: int64[ranks], added to.
    """
    for read in range(samples.size):
        sample, reader = samples[read], readers[read]
        first, end = starts[sample], starts[sample + 1]
        own = -1
        for place in range(first, end):
            if keepers[place] == reader:
                own = place
        if not is_agreed:  # kept samples are fetched ahead of all use, by each keeper for itself
            if own >= 0:
                local[reader] += 1
                if not has_it[own]:
                    filled[reader] += 1
                    has_it[own] = True
            elif end > first:
                moved[reader] += 1
            else:
                store[reader] += 1
            continue
        if own >= 0 and has_it[own]:
            local[reader] += 1
            continue
        if end > first and has_it[first]:
            moved[reader] += 1
        else:
            store[reader] += 1
            if end > first:
                has_it[first] = True
                if keepers[first] != reader:
                    handed[reader] += 1
        if own >= 0:
            has_it[own] = True


@kernel
def count_epoch_of_loners(
    samples: NDArray[np.int64],
    readers: NDArray[np.int64],
    first_step: int,
    batch: int,
    next_read: NDArray[np.int64],
    is_local: NDArray[np.bool_],
    kept_until: NDArray[np.int64],
    held_until: NDArray[np.int64],
    local: NDArray[np.int64],
    moved: NDArray[np.int64],
    store: NDArray[np.int64],
) -> None:
    """Count an epoch's reads where each rank keeps what suits itself and others may ask for what it happens to have.

    next_read: int64[ranks], index of each rank's next read in the two following; written.
    is_local: bool[reads of all ranks], rank by rank, whether the reader itself still has the sample.
    kept_until: int64[reads of all ranks], the last step in which the reader has the sample after this read.
    held_until: int64[F], the last step in which any rank has the sample; written, -1 before the first epoch.
    """
    index_of = np.empty(samples.size, np.int64)
    for begin in range(0, samples.size, batch):
        step = first_step + begin // batch
        end = min(begin + batch, samples.size)
        for read in range(begin, end):
            sample, reader = samples[read], readers[read]
            index_of[read] = next_read[reader]
            next_read[reader] += 1
            if is_local[index_of[read]]:
                local[reader] += 1
            elif held_until[sample] >= step:
                moved[reader] += 1
            else:
                store[reader] += 1
        for read in range(begin, end):  # what a step reads is there for others from the next step on
            held_until[samples[read]] = max(held_until[samples[read]], kept_until[index_of[read]])
