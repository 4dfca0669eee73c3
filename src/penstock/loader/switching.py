"""Threads run a user's Python code, until it shows that worker processes are faster: workers="auto".

    threads ── they leave processors idle, and the training waits ──> processes start, threads continue
            ── all of them are ready ──> processes and threads take turns ──> the faster ones, for good
            ── what they would need cannot be copied ──> threads, for good
            ── a copy makes other samples of a source ──> threads, for good

Either gives the same batches, so that a Load may be done by either. A copy of Python code may do something else: it has
no global that the program set, and does not follow changes of objects. So threads decode the first Loads that processes
have decoded, and one of many from there on, again: what a batch has is theirs, and a difference in numbers, text or
JSON ends the processes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClosedError, DataError
from penstock.flow.engine import Engine
from penstock.flow.lock_use import LockUse
from penstock.flow.pieces import Pieces
from penstock.flow.staging import Field
from penstock.flow.work import Brought, Fetcher, FetcherOver, Request
from penstock.loader.processes import PROCESS_LOAD_SECONDS, THREADS_A_PROCESS, Processes, reads_here
from penstock.loader.structure import is_same
from penstock.loader.worker import MovableDecoder
from penstock.policy import Load
from penstock.units import format_count

# Threads find their number first. A run that is over sooner is not worth the seconds that processes take to start.
_LEAST_SECONDS, _LEAST_LEFT_SECONDS = 4.0, 20.0
_LOOK_SECONDS = 1.0
# Of the Loads of a window, so many that began while the training waited.
_WAITED_SHARE = 0.5
# Processors that threads use while all have work: less, and they wait for a store; more, and nothing can be gained.
_LEAST_PROCESSORS, _MOST_SHARE = 0.6, 0.8
# What a sample takes of a processor beyond what a thread takes for it, where a process makes it: seeding generators,
# sending its Load and the answer. Measured, as processor time of all processes per sample less that with one thread, in
# turns: 7 us for samples of 8 us, 10 us for those of 22 us, be they 256 bytes or 8 KB; 19 us for 50 us and a text.
_HANDOVER_SECONDS = 10e-6
# Then threads and processes take turns of so long, whose beginnings do not count, in so many pairs: other programs
# change rates as much as either does.
_TURN_SECONDS, _BEGINNING_SECONDS, _LEAST_PAIRS, _MOST_PAIRS = 2.0, 0.5, 2, 4
# Rates that decide before the last pair, and after it.
_CLEAR, _WORTH = 1.4, 1.1
# Loads of processes that are compared at first, all of them; and then one of so many.
_COMPARED, _COMPARED_EVERY = 8, 64


class Switching(FetcherOver):
    """A `Fetcher` and a `Decoder` whose work threads or worker processes do.

    make: makes the processes, and raises ConfigError where what they need cannot be copied.
    samples: that the run has at most.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        decoder: MovableDecoder,
        make: Callable[[int], Processes],
        report: Callable[[str], None],
        *,
        cpus: int,
        samples: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fetcher)
        self._decoder, self._reads_here = decoder, reads_here(fetcher)
        self._make, self._report = make, report
        self._engine: Callable[[], Engine | None] = lambda: None
        self._cpus, self._samples, self._clock = cpus, samples, clock
        self._threads = threading.local()
        #: Guards all that follows, but for what one thread alone looks at, while it has `_looking`.
        self._lock = threading.Lock()
        self._processes: Processes | None = None
        self._in_use = False
        self._inside = self._loaded = self._loads = self._waited = 0
        self._looking = threading.Lock()
        self._began: float | None = None
        self._was_waited_for = False
        #: When it was looked at last, and what had been loaded by then; seconds and samples of the window.
        self._looked, self._looked_loaded = 0.0, 0
        self._window_seconds, self._window_samples = 0.0, 0
        #: The same of all time, waited for or not.
        self._all_seconds, self._all_samples = 0.0, 0
        #: Loads of a source that processes did, and those at first that threads then made the same of.
        self._done_by_processes = self._alike = 0
        #: Samples per second in each turn, of threads and of processes.
        self._rates: tuple[list[float], list[float]] = [], []
        self._starting: threading.Thread | None = None
        #: Whether it is decided for good, and whether nothing may start any more.
        self._is_settled = self._is_closed = False
        #: Whether nothing is looked at, as the training makes batches itself; whether threads compute, and processes
        #: cannot help.
        self.is_paused = self._cannot_help = False
        #: Whether all processes have begun; how many processors threads used.
        self._is_ready = False
        self._processors = 0.0

    def watch(self, engine: Engine) -> None:
        """Judge by what the engine shows that calls this."""
        self._engine = weakref.ref(engine)

    def pause_if_left_to_threads(self) -> bool:
        """Look at nothing from here on if threads load and no process will by what is known now; return whether so."""
        with self._looking:
            is_left = (self._is_settled and not self._in_use) or (
                self._cannot_help and self._starting is None
            )
            self.is_paused = self.is_paused or is_left
        return is_left

    def pause(self, is_paused: bool) -> None:
        """Look at nothing from here on, as threads do not do all of the work; or begin anew to look."""
        with self._looking:
            self.is_paused = is_paused
            self._looked, self._looked_loaded, self._was_waited_for = self._clock(), self._loaded, False
            self._begin_window()

    # As a fetcher

    def fetch(self, request: Request) -> list[Any] | Pieces:
        """See `Fetcher`. What fetches a Load of a data set decodes it, too; bytes are read here."""
        if self._reads_here:
            return self._fetcher.fetch(request)
        self._threads.chosen = chosen = self._choose()
        return (self._fetcher if chosen is None else chosen).fetch(request)

    def _choose(self) -> Processes | None:
        """Return the processes that do the Load at hand; None where the calling thread does it."""
        if not self._is_settled and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        with self._lock:
            chosen = self._processes if self._in_use else None
            self._inside += chosen is not None
        return chosen

    def end_waits(self) -> None:
        self._is_closed = True
        super().end_waits()
        if self._processes is not None:
            self._processes.end_waits()

    def close(self) -> None:
        """End the processes. No thread runs any more but the one that starts them. Twice is harmless."""
        self.end_waits()
        if self._starting is not None and self._starting is not threading.current_thread():
            self._starting.join()
        if self._processes is not None:
            self._processes.close()
        super().close()

    # As a decoder

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._decoder.fields

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> NDArray[np.uint8] | None:
        return self._decoder.place_of(rows, arrays)

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `Decoder`."""
        chosen: Processes | None = self._choose() if self._reads_here else self._threads.chosen
        try:
            if chosen is not None and self._reads_here:
                return self._checked(chosen, load, brought, arrays, at)
            decoder = self._decoder if chosen is None else chosen
            return decoder.decode(load, brought, arrays, at)
        finally:
            with self._lock:
                self._loaded += brought.ids.size
                self._inside -= chosen is not None
                is_left = chosen is not None and self._is_settled and not self._in_use and not self._inside
            if is_left and chosen is not None:
                chosen.close_processes()

    def _checked(
        self,
        processes: Processes,
        load: Load,
        brought: Brought,
        arrays: tuple[NDArray[Any], ...],
        at: Callable[[int], None],
    ) -> list[tuple[int, Exception]]:
        """Have a process decode a Load of bytes; return which samples failed, as `Decoder.decode`.

        A thread decodes those again that failed there, and all of a Load that is compared.
        """
        failed, theirs = processes.done(load, brought, at)
        with self._lock:
            count, self._done_by_processes = self._done_by_processes, self._done_by_processes + 1
            is_compared = self._alike < _COMPARED or count % _COMPARED_EVERY == 0
        in_process = dict(failed)
        which = list(range(brought.ids.size)) if is_compared else sorted(in_process)
        if not is_compared:
            self._decoder.put(load.slot, brought.rows, theirs)
        if not which:
            return failed
        rows = [brought.rows[index] for index in which]
        bits = [_bits(arrays, row) for row in rows]
        again = Brought(rows, brought.ids[which], [brought.data[index] for index in which])
        decoder = self._decoder.apart()
        in_thread = {which[index]: error for index, error in decoder.decode(load, again, arrays, at)}
        ours = decoder.take(load.slot, rows)
        self._decoder.put(load.slot, rows, ours)
        for index, row, its in zip(which, rows, bits, strict=True):
            error = in_process.get(index)
            # A process has a part of the memory for decoding, and what takes more than that is DataError there alone.
            if index in in_thread or isinstance(error, DataError):
                is_right = index not in in_thread or error is not None
            else:
                is_right = error is None and its == _bits(arrays, row)
            if not is_right:
                what = "makes other values" if error is None else f"has {type(error).__name__}: {error}"
                self._end_processes(int(brought.ids[index]), what)
                break
        else:
            if is_compared and in_process.keys() == in_thread.keys() and not is_same(theirs, ours):
                self._end_processes(int(brought.ids[0]), "makes other text or objects in the batch")
            else:
                with self._lock:
                    self._alike += is_compared
        return sorted(in_thread.items())

    def _end_processes(self, sample: int, what: str) -> None:
        """Have threads do all from here on. what: a process does otherwise than a thread, of this sample."""
        with self._looking:
            if not self._in_use or self._is_closed:
                return
            self._is_settled, self._alike = True, 0  # Loads that processes are at are compared, too
            self._use(processes=False)
        self._report(
            f"threads from here on, as a worker process {what} of {self._fetcher.describe(sample)}: it has a copy of "
            "the transforms, which follows neither globals of the program nor later changes"
        )

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        return self._decoder.finish(slot, arrays, rows)

    # Which of them

    def _look(self) -> None:
        """Compare, now and then, and choose. By one thread at a time, before its Load."""
        engine, now = self._engine(), self._clock()
        if engine is None or self._is_closed or self.is_paused or self._is_settled:
            return
        if self._began is None:
            self._began = self._looked = now
        seconds, samples = now - self._looked, self._loaded - self._looked_loaded
        self._looked, self._looked_loaded = now, self._loaded
        is_trial = self._processes is not None and self._is_ready
        if is_trial and now - self._began < _BEGINNING_SECONDS:
            self._begin_window()
            return
        is_waited_for = engine.is_waited_for
        self._loads += 1
        self._waited += is_waited_for
        was_waited_for, self._was_waited_for = self._was_waited_for, is_waited_for
        if is_waited_for and was_waited_for:
            # A training that pauses, as to validate, finds batches: how long it paused says nothing about a rate.
            self._window_seconds += seconds
            self._window_samples += samples
        self._all_seconds += seconds
        self._all_samples += samples
        if (
            self._starting is None
            and now - self._began >= _LEAST_SECONDS
            and self._all_seconds > _LOOK_SECONDS
        ):
            # Also where threads keep up: whoever makes so many samples a second has no use for processes.
            is_worth = self._is_worth(_LEAST_PROCESSORS, self._all_samples / self._all_seconds)
            self._cannot_help = self._cannot_help or not is_worth
        if self._window_seconds < (_TURN_SECONDS if is_trial else _LOOK_SECONDS):
            return
        rate = self._window_samples / max(self._window_seconds, 1e-9)
        is_mostly_waited_for = self._waited >= _WAITED_SHARE * self._loads
        self._begin_window()
        if not is_mostly_waited_for:
            return
        if is_trial:
            self._judge(rate)
        elif self._starting is None and now - self._began >= _LEAST_SECONDS:
            seen, left_seconds = engine.lock_use, (self._samples - self._loaded) / max(rate, 1e-9)
            if left_seconds >= _LEAST_LEFT_SECONDS and self._may_pay(seen, rate):
                self._processors = seen.processors
                self._starting = threading.Thread(target=self._start, name="penstock-start", daemon=True)
                self._starting.start()
            else:
                is_clear = seen.is_enough or now - self._began >= 2 * _LEAST_SECONDS
                waits = (
                    seen.is_enough and seen.processors < _LEAST_PROCESSORS
                )  # for a store, as more threads may
                self._cannot_help = not waits and (is_clear or not self._is_worth(_LEAST_PROCESSORS, rate))

    def _begin_window(self) -> None:
        self._window_seconds, self._window_samples = 0.0, 0
        self._all_seconds, self._all_samples = 0.0, 0
        self._loads = self._waited = 0

    def _may_pay(self, seen: LockUse, rate: float) -> bool:
        """Whether threads compute and use fewer processors than there are, so many that handing over leaves a gain.

        It may be the lock that keeps them from using more; the trial shows it. rate: samples a second of all threads.
        """
        leaves_some = seen.is_enough and _LEAST_PROCESSORS <= seen.processors <= _MOST_SHARE * self._cpus
        return leaves_some and self._is_worth(seen.processors, rate)

    def _is_worth(self, processors: float, rate: float) -> bool:
        return _WORTH * (processors + _HANDOVER_SECONDS * rate) <= self._cpus

    def _start(self) -> None:
        """Start processes and have them do what comes, once all are ready."""
        try:
            processes = self._make(self._cpus)
            with self._lock:
                self._processes = processes
            if not self._is_closed:
                processes.start()
                self._is_ready = True
                self._use(processes=True)
        except ClosedError:
            return
        except Exception as error:
            self._is_settled = True
            if not self._is_closed:
                self._report(f"threads {self._used}, and stay: {error}")

    @property
    def _used(self) -> str:
        return f"that had work used {self._processors:.2f} of {self._cpus} processors"

    def _use(self, *, processes: bool) -> None:
        """Have Loads that begin from here on done by processes, or by threads."""
        engine = self._engine()
        if engine is None or self._is_closed:
            return
        if processes:
            engine.fix_threads(THREADS_A_PROCESS * self._cpus, PROCESS_LOAD_SECONDS)
        else:
            engine.fix_threads(None)
        with self._lock:
            self._in_use = processes
            self._began = self._clock()
            left = self._processes if self._is_settled and not (processes or self._inside) else None
        if left is not None:
            left.close_processes()

    def _judge(self, rate: float) -> None:
        """Take note of a turn's rate; choose, or have the others take theirs."""
        self._rates[self._in_use].append(rate)
        of_threads, of_processes = self._rates
        if len(of_threads) < len(of_processes) or not of_processes:
            self._use(processes=not self._in_use)
            return
        ratio = sum(of_processes) / max(sum(of_threads), 1e-9)
        least = _LEAST_PAIRS if not 1 / _CLEAR < ratio < _CLEAR else _MOST_PAIRS
        if len(of_threads) < least:
            self._use(processes=True)
            return
        self._is_settled, is_worth = True, ratio >= _WORTH
        self._use(processes=is_worth)
        count = format_count(self._cpus, "worker process")
        self._report(
            f"threads {self._used}; {count} load {ratio:.2f} x as fast: {'processes' if is_worth else 'threads'} from "
            "here on"
        )


def _bits(arrays: tuple[NDArray[Any], ...], row: int) -> list[bytes]:
    return [array[row : row + 1].tobytes() for array in arrays]
