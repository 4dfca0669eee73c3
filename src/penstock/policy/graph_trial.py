"""Which of several placements of a graph has the fastest steps: ordinary ones run under each, in turn. Pure.

A placement changes no bit of a result, so a trial costs no more than the slower steps. It finds what no simulation
knows: what devices that compute at once keep from each other, and what other programs take from one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from penstock.policy.graph_placement import Placement
from penstock.policy.graph_search import MOST_RIVALS
from penstock.units import format_seconds

#: Steps of each that count, after one that does not: a worker compiles then what is new to it.
_TRIES = 7
#: Of all together, in seconds, where steps are short: another program may run during a few of them.
_LEAST_SECONDS, _MOST_TRIES = 1.0, 49
#: In which a trial ends.
MOST_STEPS = (1 + MOST_RIVALS) * (1 + _MOST_TRIES)
#: The simulated best stays where another one is not faster by more than this: as much may be chance.
_LEAST_GAIN = 0.02


class PlacementTrial:
    """Steps under several placements, until it is known under which they are fastest.

    placements: two or more, the simulated best first.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.placements = list(placements)
        #: Those that are tried still.
        self._left = list(range(len(placements)))
        self._begun = 0
        self._seconds: list[list[float]] = [[] for _ in placements]

    def begin(self) -> int:
        """Return the number of the placement under which the next step runs."""
        left = self._left
        self._begun += 1
        return left[(self._begun - 1) % len(left)]

    def end(self, turn: int, seconds: float | None) -> Placement | None:
        """Count a step that ended; return the fastest placement, and why, once each has run often enough.

        seconds: None for a step that failed: its placement is not tried again, unless it is the simulated best.
        """
        if seconds is not None:
            self._seconds[turn].append(seconds)
        elif turn:
            self._left = [each for each in self._left if each != turn]
        tries = min(len(self._seconds[each]) for each in self._left) - 1
        is_enough = tries >= _TRIES and sum(map(sum, self._seconds)) >= _LEAST_SECONDS
        if len(self._left) > 1 and not is_enough and tries < _MOST_TRIES:
            return None
        medians = {each: statistics.median(self._seconds[each][1:] or [0.0]) for each in self._left}
        best = min(medians, key=medians.__getitem__)
        first = self.placements[0]
        if medians[best] >= medians[0] * (1 - _LEAST_GAIN):
            return first
        so, simulated = format_seconds(medians[best]), format_seconds(medians[0])
        why = f"a step took {so} so, and {simulated} where the simulation ends it first"
        found = self.placements[best]
        moved = {name: why for name, device in found.device.items() if device != first.device.get(name)}
        return replace(found, reason=first.reason | moved)
