"""Loading runs in virtual time: the scheduler that the threads obey, driven over the machine's curves.

Nothing is decided here. The machine says how long a read, a decode or a step takes, `_clock` keeps the time of all
ranks, and the trace that comes out has the spans that a real run records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.kernel_cache import kept_loop
from penstock.machine import Machine
from penstock.machine_code import Loop, Signature
from penstock.plan import AccessPlan
from penstock.policy import StagingLimits, decisions
from penstock.policy.decision_state import EVENT, new_state, views_of
from penstock.policy.loading import Job, LoadingPolicy
from penstock.policy.placement import Kept
from penstock.policy.runnable import placement_of
from penstock.simulate import _clock
from penstock.simulate._clock import Clock
from penstock.simulate.policies import policy_of
from penstock.trace import Trace
from penstock.trace.schema import SOURCE, SPAN, Spans

#: Reads that make it worth to compile the clock, which takes half a minute, once on a machine. Uncompiled each takes
#: 0.1 ms, and compiled half a microsecond.
WORTH_COMPILING_READS = 100_000
#: From so many on the clock is loaded, if it was compiled before.
_WORTH_LOADING_READS = 2_000
#: Spans after which the clock returns, for them to be taken; also how often Ctrl-C is noticed.
_LOOSE_SPANS = 1 << 16


#: The module whose part "run" is the compiled clock.
KERNELS = "penstock.simulate._clock_kernels"
#: What `_clock.run` takes when it is compiled: the state and the clock, as tuples.
RUN = Signature(
    (
        EVENT.arguments[0],
        (
            "int64[:]",
            "float64[:]",
            "int32[:]",
            "int64[:, :]",
            "int64[:]",
            "int64[:]",
            "float64[:]",
            "float64[:]",
            "float32[:, :]",
            "float32[:, :]",
            "int64[:, :]",
            "float64[:]",
            "int64[:]",
            "float64[:, :]",
            "int64[:, :]",
        ),
    ),
    ("int64",),
)


@dataclass(frozen=True, slots=True)
class Steps:
    """What some ranks of a job read, step by step of the run.

    ranks: their numbers in the job. strings: int64 array each, its access string.
    bounds: int64[ranks, steps + 1], where a step's samples begin in the strings, one behind the other.
    epochs, steps: int64[steps], of each step of the run its epoch, and its number in the epoch.
    """

    ranks: Sequence[int]
    strings: Sequence[NDArray[np.int64]]
    bounds: NDArray[np.int64]
    epochs: NDArray[np.int64]
    steps: NDArray[np.int64]


def steps_of(
    plan: AccessPlan,
    ranks: Sequence[int],
    strings: Sequence[NDArray[np.int64]],
    first: tuple[int, int] = (0, 0),
) -> Steps:
    """Return what these ranks read in the steps of the plan.

    strings: of each. first: (epoch, step) at which the run begins; the strings are those of the plan nevertheless.
    """
    counts = np.array([plan.steps(epoch) for epoch in range(plan.epochs)], np.int64)
    epochs = np.repeat(np.arange(plan.epochs), counts)
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.empty((len(ranks), steps.size), np.int64)
    begin = 0
    for epoch, count in enumerate(counts.tolist()):
        # A full step and the last one stand for all.
        for row, rank in enumerate(ranks):
            if count:
                sizes[row, begin : begin + count] = plan.local_batch_size(rank, epoch, 0)
                sizes[row, begin + count - 1] = plan.local_batch_size(rank, epoch, count - 1)
        begin += count
    skipped = int(counts[: first[0]].sum()) + first[1]
    strings = [
        string[read:] for string, read in zip(strings, sizes[:, :skipped].sum(axis=1).tolist(), strict=True)
    ]
    epochs, steps, sizes = epochs[skipped:], steps[skipped:], sizes[:, skipped:]
    bounds = np.zeros((len(ranks), steps.size + 1), np.int64)
    np.cumsum(sizes, axis=1, out=bounds[:, 1:])
    bounds[1:] += np.cumsum(bounds[:-1, -1])[:, None]
    return Steps(ranks, strings, bounds, epochs, steps)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run in virtual time amounts to. R ranks.

    step_end_seconds: float64[steps], when the slowest rank has ended each.
    step_stall_seconds, step_busy_seconds: float32[steps, R], waiting for samples, and computing.
    reads: int64[R, 2], consumed samples that came from the store, and from a tier.
    store_bytes: float64[R], read from the store, for tiers too. fill_reads: int64[R], reads for no batch.
    spans: of all ranks, by their ends; empty unless asked for.
    """

    step_end_seconds: NDArray[np.float64]
    step_stall_seconds: NDArray[np.float32]
    step_busy_seconds: NDArray[np.float32]
    reads: NDArray[np.int64]
    store_bytes: NDArray[np.float64]
    fill_reads: NDArray[np.int64]
    spans: Spans


def run_in_virtual_time(
    read: Steps,
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
    kept: Sequence[Kept],
    limits: StagingLimits,
    *,
    step_seconds: NDArray[np.float64] | None = None,
    first_ask_seconds: float = 0.0,
    has_spans: bool = False,
) -> Run:
    """Run the loading of some ranks, which share the store and end each step together.

    sizes_bytes: int64[samples], as stored. kept: what each of the ranks keeps. limits: of each rank.
    step_seconds: float64[steps], of the training for each step; None: machine.compute says, which must be known then.
    first_ask_seconds: how long after the start of prefetching the training asks for its first batch.

    Source: thesis, section 3.1; reads in flight share a place's bandwidth here, as they do in a real store, where
    the thesis gives each thread a full share.
    """
    local_batch = int(np.diff(read.bounds, axis=1).max(initial=0))
    state = new_state(
        sizes_bytes,
        kept,
        machine,
        slots=limits.slots,
        local_batch=local_batch,
        readers=limits.readers,
        undecoded_bytes=limits.undecoded_bytes,
    )
    for rank in range(0, len(kept) * decisions.NUMBERS, decisions.NUMBERS):
        state.ints[rank + decisions.LOADS_ALLOWED] = limits.decoders
        state.ints[rank + decisions.COMES_MORE] = 1
    clock = _new_clock(read, machine, limits, local_batch, step_seconds, first_ask_seconds, has_spans)
    spans = np.empty((0, clock.spans.shape[1]), np.int64)
    loop = _compiled(clock.string.size)
    views = views_of(state), views_of(clock)
    while (loop(tuple(state), tuple(clock)) if loop is not None else _clock.run(*views)) == _clock.FULL:
        _take_spans(clock, spans)
    _take_spans(clock, spans)
    assert clock.ints[_clock.AT_STEP] == read.steps.size - 1, "the simulated run stopped before its end"
    return Run(
        clock.step_end,
        clock.step_stall,
        clock.step_busy,
        clock.reads,
        clock.store_bytes,
        clock.fill_reads,
        spans.view(SPAN).ravel(),
    )


def _compiled(reads: int) -> Loop | None:
    """Return the compiled clock, if it is there or worth it."""
    if reads < _WORTH_LOADING_READS:
        return None
    return kept_loop(KERNELS, "run", RUN, compiles=reads >= WORTH_COMPILING_READS)


def _new_clock(
    read: Steps,
    machine: Machine,
    limits: StagingLimits,
    local_batch: int,
    step_seconds: NDArray[np.float64] | None,
    first_ask_seconds: float,
    has_spans: bool,
) -> Clock:
    c = _clock
    ranks, steps, origins = len(read.ranks), read.steps.size, len(machine.storage) + 1
    workers, group = limits.readers + limits.decoders, max(local_batch, 1)
    actors = 1 + workers + origins
    ranks_at = c.CLOCK_NUMBERS
    actors_at = ranks_at + ranks * c.RANK_COLUMNS
    items_at = actors_at + ranks * actors * c.ACTOR_COLUMNS
    rings_at = items_at + ranks * workers * 3 * group
    heap_at = rings_at + ranks * 2 * limits.slots
    at_once_at = heap_at + ranks * actors
    w = np.zeros(at_once_at + ranks * actors, np.int64)
    # Where bytes cost nothing, a tier in memory, they are decoded where they lie.
    rates = np.zeros((origins, workers + 1))
    store = np.zeros((machine.ranks + 1, workers + 1))
    for reads in range(1, workers + 1):
        for clients in range(1, machine.ranks + 1):
            store[clients, reads] = reads * machine.source_rate(clients, reads)
        for tier in range(1, origins - 1):
            rates[tier + 1, reads] = reads * machine.local_rate(tier, reads)
    rates_at = c.CLOCK_FLOATS
    store_at = rates_at + rates.size
    rank_floats_at = store_at + store.size
    actor_floats_at = rank_floats_at + ranks * c.RANK_FLOAT_COLUMNS
    g = np.zeros(actor_floats_at + ranks * actors * c.ACTOR_FLOAT_COLUMNS)
    g[rates_at:store_at], g[store_at:rank_floats_at] = rates.ravel(), store.ravel()
    g[c.DECODE_BYTE] = machine.write_seconds(1)
    g[c.REQUEST] = machine.source.request_seconds
    g[c.FIRST_ASK] = first_ask_seconds
    if step_seconds is None:
        assert machine.compute is not None, "the caller has seen to it"
        g[c.STEP_SAMPLE], g[c.STEP_BYTE] = machine.compute.seconds(1, 0), machine.compute.seconds(0, 1)

    each = np.arange(ranks)
    mine = w[ranks_at:actors_at].reshape(ranks, c.RANK_COLUMNS)
    all_actors = w[actors_at:items_at].reshape(ranks, actors, c.ACTOR_COLUMNS)
    at = (actors_at + np.arange(ranks * actors) * c.ACTOR_COLUMNS).reshape(ranks, actors)
    mine[:, c.ROW], mine[:, c.NUMBER], mine[:, c.DECIDES] = each, read.ranks, each * decisions.NUMBERS
    mine[:, c.CONSUMER], mine[:, c.WIRES] = at[:, 0], at[:, 1 + workers]
    mine[:, c.IDLE_READER], mine[:, c.IDLE_DECODER] = at[:, 1], at[:, 1 + limits.readers]
    mine[:, c.KEEPS] = -1
    mine[:, c.RING] = limits.slots
    mine[:, c.COMPLETE] = rings_at + each * 2 * limits.slots
    mine[:, c.STEPS] = mine[:, c.COMPLETE] + limits.slots
    w[rings_at:heap_at] = -1
    mine[:, c.RANK_FLOATS] = rank_floats_at + each * c.RANK_FLOAT_COLUMNS
    all_actors[:, :, c.RANK] = (ranks_at + each * c.RANK_COLUMNS)[:, None]
    all_actors[:, :, c.PLACE_IN_HEAP] = c.NOWHERE
    all_actors[:, :, c.ACTOR_FLOATS] = (
        actor_floats_at + np.arange(ranks * actors) * c.ACTOR_FLOAT_COLUMNS
    ).reshape(ranks, actors)
    all_actors[:, 0, c.ROLE], all_actors[:, 0, c.PHASE] = c.A_CONSUMER, c.STARTS
    all_actors[:, 0, c.PLACE_IN_HEAP] = c.GOES_AT_ONCE
    busy = all_actors[:, 1 : 1 + workers]
    busy[:, :, c.ROLE] = c.A_WORKER
    busy[:, :, c.NEXT] = at[:, 2 : 2 + workers]
    busy[:, :, c.ITEMS] = (items_at + np.arange(ranks * workers) * 3 * group).reshape(ranks, workers)
    busy[:, :, c.MOST_ITEMS] = group
    wires = all_actors[:, 1 + workers :]
    wires[:, :, c.ROLE] = c.A_WIRE
    wires[:, :, c.ORIGIN] = np.arange(origins) + SOURCE
    wires[:, :, c.RATES] = rates_at + np.arange(origins) * (workers + 1)
    latency = np.array(
        [machine.source.latency_seconds, 0.0, *(tier.latency_seconds for tier in machine.storage[1:])]
    )
    wires[:, :, c.TAKES_TIME] = [
        1,
        0,
        *(tier.latency_seconds > 0 or tier.backend != "memory" for tier in machine.storage[1:]),
    ]
    g[wires[:, :, c.ACTOR_FLOATS] + c.LATENCY] = latency

    w[c.HEAP], w[c.AT_ONCE_RING], w[c.AT_ONCE_SIZE] = heap_at, at_once_at, ranks * actors
    w[at_once_at : at_once_at + ranks], w[c.AT_ONCE] = at[:, 0], ranks
    w[c.AT_STEP], w[c.RUNNING] = -1, ranks
    w[c.ORIGINS] = origins
    w[c.STORE_RATES], w[c.STORE_COLUMNS] = store_at, workers + 1
    # One rank of many, alone: the others read as much as it does.
    w[c.IS_SHARED], w[c.CLIENTS] = ranks > 1, machine.ranks if ranks == 1 else 0
    # What one event may record.
    margin = origins + limits.slots + 2
    room = _LOOSE_SPANS + margin if has_spans else 0
    w[c.MOST_SPANS] = room - margin if has_spans else 0
    spans = np.zeros((room, SPAN.itemsize // 8), np.int64)
    return Clock(
        ints=w,
        floats=g,
        string=np.concatenate(read.strings).astype(np.int32),
        bounds=read.bounds,
        epoch_of=read.epochs,
        number_of=read.steps,
        step_seconds=np.empty(0) if step_seconds is None else step_seconds,
        step_end=np.zeros(steps),
        step_stall=np.zeros((steps, ranks), np.float32),
        step_busy=np.zeros((steps, ranks), np.float32),
        reads=np.zeros((ranks, 2), np.int64),
        store_bytes=np.zeros(ranks),
        fill_reads=np.zeros(ranks, np.int64),
        span_seconds=spans.view(np.float64),
        spans=spans,
    )


def _take_spans(clock: Clock, spans: NDArray[np.int64]) -> None:
    """Move what the clock has recorded to the end of an array, which grows in place: a copy would double the memory."""
    count, known = int(clock.ints[_clock.SPANS]), len(spans)
    clock.ints[_clock.SPANS] = 0
    spans.resize((known + count, spans.shape[1]), refcheck=False)
    spans[known:] = clock.spans[:count]


def predict(
    plan: AccessPlan,
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
    *,
    limits: StagingLimits,
    policy: str | LoadingPolicy = "frequency",
    seed: int = 0,
    rank: int = 0,
    first: tuple[int, int] = (0, 0),
    step_seconds: float | Sequence[float] | None = None,
    first_ask_seconds: float = 0.0,
) -> Trace:
    """Run one rank's loading in virtual time and return its trace.

    machine: what a read, a decode and a tier cost here; its storage classes after the first are the tiers.
    sizes_bytes: int64[samples], as stored.
    limits: slots, readers and decode workers of the real run.
    policy: what the tiers keep, as the loader's `policy`; what it draws follows from `seed`.
    first: (epoch, step) at which the run begins, as for the loader's `start`.
    step_seconds: of the training for each batch, or for the rank's batches from the first on, one after the other; by
        default machine.compute says.
    first_ask_seconds: how long after the start of prefetching the training asks for its first batch.

    Raises: ConfigError where neither step_seconds nor machine.compute is known, or a list of them has another length
        than the run, or the plan has no such step; what `placement_of` raises for a policy.
    """
    chosen = policy_of(policy)
    placement = placement_of(chosen, Job(plan, sizes_bytes, machine, seed, rank), rank)
    if step_seconds is None and machine.compute is None:
        raise ConfigError(
            "step_seconds is not given and machine.compute is unknown: say how long the training takes for a batch"
        )
    first = plan.first_of_run(rank, *first)
    read = steps_of(plan, [rank], [plan.string(rank)], first)
    has_batch = np.diff(read.bounds[0]) > 0
    each: NDArray[np.float64] | None = None
    if step_seconds is not None:
        given = np.asarray(step_seconds)
        if given.dtype.kind not in "iuf" or given.ndim > 1 or not ((given >= 0) & (given < np.inf)).all():
            raise ConfigError(
                f"step_seconds is {step_seconds!r:.80}; give seconds of zero or more: one number, or one for each batch"
            )
        if given.ndim and given.size != (steps := np.count_nonzero(has_batch)):
            raise ConfigError(
                f"step_seconds lists {given.size} steps and rank {rank} runs {steps}: give one time for each"
            )
        each = np.zeros(has_batch.size)
        each[has_batch] = given
    run = run_in_virtual_time(
        read,
        machine,
        sizes_bytes,
        [placement.kept],
        limits,
        step_seconds=each,
        first_ask_seconds=first_ask_seconds,
        has_spans=True,
    )
    return Trace(
        run.spans, {"time": "virtual", "rank": rank, "policy": chosen.name, "first_step": list(first)}
    )
