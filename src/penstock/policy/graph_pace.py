"""Which workers of a graph have become slower, by how long each computes in steps of the same parts. Pure.

What a worker has to do in a step stays the same as long as the placement does. Steps may grow, and workers may share a
machine: where all of them take longer, none of them is the slow one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

#: Steps, and their seconds, whose median counts, after the first one, in which workers compile what is new to them.
_STEPS, _LEAST_SECONDS = 8, 1.0
#: A worker is slower if it takes so many times as long, and the step by so much of itself, twice in a row: another
#: program that runs beside for a while makes no worker slow.
_LEAST_TIMES, _LEAST_SHARE = 3.0, 0.1
#: Medians of each worker with which the next is compared.
_MOST_KEPT = 64


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
        self._took_seconds = 0.0
        #: By worker: its medians so far, and whether the last one was too long to be one of them.
        self._usual: dict[str, deque[float]] = {}
        self._is_suspect: dict[str, bool] = {}

    def count(self, busy_seconds: Mapping[str, float], step_seconds: float) -> dict[str, Slower]:
        """Count a step, and return the workers that have become slower, each once.

        busy_seconds: by worker, how long it had something to do. step_seconds: of all of the step.
        """
        if not self._has_begun:
            self._has_begun = True
            return {}
        self._took.append(step_seconds)
        self._took_seconds += step_seconds
        for task, seconds in busy_seconds.items():
            self._busy.setdefault(task, []).append(max(seconds, 1e-9))
        if len(self._took) < _STEPS or self._took_seconds < _LEAST_SECONDS:
            return {}
        now = {task: statistics.median(each) for task, each in self._busy.items()}
        step = statistics.median(self._took)
        self._busy.clear()
        self._took.clear()
        self._took_seconds = 0.0
        usual = {
            task: statistics.median(self._usual.setdefault(task, deque([seconds], _MOST_KEPT)))
            for task, seconds in now.items()
        }
        times = {task: seconds / usual[task] for task, seconds in now.items()}
        found = {}
        for task, seconds in now.items():
            others = [each for other, each in times.items() if other != task]
            own = times[task] / max(1.0, statistics.median(others or [1.0]))
            is_longer = own >= _LEAST_TIMES and seconds - usual[task] >= _LEAST_SHARE * step
            if is_longer and self._is_suspect[task]:
                found[task] = Slower(own, seconds, usual[task])
                self._usual[task].clear()
            if not is_longer or task in found:
                self._usual[task].append(seconds)
            self._is_suspect[task] = is_longer and task not in found
        return found
