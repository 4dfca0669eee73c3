"""Threads that do what the scheduler says, over real stores and in real time.

    reader threads ── Read ──> Work.read        decode workers ── Load ──> Work.load
             └────────── events ──> inbox ──> Scheduler ──> instructions ──┘
                                                  └──> whole batches ──> the consumer

Who owns what: the scheduler belongs to whichever worker thread holds `_lock`, tried and never waited for: a thread
that finds it taken leaves its event in `_inbox`, and the holder looks there again after letting go. The consumer's
thread never runs the scheduler (a Ctrl-C could stop it half-way); it leaves events and wakes a worker. Nothing is
read, decoded or waited for under the lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from penstock.errors import LoaderClosed, WaitTimeout
from penstock.flow import waits
from penstock.flow.recorder import Recorder, Ring
from penstock.flow.staging import StagingBuffer
from penstock.policy import Instruction, Load, Read, Ready, Scheduler, Staged
from penstock.policy.scheduler import Item
from penstock.trace.schema import SOURCE, Kind

_JOIN_SECONDS = 5.0
_POLL_HELD_SECONDS = 0.002
_RING_SPANS = 4096
_RECENT_READS = 256
_CONSUMER, _SCHEDULER = 0, 1
_FIRST_WORKER = 2


class LoadResult(NamedTuple):
    """What came of a Load.

    failed: items and why. read_seconds: of each read the worker did by itself and that succeeded.
    """

    failed: list[tuple[Item, Exception]]
    read_seconds: list[float]


class Work(Protocol):
    """What the threads do, apart from when."""

    @property
    def place(self) -> str:
        """Name the store that is read from, for messages."""
        ...

    def read(self, read: Read) -> Any:
        """Fetch a sample, put it into its tier if it has one, and return the bytes for the decode worker."""
        ...

    def load(self, load: Load, ring: Ring) -> LoadResult:
        """Decode the items of a Load into its slot; record READ, HIT and DECODE spans."""
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
    """

    def __init__(
        self,
        scheduler: Scheduler,
        work: Work,
        staging: StagingBuffer,
        recorder: Recorder,
        *,
        readers: int,
        decoders: int,
        patience_seconds: float,
        timeout_seconds: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._work = work
        self._staging = staging
        self._recorder = recorder
        self._clock = recorder.clock
        self._patience_seconds = patience_seconds
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._pid = os.getpid()

        self._lock = threading.Lock()
        self._inbox: deque[Callable[[float], list[Instruction] | None]] = deque()
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        #: True wakes a decode worker to look into the inbox; None ends it.
        self._loads: SimpleQueue[Load | bool | None] = SimpleQueue()
        self._whole: SimpleQueue[Ready | BaseException] = SimpleQueue()
        self._arrived: dict[tuple[int, int], Ready] = {}
        #: Batches before this (epoch, step) were given up; one that arrives late is the scheduler's again.
        self._wanted = (0, 0)
        self._ring = recorder.ring(_SCHEDULER)
        #: Why a sample could not be had, until its batch is taken.
        self.failures: dict[int, Exception] = {}

        #: What each worker reads now and since when, by worker; for `waits` only.
        self._reading: dict[int, tuple[int, float]] = {}
        self._recent_read_seconds: deque[float] = deque(maxlen=_RECENT_READS)
        self._consumer_waits: tuple[int, int, float] | None = None
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(target, worker), name=f"penstock-{role}-{worker}", daemon=True
            )
            for worker, (role, target) in enumerate(
                [("read", self._run_reader)] * readers + [("decode", self._run_decoder)] * decoders,
                _FIRST_WORKER,
            )
        ]
        self._decoders = decoders

    def start(self) -> None:
        """Begin to prefetch."""
        waits.register(self)
        for thread in self._threads:
            thread.start()
        self._post(self._scheduler.start)

    def take(self, epoch: int, step: int) -> Ready:
        """Wait for a batch, give it to the caller and return it.

        Batches come in the plan's order; those before (epoch, step) must have been taken or given up by `seek`.

        Raises: WaitTimeout, StagingError, LoaderClosed; whatever a thread raised that no sample is to blame for.
        """
        self._check_usable()
        begin = self._clock()
        self._staging.poll_held()
        key = (epoch, step)
        self._consumer_waits = (epoch, step, begin)
        reported = 0
        try:
            while key not in self._arrived:
                self._make_room()
                waited = self._clock() - begin
                if self._timeout_seconds is not None and waited >= self._timeout_seconds:
                    raise WaitTimeout(self._consumer_line())
                if waited >= self._patience_seconds * (reported + 1):
                    reported += 1
                    self._say(self._consumer_line())
                with contextlib.suppress(Empty):
                    self._receive(self._whole.get(timeout=self._pause_seconds(waited, reported)))
        finally:
            self._consumer_waits = None
        ready = self._arrived.pop(key)
        self._post(lambda _: self._scheduler.taken(ready.batch))
        return ready

    def free(self, slot: int) -> None:
        """A slot may be filled again. Neither blocks nor raises; any thread may call it at any time."""
        self._post(partial(self._scheduler.slot_freed, slot))

    def seek(self, epoch: int, step: int) -> None:
        """Give up the batches before (epoch, step)."""
        self._check_usable()
        self._wanted = (epoch, step)
        for key in [key for key in self._arrived if key < (epoch, step)]:
            del self._arrived[key]
        self._post(partial(self._scheduler.seek, epoch, step))

    def close(self) -> None:
        """Stop all threads and wait for them. Twice is harmless.

        A read that hangs in the store cannot be stopped; after 5 s a warning names it and its thread is left.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        for _ in range(len(self._threads) - self._decoders):
            self._reads.put(None)
        for _ in range(self._decoders):
            self._loads.put(None)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        waits.unregister(self)
        if self._reading and any(thread.is_alive() for thread in self._threads):
            stuck = "; ".join(self._reading_lines())
            warnings.warn(f"closed while the store hangs: {stuck}", RuntimeWarning, stacklevel=2)
            return
        self._work.close()

    def waits(self) -> list[str]:
        """Return a line for each wait under way (see `flow.waits`)."""
        lines = [self._consumer_line()] if self._consumer_waits is not None else []
        return lines + self._reading_lines()

    # The consumer's side

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise LoaderClosed(
                f"this loader was started in process {self._pid} and its threads do not exist in the forked process "
                f"{os.getpid()}: make a loader of its own there, after the fork"
            )
        if self._closed:
            raise LoaderClosed("this loader is closed: make a new one to read on")

    def _receive(self, message: Ready | BaseException) -> None:
        if isinstance(message, BaseException):
            raise message
        if (message.epoch, message.step) >= self._wanted:
            self._arrived[message.epoch, message.step] = message

    def _make_room(self) -> None:
        """Keep a slot in the workers' hands, as far as the memory limit lets."""
        staging = self._staging
        if staging.lent < len(staging) or staging.is_held:
            return
        self.free(staging.grow())

    def _pause_seconds(self, waited: float, reported: int) -> float:
        if self._staging.is_held:
            self._staging.poll_held()
            return _POLL_HELD_SECONDS
        pause = self._patience_seconds * (reported + 1) - waited
        if self._timeout_seconds is not None:
            pause = min(pause, self._timeout_seconds - waited)
        return min(max(pause, 0.001), 60.0)

    def _consumer_line(self) -> str:
        if self._consumer_waits is None:
            return "the training waits for nothing"
        epoch, step, since = self._consumer_waits
        now = self._clock()
        line = f"the training waits for the batch of epoch {epoch}, step {step} since {now - since:.1f} s"
        reading = sorted(self._reading.items(), key=lambda entry: entry[1][1])
        if reading:
            _, (sample, begin) = reading[0]
            line += f"; longest under way: sample {sample}, {self._work.describe(sample)}, for {now - begin:.1f} s"
        return f"{line}; {len(reading)} reads in flight on {self._work.place}; {self._how_reads_fare()}"

    def _how_reads_fare(self) -> str:
        recent = sorted(self._recent_read_seconds)
        if not recent:
            return "no read has ended yet"
        median, slowest = recent[len(recent) // 2], recent[-1]
        return f"the last {len(recent)} reads took {median * 1e3:.1f} ms (median), {slowest * 1e3:.1f} ms (slowest)"

    def _reading_lines(self) -> list[str]:
        now = self._clock()
        return [
            f"thread {worker} reads sample {sample}, {self._work.describe(sample)}, since {now - begin:.1f} s"
            for worker, (sample, begin) in sorted(self._reading.items())
        ]

    # The workers' side

    def _post(self, event: Callable[[float], list[Instruction] | None]) -> None:
        self._inbox.append(event)
        self._loads.put(True)

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
            finally:
                self._lock.release()

    def _hand_out(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case Read():
                self._reads.put(instruction)
            case Load():
                self._loads.put(instruction)
            case Ready():
                self._whole.put(instruction)
            case Staged():
                self._ring.record(
                    Kind.SLOT, instruction.due_seconds, now, epoch=instruction.epoch, step=instruction.step
                )

    def _run(self, loop: Callable[[int, Ring], None], worker: int) -> None:
        try:
            loop(worker, self._recorder.ring(worker))
        except BaseException as error:  # raised at the consumer, by `take`
            self._whole.put(error)

    def _run_reader(self, worker: int, ring: Ring) -> None:
        while (read := self._reads.get()) is not None and not self._closed:
            begin = self._clock()
            self._reading[worker] = (read.sample, begin)
            try:
                read.payload = self._work.read(read)
            except Exception as error:
                self.failures[read.sample] = error
                self._inbox.append(partial(self._scheduler.read_failed, read))
            else:
                end = self._clock()
                self._recent_read_seconds.append(end - begin)
                ring.record(Kind.READ, begin, end, read.sample, read.nbytes, read.epoch, read.step, SOURCE)
                self._inbox.append(partial(self._scheduler.read_done, read, end - begin))
            finally:
                del self._reading[worker]
            self._drive()

    def _run_decoder(self, worker: int, ring: Ring) -> None:
        while (load := self._loads.get()) is not None and not self._closed:
            if isinstance(load, Load):
                sample = next((item.sample for item in load.items if item.origin == SOURCE), None)
                if sample is not None:
                    self._reading[worker] = (sample, self._clock())
                result = self._work.load(load, ring)
                self._reading.pop(worker, None)
                for item, error in result.failed:
                    self.failures[item.sample] = error
                failed = [item for item, _ in result.failed]
                self._inbox.append(partial(self._scheduler.load_done, load, failed, result.read_seconds))
            self._drive()
