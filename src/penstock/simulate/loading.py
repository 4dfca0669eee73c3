"""A loading run in virtual time: the scheduler that the threads obey, driven over the machine's curves.

Nothing is decided here. The machine says how long a read, a decode or a step takes, a heap of events keeps the time,
and the trace that comes out has the spans that a real run records.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import (
    FetchCosts,
    Instruction,
    Load,
    Placement,
    Read,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
)
from penstock.policy.loading import Job, LoadingPolicy
from penstock.policy.runnable import placement_of
from penstock.policy.scheduler import Item
from penstock.simulate.policies import policy_of
from penstock.trace import Trace
from penstock.trace.schema import NO_FLOW, NO_PEER, NO_PLACE, SOURCE, SPAN, STAGING, Kind, Spans

_READER, _DECODER = 2, 3

#: Spans that are kept as tuples, which take four times the bytes of their record.
_LOOSE_SPANS = 1 << 16

Event = Callable[[float], None]


class _Clock:
    """Virtual time: a heap of what happens when."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0

    def at(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (seconds, self._count, event))
        self._count += 1

    def run(self) -> None:
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)


class _SimulatedStore:
    """A store whose reads each wait out a latency in parallel and then share a bandwidth.

    The bytes under way flow at the rate that so many reads get together, those of the read that came first before
    the others. Dividing the rate equally instead would keep equal reads in step for ever: they would all end at
    once, and the wire would lie idle during their successors' latency, which no real store does.
    """

    def __init__(self, clock: _Clock, latency_seconds: float, rate_of_all: Callable[[int], float]) -> None:
        self._clock = clock
        self._latency_seconds = latency_seconds
        self._rate_of_all = rate_of_all
        self._waiting: deque[tuple[float, Event]] = deque()
        #: Bytes of the first in `_waiting` that are still to come, as of `_as_of`.
        self._rest_bytes = 0.0
        self._as_of = 0.0
        self._version = 0

    def read(self, now: float, nbytes: int, done: Event) -> None:
        self._clock.at(now + self._latency_seconds, lambda begin: self._join(begin, nbytes, done))

    def _join(self, now: float, nbytes: int, done: Event) -> None:
        self._advance(now)
        if not self._waiting:
            self._rest_bytes = nbytes
        self._waiting.append((nbytes, done))
        self._expect(now)

    def _advance(self, now: float) -> None:
        if self._waiting:
            self._rest_bytes -= self._rate_of_all(len(self._waiting)) * (now - self._as_of)
        self._as_of = now

    def _expect(self, now: float) -> None:
        """Set the alarm for the end of the first read; earlier alarms are void."""
        self._version += 1
        if not self._waiting:
            return
        version = self._version
        seconds = max(0.0, self._rest_bytes) / self._rate_of_all(len(self._waiting))
        self._clock.at(now + seconds, lambda end: self._end_first(end, version))

    def _end_first(self, now: float, version: int) -> None:
        if version != self._version:
            return
        _, done = self._waiting.popleft()
        if self._waiting:
            self._rest_bytes = self._waiting[0][0]
        self._as_of = now
        self._expect(now)
        done(now)


class _Run:
    """One rank's run: consumer, workers and store around a scheduler."""

    def __init__(
        self,
        plan: AccessPlan,
        rank: int,
        machine: Machine,
        sizes_bytes: NDArray[np.int64],
        placement: Placement,
        limits: StagingLimits,
        step_seconds: Callable[[NDArray[np.int64]], float],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._machine = machine
        self._sizes = sizes_bytes
        self._limits = limits
        self._step_seconds = step_seconds
        # Virtual threads share neither processors nor a lock: any more of them would only be faster.
        limits = replace(limits, most_decoders=0)
        self._scheduler = Scheduler(plan, rank, sizes_bytes, placement, FetchCosts(machine), limits)
        self._clock = _Clock()
        self._source = _SimulatedStore(
            self._clock,
            machine.source.latency_seconds,
            lambda reads: reads * machine.source_rate(machine.ranks, reads),
        )
        self._spans: list[tuple[float, float, int, int, int, int, int, int, int, int, int, int, int]] = []
        self._packed: list[Spans] = []
        self._whole: dict[tuple[int, int], Ready] = {}
        self._asked: tuple[int, int, float] | None = None
        self._slot_in_use: int | None = None
        self._steps = (
            (epoch, step)
            for epoch in range(plan.epochs)
            for step in range(plan.steps(epoch))
            if plan.local_batch_size(rank, epoch, step)
        )

    def spans(self, first_ask_seconds: float) -> Spans:
        self._clock.at(0.0, lambda now: self._obey(self._scheduler.start(now), now))
        self._clock.at(first_ask_seconds, self._ask)
        self._clock.run()
        assert self._asked is None, f"the simulated run stopped before batch {self._asked}"
        self._pack()
        spans = np.concatenate(self._packed)
        return spans[np.argsort(spans["end"], kind="stable")]

    def _record(
        self,
        kind: Kind,
        start: float,
        end: float,
        epoch: int,
        step: int,
        sample: int = -1,
        nbytes: int = 0,
        place: int = NO_PLACE,
        worker: int = _DECODER,
        samples: int = 1,
    ) -> None:
        self._spans.append(
            (
                start,
                end,
                sample,
                nbytes,
                NO_FLOW,
                epoch,
                step,
                samples,
                NO_PEER,
                kind,
                place,
                worker,
                self._rank,
            )
        )
        if len(self._spans) >= _LOOSE_SPANS:
            self._pack()

    def _pack(self) -> None:
        self._packed.append(np.array(self._spans, SPAN))
        self._spans.clear()

    # The consumer

    def _ask(self, now: float) -> None:
        position = next(self._steps, None)
        if position is not None:
            self._asked = (*position, now)
            self._deliver(now)

    def _deliver(self, now: float) -> None:
        if self._asked is None or self._asked[:2] not in self._whole:
            return
        epoch, step, since = self._asked
        ready = self._whole.pop((epoch, step))
        self._asked = None
        self._record(Kind.WAIT, since, now, epoch, step, samples=ready.samples.size)
        # The training's name for the last batch is bound anew only now: until here it kept that slot.
        freed, self._slot_in_use = self._slot_in_use, ready.slot
        end = now + self._step_seconds(ready.samples)
        self._record(Kind.STEP, now, end, epoch, step, samples=ready.samples.size)
        self._clock.at(end, self._ask)
        if freed is not None:
            self._obey(self._scheduler.slot_freed(freed, now), now)

    # The workers

    def _obey(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case Read():
                    self._read(instruction, now)
                case Load():
                    self._load(instruction, 0, [], now, now)
                case Staged():
                    self._record(
                        Kind.SLOT,
                        instruction.due_seconds,
                        now,
                        instruction.epoch,
                        instruction.step,
                        samples=0,
                    )
                case Ready():
                    self._whole[instruction.epoch, instruction.step] = instruction
        self._deliver(now)

    def _read(self, read: Read, begin: float) -> None:
        def done(end: float) -> None:
            self._record_read(read, begin, end, _READER)
            self._obey(self._scheduler.read_done(read, end - begin, end), end)

        self._source.read(begin, read.nbytes, done)

    def _record_read(self, read: Read, begin: float, end: float, worker: int) -> None:
        self._record(Kind.READ, begin, end, read.epoch, read.step, read.sample, read.nbytes, SOURCE, worker)

    def _load(self, load: Load, done_items: int, read_seconds: list[float], begun: float, now: float) -> None:
        """Go through the items of a Load from the given one on, one worker, one after the other."""
        for position in range(done_items, len(load.items)):
            item = load.items[position]
            if item.origin == SOURCE:
                self._load_from_source(load, position, read_seconds, begun, now)
                return
            now = self._decode(load, item, now)
        self._clock.at(
            now,
            lambda end: self._obey(self._scheduler.load_done(load, [], read_seconds, end, end - begun), end),
        )

    def _load_from_source(
        self, load: Load, position: int, read_seconds: list[float], begun: float, now: float
    ) -> None:
        item = load.items[position]
        # Without reader threads an item carries none.
        read = item.read or Read(
            item.sample, int(self._sizes[item.sample]), STAGING, load.batch, load.epoch, load.step, True
        )

        def start(begin: float) -> None:
            def done(end: float) -> None:
                self._record_read(read, begin, end, _DECODER)
                read_seconds.append(end - begin)
                self._load(load, position + 1, read_seconds, begun, self._decode(load, item, end))

            self._source.read(begin, read.nbytes, done)

        self._clock.at(now, start)

    def _decode(self, load: Load, item: Item, now: float) -> float:
        nbytes = int(self._sizes[item.sample])
        if item.origin not in (SOURCE, STAGING):
            # A memory tier is decoded from in place: what its bytes cost is part of decoding them.
            self._record(Kind.HIT, now, now, load.epoch, load.step, item.sample, nbytes, item.origin)
        end = now + self._machine.write_seconds(nbytes)
        self._record(Kind.DECODE, now, end, load.epoch, load.step, item.sample)
        return end


def predict(
    plan: AccessPlan,
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
    *,
    limits: StagingLimits,
    policy: str | LoadingPolicy = "frequency",
    seed: int = 0,
    rank: int = 0,
    step_seconds: float | Sequence[float] | None = None,
    first_ask_seconds: float = 0.0,
) -> Trace:
    """Run one rank's loading in virtual time and return its trace.

    machine: what a read, a decode and a tier cost here; its storage classes after the first are the tiers.
    sizes_bytes: int64[samples], as stored.
    limits: slots, readers and decode workers of the real run.
    policy: what the tiers keep, as the loader's `policy`; what it draws follows from `seed`.
    step_seconds: of the training for each batch, or for the rank's batches one after the other; by default
        machine.compute says.
    first_ask_seconds: how long after the start of prefetching the training asks for its first batch.

    Raises: ConfigError where neither step_seconds nor machine.compute is known, or a list of them has another length
    than the run; what `placement_of` raises for a policy.
    Source: thesis, section 3.1; reads in flight share a place's bandwidth here, as they do in a real store, where
    the thesis gives each thread a full share.
    """
    chosen = policy_of(policy)
    placement = placement_of(chosen, Job(plan, sizes_bytes, machine, seed, rank), rank)
    compute = machine.compute
    if step_seconds is None and compute is None:
        raise ConfigError(
            "step_seconds is not given and machine.compute is unknown: say how long the training takes for a batch"
        )

    each: Iterator[float] | None = None
    if isinstance(step_seconds, Sequence):
        steps = sum(plan.local_steps(rank, epoch) for epoch in range(plan.epochs))
        if len(step_seconds) != steps:
            raise ConfigError(
                f"step_seconds lists {len(step_seconds)} steps and rank {rank} runs {steps}: give one time for each"
            )
        each = iter(step_seconds)
    elif step_seconds is not None:
        each = itertools.repeat(step_seconds)

    def seconds_for(samples: NDArray[np.int64]) -> float:
        if each is not None:
            return next(each)
        assert compute is not None, "checked above"
        return compute.seconds(samples.size, int(sizes_bytes[samples].sum()))

    run = _Run(plan, rank, machine, sizes_bytes, placement, limits, seconds_for)
    return Trace(run.spans(first_ask_seconds), {"time": "virtual", "rank": rank, "policy": chosen.name})
