"""The compiled request model: ranks go one after the other through each step, request by request.

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

    hit: int8[accesses], the tier to which the sample's previous user hands it, or -1; of size 0 where none does.
    next_read, next_rank: int64 and int32 [accesses], the next read of the same sample, and whose; -1 where none is.
    arrival: float64[accesses], when the sample is handed over for this read: infinite until its previous user has
        read it. These three are of size 0 where none is handed on.
    is_last: bool[accesses], the rank's last read of the sample; of size 0 where nothing is dropped.
    """

    string: Ints
    bounds: Ints
    sizes: Ints
    hit: NDArray[np.int8]
    next_read: Ints
    next_rank: NDArray[np.int32]
    arrival: Floats
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
    last_read: int64[samples], the rank's last read of each, -1 where there is none; of size 0 where nothing is dropped.
    """

    begin: Ints
    samples: Ints
    level: NDArray[np.int8]
    threads: Ints
    room: Floats
    last_read: Ints


class Costs(NamedTuple):
    """Bytes per second of a read: store[clients], tier and peer [tiers]; seconds per byte.

    preprocess: decoding and writing a byte into the staging buffer. fill: into tier j, [tiers]. network: bytes/s
    between ranks. latency: seconds before the bytes of a read flow, [tiers], at 0 the store's.
    """

    store: Floats
    tier: Floats
    peer: Floats
    preprocess: float
    fill: Floats
    compute_byte: float
    compute_sample: float
    network: float
    latency: Floats


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
    counts: Ints
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


class Clocks(NamedTuple):
    """Where ranks and threads are; all but the first three per rank.

    staged_at: float64[accesses], when staged, -1 if not. staged_from: int8[accesses], from where.
    seen: bool[ranks, F], samples that were staged before, where the buffer counts them the first time only.
    staged_bytes, next_stage, next_free, next_fill: [ranks]; the last three are accesses, and an index into Fills.
    next_thread: int64[ranks]. stage, fill: float64[ranks, threads] and [ranks, tiers, threads], since when idle.
    """

    staged_at: Floats
    staged_from: NDArray[np.int8]
    seen: NDArray[np.bool_]
    staged_bytes: Floats
    next_stage: Ints
    next_free: Ints
    next_fill: Ints
    next_thread: Ints
    stage: Floats
    fill: Floats


def new_clocks(job: Job, fills: Fills, rules: Rules) -> Clocks:
    """Return the state before the first step."""
    ranks = job.bounds.shape[0]
    return Clocks(
        np.full(job.string.size, -1.0),
        np.zeros(job.string.size, np.int8),
        np.zeros((ranks, job.sizes.size) if rules.counts_first_time else (1, 1), np.bool_),
        np.zeros(ranks),
        job.bounds[:, 0].copy(),
        job.bounds[:, 0].copy(),
        fills.begin[:-1].copy(),
        np.zeros(ranks, np.int64),
        np.full((ranks, rules.threads), rules.staging_start),
        np.full((ranks, fills.room.shape[1], int(fills.threads.max())), rules.start),
    )


@kernel
def own_copy(begin: Ints, holder: NDArray[np.int32], sample: int, rank: int) -> int:
    """Return the rank's own copy of a sample, or -1."""
    for copy in range(begin[sample], begin[sample + 1]):
        if holder[copy] == rank:
            return copy
    return -1


@kernel
def _peer_copy(
    begin: Ints,
    holder: NDArray[np.int32],
    tier: NDArray[np.int8],
    ready: Floats,
    peer_rate: Floats,
    sample: int,
    rank: int,
    by: float,
    takes_last: bool,
) -> int:
    """Return the copy on another rank, there by the time `by`, that reads fastest or has the highest rank; or -1."""
    best = -1
    for copy in range(begin[sample], begin[sample + 1]):
        if holder[copy] == rank or ready[copy] > by:
            continue
        if best < 0 or takes_last or peer_rate[tier[copy]] > peer_rate[tier[best]]:
            best = copy
    return best


@kernel
def _hand_over(begin: Ints, ready: Floats, is_handed: NDArray[np.bool_], sample: int, done: float) -> None:
    """Give a sample that was read from the store to the ranks that shall keep it and do not read it themselves."""
    for copy in range(begin[sample], begin[sample + 1]):
        if is_handed[copy] and ready[copy] > done:
            ready[copy] = done


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
def _clients_ahead(
    rank: int,
    now: float,
    asked_begin: Ints,
    asked_count: Ints,
    asked_times: Floats,
    fetched_begin: Ints,
    fetched_count: Ints,
    fetched_times: Floats,
) -> int:
    """Count this rank and those that have read times at or after now."""
    clients = 1
    for other in range(asked_count.size):
        if other == rank:
            continue
        # Requests are in the order of time, so that the last tells; what is fetched ahead is not.
        last = asked_begin[other] + asked_count[other] - 1
        if (asked_count[other] and asked_times[last] >= now) or _has_reads_ahead(
            fetched_times, fetched_begin[other], fetched_count[other], now
        ):
            clients += 1
    return clients


@kernel
def run_rank_by_rank(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    asked: ReadTimes,
    fetched: ReadTimes,
    clocks: Clocks,
    results: Results,
) -> None:
    """Run all steps, in each the ranks one after the other; a step ends for all when the slowest is done.

    One long loop: what it keeps are some forty arrays, and handing them to functions costs more than the work.
    Mutated: copies.ready and .tier, fills.room, asked, fetched, clocks and results.
    """
    string, bounds, sizes, hit, next_read, next_rank, arrival, is_last = job
    begin, holder, tier, ready, is_handed = copies
    fill_begin, fill_samples, fill_level, fill_threads, room, fill_last = fills
    tier_rate, peer_rate, store_rate = costs.tier, costs.peer, costs.store
    asked_begin, asked_count, asked_times = asked
    fetched_begin, fetched_count, fetched_times = fetched
    (
        staged_at,
        staged_from,
        seen,
        staged_bytes,
        next_stage,
        next_free,
        next_fill,
        next_thread,
        idle,
        fill_idle,
    ) = clocks
    step_end, step_stall, step_busy, reads, store_bytes, fill_reads, access_stall, access_end = results
    ranks, steps, tiers = bounds.shape[0], bounds.shape[1] - 1, room.shape[1]
    has_hits = hit.size > 0
    link_free = np.zeros(ranks)
    counts_ahead = rules.counts_ahead

    rate = 0.0
    now = rules.start
    # Step -2: tiers are filled; -1: staging begins; both before anything is asked for.
    for step in range(-2, steps):
        latest = now
        for rank in range(ranks):
            clock = now if step >= 0 else 0.0
            first = bounds[rank, step] if step >= 0 else 0
            last = bounds[rank, step + 1] if step >= 0 else 1
            for access in range(first, last):
                answered = clock if step >= 0 else rules.staging_start
                if step >= 0:
                    # Answer: what is staged, or else the fastest way, if that is earlier.
                    sample = string[access]
                    nbytes = sizes[sample]
                    origin = STAGED_TIER
                    at = staged_at[access]
                    if rules.is_ready:
                        pass
                    elif 0.0 <= at <= clock:
                        origin = staged_from[access]
                    else:
                        clients = ranks
                        if counts_ahead:
                            clients = _clients_ahead(
                                rank, clock, asked_begin, asked_count, asked_times, fetched_begin, fetched_count,
                                fetched_times,
                            )  # fmt: skip
                        rate, origin, latency = float(store_rate[clients]), STORE, costs.latency[0]
                        own = own_copy(begin, holder, sample, rank)
                        if own >= 0 and ready[own] <= clock and tier_rate[tier[own]] > rate:
                            rate, origin, latency = tier_rate[tier[own]], TIER, costs.latency[tier[own]]
                        if (
                            has_hits
                            and hit[access] > 0
                            and arrival[access] <= clock
                            and tier_rate[hit[access]] > rate
                        ):
                            rate, origin, latency = tier_rate[hit[access]], TIER, costs.latency[hit[access]]
                        peer = _peer_copy(
                            begin, holder, tier, ready, peer_rate, sample, rank, clock, rules.takes_last
                        )
                        if peer >= 0 and peer_rate[tier[peer]] > rate:
                            rate, origin, latency = peer_rate[tier[peer]], PEER, costs.latency[tier[peer]]
                        answered = clock + latency + nbytes / rate + nbytes * costs.preprocess
                        if 0.0 <= at <= answered:
                            answered, origin = at, staged_from[access]
                        elif origin == STORE:
                            store_bytes[rank] += nbytes
                            _hand_over(begin, ready, is_handed, sample, answered)
                    if counts_ahead and origin in (STORE, STAGED_STORE):
                        asked_times[asked_begin[rank] + asked_count[rank]] = (
                            clock if origin == STORE else answered
                        )
                        asked_count[rank] += 1
                    reads[rank, origin] += 1
                    if has_hits and next_read[access] >= 0 and hit[next_read[access]] > 0:
                        # Its next user gets it, over this rank's link if that is another.
                        arrival[next_read[access]] = answered
                        if next_rank[access] != rank:
                            link_free[rank] = max(link_free[rank], answered) + sizes[sample] / costs.network
                            arrival[next_read[access]] = link_free[rank]
                    # Release: what was consumed leaves the staging buffer, and what is never read again its tier.
                    gone = access + 1 if rules.frees_on_use else first
                    for past in range(next_free[rank], gone):
                        if staged_at[past] >= 0.0:
                            staged_bytes[rank] -= sizes[string[past]]
                        if rules.drops and is_last[past]:
                            own = own_copy(begin, holder, string[past], rank)
                            if own >= 0 and ready[own] < np.inf:
                                ready[own] = np.inf
                                room[rank, tier[own]] += sizes[string[past]]
                    next_free[rank] = gone
                    # A sample that was fetched directly needs no staging any more.
                    next_stage[rank] = max(next_stage[rank], access + 1)

                # Fill: tiers take the next listed samples while they have room, each with threads of its own.
                if step == -2 or (rules.drops and step >= 0):
                    for level in range(1, tiers):
                        thread = 0
                        while next_fill[rank] < fill_begin[rank + 1]:
                            place = next_fill[rank]
                            sample = fill_samples[place]
                            nbytes = sizes[sample]
                            if rules.drops and fill_last[place] < next_stage[rank]:
                                next_fill[rank] += 1  # the tier would not be asked for it any more
                                continue
                            if (fill_level[place] and fill_level[place] != level) or nbytes > room[
                                rank, level
                            ]:
                                break
                            begun = max(clock if step < 0 else answered, fill_idle[rank, level, thread])
                            done = (
                                begun
                                + costs.latency[0]
                                + nbytes / store_rate[ranks]
                                + nbytes * costs.fill[level]
                            )
                            fill_idle[rank, level, thread] = done
                            own = own_copy(begin, holder, sample, rank)
                            tier[own] = level
                            ready[own] = done
                            room[rank, level] -= nbytes
                            store_bytes[rank] += nbytes
                            fill_reads[rank] += 1
                            if counts_ahead:
                                fetched_times[fetched_begin[rank] + fetched_count[rank]] = begun
                                fetched_count[rank] += 1
                            next_fill[rank] += 1
                            thread = (thread + 1) % fill_threads[level]

                # Stage: top the buffer up in the order of the string, the threads in turn.
                if rules.stages and step >= -1:
                    for thread in range(rules.threads):
                        idle[rank, thread] = max(idle[rank, thread], answered)
                    while next_stage[rank] < bounds[rank, steps]:
                        ahead = next_stage[rank]
                        sample = string[ahead]
                        nbytes = sizes[sample]
                        if staged_bytes[rank] + nbytes > rules.staging_bytes:
                            break
                        thread = next_thread[rank]
                        begun = float(idle[rank, thread])
                        rate = 0.0
                        due, origin, level = np.inf, STAGED_TIER, 0
                        own = own_copy(begin, holder, sample, rank)
                        if own >= 0 and ready[own] < np.inf:
                            rate, due, level = tier_rate[tier[own]], ready[own], int(tier[own])
                        elif has_hits and hit[ahead] > 0:
                            if arrival[ahead] == np.inf:
                                break
                            rate, due, level = tier_rate[hit[ahead]], arrival[ahead], int(hit[ahead])
                        if rules.from_peers:
                            # Any copy that is or will be there: where the store is out of bounds, staging waits.
                            peer = _peer_copy(
                                begin, holder, tier, ready, peer_rate, sample, rank, 1e300, rules.takes_last
                            )
                            if peer >= 0 and peer_rate[tier[peer]] > rate:
                                if rules.from_store and ready[peer] > begun:
                                    break
                                rate, due, origin = peer_rate[tier[peer]], ready[peer], STAGED_PEER
                                level = int(tier[peer])
                        if rules.from_store and (due > begun or store_rate[1] > rate):
                            clients = ranks
                            if counts_ahead:
                                clients = _clients_ahead(
                                    rank, begun, asked_begin, asked_count, asked_times, fetched_begin, fetched_count,
                                    fetched_times,
                                )  # fmt: skip
                            if due > begun or store_rate[clients] > rate:
                                rate, due, origin, level = float(store_rate[clients]), begun, STAGED_STORE, 0
                        if due < np.inf:
                            fetched_at = max(due, begun) + costs.latency[level] + nbytes / rate
                            done = fetched_at + nbytes * costs.preprocess
                            idle[rank, thread] = done
                            staged_at[ahead] = done
                            staged_from[ahead] = origin
                            if origin == STAGED_STORE:
                                store_bytes[rank] += nbytes
                                _hand_over(begin, ready, is_handed, sample, done)
                                if counts_ahead:
                                    fetched_times[fetched_begin[rank] + fetched_count[rank]] = begun
                                    fetched_count[rank] += 1
                            if not (rules.counts_first_time and seen[rank, sample]):
                                staged_bytes[rank] += nbytes
                            if rules.counts_first_time:
                                seen[rank, sample] = True
                        next_stage[rank] += 1
                        next_thread[rank] = (thread + 1) % rules.threads

                if step >= 0:
                    busy = sizes[string[access]] * costs.compute_byte + costs.compute_sample
                    step_stall[step, rank] += answered - clock
                    step_busy[step, rank] += busy
                    if access_stall.size:
                        access_stall[access] = answered - clock
                        access_end[access] = answered + busy
                    clock = answered + busy
            if step >= 0:
                latest = max(latest, clock)
        if step >= 0:
            now = latest
            step_end[step] = now


@kernel
def sort_by_sample(samples: Ints, begin: Ints, place: Ints) -> None:
    """Write where each sample's entries begin, int64[F + 1], and each entry's place among all, in stable order.

    begin: zeros. Both are written.
    """
    for sample in samples:
        begin[sample] += 1
    total = 0
    for sample in range(begin.size):
        total += begin[sample]
        begin[sample] = total - begin[sample]
    for entry in range(samples.size):
        place[entry] = begin[samples[entry]]
        begin[samples[entry]] += 1
    for sample in range(begin.size - 1, 0, -1):
        begin[sample] = begin[sample - 1]
    begin[0] = 0
