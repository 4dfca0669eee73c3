"""A cap on how many bytes a second are written to a tier, so that a drain leaves bandwidth to training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.tier import Draft, Reader, Tier, Writer
from penstock.errors import ConfigError, DataError
from penstock.units import format_rate

#: A piece that is handed on at once lasts this long at the cap, so that the rate is even.
_PIECE_SECONDS = 0.05
_LEAST_PIECE_BYTES = 65_536


@dataclass(slots=True)
class Pacer:
    """Says how long to wait so that bytes keep to a rate. It keeps no time of its own and locks nothing.

    A token bucket, told of as a moment: that at which all bytes so far are through. A link that was idle has saved
    up at most the burst.
    Source: ATM Forum, Traffic Management 4.0 (1996), the generic cell rate algorithm as virtual scheduling.

    bytes_per_second: above zero; inf never waits.
    burst_seconds: how much unused time can be caught up.
    """

    bytes_per_second: float
    burst_seconds: float = _PIECE_SECONDS
    _through_seconds: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ConfigError(f"bytes_per_second is {self.bytes_per_second!r}; it must be above zero")
        if not (math.isfinite(self.burst_seconds) and self.burst_seconds >= 0):
            raise ConfigError(f"burst_seconds is {self.burst_seconds!r}; it must be finite and zero or more")

    def take(self, nbytes: int, now_seconds: float) -> float:
        """Count bytes in and return how many seconds to wait before they are sent.

        now_seconds: of any clock that does not run backwards.
        """
        begin_seconds = max(self._through_seconds, now_seconds - self.burst_seconds)
        self._through_seconds = begin_seconds + nbytes / self.bytes_per_second
        return max(0.0, self._through_seconds - now_seconds)


class Stop(Protocol):
    """What ends waits early: a `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether to stop."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait, and return at once with True when it is or becomes set."""
        ...


class CappedTier:
    """Another tier, to which all threads together write at most so many bytes a second. Reads are not slowed.

    tier: it is written to.
    bytes_per_second: above zero.
    stop: once set, a wait ends at once and every write raises DataError.
    clock: seconds; for tests.
    Raises: ConfigError naming the argument.
    """

    def __init__(
        self,
        tier: Tier,
        bytes_per_second: float,
        *,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._pace = _Pace(Pacer(bytes_per_second), stop or threading.Event(), clock, tier.name)

    @property
    def name(self) -> str:
        return self._tier.name

    def __repr__(self) -> str:
        return f"CappedTier({self._tier!r}, {format_rate(self._pace.pacer.bytes_per_second)})"

    def where(self, folder: str) -> str:
        return self._tier.where(folder)

    def folders(self) -> list[str]:
        return self._tier.folders()

    def read(self, folder: str, file: str) -> bytes:
        return self._tier.read(folder, file)

    def open(self, folder: str, file: str) -> Reader:
        return self._tier.open(folder, file)

    def begin(self, folder: str, uid: str, *, join: bool = False) -> Draft:
        return _CappedDraft(self._tier.begin(folder, uid, join=join), self._pace)

    def delete(self, folder: str) -> None:
        self._tier.delete(folder)

    def free_bytes(self) -> int | None:
        return self._tier.free_bytes()

    def sweep(self) -> list[str]:
        return self._tier.sweep()


class _Pace:
    """One cap for all writers of a tier."""

    def __init__(self, pacer: Pacer, stop: Stop, clock: Callable[[], float], name: str) -> None:
        self.pacer = pacer
        self.piece_bytes = int(min(max(_LEAST_PIECE_BYTES, pacer.bytes_per_second * _PIECE_SECONDS), 2**30))
        self._stop = stop
        self._clock = clock
        self._name = name
        #: guards the pacer; nobody waits while holding it
        self._pacer_lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        with self._pacer_lock:
            seconds = self.pacer.take(nbytes, self._clock())
        if self._stop.wait(seconds) if seconds > 0 else self._stop.is_set():
            raise DataError(f"writing to {self._name} was stopped before it ended")


class _CappedDraft:
    def __init__(self, draft: Draft, pace: _Pace) -> None:
        self._draft = draft
        self._pace = pace

    def create(self, file: str) -> Writer:
        return _CappedWriter(self._draft.create(file), self._pace)

    def commit(self, manifest: bytes) -> None:
        self._draft.commit(manifest)

    def abort(self) -> None:
        self._draft.abort()


class _CappedWriter:
    def __init__(self, writer: Writer, pace: _Pace) -> None:
        self._writer = writer
        self._pace = pace

    def write(self, *pieces: Bytes) -> None:
        for data in pieces:
            for start in range(0, len(data), self._pace.piece_bytes):
                piece = data[start : start + self._pace.piece_bytes]
                self._pace.wait(len(piece))
                self._writer.write(piece)

    def finish(self) -> None:
        self._writer.finish()

    def abandon(self) -> None:
        self._writer.abandon()
