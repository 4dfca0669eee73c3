"""A whole job as the loaders of all ranks would run it under a policy: their schedulers in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan, frequency
from penstock.policy import StagingLimits, decisions
from penstock.policy.decisions import place_of
from penstock.policy.forms import CropForm, disk_parts
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy
from penstock.policy.placement import Kept
from penstock.policy.runnable import LEAST_SLOTS, batch_bytes, prepared, promised_by, why_not_run
from penstock.simulate import _clock
from penstock.simulate.loading import Agreed, Run, Steps, run_in_virtual_time, steps_of
from penstock.trace.schema import SOURCE, SPAN, STAGING

if TYPE_CHECKING:
    from penstock.simulate.scenario import Scenario

#: What a read takes, of all ranks, compiled, on one core. Measured: 0.5 us, and up to 1.4 with other ranks' tiers.
SECONDS_PER_READ = 1e-6
#: The spans of runs of more reads would take more than 4 GB.
MOST_READS = 30_000_000
#: More slots than this change nothing: a batch is staged long before it is due.
_MOST_SLOTS = 64
#: Columns of `LoadingResult.reads`.
ORIGINS = ("staged from the store", "staged from a tier", "staged from a peer", "store", "tier", "peer")


@dataclass(frozen=True, slots=True)
class LoadingResult:
    """What a simulated run amounts to.

    run_seconds: from the start, loading before training included, to the end of the last step.
    initial_stall_seconds: of loading before training.
    step_end_seconds: float64[steps].
    step_stall_seconds, step_busy_seconds: float32[steps, ranks], each rank's waiting for samples and its compute.
    reads: int64[ranks, 6], consumed samples by where they came from, see ORIGINS; the last three were not staged.
    store_bytes: float64[ranks], read from the shared store, for tiers too. fill_reads: int64[ranks], reads of the
        store that filled tiers.
    not_runnable_reason: why the loader of this version does not run this; None where it does.
    """

    policy: str
    run_seconds: float
    initial_stall_seconds: float
    step_end_seconds: NDArray[np.float64]
    step_stall_seconds: NDArray[np.float32]
    step_busy_seconds: NDArray[np.float32]
    reads: NDArray[np.int64]
    store_bytes: NDArray[np.float64]
    fill_reads: NDArray[np.int64]
    not_runnable_reason: str | None = None

    @property
    def stall_seconds(self) -> NDArray[np.float64]:
        """float64[ranks], waiting for samples over the run, loading before training included."""
        stalls: NDArray[np.float64] = self.step_stall_seconds.sum(axis=0, dtype=np.float64)
        return stalls + self.initial_stall_seconds


def simulate_loading(
    scenario: Scenario, policy: LoadingPolicy, form: CropForm | None = None
) -> LoadingResult:
    """Run a scenario under a policy.

    form: in which memory keeps samples, if it has some, and disks where that saves more; None as they are stored.
    Raises: as `simulate_job`; ConfigError for crops of some epochs with several ranks.
    """
    on, sizes_bytes = scenario.machine, scenario.sizes_bytes()
    if len(on.storage) == 1 or not on.storage[1].is_memory:
        form = None
    if form is not None and form.epochs and on.ranks > 1:
        raise ConfigError(
            f"{form.name} are kept on one rank, and there are {on.ranks}: each epoch gives a rank other samples, whose "
            "crops it would not have"
        )
    if form is not None:
        memory = [each for each in on.storage[1:] if each.is_memory]
        parts = disk_parts(form, [each for each in on.storage[1:] if not each.is_memory], sizes_bytes, on)
        if parts:
            on = replace(on, storage=(on.storage[0], *memory, *(each.storage for each in parts)))
            in_form = sum(each.is_in_form for each in parts)
            form = replace(form, disks=len(memory) - form.TIER + in_form)
    return simulate_job(Job(scenario.plan(), sizes_bytes, on, scenario.seed, form=form), policy)


def simulate_job(job: Job, policy: LoadingPolicy) -> LoadingResult:
    """Run a job under a policy; several policies can be run on one job, which keeps its access strings.

    Raises: NotSupported where the policy cannot run it; ConfigError where the machine's compute is unknown.
    """
    loading = prepared(policy, job)
    reason = why_not_run(policy, loading, job)
    if job.machine.compute is None:
        raise ConfigError(
            "machine.compute is unknown: say how fast the training consumes, for example '100 MB/s'"
        )
    run = run_job(job, loading)
    reads = np.zeros((job.ranks, len(ORIGINS)), np.int64)
    # What is fetched when it is asked for was not staged.
    first = 0 if loading.stages or loading.is_ready else len(ORIGINS) // 2
    reads[:, first : first + run.reads.shape[1]] = run.reads
    return LoadingResult(
        policy.name,
        float(run.step_end_seconds[-1]) if run.step_end_seconds.size else run.begin_seconds,
        run.begin_seconds,
        run.step_end_seconds,
        run.step_stall_seconds,
        run.step_busy_seconds,
        reads,
        run.store_bytes,
        run.fill_reads,
        reason,
    )


def run_job(job: Job, loading: Loading) -> Run:
    """Run a job as a policy loads it.

    A rank has as many readers as the store or its staging buffer has threads, and those of its disks; half of the
    staging buffer is for batch slots, half for bytes on their way. One that stages nothing has one slot, and one thread
    that reads and decodes.

    job: its machine's compute is known. Time: `SECONDS_PER_READ`.
    """
    machine = job.machine
    read = steps_of(job.plan, range(job.ranks), loading.strings or job.strings)
    if loading.is_ready:
        return _run_ready(read, job)
    readers = max(machine.source.threads, machine.storage[0].threads)
    readers += sum(tier.threads for tier in machine.storage[1:] if not tier.is_memory)
    limits = limits_of(job.plan, machine, job.sizes_bytes, readers)
    if not loading.stages:
        limits = StagingLimits(1, readers if loading.fills or loading.hits else 0, 1, limits.undecoded_bytes)
    agreed = agreed_by(loading, job, read)
    return run_in_virtual_time(read, machine, job.sizes_bytes, agreed, limits, form=job.form)


def agreed_by(loading: Loading, job: Job, read: Steps) -> Agreed:
    """Return what a policy's decisions mean to the schedulers of all ranks."""
    by_origin = {
        (origin, when): _kept(
            [f for f in loading.fills if f.origin == origin and f.before_training == when], job
        )
        for origin in ("store", "peers", "hand-over")
        for when in (True, False)
    }
    rounds = [by_origin["store", True], by_origin["peers", True]]
    tiers = range(1, len(job.machine.storage))
    before = np.array(
        [
            [[np.count_nonzero(kept.tiers == tier) for tier in tiers] for kept in of_ranks]
            for of_ranks in rounds
        ]
    )
    stages = _clock.AHEAD if loading.stages_from_store else _clock.STORE_ON_DEMAND
    hits, heirs = _handed_on(loading, job, read)
    kept = [_joined(parts) for parts in zip(*rounds, by_origin["store", False], strict=True)]
    due = by_origin["hand-over", False]
    reads_peers = loading.stages_from_peers or not loading.stages or before[1].any()
    spares = loading.spares or [np.empty(0, np.int64)] * job.ranks if loading.drops else []
    return Agreed(
        kept=kept,
        due=due,
        before=before[before.any(axis=(1, 2))],
        reads_peers=decisions.RATHER if loading.prefers_peers else reads_peers,
        stages=stages if loading.stages else _clock.ON_DEMAND,
        hits=hits,
        heirs=heirs,
        spares=spares,
        last_batches=[
            frequency.last_batches(
                read.strings[row],
                np.diff(read.bounds[row]),
                np.concatenate([kept[row].samples, due[row].samples, spare]),
            )
            for row, spare in enumerate(spares)
        ],
        promised=promised_by(loading),
    )


def _kept(fills: Sequence[Fill], job: Job) -> list[Kept]:
    of_ranks: list[list[Kept]] = [[] for _ in range(job.ranks)]
    for fill in fills:
        of_ranks[fill.rank].append(
            Kept(fill.samples.astype(np.int64), np.full(fill.samples.size, fill.tier, np.int8))
        )
    return [_joined(parts) for parts in of_ranks]


def _joined(parts: Sequence[Kept]) -> Kept:
    samples = [np.empty(0, np.int64), *(part.samples for part in parts)]
    return Kept(
        np.concatenate(samples), np.concatenate([np.empty(0, np.int8), *(part.tiers for part in parts)])
    )


def _handed_on(loading: Loading, job: Job, read: Steps) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Return for each access where it finds its sample, and which place keeps that afterwards, for its next reader."""
    if not loading.hits:
        return np.empty(0, np.int8), np.empty(0, np.int32)
    hits, string = np.concatenate(loading.hits).astype(np.int8), np.concatenate(read.strings)
    now, following, rank = read_again(string, read.bounds)
    is_found = hits[following] != SOURCE
    now, following = now[is_found], following[is_found]
    tier = hits[following].astype(np.int64)
    tiers = len(job.machine.storage) - 1
    elsewhere = place_of(tiers, rank[following].astype(np.int64), tier)
    heirs = np.full(string.size, STAGING, np.int32)
    heirs[now] = np.where(rank[now] == rank[following], tier, elsewhere)
    return hits, heirs


def read_again(
    string: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return accesses whose sample is read again, by any rank, with the next access to it; and whose each access is.

    string, bounds: of all ranks, one behind the other, as `Steps.bounds`. Returns: two int64[n], and int32[accesses].
    """
    counts = np.diff(bounds, axis=1)
    ranks, steps = counts.shape
    step = np.repeat(np.tile(np.arange(steps), ranks), counts.ravel())
    rank = np.repeat(np.arange(ranks, dtype=np.int32), counts.sum(axis=1))
    return *frequency.read_again(string, step), rank


def _run_ready(read: Steps, job: Job) -> Run:
    """Return a run in which every sample is there when it is asked for, so that ranks wait for the slowest alone."""
    compute = job.machine.compute
    assert compute is not None, "the caller has seen to it"
    until = np.concatenate([[0], np.cumsum(job.sizes_bytes[np.concatenate(read.strings)])])
    nbytes, samples = np.diff(until[read.bounds], axis=1), np.diff(read.bounds, axis=1)
    busy = (samples * compute.seconds(1, 0) + nbytes * compute.seconds(0, 1)).T
    reads = np.zeros((job.ranks, 3), np.int64)
    reads[:, _clock.FROM_TIER] = samples.sum(axis=1)
    return Run(
        0.0,
        np.cumsum(busy.max(axis=1)),
        np.zeros(busy.shape, np.float32),
        busy.astype(np.float32),
        reads,
        np.zeros(job.ranks),
        np.zeros(job.ranks, np.int64),
        np.empty(0, SPAN),
    )


def limits_of(
    plan: AccessPlan, machine: Machine, sizes_bytes: NDArray[np.int64], readers: int
) -> StagingLimits:
    """Return what a rank has under way at most: half of the staging buffer is slots, half is for bytes on their way.

    There are as many slots as the loader needs at least, also where they do not fit and the loader would refuse:
    `penstock.policy.runnable.why_not_run` says so.
    """
    staging_bytes = machine.storage[0].capacity_bytes
    slots = staging_bytes / 2 // batch_bytes(plan, sizes_bytes)
    return StagingLimits(
        slots=int(np.clip(slots, LEAST_SLOTS, _MOST_SLOTS)),
        readers=readers,
        decoders=machine.decode_threads,
        undecoded_bytes=staging_bytes // 2,
    )
