"""A cap on how many bytes a second are written to a tier, so that a drain leaves bandwidth to training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.tier import Writer
from penstock.errors import DataError
from penstock.validate import check_rate, check_seconds

#: A piece that is handed on at once lasts this long at the cap, so that the rate is even.
_PIECE_SECONDS = 0.05
_LEAST_PIECE_BYTES = 65_536


@dataclass(slots=True)
class Pacer:
    """Says how long to wait so that bytes keep to a rate. It keeps no time of its own and locks nothing.

    A token bucket, kept as a moment: that at which all bytes so far are through. A link that was idle has saved
    up at most the burst.
    Source: ATM Forum, Traffic Management 4.0 (1996), the generic cell rate algorithm as virtual scheduling.

    bytes_per_second: above zero; inf never waits.
    burst_seconds: how much unused time can be caught up.
    """

    bytes_per_second: float
    burst_seconds: float = _PIECE_SECONDS
    _through_seconds: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        check_rate("bytes_per_second", self.bytes_per_second)
        check_seconds("burst_seconds", self.burst_seconds)

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


class Cap:
    """How many bytes a second all threads together write to a tier, at most.

    name: of the tier. bytes_per_second: above zero.
    stop: once set, a wait ends at once and every write raises DataError.
    clock: seconds; for tests.
    Raises: ConfigError naming the argument.
    """

    def __init__(
        self,
        name: str,
        bytes_per_second: float,
        *,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pacer = Pacer(bytes_per_second)
        self.piece_bytes = int(min(max(_LEAST_PIECE_BYTES, bytes_per_second * _PIECE_SECONDS), 2**30))
        self._stop = stop or threading.Event()
        self._clock = clock
        self._name = name
        #: guards the pacer; nobody waits while holding it
        self._pacer_lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Return once so many bytes may be written. Raises: DataError once it is stopped."""
        with self._pacer_lock:
            seconds = self._pacer.take(nbytes, self._clock())
        if self._stop.wait(seconds) if seconds > 0 else self._stop.is_set():
            raise DataError(f"writing to {self._name} was stopped before it ended")


class CappedWriter:
    """A file that is written under a cap."""

    def __init__(self, writer: Writer, cap: Cap) -> None:
        self._writer = writer
        self._cap = cap
        self.finish, self.abandon = writer.finish, writer.abandon

    def write(self, *pieces: Bytes) -> None:
        for data in pieces:
            for start in range(0, len(data), self._cap.piece_bytes):
                piece = data[start : start + self._cap.piece_bytes]
                self._cap.wait(len(piece))
                self._writer.write(piece)
