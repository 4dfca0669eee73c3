"""A job in the time of the thesis's simulator, quirks included: what its tables were computed with.

Source: R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020, sections 3.1 and 4.1; what
it leaves out is its reference simulator's. docs/reference/papers.md lists the quirks, and why they are not physical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.policy.loading import Fill, Job, LoadingPolicy
from penstock.policy.runnable import prepared
from penstock.simulate.loading import steps_of
from penstock.simulate.scheduled import ORIGINS, LoadingResult, simulate_job

if TYPE_CHECKING:
    from penstock.papers import _thesis_kernels as kernels

Floats = NDArray[np.float64]


def simulate_rank_by_rank(job: Job, policy: LoadingPolicy) -> LoadingResult:
    """Run a job as the thesis's simulator does: each rank through its whole local batch before the next one begins.

    policy: one of `penstock.papers.thesis_policies`. job: its machine's compute is known.
    Raises: NotSupported where the policy cannot run the job.
    """
    from penstock.papers import _thesis_kernels  # loads numba

    machine, loading = job.machine, prepared(policy, job)
    if loading.is_ready:
        return simulate_job(job, policy)
    assert loading.hits is None, "no policy of the thesis hands samples on"
    assert not loading.drops, "no policy of the thesis drops samples"
    assert machine.compute is not None, "the scenarios of the thesis say how fast the training consumes"
    strings = loading.strings or job.strings
    bounds = steps_of(job.plan, range(job.ranks), strings).bounds
    ranks, steps = job.ranks, bounds.shape[1] - 1
    string = np.concatenate(strings)
    loads = _load_tiers(job, loading.fills)
    threads, sizes = machine.storage[0].threads, job.sizes_bytes.astype(np.float64)
    results = _thesis_kernels.Results(
        step_end=np.zeros(steps),
        step_stall=np.zeros((steps, ranks), np.float32),
        step_busy=np.zeros((steps, ranks), np.float32),
        reads=np.zeros((ranks, len(ORIGINS)), np.int64),
        store_bytes=loads.store_bytes,
    )
    _thesis_kernels.run_rank_by_rank(
        _thesis_kernels.Work(
            string,
            bounds,
            job.sizes_bytes,
            sizes * machine.compute.seconds(0, 1) + machine.compute.seconds(1, 0),
        ),
        _copies(job, loading.fills, loads.ready_seconds),
        _rates(machine),
        _thesis_kernels.Rules(
            loading.stages,
            loading.stages_from_store,
            loading.stages_from_peers,
            float(machine.storage[0].capacity_bytes),
            threads,
            loads.start,
        ),
        _thesis_kernels.Staging(
            at=np.full(string.size, -1.0),
            origin=np.zeros(string.size, np.int8),
            seen=np.zeros((ranks, job.plan.samples), np.bool_),
            counted_bytes=np.zeros(ranks),
            next=bounds[:, 0].copy(),
            turn=np.zeros(ranks, np.int64),
            idle=np.zeros((ranks, threads)),
        ),
        _store_reads(loads.store_seconds, [each.size for each in strings]),
        results,
    )
    return LoadingResult(
        policy.name,
        float(results.step_end[-1]) if steps else loads.start,
        loads.start,
        results.step_end,
        results.step_stall,
        results.step_busy,
        results.reads,
        results.store_bytes,
        loads.fill_reads,
    )


@dataclass(frozen=True, slots=True)
class _Loads:
    """What brings samples into tiers.

    start: when the training begins. ready_seconds: of each fill, when its samples are there. store_seconds: of each
    rank, the times of its reads of the store that the others see. store_bytes, fill_reads: of each rank.
    """

    start: float
    ready_seconds: list[Floats]
    store_seconds: list[Floats]
    store_bytes: Floats
    fill_reads: NDArray[np.int64]


def _load_tiers(job: Job, fills: Sequence[Fill]) -> _Loads:
    """Load what is loaded before the training, and then what is loaded during it, each tier with threads of its own."""
    machine, ranks = job.machine, job.ranks
    clock, store_bytes, fill_reads = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks, np.int64)
    seen: list[list[Floats]] = [[np.empty(0)] for _ in range(ranks)]
    store_byte, sizes = 1 / machine.source_rate(ranks, 1), job.sizes_bytes.astype(np.float64)
    for fill in fills:
        threads = machine.storage[fill.tier].threads
        byte = store_byte if fill.origin == "store" else 1 / _rates(machine).peer[fill.tier]
        # Tiers keep samples preprocessed.
        seconds = sizes[fill.samples] * (byte + machine.write_seconds(1))
        if fill.origin == "store":
            store_bytes[fill.rank] += job.sizes_bytes[fill.samples].sum()
            fill_reads[fill.rank] += fill.samples.size
        if fill.before_training:
            ends = clock[fill.rank] + _ends_in_turn(seconds, threads)
            clock[fill.rank] = ends.max(initial=clock[fill.rank])
            if fill.origin == "store":
                seen[fill.rank].append(ends)
    # The last rank that loads says when the training begins, whether or not the others are done.
    loading = np.flatnonzero(clock)
    start = float(clock[loading[-1]]) if loading.size else 0.0
    ready = []
    for fill in fills:
        if fill.before_training:
            # Staging begins at once, from samples that are still being loaded.
            ready.append(np.zeros(fill.samples.size))
            continue
        threads = machine.storage[fill.tier].threads
        seconds = sizes[fill.samples] * (store_byte + machine.write_seconds(1))
        ends = start + _ends_in_turn(seconds, threads)
        seen[fill.rank].append(np.concatenate([np.full(threads, start), ends])[: ends.size])
        ready.append(ends)
    return _Loads(start, ready, [np.concatenate(each) for each in seen], store_bytes, fill_reads)


def _ends_in_turn(seconds: Floats, threads: int) -> Floats:
    """Return when each read ends if the threads take them in turn, each thread one after the other."""
    padded = np.zeros(-(-seconds.size // threads) * threads)
    padded[: seconds.size] = seconds
    ends: Floats = np.cumsum(padded.reshape(-1, threads), axis=0).ravel()[: seconds.size]
    return ends


def _copies(job: Job, fills: Sequence[Fill], ready_seconds: Sequence[Floats]) -> kernels.Copies:
    from penstock.papers import _thesis_kernels

    counts = [fill.samples.size for fill in fills]
    samples = np.concatenate([np.empty(0, np.int64), *(fill.samples for fill in fills)])
    holder = np.repeat([fill.rank for fill in fills], counts).astype(np.int32)
    order = np.lexsort((holder, samples))
    begin = np.zeros(job.plan.samples + 1, np.int64)
    np.cumsum(np.bincount(samples, minlength=job.plan.samples), out=begin[1:])
    return _thesis_kernels.Copies(
        begin,
        holder[order],
        np.repeat([fill.tier for fill in fills], counts).astype(np.int8)[order],
        np.concatenate([np.empty(0), *ready_seconds])[order],
    )


def _rates(machine: Machine) -> kernels.Rates:
    """Return what a read gets: every thread all of a place's bandwidth, except that ranks share the store."""
    from penstock.papers import _thesis_kernels

    store = [0.0, *(machine.source_rate(clients, 1) for clients in range(1, machine.ranks + 1))]
    tiers = np.array(
        [machine.local_rate(tier, each.threads) * each.threads for tier, each in enumerate(machine.storage)]
    )
    peers = np.minimum(machine.network_bytes_per_second, tiers)
    return _thesis_kernels.Rates(np.array(store), tiers, peers, machine.write_seconds(1))


def _store_reads(known: Sequence[Floats], lengths: Sequence[int]) -> kernels.StoreReads:
    """Return lists that begin with the known times of each rank, with space for its other reads."""
    from penstock.papers import _thesis_kernels

    sizes = [each.size + length for each, length in zip(known, lengths, strict=True)]
    begin = np.cumsum([0, *sizes]).astype(np.int64)
    times = np.zeros(begin[-1])
    for first, each in zip(begin, known, strict=False):
        times[first : first + each.size] = each
    counts = np.array([each.size for each in known], np.int64)
    return _thesis_kernels.StoreReads(np.full(len(known), -np.inf), begin, counts, times)
