"""What a loader waits for while it is made: its folder to be listed, its first sample to be read."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.flow import waits
from penstock.flow.patience import Patience
from penstock.store.calls import Calls

#: A wait of less is not registered: nobody asks `penstock ps` so soon, and it takes a thread to answer.
_REGISTERED_SECONDS = 1.0


class Opening:
    """The construction of a loader as `penstock ps` and a patient user see it.

    calls: to be used for whatever a store may not answer. They raise WaitTimeout after `timeout_seconds` without any
        answer, and are reported after `patience_seconds`; not so where they are made in the caller's thread.
    """

    def __init__(
        self,
        patience_seconds: float,
        timeout_seconds: float | None,
        report: Callable[[str], None],
        *,
        in_own_thread: bool = False,
    ) -> None:
        self.calls = Calls(self._watch, in_own_thread=in_own_thread, report=report)
        self._begin_seconds = time.monotonic()
        self._patience = Patience(patience_seconds, timeout_seconds, report, self._line)
        self._is_registered = False

    def close(self) -> None:
        """Opening has ended."""
        if self._is_registered:
            waits.unregister(self)

    def waits(self) -> list[str]:
        """Return a line while opening waits (see `flow.waits`)."""
        return [self._line()] if self.calls.line() else []

    def _line(self) -> str:
        waited_seconds = time.monotonic() - self._begin_seconds
        return f"the loader has been starting for {waited_seconds:.1f} s and waits for {self.calls.line()}"

    def _watch(self) -> float:
        waited_seconds = time.monotonic() - self._begin_seconds
        pause_seconds = self._patience.look(waited_seconds, self.calls.silent_seconds)
        if self._is_registered:
            return pause_seconds
        if waited_seconds < _REGISTERED_SECONDS:
            return min(pause_seconds, _REGISTERED_SECONDS - waited_seconds)
        self._is_registered = True
        waits.register(self)
        return pause_seconds
