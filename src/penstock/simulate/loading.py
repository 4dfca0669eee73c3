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
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import (
    Drop,
    Instruction,
    Load,
    Move,
    OwnRead,
    Placement,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
)
from penstock.policy.loading import Job, LoadingPolicy
from penstock.policy.runnable import placement_of
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

    request_seconds: what each read keeps the wire busy for beside its bytes.
    """

    def __init__(
        self,
        clock: _Clock,
        latency_seconds: float,
        rate_of_all: Callable[[int], float],
        request_seconds: float = 0.0,
    ) -> None:
        self._clock = clock
        self._request_seconds = request_seconds
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
        self._waiting.append((nbytes, done))
        if len(self._waiting) == 1:
            self._begin_first()
        self._expect(now)

    def _begin_first(self) -> None:
        busy_bytes = (
            self._request_seconds * self._rate_of_all(len(self._waiting)) if self._request_seconds else 0.0
        )
        self._rest_bytes = self._waiting[0][0] + busy_bytes

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
            self._begin_first()
        self._as_of = now
        self._expect(now)
        done(now)


def _rate_of_all(machine: Machine, tier: int, reads: int) -> float:
    return reads * machine.local_rate(tier, reads)


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
        self._scheduler = Scheduler(plan, rank, sizes_bytes, placement, machine, limits)
        self._clock = _Clock()
        #: What is read from, by its number. What is in memory is decoded where it lies, and costs nothing before.
        self._stores = {
            SOURCE: _SimulatedStore(
                self._clock,
                machine.source.latency_seconds,
                lambda reads: reads * machine.source_rate(machine.ranks, reads),
                machine.ranks * machine.source.request_seconds,
            )
        }
        for number, tier in enumerate(machine.storage):
            if number and (tier.latency_seconds or tier.backend != "memory"):
                self._stores[number] = _SimulatedStore(
                    self._clock,
                    tier.latency_seconds,
                    partial(_rate_of_all, machine, number),
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
                case Move():
                    self._move(instruction, now)
                case Load():
                    self._load(instruction, now)
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
                case Drop():
                    pass  # there are no bytes
        self._deliver(now)

    def _move(self, move: Move, begin: float) -> None:
        def done(end: float) -> None:
            self._obey(self._scheduler.moved(move, end - begin, [], end), end)

        self._fetch(move.samples, move.origin, (move.epoch, move.step), _READER, begin, done)

    def _load(self, load: Load, begin: float) -> None:
        """Fetch what the worker reads by itself, from one place after the other, then decode all: one worker."""
        own: dict[int, list[int]] = {}
        for sample, origin in zip(load.ids, load.origins, strict=True):
            own.setdefault(origin, []).append(sample)
        own.pop(STAGING, None)
        self._load_on(load, begin, own, [], begin)

    def _load_on(
        self, load: Load, begin: float, own: dict[int, list[int]], own_reads: list[OwnRead], now: float
    ) -> None:
        if not own:
            for sample in load.ids:
                end = now + self._machine.write_seconds(int(self._sizes[sample]))
                self._record(Kind.DECODE, now, end, load.epoch, load.step, sample)
                now = end

            def loaded(end: float) -> None:
                self._obey(self._scheduler.loaded(load, {}, own_reads, end, end - begin), end)

            self._clock.at(now, loaded)
            return
        origin, samples = own.popitem()

        def done(end: float) -> None:
            own_reads.append(OwnRead(origin, len(samples), end - now))
            self._load_on(load, begin, own, own_reads, end)

        self._fetch(samples, origin, (load.epoch, load.step), _DECODER, now, done)

    def _fetch(
        self, samples: list[int], origin: int, at: tuple[int, int], worker: int, begin: float, done: Event
    ) -> None:
        """Have one thread read samples one after the other, beginning now; tell `done` when it is through."""
        kind = Kind.READ if origin == SOURCE else Kind.HIT
        store = self._stores.get(origin)
        left = iter(samples)

        def go_on(now: float) -> None:
            sample = next(left, None)
            if sample is None:
                done(now)
                return
            nbytes = int(self._sizes[sample])

            def over(end: float) -> None:
                self._record(kind, now, end, *at, sample, nbytes, place=origin, worker=worker)
                go_on(end)

            if store is None:
                over(now)
            else:
                store.read(now, nbytes, over)

        go_on(begin)


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
