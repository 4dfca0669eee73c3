"""Loading runs in virtual time: the scheduler that the threads obey, driven over the machine's curves.

Nothing is decided here. The machine says how long a read, a decode or a step takes, `_clock` keeps the time of all
ranks, and the trace that comes out has the spans that a real run records. Each step has a slot to itself: what shares
one in a real run is eight milliseconds' work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.kernel_cache import kept_loop
from penstock.machine import Machine
from penstock.machine_code import Loop, Signature
from penstock.plan import AccessPlan
from penstock.plan.frequency import last_batches
from penstock.policy import AllExtents, StagingLimits, decisions
from penstock.policy.decision_state import EVENT, keep_in_form, new_state, parts_of, views_of
from penstock.policy.decisions import State
from penstock.policy.forms import CropForm
from penstock.policy.loading import Job, LoadingPolicy
from penstock.policy.placement import Kept
from penstock.policy.runnable import placement_of, shared_by
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
#: What reading a byte of a kept sample from a disk takes of a processor, where that is shared: it is copied from the
#: page cache. Measured: run after run beside one that has all in memory, 50 us for pictures of 617 KB, 12 us for crops
#: of 150 KB.
_READ_BYTE_SECONDS = 1 / 12e9
#: And writing a sample, and each of its bytes: it is copied to wait, and to the page cache, and a checksum is made.
#: Measured: processor time of a `WriteBehind`: 93 us for 104 KB, 120 for 150, 280 for 620, and more beside decoding.
_WRITE_SECONDS, _WRITE_BYTE_SECONDS = 0.1e-3, 1 / 2.5e9
#: And copying a sample to memory that is written for the first time, and each of its bytes. Measured: processor time of
#: `MemoryTier.put`: 21 us for 4 KB, 64 for 104, 268 for 600; to memory that was written before 19, 23 and 49.
_KEEP_SECONDS, _KEEP_BYTE_SECONDS = 20e-6, 1 / 2.4e9
#: Spans after which the clock returns, for them to be taken; also how often Ctrl-C is noticed.
_LOOSE_SPANS = 1 << 16
#: Of a byte on a wire: less is none.
_LEAST_SECONDS = 1e-15


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
            "int8[:]",
            "int32[:]",
            "int8[:]",
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
    for row, rank in enumerate(ranks):
        of_epochs = [plan.local_batch_sizes(rank, epoch) for epoch in range(plan.epochs)]
        np.concatenate(of_epochs, out=sizes[row])
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
class Agreed:
    """What a policy tells the schedulers of a job's R ranks, each with T tiers.

    kept: of each rank what it keeps, in the order in which it fills its tiers.
    due: of each rank what it keeps besides, and is handed by whoever reads it first; empty where nothing is.
    before: int64[rounds, R, T], how many more samples of each tier are filled in each round before the training.
    reads_peers: see `decisions.READS_PEERS`.
    maps_peers: where they read each other's tiers, these are memory that they map, and cross no network.
    stages: AHEAD, STORE_ON_DEMAND or ON_DEMAND of `_clock`.
    hits: int8[accesses], where samples have no home: the tier in which each read finds its own, or SOURCE. Else empty.
    heirs: int32[accesses], as `Clock.heirs`. copied: int8[samples], as `Clock.copied`.
    spares, last_batches, promised, reads_for_others, held: see `new_state`; held by row of the ranks.
    """

    kept: Sequence[Kept]
    due: Sequence[Kept] = ()
    before: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0, 0), np.int64))
    reads_peers: int = 0
    maps_peers: bool = False
    stages: int = _clock.AHEAD
    hits: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    heirs: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    copied: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    spares: Sequence[NDArray[np.int64]] = ()
    last_batches: Sequence[NDArray[np.int32]] = ()
    promised: NDArray[np.int64] | None = None
    reads_for_others: bool = False
    held: Mapping[int, Mapping[int, NDArray[np.int64]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run in virtual time amounts to. R ranks.

    begin_seconds: when the training began, after what is loaded before it.
    step_end_seconds: float64[steps], when the slowest rank has ended each.
    step_stall_seconds, step_busy_seconds: float32[steps, R], waiting for samples, and computing.
    reads: int64[R, 3], consumed samples that came from the store, from a tier, and from a tier of another rank.
    store_bytes: float64[R], read from the store, for tiers too. fill_reads: int64[R], reads for no batch.
    spans: of all ranks, by their ends; empty unless asked for.
    """

    begin_seconds: float
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
    agreed: Agreed,
    limits: StagingLimits,
    *,
    extents: AllExtents | None = None,
    step_seconds: NDArray[np.float64] | None = None,
    first_ask_seconds: float = 0.0,
    has_spans: bool = False,
    form: CropForm | None = None,
) -> Run:
    """Run the loading of some ranks, which share the store and end each step together.

    read: of all ranks of the job, where they read each other's tiers.
    sizes_bytes: int64[samples], as stored. limits: of each rank.
    extents: of all samples, where the source gives them: those near each other are one read.
    step_seconds: float64[steps], of the training for each step; None: machine.compute says, which must be known then.
    first_ask_seconds: how long after the start of prefetching the training asks for its first batch.
    form: in which tiers keep samples, if not as they are stored.

    Source: thesis, section 3.1; reads in flight share a place's bandwidth here, as they do in a real store, where
    the thesis gives each thread a full share.
    """
    if agreed.maps_peers:
        machine = replace(machine, network_bytes_per_second=np.inf)
    state = _state_before(read, machine, sizes_bytes, agreed, limits, extents)
    numbers, _ = parts_of(state, machine)
    numbers[:, decisions.LOADS_ALLOWED] = limits.decoders
    if agreed.stages == _clock.STORE_ON_DEMAND:
        numbers[:, decisions.STAGES_UNTIL] = -1
    group = int(numbers[0, decisions.GROUP_SIZE])
    clock = _new_clock(read, machine, limits, agreed, group, step_seconds, has_spans, form)
    if form is not None:
        _keep_in_form(state, clock, machine, form, maps_peers=agreed.maps_peers)
    spans = np.empty((0, clock.spans.shape[1]), np.int64)
    loop = _compiled(clock.string.size + int(agreed.before.sum()))
    views = views_of(state), views_of(clock)

    def go_on() -> None:
        while (loop(tuple(state), tuple(clock)) if loop is not None else _clock.run(*views)) == _clock.FULL:
            _take_spans(clock, spans)
        _take_spans(clock, spans)

    if agreed.before.size:
        _load_before(state, clock, machine, agreed.before, go_on)
    begin_seconds = float(clock.floats[_clock.NOW])
    clock.floats[_clock.FIRST_ASK] = begin_seconds + first_ask_seconds
    numbers[:, decisions.COMES_MORE] = 1
    _let_consumers(clock, _clock.STARTS)
    go_on()
    is_over = clock.ints[_clock.AT_STEP] == read.steps.size - 1 and clock.ints[_clock.RUNNING] == 0
    assert is_over, "the simulated run stopped before its end"
    return Run(
        begin_seconds,
        clock.step_end,
        clock.step_stall,
        clock.step_busy,
        clock.reads,
        clock.store_bytes,
        clock.fill_reads,
        spans.view(SPAN).ravel(),
    )


def _state_before(
    read: Steps,
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
    agreed: Agreed,
    limits: StagingLimits,
    extents: AllExtents | None,
) -> State:
    """Return what the decisions of all ranks begin with; see `run_in_virtual_time`."""
    return new_state(
        sizes_bytes,
        agreed.kept,
        machine,
        slots=limits.slots,
        local_batch=int(np.diff(read.bounds, axis=1).max(initial=0)),
        readers=limits.readers,
        undecoded_bytes=limits.undecoded_bytes,
        own_bytes=limits.own_bytes,
        least_load_seconds=limits.least_load_seconds,
        due=agreed.due,
        reads_peers=agreed.reads_peers,
        maps_peers=agreed.maps_peers,
        hands_on=agreed.hits.size > 0,
        spares=agreed.spares,
        last_batches=agreed.last_batches,
        promised=agreed.promised,
        reads_for_others=agreed.reads_for_others,
        extents=extents,
        held=agreed.held,
    )


def _keep_in_form(state: State, clock: Clock, machine: Machine, form: CropForm, *, maps_peers: bool) -> None:
    """Have tiers keep samples in a form, which a worker finishes at the rate at which it writes a batch."""
    keep_in_form(state, machine, form, maps_peers=maps_peers)
    clock.ints[_clock.CROP_BYTES] = form.crop_bytes
    clock.ints[_clock.EPOCHS] = clock.epoch_of[-1] + 1
    if not form.is_decoded:
        clock.floats[_clock.CROP_BYTE] = 1 / machine.staging_rate()
        clock.floats[_clock.CROP_ALONE] = 1 / machine.write_rate(0, 1)
    clock.floats[_clock.LEFT_SHARE], clock.floats[_clock.LEFT_OF_DISK] = form.left_share, form.left_of_disk
    if machine.processors < np.inf:
        clock.floats[_clock.DISK_READ] = form.crop_bytes * _READ_BYTE_SECONDS / machine.write_seconds(1)
    clock.floats[_clock.MORE_CROPS] = form.more_share


def _load_before(
    state: State, clock: Clock, machine: Machine, before: NDArray[np.int64], go_on: Callable[[], None]
) -> None:
    """Let time run until all tiers have what they are to have before the training, on all readers, round by round."""
    numbers, rows = parts_of(state, machine)
    ends = rows[:, :, decisions.FILL_END].copy()
    limit = numbers[:, decisions.FILL_LIMIT].copy()
    numbers[:, decisions.FILL_LIMIT] = numbers[:, decisions.READERS]
    # Afterwards nobody may have to read the source.
    numbers[:, decisions.PROBES_LEFT] = 0
    for more in before:
        rows[:, :, decisions.FILL_END] = rows[:, :, decisions.FILL_NEXT] + more
        _let_consumers(clock, _clock.PREPARES)
        go_on()
    rows[:, :, decisions.FILL_END] = ends
    numbers[:, decisions.FILL_LIMIT] = limit


def _let_consumers(clock: Clock, phase: int) -> None:
    """Let the consumers of all ranks continue now, with a phase."""
    c, w = _clock, clock.ints
    for row in range(clock.bounds.shape[0]):
        consumer = w[c.CLOCK_NUMBERS + row * c.RANK_COLUMNS + c.CONSUMER]
        w[consumer + c.PHASE] = phase
        c.let_go_on(w, consumer)


def _compiled(reads: int) -> Loop | None:
    """Return the compiled clock, if it is there or worth it."""
    if reads < _WORTH_LOADING_READS:
        return None
    return kept_loop(KERNELS, "run", RUN, compiles=reads >= WORTH_COMPILING_READS)


def _new_clock(
    read: Steps,
    machine: Machine,
    limits: StagingLimits,
    agreed: Agreed,
    group: int,
    step_seconds: NDArray[np.float64] | None,
    has_spans: bool,
    form: CropForm | None,
) -> Clock:
    c = _clock
    ranks, steps, origins = len(read.ranks), read.steps.size, len(machine.storage) + 1
    workers = limits.readers + limits.decoders
    writers = [0 if tier.is_memory else tier.writing_threads for tier in machine.storage[1:]]
    actors = 1 + workers + origins + 1 + sum(writers)
    ranks_at = c.CLOCK_NUMBERS
    actors_at = ranks_at + ranks * c.RANK_COLUMNS
    items_at = actors_at + ranks * actors * c.ACTOR_COLUMNS
    rings_at = items_at + ranks * workers * 5 * group
    heap_at = rings_at + ranks * 2 * limits.slots
    at_once_at = heap_at + ranks * actors
    w = np.zeros(at_once_at + ranks * actors, np.int64)
    # Those of other ranks may read a tier, too.
    most = (ranks * workers if agreed.reads_peers else workers) + max(writers, default=0)
    rates, store = _rates(machine, most, workers, form)
    rates_at = c.CLOCK_FLOATS
    store_at = rates_at + rates.size
    rank_floats_at = store_at + store.size
    actor_floats_at = rank_floats_at + ranks * c.RANK_FLOAT_COLUMNS
    g = np.zeros(actor_floats_at + ranks * actors * c.ACTOR_FLOAT_COLUMNS)
    g[rates_at:store_at], g[store_at:rank_floats_at] = rates.ravel(), store.ravel()
    _set_costs(g, machine, step_seconds)
    w[rings_at:heap_at] = -1
    begins = _Begins(ranks_at, actors_at, items_at, rings_at, rates_at, rank_floats_at, actor_floats_at)
    _set_ranks(w, begins, read.ranks, limits, actors)
    wires = _set_actors(w, begins, limits, group, writers, most)
    _set_wires(wires, g, machine, rates)

    w[c.HEAP], w[c.AT_ONCE_RING], w[c.AT_ONCE_SIZE] = heap_at, at_once_at, ranks * actors
    w[c.AT_STEP], w[c.RUNNING] = -1, ranks
    w[c.ORIGINS], w[c.STAGES] = origins, agreed.stages
    w[c.PROMISES] = agreed.promised is not None
    # Where others wait for what a rank keeps, it is written by whoever brings it if there is no space to wait.
    w[c.MOST_UNWRITTEN] = decisions.ANY_NUMBER if agreed.reads_peers else limits.unwritten_bytes
    w[c.STORE_RATES], w[c.STORE_COLUMNS] = store_at, workers + 1
    # One rank of many, alone: the others read as much as it does.
    w[c.IS_SHARED], w[c.CLIENTS] = ranks > 1, machine.ranks if ranks == 1 else 0
    # What one event may record, also for ranks that have waited for it.
    margin = (origins + limits.slots + 2) * (1 if agreed.promised is None else ranks)
    space = _LOOSE_SPANS + margin if has_spans else 0
    w[c.MOST_SPANS] = space - margin if has_spans else 0
    spans = np.zeros((space, SPAN.itemsize // 8), np.int64)
    return Clock(
        ints=w,
        floats=g,
        string=np.concatenate(read.strings).astype(np.int32),
        bounds=read.bounds,
        hits=agreed.hits,
        heirs=agreed.heirs,
        copied=agreed.copied,
        epoch_of=read.epochs,
        number_of=read.steps,
        step_seconds=np.empty(0) if step_seconds is None else step_seconds,
        step_end=np.zeros(steps),
        step_stall=np.zeros((steps, ranks), np.float32),
        step_busy=np.zeros((steps, ranks), np.float32),
        reads=np.zeros((ranks, 3), np.int64),
        store_bytes=np.zeros(ranks),
        fill_reads=np.zeros(ranks, np.int64),
        span_seconds=spans.view(np.float64),
        spans=spans,
    )


def _set_costs(
    floats: NDArray[np.float64], machine: Machine, step_seconds: NDArray[np.float64] | None
) -> None:
    """Write what decoding takes, a request to the store and, unless it was given, a step."""
    c = _clock
    floats[c.DECODE_BYTE], floats[c.REQUEST] = machine.write_seconds(1), machine.source.request_seconds
    floats[c.PROCESSORS] = machine.processors
    floats[c.LOAD_COST] = _processor_seconds(machine, decisions.LOAD_COST_SECONDS)
    floats[c.BATCH_COST] = _processor_seconds(machine, decisions.BATCH_COST_SECONDS)
    floats[c.KEEP_COST] = _processor_seconds(machine, _KEEP_SECONDS)
    floats[c.KEEP_BYTE_COST] = _processor_seconds(machine, _KEEP_BYTE_SECONDS)
    floats[c.WRITE_COST] = _processor_seconds(machine, _WRITE_SECONDS)
    floats[c.WRITE_BYTE_COST] = _processor_seconds(machine, _WRITE_BYTE_SECONDS)
    if step_seconds is None:
        assert machine.compute is not None, "the caller has seen to it"
        floats[c.STEP_SAMPLE], floats[c.STEP_BYTE] = (
            machine.compute.seconds(1, 0),
            machine.compute.seconds(0, 1),
        )


class _Begins(NamedTuple):
    """Where parts of a clock's numbers begin, and of its floats."""

    ranks: int
    actors: int
    items: int
    rings: int
    rates: int
    rank_floats: int
    actor_floats: int


def _set_ranks(
    w: NDArray[np.int64], at: _Begins, numbers: Sequence[int], limits: StagingLimits, actors: int
) -> None:
    """Write what the clock knows of each rank. numbers: of the ranks in the job. actors: of each rank."""
    c, ranks = _clock, len(numbers)
    each = np.arange(ranks)
    mine = w[at.ranks : at.actors].reshape(ranks, c.RANK_COLUMNS)
    first = at.actors + each * actors * c.ACTOR_COLUMNS
    mine[:, c.ROW], mine[:, c.NUMBER], mine[:, c.DECIDES] = each, numbers, each * decisions.NUMBERS
    mine[:, c.CONSUMER] = first
    mine[:, c.WIRES] = first + (1 + limits.readers + limits.decoders) * c.ACTOR_COLUMNS
    mine[:, c.IDLE_READER] = first + c.ACTOR_COLUMNS
    mine[:, c.IDLE_DECODER] = first + (1 + limits.readers) * c.ACTOR_COLUMNS
    mine[:, c.KEEPS] = -1
    mine[:, c.RING] = limits.slots
    mine[:, c.COMPLETE] = at.rings + each * 2 * limits.slots
    mine[:, c.STEPS] = mine[:, c.COMPLETE] + limits.slots
    mine[:, c.RANK_FLOATS] = at.rank_floats + each * c.RANK_FLOAT_COLUMNS


def _set_actors(
    w: NDArray[np.int64], at: _Begins, limits: StagingLimits, group: int, writers: Sequence[int], most: int
) -> NDArray[np.int64]:
    """Write the consumer, workers, wires and writers of each rank; return the wires, int64[ranks, origins, columns].

    group: the most samples of a worker's. writers: of each tier. most: actors that may share a wire.
    """
    c, workers, origins = _clock, limits.readers + limits.decoders, len(writers) + 2
    first_wire, first_writer = 1 + workers, 1 + workers + origins + 1
    actors = first_writer + sum(writers)
    every = w[at.actors : at.items].reshape(-1, actors, c.ACTOR_COLUMNS)
    ranks = len(every)
    begins = (at.actors + np.arange(ranks * actors) * c.ACTOR_COLUMNS).reshape(ranks, actors)
    every[:, :, c.RANK] = (at.ranks + np.arange(ranks) * c.RANK_COLUMNS)[:, None]
    every[:, :, c.PLACE_IN_HEAP] = c.NOWHERE
    floats = at.actor_floats + np.arange(ranks * actors) * c.ACTOR_FLOAT_COLUMNS
    every[:, :, c.ACTOR_FLOATS] = floats.reshape(ranks, actors)
    every[:, 0, c.ROLE] = c.A_CONSUMER
    busy = every[:, 1 : 1 + workers]
    busy[:, :, c.ROLE] = c.A_WORKER
    busy[:, :, c.NEXT] = begins[:, 2 : 2 + workers]
    busy[:, :, c.ITEMS] = (at.items + np.arange(ranks * workers) * 5 * group).reshape(ranks, workers)
    busy[:, :, c.MOST_ITEMS] = group
    every[:, first_writer - 1, c.ROLE] = c.ALL_PROCESSORS
    wires = every[:, first_wire : first_wire + origins]
    for wire, count in enumerate(writers, start=first_wire + 2):
        own = slice(first_writer, first_writer + count)
        every[:, own, c.ROLE], every[:, own, c.WRITES_TO] = c.A_WRITER, begins[:, wire, None]
        every[:, wire, c.IS_WRITTEN], every[:, wire, c.IDLE_WRITER] = count > 0, -1
        for writer in range(first_writer, first_writer + count):
            every[:, writer, c.NEXT], every[:, wire, c.IDLE_WRITER] = (
                every[:, wire, c.IDLE_WRITER],
                begins[:, writer],
            )
        first_writer += count
    wires[:, :, c.ROLE] = c.A_WIRE
    wires[:, :, c.ORIGIN] = np.arange(origins) + SOURCE
    wires[:, :, c.RATES] = at.rates + np.arange(origins) * (most + 1)
    return wires


def _rates(
    machine: Machine, most: int, workers: int, form: CropForm | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes a second by reads at once: of each origin, [origins, most + 1], and of the store by clients as well.

    Of the network every number of reads gets all, as each rank has a link of its own; beyond the points of its curve a
    tier gives no more.
    form: in which tiers keep samples. What workers compute to read these is no time of the wire.
    """
    rates = np.zeros((len(machine.storage) + 1, most + 1))
    rates[1] = machine.network_bytes_per_second
    for tier in range(1, len(machine.storage)):
        copying = _READ_BYTE_SECONDS if form is not None and form.is_in(tier) else 0.0
        for reads in range(1, most + 1):
            rates[tier + 1, reads] = _without_copying(
                machine, reads * machine.local_rate(tier, reads), reads, copying
            )
    store = np.zeros((machine.ranks + 1, workers + 1))
    for reads in range(1, workers + 1):
        for clients in range(1, machine.ranks + 1):
            store[clients, reads] = reads * machine.source_rate(clients, reads)
    return rates, store


def _processor_seconds(machine: Machine, seconds: float) -> float:
    """Return so many seconds of a processor, none where it is not known how many are shared."""
    return seconds if machine.processors < np.inf else 0.0


def _without_copying(machine: Machine, rate: float, users: int, byte_seconds: float) -> float:
    """Return what a disk gives so many users together that were seen to get `rate`, with what they compute for it.

    byte_seconds: that a byte takes of a processor. Several wait for the disk while others compute: it has no more.
    """
    byte_seconds = _processor_seconds(machine, byte_seconds)
    waiting = min(users, machine.processors) / rate - byte_seconds if byte_seconds else math.inf
    return 1 / max(min(1 / rate, waiting), _LEAST_SECONDS)


def _set_wires(
    wires: NDArray[np.int64], floats: NDArray[np.float64], machine: Machine, rates: NDArray[np.float64]
) -> None:
    """Say of each rank's ways to the origins how long a read waits there, and what a byte takes to write.

    Where bytes cost nothing, a tier in memory, they are decoded where they lie. rates: as of `_rates`.
    """
    c = _clock
    tiers = machine.storage[1:]
    takes_time = [tier.latency_seconds > 0 or not tier.is_memory for tier in tiers]
    wires[:, :, c.TAKES_TIME] = [1, machine.network_bytes_per_second < np.inf, *takes_time]
    latencies = [machine.source.latency_seconds, 0.0, *(tier.latency_seconds for tier in tiers)]
    floats[wires[:, :, c.ACTOR_FLOATS] + c.LATENCY] = latencies
    for number, tier in enumerate(tiers, start=1):
        if not tier.is_memory:
            users = tier.writing_threads
            rate = _without_copying(
                machine, users * machine.write_rate(number, users), users, _WRITE_BYTE_SECONDS
            )
            floats[wires[:, number + 1, c.ACTOR_FLOATS] + c.WRITE_BYTE] = rates[number + 1, users] / rate


def _take_spans(clock: Clock, spans: NDArray[np.int64]) -> None:
    """Move what the clock has recorded to the end of an array, which grows in place: a copy would double the memory."""
    count, known = int(clock.ints[_clock.SPANS]), len(spans)
    clock.ints[_clock.SPANS] = 0
    spans.resize((known + count, spans.shape[1]), refcheck=False)
    spans[known:] = clock.spans[:count]


def predict(
    job: Job,
    *,
    limits: StagingLimits,
    policy: str | LoadingPolicy = "frequency",
    extents: AllExtents | None = None,
    step_seconds: float | Sequence[float] | None = None,
    first_ask_seconds: float = 0.0,
    maps_peers: bool = True,
    held: Mapping[int, NDArray[np.int64]] | None = None,
    copied: Mapping[int, NDArray[np.bool_]] | None = None,
) -> Trace:
    """Run one rank's loading in virtual time and return its trace.

    job: its rank is the one that is run; None: rank 0. Where a form says that crops are kept, one is finished at the
        rate of memory, and each further crop that is made at a decoding makes it longer by CROP_SHARE. Ranks that share
        read each other's memory, and all of them are run.
    limits: slots, readers and decode workers of the real run.
    policy: what the tiers keep, as the loader's `policy`.
    extents: of all samples, where the source gives them: those near each other are one read.
    step_seconds: of the training for each batch, or for the rank's batches from the first on, one after the other; by
        default machine.compute says.
    first_ask_seconds: how long after the start of prefetching the training asks for its first batch.
    maps_peers: ranks that share map each other's memory; else it crosses the network.
    held: by tier, int64[n], samples that it has from an earlier run; where ranks share, the job says what all have.
    copied: by disk, bool[samples], of what memory keeps, what is written there, too.

    Raises: ConfigError where neither step_seconds nor machine.compute is known, or a list of them has another length
        than the run, or the plan has no such step, or the only slot is for several batches; what `placement_of` raises
        for a policy.
    """
    if not isinstance(limits, StagingLimits):
        raise ConfigError(f"limits is a {type(limits).__name__}; it is a penstock.policy.StagingLimits")
    chosen, plan, machine, rank = policy_of(policy), job.plan, job.machine, job.rank or 0
    ranks = [rank] if job.sharing is None else list(job.sharing)
    if step_seconds is None and machine.compute is None:
        raise ConfigError(
            "step_seconds is not given and machine.compute is unknown: say how long the training takes for a batch"
        )
    first = plan.first_of_run(rank, *job.first)
    about: dict[str, Any] = {
        "time": "virtual",
        "rank": rank,
        "policy": chosen.name,
        "first_step": list(first),
        **({} if job.form is None else {"keep": asdict(job.form)}),
    }
    if first[0] == plan.epochs:  # the end
        return Trace(np.empty(0, SPAN), about)
    read = steps_of(plan, ranks, [plan.string(each) for each in ranks], first)
    agreed = _agreed_by(chosen, job, rank, read, maps_peers=maps_peers)
    agreed = replace(agreed, held=agreed.held or {0: held or {}}, copied=_copied_to(copied or {}))
    has_batch = np.diff(read.bounds[ranks.index(rank)]) > 0
    if limits.slots == 1 and np.count_nonzero(has_batch) > 1:
        raise ConfigError(
            "limits.slots is 1: the training holds one batch while the next is staged; give a run of several batches 2"
        )
    run = run_in_virtual_time(
        read,
        machine,
        job.sizes_bytes,
        agreed,
        limits,
        extents=extents,
        step_seconds=None if step_seconds is None else _each_step(step_seconds, has_batch, rank),
        first_ask_seconds=first_ask_seconds,
        has_spans=True,
        form=job.form,
    )
    spans = run.spans
    if job.sharing is not None:
        spans = spans[spans["rank"] == rank]
        spans["peer"] = np.where(spans["peer"] < 0, spans["peer"], np.array(ranks)[spans["peer"]])
    return Trace(spans, about)


def _agreed_by(policy: LoadingPolicy, job: Job, rank: int, read: Steps, *, maps_peers: bool) -> Agreed:
    """Return what a rank keeps, or what all that share do. read: of these.

    Raises: what `placement_of` and `shared_by` raise.
    """
    if job.sharing is None:
        placement = placement_of(policy, job, rank)
        if placement.spares is None:
            return Agreed([placement.kept])
        samples = np.concatenate([placement.fill_order, placement.spares])
        last = last_batches(read.strings[0], np.diff(read.bounds[0]), samples)
        return Agreed([placement.kept], spares=[placement.spares], last_batches=[last])
    shared = shared_by(policy, job)
    kept = [shared.kept[each] for each in job.sharing]
    disks = [number for number, tier in enumerate(job.machine.storage) if number and not tier.is_memory]
    held = {
        row: kept[row].held_by_tier(job.held[each], disks[0])
        for row, each in enumerate(job.sharing)
        if job.held and each in job.held and disks
    }
    return Agreed(
        kept,
        reads_peers=decisions.RATHER,
        maps_peers=maps_peers,
        promised=shared.promised,
        reads_for_others=shared.reads_for_others,
        held=held,
    )


def _copied_to(copied: Mapping[int, NDArray[np.bool_]]) -> NDArray[np.int8]:
    """Return what `Clock.copied` has."""
    found = np.zeros(max((each.size for each in copied.values()), default=0), np.int8)
    for tier, is_copied in copied.items():
        found[is_copied] = tier
    return found


def _each_step(
    step_seconds: float | Sequence[float], has_batch: NDArray[np.bool_], rank: int
) -> NDArray[np.float64]:
    """Return the training's time for each step, 0 for those in which the rank has no batch. Raises: ConfigError."""
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
    return each
