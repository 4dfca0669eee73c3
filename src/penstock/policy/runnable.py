"""What the loader of this version runs of all that policies decide and that can be simulated, and why not the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan
from penstock.plan.frequency import read_again, steps_of_reads, uses_of
from penstock.policy.loading import Ids, Job, Loading, LoadingPolicy, NotSupported, Staging
from penstock.policy.placement import Kept, Placement, Shared
from penstock.trace.schema import SOURCE
from penstock.units import format_bytes, format_bytes_up, format_count

#: The loading policies of the package that the loader follows.
LOADER_POLICIES = ("frequency", "frequency-alone", "frequency-cleanup", "frequency-unordered", "staging")
#: Batch slots that the loader has at least: the training holds one, one is complete, one is being filled.
LEAST_SLOTS = 3


@dataclass(frozen=True, slots=True)
class WriteQueue:
    """Which part of a loader's memory samples may have that wait to be written to disks.

    share: of the memory. most_bytes: at most so many of it.
    """

    share: float
    most_bytes: int

    def bytes_of(self, limit_bytes: int) -> int:
        """Return what they may have of so much memory."""
        return min(self.most_bytes, int(limit_bytes * self.share))

    def limit_for(self, rest_bytes: float) -> int:
        """Return the memory that leaves so much to all else."""
        return math.ceil(min(rest_bytes / (1 - self.share), rest_bytes + self.most_bytes))


#: Where no disk keeps samples.
NO_QUEUE = WriteQueue(0.0, 0)


def why_too_small(
    name: str,
    limit_bytes: int,
    slot_bytes: float,
    largest_sample_bytes: int,
    picture_bytes: int = 0,
    queue: WriteQueue = NO_QUEUE,
) -> str | None:
    """Return why the loader cannot stage in so much memory, by the memory's name; None where it can.

    slot_bytes: of a batch slot. picture_bytes: what a picture takes while it is decoded. queue: has a part of it.
    """
    least_bytes = LEAST_SLOTS * slot_bytes + 2 * largest_sample_bytes + picture_bytes
    queued_bytes, enough_bytes = queue.bytes_of(limit_bytes), queue.limit_for(least_bytes)
    if limit_bytes - queued_bytes >= least_bytes:
        return None
    decoded = f" and a picture of {format_bytes(picture_bytes)} while it is decoded" if picture_bytes else ""
    enough = format_bytes_up(enough_bytes)
    if enough == format_bytes(limit_bytes):  # else nobody sees what is missing
        enough += f", {format_count(enough_bytes - limit_bytes, 'byte')} more"
    queued, need = "", f"{enough}: give more"
    if queued_bytes:
        queued = f", of which {format_bytes(queued_bytes)} are for samples that wait to be written to disk"
        need = f"{format_bytes_up(least_bytes)} of the rest: give {enough}"
    return (
        f"{name} is {format_bytes(limit_bytes)}{queued}; {LEAST_SLOTS} batch slots of {format_bytes(slot_bytes)}, two "
        f"samples of up to {format_bytes(largest_sample_bytes)} in passing{decoded} need {need}, or make the batch "
        "smaller"
    )


def batch_bytes(plan: AccessPlan, sizes_bytes: NDArray[np.int64]) -> float:
    """Return what the largest local batch takes, as stored, of samples of the mean size."""
    return max(map(plan.max_local_batch, range(plan.ranks))) * max(1.0, float(sizes_bytes.mean()))


def why_not_run(policy: LoadingPolicy, loading: Loading, job: Job) -> str | None:
    """Return why the loader does not run what a policy decided for a job; None where it does.

    loading: what `prepared` returned.

    The loader runs a policy by which each rank keeps a part of its own reads (see `placement_of`) and, with share=, one
    by which ranks keep samples for each other (see `shared_by`).
    """
    machine, sizes_bytes = job.machine, job.sizes_bytes
    if asked := _not_obeyed(loading, job.asking):
        return f"the loader does not run policy {policy.name!r} yet, which {asked}"
    staging, largest_bytes = machine.storage[0], int(sizes_bytes.max(initial=0))
    slot_bytes = batch_bytes(job.plan, sizes_bytes)
    if reason := why_too_small(
        f"storage {staging.name!r}", staging.capacity_bytes, slot_bytes, largest_bytes
    ):
        return reason
    if isinstance(policy, Staging):  # keeps nothing
        return None
    if machine.ranks > 1 and loading.stages_from_peers and any(fill.samples.size for fill in loading.fills):
        return (
            'the loader reads other ranks\' memory where share="host" or share="hosts" says so; else each rank reads '
            "its own, as policy 'frequency-alone' has it"
        )
    return None


def placement_of(policy: LoadingPolicy, job: Job, rank: int) -> Placement:
    """Return what a rank keeps by a policy, and in which order it fills its tiers, as the scheduler runs it.

    Where a policy fills several tiers, the next sample is that of the fill whose samples so far are used first.

    Raises: NotSupported naming the policy and what the loader cannot run of it; ConfigError for a policy that fills a
        tier which the machine has not, keeps more than fits, or a sample twice: it names policy, rank and tier.
    """
    loading = prepared(policy, job)
    asked = _not_obeyed(loading, range(rank, rank + 1))
    if asked is None and job.ranks > 1 and promised_by(loading) is not None:
        asked = "keeps samples for other ranks, unless share= is given"
    if asked is None and loading.drops and job.form is not None:
        asked = f"drops samples that it kept, and keep= is given, by which these are {job.form.name}"
    if asked is None and loading.drops and job.plan.is_endless:
        asked = "drops samples after their last use, and a run without end has none"
    if asked is not None:
        raise _not_run(policy, asked)
    placement = _kept_by(loading, job, rank).as_placement(job.plan.samples)
    if not loading.drops:
        return placement
    return replace(placement, spares=loading.spares[rank] if loading.spares else np.empty(0, np.int64))


#: Why, for a policy that has each rank write other ranks' tiers.
_HANDS_OVER = (
    "hands samples from rank to rank after each step: ranks read each other's memory, and none writes into another's; "
    'policy="first-reader" with share= leaves each sample where it was read first, and reads the store as seldom'
)
_NOTHING = Kept(np.empty(0, np.int64), np.empty(0, np.int8))


def _not_run(policy: LoadingPolicy, asked: str) -> NotSupported:
    return NotSupported(
        f"the loader does not run policy {policy.name!r} yet, which {asked}. It runs {', '.join(LOADER_POLICIES)}, "
        "with share= first-reader, cover and hash-home, and those of your own that fill each rank's tiers from the "
        "store; penstock simulate loading predicts all"
    )


def _kept_by(loading: Loading, job: Job, rank: int, *, is_ordered: bool = True) -> Kept:
    """Return what a rank keeps; is_ordered: in the order in which it fills its tiers, see `placement_of`."""
    fills = [fill for fill in loading.fills if fill.rank == rank and fill.samples.size]
    if not fills:
        return _NOTHING
    samples = np.concatenate([fill.samples for fill in fills]).astype(np.int64, copy=False)
    tiers = np.concatenate([np.full(fill.samples.size, fill.tier, np.int8) for fill in fills])
    if len(fills) > 1 and is_ordered:
        uses = uses_of(job.plan, rank)
        first_use = np.full(job.plan.samples, np.iinfo(np.int64).max)
        first_use[uses.samples] = uses.first
        used_by = np.concatenate([np.maximum.accumulate(first_use[fill.samples]) for fill in fills])
        order = np.argsort(used_by, kind="stable")
        samples, tiers = samples[order], tiers[order]
    return Kept(samples, tiers)


def shared_by(policy: LoadingPolicy, job: Job, ordered: Sequence[int] | None = None) -> Shared:
    """Return what `shared_of` returns of a policy's decisions. Raises: as `shared_loading`."""
    return shared_of(shared_loading(policy, job), job, ordered)


def shared_loading(policy: LoadingPolicy, job: Job) -> Loading:
    """Return what a policy decides for the ranks of `job.sharing`: fills from the store.

    Raises: as `placement_of`; NotSupported for a policy by which ranks do not read each other's tiers.
    """
    loading = prepared(policy, job)
    asked = _not_obeyed(loading, job.asking)
    if asked is None and loading.drops:
        asked = "drops samples that other ranks may read, with share="
    if asked is not None:
        raise _not_run(policy, asked)
    if not loading.stages_from_peers:
        raise NotSupported(
            f"by policy {policy.name!r} each rank reads its own tiers alone, and share= is for ranks that read each "
            "other's: leave one of them out"
        )
    return loading


def shared_of(loading: Loading, job: Job, ordered: Sequence[int] | None = None) -> Shared:
    """Return what the ranks of `job.sharing` keep for each other. loading: of `shared_loading`.

    ordered: of which of them the caller needs the order in which they fill their tiers; all unless given.
    """
    kept = [
        _kept_by(loading, job, rank, is_ordered=ordered is None or rank in ordered)
        if rank in job.asking
        else _NOTHING
        for rank in range(job.ranks)
    ]
    return Shared(tuple(kept), promised_by(loading), job.first, reads_for_others=loading.reads_for_others)


def promised_by(loading: Loading) -> NDArray[np.int64] | None:
    """Return the samples that ranks promise each other to read first; None where there are none."""
    found = [fill.samples for fill in loading.fills if fill.is_promised and fill.samples.size]
    return np.concatenate(found) if found else None


def _not_obeyed(loading: Loading, ranks: Sequence[int]) -> str | None:
    """Return what a policy's decisions ask of ranks that the loader does not do; None if there is nothing."""
    own = [fill for fill in loading.fills if fill.rank in ranks]
    asked = {
        "changes who reads what": loading.strings is not None,
        "stages nothing ahead": not loading.stages or loading.is_ready,
        "does not stage from the store": not loading.stages_from_store,
        _HANDS_OVER: loading.hits is not None or any(fill.origin != "store" for fill in own),
        "fills tiers before the training begins": any(fill.before_training for fill in own),
    }
    return next((what for what, is_asked in asked.items() if is_asked), None)


def prepared(policy: LoadingPolicy, job: Job) -> Loading:
    """Return what a policy decides for a job.

    Raises: NotSupported where the policy cannot run it; ConfigError for decisions that cannot be carried out on the
        job's machine: it names policy, rank and tier; whatever else the policy's own code raises, with a note.
    """
    try:
        loading = policy.prepare(job)
    except NotSupported:
        raise
    except Exception as error:
        asking = f"all {job.ranks} ranks" if job.rank is None else f"rank {job.rank} of {job.ranks}"
        error.add_note(f"while policy {policy.name!r} decided for {asking} what is kept where (prepare)")
        raise
    if not isinstance(loading, Loading):
        raise ConfigError(
            f"policy {policy.name!r} prepared a {type(loading).__name__}: return a penstock.policy.loading.Loading"
        )
    name, storage, samples = policy.name, job.machine.storage, job.plan.samples
    nbytes = np.zeros((job.ranks, len(storage)), np.int64)
    of_ranks: list[list[NDArray[np.int64]]] = [[] for _ in range(job.ranks)]
    for fill in loading.fills:
        where = f"policy {name!r} fills tier {fill.tier} of rank {fill.rank}"
        if not 0 <= fill.rank < job.ranks:
            raise ConfigError(f"{where}, and the ranks are 0 to {job.ranks - 1}")
        if not 1 <= fill.tier < len(storage):
            raise ConfigError(f"{where}, and the tiers are 1 to {len(storage) - 1}: job.machine.storage[1:]")
        _check_ids(f"{where} with", fill.samples, samples)
        nbytes[fill.rank, fill.tier] += job.bytes_in(fill.tier, fill.samples)
        if nbytes[fill.rank, fill.tier] > (space := job.capacities_bytes(fill.rank)[fill.tier - 1]):
            raise ConfigError(
                f"{where} with {nbytes[fill.rank, fill.tier]:,} bytes, and it holds {space:,}: keep fewer samples"
            )
        of_ranks[fill.rank].append(fill.samples)
    answered = sorted({fill.rank for fill in loading.fills})
    if job.rank is not None and answered and job.rank not in answered:
        others = ", ".join(map(str, answered))
        raise ConfigError(
            f"policy {name!r} was asked what rank {job.rank} keeps and fills tier {loading.fills[0].tier} of rank "
            f"{others} alone: answer for the ranks of job.asking, with Fill(rank, tier, []) where one keeps nothing"
        )
    for what, arrays in (("strings", loading.strings), ("hits", loading.hits)):
        if arrays is not None and [each.size for each in arrays] != [each.size for each in job.strings]:
            raise ConfigError(
                f"policy {name!r} gives {what} of other lengths than the plan's strings: keep them"
            )
    for rank, string in enumerate(loading.strings or ()):
        _check_ids(f"policy {name!r} lets rank {rank} read", string, samples)
    if loading.spares is not None and len(loading.spares) != job.ranks:
        raise ConfigError(
            f"policy {name!r} gives spares for {len(loading.spares)} of {job.ranks} ranks: one array each"
        )
    for rank, spares in enumerate(loading.spares or ()):
        _check_ids(f"policy {name!r} gives rank {rank} as a spare", spares, samples)
        of_ranks[rank].append(spares)
    for rank, listed in enumerate(of_ranks):
        ids = np.sort(np.concatenate(listed)) if listed else np.empty(0, np.int64)
        if (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
            raise ConfigError(
                f"policy {name!r} lets rank {rank} keep sample {ids[twice[0]]} twice: list it in one fill, once, or in "
                "spares"
            )
    for rank, hits in enumerate(loading.hits or ()):
        if hits.max(initial=SOURCE) >= len(storage):
            raise ConfigError(
                f"policy {name!r} has hits in tier {hits.max()} of rank {rank}; tiers are 1 to {len(storage) - 1}"
            )
    if loading.hits is not None:
        _check_hits(name, job, loading.strings or job.strings, loading.hits)
    return loading


def _check_hits(name: str, job: Job, strings: Sequence[Ids], hits: Sequence[NDArray[np.int8]]) -> None:
    """Check that what waits in each tier at one time fits; time and memory: those of sorting all accesses."""
    of_ranks = [steps_of_reads(job.plan, rank) for rank in range(job.ranks)]
    steps = np.concatenate(of_ranks)
    count = int(steps.max(initial=0)) + 2
    handed_on = np.full(steps.size, -1, np.int64)  # at the end of which step
    now, following = read_again(np.concatenate(strings), steps)
    handed_on[following] = steps[now]
    ends = np.cumsum([string.size for string in strings])[:-1]
    for rank, (arrives, found) in enumerate(zip(np.split(handed_on, ends), hits, strict=True)):
        if (never := np.flatnonzero((found != SOURCE) & (arrives < 0))).size:
            raise ConfigError(
                f"policy {name!r} lets rank {rank} find sample {strings[rank][never[0]]} in tier {found[never[0]]} at "
                f"its read {never[0]:,}, and no rank has read it before: hits say what a previous reader hands on"
            )
        for tier in range(1, len(job.machine.storage)):
            here = np.flatnonzero(found == tier)
            nbytes, steps_here = job.sizes_bytes[strings[rank][here]], of_ranks[rank][here]
            come = np.bincount(arrives[here] + 1, nbytes, count)
            waiting = np.cumsum(come - np.bincount(steps_here + 1, nbytes, count))
            capacity_bytes = job.machine.storage[tier].capacity_bytes
            if (full := np.flatnonzero(waiting > capacity_bytes)).size:
                raise ConfigError(
                    f"policy {name!r} has hits by which {waiting[full[0]]:,.0f} bytes wait in tier {tier} of rank "
                    f"{rank} before step {full[0]:,}, and it holds {capacity_bytes:,}: hand on fewer samples"
                )


def _check_ids(does: str, ids: NDArray[np.int64], samples: int) -> None:
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= samples:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ConfigError(f"{does} sample {wrong}; samples are 0 to {samples - 1:,}")
