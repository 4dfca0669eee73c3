"""The compiled request model: what both of its loops share, and the loop in which ranks go one after the other.

Every rate comes in as a table that `penstock.machine` computed, every decision of what is kept where as arrays that a
policy made; the loops keep clocks. Times are seconds, sizes bytes. `penstock.simulate.requests` prepares the arrays.

    string[bounds[rank, step] : bounds[rank, step + 1]]   the local batch of a step; an *access* is an index into string
    copies of a sample: begin[sample] to begin[sample + 1], each with its holder (a rank), tier and time of readiness

Measured: `benchmarks/requests.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Where a consumed sample came from; columns of `LoadingResult.reads`.
STAGED_STORE, STAGED_TIER, STAGED_PEER, STORE, TIER, PEER = range(6)


class Job(NamedTuple):
    """What is read. string: int64[accesses]; bounds: int64[ranks, steps + 1]; sizes: int64[F].

    hit: int8[accesses], the tier to which the sample's previous user has handed it, or -1; of size 0 where none does.
    is_last: bool[accesses], the rank's last read of the sample; of size 0 where nothing is dropped.
    """

    string: Ints
    bounds: Ints
    sizes: Ints
    hit: NDArray[np.int8]
    is_last: NDArray[np.bool_]


class Copies(NamedTuple):
    """Who holds what. begin: int64[F + 1]; per copy: holder int32, tier int8, ready float64 (inf: not there).

    is_handed: the copy comes from the first rank that reads the sample from the store.
    """

    begin: Ints
    holder: NDArray[np.int32]
    tier: NDArray[np.int8]
    ready: Floats
    is_handed: NDArray[np.bool_]


class Fills(NamedTuple):
    """What is brought into tiers during the training: rank r's samples[begin[r] : begin[r + 1]], in this order.

    level: the tier of each sample; 0 where it goes to the first with room. room: float64[ranks, tiers], bytes.
    """

    begin: Ints
    samples: Ints
    level: NDArray[np.int8]
    threads: Ints
    room: Floats


class Costs(NamedTuple):
    """Bytes per second of a read: store[clients, reads of this rank], tier and peer [tier, reads]; seconds per byte.

    preprocess: decoding and writing a byte into the staging buffer. fill: into tier j, [tiers]. network: bytes/s
    between ranks.
    """

    store: Floats
    tier: Floats
    peer: Floats
    preprocess: float
    fill: Floats
    compute_byte: float
    compute_sample: float
    network: float


class Rules(NamedTuple):
    """The policy's and the assumptions' switches; see `policy.loading.Loading` and `simulate.assumptions`."""

    stages: bool
    from_store: bool
    from_peers: bool
    is_ready: bool
    drops: bool
    counts_ahead: bool
    counts_all: bool
    takes_last: bool
    frees_on_use: bool
    counts_first_time: bool
    staging_bytes: float
    threads: int
    start: float
    staging_start: float


class ReadTimes(NamedTuple):
    """Start times of reads of the store per rank, kept where clients are counted ahead: list r begins at begin[r]."""

    begin: Ints
    count: Ints
    times: Floats


class Results(NamedTuple):
    """step_end: float64[steps]. step_stall, step_busy: float32[steps, ranks], seconds. reads: int64[ranks, 6].

    store_bytes, fill_reads: [ranks], bytes read from the store in all, reads that fill tiers.
    access_stall, access_end: float32 and float64 [accesses], or of size 0.
    """

    step_end: Floats
    step_stall: NDArray[np.float32]
    step_busy: NDArray[np.float32]
    reads: Ints
    store_bytes: Floats
    fill_reads: Ints
    access_stall: NDArray[np.float32]
    access_end: Floats


@kernel
def own_copy(copies: Copies, sample: int, rank: int) -> int:
    """Return the rank's own copy of a sample, or -1."""
    for copy in range(copies.begin[sample], copies.begin[sample + 1]):
        if copies.holder[copy] == rank:
            return copy
    return -1


@kernel
def peer_copy(copies: Copies, sample: int, rank: int, by: float, peer_rate: Floats, takes_last: bool) -> int:
    """Return the copy on another rank, there by the time `by`, that reads fastest (or that of the highest rank), or -1.

    peer_rate: bytes/s of a read of another rank's tier, by tier.
    """
    best = -1
    for copy in range(copies.begin[sample], copies.begin[sample + 1]):
        if copies.holder[copy] == rank or copies.ready[copy] > by:
            continue
        if best < 0 or takes_last or peer_rate[copies.tier[copy]] > peer_rate[copies.tier[best]]:
            best = copy
    return best


@kernel
def hand_over(copies: Copies, sample: int, done: float) -> None:
    """Give a sample that was read from the store to the ranks that shall keep it and do not read it themselves."""
    for copy in range(copies.begin[sample], copies.begin[sample + 1]):
        if copies.is_handed[copy] and copies.ready[copy] > done:
            copies.ready[copy] = done


@kernel
def _has_reads_ahead(reads: ReadTimes, rank: int, now: float) -> bool:
    """Whether a bisection of a rank's read times, which need not be sorted, finds one at or after now."""
    first = reads.begin[rank]
    count = reads.count[rank]
    if count == 0 or reads.times[first + count - 1] <= now - 0.1:
        return False
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if reads.times[first + middle] < now:
            low = middle + 1
        else:
            high = middle
    return bool(low < count)


@kernel
def _clients(rank: int, now: float, asked: ReadTimes, fetched: ReadTimes, ranks: int, rules: Rules) -> int:
    if not rules.counts_ahead:
        return ranks
    clients = 1
    for other in range(ranks):
        if other != rank and (_has_reads_ahead(asked, other, now) or _has_reads_ahead(fetched, other, now)):
            clients += 1
    return clients


@kernel
def _note(reads: ReadTimes, rank: int, now: float, rules: Rules) -> None:
    if rules.counts_ahead:
        reads.times[reads.begin[rank] + reads.count[rank]] = now
        reads.count[rank] += 1


@kernel
def _answer(
    job: Job,
    copies: Copies,
    costs: Costs,
    rules: Rules,
    asked: ReadTimes,
    fetched: ReadTimes,
    staged_at: Floats,
    staged_from: NDArray[np.int8],
    results: Results,
    rank: int,
    access: int,
    now: float,
) -> float:
    """Return when a sample that is asked for now is there, from the staging buffer or straight from the best place."""
    sample = job.string[access]
    nbytes = job.sizes[sample]
    ranks = job.bounds.shape[0]
    if rules.is_ready:
        results.reads[rank, STAGED_TIER] += 1
        return now
    staged = np.inf if staged_at[access] < 0.0 else max(staged_at[access], now)
    rate = costs.store[_clients(rank, now, asked, fetched, ranks, rules), 1]
    origin = STORE
    own = own_copy(copies, sample, rank)
    if own >= 0 and copies.ready[own] <= now and costs.tier[copies.tier[own], 1] > rate:
        rate, origin = costs.tier[copies.tier[own], 1], TIER
    if job.hit.size and job.hit[access] > 0 and costs.tier[job.hit[access], 1] > rate:
        rate, origin = costs.tier[job.hit[access], 1], TIER
    peer = peer_copy(copies, sample, rank, now, costs.peer[:, 1], rules.takes_last)
    if peer >= 0 and costs.peer[copies.tier[peer], 1] > rate:
        rate, origin = costs.peer[copies.tier[peer], 1], PEER
    direct = now + nbytes / rate + nbytes * costs.preprocess
    if direct < staged:
        if origin == STORE:
            results.store_bytes[rank] += nbytes
            hand_over(copies, sample, direct)
            _note(asked, rank, now, rules)
        answered = direct
    else:
        answered, origin = staged, int(staged_from[access])
        if origin == STAGED_STORE:
            _note(asked, rank, answered, rules)
    results.reads[rank, origin] += 1
    return answered


@kernel
def _fill(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    fetched: ReadTimes,
    next_fill: Ints,
    clocks: Floats,
    results: Results,
    rank: int,
    now: float,
) -> None:
    """Bring the next listed samples into the rank's tiers while they have room; each tier has threads of its own."""
    ranks, tiers = job.bounds.shape[0], fills.room.shape[1]
    end = fills.begin[rank + 1]
    for level in range(1, tiers):
        thread = 0
        while next_fill[rank] < end:
            place = next_fill[rank]
            sample = fills.samples[place]
            nbytes = job.sizes[sample]
            if (fills.level[place] and fills.level[place] != level) or nbytes > fills.room[rank, level]:
                break
            begun = max(now, clocks[rank, level, thread])
            done = begun + nbytes / costs.store[ranks, 1] + nbytes * costs.fill[level]
            clocks[rank, level, thread] = done
            copy = own_copy(copies, sample, rank)
            copies.tier[copy] = level
            copies.ready[copy] = done
            fills.room[rank, level] -= nbytes
            results.store_bytes[rank] += nbytes
            results.fill_reads[rank] += 1
            _note(fetched, rank, begun, rules)
            next_fill[rank] += 1
            thread = (thread + 1) % fills.threads[level]


@kernel
def _stage(
    job: Job,
    copies: Copies,
    costs: Costs,
    rules: Rules,
    asked: ReadTimes,
    fetched: ReadTimes,
    staged_at: Floats,
    staged_from: NDArray[np.int8],
    staged_bytes: Floats,
    seen: NDArray[np.bool_],
    next_stage: Ints,
    next_thread: Ints,
    clocks: Floats,
    results: Results,
    rank: int,
    now: float,
) -> None:
    """Top the rank's staging buffer up in the order of its string, its threads in turn."""
    ranks, steps = job.bounds.shape[0], job.bounds.shape[1] - 1
    for thread in range(rules.threads):
        clocks[rank, thread] = max(clocks[rank, thread], now)
    end = job.bounds[rank, steps]
    while next_stage[rank] < end:
        access = next_stage[rank]
        sample = job.string[access]
        nbytes = job.sizes[sample]
        if staged_bytes[rank] + nbytes > rules.staging_bytes:
            return
        thread = next_thread[rank]
        begun = clocks[rank, thread]
        rate, at, origin = 0.0, np.inf, STAGED_TIER
        own = own_copy(copies, sample, rank)
        if own >= 0 and copies.ready[own] < np.inf:
            rate, at = costs.tier[copies.tier[own], 1], copies.ready[own]
        elif job.hit.size and job.hit[access] > 0:
            rate, at = costs.tier[job.hit[access], 1], begun
        if rules.from_peers:
            # Any copy that is or will be there: where the store is out of bounds, staging waits for it.
            peer = peer_copy(copies, sample, rank, 1e300, costs.peer[:, 1], rules.takes_last)
            if peer >= 0 and costs.peer[copies.tier[peer], 1] > rate:
                if rules.from_store and copies.ready[peer] > begun:
                    return
                rate, at, origin = costs.peer[copies.tier[peer], 1], copies.ready[peer], STAGED_PEER
        if rules.from_store:
            store = costs.store[_clients(rank, begun, asked, fetched, ranks, rules), 1]
            if at > begun or store > rate:
                rate, at, origin = store, begun, STAGED_STORE
        if at < np.inf:
            done = max(at, begun) + nbytes / rate + nbytes * costs.preprocess
            clocks[rank, thread] = done
            staged_at[access] = done
            staged_from[access] = origin
            if origin == STAGED_STORE:
                results.store_bytes[rank] += nbytes
                hand_over(copies, sample, done)
                _note(fetched, rank, begun, rules)
            if not (rules.counts_first_time and seen[rank, sample]):
                staged_bytes[rank] += nbytes
            if rules.counts_first_time:
                seen[rank, sample] = True
        next_stage[rank] += 1
        next_thread[rank] = (thread + 1) % rules.threads


@kernel
def _release(
    job: Job,
    copies: Copies,
    fills: Fills,
    rules: Rules,
    staged_at: Floats,
    staged_bytes: Floats,
    rank: int,
    first: int,
    last: int,
) -> None:
    """Take consumed accesses out of the staging buffer, and with `drops` out of their tier after the last read."""
    for access in range(first, last):
        sample = job.string[access]
        if staged_at[access] >= 0.0:
            staged_bytes[rank] -= job.sizes[sample]
        if rules.drops and job.is_last[access]:
            own = own_copy(copies, sample, rank)
            if own >= 0 and copies.ready[own] < np.inf:
                copies.ready[own] = np.inf
                fills.room[rank, copies.tier[own]] += job.sizes[sample]


@kernel
def run_rank_by_rank(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    asked: ReadTimes,
    fetched: ReadTimes,
    results: Results,
) -> None:
    """Run all steps, in each the ranks one after the other; a step ends for all when the slowest is done.

    Mutated: copies.ready and .tier, fills.room, asked, fetched and results.
    """
    ranks, steps = job.bounds.shape[0], job.bounds.shape[1] - 1
    staged_at = np.full(job.string.size, -1.0)
    staged_from = np.zeros(job.string.size, np.int8)
    staged_bytes = np.zeros(ranks)
    seen = np.zeros((ranks, job.sizes.size) if rules.counts_first_time else (1, 1), np.bool_)
    next_stage, next_free = job.bounds[:, 0].copy(), job.bounds[:, 0].copy()
    next_thread = np.zeros(ranks, np.int64)
    stage_clocks = np.full((ranks, rules.threads), rules.staging_start)
    next_fill = fills.begin[:-1].copy()
    fill_clocks = np.zeros((ranks, fills.room.shape[1], fills.threads.max()))

    for rank in range(ranks):
        _fill(job, copies, fills, costs, rules, fetched, next_fill, fill_clocks, results, rank, 0.0)
    for rank in range(ranks):
        if rules.stages:
            _stage(
                job,
                copies,
                costs,
                rules,
                asked,
                fetched,
                staged_at,
                staged_from,
                staged_bytes,
                seen,
                next_stage,
                next_thread,
                stage_clocks,
                results,
                rank,
                rules.staging_start,
            )
    now = rules.start
    for step in range(steps):
        latest = now
        for rank in range(ranks):
            clock = now
            first = job.bounds[rank, step]
            for access in range(first, job.bounds[rank, step + 1]):
                answered = _answer(
                    job,
                    copies,
                    costs,
                    rules,
                    asked,
                    fetched,
                    staged_at,
                    staged_from,
                    results,
                    rank,
                    access,
                    clock,
                )
                results.step_stall[step, rank] += answered - clock
                gone = access + 1 if rules.frees_on_use else first
                _release(job, copies, fills, rules, staged_at, staged_bytes, rank, next_free[rank], gone)
                next_free[rank] = gone
                if rules.drops:
                    _fill(
                        job,
                        copies,
                        fills,
                        costs,
                        rules,
                        fetched,
                        next_fill,
                        fill_clocks,
                        results,
                        rank,
                        answered,
                    )
                # A sample that was fetched directly needs no staging any more.
                next_stage[rank] = max(next_stage[rank], access + 1)
                if rules.stages:
                    _stage(
                        job,
                        copies,
                        costs,
                        rules,
                        asked,
                        fetched,
                        staged_at,
                        staged_from,
                        staged_bytes,
                        seen,
                        next_stage,
                        next_thread,
                        stage_clocks,
                        results,
                        rank,
                        answered,
                    )
                busy = job.sizes[job.string[access]] * costs.compute_byte + costs.compute_sample
                results.step_busy[step, rank] += busy
                if results.access_stall.size:
                    results.access_stall[access] = answered - clock
                    results.access_end[access] = answered + busy
                clock = answered + busy
            latest = max(latest, clock)
        now = latest
        results.step_end[step] = now


@kernel
def sort_by_sample(samples: Ints, count: int) -> tuple[Ints, Ints]:
    """Return where each sample's entries begin, int64[count + 1], and each entry's place among all, in stable order."""
    begin = np.zeros(count + 1, np.int64)
    for sample in samples:
        begin[sample + 1] += 1
    for sample in range(count):
        begin[sample + 1] += begin[sample]
    following = begin[:-1].copy()
    place = np.empty(samples.size, np.int64)
    for entry in range(samples.size):
        place[entry] = following[samples[entry]]
        following[samples[entry]] += 1
    return begin, place
