"""`push`: each sample is handed to its next user ahead of time, and waits there for its use.

The plan says who reads a sample next. At the end of the step that used it, it goes to that rank, which keeps it until
then: a hit is always local, and each sample is in one place only. Where a rank has no space, it gives up what it will
use last of all (Belady's rule), the newcomer included; the shared store serves that use.

    rank 0   read k ──┐                       ┌── read k ...
    rank 1            └─ keeps k ── read k ───┘

What a rank is handed does not depend on what others could keep, because every use, from wherever it was served, ends
with the sample in its reader's hands. So each rank decides for itself, from the seed, and knows what the others decide
by asking the same function.

For equal sizes no other choice keeps more: samples that wait are intervals on one resource, and giving up the one
that ends last is optimal (Faigle & Nawijn, "Note on scheduling intervals on-line", Discrete Applied Mathematics 1995).
The price is traffic between ranks: (N-1)/N of all reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.plan import AccessPlan, RepeatingOrder
from penstock.plan.access import first_steps
from penstock.plan.frequency import check_partition, steps_of_reads
from penstock.policy.homes import as_capacities, as_sizes
from penstock.trace.schema import SOURCE

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Handed:
    """What waits on a rank when it reads: an entry for each read of its access string.

    Steps are counted over all epochs.

    rank: whose reads these are.
    tiers: int8[reads], the tier in which the sample waits for this read (1 is the first after the staging buffer);
        SOURCE (-1) where it does not, and the shared store serves it.
    from_rank: int32[reads], the rank that read the sample last before and hands it on, this rank itself included;
        -1 where nobody has read it yet.
    arrives: int64[reads], the step at whose end it is handed on; -1 likewise.
    given_up: int64[reads], the step at whose end something nearer took its place, or its arrival where it never got
        one; -1 where it was kept, or nobody had it. Known beforehand, so such samples are not sent at all.
    """

    rank: int
    tiers: NDArray[np.int8]
    from_rank: NDArray[np.int32]
    arrives: Ids
    given_up: Ids

    @property
    def is_sent(self) -> NDArray[np.bool_]:
        """bool[reads], whether another rank sends the sample for this read, at the end of step `arrives`."""
        sent: NDArray[np.bool_] = (self.tiers > 0) & (self.from_rank != self.rank)
        return sent


def decide_push(plan: AccessPlan, rank: int, sizes_bytes: ArrayLike, capacities_bytes: ArrayLike) -> Handed:
    """Decide what waits on the rank at each of its reads when samples are handed on to their next user.

    A sample takes the fastest tier with space. Where none has, the samples whose use is farthest are given up one by
    one until it fits, unless it is itself the farthest. A read frees its place before what its step hands on comes in.

    sizes_bytes: int[F]. capacities_bytes: int[tiers] or int[ranks, tiers], see `as_capacities`.
    Time: O(n log n) for the rank's n reads, and O(F log F) per epoch where epochs repeat samples.
    Raises: ConfigError for sizes or capacities that cannot be, or a split by which several ranks read a sample.
    """
    from penstock.policy import _push_kernels as kernels  # loads numba

    check_partition(plan)
    string = plan.string(rank)
    steps = steps_of_reads(plan, rank)
    if isinstance(plan.order, RepeatingOrder):
        from_rank, arrives = _last_reads_with_repeats(plan, rank, string.size)
    else:
        from_rank, arrives = _last_reads(plan, string, steps)
    sizes = as_sizes(sizes_bytes, plan.samples)
    space = as_capacities(capacities_bytes, plan.ranks, sizes)[rank]
    tiers = np.full(string.size, SOURCE, np.int8)
    # What the very step reads again that reads it would come too late.
    given_up = np.where((arrives >= 0) & (arrives == steps), arrives, -1)
    # Of what a step hands on, the nearest use comes first: nothing is sent and given up at once.
    arriving = np.flatnonzero((arrives >= 0) & (arrives < steps))
    arriving = arriving[np.argsort(arrives[arriving], kind="stable")]
    kernels.keep_nearest(arriving, arrives, steps, sizes[string], space, tiers, given_up)
    return Handed(rank, tiers, from_rank, arrives, given_up)


def _last_reads(plan: AccessPlan, string: Ids, steps: Ids) -> tuple[NDArray[np.int32], Ids]:
    """Who read the sample of each entry last before it, of all ranks, and at which step; both -1 for nobody."""
    ranks = np.full(string.size, -1, np.int32)
    arrives = np.full(string.size, -1, np.int64)
    begins = first_steps(plan)
    ends = np.searchsorted(steps, begins)
    for epoch in range(plan.epochs):
        pending = np.arange(ends[epoch], ends[epoch + 1])
        for earlier in range(epoch - 1, -1, -1):
            if pending.size == 0:
                break
            readers, at = plan.reader_of(earlier, string[pending])
            found = readers >= 0
            ranks[pending[found]] = readers[found]
            arrives[pending[found]] = begins[earlier] + at[found]
            pending = pending[~found]
    return ranks, arrives


def _last_reads_with_repeats(plan: AccessPlan, rank: int, reads: int) -> tuple[NDArray[np.int32], Ids]:
    """The same for orders that read a sample several times an epoch, by going through all of it."""
    ranks = np.full(reads, -1, np.int32)
    arrives = np.full(reads, -1, np.int64)
    last_rank = np.full(plan.samples, -1, np.int32)
    last_step = np.full(plan.samples, -1, np.int64)
    begins = first_steps(plan)
    done = 0
    for epoch in range(plan.epochs):
        positions = np.arange(plan.length(epoch))
        if positions.size == 0:
            continue
        samples = plan.sample_at(epoch, positions)
        readers, steps = plan.reader_at(epoch, positions)
        steps = begins[epoch] + steps
        order = np.argsort(samples, kind="stable")
        again = np.flatnonzero(samples[order[1:]] == samples[order[:-1]]) + 1
        before_rank, before_step = last_rank[samples], last_step[samples]
        before_rank[order[again]] = readers[order[again - 1]]
        before_step[order[again]] = steps[order[again - 1]]
        last = np.append(np.flatnonzero(samples[order[1:]] != samples[order[:-1]]), order.size - 1)
        last_rank[samples[order[last]]] = readers[order[last]]
        last_step[samples[order[last]]] = steps[order[last]]
        own = readers == rank
        count = int(np.count_nonzero(own))
        ranks[done : done + count] = before_rank[own]
        arrives[done : done + count] = before_step[own]
        done += count
    return ranks, arrives
