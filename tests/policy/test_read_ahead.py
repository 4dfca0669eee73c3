"""The number of batch slots in use, in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy import Instruction, Load, Move, OwnRead, Placement, Ready, Scheduler, StagingLimits
from penstock.policy.read_ahead import ReadAhead
from penstock.trace.schema import SOURCE

LATENCY_SECONDS, STEP_SECONDS = 0.02, 0.01

#: When a read ends that begins at a time.
Store = Callable[[float], float]


def steady(now: float) -> float:
    return now + LATENCY_SECONDS


def stops(now: float) -> float:
    """Answer nothing in 0.25 s of each second, as a store does that others write to."""
    return max(now, int(now) + 0.25) + LATENCY_SECONDS


def slow(now: float) -> float:
    """Deliver a third of what the training takes."""
    return now + 0.12


class Training:
    """Takes a batch every 10 ms, or later; readers bring twice what it takes.

    serves: whether decode servers share the work; None without any.
    """

    def __init__(self, slots: int, most_slots: int, serves: Callable[[], bool] | None = None) -> None:
        curve = Curve(((1, 1e9),))
        store = SharedStore(None, curve, LATENCY_SECONDS)
        machine = Machine(store, (StorageClass("staging", 10**6, 1, curve),))
        plan = AccessPlan(FullShuffle(4096, 1), 1, 400)
        placement = Placement(np.full(4096, SOURCE, np.int8), np.empty(0, np.int64))
        together = 0 if serves is None else 1
        limits = StagingLimits(slots, 4, 4, 10**6, most_slots=most_slots, read_together=together)
        self.scheduler = Scheduler(
            plan, 0, np.full(4096, 1000), placement, machine, limits, reads_together=serves
        )
        self.store: Store = steady
        #: (end, number, move, seconds)
        self.moves: list[tuple[float, int, Move, float]] = []
        #: (end, number, load)
        self.loads: list[tuple[float, int, Load]] = []
        self.begun, self.decode_seconds = 0, 0.0
        self.slots = self.most_wanted = slots
        #: Complete batches, by number; the next one that the training takes, and the slot of the one that it has.
        self.ready: dict[int, Ready] = {}
        self.next, self.held = 0, -1
        self.now = self.asks = self.waited = 0.0
        self.settled = [slots]
        self._obey(self.scheduler.start(0.0))

    def _obey(self, instructions: Sequence[Instruction]) -> None:
        to_do = deque(instructions)
        while to_do:
            match to_do.popleft():
                case Move() as move:
                    self.begun += 1
                    end = self.store(self.now)
                    heapq.heappush(self.moves, (end, self.begun, move, end - self.now))
                case Load() as load:
                    self.begun += 1
                    heapq.heappush(self.loads, (self.now + self.decode_seconds, self.begun, load))
                    if not self.decode_seconds:
                        to_do += self._loaded()
                case Ready() as ready:
                    self.ready[ready.batch] = ready

    def _loaded(self) -> list[Instruction]:
        end, _, load = heapq.heappop(self.loads)
        self.now = max(self.now, end)
        own = sum(origin == SOURCE for origin in load.origins)
        reads = [OwnRead(SOURCE, own, own * LATENCY_SECONDS)] if own else []
        return self.scheduler.loaded(load, {}, reads, self.now, 1e-3, 1e-3)

    def go_on(self, store: Store, seconds: float) -> float:
        """Run for this long on a store; return the share of the time that the training waited."""
        self.store, begin, before = store, self.now, self.waited
        while self.now < begin + seconds:
            takes = max(self.now, self.asks) if self.next in self.ready else np.inf
            moved, loaded = (each[0][0] if each else np.inf for each in (self.moves, self.loads))
            if loaded <= min(moved, takes):
                self._obey(self._loaded())
            elif moved <= takes:
                end, _, move, lasted = heapq.heappop(self.moves)
                self.now = max(self.now, end)
                self._obey(self.scheduler.moved(move, lasted, [], self.now))
            else:
                self._take(takes)
            assert self.scheduler.slots_in_use <= max(self.scheduler.slots_wanted, self.settled[-1] * 2)
            self.most_wanted = max(self.most_wanted, self.scheduler.slots_wanted)
        return (self.waited - before) / (self.now - begin)

    def _take(self, now: float) -> None:
        self.now = now
        self.waited += now - self.asks
        freed, self.held = self.held, self.ready.pop(self.next).slot
        self.next, self.asks = self.next + 1, now + STEP_SECONDS
        if freed >= 0:
            self._obey(self.scheduler.slot_freed(freed, now, self.waited))
        if self.slots < self.scheduler.slots_wanted:
            self.slots += 1
            self._obey(self.scheduler.slots_added(self.slots, now))
        if self.settled[-1] != self.scheduler.settled[2]:
            self.settled.append(self.scheduler.settled[2])


def test_batches_are_read_further_ahead_where_that_spares_waits_and_the_number_does_not_oscillate() -> None:
    """The store's behaviour changes in mid-run."""
    training = Training(8, 64)

    assert training.go_on(steady, 10.0) < 0.02
    assert training.settled == [8]
    # It stops for a quarter of each second: 25 batches ahead bridge that, and eight do not.
    training.go_on(stops, 40.0)
    assert training.go_on(stops, 10.0) < 0.02
    assert training.settled == [8, 16, 32]
    assert training.go_on(steady, 10.0) < 0.02
    # It delivers too little. However many batches are ahead, the training waits.
    assert training.go_on(slow, 30.0) > 0.5
    assert training.settled == [8, 16, 32]


def test_slots_that_gain_nothing_are_tried_ever_more_rarely_and_soon_where_the_training_waits_longer() -> (
    None
):
    """`ReadAhead` alone: 100 batches take a second of the training, and as long as given of its waiting."""
    ahead, now, waited = ReadAhead(8, 64), 0.0, 0.0

    def tries_in(seconds: int, wait: float) -> int:
        nonlocal now, waited
        found = []
        for _ in range(100 * seconds):
            now, waited = now + 0.01 + wait, waited + wait
            ahead.freed(now, waited, has_idled=True)
            found.append(ahead.slots)
        return sum(before < after for before, after in pairwise(found))

    first, later = tries_in(100, 0.001), tries_in(800, 0.001)
    assert 0 < later < 2 * first
    assert 0 < tries_in(20, 0.01) <= first
    assert tries_in(100, 0.0) == 0
    assert ahead.settled == ahead.slots == 8


def test_no_more_batches_are_read_ahead_where_all_decode_threads_are_busy_all_the_time() -> None:
    """They would take memory, and come no sooner."""
    training = Training(16, 64)
    training.decode_seconds = 0.1

    assert training.go_on(steady, 40.0) > 0.5
    assert training.most_wanted == 16
    # Now threads wait for the store.
    training.decode_seconds = 0.0
    assert training.go_on(slow, 40.0) > 0.5
    assert training.most_wanted == 32


def test_no_more_batches_are_read_ahead_while_decode_servers_share_the_work() -> None:
    """A decode thread of this process idles now and then, as what servers decoded arrives in groups."""
    answers = True
    training = Training(16, 64, lambda: answers)

    assert training.go_on(slow, 40.0) > 0.5
    assert training.most_wanted == 16
    answers = False
    assert training.go_on(slow, 40.0) > 0.5
    assert training.most_wanted == 32


def test_a_caller_that_keeps_batches_gets_all_slots_that_there_are() -> None:
    training = Training(8, 64)
    training.go_on(slow, 10.0)
    while training.slots == 8 or training.scheduler.slots_wanted > 8:
        training.go_on(slow, 0.1)
    assert training.scheduler.slots_in_use == 8 < training.slots

    training._obey(training.scheduler.use_all_slots(training.now))
    training.go_on(slow, 10.0)

    assert training.scheduler.slots_in_use == training.scheduler.slots_wanted == training.slots
