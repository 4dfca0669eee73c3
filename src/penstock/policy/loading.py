"""Loading policies of a whole job: what each rank keeps, and from where it stages.

A policy is asked once, before the run, and answers with a `Loading`: values that a simulator or real ranks carry out.
Those of the literature are here to be compared with; each class names its source.

A policy of one's own is a class with a `name` and a `prepare`:

    class Nothing:
        name = "nothing"

        def prepare(self, job: Job) -> Loading:
            return Loading()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.plan.frequency import check_partition, first_reads, uses_of
from penstock.plan.local import split_locally
from penstock.plan.random import derive_key, draw_uniform
from penstock.policy.forms import CropForm
from penstock.policy.homes import (
    Homes,
    as_sizes,
    counted,
    place_by_first_read,
    place_by_hash,
    place_cover,
)
from penstock.policy.placement import (
    LEAST_SHARE,
    Kept,
    counted_of_rank,
    fill_in_order,
    keep_by_frequency,
    share_of_store_rate,
)
from penstock.policy.push import decide_push
from penstock.trace.schema import SOURCE

Ids = NDArray[np.int64]


class NotSupported(ConfigError):
    """A policy cannot run this job, for example because the data set does not fit; tables show it as N/A."""


class Job:
    """What a policy may know: all of it, before the run.

    plan: who reads what, when. sizes_bytes: int64[F], as stored. machine: of every rank; tiers are
    machine.storage[1:], and a tier's number is its index there. rank: the one rank that asks, as in a run, where each
    decides for itself; None: all, as in a simulation. form: in which tiers keep samples, if not as they are stored.
    sharing: the ranks that read each other's tiers, which then ask for all of them; None: all. first: (epoch, step) at
    which the run begins. held: by rank, samples that an earlier run left on disks of these ranks. tiers_bytes: by rank,
    what its tiers hold, where ranks differ; the machine's hold as much as the largest.
    """

    def __init__(
        self,
        plan: AccessPlan,
        sizes_bytes: NDArray[np.int64],
        machine: Machine,
        seed: int = 0,
        rank: int | None = None,
        form: CropForm | None = None,
        sharing: Sequence[int] | None = None,
        first: tuple[int, int] = (0, 0),
        held: Mapping[int, NDArray[np.int64]] | None = None,
        tiers_bytes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if machine.ranks != plan.ranks:
            raise ConfigError(
                f"machine.ranks is {machine.ranks}, and the plan's is {plan.ranks}: they are one number, N"
            )
        self.plan = plan
        self.sizes_bytes = as_sizes(sizes_bytes, plan.samples)
        self.machine = machine
        self.seed = seed
        self.rank = rank
        self.form = form
        self.sharing = sharing
        self.first = first
        self.held = held
        self.tiers_bytes = tiers_bytes or {}

    @property
    def ranks(self) -> int:
        """N."""
        return self.plan.ranks

    @property
    def asking(self) -> Sequence[int]:
        """The ranks that need to know what they keep. A policy may leave out the fills of all others."""
        if self.sharing is not None:
            return self.sharing
        return range(self.ranks) if self.rank is None else range(self.rank, self.rank + 1)

    @cached_property
    def strings(self) -> list[Ids]:
        """Each rank's access string R_i over the run: int64[reads] each, read-only."""
        strings = self.plan.strings()
        for string in strings:
            string.flags.writeable = False
        return strings

    @cached_property
    def total_bytes(self) -> int:
        """S, the size of the data set."""
        return int(self.sizes_bytes.sum())

    @cached_property
    def kept_bytes(self) -> NDArray[np.int64]:
        """What samples take in tiers: int64[F], or int64[tiers, F] where that differs from tier to tier.

        Pictures that ranks share are kept as stored where their pixels find no space.
        """
        if self.form is None or len(self.machine.storage) == 1:
            return self.sizes_bytes
        found = np.tile(self.sizes_bytes, (len(self.machine.storage) - 1, 1))
        for tier, storage in enumerate(self.machine.storage[1:], start=1):
            if self.form.is_in(tier):
                found[tier - 1] = self.form.sample_bytes(storage.capacity_bytes, self.plan.samples)
                if self.form.is_decoded and self.sharing is not None:
                    found[tier - 1] = np.maximum(found[tier - 1], self.sizes_bytes + self.form.HEAD_BYTES)
        return found

    @property
    def saved_by_crops(self) -> NDArray[np.int64] | None:
        """What having a sample as crops saves: reading and decoding its bytes. None where it has no crops.

        Pixels of whole pictures take space as reading and decoding them takes time.
        """
        has_crops = self.form is not None and not self.form.is_decoded and self.kept_bytes.ndim == 2
        return self.sizes_bytes if has_crops else None

    def bytes_in_tiers(self, policy: str) -> Ids:
        """Return what samples take in any tier: int64[F].

        Raises: NotSupported where that differs from tier to tier, naming the policy that would have it alike.
        """
        found = np.atleast_2d(self.kept_bytes)
        if (found != found[0]).any():
            raise NotSupported(
                f"{policy} takes a sample to be as large in each tier, and here some of them keep it in another form: "
                "leave the disks out, or the form"
            )
        first: Ids = found[0]
        return first

    def bytes_in(self, tier: int, samples: Ids) -> int:
        """Return what samples take in a tier."""
        kept = self.kept_bytes if self.kept_bytes.ndim == 1 else self.kept_bytes[tier - 1]
        return int(kept[samples].sum())

    def capacities_bytes(self, rank: int | None = None) -> list[int]:
        """Return d_1, d_2, ... of a rank; None: what every rank has of each."""
        of_all = self.tiers_bytes.values() if rank is None else [self.tiers_bytes.get(rank, ())]
        if not all(of_all) or not of_all:
            return [tier.capacity_bytes for tier in self.machine.storage[1:]]
        return list(map(min, zip(*of_all, strict=True)))

    def worthwhile_bytes(self, least_share: float = LEAST_SHARE, rank: int | None = None) -> list[int]:
        """Return the same, with 0 for a tier that is too slow for the store.

        A tier that has samples in a form saves decoding, too, for which it was chosen.

        least_share: of the rate at which the store delivers samples to each rank while all read it.
        """
        mean_bytes = self.total_bytes / self.plan.samples

        def is_worthwhile(tier: int) -> bool:
            is_in_form = self.form is not None and self.form.is_in(tier)
            return is_in_form or share_of_store_rate(self.machine, tier, mean_bytes) >= least_share

        return [
            nbytes if is_worthwhile(number) else 0
            for number, nbytes in enumerate(self.capacities_bytes(rank), start=1)
        ]

    def worthwhile_of_ranks(self) -> Ids:
        """Return the same for all ranks: int64[ranks, tiers]; 0 for those that do not share, where some do."""
        found = np.zeros((self.ranks, len(self.machine.storage) - 1), np.int64)
        for rank in range(self.ranks) if self.sharing is None else self.sharing:
            found[rank] = self.worthwhile_bytes(rank=rank)
        return found

    def tier(self, number: int, policy: str) -> int:
        """Return the tier's capacity in bytes.

        Raises: NotSupported if the machine has no such tier, naming the policy that needs it.
        """
        if number >= len(self.machine.storage):
            raise NotSupported(
                f"{policy} keeps samples in storage class {number}, and the machine has {len(self.machine.storage)} "
                "classes, the staging buffer included: add one, or leave the policy out"
            )
        return self.capacities_bytes()[number - 1]


def _need_one_reader(job: Job, policy: str) -> None:
    """Raise NotSupported where several ranks read a sample of a batch, so that none of them can be its reader."""
    try:
        check_partition(job.plan)
    except ConfigError as error:
        raise NotSupported(f"{policy}: {error}") from error


@dataclass(frozen=True, slots=True)
class Fill:
    """Samples that one rank brings into one tier, in this order, with the tier's own threads.

    origin: ``store``: read from the shared store. ``peers``: copied from other ranks that hold them.
        ``hand-over``: nobody reads them for this purpose; the first rank that reads a sample for its training hands it
        over.
    before_training: training waits until all such fills are done.
    is_promised: no rank reads one of these samples from the store before this rank does, so that the others wait for it
        rather than read the store.
    """

    rank: int
    tier: int
    samples: Ids
    origin: Literal["store", "peers", "hand-over"] = "store"
    before_training: bool = False
    is_promised: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "tier"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} of a Fill is {value!r}; it is an integer")
        _check_array("samples of a Fill", self.samples, "sample ids")
        if self.origin not in ("store", "peers", "hand-over"):
            raise ConfigError(f"origin of a Fill is {self.origin!r}; it is 'store', 'peers' or 'hand-over'")
        if self.is_promised and (self.origin != "store" or self.before_training):
            raise ConfigError(
                f"a Fill of origin {self.origin!r} is promised; a rank promises what it reads from the store during "
                "the training"
            )
        if (self.origin == "peers" and not self.before_training) or (
            self.origin == "hand-over" and self.before_training
        ):
            when = "before" if self.before_training else "during"
            raise ConfigError(
                f"a Fill of origin {self.origin!r} {when} the training is not modelled: copies from peers are made "
                "before it, hand-overs happen during it"
            )


def _check_array(what: str, array: object, of: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        given = f"a {type(array).__name__}"
        if isinstance(array, np.ndarray):
            given = f"{array.dtype} of shape {array.shape}"
        raise ConfigError(f"{what} are {given}; they are {of}, a NumPy array of integers, one-dimensional")


@dataclass(frozen=True, slots=True)
class Loading:
    """A policy's decisions for a job.

    fills: what the tiers get. The samples of a rank's tier must fit into it, but for `spares`.
    strings: int64 array per rank where the policy changes who reads what; as long as the plan's. None: the plan's.
    stages: staging threads run ahead of the training; without, each sample is fetched when it is asked for.
    stages_from_store: whether they may read the shared store; without, samples that no rank holds are fetched when
        asked for.
    stages_from_peers: whether they may read other ranks' tiers. prefers_peers: they do so wherever one has a sample, as
        those that share do in a run, so that the store is read about once for each; else where it is expected sooner.
    hits: int8 array per rank: the tier in which each of its reads finds the sample, handed on by its previous user;
        SOURCE (-1) where it does not. It takes space there from the step after that user's to the step of the read.
        None: nowhere.
    drops: after a rank's last read of it a sample gives its place in the rank's tiers to `spares`; until one takes it
        other ranks may read it. What the rank will not read from its tiers any more is not brought in.
    spares: samples per rank that follow, in this order, where space is made in a tier that fills were for; with `drops`
        alone.
    is_ready: every sample is ready when it is asked for, whatever it takes.
    reads_for_others: ranks read promised samples ahead of whoever trains on them first, not of their own training; who
        needs one waits for as long as the store takes for a batch, not for a read.
    """

    fills: Sequence[Fill] = ()
    strings: list[Ids] | None = None
    stages: bool = True
    stages_from_store: bool = True
    stages_from_peers: bool = False
    hits: list[NDArray[np.int8]] | None = None
    drops: bool = False
    spares: list[Ids] | None = None
    is_ready: bool = False
    reads_for_others: bool = False
    prefers_peers: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fills, Sequence) or not all(isinstance(fill, Fill) for fill in self.fills):
            raise ConfigError("fills of a Loading are a list of penstock.policy.loading.Fill")
        for name, of in (("strings", "sample ids"), ("spares", "sample ids"), ("hits", "numbers of tiers")):
            if not isinstance(arrays := getattr(self, name), list | tuple | None):
                raise ConfigError(
                    f"{name} of a Loading is a {type(arrays).__name__}; it is a list, an array a rank"
                )
            for rank, each in enumerate(arrays or ()):
                _check_array(f"{name} of rank {rank}", each, of)
        for hits in self.hits or ():
            if ((hits != SOURCE) & (hits < 1)).any():
                raise ConfigError(
                    f"hits name tier {hits.min()}; a tier is 1 or more, and {SOURCE} means none"
                )
        if self.hits is not None and (self.fills or self.drops):
            raise ConfigError(
                "hits are given with fills or drops: what is handed from reader to reader has no home; leave one out"
            )
        if self.spares is not None and not self.drops:
            raise ConfigError(
                "spares are given without drops, so that space is never made for them: set drops=True"
            )


class LoadingPolicy(Protocol):
    """How a job loads."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def prepare(self, job: Job) -> Loading:
        """Decide.

        Raises: NotSupported where the policy cannot run the job.
        """
        ...


@dataclass(frozen=True, slots=True)
class LowerBound:
    """No rank ever waits for a sample; only for the slowest rank of a step. Source: thesis, section 4.1.4."""

    name: str = "lower-bound"

    def prepare(self, job: Job) -> Loading:
        return Loading(stages=False, is_ready=True)


@dataclass(frozen=True, slots=True)
class Naive:
    """Fetch each sample from the shared store when it is asked for. Source: thesis, section 4.1.4."""

    name: str = "naive"

    def prepare(self, job: Job) -> Loading:
        return Loading(stages=False)


@dataclass(frozen=True, slots=True)
class Staging:
    """Stage ahead from the shared store, keep nothing: tf.data, double buffering. Source: thesis, 2.3 and 4.1.4."""

    name: str = "staging"

    def prepare(self, job: Job) -> Loading:
        return Loading()


@dataclass(frozen=True, slots=True)
class DeepIO:
    """Keep a contiguous part of the data set in memory, exchange the rest.

    Where every rank's tier 1 holds its part, rank i loads ids [iF/N, (i+1)F/N) before training; else each rank fills
    its tier 1 with the ids that follow those of the rank before.
    opportunistic: train on what is held instead of what the plan says: each read becomes a random sample, with
        probability 1/(N-1) one of the rank's own (always on rank 0), else one of the rank before. Where that rank
        holds none, the plan's sample stays.
    Source: Zhu et al., "Entropy-aware I/O pipelining for large-scale deep learning on HPC systems", MASCOTS 2018, as
        the thesis, section 2.3, models it.
    """

    opportunistic: bool = False

    @property
    def name(self) -> str:
        return "deepio-opportunistic" if self.opportunistic else "deepio"

    def prepare(self, job: Job) -> Loading:
        capacity_bytes = job.tier(1, self.name)
        parts = equal_parts(job.plan.samples, job.ranks)
        if max(int(job.sizes_bytes[begin:end].sum()) for begin, end in parts) > capacity_bytes:
            parts = _parts_that_fit(job.sizes_bytes, [capacity_bytes] * job.ranks)
        fills = [Fill(rank, 1, np.arange(*part), before_training=True) for rank, part in enumerate(parts)]
        strings = self._draw(job, parts) if self.opportunistic else None
        return Loading(fills, strings, stages_from_store=False, stages_from_peers=True)

    def _draw(self, job: Job, parts: list[tuple[int, int]]) -> list[Ids]:
        key = derive_key(job.seed, "deepio opportunistic order")
        strings = []
        for rank, string in enumerate(job.strings):
            draws = draw_uniform(key, rank, np.arange(string.size), 2)
            own = np.full(string.size, rank == 0 or job.ranks < 3)
            if job.ranks >= 3:
                own |= draws[:, 0] < 1 / (job.ranks - 1)
            begins, ends = np.array(parts, np.int64).T
            source = np.where(own, rank, rank - 1)
            held = ends[source] - begins[source]
            drawn = begins[source] + (draws[:, 1] * held).astype(np.int64)
            strings.append(np.where(held > 0, drawn, string))
        return strings


@dataclass(frozen=True, slots=True)
class ParallelStaging:
    """Load an own part into tier 2 before training, copy more from peers, then train on what is there.

    The copies are of the ids that follow the own part, around the end.
    Source: Kurth et al., "Exascale deep learning for climate analytics", SC'18, as thesis, section 2.3, models it.
    """

    name: str = "parallel-staging"

    def prepare(self, job: Job) -> Loading:
        capacity_bytes = job.tier(2, self.name)
        samples = job.plan.samples
        key = derive_key(job.seed, "parallel staging order")
        fills, strings = [], []
        for rank, (begin, end) in enumerate(equal_parts(samples, job.ranks)):
            own = ids_that_fit(np.arange(begin, end), job.sizes_bytes, capacity_bytes)
            left_bytes = capacity_bytes - int(job.sizes_bytes[own].sum())
            others = np.arange(end, end + samples - (end - begin)) % samples
            copied = ids_that_fit(others, job.sizes_bytes, left_bytes)
            fills.append(Fill(rank, 2, own, before_training=True))
            fills.append(Fill(rank, 2, copied, "peers", before_training=True))
            trained = np.concatenate([own, copied])
            if not trained.size:
                raise NotSupported(
                    f"{self.name}: storage class 2 of rank {rank} holds no sample: make it larger"
                )
            length = job.strings[rank].size
            drawn = (draw_uniform(key, rank, np.arange(length), 1)[:, 0] * trained.size).astype(np.int64)
            strings.append(trained[drawn])
        return Loading(fills, strings, stages_from_store=False)


@dataclass(frozen=True, slots=True)
class LbannStore:
    """Keep the whole data set in the ranks' tier 1, exchange samples as they are due.

    preloading: each rank loads a contiguous part before training. Else (dynamic) it keeps the first F / N samples that
        it reads. What of its part a tier does not hold, because sizes differ, is read from the store each time.
    Source: Jacobs et al., "Parallelizing training of deep generative models on massive scientific datasets", CLUSTER
        2019, as thesis, section 2.3, models it.
    """

    preloading: bool = False

    @property
    def name(self) -> str:
        return "lbann-preloading" if self.preloading else "lbann-dynamic"

    def prepare(self, job: Job) -> Loading:
        """See `LoadingPolicy.prepare`.

        Raises: NotSupported if the data set is larger than all ranks' tier 1 together.
        """
        tier_bytes = job.tier(1, self.name)
        capacity_bytes = tier_bytes * job.ranks
        if job.total_bytes > capacity_bytes:
            raise NotSupported(
                f"{self.name} keeps the whole data set ({job.total_bytes:,} bytes) in storage class 1 of all "
                f"ranks, which hold {capacity_bytes:,} bytes: give them more, or choose another policy"
            )
        if self.preloading:
            ids = [np.arange(begin, end) for begin, end in equal_parts(job.plan.samples, job.ranks)]
            kept = [ids_that_fit(each, job.sizes_bytes, tier_bytes) for each in ids]
            fills = [Fill(rank, 1, each, before_training=True) for rank, each in enumerate(kept)]
            return Loading(fills, stages_from_store=False, stages_from_peers=True)
        share = job.plan.samples // job.ranks
        kept = [ids_that_fit(_firsts(string[:share]), job.sizes_bytes, tier_bytes) for string in job.strings]
        fills = [Fill(rank, 1, each, "hand-over") for rank, each in enumerate(kept)]
        return Loading(fills, stages_from_peers=True)


def equal_parts(samples: int, ranks: int) -> list[tuple[int, int]]:
    """Return contiguous ranges of floor(F / N) ids; the last rank takes the rest."""
    share = samples // ranks
    return [(rank * share, samples if rank == ranks - 1 else (rank + 1) * share) for rank in range(ranks)]


def _parts_that_fit(sizes_bytes: NDArray[np.int64], capacities_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return contiguous ranges of ids that fill each capacity, one after the other."""
    ends_bytes = np.cumsum(sizes_bytes)
    parts: list[tuple[int, int]] = []
    begin = 0
    for capacity_bytes in capacities_bytes:
        before = int(ends_bytes[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends_bytes, before + capacity_bytes, side="right"))
        parts.append((begin, end))
        begin = end
    return parts


def ids_that_fit(samples: Ids, sizes_bytes: NDArray[np.int64], capacity_bytes: int) -> Ids:
    """Return the samples before the first that no longer fits."""
    return samples[: fill_in_order(sizes_bytes[samples], [capacity_bytes]).size]


def _firsts(ids: Ids) -> Ids:
    """Return the ids without repeats, in the order of their first occurrence."""
    unique, first = np.unique(ids, return_index=True)
    ordered: Ids = unique[np.argsort(first, kind="stable")]
    return ordered


@dataclass(frozen=True, slots=True)
class Frequency:
    """Keep what a rank itself reads most often, in its fastest tiers: HDMLP, later NoPFS.

    in_order: tiers are filled by first use; else by frequency.
    is_alone: ranks do not read each other's tiers.
    cleanup_read: after the rank's last read of it a sample makes space for the next by frequency that is still read.
    Source: thesis, section 3.2.
    """

    in_order: bool = True
    cleanup_read: bool = False
    is_alone: bool = False

    @property
    def name(self) -> str:
        words = (
            ("-unordered", not self.in_order),
            ("-cleanup", self.cleanup_read),
            ("-alone", self.is_alone),
        )
        return "frequency" + "".join(word for word, applies in words if applies)

    def prepare(self, job: Job) -> Loading:
        fills: list[Fill] = []
        spares: list[Ids] = [np.empty(0, np.int64) for _ in range(job.ranks)]
        for rank in job.asking:
            if self.in_order and not self.cleanup_read:
                saved, in_form = job.saved_by_crops, 0 if job.form is None else job.form.TIER + job.form.disks
                kept = keep_by_frequency(
                    job.plan, rank, job.kept_bytes, job.worthwhile_bytes(rank=rank), saved, in_form
                )
                fills += _fills_of(rank, kept, "store")
                continue
            uses = uses_of(counted_of_rank(job.plan, rank) if job.plan.is_endless else job.plan, rank)
            order = np.argsort(-uses.counts, kind="stable")
            listed, first_use = uses.samples[order], uses.first[order]
            tiers = fill_in_order(job.kept_bytes[..., listed], job.worthwhile_bytes(rank=rank))
            listed_kept = listed[: tiers.size]
            if self.cleanup_read:
                spares[rank] = listed[tiers.size :]
            if self.in_order:
                by_first_use = np.argsort(first_use[: tiers.size], kind="stable")
                listed_kept, tiers = listed_kept[by_first_use], tiers[by_first_use]
            fills += _fills_of(rank, Kept(listed_kept, tiers), "store")
        return Loading(
            fills,
            stages_from_peers=not self.is_alone,
            drops=self.cleanup_read,
            spares=spares if self.cleanup_read else None,
        )


def _fills_of(rank: int, kept: Kept, origin: Literal["store", "hand-over"]) -> list[Fill]:
    return [
        Fill(rank, int(tier), kept.samples[kept.tiers == tier], origin)
        for tier in np.flatnonzero(np.bincount(kept.tiers)).tolist()  # np.unique imports 20 ms of modules
    ]


def _promised_fills(rank: int, kept: Kept, is_promised: NDArray[np.bool_]) -> list[Fill]:
    """Return the fills of a rank that reads some of its samples before any other. is_promised: bool[F]."""
    fills: list[Fill] = []
    for is_first in (True, False):
        is_in = is_promised[kept.samples] == is_first
        part = Kept(kept.samples[is_in], kept.tiers[is_in])
        fills += [replace(fill, is_promised=is_first) for fill in _fills_of(rank, part, "store")]
    return fills


def _fills_of_homes(homes: Homes, job: Job) -> list[Fill]:
    """Return what each of the ranks that share reads for all: its homes, in the order of any rank's first read."""
    step_of = first_reads(counted(job.plan, job.first), job.sharing, job.first).step_of
    fills: list[Fill] = []
    for rank in job.asking:
        kept = homes.keeps[rank]
        is_home = (homes.rank_of[kept.samples] == rank) & (step_of[kept.samples] >= 0)
        samples = kept.samples[is_home]
        order = np.argsort(step_of[samples], kind="stable")
        of_rank = _fills_of(rank, Kept(samples[order], kept.tiers[is_home][order]), "store")
        fills += [replace(fill, is_promised=True) for fill in of_rank] or [Fill(rank, 1, samples)]
    return fills


@dataclass(frozen=True, slots=True)
class LocalityAware:
    """Load a contiguous part before training; ranks then exchange the samples of a batch for those they hold.

    The part fills the tiers fastest first.
    Source: Yang & Cong, "Accelerating data loading in deep neural network training", HiPC 2019, as the thesis, section
        2.3, models it.
    """

    name: str = "locality-aware"

    def prepare(self, job: Job) -> Loading:
        fills: list[Fill] = []
        _need_one_reader(job, self.name)
        rank_of = np.full(job.plan.samples, -1, np.int64)
        for rank, (begin, end) in enumerate(equal_parts(job.plan.samples, job.ranks)):
            tiers = fill_in_order(job.sizes_bytes[begin:end], job.capacities_bytes())
            kept = np.arange(begin, begin + tiers.size)
            rank_of[kept] = rank
            fills += [
                replace(fill, before_training=True) for fill in _fills_of(rank, Kept(kept, tiers), "store")
            ]
        return Loading(fills, split_locally(job.plan, rank_of).strings(), stages_from_peers=True)


@dataclass(frozen=True, slots=True)
class OneHome:
    """Agreed homes: every sample is read from the shared store once, by its first reader, who hands it to its home.

    Ranks that share in a run (`Job.sharing`) write no other's memory: there the home reads it, in the order in which it
    is needed, and its first reader waits for that. They keep no copies besides.
    by: ``hash``: the home follows from the sample's id, as in hash-partitioned caches, and knows nothing of the order.
        ``cover``: it follows from the order, see `penstock.policy.homes.place_cover`. ``first-reader``: it is the first
        reader, so that nothing is handed over, see `penstock.policy.homes.place_by_first_read`.
    reads_locally: ranks exchange the samples of a batch for those they hold, see `penstock.plan.local`. The global
        batch is unchanged; what is computed over a local batch alone, as BatchNorm's statistics, is not.
    """

    by: Literal["hash", "cover", "first-reader"] = "cover"
    reads_locally: bool = False

    @property
    def name(self) -> str:
        return ("hash-home" if self.by == "hash" else self.by) + ("+local" if self.reads_locally else "")

    def prepare(self, job: Job) -> Loading:
        if not any(job.worthwhile_bytes()):
            return Loading()
        if self.by != "hash" or self.reads_locally or job.sharing is not None:
            _need_one_reader(job, self.name)
        if self.by != "first-reader" and job.sharing is not None and job.form is not None:
            raise NotSupported(
                f"by policy {self.name!r} ranks read samples for others ahead of need, and those that are kept as "
                f"{job.form.name} are made by whoever decodes one for its own batch: leave policy out, or keep"
            )
        if self.by == "first-reader":
            homes, promised = place_by_first_read(
                job.plan,
                job.bytes_in_tiers(self.name),
                job.worthwhile_of_ranks(),
                job.sharing,
                job.first,
                job.held,
            )
            is_promised = np.zeros(job.plan.samples, bool)
            is_promised[promised] = True
            fills = [
                fill
                for rank, kept in enumerate(homes.keeps)
                for fill in _promised_fills(rank, kept, is_promised) or [Fill(rank, 1, kept.samples)]
            ]
            return Loading(fills, stages_from_peers=True, prefers_peers=True)
        capacities_bytes = job.worthwhile_of_ranks()
        if self.by == "hash":
            homes = place_by_hash(job.sizes_bytes, capacities_bytes, job.ranks)
        else:
            homes = place_cover(counted(job.plan, job.first), job.sizes_bytes, capacities_bytes)
        if job.sharing is not None:
            return Loading(_fills_of_homes(homes, job), stages_from_peers=True, reads_for_others=True)
        fills = [fill for rank, kept in enumerate(homes.keeps) for fill in _fills_of(rank, kept, "hand-over")]
        strings = split_locally(job.plan, homes.rank_of).strings() if self.reads_locally else None
        return Loading(fills, strings, stages_from_peers=True, prefers_peers=True)


@dataclass(frozen=True, slots=True)
class Push:
    """Each sample is handed to its next user ahead of time, see `penstock.policy.push`."""

    name: str = "push"

    def prepare(self, job: Job) -> Loading:
        # What waits in a tier is read there, however slow that is.
        capacities_bytes = job.worthwhile_bytes(least_share=1.0)
        if not any(capacities_bytes):
            return Loading()
        _need_one_reader(job, self.name)
        hits = [
            decide_push(job.plan, rank, job.sizes_bytes, capacities_bytes).tiers for rank in range(job.ranks)
        ]
        return Loading(hits=hits)
