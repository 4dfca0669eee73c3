"""Which sample lives in which tier of one rank, decided once from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.plan.frequency import most_first, uses_of
from penstock.trace.schema import SOURCE

#: Of the store's rate. What is slower stays empty, where a read goes to whatever brings the sample first: the reads
#: that it spares the store are not worth the batches that wait for it. Measured: `benchmarks/policies.py --tiers`.
LEAST_SHARE = 0.4

_LARGEST = np.iinfo(np.int64).max

#: Epochs and reads of a rank that are counted at most. In 1,024 epochs of 4 ranks a sample is read 256 times, give or
#: take 14: what more epochs could tell apart is worth no more than that.
_EPOCHS_COUNTED = 1 << 10
_READS_COUNTED = 1 << 30


@dataclass(frozen=True, slots=True)
class Placement:
    """A fixed home for some of the samples.

    tier_of: int8[samples], the tier (1 is the first after the staging buffer) that keeps a sample, or SOURCE
        where none does.
    fill_order: int64[placed], the placed samples by their first use.
    spares: int64[n], what follows, in this order, where a placed sample is read no more. None: they stay, nothing does.
    """

    tier_of: NDArray[np.int8]
    fill_order: NDArray[np.int64]
    spares: NDArray[np.int64] | None = None

    @property
    def kept(self) -> Kept:
        """The same, listed."""
        return Kept(self.fill_order, self.tier_of[self.fill_order])

    def samples_in(self, tier: int) -> NDArray[np.int64]:
        """Return the ids that `tier` keeps, in filling order."""
        chosen: NDArray[np.int64] = self.fill_order[self.tier_of[self.fill_order] == tier]
        return chosen


@dataclass(frozen=True, slots=True)
class Kept:
    """What one rank keeps, listed: a `Placement` that takes no memory for the samples it does not keep.

    samples: int64[n], in filling order.
    tiers: int8[n], the tier of each.
    """

    samples: NDArray[np.int64]
    tiers: NDArray[np.int8]

    def as_placement(self, samples: int) -> Placement:
        """Return the same as a table over all `samples` samples."""
        if not self.samples.size:
            return Placement(np.broadcast_to(np.int8(SOURCE), samples), self.samples)
        tier_of = np.full(samples, SOURCE, np.int8)
        tier_of[self.samples] = self.tiers
        return Placement(tier_of, self.samples)

    def held_by_tier(self, held: NDArray[np.int64], disk: int) -> dict[int, NDArray[np.int64]]:
        """Return by tier what is there from the start, of samples that an earlier run left on the rank's disks.

        held: those samples; what no tier keeps is passed by. disk: the first tier that is one, which has what memory
        keeps.
        """
        is_held = np.isin(self.samples, held)
        samples, tiers = self.samples[is_held], np.maximum(self.tiers[is_held], disk)
        return {tier: samples[tiers == tier] for tier in np.unique(tiers).tolist()}


@dataclass(frozen=True, slots=True)
class Shared:
    """What ranks keep that read each other's tiers.

    kept: of each rank of the job; of one that shares nothing with this rank, nothing.
    promised: int64[n], samples that the rank which keeps them reads before any other does; None for none.
    first: (epoch, step) at which the run begins, of which that is true.
    is_mapped: whether all of it is memory that this rank maps; else some of it is read by message.
    reads_for_others: see `penstock.policy.loading.Loading`.
    """

    kept: tuple[Kept, ...]
    promised: NDArray[np.int64] | None
    first: tuple[int, int]
    is_mapped: bool = True
    reads_for_others: bool = False


def place_by_frequency(
    plan: AccessPlan, rank: int, sizes_bytes: NDArray[np.int64], capacities_bytes: Sequence[int]
) -> Placement:
    """Give the samples that a rank reads most often a place in its fastest tiers.

    Samples are taken by the number of times that `rank` reads them over the run, most first, ties by id; each
    tier takes them in this order until the next one no longer fits. Samples that the rank never reads get no
    place. On one rank every sample of a shuffled epoch is read once per epoch, so no policy, clairvoyant or
    not, hits more often than such a fixed set.

    capacities_bytes: of tier 1, 2, ..., fastest first.
    Source: thesis, section 3.2 (choice by access frequency, filling by first access).
    """
    return keep_by_frequency(plan, rank, sizes_bytes, capacities_bytes).as_placement(plan.samples)


def keep_by_frequency(
    plan: AccessPlan,
    rank: int,
    sizes_bytes: NDArray[np.int64],
    capacities_bytes: Sequence[int],
    saved: NDArray[np.int64] | None = None,
    saving_tiers: int = 1,
) -> Kept:
    """Decide as `place_by_frequency` does, and list what is kept: for many ranks, or a large data set.

    saved: int64[samples], what having a sample in the first tiers saves, where all take as much there, as crops do: of
        those that are read equally often they take the ones that save most. saving_tiers: how many these are.
    Memory and time grow with what the rank reads, not with F. Of a run of more than 1,024 epochs, or 2**30 reads, the
    first so many count: in longer runs all samples are read about equally often.
    """
    if not any(capacities_bytes):
        return Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    uses = uses_of(counted_of_rank(plan, rank), rank)
    order = most_first(uses.counts)  # samples ascend, so that ties are by id
    if saved is not None:
        first = np.lexsort((-saved[uses.samples], -uses.counts))
        in_tiers = sizes_bytes[:saving_tiers, uses.samples[first]]
        count = fill_in_order(in_tiers, capacities_bytes[:saving_tiers]).size
        order = np.concatenate((first[:count], order[~np.isin(order, first[:count])]))
    if (smallest := int(sizes_bytes.min(initial=_LARGEST))) > 0:
        order = order[: sum(capacity // smallest for capacity in capacities_bytes)]  # of which more never fit
    samples, first_use = uses.samples[order], uses.first[order]
    del uses, order  # of 10^7 samples 220 MB, on each rank
    tiers = fill_in_order(sizes_bytes[..., samples], capacities_bytes)
    by_first_use = np.argsort(first_use[: tiers.size])
    return Kept(samples[by_first_use], tiers[by_first_use])


def counted_of_rank(plan: AccessPlan, rank: int) -> AccessPlan:
    """The epochs of the plan by which samples are chosen: all, except in very long runs."""
    of_epoch = max(1, plan.max_local_batch(rank) * plan.steps(0))
    return plan.of_first(min(_EPOCHS_COUNTED, max(1, _READS_COUNTED // of_epoch)))


def share_of_store_rate(machine: Machine, tier: int, sample_bytes: float) -> float:
    """Return how fast a tier delivers samples of this mean size, over the store while all ranks read that.

    Each is read by as many readers as the store has threads; their latencies overlap. inf: for memory without latency,
    where what it has is decoded where it lies.
    """
    storage, threads = machine.storage[tier], machine.source.threads
    if storage.is_memory and storage.latency_seconds == 0.0:
        return inf
    wire = sample_bytes / storage.read.at(threads)
    seconds = max(wire, (storage.latency_seconds + wire) / threads)
    return machine.source_seconds(1, sample_bytes, machine.ranks, sample_bytes) / seconds


def fill_in_order(sizes_bytes: NDArray[np.int64], capacities_bytes: Sequence[int]) -> NDArray[np.int8]:
    """Fill tiers with samples in the given order, each until the next sample no longer fits.

    sizes_bytes: int64[n], in the order of filling; or int64[tiers, n], where they differ from tier to tier.
    Returns: int8[placed], the tier of each of the first `placed` samples, 1 being the first tier.
    """
    tiers = []
    begin = 0
    sizes = np.broadcast_to(sizes_bytes, (len(capacities_bytes), sizes_bytes.shape[-1]))
    for tier, capacity_bytes in enumerate(capacities_bytes, start=1):
        ends_bytes = np.cumsum(sizes[tier - 1, begin:])
        # A tier without a limit may be written as more than 64 bits hold.
        count = int(np.searchsorted(ends_bytes, min(capacity_bytes, _LARGEST), side="right"))
        tiers.append(np.full(count, tier, np.int8))
        begin += count
    return np.concatenate(tiers) if tiers else np.empty(0, np.int8)
