"""Calls to a store that may never answer, made on threads which whoever waits for them can leave."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from penstock.errors import no_thread
from penstock.queues import get_within
from penstock.report import print_report

T = TypeVar("T")
R = TypeVar("R")

_SERIAL_CALLS = 4
_THREADS = 16
#: For threads to end whose caller was interrupted: a store that answers has done so by then.
_LEAVE_SECONDS = 1.0
#: A wait for no answer is reported after so long, and again at twice the time; that for one that fails sooner.
_PATIENCE_SECONDS, _FAILING_SECONDS = 60.0, 5.0


class _Left(BaseException):
    """Raised in a thread whose answers nobody waits for any more."""


class Calls:
    """Makes calls to a store while the caller's thread waits, where Ctrl-C and `watch` reach it.

    A call that hangs in the kernel cannot be stopped. When the caller is interrupted, no call is begun any more, and a
    thread that hangs is left, with a warning that names what it asked for; it does not keep the process from its end.

    watch: called in the waiting thread; returns the seconds after which it wants to be called again, None for never.
        What it raises ends the wait. Unless given, long waits are reported.
    in_own_thread: whether the caller's thread makes the calls, as a debugger wants it; nothing is watched then.
    report: gets lines about what is opened: a long listing, a catalog that is damaged.
    """

    def __init__(
        self,
        watch: Callable[[], float | None] | None = None,
        *,
        in_own_thread: bool = False,
        report: Callable[[str], None] = print_report,
    ) -> None:
        self._watch = watch or self._report_wait
        #: Says which retry is waited for, of a store that has some; see `Objects.failing`.
        self.failing: Callable[[], str] = str
        self._reported_seconds = 0.0
        self.report = report
        self._in_own_thread = in_own_thread
        #: By thread: what it asks for, and since when. Each thread writes its own entry.
        self._at: dict[int, tuple[str, float]] = {}
        self._last_seconds = time.monotonic()
        self._is_left = False

    def at(self, place: str) -> None:
        """Say what this thread asks for next: a folder, a file, a sample. Called by the calls themselves."""
        if self._is_left:
            raise _Left
        self._last_seconds = time.monotonic()
        self._at[threading.get_ident()] = place, self._last_seconds

    @property
    def silent_seconds(self) -> float:
        """How long no thread has got an answer."""
        return time.monotonic() - self._last_seconds

    def line(self) -> str:
        """Name the retry that is waited for, else the call under way that is the longest; empty where there is none."""
        if failing := self.failing():
            return failing
        under_way = sorted(self._at.copy().values(), key=lambda entry: entry[1])
        if not under_way:
            return ""
        place, since = under_way[0]
        others = f"; {len(under_way)} calls under way" if len(under_way) > 1 else ""
        return f"{place}, asked for {time.monotonic() - since:.1f} s ago{others}"

    def _report_wait(self) -> float:
        failing, silent_seconds = self.failing(), self.silent_seconds
        if silent_seconds < self._reported_seconds:  # it has answered since
            self._reported_seconds = 0.0
        due_seconds = max(_FAILING_SECONDS if failing else _PATIENCE_SECONDS, 2 * self._reported_seconds)
        if silent_seconds >= due_seconds and (line := self.line()):
            self._reported_seconds = silent_seconds
            self.report(f"waits for {line}")
        return _FAILING_SECONDS

    def one(self, place: str, call: Callable[[], R]) -> R:
        """Return what a call returns. Raises: as `each`."""

        def ask(_: None) -> R:
            self.at(place)
            return call()

        return self.each(ask, [None])[0]

    def each(
        self,
        call: Callable[[T], R],
        items: Iterable[T],
        *,
        look: Callable[[], float | None] = lambda: None,
        threads_at_once: int = 1,
    ) -> list[R]:
        """Return call(item) of each item, in their order, from several threads where a call waits more than it works.

        Listing a local folder is bound by the processor and gets slower by threads; on a network file system
        nearly all of it is waiting. The first few calls tell.
        look: as `watch`, for these calls. threads_at_once: to begin with; more than 1 where calls hold no interpreter's
            lock.
        Raises: what the earliest item's call raised that raised; what `watch` raises; DataError if no thread can be
            started.
        """
        if self._in_own_thread:
            answers = []
            for item in items:
                answers.append(call(item))
                look()
            return answers
        todo = deque(enumerate(items))
        results: dict[int, R] = {}
        errors: dict[int, BaseException] = {}
        #: True: more threads would help. False: a thread has ended.
        progress: SimpleQueue[bool] = SimpleQueue()
        threads: list[threading.Thread] = []
        self._last_seconds = time.monotonic()

        def start(is_first: bool) -> None:
            work = partial(self._work, call, todo, results, errors, progress, is_first)
            threads.append(threading.Thread(target=work, name=f"penstock-ask-{len(threads)}", daemon=True))
            threads[-1].start()

        try:
            try:
                start(True)
            except RuntimeError as refusal:
                raise no_thread(refusal) from refusal
            running = 1
            with contextlib.suppress(RuntimeError):  # at the limit of threads, that one does it
                for _ in range(min(threads_at_once - 1, len(todo))):
                    start(False)
                    running += 1
            while running:
                if self._wait(progress, look):
                    with contextlib.suppress(RuntimeError):  # at the limit of threads, the others do it
                        for _ in range(min(_THREADS - 1, len(todo))):
                            start(False)
                            running += 1
                else:
                    running -= 1
        except BaseException:
            self._leave(todo, threads)
            raise
        if errors:
            error = errors[min(errors)]
            errors.clear()
            try:
                raise error
            finally:
                del error  # whose traceback refers to this frame
        return [results[index] for index in range(len(results))]

    def _work(
        self,
        call: Callable[[T], R],
        todo: deque[tuple[int, T]],
        results: dict[int, R],
        errors: dict[int, BaseException],
        progress: SimpleQueue[bool],
        is_first: bool,
    ) -> None:
        began, began_working = time.perf_counter(), time.thread_time()
        try:
            while todo:
                try:
                    index, item = todo.popleft()
                except IndexError:  # another thread was faster
                    break
                try:
                    results[index] = call(item)
                except BaseException as error:
                    errors[index] = error
                    todo.clear()
                if is_first and len(results) == _SERIAL_CALLS:
                    working, elapsed = time.thread_time() - began_working, time.perf_counter() - began
                    if working <= elapsed / 2:
                        is_first = False
                        progress.put(True)
        finally:
            self._at.pop(threading.get_ident(), None)
            progress.put(False)

    def _wait(self, progress: SimpleQueue[bool], look: Callable[[], float | None]) -> bool:
        while True:
            pauses = [seconds for seconds in (self._watch(), look()) if seconds is not None]
            with contextlib.suppress(Empty):
                return get_within(progress, min(pauses, default=None))

    def _leave(self, todo: deque[tuple[int, T]], threads: list[threading.Thread]) -> None:
        self._is_left = True
        todo.clear()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            warnings.warn(f"left while a store does not answer: {self.line()}", RuntimeWarning, stacklevel=4)
