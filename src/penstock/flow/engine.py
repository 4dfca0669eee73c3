"""Threads that do what the scheduler says, over real stores and in real time.

    reader threads ── Move ──> Fetcher.fetch    decode workers ── Load ──> Fetcher.fetch, Decoder.decode
             └────────── events ──> inbox ──> Scheduler ──> instructions ──┘
                                                  └──> complete batches ──> the consumer

Threads work by the group (`groups`): an instruction is about several samples, and so are its event and its spans. Bytes
that wait for their decode worker are kept by the number of the scheduler's entry, until the scheduler says `Drop`.

Who owns what: the scheduler belongs to whichever worker thread holds `_lock`, tried and never waited for: a thread
that finds it taken leaves its event in `_inbox`, and the holder looks there again after letting go. The consumer's
thread never runs the scheduler, unless it does all of the work (decoders=0); it sends events to the workers. Nothing is
read, decoded or waited for under the lock.
Decode workers beyond those of the start are started when they first have work, by the thread that holds the lock, so
that each is in the list of threads before the one that started it ends. Those that the scheduler wants no more of are
parked, not ended: what a data set keeps for each thread stays.

Ctrl-C may stop the consumer's thread between any two of its steps. So each of its steps either has happened or can
be done again: it looks at complete batches and never takes one out of a queue, who refers to a batch has its slot, and
all else is one call of `SimpleQueue.put`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Part
from penstock.errors import ClosedError, StagingError, no_thread, printable
from penstock.flow import waits
from penstock.flow.batches import MADE, Departure, StagedBatch
from penstock.flow.copying import CopyAhead
from penstock.flow.garbage import no_collection
from penstock.flow.groups import QUICK_SAMPLES, GroupWork, failed_and_bytes
from penstock.flow.lock_use import HELD_SECONDS, LateWakes, LockUse, RunDelay, ask_for_lock
from penstock.flow.patience import Patience
from penstock.flow.pieces import Pieces
from penstock.flow.recorder import Recorder, Ring
from penstock.flow.staging import Reference, StagingBuffer
from penstock.flow.work import Decoder, Failed, Fetcher, InParts, Latest, Peers, Request
from penstock.machine_code import Loop
from penstock.policy import (
    Drop,
    Evict,
    Instruction,
    Load,
    Move,
    OwnRead,
    Ready,
    Scheduler,
    Staged,
    ThreadFacts,
)
from penstock.policy.decision_state import EVENT
from penstock.policy.runnable import LEAST_SLOTS
from penstock.queues import get_within
from penstock.trace.schema import CONSUMER, NO_FLOW, NO_PLACE, SOURCE, STAGING, Kind
from penstock.units import format_count

_JOIN_SILENT_SECONDS, _JOIN_SECONDS = 1.0, 5.0
_POLL_HELD_SECONDS = _POLL_PEERS_SECONDS = 0.002
#: So often it is looked whether what loads still starts: a wait is counted as so much longer at most.
_POLL_START_SECONDS = 0.1
# What loads may start for so long, and for so many time-outs, without counting as silent.
_START_SECONDS, _START_TIMEOUTS = 600.0, 10
_LOOK_AT_PEERS_SECONDS = 0.05
#: While the training waits for nothing.
_HEAR_FROM_PEERS_SECONDS = 0.01
_READER_SPANS = 1024
_SCHEDULER = 1
_FIRST_WORKER = 2


# Samples after which decisions are worth compiling, which takes 10 to 25 s of a processor. A job that is over soon, or
# whose samples take milliseconds, has better use for it, such as compiling how pictures are resampled.
_WORTH_COMPILING_SAMPLES = 10_000
# Or so many seconds of plain Python: of records that are not in memory it looks through all that is next in line for
# those that lie near each other, a millisecond for each of them.
_WORTH_COMPILING_SECONDS = 1.0
# And after which they are worth loading where they were compiled before, which takes 0.06 s: plain Python takes 0.1 s
# and more for a thousand samples that are read together, and as much for a hundred of a remote store.
_WORTH_LOADING_SAMPLES, _WORTH_LOADING_SECONDS = 1_000, 0.06

#: What decides, compiled.
DECISIONS = Part(
    "penstock.policy._decisions_kernels",
    "event",
    EVENT,
    "what decides which sample is read when",
    "plain Python does it",
)


def compiled_decisions() -> Callable[[int, float], Loop | None]:
    """Return what gives a run what decides, compiled: once it is there and worth it.

    That is called with how many samples were loaded, and the seconds of a processor that deciding took.
    """
    are_cached = functools.cache(lambda: DECISIONS.is_cached)  # who asks for each Load looks for files once

    def ask(samples: int, seconds: float) -> Loop | None:
        is_worth_compiling = samples >= _WORTH_COMPILING_SAMPLES or seconds >= _WORTH_COMPILING_SECONDS
        is_worth_loading = samples >= _WORTH_LOADING_SAMPLES or seconds >= _WORTH_LOADING_SECONDS
        return DECISIONS.ask() if is_worth_compiling or (is_worth_loading and are_cached()) else None

    return ask


class _Park:
    """Tells a decode worker to wait until it is wanted again, and then that it is."""


class _Hear:
    """Tells a decode worker to look for news of other ranks until it has work."""


_PARK, _HEAR = _Park(), _Hear()

Event = Callable[[float], "list[Instruction] | None"]


class _Owner(weakref.ref[Any]):
    """Tells when nobody can use the engine any more."""

    __slots__ = ()


@dataclass
class _OwnThread:
    """What the consumer's thread works with. load: that it is at, or was when an interrupt came."""

    ring: Ring
    delay: RunDelay
    load: Load | None = None


@dataclass
class _Maker:
    """What the consumer's thread makes batches with. made: how many times. watch: ends the watch over it."""

    ring: Ring
    made: int = 0
    is_making: bool = False
    watch: SimpleQueue[None] = field(default_factory=SimpleQueue)


#: What decode workers get: work, an event to pass on, what the consumer dropped; None or `_Owner` ends them.
_Message = Load | Event | Reference | Departure | _Owner | _Park | _Hear | None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine works.

    readers: threads that only read, to begin with; the scheduler may come to let more move at once. Decode workers are
        as many as it lets load at once.
    patience_seconds: a wait that lasts longer is reported, once per patience.
    timeout_seconds: a wait that lasts longer raises WaitTimeout.
    works_in_own_thread: whether `take` does all of the work in the thread that calls it, a piece at a time until its
        batch is there, and no thread is started; readers is 0 then, and the scheduler lets one Load run at once.
    ask_every_seconds: how often to find out if threads wait for the interpreter's lock, for `lock_use` and the trace;
        None for never.
    is_plan_told: whether who reads the trace has the plan, so that ids of samples that follow each other in a batch of
        it need not be recorded.
    """

    readers: int
    patience_seconds: float
    timeout_seconds: float | None
    works_in_own_thread: bool = False
    ask_every_seconds: float | None = None
    is_plan_told: bool = False


class Engine:
    """A running plan: start it, take batches in order, close it.

    samples_of: the samples of the batch of an epoch and step, for messages.
    collect: drains the recorder; workers call it when their ring is half full, as in a long step of the training.
    begin: called by each decode worker before its first Load.
    compiled: returns the compiled decisions once there are any; see `compiled_decisions`.
    ahead: what copies batches to a device, in a thread of its own; None without one.
    progress: returns lines of how far the run is, which come before its waits.
    peers: what other ranks keep for this one; None where they keep nothing for it.
    is_starting: whether what loads is not ready yet, as worker processes that import; a wait is silent from then on.
    is_computing: whether a slot that is referred to comes back by itself, see `FrontEnd`.
    finish: called at the end, when no thread records any more, or by a `close` that left threads which hang.
    """

    #: How long the consumer has waited for batches in all. Its thread writes it.
    _waited_seconds = 0.0
    #: What the consumer's thread makes batches with; None before the first.
    _maker: _Maker | None = None

    def __init__(
        self,
        scheduler: Scheduler,
        fetcher: Fetcher,
        decoder: Decoder,
        staging: StagingBuffer,
        recorder: Recorder,
        settings: EngineSettings,
        *,
        begin: Callable[[], None],
        report: Callable[[str], None],
        collect: Callable[[], None],
        finish: Callable[[], None],
        samples_of: Callable[[int, int], NDArray[np.int64]],
        compiled: Callable[[int, float], Loop | None] = lambda samples, seconds: None,
        ahead: CopyAhead | None = None,
        progress: Callable[[], list[str]] = list,
        peers: Peers | None = None,
        is_starting: Callable[[], bool] = lambda: False,
        is_computing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scheduler, self._fetcher, self._decoder = scheduler, fetcher, decoder
        self._staging, self._recorder, self._clock = staging, recorder, recorder.clock
        self._ring, self._settings, self._begin = recorder.ring(_SCHEDULER), settings, begin
        self._groups = GroupWork(
            fetcher, decoder, recorder, scheduler.where, is_plan_told=settings.is_plan_told
        )
        self._report, self._collect, self._when_finished = report, collect, finish
        self._ahead, self._progress, self._peers = ahead, progress, peers
        self._is_starting, self._is_computing = is_starting, is_computing
        #: None once the scheduler has the compiled decisions.
        self._compiled: Callable[[int, float], Loop | None] | None = compiled
        self._owner: _Owner | None = None
        self._samples_of, self._pid = samples_of, os.getpid()
        self._lock = threading.Lock()
        self._inbox: deque[Event] = deque()
        self._moves: SimpleQueue[Move | Evict | None] = SimpleQueue()
        self._loads: SimpleQueue[_Message] = SimpleQueue()
        #: What parked decode workers wait for: a batch to continue with, or None to end.
        self._parked: SimpleQueue[_Park | None] = SimpleQueue()
        #: Batches that are complete and not handed out yet, by (epoch, step): workers add, the consumer removes.
        self._arrived: dict[tuple[int, int], StagedBatch] = {}
        #: Slots of batches that are in `_arrived` or with the caller. A worker adds one after its batch has arrived.
        self._lent: set[int] = set()
        #: How many slots the scheduler knows.
        self._slots = len(staging)
        #: Something for a waiting consumer to look at. Nothing is put here while it does not wait.
        self._wake: SimpleQueue[None] = SimpleQueue()
        #: What a thread raised that no sample is to blame for.
        self._fault: BaseException | None = None
        #: Why samples could not be had for a batch, by its running number and the sample, until it is complete.
        self._failures: dict[int, dict[int, Exception]] = {}
        #: The sample that each worker is at and since when, by worker; for `waits` only.
        self._at: dict[int, tuple[int | Latest, float]] = {}
        #: The same within a Load of samples so quick that they are not timed one by one.
        self._at_quick: dict[int, int | Latest] = {}
        #: When each decode worker may ask for the interpreter's lock again; each writes its own entry.
        self._next_ask: dict[int, float] = {}
        #: Of Loads that ended while another ran, and when the last one ended. Under the lock.
        self._lock_use = LockUse()
        self._load_ended, self._loaded_samples, self._deciding_seconds = 0.0, 0, 0.0
        #: How many readers there can be, fewer once no thread can be started; decode workers have the numbers behind.
        self._most_readers = self._first_decoder = scheduler.most_moves
        #: How many threads were found best that read and that load, and slots, as the trace has it. Under the lock.
        self._settled = scheduler.settled
        self._consumer_waits: tuple[int, int, float] | None = None
        self._late = None if settings.ask_every_seconds is None else LateWakes(recorder.clock)
        self._closed, self._has_reported_retired, self._readers, self._decoders = False, False, 0, 0
        #: What the consumer's thread does its work with, where it does all of it.
        self._own: _OwnThread | None = None
        #: Decode workers that are not parked, or will not be once they have looked. The consumer's thread is one.
        self._decoders_at_work = int(settings.works_in_own_thread)
        #: All that were started, in the order of their start; the last one perhaps not yet.
        self._threads: list[threading.Thread] = []
        # Through a weak reference: a loader that is dropped unclosed must not be kept until the exit.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        self._running_lock, self._running = threading.Lock(), 0
        #: Whether `_HEAR` is in the queue or with a decode worker; always where nobody is to look. Under the lock.
        self._is_heard = peers is None or settings.works_in_own_thread

    def start(self) -> None:
        """Begin to prefetch."""
        try:
            atexit.register(self._at_exit)
            if self._settings.works_in_own_thread:
                self._begin()
                self._own = _OwnThread(self._recorder.ring(_FIRST_WORKER), RunDelay(None))
                self._post(self._scheduler.start)
                return
            waits.register(self)
            if self._ahead is not None:
                copying = partial(self._ahead.run, self._arrived.get, self._wake_consumer)
                self._start_thread("penstock-copy", copying)
            for _ in range(self._settings.readers):
                self._start_reader()
            with self._lock:
                while self._decoders < self._scheduler.loads_allowed and self._start_decoder():
                    pass
        except BaseException:
            self.close()
            raise
        self._post(self._scheduler.start)

    def take(self, epoch: int, step: int) -> StagedBatch:
        """Wait for a batch and return it. It is there for the same question again until `let_go`.

        Batches come in the plan's order. What is held of batches before it is given back, once this has to wait; see
        `seek`.

        Raises: WaitTimeout, StagingError, ClosedError; whatever a thread raised that no sample is to blame for.
        """
        self.check_usable()
        key = (epoch, step)
        if self._staging.is_held:
            self._post(self._poll_held)
        if self._slots < self._scheduler.slots_wanted and self._staging.can_grow:
            with contextlib.suppress(
                StagingError
            ):  # a worker has taken the memory since, and nobody needs the slot
                self.add_slot()
        if (batch := self._ready(key)) is None:
            batch = self._await(key)
        if batch.copied is None:
            self._staging.guard(batch.slot)
        return batch

    @no_collection  # samples that are there at once would wake it, and it frees none of them
    def make(
        self,
        epoch: int,
        step: int,
        samples: NDArray[np.int64],
        in_array: int,
        at_once: int,
        fetcher: Fetcher,
        decoder: Decoder,
    ) -> list[StagedBatch]:
        """Make the batches of some steps in the calling thread, of which the scheduler knows nothing: see `seek`.

        The engine is usable. samples: int64[steps, local batch], of the steps from this one on.
        in_array: of how many steps one array has the rows. at_once: of how many of these the samples are fetched
            together, and no others, as by threads, so that what a data set makes of a list of ids does not depend on
            who asks. Ctrl-C is let through.
        fetcher, decoder: that do what the engine's own do for samples of the source.
        Raises: what no sample is to blame for. A timeout does not apply to it, patience does.
        """
        if (maker := self._maker) is None:
            maker = self._maker = _Maker(self._recorder.ring(CONSUMER))
            self._start_thread("penstock-watch", partial(self._watch_making, maker))
        maker.made += 1
        at = partial(setitem, self._at_quick, CONSUMER)
        whole = _made_load(maker, epoch, step, samples, 0)
        begin = self._clock()
        self._at[CONSUMER] = int(whole.samples[0]), begin
        self._consumer_waits, maker.is_making = (epoch, step, begin), True
        made: list[StagedBatch] = []
        missed: list[int] = []
        nbytes, reading_seconds = 0, 0.0
        size = samples.shape[1]
        try:
            for first in range(0, len(samples), in_array):
                load = _made_load(maker, epoch, step, samples[first : first + in_array], first)
                rows = load.samples.size
                arrays = tuple([np.empty((rows, *field.shape), field.dtype) for field in decoder.fields])
                failed: dict[int, Exception] = {}
                for row in range(0, rows, at_once * size):
                    part = load
                    if at_once * size < rows:
                        part = load._replace(rows=range(row, min(row + at_once * size, rows)))
                    fetching = self._clock()
                    data = fetcher.fetch(Request(part.ids, at, epoch=epoch, follows=True))
                    reading_seconds += self._clock() - fetching
                    some_missed, some_nbytes = failed_and_bytes(data)
                    missed += [first * size + row + index for index in some_missed]
                    nbytes += some_nbytes
                    wrong = self._groups.decode_fetched(
                        decoder, part, data, arrays, at, has_failed=bool(some_missed)
                    )
                    del data
                    failed |= {row + index: error for index, (_, error) in wrong.items()}
                    wrong.clear()  # as in `_loaded`
                known = {int(load.samples[row]): error for row, error in failed.items()}
                ready = Ready(
                    load.batch, epoch, load.step, load.slot, load.samples, tuple(sorted(failed)), load.steps
                )
                failed.clear()
                made += [StagedBatch(ready, load.step + each, arrays, known) for each in range(load.steps)]
            # Fetching and decoding may have taken turns: recorded is how long either took, as what the wait was for.
            read = begin + reading_seconds
            flow = self._groups.record_group(
                maker.ring, (begin, read), whole.ids, missed, nbytes, SOURCE, whole
            )
            self._groups.record_decoded(maker.ring, read, whole, missed, flow)
        finally:
            self._at_quick.pop(CONSUMER, None)
            self._at.pop(CONSUMER, None)
            self._consumer_waits, maker.is_making = None, False
        return made

    def _watch_making(self, maker: _Maker) -> None:
        """Report batches that take long which the consumer's thread makes, as it cannot do so itself."""
        patience = self._settings.patience_seconds
        while not self._closed:
            with contextlib.suppress(Empty):
                get_within(maker.watch, patience)
                return
            waits = self._consumer_waits
            if maker.is_making and waits is not None and self._clock() - waits[2] >= patience:
                self._report(self._consumer_line())

    def _ready(self, key: tuple[int, int]) -> StagedBatch | None:
        """Return a batch that the caller can have: complete, and on the device if there is one.

        One that lacks samples is not copied ahead: the caller decides what becomes of it.
        """
        batch = self._arrived.get(key)
        if batch is None or self._ahead is None or batch.copied is not None or batch.failed:
            return batch
        return None

    def _await(self, key: tuple[int, int]) -> StagedBatch:
        begin = silent = self._clock()
        self._consumer_waits = (*key, begin)
        start_seconds = max(_START_SECONDS, _START_TIMEOUTS * (self._settings.timeout_seconds or 0.0))
        try:
            patience = Patience(
                self._settings.patience_seconds,
                self._settings.timeout_seconds,
                self._report,
                self._consumer_line,
            )
            while True:
                self._forget_before(key)
                if (batch := self._ready(key)) is not None:
                    return batch
                self.check_usable()
                is_soon = self._make_space(key)
                if self._own is not None:
                    self._work(self._own, key)
                    continue
                now = self._clock()
                waited = now - begin
                is_starting = waited < start_seconds and self._is_starting()
                silent = now if is_starting else silent
                pause = patience.look(waited, now - silent)
                if is_starting:
                    pause = min(pause, _POLL_START_SECONDS)
                if is_soon:
                    pause = _POLL_HELD_SECONDS
                if self._staging.is_held:
                    self._post(self._poll_held)
                    pause = _POLL_HELD_SECONDS
                if self._peers is not None:
                    # Also where none is expected yet: nobody wakes this thread when it comes to that.
                    is_expected = self._scheduler.expects_others
                    pause = min(pause, _POLL_PEERS_SECONDS if is_expected else _LOOK_AT_PEERS_SECONDS)
                    if is_expected:
                        self._post(partial(self._scheduler.waited, waited))
                self._pause(key, pause)
        finally:
            self._consumer_waits = None
            self._waited_seconds += self._clock() - begin
            if silent > begin:
                epoch, step = key
                self._recorder.ring(CONSUMER).record(
                    Kind.START, begin, silent, epoch=epoch, step=step, samples=0
                )

    def _pause(self, key: tuple[int, int], pause: float) -> None:
        """Wait to be woken, or for so long; record it where another thread's call holds the interpreter's lock."""
        if self._late is None:
            with contextlib.suppress(Empty):
                get_within(self._wake, pause)
            return
        self._late.begin()
        pause = min(pause, HELD_SECONDS)
        due = self._clock() + pause
        with contextlib.suppress(Empty):
            get_within(self._wake, pause)
        if late := self._late.late_seconds(due):
            now, (epoch, step) = self._clock(), key
            ring = self._recorder.ring(CONSUMER)
            ring.record(Kind.LOCK, now - late, now, epoch=epoch, step=step, samples=0)

    def await_departure(self, watched: object) -> Departure:
        """Return what notes when the last reference to an object was dropped."""
        departure = Departure(watched, self._loads.put)
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
        self.check_usable()
        self._post(partial(self._sought, epoch, step))
        if self._ahead is not None:
            self._ahead.go_to((epoch, step))
        self._forget_before((epoch, step))

    def extend(self) -> None:
        """Load what the plan has more than it had; see `Scheduler.extended`."""
        self._post(self._scheduler.extended)

    def add_slot(self) -> None:
        """Have one slot more. Raises: StagingError where the memory does not hold it."""
        if len(self._staging) == self._slots:
            self._staging.grow()
        self._post(partial(self._scheduler.slots_added, len(self._staging)))
        self._slots = len(self._staging)

    def end(self) -> None:
        """Tell all threads to end, and wait for nothing: safe anywhere, in the garbage collector too."""
        self._closed = True
        if not self.is_forked:
            self._moves.put(None)
            self._loads.put(None)
            self._parked.put(None)
            self._wake.put(None)
            if self._maker is not None:
                self._maker.watch.put(None)
            if self._ahead is not None:
                self._ahead.end()

    def close(self) -> None:
        """Stop all threads and wait for them. Twice is harmless, and completes what Ctrl-C interrupted.

        A read that hangs in the store cannot be stopped; after 1 s it is reported, after 5 s a warning names it and its
        thread is left.
        """
        self.end()
        if self.is_forked:
            return
        self._fetcher.end_waits()
        atexit.unregister(self._at_exit)
        is_over = self._join(_JOIN_SILENT_SECONDS)
        if not is_over:
            stuck = "; ".join(self._working_lines()) or "threads that are at no sample"
            self._report(f"closing waits for {_JOIN_SECONDS:g} s at most: {stuck}")
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
    def reading(self) -> ThreadFacts | None:
        """How many threads read at once, and why; None where that is fixed."""
        return self._scheduler.reading

    @property
    def lock_use(self) -> LockUse:
        """What shows whether decode workers wait for the interpreter's lock, since the start."""
        return self._lock_use

    def fix_threads(self, count: int | None, least_load_seconds: float | None = None) -> None:
        """Have so many decode workers, or as many as raise the rate; any thread may call it. See `Scheduler`."""
        self._post(lambda now: self._scheduler.fix_threads(count, least_load_seconds))

    @property
    def is_waited_for(self) -> bool:
        """Whether the training waits for a batch."""
        return self._consumer_waits is not None

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of an engine in a forked child, which has none of its threads."""
        return os.getpid() != self._pid

    def waits(self) -> list[str]:
        """Return how far the run is, and a line for each wait under way (see `flow.waits`)."""
        lines = [self._consumer_line()] if self._consumer_waits is not None else []
        at = self._samples_at()
        reads = sum(worker < self._first_decoder for worker in at)
        in_flight = f"in flight: {format_count(reads, 'read')} ahead, {format_count(len(at) - reads, 'Load')}"
        return [*self._progress(), *([in_flight] if at else []), *lines, *self._working_lines()]

    # The consumer's side

    def check_usable(self) -> None:
        """Raise ClosedError once it is closed, or in a forked process; what a thread raised that no sample explains."""
        if self.is_forked:
            raise ClosedError(
                f"this loader was started in process {self._pid} and its threads do not exist in the forked process "
                f"{os.getpid()}: make a loader of its own there, after the fork"
            )
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise ClosedError("this loader is closed: make a new one to read on")

    def _forget_before(self, key: tuple[int, int]) -> None:
        for earlier in [arrived for arrived in self._arrived.copy() if arrived < key]:
            self._arrived.pop(earlier, None)

    def _make_space(self, key: tuple[int, int]) -> bool:
        """Keep a slot in the workers' hands, as far as the memory limit lets; return whether to look again soon."""
        in_use = self._scheduler.slots_in_use
        if in_use < self._slots and sum(map(self._staging.is_referred_to, range(self._slots))) >= in_use:
            self._post(self._scheduler.use_all_slots)
            return False
        if not self._are_all_kept():
            return False
        # A thread that has delivered a batch refers to it while it has the lock, and by its errors to what the training
        # had when it got these: slots may come back by themselves.
        if self._lock.locked():
            return True
        # Asked before slots are counted: one that is free by then is no error.
        is_soon = not self._staging.can_grow and self._is_computing()
        # A slot may have come back since it was counted, and be lent again. Then it is missing from `_lent` until its
        # batch has arrived: asked in this order, `key` has, or has no slot.
        if (
            not is_soon
            and self._are_all_kept()
            and len(self._lent) >= self._slots
            and key not in self._arrived
        ):
            self.add_slot()
        return is_soon

    def _are_all_kept(self) -> bool:
        slots = range(self._slots)
        return len(self._lent) >= self._slots and all(map(self._staging.is_referred_to, slots))

    def _consumer_line(self) -> str:
        if self._consumer_waits is None:
            return "the training waits for nothing"
        epoch, step, since = self._consumer_waits
        now = self._clock()
        line = f"the training waits for the batch of epoch {epoch}, step {step} since {now - since:.1f} s"
        if self._ahead is not None and (epoch, step) in self._arrived:
            return f"{line}; it is loaded, and waits for its copy to {self._ahead.device.name}"
        at = sorted(self._samples_at().values(), key=lambda entry: entry[1])
        wanted = set(self._samples_of(epoch, step).tolist())
        for sample, begin in [entry for entry in at if entry[0] in wanted][:1] or at[:1]:
            line += f"; longest under way: sample {sample}, {self._name_of(sample)}, for {now - begin:.1f} s"
        return f"{line}; {format_count(len(at), 'sample')} in work on {self._fetcher.place}; {self._how_reads_fare()}"

    def _how_reads_fare(self) -> str:
        recent = sorted(self._groups.recent_read_seconds.copy())
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
            for worker, (sample, begin) in sorted(self._samples_at().items())
        ]

    def _samples_at(self) -> dict[int, tuple[int, float]]:
        """Return the sample that each worker is at, and since when; in a Load of quick ones, since its beginning."""
        quick, found = self._at_quick.copy(), dict[int, tuple[int, float]]()
        for worker, (noted, begin) in self._at.copy().items():
            at: Any = quick.get(worker, noted)
            sample: int = getattr(at, "latest", at)
            if sample >= 0:
                found[worker] = sample, begin
        return found

    def _name_of(self, sample: int) -> str:
        try:
            return printable(self._fetcher.describe(sample))
        except Exception as error:  # of a source's own code: a line about a wait must not end the training
            return f"which cannot be described ({type(error).__name__})"

    # The workers' side

    def _work(self, own: _OwnThread, key: tuple[int, int]) -> None:
        """Do one piece of work in the consumer's thread.

        Ctrl-C is let through in the midst of it. A Load that was interrupted is done again by the next call, and then
        fills no tier, as that may be half done: what is not found there is read from the source when it is due. An
        interrupt at any other point may have left half a decision.
        """
        try:
            if own.load is None:
                message = self._message_for_own_thread()
                if not isinstance(message, Load):
                    self._handle(message, _FIRST_WORKER, own.ring, own.delay)
                    return
                own.load = message
            event = self._done(own.load, _FIRST_WORKER, own.ring, own.delay)
            own.load = None
            self._settle(event, own.ring)
        except BaseException as error:
            if own.load is not None:
                own.load = own.load._replace(rests=[STAGING] * len(own.load.rests))
            else:
                self._fault = ClosedError(
                    f"{type(error).__name__} came while this loader worked in the training's own thread (decoders=0), "
                    "and it cannot continue: make a new one with state=loader.state_dict() of this one, or call its "
                    f"start({key[0]}, {key[1]})"
                )
            raise

    def _message_for_own_thread(self) -> _Message:
        try:
            return self._loads.get_nowait()
        except Empty:  # the batch comes once a slot is free that a device or the framework still reads
            time.sleep(_POLL_HELD_SECONDS)
            return self._poll_held

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
            is_timed = self._compiled is not None
            begin = time.thread_time() if is_timed else 0.0
            try:
                while self._inbox:
                    event = self._inbox.popleft()
                    now = self._clock()
                    if self._peers is not None and self._peers.has_news:
                        self._hear_from(self._peers, now)
                    for instruction in event(now) or ():
                        self._hand_out(instruction, now)
                    if self._scheduler.settled != self._settled:
                        self._note_settled(now)
                if is_timed:
                    self._deciding_seconds += time.thread_time() - begin
                self._man()
                if not self._is_heard and self._scheduler.expects_others:
                    self._is_heard = True
                    self._loads.put(_HEAR)
            finally:
                self._lock.release()

    def _hear_from(self, peers: Peers, now: float) -> None:
        """Let the scheduler know what other ranks keep by now. Under the lock."""
        for rank, samples in peers.take_news():
            told = (
                self._scheduler.withdrawn(rank, now)
                if samples is None
                else self._scheduler.announced(rank, samples, now)
            )
            for instruction in told:
                self._hand_out(instruction, now)

    def _man(self) -> None:
        """Have as many readers and decode workers as the scheduler has moves and Loads for. Under the lock."""
        while self._readers < min(self._scheduler.moves_running, self._most_readers):
            if not self._start_reader():
                self._scheduler.limit_readers(self._readers)
                self._most_readers = self._readers
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

    def _note_settled(self, now: float) -> None:
        """Record which numbers of threads and slots are others than before. Under the lock."""
        found, epoch = self._scheduler.settled, self._scheduler.epoch_of_fills
        for place, known, count in zip((SOURCE, STAGING, NO_PLACE), self._settled, found, strict=True):
            if count != known:
                self._ring.record(Kind.THREADS, now, now, epoch=epoch, samples=count, place=place)
        self._settled = found

    def _start_reader(self) -> bool:
        if not self._start("read", self._readers, self._run_reader, _READER_SPANS):
            return False
        self._readers += 1
        return True

    def _start_decoder(self) -> bool:
        spans = self._recorder.capacity_spans
        if not self._start("decode", self._first_decoder + self._decoders, self._run_decoder, spans):
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
        return self._start_thread(f"penstock-{role}-{worker}", partial(self._record, loop, worker, spans))

    def _start_thread(self, name: str, work: Callable[[], None]) -> bool:
        """See `_start`."""
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
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

    def _record(self, loop: Callable[[int, Ring], None], worker: int, spans: int) -> None:
        loop(worker, self._recorder.ring(worker, spans))

    def _hand_out(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case Move() | Evict():
                self._moves.put(instruction)
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
            case Drop():
                for entry in instruction.entries:
                    self._groups.waiting.pop(entry, None)

    def _deliver(self, ready: Ready) -> None:
        arrays = self._staging.lend(ready.slot, ready.samples.size, self._loads.put)
        known = self._failures.pop(ready.batch, {})
        for step in range(ready.step, ready.step + ready.steps):
            self._arrived[ready.epoch, step] = StagedBatch(ready, step, arrays, known)
        self._lent.add(ready.slot)
        if self._ahead is not None:
            self._ahead.arrived()
        self._wake_consumer()

    def _dropped(self, reference: Reference, now: float) -> list[Instruction]:
        slot = self._staging.settle(reference)
        if slot is not None:
            return self._freed([slot], now)
        if self._staging.is_held:
            self._wake_consumer()
        return []

    def _moved(
        self, move: Move, data: list[Any] | Pieces, flow: int, seconds: float, now: float
    ) -> list[Instruction]:
        failed = []
        for index, each in enumerate(data):
            if isinstance(each, Failed):
                waiting = self._scheduler.batches_waiting_for(move.entries[index])
                self._note_failure(each.error, move.samples[index], waiting)
                failed.append(index)
            else:
                self._groups.waiting[move.entries[index]] = each, flow if len(data) == 1 else NO_FLOW
        data.clear()  # as in `_loaded`
        for tier in self._fetcher.ended_tiers() if move.batch < 0 else ():
            self._scheduler.ended(tier)
        return self._scheduler.moved(move, seconds, failed, now)

    def _use(self, loop: Loop, now: float) -> None:
        self._scheduler.use(loop)

    def _loaded(
        self,
        load: Load,
        failed: dict[int, tuple[int, Exception]],
        own_reads: list[OwnRead],
        seconds: tuple[float, float],
        asked_seconds: float | None,
        now: float,
    ) -> list[Instruction]:
        wall_seconds, cpu_seconds = seconds
        if self._settings.ask_every_seconds is not None and self._scheduler.loads_running > 1:
            # No longer than this Load: before it there may have been nothing to do.
            since_last = min(now - self._load_ended, wall_seconds)
            self._lock_use = self._lock_use.plus(since_last, cpu_seconds, asked_seconds)
        self._load_ended = now
        self._loaded_samples += len(load.rows)
        for index, (_, error) in failed.items():
            waiting = self._scheduler.batches_waiting_for(load.entries[index])
            self._note_failure(error, int(load.ids[index]), [load.batch, *waiting])
        marks = {index: mark for index, (mark, _) in failed.items()}
        # The frames of an error's traceback, and those that called them, refer to this: a circle, else.
        failed.clear()
        return self._scheduler.loaded(load, marks, own_reads, now, *seconds)

    def _note_failure(self, error: Exception, sample: int, batches: Sequence[int]) -> None:
        for batch in batches:
            if self._scheduler.is_wanted(batch):
                self._failures.setdefault(batch, {})[sample] = error

    def _sought(self, epoch: int, step: int, now: float) -> list[Instruction]:
        instructions = self._scheduler.seek(epoch, step, now)
        for batch in list(self._failures):
            if not self._scheduler.is_wanted(batch):
                del self._failures[batch]
        return instructions

    def _poll_held(self, now: float) -> list[Instruction]:
        return self._freed(self._staging.poll_held(), now)

    def _freed(self, slots: list[int], now: float) -> list[Instruction]:
        # Those that are retired stay among the lent ones.
        free = [slot for slot in slots if not self._staging.retire(slot, LEAST_SLOTS)]
        if len(free) < len(slots) and not self._has_reported_retired:
            self._has_reported_retired = True
            self._report(
                "batches are larger than the first samples let expect: fewer are loaded ahead, to stay within memory="
            )
        self._lent.difference_update(free)
        return [
            instruction
            for slot in free
            for instruction in self._scheduler.slot_freed(slot, now, self._waited_seconds)
        ]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
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
        self._fetcher.close()
        if self._late is not None:
            self._late.close()
        self._arrived.clear()
        self._staging.close()
        self._when_finished()

    def _run_reader(self, worker: int, ring: Ring) -> None:
        while (move := self._moves.get()) is not None and not self._closed:
            if isinstance(move, Evict):
                self._fetcher.evict(np.array(move.samples))
                self._inbox.append(partial(self._scheduler.evicted, move))
                self._drive()
                continue
            ids = np.array(move.samples)
            begin = self._clock()
            at = partial(self._note, worker)
            request = Request(ids, at, move.origin, move.rests, lasting=True, epoch=move.epoch, shared=[])
            data = self._fetcher.fetch(request)
            end = self._clock()
            self._at.pop(worker, None)
            if isinstance(data, InParts):
                self._inbox.append(partial(self._scheduler.divided, move))
                self._drive()
                continue
            self._groups.recent_read_seconds.append((end - begin) / ids.size)
            flow, _ = self._groups.record_fetched(ring, (begin, end), request, data, move)
            self._inbox.append(partial(self._moved, move, data, flow, end - begin))
            del data, move  # an idle thread keeps no sample's bytes
            self._drive()
            if ring.is_half_full:
                self._collect()
        self._moves.put(None)  # for the next one

    def _note(self, worker: int, sample: int | Latest) -> None:
        """Remember which sample a thread is at, for `waits`."""
        self._at[worker] = (sample, self._clock())

    def _run_decoder(self, worker: int, ring: Ring) -> None:
        self._begin()
        with contextlib.closing(RunDelay()) as delay:
            self._decode(worker, ring, delay)

    def _decode(self, worker: int, ring: Ring, delay: RunDelay) -> None:
        while (message := self._next_message()) is not None and not self._closed:
            if not isinstance(message, _Park):
                self._handle(message, worker, ring, delay)
            elif self._parked.get() is None:
                self._parked.put(None)  # for the next one
                break
            message = None  # an idle thread keeps no sample's bytes
        self._loads.put(None)  # for the next one

    def _next_message(self) -> _Message:
        """Wait for work; the worker that has taken `_HEAR` looks meanwhile for news of other ranks: they wake nobody.

        Once it gets work, which may take long, whichever worker is idle next takes that from the queue.
        """
        while (message := self._loads.get()) is _HEAR:
            while self._peers is not None and self._scheduler.expects_others:
                with contextlib.suppress(Empty):
                    message = get_within(self._loads, _HEAR_FROM_PEERS_SECONDS)
                    self._loads.put(_HEAR)
                    return message
                if self._peers.has_news:
                    self._inbox.append(lambda now: None)
                    self._drive()
            self._inbox.append(self._end_hearing)
            self._drive()
        return message

    def _end_hearing(self, now: float) -> None:
        self._is_heard = False

    def _handle(self, message: _Message, worker: int, ring: Ring, delay: RunDelay) -> None:
        """Do what a message to the decode workers says, but for parking."""
        event: Event | None = None
        if isinstance(message, Load):
            event = self._done(message, worker, ring, delay)
        elif isinstance(message, _Owner):
            self.end()
        elif isinstance(message, Departure):
            message.seconds = self._clock()
        elif isinstance(message, Reference):
            event = partial(self._dropped, message)
        elif callable(message):
            event = message
        self._settle(event, ring)

    def _settle(self, event: Event | None, ring: Ring) -> None:
        """Hand an event to the scheduler, and have done what came of it."""
        if event is not None:
            self._inbox.append(event)
        self._drive()
        if ring.is_half_full:
            self._collect()

    def _done(self, load: Load, worker: int, ring: Ring, delay: RunDelay) -> Event:
        """Do a Load; return the event that says so."""
        self._note(worker, int(load.ids[0]))
        if (
            self._compiled is not None
            and (loop := self._compiled(self._loaded_samples, self._deciding_seconds)) is not None
        ):
            self._compiled = None
            self._inbox.append(partial(self._use, loop))
        every, asked_seconds = self._settings.ask_every_seconds, None
        if every is not None and self._clock() >= self._next_ask.get(worker, 0.0):
            asked_seconds = self._ask_for_lock(worker, ring, load, delay, every)
        delay.begin(surely=False)
        begin, computed, taken = self._clock(), time.thread_time(), delay.taken_seconds
        # Calls no Python: of samples that take a microsecond, noting them would be a quarter.
        at = partial(setitem, self._at_quick, worker) if len(load.rows) >= QUICK_SAMPLES else None
        arrays = self._staging.arrays(load.slot)
        failed, own_reads = self._groups.fetch_and_decode(
            load, arrays, at or partial(self._note, worker), ring, delay
        )
        cpu_seconds = time.thread_time() - computed
        # Other programs on the processors are no reason for more threads or fewer.
        wall_seconds = self._clock() - begin - (delay.taken_seconds - taken)
        seconds = delay.left_of(wall_seconds, cpu_seconds), cpu_seconds
        self._at_quick.pop(worker, None)
        self._at.pop(worker, None)
        return partial(self._loaded, load, failed, own_reads, seconds, asked_seconds)

    def _ask_for_lock(
        self, worker: int, ring: Ring, load: Load, delay: RunDelay, every_seconds: float
    ) -> float | None:
        """Record what `ask_for_lock` returns, and return it where another Load runs, else None."""
        asked_seconds = ask_for_lock(self._clock, delay)
        end = self._clock()
        self._next_ask[worker] = end + every_seconds
        ring.record(Kind.LOCK, end - asked_seconds, end, epoch=load.epoch, step=load.step, samples=0)
        # Without `_lock`: a number that is a moment old does as well.
        return asked_seconds if self._scheduler.loads_running > 1 else None


def _made_load(maker: _Maker, epoch: int, step: int, samples: NDArray[np.int64], first: int) -> Load:
    """Return a Load of the consumer's thread. samples: of its steps, the first of which is so many behind `step`."""
    ids = samples.ravel()
    return Load(
        -maker.made, epoch, step + first, ids, MADE + first, range(ids.size), [], [], [], len(samples)
    )


def _close_at_exit(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        with contextlib.suppress(KeyboardInterrupt):  # an impatient user, whose training is over
            engine.close()
