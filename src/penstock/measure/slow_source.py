"""A source slowed to the behaviour of a network file system, without root and the same for every loader."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.closing import Closeable
from penstock.errors import ClosedError
from penstock.store.group import Ids
from penstock.store.labels import Labels
from penstock.store.ranged import RangedSource
from penstock.store.source import Source
from penstock.validate import check_rate, check_seconds

#: What a read is woken too late is made up for up to here; a process that was stopped for longer reads on as it is.
_MOST_LATE_SECONDS = 0.2


class SlowSource(Closeable):
    """Another source behind a latency per open and per read, which overlap, and one wire, which all share.

    A read waits `open_seconds + read_seconds`, then its bytes pass the wire after those of every read that
    came to it earlier, whichever thread or process asked. Copies that worker processes get by fork or by
    pickle share the wire with this one. A failed read costs nothing. Where the host wakes a thread too late from a
    read, its next one began as much earlier, if it follows within a latency: a reader that asks again and again gets
    what the store gives, however late it is woken each time.
    It holds two descriptors until `close`, or until nothing refers to it any more.

    source: what is slowed; its own time runs within the latency and is not added.
    open_seconds, read_seconds: finite, zero or more. bytes_per_second: of the wire, above zero; inf is no
        wire.
    clock, sleep: seconds on a clock that all processes share; for tests.
    Raises: ConfigError naming the argument.
    """

    def __init__(
        self,
        source: Source,
        open_seconds: float,
        read_seconds: float,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_seconds("open_seconds", open_seconds)
        check_seconds("read_seconds", read_seconds)
        check_rate("bytes_per_second", bytes_per_second)
        self._source = source
        self._latency_seconds = open_seconds + read_seconds
        self._wire = SharedWire(bytes_per_second)
        self._clock = clock
        self._sleep = sleep
        # By thread: when its last read was over, and how much later it came to run.
        self._ends: dict[int, tuple[float, float]] = {}

    @property
    def sizes_bytes(self) -> NDArray[np.int64]:
        return self._source.sizes_bytes

    @property
    def labels(self) -> Labels:
        return self._source.labels

    @property
    def classes(self) -> tuple[str, ...]:
        return self._source.classes

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"a slowed {self._source!r}"

    def describe(self, sample: int) -> str:
        return self._source.describe(sample)

    def read(self, sample: int) -> bytes:
        asked = self._clock()
        data = self._source.read(sample)
        self._wait_for_wire(asked, len(data))
        return data

    def read_into(self, sample: int, buffer: memoryview) -> int:
        asked = self._clock()
        size = self._source.read_into(sample, buffer)
        self._wait_for_wire(asked, size)
        return size

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids] | None:
        return self._ranged.extents(ids) if hasattr(self._source, "extents") else None

    def unit_bytes(self, units: Ids) -> Ids:
        return self._ranged.unit_bytes(units)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        for index, buffer in enumerate(into):
            asked = self._clock()
            self._ranged.read_ranges(unit, ranges[index : index + 1], [buffer])
            self._wait_for_wire(asked, len(buffer))

    @property
    def _ranged(self) -> RangedSource:
        return cast(RangedSource, self._source)

    def close(self) -> None:
        """Give back the memory that holds the wire's state; copies in other processes keep theirs."""
        self._wire.close()

    def _wait_for_wire(self, asked: float, size: int) -> None:
        now, thread = self._clock(), threading.get_ident()
        woken, late = self._ends.get(thread, (asked, 0.0))
        if asked - woken < self._latency_seconds:
            now -= late
            asked -= late
        through = self._wire.reserve(max(asked + self._latency_seconds, now), size)
        now = self._clock()
        if through > now:
            self._sleep(through - now)
        woken = self._clock()
        self._ends[thread] = woken, min(max(0.0, woken - through), _MOST_LATE_SECONDS)


class SharedWire:
    """The moments at which a link is free, shared by all threads and processes that hold a copy.

    The moments lie in memory that processes share. A lock of the file system guards it between processes,
    because the kernel releases that one when its owner is killed; a lock of the interpreter guards it between
    threads.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        descriptor = os.memfd_create("penstock-wire", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _MOMENTS.size)
        self._attach(descriptor)

    def reserve(self, arrival: float, size: int) -> float:
        """Reserve the wire for so many bytes, when it is first free for them; return when they are through.

        arrival: in seconds, on the clock of every other caller; may lie before that of an earlier call.
        """
        with _between_threads:
            if self._memory.closed:
                raise ClosedError("this slow source is closed; make a new one")
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                moments = _MOMENTS.unpack_from(self._memory)
                through, moments = _reserved(moments, arrival, size / self._bytes_per_second)
                _MOMENTS.pack_into(self._memory, 0, *moments)
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return through

    def __getstate__(self) -> tuple[float, str]:
        # The unpickler opens the memory through this process, which is its parent or alive for other reasons.
        return self._bytes_per_second, f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __setstate__(self, state: tuple[float, str]) -> None:
        self._bytes_per_second, path = state
        self._attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Give back this copy's share of the memory; twice is harmless."""
        with _between_threads:
            self._memory.close()
            self._close_descriptor()

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _MOMENTS.size)
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)


#: When the wire is free for good, and the begin and end of its last idle times before that.
_Moments = tuple[float, ...]
_IDLE_TIMES = 8
_MOMENTS = struct.Struct(f"{1 + 2 * _IDLE_TIMES}d")


def _reserved(moments: _Moments, arrival: float, seconds: float) -> tuple[float, _Moments]:
    """Return when the wire has carried what takes so long, and its moments after that.

    What arrives before something that was reserved earlier, as of a thread that the host woke late, uses the time that
    the wire was idle then.
    """
    free, *idle = moments
    fits = []
    for place in range(0, len(idle), 2):
        through = max(arrival, idle[place]) + seconds
        if through <= idle[place + 1]:
            fits.append((through, place))
    if fits:
        through, place = min(fits)
        idle[place + 1 : place + 1] = [through - seconds, through]
    else:
        begin = max(arrival, free)
        if begin > free:
            idle[:0] = [free, begin]
        free = through = begin + seconds
    return through, (free, *idle)[: len(moments)]


_between_threads = threading.Lock()


def _renew_lock() -> None:
    # A thread that does not exist in the child may have held it at the moment of the fork.
    global _between_threads
    _between_threads = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
