"""Recording spans while work runs: bounded memory, no lock on the way, microseconds per span.

Each thread writes into a ring of its own. One thread, whichever, drains all rings now and then; what a ring
overwrites before it was drained is counted, never waited for: a trace must not slow what it observes.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.trace.schema import NO_FLOW, NO_PEER, NO_PLACE, SPAN, Spans, join_spans

# The fields up to `place`; worker and rank, which follow, never change within a ring and are written once.
_CODES = {np.dtype(f"<{code}"): code for code in "dqQiIBb"}
_PACK = struct.Struct("<" + "".join(_CODES[SPAN[name]] for name in (SPAN.names or ())[:-2])).pack_into
_SPAN_BYTES = SPAN.itemsize
#: Ids of groups that a ring holds until they are drained: 2 MiB.
_MOST_IDS = 1 << 18


class Ring:
    """The last `capacity_spans` spans of one thread.

    Owned by two: one thread records (it alone moves `_claimed` and `_written`), one drains (it alone moves
    `_drained`). Both may run at once without a lock: the writer announces which places it is about to
    overwrite before it does so, and the drainer throws away what was overwritten while it copied.
    """

    __slots__ = (
        "_buffer",
        "_capacity",
        "_claimed",
        "_drained",
        "_groups",
        "_ids_drained",
        "_ids_written",
        "_lost",
        "_peeked",
        "_spans",
        "_written",
    )

    def __init__(self, capacity_spans: int, worker: int, rank: int) -> None:
        self._capacity = capacity_spans
        self._buffer = bytearray(capacity_spans * _SPAN_BYTES)
        self._spans: Spans = np.frombuffer(self._buffer, SPAN)
        self._spans["worker"] = worker
        self._spans["rank"] = rank
        #: Spans of which the writing began / ended / that were handed out or given up, since the start;
        #: _drained <= _written <= _claimed.
        self._claimed = 0
        self._written = 0
        self._drained = self._peeked = 0
        #: Spans overwritten before a drain copied them.
        self._lost = 0
        #: The ids of groups, by flow; how many of them came, moved by the writer, and went, by the drainer.
        self._groups: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._ids_written = 0
        self._ids_drained = 0

    def record(
        self,
        kind: int,
        start: float,
        end: float,
        sample: int = -1,
        nbytes: int = 0,
        epoch: int = 0,
        step: int = -1,
        place: int = NO_PLACE,
        samples: int = 1,
        peer: int = NO_PEER,
        flow: int = NO_FLOW,
    ) -> None:
        """Record one span.

        start, end: readings of the recorder's clock.
        sample, samples: the first sample of the group and how many they are; 0 of them where none is concerned.
        flow: what `Recorder.next_flow` returned for this group, with `AS_PLANNED` where the plan gives its samples.
        The other fields as in `penstock.trace.schema.Kind`.

        Raises: struct.error when a value does not fit its field of `SPAN`; nothing is recorded then.
        """
        written = self._written
        self._claimed = written + 1
        _PACK(
            self._buffer,
            written % self._capacity * _SPAN_BYTES,
            start,
            end,
            sample,
            nbytes,
            flow,
            epoch,
            step,
            samples,
            peer,
            kind,
            place,
        )
        self._written = written + 1

    def record_ids(self, flow: int, ids: ArrayLike) -> None:
        """Record which samples a group is, before the first span of its flow. They are copied.

        ids: int64[n]. Not kept where that many more were never drained; the group is then known by its first sample.
        """
        copied = np.array(ids, np.int64)
        if self._ids_written - self._ids_drained + copied.size > _MOST_IDS:
            return
        self._ids_written += copied.size
        self._groups.append((flow, copied))

    def drain_ids(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Return flow and ids of the groups recorded since the last time, in the order they were recorded."""
        groups = [self._groups.popleft() for _ in range(len(self._groups))]
        self._ids_drained += sum(ids.size for _, ids in groups)
        return groups

    def drain(self) -> Spans:
        """Return the spans recorded since the last drain, in the order they were recorded, as a copy."""
        copied = self.peek()
        written, intact = self._peeked, self._peeked - copied.size
        self._lost += intact - self._drained
        self._drained = written
        return copied

    def peek(self) -> Spans:
        """Return what `drain` would, and leave it there. The drainer alone may ask."""
        written = self._peeked = self._written
        first = max(self._drained, written - self._capacity)
        if first == written:
            return self._spans[:0]
        begin = first % self._capacity
        end = begin + written - first
        copied = join_spans([self._spans[begin:end], self._spans[: max(0, end - self._capacity)]])
        # What the writer has claimed by now may lie half-written in the copy's oldest places.
        intact = min(max(first, self._claimed - self._capacity), written)
        return copied[intact - first :]

    @property
    def is_half_full(self) -> bool:
        """Whether a drain is due, lest the oldest spans be overwritten or ids be left out."""
        return (
            2 * (self._written - self._drained) >= self._capacity
            or 2 * (self._ids_written - self._ids_drained) >= _MOST_IDS
        )

    @property
    def lost(self) -> int:
        """Spans overwritten before a drain copied them, those that the next drain will miss included."""
        return self._lost + max(0, self._written - self._capacity - self._drained)


class Recorder:
    """The rings of one process, and the clock that their spans are read from.

    Any thread may ask for its ring; one thread at a time drains. Memory: `capacity_spans` x 64 bytes per
    ring, taken when the ring is made, and at most 2 MiB for ids of groups.

    >>> from penstock.trace import Kind
    >>> recorder = Recorder(1024)
    >>> ring = recorder.ring(worker=0)
    >>> start = recorder.clock()
    >>> ring.record(Kind.WAIT, start, recorder.clock(), epoch=0, step=0)
    >>> len(recorder.drain()), len(recorder.drain())
    (1, 0)
    """

    def __init__(
        self, capacity_spans: int, rank: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start the trace: its origin is the clock's reading now.

        capacity_spans: spans that each ring holds until they are drained.
        rank: this process's number in the job, written into every span.
        clock: seconds, monotonic; `start` and `end` of every span are its readings.

        Raises: ConfigError when the capacity is below one or the rank does not fit 32 bits.
        """
        if capacity_spans < 1:
            raise ConfigError(
                f"capacity_spans is {capacity_spans}; a ring holds at least one span: give 1 or more"
            )
        if not 0 <= rank < 2**32:
            raise ConfigError(f"rank is {rank}; a trace stores ranks from 0 to 2**32 - 1: give one of those")
        self.clock = clock
        self.rank = rank
        self.capacity_spans = capacity_spans
        self.origin = clock()
        #: What a clock on the wall showed at the origin, with its zone.
        self.started = datetime.now().astimezone()
        self._flows = itertools.count(NO_FLOW + 1)
        self._rings: dict[int, Ring] = {}
        self._rings_lock = threading.Lock()

    def ring(self, worker: int, capacity_spans: int | None = None) -> Ring:
        """Return the ring of a worker, made at the first call. One thread at a time may record into it.

        capacity_spans: of this ring, where it should differ from the others'.

        Raises: ConfigError when `worker` does not fit 16 bits.
        """
        if not 0 <= worker < 2**16:
            raise ConfigError(
                f"worker is {worker}; a trace stores workers from 0 to 65535: number them from 0"
            )
        with self._rings_lock:
            if worker not in self._rings:
                self._rings[worker] = Ring(capacity_spans or self.capacity_spans, worker, self.rank)
            return self._rings[worker]

    def next_flow(self) -> int:
        """Return a number that no other group of this rank has: 1, 2, ... Any thread may ask."""
        return next(self._flows)

    def drain_ids(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        """Return the ids of the groups recorded in any ring since the last time, by (rank, flow).

        Those of every span that an earlier `drain` returned are among them, or were before.
        """
        return {(self.rank, flow): ids for ring in self._all_rings() for flow, ids in ring.drain_ids()}

    def drain(self) -> Spans:
        """Return the spans of all rings since the last drain, sorted by end, in seconds since the origin.

        A span is recorded when it ends, so that one that ends while a drain runs may come with the next drain. Each
        drain is sorted; several that are joined are sorted only if all work paused during each drain.
        """
        return self._in_order(join_spans(ring.drain() for ring in self._all_rings()))

    def peek(self) -> Spans:
        """Return what `drain` would, and leave it there. The thread that drains may ask."""
        return self._in_order(join_spans(ring.peek() for ring in self._all_rings()))

    def _in_order(self, spans: Spans) -> Spans:
        spans["start"] -= self.origin
        spans["end"] -= self.origin
        in_order: Spans = spans.take(np.argsort(spans["end"], kind="stable"))
        return in_order

    @property
    def dropped(self) -> int:
        """Spans that rings have overwritten before they were drained, so far."""
        return sum(ring.lost for ring in self._all_rings())

    @property
    def is_half_full(self) -> bool:
        """Whether a drain is due for any ring, see `Ring.is_half_full`."""
        return any(ring.is_half_full for ring in self._all_rings())

    @property
    def about(self) -> dict[str, str | int]:
        """What each trace says of who recorded it, and since when."""
        return {
            "started": self.started.isoformat(),
            "host": os.uname().nodename,
            "process": os.getpid(),
            "rank": int(self.rank),
        }

    def _all_rings(self) -> list[Ring]:
        with self._rings_lock:
            return list(self._rings.values())
