"""Which workers of a graph have become slower, by how long each computes in steps of the same work. Pure.

What a worker has to do in a step stays the same as long as its placement and the shapes of its feeds do. Workers may
share a machine: where all of several take longer, none of them is the slow one. One alone is compared with itself.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

#: Steps, and their seconds, whose median counts, after the first one, in which workers compile what is new to them.
_STEPS, _LEAST_SECONDS = 8, 1.0
#: A worker is slower if it takes so many times as long, and the step by so much of itself, twice in a row: another
#: program that runs meanwhile makes no worker slow.
_LEAST_TIMES, _LEAST_SHARE = 3.0, 0.1
#: A slow worker whose steps take less than so many times as long as they did is as fast as before.
_LEAST_SLOW = 1.5
#: Medians of each worker with which the next is compared.
_MOST_KEPT = 64


class PaceChange(NamedTuple):
    """What a worker takes of a step, and took.

    times: how many times as long it takes, where the others' steps take as long as they did; 1: as long as before.
    """

    times: float
    seconds: float
    usual_seconds: float


class Pace:
    """The pace of workers in steps of the same parts, with feeds of the same shapes.

    slowness: by worker that was slow before the first step, how many times as long as usual it takes.
    """

    def __init__(self, slowness: Mapping[str, float]) -> None:
        self._slowness = dict(slowness)
        self._has_begun = False
        self._busy: dict[str, list[float]] = {}
        self._took: list[float] = []
        self._took_seconds = 0.0
        #: By worker: its medians while it is not slow, and where the last one differed by enough, which way: 1 or -1.
        self._usual: dict[str, deque[float]] = {}
        self._turned: dict[str, int] = {}

    def count(self, busy_seconds: Mapping[str, float], step_seconds: float) -> dict[str, PaceChange]:
        """Count a step, and return the workers that have become slower, or as fast as before, each once.

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
        known = {task: self._slowness.get(task, 1.0) for task in now}
        for task, seconds in now.items():
            self._usual.setdefault(task, deque([seconds / known[task]], _MOST_KEPT))
        usual = {task: statistics.median(self._usual[task]) for task in now}
        times = {task: seconds / (usual[task] * known[task]) for task, seconds in now.items()}
        found = {}
        for task, seconds in now.items():
            others = [each for other, each in times.items() if other != task]
            own = times[task] / max(1.0, statistics.median(others or [1.0]))
            more = seconds - usual[task] * known[task]
            turned = int(own >= _LEAST_TIMES and more >= _LEAST_SHARE * step)
            if known[task] > 1 and seconds < _LEAST_SLOW * usual[task]:
                turned = -1
            if turned and turned == self._turned.get(task):
                self._slowness[task] = own * known[task] if turned > 0 else 1.0
                found[task] = PaceChange(self._slowness[task], seconds, usual[task])
                turned = 0
            elif not turned and known[task] == 1:
                self._usual[task].append(seconds)
            self._turned[task] = turned
        return found
