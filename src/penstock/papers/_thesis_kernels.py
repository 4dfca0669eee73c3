"""The thesis's simulator, compiled: ranks go one after the other through each step, request by request.

    string[bounds[rank, step] : bounds[rank, step + 1]]   the local batch of a step; an *access* is an index into string
    copies of a sample: begin[sample] to begin[sample + 1], each with its holder (a rank), tier and time of readiness

Times are seconds, sizes bytes. `penstock.papers.thesis_job` prepares the arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.uncounted import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Where a consumed sample came from; columns of `LoadingResult.reads`.
STAGED_STORE, STAGED_TIER, STAGED_PEER, STORE, TIER, PEER = range(6)


class Work(NamedTuple):
    """What is read. string: int64[accesses]; bounds: int64[ranks, steps + 1]; sizes: int64[F]; busy: float64[F]."""

    string: Ints
    bounds: Ints
    sizes: Ints
    busy: Floats


class Copies(NamedTuple):
    """Who holds what. begin: int64[F + 1]; per copy, by rank: holder int32, tier int8, ready float64."""

    begin: Ints
    holder: NDArray[np.int32]
    tier: NDArray[np.int8]
    ready: Floats


class Rates(NamedTuple):
    """Bytes per second of a read: store[clients], tier[tiers] and peer[tiers]. decode_byte: seconds per byte."""

    store: Floats
    tier: Floats
    peer: Floats
    decode_byte: float


class Rules(NamedTuple):
    """The policy's switches, see `policy.loading.Loading`. start: when the training begins."""

    stages: bool
    from_store: bool
    from_peers: bool
    staging_bytes: float
    threads: int
    start: float


class StoreReads(NamedTuple):
    """When ranks read the store. asked: float64[ranks], the last request, -inf if none.

    Reads ahead of requests: rank r's are times[begin[r] : begin[r] + counts[r]], in the order in which they are made.
    """

    asked: Floats
    begin: Ints
    counts: Ints
    times: Floats


class Staging(NamedTuple):
    """The staging buffers.

    at: float64[accesses], when staged, -1 if not. origin: int8[accesses]. seen: bool[ranks, F], samples whose bytes
    were counted. counted_bytes, next, turn: [ranks]: what the buffer seems to hold, the access that is staged next and
    the thread that does it. idle: float64[ranks, threads], since when.
    """

    at: Floats
    origin: NDArray[np.int8]
    seen: NDArray[np.bool_]
    counted_bytes: Floats
    next: Ints
    turn: Ints
    idle: Floats


class Results(NamedTuple):
    """step_end: float64[steps]. step_stall, step_busy: float32[steps, ranks]. reads: int64[ranks, 6].

    store_bytes: float64[ranks].
    """

    step_end: Floats
    step_stall: NDArray[np.float32]
    step_busy: NDArray[np.float32]
    reads: Ints
    store_bytes: Floats


@kernel
def _own_copy(copies: Copies, sample: int, rank: int) -> int:
    """Return the rank's own copy of a sample, or -1."""
    for copy in range(copies.begin[sample], copies.begin[sample + 1]):
        if copies.holder[copy] == rank:
            return copy
    return -1


@kernel
def _peer_copy(copies: Copies, sample: int, rank: int, by: float) -> int:
    """Return the copy of the highest other rank that has the sample by then, whatever it reads from; or -1."""
    for copy in range(copies.begin[sample + 1] - 1, copies.begin[sample] - 1, -1):
        if copies.holder[copy] != rank and copies.ready[copy] <= by:
            return copy
    return -1


@kernel
def _has_reads_ahead(times: Floats, first: int, count: int, now: float) -> bool:
    """Whether a bisection of `count` times from `first` on, which need not be sorted, finds one at or after now."""
    if count == 0 or times[first + count - 1] <= now - 0.1:
        return False
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if times[first + middle] < now:
            low = middle + 1
        else:
            high = middle
    return bool(low < count)


@kernel
def _clients(rank: int, now: float, store_reads: StoreReads) -> int:
    """Count this rank and those that have read times at or after now, however far ahead."""
    clients = 1
    for other in range(store_reads.asked.size):
        if other != rank and (
            store_reads.asked[other] >= now
            or _has_reads_ahead(store_reads.times, store_reads.begin[other], store_reads.counts[other], now)
        ):
            clients += 1
    return clients


@kernel
def _stage(
    rank: int,
    now: float,
    work: Work,
    copies: Copies,
    rates: Rates,
    rules: Rules,
    staging: Staging,
    store_reads: StoreReads,
    store_bytes: Floats,
) -> None:
    """Top a rank's buffer up in the order of its string, the threads in turn."""
    for thread in range(rules.threads):
        staging.idle[rank, thread] = max(staging.idle[rank, thread], now)
    while staging.next[rank] < work.bounds[rank, -1]:
        access = staging.next[rank]
        sample = work.string[access]
        nbytes = work.sizes[sample]
        if staging.counted_bytes[rank] + nbytes > rules.staging_bytes:
            return
        thread = staging.turn[rank]
        begun = float(staging.idle[rank, thread])
        rate, due, origin = 0.0, np.inf, STAGED_TIER
        own = _own_copy(copies, sample, rank)
        if own >= 0:
            rate, due = rates.tier[copies.tier[own]], copies.ready[own]
        if rules.from_peers:
            # Any copy that is or will be there: where the store is out of bounds, staging waits.
            peer = _peer_copy(copies, sample, rank, np.inf)
            if peer >= 0 and rates.peer[copies.tier[peer]] > rate:
                if rules.from_store and copies.ready[peer] > begun:
                    return
                rate, due, origin = rates.peer[copies.tier[peer]], copies.ready[peer], STAGED_PEER
        if rules.from_store and (due > begun or rates.store[1] > rate):
            from_store = rates.store[_clients(rank, begun, store_reads)]
            if due > begun or from_store > rate:
                rate, due, origin = from_store, begun, STAGED_STORE
        if due < np.inf:
            done = max(due, begun) + nbytes / rate + nbytes * rates.decode_byte
            staging.idle[rank, thread] = done
            staging.at[access], staging.origin[access] = done, origin
            if origin == STAGED_STORE:
                store_bytes[rank] += nbytes
                store_reads.times[store_reads.begin[rank] + store_reads.counts[rank]] = begun
                store_reads.counts[rank] += 1
            # Counted once, and taken off each time that the sample leaves.
            if not staging.seen[rank, sample]:
                staging.counted_bytes[rank] += nbytes
                staging.seen[rank, sample] = True
        staging.next[rank] += 1
        staging.turn[rank] = (thread + 1) % rules.threads


@kernel
def _answer(
    rank: int,
    access: int,
    now: float,
    work: Work,
    copies: Copies,
    rates: Rates,
    staging: Staging,
    store_reads: StoreReads,
    store_bytes: Floats,
) -> tuple[float, int]:
    """Return when a sample is there and from where: what is staged, or else the fastest source, if that is earlier."""
    sample, at = work.string[access], staging.at[access]
    if 0.0 <= at <= now:
        return now, staging.origin[access]
    nbytes = work.sizes[sample]
    rate, origin = rates.store[_clients(rank, now, store_reads)], STORE
    own = _own_copy(copies, sample, rank)
    if own >= 0 and copies.ready[own] <= now and rates.tier[copies.tier[own]] > rate:
        rate, origin = rates.tier[copies.tier[own]], TIER
    peer = _peer_copy(copies, sample, rank, now)
    if peer >= 0 and rates.peer[copies.tier[peer]] > rate:
        rate, origin = rates.peer[copies.tier[peer]], PEER
    direct = now + nbytes / rate + nbytes * rates.decode_byte
    if 0.0 <= at <= direct:
        return at, staging.origin[access]
    if origin == STORE:
        store_bytes[rank] += nbytes
    return direct, origin


@kernel
def run_rank_by_rank(
    work: Work,
    copies: Copies,
    rates: Rates,
    rules: Rules,
    staging: Staging,
    store_reads: StoreReads,
    results: Results,
) -> None:
    """Run all steps, in each the ranks one after the other; a step ends for all when the slowest is done.

    Mutated: staging, store_reads and results.
    """
    bounds, reads, store_bytes = work.bounds, results.reads, results.store_bytes
    ranks, steps = bounds.shape[0], bounds.shape[1] - 1
    if rules.stages:
        for rank in range(ranks):
            _stage(rank, 0.0, work, copies, rates, rules, staging, store_reads, store_bytes)
    now = rules.start
    for step in range(steps):
        latest = now
        for rank in range(ranks):
            clock = now
            # What the step before consumed leaves the buffer now.
            for past in range(bounds[rank, max(0, step - 1)], bounds[rank, step]):
                if staging.at[past] >= 0.0:
                    staging.counted_bytes[rank] -= work.sizes[work.string[past]]
            for access in range(bounds[rank, step], bounds[rank, step + 1]):
                answered, origin = _answer(
                    rank, access, clock, work, copies, rates, staging, store_reads, store_bytes
                )
                reads[rank, origin] += 1
                if origin == STORE:
                    store_reads.asked[rank] = clock
                elif origin == STAGED_STORE:
                    store_reads.asked[rank] = answered
                # A sample that was fetched directly needs no staging any more.
                staging.next[rank] = max(staging.next[rank], access + 1)
                if rules.stages:
                    _stage(rank, answered, work, copies, rates, rules, staging, store_reads, store_bytes)
                busy = work.busy[work.string[access]]
                results.step_stall[step, rank] += answered - clock
                results.step_busy[step, rank] += busy
                clock = answered + busy
            latest = max(latest, clock)
        now = latest
        results.step_end[step] = now
