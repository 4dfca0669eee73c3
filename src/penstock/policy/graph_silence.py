"""Which workers of a graph are silent for too long, by when they were heard and what is on its way to them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A message with more is on its way for a while, at no less than so many bytes a second.
_LARGE_BYTES, _LEAST_BYTES_PER_SECOND = 1 << 20, 1e6


class Silence:
    """How long each worker has been silent.

    Time in which this process did not listen counts for nobody, nor does time in which a large message is on its way.

    most_seconds: of silence; None: any.
    """

    def __init__(self, tasks: Sequence[str], most_seconds: float | None) -> None:
        self._most_seconds = most_seconds
        self._heard = dict.fromkeys(tasks, 0.0)
        self._looked = 0.0
        #: By worker, when the last large message to it was sent, and until when it may be under way; and when the last
        #: health check that it answered was sent, after which a message before it has arrived.
        self._large: dict[str, tuple[float, float]] = {}
        self._asked = dict.fromkeys(tasks, -math.inf)

    def send(self, task: str, nbytes: int, now: float) -> None:
        """Note that a message was sent. Health checks wait behind it: until it has arrived, nobody can answer them."""
        if nbytes > _LARGE_BYTES:
            self._large[task] = now, max(self._arrives(task), now) + nbytes / _LEAST_BYTES_PER_SECOND

    def hear(self, task: str, now: float, asked: float = -math.inf) -> None:
        """Note that a worker answered. asked: when it was, if it was a health check."""
        self._heard[task] = now
        self._asked[task] = max(self._asked[task], asked)

    def _arrives(self, task: str) -> float:
        """Return until when a large message may be on its way; -inf where none is."""
        sent, until = self._large.get(task, (-math.inf, -math.inf))
        return -math.inf if self._asked[task] > sent else until

    def too_long(self, now: float) -> dict[str, float]:
        """Return, by worker, the silence of those that are silent for too long; called several times in most_seconds.

        Who calls this late was kept from running, as by a long call in another thread: answers may lie there unread.
        """
        if self._most_seconds is None:
            return {}
        looked, self._looked = self._looked, now
        if now - looked > self._most_seconds / 2:
            self._heard = dict.fromkeys(self._heard, now)
        since = {task: max(heard, self._arrives(task)) for task, heard in self._heard.items()}
        return {task: now - heard for task, heard in since.items() if now - heard > self._most_seconds}
