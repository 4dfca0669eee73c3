"""Who keeps which sample on N ranks: placements that every rank works out by itself, without a message.

Three of them, each a `Homes`; `place_by_frequency` is the fourth, with which each rank decides for itself:

- `place_by_hash`: a sample's home follows from its id alone, as in hash-partitioned caches. It needs no plan, so
  it can be no better for knowing one.
- `place_cover`: every sample one home first, with the rank that reads it most often as far as there is space, and
  copies by frequency in what space is left.
- `place_by_first_read`: a sample's home is the rank that reads it first, so that nobody hands anything over. On one
  host, where each rank maps the memory of all, it does not matter which of them has a sample.

Measured on 20,000 samples over 50 epochs on 4 ranks that hold the data set once between them: `cover` reads each
sample once from the shared store, which is the least possible, `frequency` ten times (docs/reference/sharing.md). One
home each, by hash, is as good there; `cover` beyond that reads more locally, uses the faster tiers for what is read
most, and knows what is worth a place where the data do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan
from penstock.plan.bijection import BlockShuffle
from penstock.plan.frequency import (
    ascending,
    blocks_of_samples,
    check_partition,
    first_reads,
    most_first,
    readers_by_sample,
    steps_of_reads,
    uses_of_ranks,
)
from penstock.plan.orders import RepeatingOrder
from penstock.plan.random import derive_key
from penstock.policy.placement import Kept, fill_in_order
from penstock.trace.schema import SOURCE
from penstock.units import is_integer
from penstock.validate import check_count

Ids = NDArray[np.int64]

#: The hash of a sample's id has a fixed key: independent of every order, the same in every run.
_HASH_KEY = derive_key(0, "home of a sample by its id")

#: Sizes that add up to more are refused: 64 bits would then leave little space to count in.
_MOST_BYTES = 2**62

_EPOCHS_COUNTED = 1 << 10


def counted(plan: AccessPlan, first: tuple[int, int] = (0, 0)) -> AccessPlan:
    """Return the epochs by which homes are chosen from step `first` on: all, except in very long runs."""
    return plan.of_first(first[0] + _EPOCHS_COUNTED)


@dataclass(frozen=True, slots=True)
class Homes:
    """Who keeps what, on all ranks.

    rank_of: int32[F], whom to ask for a sample; -1 where nobody keeps it. Where several ranks keep it: the home,
        which kept it first.
    tier_of: int8[F], the tier in which that rank keeps it (1 is the first after the staging buffer), SOURCE (-1)
        where nobody does.
    keeps: per rank, all that it keeps, its homes and its copies of others', in filling order.

    Memory: 5 bytes a sample, 9 bytes a sample and keeper.
    """

    rank_of: NDArray[np.int32]
    tier_of: NDArray[np.int8]
    keeps: tuple[Kept, ...]

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.keeps)

    @property
    def samples(self) -> int:
        """F."""
        return self.rank_of.size


def place_by_hash(sizes_bytes: ArrayLike, capacities_bytes: ArrayLike, ranks: int) -> Homes:
    """Give every sample one home by a hash of its id: nothing is known of the order in which they are read.

    The hash is a keyed permutation of the ids, cut into N pieces in proportion to the ranks' capacities: perfectly
    even, where the usual hash modulo N overfills half of the ranks by chance. Each rank keeps its piece, in hash
    order, as far as its tiers hold it.

    sizes_bytes: int[F]. capacities_bytes: see `as_capacities`.
    Raises: ConfigError for sizes or capacities that cannot be.
    """
    sizes = as_sizes(sizes_bytes)
    capacities = as_capacities(capacities_bytes, ranks, sizes)
    samples = sizes.size
    by_hash = BlockShuffle(samples, samples, _HASH_KEY).forward(0, np.arange(samples))
    ends = _cut_in_proportion(sizes[by_hash], capacities)
    rank_of, tier_of = _nowhere(samples)
    keeps = []
    for rank in range(ranks):
        piece = by_hash[ends[rank] : ends[rank + 1]]
        tiers = fill_in_order(sizes[piece], capacities[rank].tolist())
        kept = piece[: tiers.size]
        rank_of[kept] = rank
        tier_of[kept] = tiers
        keeps.append(Kept(kept, tiers))
    return Homes(rank_of, tier_of, tuple(keeps))


def place_cover(plan: AccessPlan, sizes_bytes: ArrayLike, capacities_bytes: ArrayLike) -> Homes:
    """Give every sample one home first, near its readers; then copies, by frequency, in the space that is left.

    1. If all tiers of all ranks together cannot hold the data, the most useful samples are chosen: those read most
       often by all ranks, of these the ones that some rank reads most often, then by id.
    2. Each chosen sample asks the rank that reads it most often (of several, the one that reads it first). Where
       more ask than there is space for, those read there most often are taken; the others ask the next best rank
       with space, and so on. A home is in the fastest tier with space, so the most read are in the fastest.
    3. Samples none of whose readers has space go to the other ranks, in proportion to their space.
    4. Each rank fills the space it has left with copies of what it reads more than once, most first.

    Nothing depends on the rank that computes it. Filling order: homes by the first read of any rank (which takes
    the sample from the store and hands it over), copies by the rank's own first read.

    sizes_bytes: int[F]. capacities_bytes: see `as_capacities`.
    Time: O(E F), in blocks of bounded memory. With tiers that unequal sizes do not fill exactly, a few samples may
    stay without a home although the sum of the space would do.
    Raises: ConfigError for sizes or capacities that cannot be, or a split by which several ranks read a sample.
    """
    sizes = as_sizes(sizes_bytes, plan.samples)
    capacities = as_capacities(capacities_bytes, plan.ranks, sizes)
    check_partition(plan)
    space = capacities.copy()
    rank_of, tier_of = _nowhere(plan.samples)
    _settle_homes(plan, sizes, space, rank_of, tier_of)
    copies = _fill_with_copies(plan, sizes, space, rank_of, tier_of)
    return Homes(rank_of, tier_of, tuple(_in_filling_order(plan, rank_of, tier_of, copies)))


def place_by_first_read(
    plan: AccessPlan,
    sizes_bytes: ArrayLike,
    capacities_bytes: ArrayLike,
    among: Sequence[int] | None = None,
    first: tuple[int, int] = (0, 0),
    held: Mapping[int, Ids] | None = None,
) -> tuple[Homes, Ids]:
    """Give every sample one home: the rank that has it already, or reads it first, where that has space; else another.

    If the tiers together cannot hold what these ranks read, the samples that the job reads most often are chosen, among
    equals those that are read first. Filling order: by the first read of any rank. Of longer runs the first 1,024
    epochs count.

    sizes_bytes: int[F]. capacities_bytes: see `as_capacities`.
    among: the ranks that share what they keep, all unless given. first: (epoch, step) at which the run begins.
    held: by rank, samples that an earlier run left on its disks.
    Returns: the homes, and the samples whose home has them or is the first to read them, ascending: int64[n].
    Time: O(F), and O(E F) where the data do not fit and samples are read unequally often.
    Raises: as `place_cover`.
    """
    sizes = as_sizes(sizes_bytes, plan.samples)
    capacities = as_capacities(capacities_bytes, plan.ranks, sizes)
    ranks = np.arange(plan.ranks) if among is None else np.asarray(among)
    space = np.zeros_like(capacities)
    space[ranks] = capacities[ranks]
    plan = counted(plan, first)
    reads = first_reads(plan, among, first)
    chosen = np.flatnonzero(reads.rank_of >= 0)
    if isinstance(plan.order, RepeatingOrder) and int(sizes[chosen].sum()) > sum(map(sum, space.tolist())):
        chosen = _chosen(plan, sizes, space, chosen)[0]
    chosen = chosen[ascending(reads.step_of[chosen])]
    rank_of, tier_of = _nowhere(plan.samples)
    _settle(chosen, _at_holders(reads.rank_of, held or {})[chosen], sizes, space, rank_of, tier_of)
    promised = np.flatnonzero(rank_of >= 0)
    if promised.size < chosen.size:
        from penstock.policy import _homes_kernels as kernels  # loads numba

        kernels.settle_anywhere(chosen[rank_of[chosen] < 0], sizes, space, rank_of, tier_of)
    kept_by = _grouped_by_rank(rank_of[chosen], plan.ranks)
    kept = [chosen[kept_by(rank)] for rank in range(plan.ranks)]
    return Homes(rank_of, tier_of, tuple(Kept(each, tier_of[each]) for each in kept)), promised


def _settle(
    samples: Ids,
    ranks: NDArray[np.int32],
    sizes: Ids,
    space: Ids,
    rank_of: NDArray[np.int32],
    tier_of: NDArray[np.int8],
) -> None:
    """Do what `_homes_kernels.settle` does; without it where the fastest tiers have space for all.

    A job then starts without numba, whose import takes a second, in which no rank of the host reads. ranks: none is -1.
    """
    if space.shape[1]:
        wanted_bytes = np.zeros(space.shape[0], np.int64)
        np.add.at(wanted_bytes, ranks, sizes[samples])
        if (wanted_bytes <= space[:, 0]).all():
            space[:, 0] -= wanted_bytes
            rank_of[samples], tier_of[samples] = ranks, 1
            return
    from penstock.policy import _homes_kernels as kernels  # loads numba

    kernels.settle(samples, ranks, sizes, space, rank_of, tier_of)


def _at_holders(rank_of: NDArray[np.int32], held: Mapping[int, Ids]) -> NDArray[np.int32]:
    """Return who shall keep each sample: its first reader, unless others alone have it. rank_of: the first readers."""
    found, is_at_home = rank_of.copy(), np.zeros(rank_of.size, bool)
    for rank, ids in held.items():
        is_at_home[ids[rank_of[ids] == rank]] = True
    for rank, ids in held.items():
        found[ids[~is_at_home[ids]]] = rank
    return found


def as_capacities(capacities_bytes: ArrayLike, ranks: int, sizes_bytes: Ids) -> Ids:
    """Return int64[ranks, tiers], fastest tier first, none larger than all samples together: more is never used.

    capacities_bytes: int[tiers], the same on every rank, or int[ranks, tiers]. As large as is liked where a tier is
        to have no limit.
    sizes_bytes: int64[F], of `as_sizes`.
    Raises: ConfigError if it is neither, or negative.
    """
    check_count("ranks", ranks)
    capacities = np.asarray(capacities_bytes)
    if capacities.size == 0:
        return np.zeros((ranks, 0), np.int64)
    if capacities.ndim not in (1, 2) or not _are_whole(capacities):
        raise ConfigError(
            f"capacities_bytes is {capacities.dtype} of shape {capacities.shape}; it holds integers, in bytes, "
            "one per tier or one per rank and tier"
        )
    if capacities.ndim == 2 and capacities.shape[0] != ranks:
        raise ConfigError(
            f"capacities_bytes has {capacities.shape[0]} rows for {ranks} ranks: give one row per rank, or one for all"
        )
    if capacities.min() < 0:
        raise ConfigError(f"capacities_bytes holds {capacities.min()}; a tier of 0 bytes or more can be")
    # Where all samples are of 0 bytes, a tier of 1 byte still is one that has space.
    useful = np.minimum(capacities, max(1, int(sizes_bytes.sum()))).astype(np.int64)
    return np.broadcast_to(useful, (ranks, useful.shape[-1])).copy()


def as_sizes(sizes_bytes: ArrayLike, samples: int | None = None) -> Ids:
    """Return int64[F] after checking. An array broadcast from one size stays that, without F entries.

    Raises: ConfigError if it is no list of integers, in bytes, one per sample, or they add up to more than can
        be counted.
    """
    sizes = np.asarray(sizes_bytes)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or sizes.size != (samples or sizes.size):
        of = "sample" if samples is None else f"of the {samples:,} samples"
        raise ConfigError(
            f"sizes_bytes is {sizes.dtype} of shape {sizes.shape}; it holds an integer, in bytes, for each {of}"
        )
    if sizes.size == 0 or sizes.min() < 0:
        raise ConfigError(
            "sizes_bytes is empty or negative somewhere; every sample has a size of 0 bytes or more: where sizes are "
            "not known beforehand, give a data set with __getitem__ in place of a source"
        )
    total = float(sizes.sum(dtype=np.float64))
    if total > _MOST_BYTES:
        raise ConfigError(
            f"sizes_bytes adds up to {total:.3g} bytes; at most {_MOST_BYTES:.3g} can be counted: are these bytes?"
        )
    return sizes.astype(np.int64, copy=False)


def _are_whole(numbers: NDArray[Any]) -> bool:
    """Whether these are integers; NumPy keeps those beyond 64 bits as objects."""
    return numbers.dtype.kind in "iu" or (numbers.dtype.kind == "O" and all(map(is_integer, numbers.flat)))


def _nowhere(samples: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    return np.full(samples, -1, np.int32), np.full(samples, SOURCE, np.int8)


def _cut_in_proportion(sizes_bytes: Ids, space: Ids) -> Ids:
    """Where to cut a list of samples into a piece per rank, in proportion to their space: int64[ranks + 1].

    space: int64[ranks, tiers], bytes.
    """
    # Python's integers, here and below: the spaces of many ranks, and bytes times bytes, pass 2**63.
    up_to = list(accumulate(map(sum, space.tolist())))
    total_space, total = up_to[-1], int(sizes_bytes.sum())
    if total_space == 0:
        return np.zeros(len(up_to) + 1, np.int64)
    ends_bytes = np.cumsum(sizes_bytes)
    bounds = np.array([total * space_bytes // total_space for space_bytes in up_to], np.int64)
    return np.concatenate(([0], np.searchsorted(ends_bytes, bounds, side="right")))


# Cover


def _settle_homes(
    plan: AccessPlan, sizes: Ids, space: Ids, rank_of: NDArray[np.int32], tier_of: NDArray[np.int8]
) -> None:
    """Steps 1 to 3: write the homes, take their bytes from `space`."""
    from penstock.policy import _homes_kernels as kernels  # loads numba

    pending, best, uses = _chosen(plan, sizes, space)
    while True:
        by_use = most_first(uses)
        kernels.settle(pending[by_use], best[by_use], sizes, space, rank_of, tier_of)
        rest = pending[rank_of[pending] < 0]
        if rest.size in (0, pending.size):
            break
        pending = rest
        best, uses, _ = _favourites(plan, pending, sizes, space)
    ends = _cut_in_proportion(sizes[rest], space)
    spread = np.repeat(np.arange(plan.ranks, dtype=np.int32), np.diff(ends))
    kernels.settle(rest[: spread.size], spread, sizes, space, rank_of, tier_of)
    kernels.settle_anywhere(rest[rank_of[rest] < 0], sizes, space, rank_of, tier_of)


def _chosen(
    plan: AccessPlan, sizes: Ids, space: Ids, of: Ids | None = None
) -> tuple[Ids, NDArray[np.int32], NDArray[np.int32]]:
    """The samples that get a home, the rank that reads each most often, and how often it does.

    of: samples to choose from, all unless given.
    """
    samples = np.arange(plan.samples) if of is None else of
    sizes_there = sizes if of is None else sizes[of]
    best, uses, total = _favourites(plan, samples, sizes, space)
    total_space = sum(map(sum, space.tolist()))
    which = np.arange(samples.size)
    if int(sizes_there.sum()) > total_space:
        by_use = np.lexsort((-uses, -total))
        count = int(np.searchsorted(np.cumsum(sizes_there[by_use]), total_space, side="right"))
        which = np.sort(by_use[:count])
    which = which[total[which] > 0]
    return samples[which], best[which], uses[which]


def _favourites(
    plan: AccessPlan, samples: Ids, sizes: Ids, space: Ids
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """For each sample the rank with space that reads it most often (-1: none), its reads, and those of all ranks."""
    from penstock.policy import _homes_kernels as kernels

    best = np.full(samples.size, -1, np.int32)
    uses = np.zeros(samples.size, np.int32)
    total = np.zeros(samples.size, np.int32)
    for block in blocks_of_samples(plan, samples):
        asked = samples[block]
        starts, ranks = readers_by_sample(plan, asked)
        kernels.find_favourites(starts, ranks, sizes[asked], space, best[block], uses[block], total[block])
    return best, uses, total


def _fill_with_copies(
    plan: AccessPlan, sizes: Ids, space: Ids, rank_of: NDArray[np.int32], tier_of: NDArray[np.int8]
) -> list[tuple[Kept, Ids]]:
    """Step 4: what each rank keeps besides its homes, and the step of its first read of each."""
    found = [(Kept(np.empty(0, np.int64), np.empty(0, np.int8)), np.empty(0, np.int64))] * plan.ranks
    ranks = np.flatnonzero(space.max(axis=1, initial=-1) >= sizes.min()).tolist()
    for rank, uses in zip(ranks, uses_of_ranks(plan, ranks), strict=True):
        # A copy is made at the first read, so the second one is the first that it saves.
        often = np.flatnonzero(uses.counts > 1)
        wanted = often[rank_of[uses.samples[often]] != rank]
        wanted = wanted[most_first(uses.counts[wanted])]
        tiers = fill_in_order(sizes[uses.samples[wanted]], space[rank].tolist())
        wanted = wanted[: tiers.size]
        copied = uses.samples[wanted]
        homeless = rank_of[copied] < 0  # found no space as a whole; a copy is a home then
        rank_of[copied[homeless]] = rank
        tier_of[copied[homeless]] = tiers[homeless]
        steps = steps_of_reads(plan, rank)[uses.first[wanted[~homeless]]]
        found[rank] = Kept(copied[~homeless], tiers[~homeless]), steps
    return found


def _in_filling_order(
    plan: AccessPlan,
    rank_of: NDArray[np.int32],
    tier_of: NDArray[np.int8],
    copies: Iterable[tuple[Kept, Ids]],
) -> Iterable[Kept]:
    step_of = first_reads(plan).step_of
    homes_of = _grouped_by_rank(rank_of, plan.ranks)
    for rank, (kept, steps) in enumerate(copies):
        homes = homes_of(rank)
        samples = np.concatenate((homes, kept.samples))
        order = np.argsort(np.concatenate((step_of[homes], steps)), kind="stable")
        yield Kept(samples[order], np.concatenate((tier_of[homes], kept.tiers))[order])


def _grouped_by_rank(rank_of: NDArray[np.int32], ranks: int) -> Callable[[int], Ids]:
    """A function that returns which samples are a rank's, ascending. rank_of: int32[n], -1 for no rank."""
    by_rank = ascending(rank_of)
    ends = np.concatenate(([0], np.cumsum(np.bincount(rank_of[rank_of >= 0], minlength=ranks))))
    return lambda rank: by_rank[ends[rank] : ends[rank + 1]]
