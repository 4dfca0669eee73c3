"""A whole job's loading under a policy: by the schedulers of all ranks in virtual time, or as was published.

The plan says who reads what, the machine what a read costs, a policy what is kept where. `penstock.simulate.scheduled`
runs the job as the loaders would. The published numbers (thesis, 3.1 and 4.1) came from ranks that go through a step
one after the other, request by request; that reading is kept here, and the loop of `_request_kernels` keeps its clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy
from penstock.policy.runnable import prepared, why_not_run
from penstock.simulate.assumptions import PHYSICAL, TOGETHER, Assumptions
from penstock.simulate.loading import steps_of
from penstock.simulate.scheduled import read_again, run_job

if TYPE_CHECKING:
    from penstock.simulate import _request_kernels as kernels
    from penstock.simulate.scenario import Scenario

#: Samples of all ranks that the bottomless staging buffer may remember, a byte each.
_MOST_SEEN = 4 * 10**9
#: Columns of `LoadingResult.reads`.
ORIGINS = ("staged from the store", "staged from a tier", "staged from a peer", "store", "tier", "peer")

Floats = NDArray[np.float64]
T = TypeVar("T", np.int8, np.int32, np.float64, np.bool_)


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
    sample_stall_seconds, sample_end_seconds: per rank, float[reads], where asked for; else None.
    """

    policy: str
    run_seconds: float
    initial_stall_seconds: float
    step_end_seconds: Floats
    step_stall_seconds: NDArray[np.float32]
    step_busy_seconds: NDArray[np.float32]
    reads: NDArray[np.int64]
    store_bytes: Floats
    fill_reads: NDArray[np.int64]
    not_runnable_reason: str | None = None
    sample_stall_seconds: list[NDArray[np.float32]] | None = None
    sample_end_seconds: list[Floats] | None = None

    @property
    def stall_seconds(self) -> Floats:
        """float64[ranks], waiting for samples over the run, loading before training included."""
        stalls: Floats = self.step_stall_seconds.sum(axis=0, dtype=np.float64)
        return stalls + self.initial_stall_seconds


def simulate_loading(scenario: Scenario, policy: LoadingPolicy, *, per_sample: bool = False) -> LoadingResult:
    """Run a scenario under a policy.

    Raises: NotSupported where the policy cannot run it; ConfigError for assumptions that cannot be combined with it.
    """
    job = Job(scenario.plan(), scenario.sizes_bytes(), scenario.machine, scenario.seed)
    return simulate_job(job, policy, scenario.assumptions, per_sample=per_sample)


def simulate_job(
    job: Job, policy: LoadingPolicy, assumptions: Assumptions = PHYSICAL, *, per_sample: bool = False
) -> LoadingResult:
    """Run a job under a policy; several policies can be run on one job, which keeps its access strings.

    per_sample: also return each sample's stall and end.
    """
    loading = prepared(policy, job)
    # Where ranks go through a step one after the other, they ask each other at the latest when a sample is late.
    reads_peers = loading.stages_from_peers or assumptions.time != TOGETHER
    reason = why_not_run(policy, replace(loading, stages_from_peers=reads_peers), job)
    if assumptions.counted == "first-time" and job.ranks * job.plan.samples > _MOST_SEEN:
        raise ConfigError(
            f"assumptions.counted is 'first-time', which remembers {job.ranks:,} x {job.plan.samples:,} samples: use "
            "fewer, or counted = 'always'"
        )
    compute = job.machine.compute
    if compute is None:
        raise ConfigError(
            "machine.compute is unknown: say how fast the training consumes, for example '100 MB/s'"
        )
    if assumptions.time == TOGETHER:
        if per_sample:
            raise ConfigError(
                "per_sample is True, and ranks that share one time wait for batches: only time = 'rank-by-rank' knows "
                "of single samples"
            )
        return _scheduled(policy.name, job, loading, reason)
    from penstock.simulate import _request_kernels  # loads numba

    strings = loading.strings or job.strings
    bounds = steps_of(job.plan, range(job.ranks), strings).bounds
    string = np.concatenate(strings) if strings else np.empty(0, np.int64)
    before = [fill for fill in loading.fills if fill.before_training]
    during = [fill for fill in loading.fills if not fill.before_training]
    loaded = _load_before(job, before, assumptions)
    start = _initial_stall(loaded.stall_seconds, assumptions)
    staging_start = 0.0 if assumptions.staging_begins == "at-zero" else start
    copies = _copies(job, loading, staging_start)
    fills = _fills(job, during, loading.spares)
    rules = _request_kernels.Rules(
        stages=loading.stages,
        from_store=loading.stages_from_store,
        from_peers=loading.stages_from_peers,
        is_ready=loading.is_ready,
        drops=loading.drops,
        counts_ahead=assumptions.clients == "ahead",
        counts_all=assumptions.clients == "all",
        takes_last=assumptions.remote == "last",
        frees_on_use=assumptions.freed == "on-use",
        counts_first_time=assumptions.counted == "first-time",
        staging_bytes=float(job.machine.storage[0].capacity_bytes),
        threads=job.machine.storage[0].threads,
        start=start,
        staging_start=staging_start,
    )
    steps = bounds.shape[1] - 1
    results = _request_kernels.Results(
        step_end=np.zeros(steps),
        step_stall=np.zeros((steps, job.ranks), np.float32),
        step_busy=np.zeros((steps, job.ranks), np.float32),
        reads=np.zeros((job.ranks, len(ORIGINS)), np.int64),
        store_bytes=loaded.store_bytes,
        fill_reads=loaded.store_reads,
        access_stall=np.zeros(string.size if per_sample else 0, np.float32),
        access_end=np.zeros(string.size if per_sample else 0),
    )
    hit = np.concatenate(loading.hits) if loading.hits else np.empty(0, np.int8)
    next_read, next_rank, arrival = _hand_ons(string, bounds, hit, start)
    is_last, last_read = _NO_LAST_READS
    if loading.drops:
        is_last, last_read = _last_reads(strings), _last_read_of_listed(strings, fills, bounds)
    fills = fills._replace(last_read=last_read)
    work = _request_kernels.Job(string, bounds, job.sizes_bytes, hit, next_read, next_rank, arrival, is_last)
    costs = _costs(job.machine, assumptions, compute.seconds(0, 1), compute.seconds(1, 0))
    asked = _read_times(rules, [string.size for string in strings])
    fetched = _read_times(
        rules, [each.size for each in strings], loaded.read_seconds, np.diff(fills.begin).tolist()
    )
    clocks = _request_kernels.new_clocks(work, fills, rules)
    _request_kernels.run_rank_by_rank(work, copies, fills, costs, rules, asked, fetched, clocks, results)
    splits = np.cumsum([each.size for each in strings])[:-1]
    return LoadingResult(
        policy.name,
        float(results.step_end[-1]) if steps else start,
        start,
        results.step_end,
        results.step_stall,
        results.step_busy,
        results.reads,
        results.store_bytes,
        results.fill_reads,
        reason,
        np.split(results.access_stall, splits) if per_sample else None,
        np.split(results.access_end, splits) if per_sample else None,
    )


def _scheduled(policy: str, job: Job, loading: Loading, not_runnable_reason: str | None) -> LoadingResult:
    run = run_job(job, loading)
    reads = np.zeros((job.ranks, len(ORIGINS)), np.int64)
    # What is fetched when it is asked for was not staged.
    first = 0 if loading.stages or loading.is_ready else len(ORIGINS) // 2
    reads[:, first : first + run.reads.shape[1]] = run.reads
    return LoadingResult(
        policy,
        float(run.step_end_seconds[-1]) if run.step_end_seconds.size else run.begin_seconds,
        run.begin_seconds,
        run.step_end_seconds,
        run.step_stall_seconds,
        run.step_busy_seconds,
        reads,
        run.store_bytes,
        run.fill_reads,
        not_runnable_reason,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Loading before training: per rank its end, its bytes and reads of the store, and when each read was done."""

    stall_seconds: Floats
    store_bytes: Floats
    store_reads: NDArray[np.int64]
    read_seconds: list[Floats]


def _load_before(job: Job, fills: Sequence[Fill], assumptions: Assumptions) -> _Loaded:
    machine, ranks = job.machine, job.ranks
    clock, store_bytes = np.zeros(ranks), np.zeros(ranks)
    store_reads = np.zeros(ranks, np.int64)
    read_seconds = [np.empty(0)] * ranks
    share = _shared_source(job, fills) if assumptions.bandwidth == "shared" else None
    for fill in fills:
        threads = machine.storage[fill.tier].threads
        sizes = job.sizes_bytes[fill.samples].astype(np.float64)
        if fill.origin == "store":
            per_byte = 1 / machine.source_rate(ranks, 1) if share is None else share[fill.rank] * threads
            latency = machine.source.latency_seconds
            store_bytes[fill.rank] += sizes.sum()
            store_reads[fill.rank] += sizes.size
        else:
            rate = machine.remote_rate(fill.tier, threads)
            if assumptions.bandwidth == "per-thread":
                rate *= threads
            per_byte, latency = 1 / rate, machine.storage[fill.tier].latency_seconds
        seconds = latency + sizes * (per_byte + _fill_byte_seconds(machine, fill.tier, assumptions))
        ends = clock[fill.rank] + _round_robin_ends(seconds, threads)
        if fill.origin == "store":
            read_seconds[fill.rank] = np.concatenate([read_seconds[fill.rank], ends])
        clock[fill.rank] = ends.max(initial=clock[fill.rank])
    return _Loaded(clock, store_bytes, store_reads, read_seconds)


def _shared_source(job: Job, fills: Sequence[Fill]) -> Floats:
    """Return the seconds per byte that each rank's loading gets while all share the store, on average: float64[ranks].

    Ranks that have less to load end earlier and leave more to the others.
    """
    machine = job.machine
    left, threads = np.zeros(job.ranks), np.ones(job.ranks, np.int64)
    for fill in fills:
        if fill.origin == "store":
            left[fill.rank] += job.sizes_bytes[fill.samples].sum()
            threads[fill.rank] = max(threads[fill.rank], machine.storage[fill.tier].threads)
    total = left.copy()
    seconds = np.zeros(job.ranks)
    elapsed = 0.0
    while left.any():
        active = left > 0
        clients = int(active.sum())
        rates = np.array([machine.source_rate(clients, int(count)) * count for count in threads])
        passed = (left[active] / rates[active]).min()
        elapsed += passed
        left[active] -= passed * rates[active]
        left[left < 0.5] = 0.0
        seconds[active & (left == 0)] = elapsed
    return np.divide(seconds, total, out=np.zeros(job.ranks), where=total > 0)


def _round_robin_ends(seconds: Floats, threads: int) -> Floats:
    """Return when each read ends if the threads take them in turn, each thread one after the other."""
    padded = np.zeros(-(-seconds.size // threads) * threads)
    padded[: seconds.size] = seconds
    ends: Floats = np.cumsum(padded.reshape(-1, threads), axis=0).ravel()[: seconds.size]
    return ends


def _initial_stall(stall_seconds: Floats, assumptions: Assumptions) -> float:
    if assumptions.initial_stall == "longest":
        return float(stall_seconds.max())
    loading = np.flatnonzero(stall_seconds)
    return float(stall_seconds[loading[-1]]) if loading.size else 0.0


def _fill_byte_seconds(machine: Machine, tier: int, assumptions: Assumptions) -> float:
    if assumptions.filling == "preprocessed":
        return machine.write_seconds(1)
    threads = machine.storage[tier].threads
    return 1 / machine.write_rate(tier, threads)


def _copies(job: Job, loading: Loading, ready_seconds: float) -> kernels.Copies:
    from penstock.simulate import _request_kernels

    parts = [
        (
            fill.samples,
            fill.rank,
            fill.tier,
            ready_seconds if fill.before_training else np.inf,
            fill.origin == "hand-over",
        )
        for fill in loading.fills
    ]
    for rank, spares in enumerate(loading.spares or ()):
        parts.append((spares, rank, 0, np.inf, False))
    parts.sort(key=lambda part: part[1])
    counts = [part[0].size for part in parts]
    samples = np.concatenate([part[0] for part in parts]) if parts else np.empty(0, np.int64)
    begin, place = np.zeros(job.plan.samples + 1, np.int64), np.empty(samples.size, np.int64)
    _request_kernels.sort_by_sample(samples, begin, place)

    def sorted_column(values: Sequence[float], dtype: type[T]) -> NDArray[T]:
        column = np.empty(samples.size, dtype)
        column[place] = np.repeat(np.array(values, dtype), counts)
        return column

    holder = sorted_column([part[1] for part in parts], np.int32)
    return _request_kernels.Copies(
        begin,
        holder,
        sorted_column([part[2] for part in parts], np.int8),
        sorted_column([part[3] for part in parts], np.float64),
        sorted_column([part[4] for part in parts], np.bool_),
    )


def _fills(job: Job, during: Sequence[Fill], spares: Sequence[NDArray[np.int64]] | None) -> kernels.Fills:
    from penstock.simulate import _request_kernels

    storage = job.machine.storage
    lists, levels, begin = [], [], np.zeros(job.ranks + 1, np.int64)
    own: list[list[Fill]] = [[] for _ in range(job.ranks)]
    for fill in during:
        if fill.origin == "store":
            own[fill.rank].append(fill)
    for rank, mine in enumerate(own):
        for fill in sorted(mine, key=lambda fill: fill.tier):
            lists.append(fill.samples)
            levels.append(np.full(fill.samples.size, fill.tier, np.int8))
        if spares is not None:
            lists.append(spares[rank])
            levels.append(np.zeros(spares[rank].size, np.int8))
        begin[rank + 1] = sum(each.size for each in lists)
    room = np.array([[float(tier.capacity_bytes) for tier in storage]] * job.ranks)
    return _request_kernels.Fills(
        begin,
        np.concatenate(lists) if lists else np.empty(0, np.int64),
        np.concatenate(levels) if levels else np.empty(0, np.int8),
        np.array([tier.threads for tier in storage], np.int64),
        room,
        np.empty(0, np.int64),
    )


_NO_LAST_READS = (np.empty(0, np.bool_), np.empty(0, np.int64))


def _last_reads(strings: Sequence[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Return which accesses are the rank's last of their sample: bool[accesses]."""
    flags = []
    for string in strings:
        is_last = np.zeros(string.size, np.bool_)
        _, from_end = np.unique(string[::-1], return_index=True)
        is_last[string.size - 1 - from_end] = True
        flags.append(is_last)
    return np.concatenate(flags)


def _last_read_of_listed(
    strings: Sequence[NDArray[np.int64]], fills: kernels.Fills, bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each listed sample its rank's last access to it, -1 where there is none: int64[listed]."""
    found = np.full(fills.samples.size, -1, np.int64)
    for rank, string in enumerate(strings):
        begin, end = fills.begin[rank], fills.begin[rank + 1]
        if begin == end or not string.size:
            continue
        samples, place = np.unique(string[::-1], return_index=True)
        access = bounds[rank, 0] + string.size - 1 - place
        mine = fills.samples[begin:end]
        nearest = np.minimum(np.searchsorted(samples, mine), samples.size - 1)
        found[begin:end] = np.where(samples[nearest] == mine, access[nearest], -1)
    return found


def _hand_ons(
    string: NDArray[np.int64], bounds: NDArray[np.int64], hit: NDArray[np.int8], start: float
) -> tuple[NDArray[np.int64], NDArray[np.int32], Floats]:
    """Return for each access the next read of its sample, and whose that is, -1 where none; and when hits arrive.

    Arrivals are not known yet but for those of samples that nobody reads before: these are there from the start.
    """
    if not hit.size:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0)
    now, following, rank = read_again(string, bounds)
    next_read = np.full(string.size, -1, np.int64)
    next_read[now] = following
    arrival = np.full(string.size, start)
    arrival[following] = np.inf
    return next_read, np.where(next_read >= 0, rank[next_read], np.int32(-1)), arrival


def _costs(
    machine: Machine, assumptions: Assumptions, compute_byte: float, compute_sample: float
) -> kernels.Costs:
    from penstock.simulate import _request_kernels

    storage = machine.storage
    if assumptions.curves == "exact":
        for each in storage:
            if each.threads not in [users for users, _ in each.read.points]:
                raise ConfigError(
                    f"storage class {each.name!r} has {each.threads} threads, and its read curve was not measured with "
                    "as many: add the point, or use assumptions.curves = 'interpolated'"
                )
    per_thread = assumptions.bandwidth == "per-thread"
    sharing = 1 if per_thread else storage[0].threads
    store = np.array(
        [0.0, *(machine.source_rate(clients, sharing) for clients in range(1, machine.ranks + 1))]
    )
    tiers, peers = np.zeros(len(storage)), np.zeros(len(storage))
    for tier, each in enumerate(storage):
        if per_thread:
            tiers[tier] = machine.local_rate(tier, each.threads) * each.threads
            peers[tier] = min(machine.network_bytes_per_second, tiers[tier])
        else:
            tiers[tier] = machine.local_rate(tier, each.threads)
            peers[tier] = machine.remote_rate(tier, each.threads)
    fill = np.array([_fill_byte_seconds(machine, tier, assumptions) for tier in range(len(storage))])
    latency = np.array([machine.source.latency_seconds, *(tier.latency_seconds for tier in storage[1:])])
    return _request_kernels.Costs(
        store,
        tiers,
        peers,
        machine.write_seconds(1),
        fill,
        compute_byte,
        compute_sample,
        machine.network_bytes_per_second,
        latency,
    )


def _read_times(
    rules: kernels.Rules, lengths: list[int], known: list[Floats] | None = None, more: list[int] | None = None
) -> kernels.ReadTimes:
    """Return empty lists with room for a rank's reads, or lists that begin with the known times."""
    from penstock.simulate import _request_kernels

    ranks = len(lengths)
    if not rules.counts_ahead:
        return _request_kernels.ReadTimes(
            np.zeros(ranks + 1, np.int64), np.zeros(ranks, np.int64), np.empty(0)
        )
    known = known or [np.empty(0)] * ranks
    more = more or [0] * ranks
    sizes = [length + each.size + extra for length, each, extra in zip(lengths, known, more, strict=True)]
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    times = np.zeros(begin[-1])
    for rank, each in enumerate(known):
        times[begin[rank] : begin[rank] + each.size] = each
    return _request_kernels.ReadTimes(begin, np.array([each.size for each in known], np.int64), times)
