"""How many threads read: the scheduler against a store that behaves otherwise in mid-run, in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy import Load, Move, OwnRead, Placement, Ready, Scheduler, StagingLimits
from penstock.trace.schema import SOURCE

LATENCY_SECONDS = 0.05


def overlaps(reads: int) -> float:
    """Return how long each of so many reads takes of a store that serves any number at once."""
    return LATENCY_SECONDS


def thrashes(reads: int) -> float:
    """The same of a disk whose head goes back and forth: best with four, 32 bring a third of that."""
    slower: float = max(1.0, reads / 4) ** 1.5
    return LATENCY_SECONDS * slower


class Training:
    """Takes batches as fast as they come, and needs no time to decode."""

    def __init__(self, limits: StagingLimits) -> None:
        curve = Curve(((1, 1e9),))
        machine = Machine(
            SharedStore(None, curve, LATENCY_SECONDS), (StorageClass("staging", 10**6, 1, curve),)
        )
        plan = AccessPlan(FullShuffle(4096, 1), 8, 50)
        placement = Placement(np.full(4096, SOURCE, np.int8), np.empty(0, np.int64))
        self.scheduler = Scheduler(plan, 0, np.full(4096, 1000), placement, machine, limits)
        self.now = 0.0
        #: (end, number, move, seconds)
        self.moves: list[tuple[float, int, Move, float]] = []
        self.begun = self.reads = 0
        self.settled: list[int] = []
        self._obey(deque(self.scheduler.start(0.0)), overlaps)

    def _obey(self, to_do: deque[object], seconds_of: Callable[[int], float]) -> None:
        while to_do:
            match to_do.popleft():
                case Move() as move:
                    self.begun += 1
                    seconds = seconds_of(len(self.moves) + 1)
                    heapq.heappush(self.moves, (self.now + seconds, self.begun, move, seconds))
                case Load() as load:
                    own = sum(origin == SOURCE for origin in load.origins)
                    reads = [OwnRead(SOURCE, own, own * LATENCY_SECONDS)] if own else []
                    to_do += self.scheduler.loaded(load, {}, reads, self.now, 1e-3, 1e-3)
                case Ready() as ready:
                    to_do += self.scheduler.slot_freed(ready.slot, self.now)

    def go_on(self, seconds_of: Callable[[int], float], seconds: float) -> float:
        """Run for this long; return the reads per second."""
        begin, before = self.now, self.reads
        while self.now < begin + seconds:
            self.now, _, move, lasted = heapq.heappop(self.moves)
            self.reads += 1
            self._obey(deque(self.scheduler.moved(move, lasted, [], self.now)), seconds_of)
            facts = self.scheduler.reading
            assert len(self.moves) <= 32
            if facts is not None and self.settled[-1:] != [facts.threads]:
                self.settled.append(facts.threads)
        return (self.reads - before) / (self.now - begin)


def test_the_number_of_readers_follows_a_store_that_behaves_otherwise_in_mid_run_and_does_not_oscillate() -> (
    None
):
    training = Training(StagingLimits(12, 8, 1, 10**6, most_readers=32))

    # More reads at once are more reads a second: with all 32 readers 640.
    training.go_on(overlaps, 5.0)
    assert training.go_on(overlaps, 1.0) > 0.85 * 32 / LATENCY_SECONDS
    # Now four are best.
    training.go_on(thrashes, 90.0)
    settled = len(training.settled)
    assert training.go_on(thrashes, 20.0) > 0.9 * 4 / LATENCY_SECONDS
    assert len(training.settled) == settled <= 8
    # And again as it was.
    training.go_on(overlaps, 15.0)
    assert training.go_on(overlaps, 1.0) > 0.85 * 32 / LATENCY_SECONDS
    assert len(training.settled) <= settled + 4


def test_a_number_of_readers_that_was_given_stays() -> None:
    training = Training(StagingLimits(12, 8, 1, 10**6))

    assert training.go_on(overlaps, 3.0) < 1.01 * 8 / LATENCY_SECONDS
    assert training.scheduler.reading is None
    assert training.scheduler.settled == (8, 1, 12)
