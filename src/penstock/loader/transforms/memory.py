"""A bound on what decoding takes, shared by the threads of a loader."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

from penstock.errors import DataError
from penstock.units import format_bytes


class Need(NamedTuple):
    """What a picture takes while it is decoded and resampled, in bytes.

    pixels, blended: in the thread's buffers of those names, which stay for the next picture.
    passing: in the decoding library and in arrays that go with the picture.
    """

    pixels: int
    blended: int
    passing: int

    @property
    def total(self) -> int:
        return self.pixels + self.blended + self.passing


class Buffers(Protocol):
    """The buffers of one thread, reused from picture to picture."""

    @property
    def kept(self) -> Need:
        """What they take now; nothing in passing."""
        ...

    def drop(self) -> None:
        """Free them all."""
        ...


class Memory(Protocol):
    """What a thread asks before it decodes."""

    def take(self, buffers: Buffers, need: Need | None) -> None:
        """Take what a picture needs, or wait for it. need: None if it is unknown."""
        ...

    def give_back(self, buffers: Buffers) -> None:
        """End a picture."""
        ...


class Counted(Exception):
    """What a picture would take. Raised by `Counter` before anything is decoded."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Counter:
    """Counts what a picture would take in place of letting it be decoded."""

    def take(self, buffers: Buffers, need: Need | None) -> None:
        assert need is not None, "only pictures of known size are counted"
        raise Counted(need.total)

    def give_back(self, buffers: Buffers) -> None:
        """Nothing was taken."""


class DecodeMemory:
    """At most `limit_bytes` for all pictures that are being decoded, and for the buffers that threads keep.

    A thread takes all that a picture needs at once, before it decodes it, and gives it back afterwards, but for its
    buffers. Where there is not enough, the buffers of threads that decode nothing are dropped, its own first, and it
    waits for others to end, in the order of asking. A thread that waits holds nothing: no two wait for each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        #: What each thread has: for its picture, or in its buffers while it decodes none.
        self._taken: dict[Buffers, int] = {}
        self._busy: set[Buffers] = set()
        self._alone = 0
        self._waiting: deque[object] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeMemory, (self._limit_bytes,)

    def part(self, count: int) -> DecodeMemory:
        """Return one of `count` equal parts of it, for another process."""
        return DecodeMemory(self._limit_bytes // count)

    @property
    def alone(self) -> int:
        """How many pictures were decoded alone, because their need was unknown."""
        return self._alone

    def take(self, buffers: Buffers, need: Need | None) -> None:
        """Take what a picture needs, or wait for it. need: None if it is unknown, which takes everything.

        Raises: DataError if it is more than the limit.
        """
        if need is not None and need.total > self._limit_bytes:
            raise DataError(
                f"to decode the picture takes {format_bytes(need.total)}, and memory= leaves "
                f"{format_bytes(self._limit_bytes)} for decoding: give more, make the picture smaller, or leave such "
                'pictures out with on_error="skip"'
            )
        with self._changed:
            self._alone += need is None
            nbytes = self._with_kept(buffers, need)
            if self._waiting or not self._fits(buffers, nbytes):
                self._wait_for(buffers, self._limit_bytes if need is None else need.total)
            else:
                self._taken[buffers] = nbytes
            self._busy.add(buffers)

    def give_back(self, buffers: Buffers) -> None:
        """End a picture: only the buffers stay taken. Harmless where nothing was taken.

        Once more after steps that used buffers without asking, as behind a user's callable, it counts them.
        """
        if buffers not in self._busy and self._taken.get(buffers, 0) == buffers.kept.total:
            return
        with self._changed:
            self._busy.discard(buffers)
            self._taken[buffers] = buffers.kept.total
            self._changed.notify_all()

    def _with_kept(self, buffers: Buffers, need: Need | None) -> int:
        if need is None:
            return self._limit_bytes
        kept = buffers.kept
        return max(need.pixels, kept.pixels) + max(need.blended, kept.blended) + need.passing

    def _wait_for(self, buffers: Buffers, nbytes: int) -> None:
        buffers.drop()
        self._taken[buffers] = 0
        ticket = object()
        self._waiting.append(ticket)
        while self._waiting[0] is not ticket or not self._fits_once_idle_are_dropped(buffers, nbytes):
            self._changed.wait()
        self._waiting.popleft()
        self._taken[buffers] = nbytes
        self._changed.notify_all()

    def _fits_once_idle_are_dropped(self, buffers: Buffers, nbytes: int) -> bool:
        for idle in self._taken.keys() - self._busy:
            if self._fits(buffers, nbytes):
                break
            idle.drop()
            self._taken[idle] = 0
        return self._fits(buffers, nbytes)

    def _fits(self, buffers: Buffers, nbytes: int) -> bool:
        others = sum(self._taken.values()) - self._taken.get(buffers, 0)
        return others + nbytes <= self._limit_bytes
