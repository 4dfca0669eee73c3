"""How often, by whom and when first a sample is read: what placements on several ranks are decided by.

Every rank reads each sample of a fully shuffled epoch with probability 1/N, so that over E epochs it reads it
X ~ B(E, 1/N) times: E/N on average, some far more often. Keeping those is the idea of the thesis (section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.plan.access import AccessPlan, Counts, counted_ranks, first_readers, first_steps
from penstock.plan.orders import RepeatingOrder
from penstock.plan.splits import Split

Ids = NDArray[np.int64]

#: Readers held at once while samples are asked for in blocks: 256 MB.
_READERS_AT_ONCE = 1 << 26
#: Of these, so many samples at a time: an epoch's readers go to places far apart, which the cache then holds.
_SAMPLES_AT_ONCE = 1 << 14
#: Reads of some ranks that are listed at once: 32 MB.
_READS_AT_ONCE = 1 << 22
#: Orders that are tables make one per epoch, so a block is worth at least as much work.
_SMALLEST_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Uses:
    """What one rank reads over a run.

    samples: int64[n], each sample that it reads, ascending.
    counts: int32 or int64[n], how often.
    first: int32 or int64[n], index into the rank's access string of its first read: no two are equal.
    """

    samples: Ids
    counts: Counts
    first: Counts


@dataclass(frozen=True, slots=True)
class FirstReads:
    """Who reads each sample first of all ranks, and when.

    rank_of: int32[F], -1 where nobody ever reads it.
    step_of: int64[F], the step counted over the epochs before it too; -1 likewise.
    """

    rank_of: NDArray[np.int32]
    step_of: Ids


def uses_of(plan: AccessPlan, rank: int) -> Uses:
    """Count what the rank reads, in memory and time that grow with its own reads where these are fewer than F.

    Same answers as `AccessPlan.uses`, without an entry for what is never read.
    """
    if plan.reads(rank) < plan.samples:
        return _uses_in(plan.string(rank))
    counts, first = plan.uses(rank)
    samples = np.flatnonzero(counts)
    if samples.size == counts.size:
        return Uses(samples, counts, first)
    return Uses(samples, counts[samples], first[samples])


def uses_of_ranks(plan: AccessPlan, ranks: Sequence[int]) -> Iterator[Uses]:
    """Count what each of some ranks reads, as `uses_of` does; several at once, where they read little."""
    at_once = max(1, _READS_AT_ONCE // max([1, *map(plan.reads, ranks)]))
    for begin in range(0, len(ranks), at_once):
        some = ranks[begin : begin + at_once]
        yield from [uses_of(plan, *some)] if at_once == 1 else map(_uses_in, plan.strings(some))


def _uses_in(string: Ids) -> Uses:
    # One sort of numbers that tell the place, too: `np.unique` sorts places by sample, which takes longer.
    bits = string.size.bit_length()
    ordered = np.sort(string << bits | np.arange(string.size))
    samples = ordered >> bits
    is_first = np.ones(string.size, bool)
    np.not_equal(samples[1:], samples[:-1], out=is_first[1:])
    begins = np.flatnonzero(is_first)
    return Uses(samples[begins], np.diff(begins, append=string.size), ordered[begins] & ((1 << bits) - 1))


def most_first(counts: NDArray[np.integer[Any]]) -> Ids:
    """Return the places of counts from 0 to 2^32 - 2, descending; equal ones in the order that they have."""
    return ascending(counts.max(initial=0) - counts)


def ascending(numbers: NDArray[np.integer[Any]]) -> Ids:
    """Return the places of numbers from -1 to 2^32 - 2, ascending, -1 last; equal ones in the order that they have."""
    # NumPy sorts 16-bit numbers by radix: those of 10^7 samples in a tenth of the time.
    return np.argsort(
        numbers.astype(np.uint16 if numbers.max(initial=0) < 0xFFFF else np.uint32), kind="stable"
    )


def steps_of_reads(plan: AccessPlan, rank: int) -> Ids:
    """Return the step of each entry of the rank's access string, counted over all epochs: int64[reads]."""
    sizes = np.concatenate([plan.local_batch_sizes(rank, epoch) for epoch in range(plan.epochs)])
    return np.repeat(np.arange(sizes.size), sizes)


def read_again(samples: Ids, steps: Ids) -> tuple[Ids, Ids]:
    """Return the accesses whose sample is read again later, and for each the next access to it.

    samples, steps: int64[accesses], which sample is read at which step; of any number of ranks, in any order. Of two
    accesses at one step, the first comes first. Time: that of sorting.
    """
    order = np.lexsort((steps, samples))
    follows = samples[order[1:]] == samples[order[:-1]]
    return order[:-1][follows], order[1:][follows]


def last_batches(string: Ids, sizes: Ids, samples: Ids) -> NDArray[np.int32]:
    """Return the number of the last batch with each of some samples, -1 for none. An empty batch has no number.

    string: int64[reads], of all batches, one behind the other. sizes: int64[batches].
    """
    numbers = np.repeat(np.arange(np.count_nonzero(sizes), dtype=np.int32), sizes[sizes > 0])
    last = np.full(max(samples.max(initial=0), string.max(initial=0)) + 1, -1, np.int32)
    last[string] = numbers  # of a sample that comes twice, the later one stays
    found: NDArray[np.int32] = last[samples]
    return found


def last_batches_of_rank(plan: AccessPlan, rank: int, samples: Ids) -> NDArray[np.int32]:
    """Return the same for all batches of a rank, in memory that does not grow with the number of epochs."""
    found = np.full(samples.size, -1, np.int32)
    sizes = [plan.local_batch_sizes(rank, epoch) for epoch in range(plan.epochs)]
    begin = sum(int(np.count_nonzero(size)) for size in sizes)
    for epoch in reversed(range(plan.epochs)):
        begin -= int(np.count_nonzero(sizes[epoch]))
        left = np.flatnonzero(found < 0)
        if not left.size:
            break
        in_epoch = last_batches(
            plan.stream(rank, epoch, 0, int(sizes[epoch].sum())), sizes[epoch], samples[left]
        )
        found[left] = np.where(in_epoch < 0, -1, begin + in_epoch)
    return found


def readers_of_epoch(plan: AccessPlan, epoch: int) -> tuple[Ids, Ids]:
    """Return the samples of an epoch, by position, and the rank that reads each, both int64.

    Raises: ConfigError where several ranks read the same position.
    """
    check_partition(plan)
    positions = np.arange(plan.length(epoch))
    return plan.sample_at(epoch, positions), plan.reader_at(epoch, positions)[0]


def readers_by_sample(plan: AccessPlan, samples: Ids) -> tuple[Ids, NDArray[np.int32]]:
    """Return who reads each of the samples, read by read in the order of time.

    Returns: starts, int64[n + 1], and ranks, int32[starts[n]]: sample i is read by ranks[starts[i]:starts[i + 1]].
        Where an epoch leaves a sample out, an entry may be -1.
    Memory: 4 bytes a read. Ask in `blocks_of_samples`.
    """
    check_partition(plan)
    if isinstance(plan.order, RepeatingOrder):
        return _readers_with_repeats(plan, plan.order, samples)
    ranks = np.empty((samples.size, plan.epochs), np.int32)
    for begin in range(0, samples.size, _SAMPLES_AT_ONCE):
        some = slice(begin, begin + _SAMPLES_AT_ONCE)
        for epoch in range(plan.epochs):
            ranks[some, epoch] = plan.reader_of(epoch, samples[some])[0]
    return np.arange(samples.size + 1) * plan.epochs, ranks.ravel()


def blocks_of_samples(plan: AccessPlan, samples: Ids) -> Iterator[slice]:
    """Yield slices of `samples` whose readers take little memory."""
    block = max(_SMALLEST_BLOCK, _READERS_AT_ONCE // plan.epochs)
    for begin in range(0, samples.size, block):
        yield slice(begin, begin + block)


def first_reads(
    plan: AccessPlan, among: Sequence[int] | None = None, first: tuple[int, int] = (0, 0)
) -> FirstReads:
    """Find out who reads each sample first: who takes it from the shared store while nobody holds it yet.

    among: the ranks that count, all unless given. first: (epoch, step) from which on reads count.
    """
    check_partition(plan)
    steps = np.full(plan.samples, -1, np.int64)
    if not isinstance(plan.order, RepeatingOrder) or (among is None and not first[1]):
        return FirstReads(first_readers(plan, steps, among=among, first=first), steps)
    # One that counts may follow an epoch's first read of a sample.
    counts = counted_ranks(plan, among)
    ranks = np.full(plan.samples, -1, np.int32)
    begins = first_steps(plan)
    for epoch in range(first[0], plan.epochs):
        positions = np.arange(plan.length(epoch))
        readers, in_epoch = plan.reader_at(epoch, positions)
        wanted = counts[readers] & (in_epoch >= (first[1] if epoch == first[0] else 0))
        ids, at = np.unique(plan.sample_at(epoch, positions[wanted]), return_index=True)
        is_new = ranks[ids] < 0
        ids, at = ids[is_new], np.flatnonzero(wanted)[at[is_new]]
        ranks[ids], steps[ids] = readers[at], begins[epoch] + in_epoch[at]
        if (ranks >= 0).all():
            break
    return FirstReads(ranks, steps)


def check_partition(plan: AccessPlan) -> None:
    """Raise ConfigError unless each position of a batch has one reader."""
    if plan.is_cut_by_order:
        return
    split = _split_of(plan)
    read = sum(split.size(rank, plan.ranks, plan.batch_size) for rank in range(plan.ranks))
    if read != plan.batch_size:
        raise ConfigError(
            f"split is {plan.split!r}: {plan.ranks} ranks read {read} samples of a batch of {plan.batch_size}, so "
            "that a sample has no one reader to be placed near: use a split that shares the batch out, or "
            "place by hash"
        )


def _split_of(plan: AccessPlan) -> Split:
    assert isinstance(plan.split, Split), "a plan keeps its split as one"
    return plan.split


def _readers_with_repeats(
    plan: AccessPlan, order: RepeatingOrder, samples: Ids
) -> tuple[Ids, NDArray[np.int32]]:
    index, ranks = [], []
    place_of = np.full(plan.samples, -1, np.int64)
    place_of[samples] = np.arange(samples.size)
    for epoch in range(plan.epochs):
        ids, readers = readers_of_epoch(plan, epoch)
        wanted = place_of[ids] >= 0
        index.append(place_of[ids[wanted]])
        ranks.append(readers[wanted].astype(np.int32))
    by_sample = np.argsort(np.concatenate(index), kind="stable")
    counts = np.bincount(np.concatenate(index), minlength=samples.size)
    return np.concatenate(([0], np.cumsum(counts))), np.concatenate(ranks)[by_sample]
