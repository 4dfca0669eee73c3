"""When a wait is reported, and when it is given up."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import WaitTimeout

_LOOK_AGAIN_SECONDS = 60.0


class Patience:
    """One wait of a training, looked at from time to time by the thread that waits.

    patience_seconds: `report` gets a line whenever the wait has lasted that long again.
    timeout_seconds: without an answer for so long, it raises; None for never.
    line: says who waits for what.
    """

    __slots__ = ("_line", "_patience_seconds", "_report", "_reported", "_timeout_seconds")

    def __init__(
        self,
        patience_seconds: float,
        timeout_seconds: float | None,
        report: Callable[[str], None],
        line: Callable[[], str],
    ) -> None:
        self._patience_seconds = patience_seconds
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._line = line
        self._reported = 0

    def look(self, waited_seconds: float, silent_seconds: float) -> float:
        """Report if that is due; return for how many seconds nothing will be.

        waited_seconds: since the wait began. silent_seconds: since there was the last answer, if several are awaited.
        Raises: WaitTimeout.
        """
        if self._timeout_seconds is not None and silent_seconds >= self._timeout_seconds:
            raise WaitTimeout(self._line())
        if waited_seconds >= self._patience_seconds * (self._reported + 1):
            self._reported += 1
            self._report(self._line())
        pause = self._patience_seconds * (self._reported + 1) - waited_seconds
        if self._timeout_seconds is not None:
            pause = min(pause, self._timeout_seconds - silent_seconds)
        return min(max(pause, 0.001), _LOOK_AGAIN_SECONDS)
