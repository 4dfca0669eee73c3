"""The split "local": every rank reads those samples of the global batch that it holds.

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

**Who holds what.** A plan with `split="local"` takes a sample to be held by the rank that would read it first by
"balanced" slices. This follows from the order, the batch size and the number of ranks alone: a run that is continued
reads the same, whatever it keeps, and a trace needs the word alone. It is where policies leave a sample: "frequency"
keeps on each rank what that reads most often, "first-reader" says the same in other words. `split_locally` takes any
other placement.

Why an order and not a `Split`: a split is asked for offsets in a batch of so many, and answers from these numbers
alone; it sees neither epoch nor samples. Given both, every question of an access plan (who reads, when next, at which
position) would need a second form. As a permutation of the positions within each global batch, before a split that
knows nothing of it, all of them are answered as before, `position_of` included.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan.access import AccessPlan
from penstock.plan.arranged import arranged
from penstock.plan.frequency import check_partition
from penstock.plan.splits import Balanced, Local, Split


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
    split = Balanced() if isinstance(plan.split, Local) else plan.split
    holders = _checked(rank_of, plan.samples, plan.ranks)
    return replace(plan, order=arranged(plan.order, plan.batch_size, plan.ranks, split, holders), split=split)


def _checked(rank_of: ArrayLike, samples: int, ranks: int) -> NDArray[np.int32]:
    holders = np.asarray(rank_of)
    if holders.shape != (samples,) or holders.dtype.kind not in "iu":
        raise ConfigError(
            f"rank_of is {holders.dtype} of shape {holders.shape}; it holds the rank of each of the {samples:,} "
            "samples, or -1"
        )
    if holders.min() < -1 or holders.max() >= ranks:
        raise ConfigError(
            f"rank_of holds ranks {holders.min()} to {holders.max()}; each is in [0, {ranks}), or -1 where nobody "
            "holds the sample: place the samples for this plan"
        )
    return holders.astype(np.int32, copy=False)
