"""Batches on their way to a device: copied ahead of the training by a thread of their own.

    engine ── complete batch ──> copier ── Device.copy ──> batch on the device ──> the consumer
       ^                          │  ^                                                 │
       └── slot, after the copy ──┘  └───────── "work before here has passed" ─────────┘

The copier asks the device for each copy on a stream of its own, in the order of the plan, and gives the batch to the
consumer at once: the consumer's stream, not its thread, waits for the copy. Once the copy has ended the copier drops
the arrays, which frees the slot. How many batches are on the device at once is a rule of `policy.device_depth`; one
counts until the work that the consumer has enqueued on it has passed, also where the consumer runs ahead of the device.

A batch that lacks samples waits for the consumer, who decides about it and moves it (`Device.move`).
The consumer only puts messages: Ctrl-C may stop it anywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.errors import StagingError
from penstock.policy import device_depth
from penstock.units import format_bytes

Place = tuple[int, int]
#: How much a new observation of a time counts.
_NEW_SHARE = 0.1


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it, without the interpreter's lock."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """A batch that is on a device, or will be once `done` has passed.

    nbytes: that it takes there.
    """

    batch: Any
    nbytes: int
    done: Mark


class Device(Protocol):
    """Where batches go. A stream is a queue of work; each thread has a current one."""

    @property
    def name(self) -> str:
        """Name it for messages: "cuda:0"."""
        ...

    def own_stream(self) -> AbstractContextManager[object]:
        """Return a context in which a thread's current stream is that of copies."""
        ...

    def copy(self, batch: Any) -> Copied:
        """Ask for a copy of a batch on the current stream, without waiting for it. Its arrays stay until it has ended.

        Raises: StagingError if the device has no memory for it.
        """
        ...

    def hand_over(self, copied: Copied) -> Any:
        """Have the current stream wait for a copy, and its memory for the current stream; return the batch."""
        ...

    def move(self, batch: Any) -> Any:
        """Return a copy of a batch by the current stream, for work on the same stream. Raises: as `copy`."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind all that is enqueued on the current stream."""
        ...


class Batch(Protocol):
    """A complete batch of the engine."""

    arrays: tuple[NDArray[Any], ...]
    failed: tuple[int, ...]
    copied: Copied | None
    #: When there was space on the device for it, if it had to wait for that; else 0.
    fitted: float


class CopyAhead:
    """Copies complete batches to a device before the consumer asks for them; see the module.

    One thread runs it (`run`); any thread may call the rest.

    limit_bytes: of the device, for batches that are there.
    make: makes of a complete batch what is copied.
    following: the place after one, in the plan's order.
    report: gets a line when the device holds fewer batches than it might.
    """

    def __init__(
        self,
        device: Device,
        limit_bytes: int,
        *,
        make: Callable[[Any], Any],
        following: Callable[[int, int], Place],
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self.device, self.limit_bytes = device, limit_bytes
        self._make, self._following, self._clock, self._report = make, following, clock, report
        #: Told by other threads, done by the copier; None ends it.
        self._messages: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        #: Where the copier is; None before it is known.
        self._next: Place | None = None
        #: Batches on the device that the consumer's work may still need: place and bytes, oldest first.
        self._live: deque[tuple[Place, int]] = deque()
        #: What was handed out before a place is free behind a mark; oldest first.
        self._passed: deque[tuple[Place, Mark]] = deque()
        #: Copies that may be under way, oldest first, with what they read from and since when.
        self._under_way: deque[tuple[Batch, Any, Mark, float]] = deque()
        #: Whether the next batch is complete and has no space.
        self._is_crowded = False
        #: The most batches that the device has memory for, as far as that is known.
        self._most = math.inf
        #: Of the largest batch so far; of a copy and a step, smoothed; when the latest copy ended and step began.
        self._largest_bytes = 0
        self._copy_seconds = self._step_seconds = 0.0
        self._ended = self._asked = 0.0

    def go_to(self, place: Place) -> None:
        """Copy from a place on, if the copier is not further."""
        self._messages.put(partial(self._go_to, place))

    def arrived(self) -> None:
        """Look for complete batches."""
        self._messages.put(_look)

    def passed(self, place: Place) -> None:
        """Have batches before a place count no longer, once what is enqueued on the current stream by now has passed.

        Called before the consumer waits for the batch of that place.
        """
        self._messages.put(partial(self._note_passed, place, self.device.mark(), self._clock()))

    def end(self) -> None:
        """Let `run` return."""
        self._messages.put(None)

    def run(self, arrived: Callable[[Place], Batch | None], wake: Callable[[], None]) -> None:
        """Copy until `end`. arrived: returns the complete batch of a place. wake: called when one was copied."""
        with self.device.own_stream():
            try:
                while self._go_on(arrived, wake):
                    pass
            finally:
                while self._under_way:
                    self._finish_oldest()

    def _go_on(self, arrived: Callable[[Place], Batch | None], wake: Callable[[], None]) -> bool:
        """Do the next thing that there is to do; return False at the end."""
        while self._under_way and self._under_way[0][2].query():
            self._finish_oldest()
        if self._copy_next(arrived):
            wake()
            return True
        try:
            message = self._messages.get_nowait()
        except Empty:
            if self._under_way:
                self._finish_oldest()
                return True
            if self._is_crowded and self._passed:
                self._passed[0][1].synchronize()
                return True
            message = self._messages.get()
        if message is not None:
            message()
        return message is not None

    def _go_to(self, place: Place) -> None:
        self._next = place if self._next is None else max(self._next, place)

    def _note_passed(self, place: Place, mark: Mark, asked: float) -> None:
        if self._asked:
            self._step_seconds = _smoothed(self._step_seconds, asked - self._asked)
        self._asked = asked
        self._passed.append((place, mark))
        self._go_to(place)  # past a batch that the consumer has moved itself

    def _copy_next(self, arrived: Callable[[Place], Batch | None]) -> bool:
        """Ask for one more copy, if there is a complete batch and space; return whether that was done."""
        batch = None if self._next is None else arrived(self._next)
        was_crowded, self._is_crowded = self._is_crowded, False
        if self._next is None or batch is None or batch.failed:
            return False
        if not self._fits():
            self._is_crowded = True
            return False
        made = self._make(batch)
        try:
            copied = self.device.copy(made)
        except StagingError:
            if not self._live and not self._under_way:
                raise
            if self._most == math.inf:
                size = format_bytes(self._largest_bytes)
                self._report(
                    f"{self.device.name} has no memory for one more batch of {size}: fewer are copied ahead from now on"
                )
            self._is_crowded, self._most = True, max(1, len(self._live))
            return False
        if copied.nbytes > self.limit_bytes:
            raise StagingError(
                f"a batch takes {format_bytes(copied.nbytes)} on {self.device.name}, and batches may take "
                f"{format_bytes(self.limit_bytes)} there: give more device_memory=, or smaller batches"
            )
        self._largest_bytes = max(self._largest_bytes, copied.nbytes)
        self._live.append((self._next, copied.nbytes))
        self._under_way.append((batch, made, copied.done, self._clock()))
        if was_crowded:
            batch.fitted = self._clock()
        batch.copied = copied
        self._next = self._following(*self._next)
        return True

    def _fits(self) -> bool:
        """Return whether the device has space for one more batch, by what it has passed."""
        while self._passed and self._passed[0][1].query():
            place, _ = self._passed.popleft()
            while self._live and self._live[0][0] < place:
                self._live.popleft()
        most = min(self._most, device_depth.wanted(self._copy_seconds, self._step_seconds))
        live_bytes = [nbytes for _, nbytes in self._live]
        return device_depth.may_copy(live_bytes, self._largest_bytes, self.limit_bytes, most)

    def _finish_oldest(self) -> None:
        """Wait for a copy, and release what it was made from: its slot is free."""
        batch, _, done, begun = self._under_way[0]
        done.synchronize()
        batch.arrays = ()
        self._under_way.popleft()
        now = self._clock()
        self._copy_seconds = _smoothed(self._copy_seconds, now - max(begun, self._ended))
        self._ended = now


def _look() -> None:
    """There may be something to do."""


def _smoothed(known: float, seen: float) -> float:
    return known + _NEW_SHARE * (seen - known) if known else seen
