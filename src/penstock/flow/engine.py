"""Threads that do what the scheduler says, over real stores and in real time.

    reader threads ── Read ──> Work.read        decode workers ── Load ──> Work.load
             └────────── events ──> inbox ──> Scheduler ──> instructions ──┘
                                                  └──> whole batches ──> the consumer

Who owns what: the scheduler belongs to whichever worker thread holds `_lock`, tried and never waited for: a thread
that finds it taken leaves its event in `_inbox`, and the holder looks there again after letting go. The consumer's
thread never runs the scheduler; it sends events to the workers. Nothing is read, decoded or waited for under the lock.
Decode workers beyond those of the start are started when they first have work, by the thread that holds the lock, so
that each is in the list of threads before the one that started it ends. Those that the scheduler wants no more of are
parked, not ended: what a data set keeps for each thread stays.

Ctrl-C may stop the consumer's thread between any two of its steps. So each of its steps either has happened or can
be done again: it looks at whole batches and never takes one out of a queue, who refers to a batch has its slot, and
all else is said by a single call of `SimpleQueue.put`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import LoaderClosed, no_thread, printable
from penstock.flow import waits
from penstock.flow.lock_use import ASK_EVERY_SECONDS, LockUse, RunDelay, ask_for_lock
from penstock.flow.patience import Patience
from penstock.flow.recorder import Recorder, Ring
from penstock.flow.staging import Reference, StagingBuffer
from penstock.policy import Instruction, Load, Read, Ready, Scheduler, Staged, ThreadFacts
from penstock.policy.scheduler import Item
from penstock.trace.schema import SOURCE, Kind
from penstock.units import format_count

_JOIN_SILENT_SECONDS, _JOIN_SECONDS = 1.0, 5.0
_POLL_HELD_SECONDS = 0.002
_READER_SPANS = 1024
_RECENT_READS = 256
# The consumer's own ring is number 0.
_SCHEDULER = 1
_FIRST_WORKER = 2


class LoadResult(NamedTuple):
    """What came of a Load.

    failed: items and why. read_seconds: of each read the worker did by itself and that succeeded.
    """

    failed: list[tuple[Item, Exception]]
    read_seconds: list[float]


class _Park:
    """Tells a decode worker to wait until it is wanted again, and then that it is."""


_PARK = _Park()

Event = Callable[[float], "list[Instruction] | None"]


class Whole:
    """A batch with all its samples in its slot. Whoever refers to its arrays has the slot.

    errors: why the places in `ready.failed` have no sample, by sample, and where in the worker that was.
    """

    __slots__ = ("_packed", "arrays", "errors", "ready")

    def __init__(self, ready: Ready, arrays: tuple[NDArray[Any], ...], errors: dict[int, Exception]) -> None:
        self.ready = ready
        self.arrays = arrays
        self.errors = {sample: (error, error.__traceback__) for sample, error in errors.items()}
        self._packed: list[NDArray[Any]] | None = None

    def keep(self, places: list[int]) -> tuple[NDArray[Any], ...]:
        """Move some places to the front, in their order, and return the arrays of these alone.

        Called again, as after a Ctrl-C in its midst, it must get the same places.
        """
        if len(places) == len(self.ready.samples):
            return self.arrays
        if self._packed is None:
            self._packed = [array[places] for array in self.arrays]
        for array, packed in zip(self.arrays, self._packed, strict=True):
            array[: len(places)] = packed
        return tuple(array[: len(places)] for array in self.arrays)


class Departure(weakref.ref[Any]):
    """Tells when an object was dropped. seconds: a reading of the engine's clock soon after; None until then."""

    __slots__ = ("seconds",)

    seconds: float | None


class _Owner(weakref.ref[Any]):
    """Tells when nobody can use the engine any more."""

    __slots__ = ()


class Work(Protocol):
    """What the threads do, apart from when."""

    @property
    def place(self) -> str:
        """Name the store that is read from, for messages."""
        ...

    def read(self, read: Read) -> Any:
        """Fetch a sample, put it into its tier if it has one, and return the bytes for the decode worker."""
        ...

    def load(self, load: Load, ring: Ring, at: Callable[[int], None]) -> LoadResult:
        """Decode the items of a Load into its slot; record READ, HIT and DECODE spans; tell `at` each sample's turn."""
        ...

    def describe(self, sample: int) -> str:
        """Name a sample for messages, by its path where it has one."""
        ...

    def close(self) -> None:
        """Give back what the work holds. No thread runs any more."""
        ...


class Engine:
    """A running plan: start it, take batches in order, close it.

    clock: seconds; of the recorder.
    patience_seconds: a wait that lasts longer is told to `say`, once per patience.
    timeout_seconds: a wait that lasts longer raises WaitTimeout.
    samples_of: the samples of the batch of an epoch and step, for messages.
    collect: drains the recorder; workers call it when their ring is half full, as in a long step of the training.
    readers: threads that only read. Decode workers are as many as the scheduler lets load at once.
    begin: called by each decode worker before its first Load.
    finish: called at the end, when no thread records any more, or by a `close` that left threads which hang.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        work: Work,
        staging: StagingBuffer,
        recorder: Recorder,
        *,
        readers: int,
        begin: Callable[[], None],
        patience_seconds: float,
        timeout_seconds: float | None,
        say: Callable[[str], None],
        collect: Callable[[], None],
        finish: Callable[[], None],
        samples_of: Callable[[int, int], NDArray[np.int64]],
    ) -> None:
        self._scheduler = scheduler
        self._work = work
        self._staging = staging
        self._recorder = recorder
        self._clock = recorder.clock
        self._patience_seconds = patience_seconds
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._collect = collect
        self._when_finished = finish
        self._owner: _Owner | None = None
        self._samples_of = samples_of
        self._pid = os.getpid()

        self._lock = threading.Lock()
        self._inbox: deque[Event] = deque()
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        #: What decode workers get: work, an event to pass on, what the consumer dropped; None or `_Owner` ends them.
        self._loads: SimpleQueue[Load | Event | Reference | Departure | _Owner | _Park | None] = SimpleQueue()
        #: What parked decode workers wait for: to go on, or None to end.
        self._parked: SimpleQueue[_Park | None] = SimpleQueue()
        #: Batches that are whole and not handed out yet, by (epoch, step): workers add, the consumer removes.
        self._arrived: dict[tuple[int, int], Whole] = {}
        #: Slots of batches that are in `_arrived` or with the caller. A worker adds one after its batch has arrived.
        self._lent: set[int] = set()
        #: How many slots the scheduler was told of.
        self._slots = len(staging)
        #: Something for a waiting consumer to look at. Nothing is put here while it does not wait.
        self._wake: SimpleQueue[None] = SimpleQueue()
        #: What a thread raised that no sample is to blame for.
        self._fault: BaseException | None = None
        self._ring = recorder.ring(_SCHEDULER)
        #: Why a sample could not be had for a batch, by running number of the batch and sample, until it is whole.
        self._failures: dict[tuple[int, int], Exception] = {}

        #: The sample that each worker is at and since when, by worker; for `waits` only.
        self._at: dict[int, tuple[int, float]] = {}
        #: When each decode worker may ask for the interpreter's lock again; each writes its own entry.
        self._next_ask: dict[int, float] = {}
        #: Of Loads that ended while another ran, and when the last one ended. Under the lock.
        self._lock_use = LockUse()
        self._load_ended = 0.0
        self._first_decoder = _FIRST_WORKER + readers
        self._recent_read_seconds: deque[float] = deque(maxlen=_RECENT_READS)
        self._consumer_waits: tuple[int, int, float] | None = None
        self._closed = False
        self._begin = begin
        self._readers = readers
        self._decoders = 0
        #: Decode workers that are not parked, or will not be once they have looked.
        self._decoders_at_work = 0
        #: All that were started, in the order of their start; the last one perhaps not yet.
        self._threads: list[threading.Thread] = []
        # Through a weak reference: a loader that is dropped unclosed must not be kept until the exit.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        self._running_lock = threading.Lock()
        self._running = 0

    def start(self) -> None:
        """Begin to prefetch."""
        try:
            waits.register(self)
            atexit.register(self._at_exit)
            for reader in range(self._readers):
                self._start("read", reader, self._run_reader, _READER_SPANS)
            with self._lock:
                while self._decoders < self._scheduler.loads_allowed and self._start_decoder():
                    pass
        except BaseException:
            self.close()
            raise
        self._post(self._scheduler.start)

    def take(self, epoch: int, step: int) -> Whole:
        """Wait for a batch and return it. It is there for the same question again until `let_go`.

        Batches come in the plan's order; those before (epoch, step) are let go; see `seek`.

        Raises: WaitTimeout, StagingError, LoaderClosed; whatever a thread raised that no sample is to blame for.
        """
        self._check_usable()
        key = (epoch, step)
        begin = self._clock()
        self._consumer_waits = (epoch, step, begin)
        try:
            patience = Patience(self._patience_seconds, self._timeout_seconds, self._say, self._consumer_line)
            if self._staging.is_held:
                self._post(self._poll_held)
            while True:
                self._forget_before(key)
                if (whole := self._arrived.get(key)) is not None:
                    self._staging.guard(whole.ready.slot)
                    return whole
                self._check_usable()
                self._make_room(key)
                waited = self._clock() - begin
                pause = patience.look(waited, waited)
                if self._staging.is_held:
                    self._post(self._poll_held)
                    pause = _POLL_HELD_SECONDS
                with contextlib.suppress(Empty):
                    self._wake.get(timeout=pause)
        finally:
            self._consumer_waits = None

    def await_departure(self, thing: object) -> Departure:
        """Return what will tell when the last reference to a thing has gone."""
        departure = Departure(thing, self._loads.put)
        departure.seconds = None
        return departure

    def end_with(self, owner: object) -> None:
        """End once the last reference to an object has gone, wherever that may be: the callback is a queue's own."""
        self._owner = _Owner(owner, self._loads.put)

    def let_go(self, epoch: int, step: int) -> None:
        """The caller has a batch, or wants nothing more of it: its slot is free with the last reference to it."""
        self._arrived.pop((epoch, step), None)

    def seek(self, epoch: int, step: int) -> None:
        """Give up the batches before (epoch, step)."""
        self._check_usable()
        self._post(partial(self._sought, epoch, step))
        self._forget_before((epoch, step))

    def end(self) -> None:
        """Tell all threads to end, and wait for nothing: safe anywhere, in the garbage collector too."""
        self._closed = True
        if not self.is_forked:
            self._reads.put(None)
            self._loads.put(None)
            self._parked.put(None)
            self._wake.put(None)

    def close(self) -> None:
        """Stop all threads and wait for them. Twice is harmless, and completes what Ctrl-C interrupted.

        A read that hangs in the store cannot be stopped; after 1 s it is reported, after 5 s a warning names it and its
        thread is left.
        """
        self.end()
        if self.is_forked:
            return
        atexit.unregister(self._at_exit)
        is_over = self._join(_JOIN_SILENT_SECONDS)
        if not is_over:
            stuck = "; ".join(self._working_lines()) or "threads that are at no sample"
            self._say(f"closing waits for {_JOIN_SECONDS:g} s at most: {stuck}")
            is_over = self._join(_JOIN_SECONDS - _JOIN_SILENT_SECONDS)
        if is_over:
            self._finish()
        elif os.getpid() == self._pid:
            alive = ", ".join(thread.name for thread in self._threads if thread.is_alive())
            self._when_finished()
            stuck = "; ".join(self._working_lines()) or "they are at no sample"
            warnings.warn(f"closed while threads hang ({alive}): {stuck}", RuntimeWarning, stacklevel=2)

    def _join(self, seconds: float) -> bool:
        """Wait for the other threads for so long at most; return whether all have ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def threads(self) -> ThreadFacts:
        """How many decode workers load at once, and why."""
        return self._scheduler.threads

    @property
    def lock_use(self) -> LockUse:
        """What tells whether decode workers wait for the interpreter's lock, since the start."""
        return self._lock_use

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of an engine in a forked child, which has none of its threads."""
        return os.getpid() != self._pid

    def waits(self) -> list[str]:
        """Return a line for each wait under way (see `flow.waits`)."""
        lines = [self._consumer_line()] if self._consumer_waits is not None else []
        return lines + self._working_lines()

    # The consumer's side

    def _check_usable(self) -> None:
        if self.is_forked:
            raise LoaderClosed(
                f"this loader was started in process {self._pid} and its threads do not exist in the forked process "
                f"{os.getpid()}: make a loader of its own there, after the fork"
            )
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise LoaderClosed("this loader is closed: make a new one to read on")

    def _forget_before(self, key: tuple[int, int]) -> None:
        for earlier in [arrived for arrived in self._arrived.copy() if arrived < key]:
            self._arrived.pop(earlier, None)

    def _make_room(self, key: tuple[int, int]) -> None:
        """Keep a slot in the workers' hands, as far as the memory limit lets."""
        if len(self._lent) < self._slots or not all(map(self._staging.is_referred_to, range(self._slots))):
            return
        # A slot may have come back since it was counted, and be lent again. Then it is missing from `_lent` until its
        # batch has arrived: asked in this order, `key` has, or has no slot.
        if len(self._lent) < self._slots or key in self._arrived:
            return
        if len(self._staging) == self._slots:
            self._staging.grow()
        self._post(partial(self._scheduler.slots_added, len(self._staging)))
        self._slots = len(self._staging)

    def _consumer_line(self) -> str:
        if self._consumer_waits is None:
            return "the training waits for nothing"
        epoch, step, since = self._consumer_waits
        now = self._clock()
        line = f"the training waits for the batch of epoch {epoch}, step {step} since {now - since:.1f} s"
        at = sorted(self._at.copy().values(), key=lambda entry: entry[1])
        wanted = set(self._samples_of(epoch, step).tolist())
        for sample, begin in [entry for entry in at if entry[0] in wanted][:1] or at[:1]:
            line += f"; longest under way: sample {sample}, {self._name_of(sample)}, for {now - begin:.1f} s"
        return f"{line}; {format_count(len(at), 'sample')} in work on {self._work.place}; {self._how_reads_fare()}"

    def _how_reads_fare(self) -> str:
        recent = sorted(self._recent_read_seconds.copy())
        if not recent:
            return "no read has ended yet"
        median, slowest = recent[len(recent) // 2], recent[-1]
        reads = format_count(len(recent), "read")
        return f"the last {reads} took {median * 1e3:.1f} ms (median), {slowest * 1e3:.1f} ms (slowest)"

    def _working_lines(self) -> list[str]:
        now = self._clock()
        return [
            f"thread {worker} {'reads' if worker < self._first_decoder else 'loads'} sample {sample}, "
            f"{self._name_of(sample)}, since {now - begin:.1f} s"
            for worker, (sample, begin) in sorted(self._at.copy().items())
        ]

    def _name_of(self, sample: int) -> str:
        try:
            return printable(self._work.describe(sample))
        except Exception as error:  # of a source's own code: a line about a wait must not end the training
            return f"which cannot be described ({type(error).__name__})"

    # The workers' side

    def _post(self, event: Event) -> None:
        self._loads.put(event)

    def _wake_consumer(self) -> None:
        if self._consumer_waits is not None:
            self._wake.put(None)

    def _drive(self) -> None:
        """Feed the inbox to the scheduler and hand its instructions out, unless another thread is at it."""
        while self._inbox and not self._closed:
            if not self._lock.acquire(blocking=False):
                return
            try:
                while self._inbox:
                    event = self._inbox.popleft()
                    now = self._clock()
                    for instruction in event(now) or ():
                        self._hand_out(instruction, now)
                self._man()
            finally:
                self._lock.release()

    def _man(self) -> None:
        """Have as many decode workers as the scheduler has Loads for. Under the lock."""
        wanted = self._scheduler.loads_allowed
        while self._decoders_at_work > wanted:
            self._decoders_at_work -= 1
            self._loads.put(_PARK)
        while self._decoders_at_work < min(wanted, self._scheduler.loads_running):
            if self._decoders_at_work < self._decoders:
                self._decoders_at_work += 1
                self._parked.put(_PARK)
            elif not self._start_decoder():
                return

    def _start_decoder(self) -> bool:
        spans = self._recorder.capacity_spans
        if not self._start("decode", self._readers + self._decoders, self._run_decoder, spans):
            self._scheduler.limit_threads(self._decoders)
            return False
        self._decoders += 1
        self._decoders_at_work += 1
        return True

    def _start(self, role: str, number: int, loop: Callable[[int, Ring], None], spans: int) -> bool:
        """Start one more thread; return False where there can be no more and others run.

        Raises: DataError where none runs that could do the work.
        """
        worker = _FIRST_WORKER + number
        thread = threading.Thread(
            target=self._run, args=(loop, worker, spans), name=f"penstock-{role}-{worker}", daemon=True
        )
        self._threads.append(thread)
        with self._running_lock:
            self._running += 1
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads, or the interpreter's end
            self._threads.remove(thread)
            with self._running_lock:
                self._running -= 1
            if not self._decoders_at_work:
                raise no_thread(error) from error
            return False
        return True

    def _hand_out(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case Read():
                self._reads.put(instruction)
            case Load():
                self._loads.put(instruction)
            case Ready():
                self._deliver(instruction)
            case Staged():
                self._ring.record(
                    Kind.SLOT,
                    instruction.due_seconds,
                    now,
                    epoch=instruction.epoch,
                    step=instruction.step,
                    samples=0,
                )

    def _deliver(self, ready: Ready) -> None:
        arrays = self._staging.lend(ready.slot, ready.samples.size, self._loads.put)
        failed = {int(ready.samples[index]) for index in ready.failed}
        errors = {sample: self._failures.pop((ready.batch, sample)) for sample in failed}
        self._arrived[ready.epoch, ready.step] = Whole(ready, arrays, errors)
        self._lent.add(ready.slot)
        self._wake_consumer()

    def _dropped(self, reference: Reference, now: float) -> list[Instruction]:
        slot = self._staging.settle(reference)
        if slot is not None:
            return self._freed([slot], now)
        if self._staging.is_held:
            self._wake_consumer()
        return []

    def _read_failed(self, read: Read, error: Exception, now: float) -> list[Instruction]:
        self._note_failure(error, read.sample, read.waiters)
        return self._scheduler.read_failed(read, now)

    def _load_done(
        self,
        load: Load,
        result: LoadResult,
        seconds: tuple[float, float],
        asked_seconds: float | None,
        now: float,
    ) -> list[Instruction]:
        wall_seconds, cpu_seconds = seconds
        if self._scheduler.loads_running > 1:
            # No longer than this Load: before it there may have been nothing to do.
            since_last = min(now - self._load_ended, wall_seconds)
            self._lock_use = self._lock_use.plus(since_last, cpu_seconds, asked_seconds)
        self._load_ended = now
        for item, error in result.failed:
            waiters = [] if item.read is None else item.read.waiters
            self._note_failure(error, item.sample, [(load.batch, item.index), *waiters])
        failed = [item for item, _ in result.failed]
        result.failed.clear()  # an error's traceback refers to whose list this is: a circle, else
        return self._scheduler.load_done(load, failed, result.read_seconds, now, *seconds)

    def _note_failure(self, error: Exception, sample: int, places: Sequence[tuple[int, int]]) -> None:
        for batch, _ in places:
            if self._scheduler.is_wanted(batch):
                self._failures[batch, sample] = error

    def _sought(self, epoch: int, step: int, now: float) -> list[Instruction]:
        instructions = self._scheduler.seek(epoch, step, now)
        for batch, sample in list(self._failures):
            if not self._scheduler.is_wanted(batch):
                del self._failures[batch, sample]
        return instructions

    def _poll_held(self, now: float) -> list[Instruction]:
        return self._freed(self._staging.poll_held(), now)

    def _freed(self, slots: list[int], now: float) -> list[Instruction]:
        self._lent.difference_update(slots)
        return [instruction for slot in slots for instruction in self._scheduler.slot_freed(slot, now)]

    def _run(self, loop: Callable[[int, Ring], None], worker: int, spans: int) -> None:
        try:
            loop(worker, self._recorder.ring(worker, spans))
        except BaseException as error:  # raised at the consumer, by `take`
            self._fault = error
            self._wake_consumer()
        finally:
            with self._running_lock:
                self._running -= 1
                is_last = not self._running
            if is_last:
                self._finish()

    def _finish(self) -> None:
        """No work is done any more. Twice is harmless."""
        waits.unregister(self)
        self._work.close()
        self._when_finished()

    def _run_reader(self, worker: int, ring: Ring) -> None:
        while (read := self._reads.get()) is not None and not self._closed:
            begin = self._clock()
            self._at[worker] = (read.sample, begin)
            try:
                read.payload = self._work.read(read)
            except Exception as error:
                self._inbox.append(partial(self._read_failed, read, error))
            else:
                end = self._clock()
                self._recent_read_seconds.append(end - begin)
                ring.record(Kind.READ, begin, end, read.sample, read.nbytes, read.epoch, read.step, SOURCE)
                self._inbox.append(partial(self._scheduler.read_done, read, end - begin))
            finally:
                del self._at[worker]
            read = None  # an idle thread keeps no sample's bytes
            self._drive()
            if ring.is_half_full:
                self._collect()
        self._reads.put(None)  # for the next one

    def _run_decoder(self, worker: int, ring: Ring) -> None:
        self._begin()
        with contextlib.closing(RunDelay()) as delay:
            self._decode(worker, ring, delay)

    def _decode(self, worker: int, ring: Ring, delay: RunDelay) -> None:
        while (message := self._loads.get()) is not None and not self._closed:
            if isinstance(message, Load):
                self._load(message, worker, ring, delay)
            elif isinstance(message, _Owner):
                self.end()
            elif isinstance(message, _Park):
                if self._parked.get() is None:
                    self._parked.put(None)  # for the next one
                    break
                continue
            elif isinstance(message, Departure):
                message.seconds = self._clock()
            elif isinstance(message, Reference):
                self._inbox.append(partial(self._dropped, message))
            else:
                self._inbox.append(message)
            message = None  # an idle thread keeps no sample's bytes
            self._drive()
            if ring.is_half_full:
                self._collect()
        self._loads.put(None)  # for the next one

    def _load(self, load: Load, worker: int, ring: Ring, delay: RunDelay) -> None:
        def at(sample: int) -> None:
            self._at[worker] = (sample, self._clock())

        asked_seconds = self._ask_for_lock(worker, delay)
        begin, computed, delayed = self._clock(), time.thread_time(), delay.seconds()
        result = self._work.load(load, ring, at)
        # Other programs on the processors are no reason for more threads or fewer.
        seconds = self._clock() - begin - (delay.seconds() - delayed), time.thread_time() - computed
        self._at.pop(worker, None)
        self._recent_read_seconds.extend(result.read_seconds)
        self._inbox.append(partial(self._load_done, load, result, seconds, asked_seconds))

    def _ask_for_lock(self, worker: int, delay: RunDelay) -> float | None:
        """Return what `ask_for_lock` does; None if it is not due, or no other Load runs."""
        begin = self._clock()
        # Without `_lock`: a number that is a moment old does as well.
        if self._scheduler.loads_running < 2 or begin < self._next_ask.get(worker, begin):
            return None
        asked_seconds = ask_for_lock(self._clock, delay)
        self._next_ask[worker] = self._clock() + ASK_EVERY_SECONDS
        return asked_seconds


def _close_at_exit(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        with contextlib.suppress(KeyboardInterrupt):  # an impatient user, whose training is over
            engine.close()
