"""The compiled request model in which all ranks and threads share one time.

Every rank has one consumer, staging threads and, for each tier, threads that fill it: the *actors*. Each has at most
one event ahead of it, in a heap, so that what begins at a time sees who reads at that time. The rate of a read is fixed
when its bytes begin to flow, by how many then share the place.

    staging thread   take the next access of the string -> (latency) -> fetch -> decode -> staged; parked without room
    fill thread      take the next listed sample -> (latency) -> fetch -> write -> in the tier; parked without room
    consumer         ask -> (wait | fetch and decode by itself, where nobody stages) -> compute; then the barrier

A copy's time of readiness is set as soon as its read begins: infinite means that nobody has begun, later than now that
it is on its way, so that nothing is fetched twice. Ranks, steps and arrays: `penstock.simulate._request_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel
from penstock.simulate._request_kernels import (
    STAGED_PEER,
    STAGED_STORE,
    STAGED_TIER,
    STORE,
    Copies,
    Costs,
    Fills,
    Floats,
    Ints,
    Job,
    Results,
    Rules,
    own_copy,
)

#: What an actor's next event ends.
_IDLE, _LATENCY, _FETCH, _WORK = 0, 1, 2, 3
#: State of an access that is not staged: not thought of; on its way; left to the consumer.
_UNSEEN, _BEGUN, _LEFT = -1.0, -2.0, -3.0
#: What an actor reads from, if no tier (holder * tiers + tier).
_STORE, _NOTHING = -1, -2


class Actors(NamedTuple):
    """State per actor, [actors]. Actor rank * per_rank is a consumer, staging threads follow, then fill threads.

    phase: what its event ends. access: its access, of a fill thread its sample. origin: as in reads. held: what it
    reads from. claim: the copy that its read of the store makes, or -1. level: of a fill thread its tier, else 0.
    is_parked: it waits for room.
    times, waiting: a heap of (time, actor), by time, then actor.
    """

    phase: NDArray[np.int8]
    access: Ints
    origin: NDArray[np.int8]
    held: Ints
    claim: Ints
    level: Ints
    is_parked: NDArray[np.bool_]
    times: Floats
    waiting: Ints


class State(NamedTuple):
    """Of ranks. store_reads: int64[ranks] and tier_reads: int64[ranks * tiers], reads under way.

    staged_at: float64[accesses], when staged, or one of _UNSEEN, _BEGUN, _LEFT; staged_from: int8[accesses].
    staged_bytes, next_stage, next_free, next_use: [ranks]. asked_at: float64[ranks], since when the consumer waits, -1
    where it does not. next_fill, end_fill: int64[ranks, tiers], of Fills.samples; column 0: the spares.
    decoding: int64[ranks], samples being decoded. droppable: int64[accesses], last reads of samples that
    a tier still holds, rank r's in [first_droppable[r], end_droppable[r]).
    """

    store_reads: Ints
    tier_reads: Ints
    staged_at: Floats
    staged_from: NDArray[np.int8]
    staged_bytes: Floats
    next_stage: Ints
    next_free: Ints
    next_use: Ints
    asked_at: Floats
    next_fill: Ints
    end_fill: Ints
    decoding: Ints
    droppable: Ints
    first_droppable: Ints
    end_droppable: Ints


def new_state(job: Job, fills: Fills, rules: Rules) -> tuple[Actors, State]:
    """Return all actors idle, and the state before the first step; what is listed is taken off `fills.room`."""
    ranks, tiers = fills.room.shape
    stagers = rules.threads if rules.stages else 0
    levels = np.concatenate(
        [np.zeros(1 + stagers, np.int64), np.repeat(np.arange(1, tiers), fills.threads[1:])]
    )
    count = ranks * levels.size
    actors = Actors(
        np.zeros(count, np.int8),
        np.zeros(count, np.int64),
        np.zeros(count, np.int8),
        np.full(count, _NOTHING),
        np.full(count, -1),
        np.tile(levels, ranks),
        np.zeros(count, np.bool_),
        np.empty(count),
        np.empty(count, np.int64),
    )
    next_fill, end_fill = np.zeros((ranks, tiers), np.int64), np.zeros((ranks, tiers), np.int64)
    for rank in range(ranks):
        begin, end = fills.begin[rank], fills.begin[rank + 1]
        levels = fills.level[begin:end]
        planned = fills.samples[begin:end][levels > 0]
        fills.room[rank] -= np.bincount(levels[levels > 0], job.sizes[planned], tiers)
        counts = np.bincount(levels, minlength=tiers)
        # In the list tier 1 comes first, the spares last.
        ends = begin + np.concatenate([np.cumsum(counts[1:]), [counts.sum()]])
        end_fill[rank] = np.roll(ends, 1)
        next_fill[rank] = end_fill[rank] - counts
    state = State(
        np.zeros(ranks, np.int64),
        np.zeros(ranks * tiers, np.int64),
        np.full(job.string.size, _UNSEEN),
        np.zeros(job.string.size, np.int8),
        np.zeros(ranks),
        job.bounds[:, 0].copy(),
        job.bounds[:, 0].copy(),
        job.bounds[:, 0].copy(),
        np.full(ranks, -1.0),
        next_fill,
        end_fill,
        np.zeros(ranks, np.int64),
        np.empty(job.string.size if rules.drops else 0, np.int64),
        job.bounds[:, 0].copy(),
        job.bounds[:, 0].copy(),
    )
    return actors, state


@kernel
def _push(times: Floats, waiting: Ints, count: int, time: float, actor: int) -> int:
    """Add an event; return how many there are."""
    place = count
    while place > 0:
        parent = (place - 1) // 2
        if times[parent] < time or (times[parent] == time and waiting[parent] < actor):
            break
        times[place], waiting[place] = times[parent], waiting[parent]
        place = parent
    times[place], waiting[place] = time, actor
    return count + 1


@kernel
def _pop(times: Floats, waiting: Ints, count: int) -> int:
    """Take the first event out of the heap; return how many are left."""
    count -= 1
    time, actor = times[count], waiting[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        other = child + 1
        if other < count and (
            times[other] < times[child] or (times[other] == times[child] and waiting[other] < waiting[child])
        ):
            child = other
        if time < times[child] or (time == times[child] and actor < waiting[child]):
            break
        times[place], waiting[place] = times[child], waiting[child]
        place = child
    times[place], waiting[place] = time, actor
    return count


@kernel
def _wake(
    times: Floats,
    waiting: Ints,
    count: int,
    phases: NDArray[np.int8],
    is_parked: NDArray[np.bool_],
    first: int,
    last: int,
    now: float,
) -> int:
    """Give the parked among some actors an event now; return how many events there are."""
    for actor in range(first, last):
        if is_parked[actor]:
            is_parked[actor] = False
            phases[actor] = _IDLE
            count = _push(times, waiting, count, now, actor)
    return count


@kernel
def _from_tiers(
    begin: Ints,
    holder: NDArray[np.int32],
    tier: NDArray[np.int8],
    ready: Floats,
    tier_rate: Floats,
    peer_rate: Floats,
    tier_reads: Ints,
    latency: Floats,
    sample: int,
    nbytes: int,
    rank: int,
    now: float,
    from_peers: bool,
    takes_last: bool,
    handed_to: int,
    arrival: float,
) -> tuple[float, int]:
    """Return when a sample can be here from a tier, the rank's own or a peer's, and from which; inf if from none.

    handed_to: a tier of this rank's to which it is handed besides, if above 0, at `arrival`.
    A copy of one's own that is on its way counts; of equals one's own is taken.
    """
    tiers = tier_rate.shape[0]
    done, held = np.inf, _NOTHING
    last = -1
    if takes_last and from_peers:
        for copy in range(begin[sample], begin[sample + 1]):
            if holder[copy] != rank and ready[copy] <= now:
                last = copy
    for copy in range(begin[sample], begin[sample + 1]):
        is_own = holder[copy] == rank
        if ready[copy] == np.inf or not (is_own or (from_peers and ready[copy] <= now)):
            continue
        if takes_last and not is_own and copy != last:
            continue
        place = holder[copy] * tiers + tier[copy]
        rates = tier_rate if is_own else peer_rate
        begun = max(now, ready[copy]) + latency[tier[copy]]
        end = begun + nbytes / rates[tier[copy], tier_reads[place] + 1]
        if end < done or (is_own and end == done):
            done, held = end, place
    if handed_to > 0:
        place = rank * tiers + handed_to
        begun = max(now, arrival) + latency[handed_to]
        end = begun + nbytes / tier_rate[handed_to, tier_reads[place] + 1]
        if end < done:
            done, held = end, place
    return done, held


@kernel
def _hand_over(begin: Ints, ready: Floats, is_handed: NDArray[np.bool_], sample: int, arrival: float) -> None:
    """Give a sample that comes from the store to the ranks that shall keep it and do not read it themselves."""
    for copy in range(begin[sample], begin[sample + 1]):
        if is_handed[copy] and ready[copy] == np.inf:
            ready[copy] = arrival


@kernel
def run_together(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    actors: Actors,
    state: State,
    results: Results,
) -> bool:
    """Run all steps; a step begins for all ranks at once and ends when the slowest is done.

    One long loop: what it keeps are some forty arrays, and handing them to functions costs more than the work.
    Mutated: copies.ready and .tier, fills.room, actors, state and results.
    Returns: whether the run came to its end; it does not if every rank waits for another.
    """
    string, bounds, sizes, hit, next_read, next_rank, arrival, is_last = job
    begin, holder, tier, ready, is_handed = copies
    fill_begin, fill_samples, _, _, room, first_read, last_read = fills
    store_rate, tier_rate, peer_rate, latency = costs.store, costs.tier, costs.peer, costs.latency
    phases, accesses, origins, helds, claims, levels, is_parked, times, waiting = actors
    (
        store_reads, tier_reads, staged_at, staged_from, staged_bytes, next_stage, next_free, next_use, asked_at,
        next_fill, end_fill, decoding, droppable, first_droppable, end_droppable,
    ) = state  # fmt: skip
    step_end, step_stall, step_busy, reads, store_bytes, fill_reads, access_stall, access_end = results
    ranks, steps = bounds.shape[0], bounds.shape[1] - 1
    per_rank = phases.size // ranks
    stagers = rules.threads if rules.stages else 0
    has_hits = hit.size > 0
    link_free = np.zeros(ranks)

    clients, events, actor = 0, 0, 0
    # Without a latency the bytes that the last actor asked for flow now: it goes on, before any other event.
    flows_at_once = False
    for rank in range(ranks):
        for actor in range(rank * per_rank + 1, (rank + 1) * per_rank):
            if levels[actor] == 0:
                events = _push(times, waiting, events, rules.staging_start, actor)
            elif fill_begin[rank] < fill_begin[rank + 1]:
                events = _push(times, waiting, events, rules.start, actor)

    now = rules.start
    for step in range(steps):
        running = 0
        for rank in range(ranks):
            if bounds[rank, step] < bounds[rank, step + 1]:
                running += 1
                phases[rank * per_rank] = _IDLE
                events = _push(times, waiting, events, now, rank * per_rank)
        step_end[step] = now
        while running:
            if not flows_at_once:
                if events == 0:
                    return False
                now, actor = times[0], waiting[0]
                events = _pop(times, waiting, events)
            flows_at_once = False
            rank = actor // per_rank
            consumer = rank * per_rank
            first_fill = consumer + 1 + stagers
            phase = phases[actor]
            if phase == _LATENCY:
                # The bytes of a read of the store begin to flow, and share the wire with those that flow now.
                clients += store_reads[rank] == 0
                store_reads[rank] += 1
                sample = accesses[actor] if levels[actor] else string[accesses[actor]]
                gamma = ranks if rules.counts_all else clients
                done = now + sizes[sample] / store_rate[gamma, store_reads[rank]]
                if claims[actor] >= 0:
                    ready[claims[actor]] = done + sizes[sample] * (
                        costs.fill[levels[actor]] if levels[actor] else 0.0
                    )
                if not levels[actor]:
                    _hand_over(begin, ready, is_handed, sample, done + sizes[sample] / costs.network)
                phases[actor] = _FETCH
                events = _push(times, waiting, events, done, actor)
                continue
            if phase == _FETCH:
                if helds[actor] == _STORE:
                    store_reads[rank] -= 1
                    clients -= store_reads[rank] == 0
                else:
                    tier_reads[helds[actor]] -= 1
                if levels[actor]:
                    work = sizes[accesses[actor]] * costs.fill[levels[actor]]
                else:
                    decoding[rank] += 1
                    slower = max(1.0, decoding[rank] / rules.decoders)
                    work = sizes[string[accesses[actor]]] * costs.preprocess * slower
                phases[actor] = _WORK
                events = _push(times, waiting, events, now + work, actor)
                continue

            if levels[actor]:
                # A fill thread: its tier's next sample that nobody has begun to read, or a spare that fits.
                level = levels[actor]
                column = level
                is_parked[actor] = True
                while column >= 0:
                    if next_fill[rank, column] == end_fill[rank, column]:
                        column = 0 if column else -1
                        continue
                    sample = fill_samples[next_fill[rank, column]]
                    nbytes = sizes[sample]
                    own = own_copy(begin, holder, sample, rank)
                    # What staging takes next it brings into the tier itself; else both would be in step for ever.
                    if column and stagers:
                        ahead = first_read[next_fill[rank, column]] - next_stage[rank]
                        if 0 <= ahead < stagers:
                            next_fill[rank, column] += 1
                            continue
                    is_over = rules.drops and last_read[next_fill[rank, column]] < next_stage[rank]
                    if ready[own] < np.inf or is_over:
                        if is_over and column and ready[own] == np.inf:
                            room[rank, level] += nbytes
                        next_fill[rank, column] += 1
                        continue
                    if column == 0:
                        # What the rank reads no more makes room now, and not before: others may still read it.
                        while nbytes > room[rank, level] and first_droppable[rank] < end_droppable[rank]:
                            dropped = string[droppable[first_droppable[rank]]]
                            first_droppable[rank] += 1
                            gone = own_copy(begin, holder, dropped, rank)
                            room[rank, tier[gone]] += sizes[dropped]
                            ready[gone] = np.inf
                            tier[gone] = 0
                        if nbytes > room[rank, level]:
                            break
                        room[rank, level] -= nbytes
                        tier[own] = level
                    next_fill[rank, column] += 1
                    gamma = ranks if rules.counts_all else clients + (store_reads[rank] == 0)
                    done = now + latency[0] + nbytes / store_rate[gamma, store_reads[rank] + 1]
                    ready[own] = done + nbytes * costs.fill[level]  # as far as is known now
                    store_bytes[rank] += nbytes
                    fill_reads[rank] += 1
                    phases[actor], accesses[actor], helds[actor], claims[actor] = (
                        _LATENCY,
                        sample,
                        _STORE,
                        own,
                    )
                    flows_at_once = latency[0] == 0.0
                    if not flows_at_once:
                        events = _push(times, waiting, events, now + latency[0], actor)
                    is_parked[actor] = False
                    break
                continue

            wanted = -1
            if actor != consumer:
                # A staging thread: what it has decoded is staged.
                if phase == _WORK:
                    decoding[rank] -= 1
                    access = accesses[actor]
                    staged_at[access] = now
                    staged_from[access] = origins[actor]
                    if asked_at[rank] >= 0.0 and next_use[rank] == access:
                        phases[consumer] = _IDLE
                        events = _push(times, waiting, events, now, consumer)
                phases[actor] = _IDLE
            else:
                # A consumer: what it asks for is there, or is on its way, or it fetches it by itself.
                access = next_use[rank]
                if access == bounds[rank, step + 1]:
                    running -= 1
                    step_end[step] = max(step_end[step], now)
                    continue
                frees_until = -1
                if asked_at[rank] < 0.0:
                    asked_at[rank] = now
                    if not rules.frees_on_use and access == bounds[rank, step]:
                        frees_until = access
                is_answered = rules.is_ready or phase == _WORK or staged_at[access] >= 0.0
                if is_answered:
                    origin = STAGED_TIER
                    if phase == _WORK:
                        decoding[rank] -= 1
                        origin = origins[actor] + STORE
                    elif not rules.is_ready:
                        origin = staged_from[access]
                    reads[rank, origin] += 1
                    stall = now - asked_at[rank]
                    busy = sizes[string[access]] * costs.compute_byte + costs.compute_sample
                    step_stall[step, rank] += stall
                    step_busy[step, rank] += busy
                    if access_stall.size:
                        access_stall[access] = stall
                        access_end[access] = now + busy
                    asked_at[rank] = -1.0
                    next_use[rank] += 1
                    phases[actor] = _IDLE
                    events = _push(times, waiting, events, now + busy, actor)
                    if rules.frees_on_use:
                        frees_until = access + 1
                    ahead = next_read[access] if has_hits else -1
                    if ahead >= 0 and hit[ahead] > 0:
                        # Its next user gets it, over this rank's link if that is another.
                        arrival[ahead] = now
                        other = next_rank[access] * per_rank
                        if other != consumer:
                            link_free[rank] = (
                                max(link_free[rank], now) + sizes[string[access]] / costs.network
                            )
                            arrival[ahead] = link_free[rank]
                        if next_stage[next_rank[access]] == ahead:
                            events = _wake(
                                times, waiting, events, phases, is_parked, other + 1, other + 1 + stagers, now
                            )
                # Release: what was consumed leaves the staging buffer, and what is never read again its tier.
                if frees_until > next_free[rank]:
                    has_room = False
                    for past in range(next_free[rank], frees_until):
                        sample = string[past]
                        if staged_at[past] >= 0.0:
                            staged_bytes[rank] -= sizes[sample]
                        if rules.drops and is_last[past]:
                            own = own_copy(begin, holder, sample, rank)
                            if own >= 0 and ready[own] < np.inf:
                                droppable[end_droppable[rank]] = past
                                end_droppable[rank] += 1
                                has_room = True
                    next_free[rank] = frees_until
                    last = consumer + per_rank if has_room else first_fill
                    events = _wake(times, waiting, events, phases, is_parked, consumer + 1, last, now)
                if is_answered:
                    continue
                is_stuck = True
                for stager in range(consumer + 1, first_fill):
                    is_stuck &= is_parked[stager]
                if staged_at[access] == _LEFT or (staged_at[access] == _UNSEEN and is_stuck):
                    next_stage[rank] = max(next_stage[rank], access + 1)
                    staged_at[access] = _LEFT
                    wanted = access

            # Fetch: the consumer what it waits for; a staging thread the next access, if there is room and a source.
            while True:
                if actor != consumer:
                    access = next_stage[rank]
                    if access == bounds[rank, steps]:
                        break
                    nbytes = sizes[string[access]]
                    is_full = staged_bytes[rank] > 0 and staged_bytes[rank] + nbytes > rules.staging_bytes
                    # What a rank before will hand on is not read from the store.
                    is_due = has_hits and hit[access] > 0 and arrival[access] == np.inf
                    if is_full or is_due:
                        is_parked[actor] = True
                    else:
                        next_stage[rank] += 1
                        wanted = access
                if wanted >= 0:
                    sample = string[wanted]
                    nbytes = sizes[sample]
                    handed_to = int(hit[wanted]) if has_hits else 0
                    done, held = _from_tiers(
                        begin, holder, tier, ready, tier_rate, peer_rate, tier_reads, latency, sample, nbytes, rank,
                        now, rules.from_peers or actor == consumer, rules.takes_last, handed_to,
                        arrival[wanted] if has_hits else np.inf,
                    )  # fmt: skip
                    if rules.from_store or actor == consumer:
                        gamma = ranks if rules.counts_all else clients + (store_reads[rank] == 0)
                        by_store = now + latency[0] + nbytes / store_rate[gamma, store_reads[rank] + 1]
                        if by_store < done:
                            done, held = by_store, _STORE
                    if done < np.inf:
                        phases[actor], accesses[actor], helds[actor] = _FETCH, wanted, held
                        # Wherever it comes from, the rank's own tier gets what it shall keep.
                        own = own_copy(begin, holder, sample, rank)
                        claims[actor] = -1
                        if own >= 0 and ready[own] == np.inf and tier[own] > 0:
                            claims[actor] = own
                            ready[own] = done  # of a read of the store: as far as is known now
                        if held == _STORE:
                            store_bytes[rank] += nbytes
                            origins[actor] = STAGED_STORE
                            phases[actor] = _LATENCY
                            done = now + latency[0]
                            flows_at_once = latency[0] == 0.0
                        else:
                            tier_reads[held] += 1
                            origins[actor] = STAGED_TIER if held // room.shape[1] == rank else STAGED_PEER
                        if not flows_at_once:
                            events = _push(times, waiting, events, done, actor)
                        if actor != consumer:
                            staged_bytes[rank] += nbytes
                            staged_at[wanted] = _BEGUN
                        break
                    staged_at[wanted] = _LEFT
                # A consumer that waits for what nobody will stage has to see to it.
                if actor != consumer and asked_at[rank] >= 0.0 and next_use[rank] == access:
                    phases[consumer] = _IDLE
                    events = _push(times, waiting, events, now, consumer)
                if actor == consumer or is_parked[actor]:
                    break
                wanted = -1
        now = step_end[step]
    return True
