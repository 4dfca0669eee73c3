"""Whether threads wait for the interpreter's lock, known from two observations.

Threads that run Python code take turns, so that together they use one processor, however many have work. Threads that
wait for a store may use as little. But they leave the lock free: a thread that releases it and asks for it again gets
it at once, where Python code of another thread keeps it for milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

#: A thread asks so often: a few of hundreds of samples then pay for it, with 0.1 ms at most where the lock is free.
ASK_EVERY_SECONDS = 0.02
#: So often where nothing is decided by it, for the trace alone: a wait is judged by half a second before it.
ASK_FOR_TRACE_SECONDS = 0.1
#: A thread is kept from the lock that waits as long for it. It gets it after 5 ms at the latest, unless others want it
#: too.
KEPT_SECONDS = 1e-3
#: A single call holds the lock that keeps it for so long: where threads take turns, each has it for 5 ms.
HELD_SECONDS = 50e-3
# Fewer say nothing.
_LEAST_ASKED = 10
#: From this share of the times that threads asked on, it matters that they were kept from the lock. Measured with two
#: threads on two processors: 0.54 to 0.79 where both run Python code, 0.02 where each does so half of the time, 0.00
#: where they wait or compute without the lock.
KEPT_SHARE = 0.3
# Of a thread's time: where it did not compute for less than this, it is not asked whether it waited for a processor.
_NOTABLE_SHARE, _NOTABLE_SECONDS = 0.1, 300e-6
# Of one processor: more is used where code works without the lock; less where another thread than these keeps it.
_LEAST_PROCESSORS, _MOST_PROCESSORS = 0.6, 1.15
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_pread.restype = ctypes.c_ssize_t
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class RunDelay:
    """How long a thread that could run waited for a processor, which other programs may want, too.

    schedstat: of the thread that makes it; the kernel counts there, in nanoseconds, as the second number. None: such
        waits are not looked at.
    """

    def __init__(self, schedstat: Path | None = _SCHEDSTAT) -> None:
        self._number, self._text = -1, ctypes.create_string_buffer(96)
        if schedstat is not None:
            with contextlib.suppress(OSError):
                self._number = os.open(schedstat, os.O_RDONLY | os.O_CLOEXEC)
        self._known_seconds, self._has_waited = self.seconds(), True
        #: What `left_of` has taken from anything so far.
        self.taken_seconds = 0.0

    def seconds(self) -> float:
        """Return the sum so far; 0 where the kernel does not count."""
        if self._number < 0:
            return 0.0
        try:
            # Python's own `pread` would release the lock for 2 us, and then wait until others release it.
            count = _pread(self._number, self._text, len(self._text), 0)
            return int(self._text.raw[: max(count, 0)].split()[1]) * 1e-9
        except (IndexError, ValueError):
            return 0.0

    def begin(self, *, surely: bool = True) -> None:
        """Take note that work begins. surely: also where the work before hardly waited for anything."""
        if surely or self._has_waited:
            self._known_seconds = self.seconds()

    def left_of(self, wall_seconds: float, cpu_seconds: float) -> float:
        """Return what is left of some work's time without the thread's waits for a processor, as far as they matter.

        wall_seconds: that the work took, but for what `taken_seconds` grew by meanwhile. cpu_seconds: that the thread
            computed for it. Where that is nearly all, the kernel is not asked: it takes 10 us to answer, for which the
            interpreter's lock is held.
        """
        idle_seconds = wall_seconds - cpu_seconds
        self._has_waited = idle_seconds > max(_NOTABLE_SHARE * wall_seconds, _NOTABLE_SECONDS)
        if not self._has_waited:
            return wall_seconds
        known, self._known_seconds = self._known_seconds, self.seconds()
        taken_seconds = min(self._known_seconds - known, idle_seconds)
        self.taken_seconds += taken_seconds
        return wall_seconds - taken_seconds

    def close(self) -> None:
        """Close the file. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


def ask_for_lock(clock: Callable[[], float], delay: RunDelay) -> float:
    """Release the interpreter's lock and return the seconds until this thread has it back, but for its run delay.

    Below `KEPT_SECONDS`, where the thread was not kept from the lock, the kernel is not asked for the run delay.
    """
    delayed_before, begin = delay.seconds(), clock()
    time.sleep(0)
    waited_seconds = clock() - begin
    if waited_seconds < KEPT_SECONDS:
        return waited_seconds
    return max(0.0, waited_seconds - (delay.seconds() - delayed_before))


class LateWakes:
    """Notices that a thread which pauses comes back late, as a call of another one holds the interpreter's lock.

    schedstat: as for `RunDelay`.
    """

    def __init__(self, clock: Callable[[], float], schedstat: Path | None = _SCHEDSTAT) -> None:
        self._clock, self._schedstat = clock, schedstat
        self._thread, self._delay, self._delayed_seconds, self._looked = 0, RunDelay(None), 0.0, -math.inf

    def begin(self) -> None:
        """Take note that the calling thread will pause. The kernel is asked for its run delay every 50 ms at most."""
        now, thread = self._clock(), threading.get_ident()
        if thread != self._thread:
            self._delay.close()
            self._thread, self._delay = thread, RunDelay(self._schedstat)
        elif now < self._looked + HELD_SECONDS:
            return
        self._looked, self._delayed_seconds = now, self._delay.seconds()

    def late_seconds(self, due: float) -> float:
        """Return for how long the thread was kept from the lock after a pause; 0 below `HELD_SECONDS`.

        due: the clock's reading at the end of the pause. Waits for a processor are not counted.
        """
        late = self._clock() - due
        if late >= HELD_SECONDS:
            late -= max(0.0, self._delay.seconds() - self._delayed_seconds)  # 0 once it is closed
        return late if late >= HELD_SECONDS else 0.0

    def close(self) -> None:
        """Close the file of the run delay. Idempotent."""
        self._delay.close()


class LockUse(NamedTuple):
    """What was seen while at least two threads had work at once, in sums.

    seconds: for how long they had. cpu_seconds: what they computed in that time, all together.
    asked: how often one of them released the lock and asked for it again. kept: how often it was kept from it.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    asked: int = 0
    kept: int = 0

    def plus(self, seconds: float, cpu_seconds: float, asked_seconds: float | None) -> LockUse:
        """Return the sums with one Load more. asked_seconds: how long its thread asked for the lock, if it did."""
        has_asked = asked_seconds is not None
        was_kept = asked_seconds is not None and asked_seconds >= KEPT_SECONDS
        return LockUse(
            self.seconds + seconds,
            self.cpu_seconds + cpu_seconds,
            self.asked + has_asked,
            self.kept + was_kept,
        )

    def since(self, before: LockUse) -> LockUse:
        """Return what was added to the sums."""
        return LockUse(
            self.seconds - before.seconds,
            self.cpu_seconds - before.cpu_seconds,
            self.asked - before.asked,
            self.kept - before.kept,
        )

    @property
    def processors(self) -> float:
        """How many processors the threads used on average."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    @property
    def is_enough(self) -> bool:
        """Whether there is enough to judge by."""
        return self.asked >= _LEAST_ASKED and self.seconds > 0.0

    def is_by_lock(self, cpus: int) -> bool:
        """Whether it was the interpreter's lock that let the threads use one of `cpus` processors only."""
        return (
            cpus > 1
            and self.is_enough
            and self.kept >= KEPT_SHARE * self.asked
            and _LEAST_PROCESSORS <= self.processors <= _MOST_PROCESSORS
        )
