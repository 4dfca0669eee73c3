"""The compiled request model in which all ranks and threads share one time.

Every rank has one consumer, staging threads and, for each tier, threads that fill it: the *actors*. Each has at most
one event ahead of it, in a heap, so that what begins at a time sees who reads at that time. The rate of a read is fixed
when it begins, by how many then share the place.

    staging thread   take the next access of the string -> fetch -> decode -> staged; parked while there is no room
    fill thread      take the next listed sample -> fetch -> write -> in the tier; parked until a sample is dropped
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
_IDLE, _FETCH, _WORK = 0, 1, 2
#: State of an access besides the time at which it is staged.
_BEGUN, _LEFT = -2.0, -3.0
_UNSEEN = -1.0


class Heap(NamedTuple):
    """Events by time, then actor. times, actors: [actors]; count: int64[1]."""

    times: Floats
    actors: Ints
    count: Ints


class Actors(NamedTuple):
    """State per actor, [actors]. Actor rank * per_rank is a consumer, staging threads follow, then fill threads.

    phase: what its event ends. access: the access, or for a fill thread its sample. origin: as in reads.
    held: whose tier it reads from, holder * tiers + tier; -1 the store; -2 nothing.
    level: of a fill thread the tier; else 0. is_parked: it waits for room.
    """

    phase: NDArray[np.int8]
    access: Ints
    origin: NDArray[np.int8]
    held: Ints
    level: Ints
    is_parked: NDArray[np.bool_]


class State(NamedTuple):
    """Of ranks. store_reads: int64[ranks]; clients: int64[1]; tier_reads: int64[ranks * tiers].

    staged_at: float64[accesses], when staged, or one of _UNSEEN, _BEGUN, _LEFT. asked_at: float64[ranks], since when
    the consumer waits, -1 where it does not. next_fill, end_fill: int64[ranks, tiers]; index 0: the spares.
    """

    store_reads: Ints
    clients: Ints
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


@kernel
def _push(heap: Heap, time: float, actor: int) -> None:
    place = heap.count[0]
    heap.count[0] += 1
    while place > 0:
        parent = (place - 1) // 2
        if (heap.times[parent], heap.actors[parent]) <= (time, actor):
            break
        heap.times[place], heap.actors[place] = heap.times[parent], heap.actors[parent]
        place = parent
    heap.times[place], heap.actors[place] = time, actor


@kernel
def _pop(heap: Heap) -> tuple[float, int]:
    first = heap.times[0], heap.actors[0]
    heap.count[0] -= 1
    count = heap.count[0]
    time, actor = heap.times[count], heap.actors[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and (heap.times[child + 1], heap.actors[child + 1]) < (
            heap.times[child],
            heap.actors[child],
        ):
            child += 1
        if (time, actor) <= (heap.times[child], heap.actors[child]):
            break
        heap.times[place], heap.actors[place] = heap.times[child], heap.actors[child]
        place = child
    heap.times[place], heap.actors[place] = time, actor
    return first


@kernel
def _store_rate(costs: Costs, rules: Rules, state: State, rank: int) -> float:
    """Bytes/s of one more read of the store by this rank, as of now."""
    clients = state.clients[0] + (state.store_reads[rank] == 0)
    return float(
        costs.store[state.store_reads.size if rules.counts_all else clients, state.store_reads[rank] + 1]
    )


@kernel
def _take(state: State, rank: int, held: int) -> None:
    if held == -1:
        state.clients[0] += state.store_reads[rank] == 0
        state.store_reads[rank] += 1
    elif held >= 0:
        state.tier_reads[held] += 1


@kernel
def _give_back(state: State, rank: int, held: int) -> None:
    if held == -1:
        state.store_reads[rank] -= 1
        state.clients[0] -= state.store_reads[rank] == 0
    elif held >= 0:
        state.tier_reads[held] -= 1


@kernel
def _fetch(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    state: State,
    results: Results,
    actors: Actors,
    actor: int,
    rank: int,
    access: int,
    now: float,
    from_store: bool,
    from_peers: bool,
) -> float:
    """Begin to fetch an access from where it is there first; return when its bytes are here, inf if from nowhere."""
    sample = job.string[access]
    nbytes = job.sizes[sample]
    tiers = fills.room.shape[1]
    done, origin, held = np.inf, STAGED_STORE, -1
    own = -1
    for copy in range(copies.begin[sample], copies.begin[sample + 1]):
        is_own = copies.holder[copy] == rank
        if is_own:
            own = copy
        if copies.ready[copy] == np.inf or not (is_own or (from_peers and copies.ready[copy] <= now)):
            continue
        place = copies.holder[copy] * tiers + copies.tier[copy]
        reads = state.tier_reads[place] + 1
        rate = costs.tier[copies.tier[copy], reads] if is_own else costs.peer[copies.tier[copy], reads]
        end = max(now, copies.ready[copy]) + nbytes / rate
        if end < done:
            done, origin, held = end, STAGED_TIER if is_own else STAGED_PEER, place
    if job.hit.size and job.hit[access] > 0:
        place = rank * tiers + job.hit[access]
        end = now + nbytes / costs.tier[job.hit[access], state.tier_reads[place] + 1]
        if end < done:
            done, origin, held = end, STAGED_TIER, place
    if from_store:
        end = now + nbytes / _store_rate(costs, rules, state, rank)
        if end < done:
            done, origin, held = end, STAGED_STORE, -1
            results.store_bytes[rank] += nbytes
            if own >= 0 and copies.ready[own] == np.inf and copies.tier[own] > 0:
                copies.ready[own] = done
            for copy in range(copies.begin[sample], copies.begin[sample + 1]):
                if copies.is_handed[copy] and copies.ready[copy] == np.inf:
                    copies.ready[copy] = done + nbytes / costs.network
    if done < np.inf:
        _take(state, rank, held)
        actors.phase[actor] = _FETCH
        actors.access[actor] = access
        actors.origin[actor] = origin
        actors.held[actor] = held
    return done


@kernel
def _call_consumer(
    state: State, actors: Actors, heap: Heap, actor: int, rank: int, access: int, now: float
) -> None:
    """Let the rank's consumer go on if it waits for this access."""
    consumer = actor - actor % (actors.phase.size // state.asked_at.size)
    if state.asked_at[rank] >= 0.0 and state.next_use[rank] == access:
        actors.phase[consumer] = _IDLE
        _push(heap, now, consumer)


@kernel
def _stage_next(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    state: State,
    results: Results,
    actors: Actors,
    heap: Heap,
    actor: int,
    rank: int,
    now: float,
) -> None:
    """Let a staging thread take the next access, park where there is no room, or retire at the end of the string."""
    end = job.bounds[rank, job.bounds.shape[1] - 1]
    while state.next_stage[rank] < end:
        access = state.next_stage[rank]
        nbytes = job.sizes[job.string[access]]
        if state.staged_bytes[rank] > 0 and state.staged_bytes[rank] + nbytes > rules.staging_bytes:
            actors.is_parked[actor] = True
            _call_consumer(state, actors, heap, actor, rank, access, now)
            return
        state.next_stage[rank] += 1
        done = _fetch(
            job,
            copies,
            fills,
            costs,
            rules,
            state,
            results,
            actors,
            actor,
            rank,
            access,
            now,
            rules.from_store,
            rules.from_peers,
        )
        if done < np.inf:
            state.staged_bytes[rank] += nbytes
            state.staged_at[access] = _BEGUN
            _push(heap, done, actor)
            return
        state.staged_at[access] = _LEFT
        _call_consumer(state, actors, heap, actor, rank, access, now)


@kernel
def _fill_next(
    job: Job,
    copies: Copies,
    fills: Fills,
    costs: Costs,
    rules: Rules,
    state: State,
    results: Results,
    actors: Actors,
    heap: Heap,
    actor: int,
    rank: int,
    now: float,
) -> None:
    """Let a fill thread take its tier's next sample that nobody has begun to read, or a spare that fits."""
    level = actors.level[actor]
    for column in (level, 0):
        while state.next_fill[rank, column] < state.end_fill[rank, column]:
            sample = fills.samples[state.next_fill[rank, column]]
            nbytes = job.sizes[sample]
            copy = own_copy(copies, sample, rank)
            if copies.ready[copy] < np.inf:
                state.next_fill[rank, column] += 1
                continue
            if column == 0 and nbytes > fills.room[rank, level]:
                break
            state.next_fill[rank, column] += 1
            if column == 0:
                fills.room[rank, level] -= nbytes
                copies.tier[copy] = level
            fetched = now + nbytes / _store_rate(costs, rules, state, rank)
            _take(state, rank, -1)
            copies.ready[copy] = fetched + nbytes * costs.fill[level]
            results.store_bytes[rank] += nbytes
            results.fill_reads[rank] += 1
            actors.phase[actor], actors.access[actor], actors.held[actor] = _FETCH, sample, -1
            _push(heap, fetched, actor)
            return
    actors.is_parked[actor] = True


@kernel
def _wake(actors: Actors, heap: Heap, first: int, last: int, now: float) -> None:
    for actor in range(first, last):
        if actors.is_parked[actor]:
            actors.is_parked[actor] = False
            actors.phase[actor] = _IDLE
            _push(heap, now, actor)


@kernel
def _release(
    job: Job, copies: Copies, fills: Fills, rules: Rules, state: State, rank: int, last: int
) -> bool:
    """Free what was consumed before `last`; return whether a tier has new room."""
    has_room = False
    for access in range(state.next_free[rank], last):
        sample = job.string[access]
        if state.staged_at[access] >= 0.0:
            state.staged_bytes[rank] -= job.sizes[sample]
        if rules.drops and job.is_last[access]:
            own = own_copy(copies, sample, rank)
            if own >= 0 and copies.ready[own] < np.inf:
                fills.room[rank, copies.tier[own]] += job.sizes[sample]
                copies.ready[own] = np.inf
                copies.tier[own] = 0
                has_room = True
    state.next_free[rank] = last
    return has_room


@kernel
def run_together(
    job: Job, copies: Copies, fills: Fills, costs: Costs, rules: Rules, results: Results
) -> None:
    """Run all steps; a step begins for all ranks at once and ends when the slowest is done.

    Mutated: copies.ready and .tier, fills.room and results.
    """
    ranks, steps, tiers = job.bounds.shape[0], job.bounds.shape[1] - 1, fills.room.shape[1]
    stagers = rules.threads if rules.stages else 0
    per_rank = 1 + stagers + fills.threads[1:].sum()
    count = ranks * per_rank
    heap = Heap(np.empty(count), np.empty(count, np.int64), np.zeros(1, np.int64))
    actors = Actors(
        np.zeros(count, np.int8), np.zeros(count, np.int64), np.zeros(count, np.int8), np.full(count, -2),
        np.zeros(count, np.int64), np.zeros(count, np.bool_),
    )  # fmt: skip
    state = State(
        np.zeros(ranks, np.int64), np.zeros(1, np.int64), np.zeros(ranks * tiers, np.int64),
        np.full(job.string.size, _UNSEEN), np.zeros(job.string.size, np.int8), np.zeros(ranks),
        job.bounds[:, 0].copy(), job.bounds[:, 0].copy(), job.bounds[:, 0].copy(), np.full(ranks, -1.0),
        np.zeros((ranks, tiers), np.int64), np.zeros((ranks, tiers), np.int64),
    )  # fmt: skip
    for rank in range(ranks):
        place = fills.begin[rank]
        for column in range(1, tiers + 1):
            level = column % tiers
            state.next_fill[rank, level] = place
            while place < fills.begin[rank + 1] and fills.level[place] == level:
                if level:
                    fills.room[rank, level] -= job.sizes[fills.samples[place]]
                place += 1
            state.end_fill[rank, level] = place
        actor = rank * per_rank + 1
        for _ in range(stagers):
            _push(heap, rules.staging_start, actor)
            actor += 1
        for level in range(1, tiers):
            for _ in range(fills.threads[level]):
                actors.level[actor] = level
                if fills.begin[rank] < fills.begin[rank + 1]:
                    _push(heap, rules.start, actor)
                actor += 1

    now = rules.start
    for step in range(steps):
        running = 0
        for rank in range(ranks):
            if job.bounds[rank, step] < job.bounds[rank, step + 1]:
                running += 1
                actors.phase[rank * per_rank] = _IDLE
                _push(heap, now, rank * per_rank)
        results.step_end[step] = now
        while running:
            assert heap.count[0] > 0, "every rank waits for another"
            now, actor = _pop(heap)
            rank, place = actor // per_rank, actor % per_rank
            phase = actors.phase[actor]
            if phase == _FETCH:
                _give_back(state, rank, actors.held[actor])
                if place > stagers:
                    seconds = job.sizes[actors.access[actor]] * costs.fill[actors.level[actor]]
                else:
                    seconds = job.sizes[job.string[actors.access[actor]]] * costs.preprocess
                actors.phase[actor] = _WORK
                _push(heap, now + seconds, actor)
                continue
            if place > stagers:
                _fill_next(job, copies, fills, costs, rules, state, results, actors, heap, actor, rank, now)
                continue
            if place > 0:
                if phase == _WORK:
                    access = actors.access[actor]
                    state.staged_at[access] = now
                    state.staged_from[access] = actors.origin[actor]
                    _call_consumer(state, actors, heap, actor, rank, access, now)
                _stage_next(job, copies, fills, costs, rules, state, results, actors, heap, actor, rank, now)
                continue

            # The consumer: what it asks for is there, or is on its way, or it has to fetch it.
            access = state.next_use[rank]
            if access == job.bounds[rank, step + 1]:
                running -= 1
                results.step_end[step] = max(results.step_end[step], now)
                continue
            if state.asked_at[rank] < 0.0:
                state.asked_at[rank] = now
                if not rules.frees_on_use and access == job.bounds[rank, step]:
                    if _release(job, copies, fills, rules, state, rank, access):
                        _wake(actors, heap, actor + 1 + stagers, actor + per_rank, now)
                    _wake(actors, heap, actor + 1, actor + 1 + stagers, now)
            sample = job.string[access]
            if rules.is_ready:
                origin = STAGED_TIER
            elif phase == _WORK:
                origin = np.int64(actors.origin[actor]) + STORE
            elif state.staged_at[access] >= 0.0:
                origin = np.int64(state.staged_from[access])
            else:
                is_stuck = stagers > 0
                for stager in range(actor + 1, actor + 1 + stagers):
                    is_stuck &= actors.is_parked[stager]
                if (
                    stagers == 0
                    or state.staged_at[access] == _LEFT
                    or (state.staged_at[access] == _UNSEEN and is_stuck)
                ):
                    state.next_stage[rank] = max(state.next_stage[rank], access + 1)
                    state.staged_at[access] = _LEFT
                    done = _fetch(
                        job,
                        copies,
                        fills,
                        costs,
                        rules,
                        state,
                        results,
                        actors,
                        actor,
                        rank,
                        access,
                        now,
                        True,
                        rules.from_peers,
                    )
                    _push(heap, done, actor)
                continue
            results.reads[rank, origin] += 1
            stall = now - state.asked_at[rank]
            busy = job.sizes[sample] * costs.compute_byte + costs.compute_sample
            results.step_stall[step, rank] += stall
            results.step_busy[step, rank] += busy
            if results.access_stall.size:
                results.access_stall[access] = stall
                results.access_end[access] = now + busy
            state.asked_at[rank] = -1.0
            state.next_use[rank] += 1
            if rules.frees_on_use:
                if _release(job, copies, fills, rules, state, rank, access + 1):
                    _wake(actors, heap, actor + 1 + stagers, actor + per_rank, now)
                _wake(actors, heap, actor + 1, actor + 1 + stagers, now)
            actors.phase[actor] = _IDLE
            _push(heap, now + busy, actor)
        now = results.step_end[step]
