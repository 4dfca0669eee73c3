"""The executor: tokens, frames and iterations; one step runs in the thread that called Run.

Each unit has a count of what it waits for, per iteration. What is ready lies on a stack, so that a step continues with
what it began. A value is held by the inputs of the units that still need it and by nothing else, so it is freed when
the last of them has run. A dead input (of a branch that was not taken) makes a unit dead: it is not run, and what it
gives is dead; a Merge is dead only when all its inputs are.

An iteration is over when nothing of it is ready, running or waiting, and the one before it is over; a frame when all
its Enters arrived and its last iteration is over: then a Leave that never gave a live value gives a dead one.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch

from penstock.errors import WaitTimeout
from penstock.graph.errors import DeadFetchError, GraphError, KernelError, MismatchError
from penstock.graph.model.dtypes import dtype_of_torch
from penstock.graph.model.node import Spec
from penstock.graph.ops.table import operation
from penstock.graph.run.live import LiveBytes
from penstock.graph.run.lower import Flat
from penstock.graph.run.plan import (
    ENTER,
    FEED,
    FETCH,
    KERNEL,
    LEAVE,
    MERGE,
    NEXT,
    NOTHING,
    RANDOM,
    REGION,
    SENDING,
    SWITCH,
    WAITING,
    FramePlan,
    Plan,
    Unit,
)
from penstock.graph.run.regions import OUTLIVE_STEPS
from penstock.graph.run.statistics import Statistics
from penstock.graph.run.timeline import Lane
from penstock.queues import WakingQueue, get_within

_DEAD = object()


class Iteration:
    """The counts and inputs of one iteration of a frame.

    open_units: how many are ready, running or waiting, and child frames that are not over.
    """

    __slots__ = ("counts", "dead", "frame", "merged", "number", "open_units", "slots")

    def __init__(self, frame: Frame, number: int) -> None:
        self.frame = frame
        self.number = number
        self.counts = frame.plan.needs.copy()
        self.slots: list[Any] = [None] * frame.plan.slots
        #: Units with a dead input; of a Merge, how many of its inputs were dead.
        self.dead: dict[int, int] = {}
        self.merged: set[int] = set()
        self.open_units = 0

    def tag(self) -> tuple[int, ...]:
        """Return the iteration numbers of the loops around, outermost first."""
        if self.frame.parent is None:
            return ()
        return (*self.frame.parent.tag(), self.number)


class Frame:
    """A loop that runs: a frame of the plan in an iteration of the frame around it."""

    __slots__ = ("constants", "deferred", "entered", "first", "iterations", "left", "next", "parent", "plan")

    def __init__(self, plan: FramePlan, parent: Iteration | None) -> None:
        self.plan = plan
        self.parent = parent
        self.iterations: dict[int, Iteration] = {}
        #: Oldest iteration that is not over; number of the next that begins.
        self.first, self.next = 0, 0
        self.entered = 0
        self.constants: list[tuple[Unit, Any]] = []
        #: What arrived for an iteration that may not begin yet.
        self.deferred: list[tuple[Unit, Any]] = []
        self.left: set[int] = set()


class Waiter:
    """A unit that waits for a resource. The resource calls `finish` or `fail` once, from any thread."""

    __slots__ = ("iteration", "since", "step", "taken", "unit", "withdraw")

    def __init__(self, step: Step, unit: Unit, iteration: Iteration) -> None:
        self.step = step
        self.unit = unit
        self.iteration = iteration
        self.since = time.perf_counter()
        #: Set by the resource: what forgets the request; a queue that granted it, and the elements it gave.
        self.withdraw: Callable[[], None] = _nothing_to_do
        self.taken: tuple[Any, Sequence[Any]] | None = None

    def finish(self, values: Any) -> None:
        self.step.events.put((self, values, None))

    def fail(self, error: BaseException) -> None:
        self.step.events.put((self, None, error))


def _nothing_to_do() -> None:
    pass


class Step:
    """One run of a plan. Belongs to the thread that runs it; `cancel` may be called by any."""

    def __init__(
        self,
        plan: Plan,
        feeds: Sequence[Any],
        resources: Any,
        statistics: Statistics | None = None,
        timeout_seconds: float | None = None,
        observe: Callable[[Flat, Sequence[Any]], None] | None = None,
        lane: Lane | None = None,
        number: int = 0,
        slowness: float = 1.0,
    ) -> None:
        self.plan = plan
        self._slowness = slowness
        #: Code of regions counts by it, too, where a plan was made to.
        self.live = None if statistics is None and lane is None else LiveBytes()
        self.number = number
        self._lane = lane
        self._observe = observe
        self.events: WakingQueue[tuple[Waiter | None, Any, BaseException | None]] = WakingQueue()
        mail = resources.mail
        self._next_event = get_within if mail is None else mail.get_within
        self.waiting: set[Waiter] = set()
        self._feeds = list(feeds)
        self._resources = resources
        self._statistics = statistics
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._cancelled: BaseException | None = None
        #: Whether a loop has to `check` in each iteration, which raises once the run is over.
        self.stops = timeout_seconds is not None
        self._ready: list[tuple[Unit, Iteration]] = []
        self._results: list[Any] = [_DEAD] * plan.fetches
        self._frames: dict[tuple[int, int], Frame] = {}
        self._runs: dict[str, int] = {}
        #: What it runs now, another tuple each time; None while it waits.
        self.under_way: tuple[Unit, Iteration] | None = None
        #: Mutexes that this step holds.
        self.held: set[Any] = set()
        #: What took elements of queues, in order, in iterations that are not over: they go back if the step fails.
        self._takers: list[Waiter] = []

    def cancel(self, error: BaseException) -> None:
        """End the step with an error as soon as its kernel returns."""
        self._cancelled, self.stops = error, True
        self.events.put((None, None, error))

    def check(self, where: str = "a loop") -> None:
        """Raise what ends the run, or WaitTimeout if its time is over."""
        if self._cancelled is not None:
            raise self._cancelled
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise WaitTimeout(f"the run took longer than its timeout, in {where}")

    def run(self) -> list[Any]:
        """Return the fetched values. Raises: GraphErrors; by then queues have back what they gave."""
        try:
            with torch.no_grad():
                self._run()
            self._check_fetches()
        except BaseException:
            self._abandon()
            raise
        finally:
            if self.live is not None:
                self.live.close()
        if self._statistics is not None and self.live is not None:
            self._statistics.add_live("", self.live.peak_bytes)
        return self._results

    def _check_fetches(self) -> None:
        for place, result in enumerate(self._results):
            if result is _DEAD:
                unit = next(unit for unit in self.plan.units if unit.flat.attr.get("fetch") == place)
                raise DeadFetchError(
                    f"{unit.flat.name} was fetched and not computed: its branch was not taken",
                    node=unit.flat.attr["node"],
                    where=unit.flat.attr["where"],
                )

    def _abandon(self) -> None:
        for waiter in self.waiting:
            waiter.withdraw()
        while True:
            try:
                waiter_or_none, _, _ = self.events.get_nowait()
            except Empty:
                break
            if waiter_or_none is not None:
                self._takers.append(waiter_or_none)
        taken: dict[Any, list[Any]] = {}
        for waiter in self._takers:
            if waiter.taken is not None:
                queue, elements = waiter.taken
                taken.setdefault(queue, []).extend(elements)
        for queue, elements in taken.items():
            queue.give_back(elements)
        for mutex in list(self.held):
            mutex.release_of(self)
        for kept in (self.waiting, self._ready, self._frames, self._results, self._feeds, self._takers):
            kept.clear()

    # -- The loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        root = Iteration(Frame(self.plan.frames[0], None), 0)
        self._ready += [(unit, root) for unit in self.plan.roots]
        root.open_units = len(self._ready)
        ready, fire = self._ready, self._fire
        while True:
            while ready:
                if self._cancelled is not None:
                    raise self._cancelled
                unit, iteration = self.under_way = ready.pop()
                fire(unit, iteration)
            self.under_way = None
            if not self.waiting:
                return
            self._take_event()
            while not self.events.empty() and self.waiting:
                self._take_event()

    def _take_event(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        begin = 0.0 if self._lane is None else time.perf_counter()
        try:
            waiter, values, error = self._next_event(self.events, left)
        except Empty:
            raise WaitTimeout(f"the run took longer than its timeout: {'; '.join(self.waits())}") from None
        if self._lane is not None:
            self._lane.wait(begin, time.perf_counter())
        if waiter is None:
            assert error is not None, "only a cancel names no waiter"
            raise error
        self.waiting.discard(waiter)
        if waiter.taken is not None:
            self._takers.append(waiter)
        if error is not None:
            raise self._blamed(error, waiter.unit.flat)
        self._end_wait(waiter, values)

    def _end_wait(self, waiter: Waiter, values: Any) -> None:
        if self._statistics is not None:
            self._statistics.add(waiter.unit.flat, time.perf_counter() - waiter.since)
        if self._lane is not None:
            self._lane.kernel(waiter.unit, waiter.since, time.perf_counter())
        outputs = (values,) if waiter.unit.ports == 1 else values
        if self.live is not None:
            self.live.add(*outputs)
        self._give(waiter.unit, waiter.iteration, outputs)

    def waits(self) -> list[str]:
        """Return one line for each unit that waits."""
        now = time.perf_counter()
        return [
            f"node {waiter.unit.flat.name!r} ({waiter.unit.flat.op}) waits since {now - waiter.since:.1f} s"
            for waiter in list(self.waiting)
        ]

    def _fire(self, unit: Unit, iteration: Iteration) -> None:
        slots, begin, count = iteration.slots, unit.slot, unit.inputs
        if unit.kind == MERGE:
            self._fire_merge(unit, iteration)
            return
        args = slots[begin : begin + count]
        for place in range(begin, begin + count):
            slots[place] = None
        if unit.local in iteration.dead:
            self._fire_dead(unit, iteration)
            return
        kind = unit.kind
        if kind in (REGION, KERNEL):
            outputs = self._call(unit, args)
        elif kind == WAITING:
            self._wait(unit, iteration, args)
            return
        elif kind == SENDING:
            outputs = self._call(unit, [self.number, *args])
        elif kind == SWITCH:
            outputs = self._switched(unit, args)
        elif kind == FEED:
            place = unit.flat.attr["feed"]
            outputs = (self._feeds[place],)
            self._feeds[place] = None
            if self.live is not None:
                self.live.add(*outputs)
        elif kind == FETCH:
            self._results[unit.flat.attr["fetch"]] = args[0]
            outputs = ()
        elif kind == RANDOM:
            outputs = self._call(unit, [self._key(unit.flat, iteration), *args])
        elif kind == ENTER:
            self._enter(unit, iteration, args[0])
            return
        elif kind == LEAVE:
            self._leave(unit, iteration, args[0])
            return
        elif kind == NEXT:
            self._next(unit, iteration, args[0])
            return
        else:
            assert kind == NOTHING, f"kind {kind}"
            outputs = ()
        if self._statistics is not None and kind in (SWITCH, NOTHING):
            self._statistics.add(unit.flat, 0.0)
        del args
        self._give(unit, iteration, outputs)

    def _call(self, unit: Unit, args: list[Any]) -> Sequence[Any]:
        call, flat = unit.call, unit.flat
        assert call is not None, "a kernel has a call"
        statistics, warm = self._statistics, math.inf
        is_timed = statistics is not None or self._lane is not None or self._slowness > 1
        # Where times are learned of it a kernel runs twice before, unless that would change something.
        repeats = 0
        if statistics is not None and statistics.is_warm:
            repeats = 2 if unit.region is not None or operation(flat.op).kind == "pure" else 0
        try:
            while True:
                begin = time.perf_counter() if is_timed else 0.0
                if unit.region is not None:
                    outputs: Sequence[Any] = call(args.copy() if repeats else args, self)
                else:
                    result = call(*args)
                    outputs = (result,) if unit.ports == 1 else result
                if not repeats:
                    break
                warm, repeats = self._slowness * (time.perf_counter() - begin), repeats - 1
                outputs = result = ()  # what they take is free for the next
        except WaitTimeout:
            raise
        except Exception as error:
            if unit.region is not None:
                flat, args = unit.region.culprit(error) or (flat, [])
            raise self._blamed(error, flat, args) from error
        if self._slowness > 1 and unit.kind != SENDING:
            time.sleep((self._slowness - 1) * (time.perf_counter() - begin))
        if statistics is not None:
            members = unit.region.members if unit.region else [flat]
            seconds = min(warm, time.perf_counter() - begin) / len(members)
            for each in members:
                statistics.add(each, seconds, outputs if len(members) == 1 else None)
        if self._lane is not None:
            self._lane.kernel(unit, begin, time.perf_counter())
        if self.live is not None and (unit.region is None or not unit.region.is_counted):
            (self.live.leave_out if flat.op in OUTLIVE_STEPS else self.live.add)(*outputs)
        if self._observe is not None:
            self._observe(unit.region.members[0] if unit.region else flat, outputs)
        return outputs

    def _switched(self, unit: Unit, args: list[Any]) -> Sequence[Any]:
        value, predicate = args
        if predicate.ndim:
            error = MismatchError(f"the predicate has shape {list(predicate.shape)}, and a scalar is needed")
            raise self._blamed(error, unit.flat)
        return (_DEAD, value) if bool(predicate) else (value, _DEAD)

    def _key(self, flat: Flat, iteration: Iteration) -> int:
        run = self._runs.get(flat.name)
        if run is None:
            run = self._runs[flat.name] = self._resources.count_run(flat.name)
        return self._resources.draw_key(flat.name, run, iteration.tag())  # type: ignore[no-any-return]

    def _wait(self, unit: Unit, iteration: Iteration, args: list[Any]) -> None:
        waiter = Waiter(self, unit, iteration)
        self.waiting.add(waiter)
        call = unit.call
        assert call is not None, "a kernel has a call"
        try:
            values = call(waiter, *args)
        except Exception as error:
            raise self._blamed(error, unit.flat, args) from error
        if values is not None:  # it had not to wait
            self.waiting.discard(waiter)
            self._end_wait(waiter, values)

    def _blamed(self, error: BaseException, flat: Flat, args: Sequence[Any] = ()) -> BaseException:
        """Return the error to raise for what a kernel raised: a mismatch if its inputs do not fit."""
        if isinstance(error, GraphError):
            return error if error.node else type(error)(error.text, node=flat.name, where=flat.where)
        if not isinstance(error, Exception):
            return error
        mismatch = _mismatch_of(args, flat)
        if mismatch is not None:
            return MismatchError(mismatch, node=flat.name, where=flat.where)
        return KernelError(
            f"{flat.op} raised {type(error).__name__}: {error}", node=flat.name, where=flat.where
        )

    # -- Tokens ----------------------------------------------------------------------------------------------

    def _give(self, unit: Unit, iteration: Iteration, outputs: Sequence[Any]) -> None:
        self._pass_on(unit.targets, iteration, outputs)
        for follower in unit.followers:
            self._follow(iteration, follower, is_dead=False)
        self._finish(iteration)

    def _fire_dead(self, unit: Unit, iteration: Iteration) -> None:
        kind = unit.kind
        if kind == ENTER:
            self._enter(unit, iteration, _DEAD)
            return
        # A dead NextIteration begins no iteration; a Leave may still get a live value in a later one.
        if kind not in (NEXT, LEAVE, FETCH):
            self._pass_on(unit.targets, iteration, [_DEAD] * len(unit.targets))
            for follower in unit.followers:
                self._follow(iteration, follower, is_dead=True)
        self._finish(iteration)

    def _pass_on(
        self, targets: Sequence[list[tuple[Unit, int]]], iteration: Iteration, outputs: Sequence[Any]
    ) -> None:
        """Let outputs, by port, arrive at the units that take them. One call for all: calls are what a step costs."""
        counts, slots = iteration.counts, iteration.slots
        for value, takers in zip(outputs, targets, strict=False):
            for unit, slot in takers:
                local = unit.local
                if unit.kind == MERGE:
                    self._merge(iteration, unit, slot, value)
                    continue
                if value is _DEAD:
                    iteration.dead[local] = 1
                else:
                    slots[slot] = value
                counts[local] -= 1
                if not counts[local]:
                    self._push(iteration, unit)

    def _merge(self, iteration: Iteration, unit: Unit, slot: int, value: Any) -> None:
        local = unit.local
        if value is _DEAD:
            dead = iteration.dead[local] = iteration.dead.get(local, 0) + 1
            # A loop's Merge hears of the loop's end by no token: its Enter decides.
            if dead < unit.alternatives:
                return
        if local in iteration.merged:
            return
        iteration.merged.add(local)
        iteration.slots[unit.slot] = (value, slot - unit.slot)
        if iteration.counts[local] == 0:
            self._push(iteration, unit)

    def _follow(self, iteration: Iteration, unit: Unit, *, is_dead: bool) -> None:
        local = unit.local
        if is_dead and unit.kind != MERGE:
            iteration.dead[local] = 1
        iteration.counts[local] -= 1
        if iteration.counts[local] == 0 and (unit.kind != MERGE or local in iteration.merged):
            self._push(iteration, unit)

    def _push(self, iteration: Iteration, unit: Unit) -> None:
        iteration.open_units += 1
        if self.plan.has_turns:
            insort(self._ready, (unit, iteration), key=_turn)
        else:
            self._ready.append((unit, iteration))

    def _finish(self, iteration: Iteration) -> None:
        iteration.open_units -= 1
        if iteration.open_units == 0 and iteration.frame.parent is not None:
            self._retire(iteration.frame)

    def _fire_merge(self, unit: Unit, iteration: Iteration) -> None:
        value, place = iteration.slots[unit.slot]
        iteration.slots[unit.slot] = None
        if value is _DEAD:
            self._fire_dead(unit, iteration)
            return
        if self._statistics is not None:
            self._statistics.add(unit.flat, 0.0)
        self._give(
            unit, iteration, (value, torch.tensor(place, dtype=torch.int32) if unit.targets[1] else None)
        )

    # -- Frames ----------------------------------------------------------------------------------------------

    def _enter(self, unit: Unit, iteration: Iteration, value: Any) -> None:
        key = (id(iteration), unit.child)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(self.plan.frames[unit.child], iteration)
            iteration.open_units += 1
            self._begin(frame)
        frame.entered += 1
        if unit.is_constant:
            frame.constants.append((unit, value))
            for each in list(frame.iterations.values()):
                self._bring(each, unit, value)
        else:
            # The others of iteration 0 cannot be over: it ends only when all Enters have arrived.
            self._bring(frame.iterations[0], unit, value)
        self._retire(frame)
        self._finish(iteration)

    def _bring(self, iteration: Iteration, unit: Unit, value: Any) -> None:
        """Give what an Enter or a NextIteration brings into an iteration, or a Leave out of a loop."""
        self._pass_on(unit.targets, iteration, (value,))
        for follower in unit.followers:
            self._follow(iteration, follower, is_dead=value is _DEAD)

    def _begin(self, frame: Frame) -> Iteration:
        iteration = frame.iterations[frame.next] = Iteration(frame, frame.next)
        frame.next += 1
        for unit, value in frame.constants:
            self._bring(iteration, unit, value)
        return iteration

    def _next(self, unit: Unit, iteration: Iteration, value: Any) -> None:
        if self.stops:
            self.check(f"iteration {iteration.tag()} of a loop")
        frame = iteration.frame
        following = frame.iterations.get(iteration.number + 1)
        if following is None and iteration.number + 1 == frame.next:
            if frame.next - frame.first < frame.plan.parallel_iterations:
                following = self._begin(frame)
            else:
                frame.deferred.append((unit, value))
        if following is not None:
            self._bring(following, unit, value)
        self._finish(iteration)

    def _leave(self, unit: Unit, iteration: Iteration, value: Any) -> None:
        frame, parent = iteration.frame, iteration.frame.parent
        assert parent is not None, "the plan has checked that this is in a loop"
        frame.left.add(unit.local)
        if self._statistics is not None:
            self._statistics.add(unit.flat, 0.0)
        self._bring(parent, unit, value)
        self._finish(iteration)

    def _retire(self, frame: Frame) -> None:
        """End the iterations that are over, begin those that waited for it, and end the frame after its last."""
        if frame.entered < frame.plan.enters:
            return
        while True:
            oldest = frame.iterations.get(frame.first)
            if oldest is None or oldest.open_units:
                break
            del frame.iterations[frame.first]
            frame.first += 1
            if self._takers:
                self._takers = [waiter for waiter in self._takers if waiter.iteration is not oldest]
            if frame.deferred:
                arrived, frame.deferred = frame.deferred, []
                following = self._begin(frame)
                for unit, value in arrived:
                    self._bring(following, unit, value)
        if not frame.iterations:
            self._end_frame(frame)

    def _end_frame(self, frame: Frame) -> None:
        parent = frame.parent
        assert parent is not None, "the whole graph is no loop"
        del self._frames[(id(parent), frame.plan.number)]
        for unit in frame.plan.leaves:
            if unit.local not in frame.left:
                self._bring(parent, unit, _DEAD)
        self._finish(parent)


def _turn(ready: tuple[Unit, Iteration]) -> int:
    """Return by what the stack of what is ready is sorted: the first is at its end."""
    return -ready[0].turn


def _mismatch_of(args: Sequence[Any], flat: Flat) -> str | None:
    """Return how the inputs of a kernel that raised do not fit each other, or None if they do."""
    if flat.node is None or len(args) != len(flat.node.takes):
        return None
    specs = []
    for value, taken in zip(args, flat.node.takes, strict=True):
        if taken.kind != "tensor" or not hasattr(value, "shape"):
            specs.append(taken)
        else:
            dtype = dtype_of_torch(value.dtype) if isinstance(value, torch.Tensor) else "bytes"
            same = taken.dtype.removeprefix("q") == dtype.removeprefix("q")
            specs.append(Spec(taken.dtype if same else dtype, tuple(value.shape)))
    try:
        operation(flat.op).infer(flat.node, specs)
    except GraphError as mismatch:
        return mismatch.text
    return None
