"""Which workers of a graph have become slower, by how long each computes in steps of the same parts. Pure.

What a worker has to do in a step stays the same as long as the placement does. Steps may grow, and workers may share a
machine: where all of them take longer, none of them is the slow one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

#: Steps whose median counts, after the first one, in which workers compile what is new to them.
_STEPS = 8
#: A worker is slower if it takes so many times as long, and the step by so much of itself.
_LEAST_TIMES, _LEAST_SHARE = 3.0, 0.1


class Slower(NamedTuple):
    """What a worker takes of a step, and took.

    times: how many times as long it takes, where the others' steps take as long as they did.
    """

    times: float
    seconds: float
    usual_seconds: float


class Pace:
    """The pace of workers in steps of the same parts."""

    def __init__(self) -> None:
        self._has_begun = False
        self._busy: dict[str, list[float]] = {}
        self._took: list[float] = []
        #: The least median of each worker.
        self._usual: dict[str, float] = {}

    def count(self, busy_seconds: Mapping[str, float], step_seconds: float) -> dict[str, Slower]:
        """Count a step, and return the workers that have become slower, each once.

        busy_seconds: by worker, how long it had something to do. step_seconds: of all of the step.
        """
        if not self._has_begun:
            self._has_begun = True
            return {}
        self._took.append(step_seconds)
        for task, seconds in busy_seconds.items():
            self._busy.setdefault(task, []).append(max(seconds, 1e-9))
        if len(self._took) < _STEPS:
            return {}
        now = {task: statistics.median(each) for task, each in self._busy.items()}
        step = statistics.median(self._took)
        self._busy.clear()
        self._took.clear()
        times = {task: seconds / self._usual.get(task, seconds) for task, seconds in now.items()}
        found = {}
        for task, seconds in now.items():
            others = [each for other, each in times.items() if other != task]
            own = times[task] / max(1.0, statistics.median(others or [1.0]))
            usual = self._usual.get(task, seconds)
            if own >= _LEAST_TIMES and seconds - usual >= _LEAST_SHARE * step:
                found[task] = Slower(own, seconds, usual)
            self._usual[task] = seconds if task in found else min(usual, seconds)
        return found
