"""The scheduler against a slow, obvious one: the same answers to whatever happens, in whatever order."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.policy.obvious_scheduler import (
    Batch,
    Expected,
    ExpectedLoad,
    ExpectedMove,
    Fetch,
    ObviousScheduler,
)

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, Explicit, FullShuffle, Order, Sequential
from penstock.policy import (
    Drop,
    Instruction,
    Load,
    Move,
    OwnRead,
    Placement,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
)
from penstock.policy.decisions import LEAST_LOAD_SECONDS, UNDECODED, UNREAD
from penstock.trace.schema import SOURCE, STAGING

#: What a read takes: less than a hand-over between threads, less than a group should take, more than that, and so long
#: that nobody believes in quick reads any more.
READ_SECONDS = [2e-6, 3e-5, 2e-4, 6e-4, 4e-3, 2e-2, 0.5]


@dataclass(frozen=True)
class Job:
    """What both schedulers are made with. seed: of everything that is not worth shrinking."""

    order: Order
    batch_size: int
    ranks: int
    tiers: int
    slots: int
    readers: int
    decoders: int
    undecoded_bytes: int
    own_bytes: int
    largest_bytes: int
    seed: int

    def arguments(self) -> tuple[AccessPlan, int, np.ndarray, Placement, Machine, StagingLimits]:
        chance = random.Random(self.seed)
        epochs = 3
        plan = AccessPlan(self.order, self.batch_size, epochs, self.ranks)
        rank = chance.randrange(self.ranks)
        sizes = np.array([chance.randint(1, self.largest_bytes) for _ in range(plan.samples)], np.int64)
        tier_of = np.array(
            [chance.choice([SOURCE, *range(1, self.tiers + 1)]) for _ in range(plan.samples)], np.int8
        )
        kept = np.flatnonzero(tier_of != SOURCE).tolist()
        chance.shuffle(kept)
        limits = StagingLimits(
            self.slots,
            self.readers,
            self.decoders,
            self.undecoded_bytes,
            own_bytes=self.own_bytes,
            least_load_seconds=chance.choice([LEAST_LOAD_SECONDS, 20 * LEAST_LOAD_SECONDS]),
        )
        placement = Placement(tier_of, np.array(kept, np.int64))
        return plan, rank, sizes, placement, self._machine(chance), limits

    def _machine(self, chance: random.Random) -> Machine:
        """No two costs are equal: of two that are, either scheduler may choose either."""

        def about(seconds: float) -> float:
            return seconds * chance.uniform(0.8, 1.25)

        def curve() -> Curve:
            one = about(chance.choice([1e5, 1e6, 1e8]))
            return Curve(((1, one), (4, one * chance.uniform(1.0, 4.0))))

        tiers = [
            _tier(
                number,
                curve(),
                about(chance.choice([0.0, *READ_SECONDS])),
                chance.random() < 0.5,
                chance.choice([1, 2, 4, 16]),
            )
            for number in range(1, self.tiers + 1)
        ]
        request_seconds = chance.choice([0.0, about(1e-4)])
        store = SharedStore(
            None, curve(), about(chance.choice(READ_SECONDS)), request_seconds=request_seconds
        )
        staging = StorageClass("staging", 10**9, 1, Curve.flat(1e10))
        return Machine(store, (staging, *tiers), ranks=self.ranks)


def _tier(number: int, read: Curve, latency_seconds: float, is_memory: bool, threads: int) -> StorageClass:
    name = f"tier {number}"
    if is_memory:
        return StorageClass(name, 10**9, 1, read, latency_seconds=latency_seconds)
    return StorageClass(
        name, 10**9, threads, read, latency_seconds=latency_seconds, backend="filesystem", path="/tier"
    )


def _orders() -> st.SearchStrategy[Order]:
    """Samples once an epoch; or as a list has them: never, twice in a batch, in each."""
    samples = st.integers(1, 12)
    lists = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=16), min_size=3, max_size=3)
    return st.one_of(
        samples.map(Sequential),
        st.builds(FullShuffle, samples, st.integers(0, 99)),
        lists.map(lambda epochs: Explicit(epochs, 12)),
    )


JOBS = st.builds(
    Job,
    order=_orders(),
    batch_size=st.integers(1, 8),
    ranks=st.sampled_from([1, 1, 2]),
    tiers=st.integers(0, 3),
    slots=st.integers(1, 4),
    readers=st.sampled_from([0, 1, 2, 3, 4, 6, 9]),
    decoders=st.integers(1, 3),
    undecoded_bytes=st.sampled_from([1, 150, 400, 1_000, 10**6]),
    own_bytes=st.sampled_from([250, 10**6]),
    largest_bytes=st.sampled_from([100, 200_000]),
    seed=st.integers(0, 2**32),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Tells both schedulers the same events, in any order that threads could bring about, and compares the answers.

    It is also the driver of the tested one: it keeps bytes by the number of an entry until they are dropped.
    """

    #: Whether the last answers were: after a failure there is nothing more to learn.
    is_equal = False

    @initialize(job=JOBS)
    def start(self, job: Job) -> None:
        arguments = job.arguments()
        self.plan, self.rank, self.sizes, _, _, self.limits = arguments
        self.obvious, self.tested = ObviousScheduler(*arguments), Scheduler(*arguments)
        self.chance = random.Random(job.seed + 1)
        self.now = 1.0
        self.moves: list[tuple[Move, ExpectedMove]] = []
        self.loads: list[tuple[Load, ExpectedLoad]] = []
        #: Batches that are complete and whose slot is not free again.
        self.complete: list[int] = []
        self.slot_of: dict[Batch, int] = {}
        #: What the driver keeps by entry, and what tiers have.
        self.bytes: dict[int, int] = {}
        self.in_tiers: dict[int, int] = {}
        #: What could not be had once: a tier that lost it is given it again.
        self.refused: set[int] = set()
        self.sought = (0, 0)
        self.delivered: list[tuple[int, int]] = []
        self._compare(self.tested.start(self.now), self.obvious.start(self.now))

    # Events

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 100), read_seconds=st.sampled_from(READ_SECONDS), data=st.data())
    def a_move_ends(self, which: int, read_seconds: float, data: st.DataObject) -> None:
        move, expected = self.moves.pop(which % len(self.moves))
        failed = data.draw(_few_of(len(move.samples)), label="failed")
        self._end_move(move, expected, read_seconds, sorted(failed))

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 100), read_seconds=st.sampled_from(READ_SECONDS), data=st.data())
    def a_load_ends(self, which: int, read_seconds: float, data: st.DataObject) -> None:
        load, expected = self.loads.pop(which % len(self.loads))
        failed = {
            index: UNREAD if load.origins[index] != STAGING and data.draw(st.booleans()) else UNDECODED
            for index in data.draw(_few_of(len(load.ids)), label="failed")
        }
        self._end_load(load, expected, read_seconds, failed)

    @precondition(lambda self: self.complete)
    @rule(which=st.integers(0, 100))
    def the_consumer_lets_go_of_a_batch(self, which: int) -> None:
        slot = self.complete.pop(which % len(self.complete))
        self._pass_time()
        self._compare(self.tested.slot_freed(slot, self.now), self.obvious.slot_freed(self.now))

    @rule(more=st.integers(-1, 2))
    def slots_are_added(self, more: int) -> None:
        """Up to eight; or no more than there are."""
        slots = min(self.obvious.slots + more, 8)
        self._pass_time()
        self._compare(self.tested.slots_added(slots, self.now), self.obvious.slots_added(slots, self.now))

    @precondition(lambda self: self.obvious.staged < len(self.obvious.steps))
    @rule(ahead=st.integers(-6, 2), extra=st.integers(0, 1))
    def the_consumer_goes_elsewhere(self, ahead: int, extra: int) -> None:
        """By so many steps from the next one to stage, which may be back: that gives up nothing."""
        steps = [*self.obvious.steps, (self.plan.epochs, 0)]
        epoch, step = steps[max(0, min(self.obvious.staged + ahead, len(steps) - 1))]
        epoch, step = (epoch, step + extra) if epoch < self.plan.epochs else (epoch, step)
        self.sought = max(self.sought, (epoch, step))
        self._pass_time()
        self._compare(self.tested.seek(epoch, step, self.now), self.obvious.seek(epoch, step, self.now))

    # What must hold at any time

    @invariant()
    def no_more_is_under_way_than_is_allowed(self) -> None:
        assert len(self.moves) <= self.limits.readers
        assert len(self.loads) <= self.limits.decoders == self.tested.loads_allowed
        assert len(self.loads) == self.tested.loads_running
        fills = [move for move, _ in self.moves if move.batch < 0]
        assert len(fills) <= max(1, self.limits.readers // 2)
        passing = self.obvious.passing_bytes()
        assert passing <= max(self.limits.undecoded_bytes, max(self.sizes.tolist()))

    @invariant()
    def no_disk_is_read_by_more_moves_than_it_has_threads(self) -> None:
        for number, tier in enumerate(self.obvious.machine.storage[1:], start=1):
            assert tier.is_memory or sum(move.origin == number for move, _ in self.moves) <= tier.threads

    @invariant()
    def no_sample_is_moved_twice_at_a_time(self) -> None:
        moving = [sample for move, _ in self.moves for sample in move.samples]
        assert len(moving) == len(set(moving))

    @invariant()
    def bytes_are_kept_as_long_as_a_place_wants_them(self) -> None:
        wanted = {fetch.entry: fetch.sample for fetch in self.obvious.fetches if fetch.state == "here"}
        assert self.bytes == wanted

    @invariant()
    def it_is_known_who_waits_for_what(self) -> None:
        for fetch in self.obvious.fetches:
            if fetch.entry is not None:
                waiting = [place.batch.number for place in fetch.waiting]
                assert self.tested.batches_waiting_for(fetch.entry) == waiting
        assert self.tested.batches_waiting_for(-1) == []
        wanted = {batch.number for batch in self.obvious.batches if not batch.is_given_up}
        assert {number for number in range(self.obvious.staged) if self.tested.is_wanted(number)} == wanted

    def teardown(self) -> None:
        """Let everything end well: each batch that was not given up comes, and nothing is left."""
        if not self.is_equal:
            return
        while self.moves or self.loads or self.complete:
            if self.complete:
                self.the_consumer_lets_go_of_a_batch(0)
            elif self.moves:
                self._end_move(*self.moves.pop(), 4e-3, [])
            else:
                self._end_load(*self.loads.pop(), 4e-3, {})
        steps = [
            (epoch, step)
            for epoch in range(self.plan.epochs)
            for step in range(self.plan.steps(epoch))
            if (epoch, step) >= self.sought and self.plan.local_batch_size(self.rank, epoch, step)
        ]
        assert sorted(self.delivered) == sorted({*self.delivered, *steps})
        assert len(self.slot_of) == 0
        assert not self.obvious.fetches
        assert not self.bytes

    # The driver

    def _pass_time(self) -> None:
        self.now += self.chance.random()

    def _end_move(self, move: Move, expected: ExpectedMove, read_seconds: float, failed: list[int]) -> None:
        for index, (entry, sample) in enumerate(zip(move.entries, move.samples, strict=True)):
            if index in failed:
                self.refused.add(sample)
            else:
                self._read(sample, move.origin, move.rests[index])
                self.bytes[entry] = sample
        seconds = sum(self._about(read_seconds) for _ in move.samples)
        self._pass_time()
        self._compare(
            self.tested.moved(move, seconds, failed, self.now),
            self.obvious.moved(expected, seconds, failed, self.now),
        )

    def _end_load(
        self, load: Load, expected: ExpectedLoad, read_seconds: float, failed: dict[int, int]
    ) -> None:
        reads: dict[int, list[float]] = {}
        for index, (sample, origin) in enumerate(zip(load.ids.tolist(), load.origins, strict=True)):
            if origin == STAGING:
                assert self.bytes[load.entries[index]] == sample
            elif failed.get(index) == UNREAD:
                self.refused.add(sample)
            else:
                self._read(sample, origin, load.rests[index])
                reads.setdefault(origin, []).append(self._about(read_seconds))
        own = [OwnRead(origin, len(seconds), sum(seconds)) for origin, seconds in reads.items()]
        wall_seconds = self._about(self.chance.choice(READ_SECONDS)) * len(load.ids)
        self._pass_time()
        self._compare(
            self.tested.loaded(load, dict(failed), own, self.now, wall_seconds),
            self.obvious.loaded(expected, failed, own, self.now, wall_seconds),
        )

    def _about(self, seconds: float) -> float:
        return seconds * self.chance.uniform(0.8, 1.25)

    def _read(self, sample: int, origin: int, rest: int) -> None:
        if origin != SOURCE:
            assert self.in_tiers[sample] == origin, "a tier was asked for what it was never given"
        elif rest != STAGING:
            is_new = sample not in self.in_tiers or sample in self.refused
            assert is_new, "a tier was given a sample twice"
            self.in_tiers[sample] = rest

    # The comparison

    def _compare(self, instructions: list[Instruction], expected: Expected) -> None:
        note(f"answer: {instructions}")
        self.is_equal = False
        self.slot_of = {
            batch: slot
            for batch, slot in self.slot_of.items()
            if batch in self.obvious.batches or not batch.is_given_up
        }
        alive = {fetch.entry for fetch in self.obvious.fetches if fetch.entry is not None}
        dropped: list[int] = []
        found: dict[type, list[Instruction]] = {}
        for each in instructions:
            found.setdefault(type(each), []).append(each)
            if isinstance(each, Drop):
                dropped += each.entries
                assert len(found) == 1, "an instruction may be about an entry of the same number"
        assert not alive.intersection(dropped)
        for entry in dropped:
            self.bytes.pop(entry, None)

        self._compare_each(found.pop(Ready, []), expected.ready, self._is_ready)
        self._compare_each(found.pop(Staged, []), expected.staged, lambda staged, key: tuple(staged) == key)
        self._compare_each(found.pop(Move, []), expected.moves, self._is_move)
        self._compare_each(found.pop(Load, []), expected.loads, self._is_load)
        assert set(found) <= {Drop}
        self.is_equal = True

    def _compare_each(
        self, instructions: Sequence[Any], expected: Sequence[Any], is_same: Callable[..., bool]
    ) -> None:
        pairs = list(zip(instructions, expected, strict=False))
        for instruction, each in pairs:
            assert is_same(instruction, each), f"expected {each}"
        assert len(instructions) == len(expected), f"expected {expected}"

    def _is_ready(self, ready: Ready, batch: Batch) -> bool:
        self.complete.append(ready.slot)
        self.delivered.append((ready.epoch, ready.step))
        assert self.slot_of.pop(batch, ready.slot) == ready.slot
        failed = tuple(place.row for place in batch.places if place.is_failed)
        key = (batch.number, batch.epoch, batch.step, batch.samples, failed)
        return (ready.batch, ready.epoch, ready.step, ready.samples.tolist(), ready.failed) == key

    def _is_move(self, move: Move, expected: ExpectedMove) -> bool:
        self.moves.append((move, expected))
        fetches = expected.fetches
        for entry, fetch in zip(move.entries, fetches, strict=False):
            self._enter(entry, fetch)
        return (
            (list(move.samples), move.origin) == ([fetch.sample for fetch in fetches], fetches[0].origin)
            and list(move.rests) == [fetch.rest for fetch in fetches]
            and (move.batch, move.step) == (expected.batch, expected.step)
            and move.epoch in expected.epochs
        )

    def _is_load(self, load: Load, expected: ExpectedLoad) -> bool:
        self.loads.append((load, expected))
        batch, places = expected.batch, expected.places
        slot = self.slot_of.setdefault(batch, load.slot)
        assert load.slot == slot
        assert list(self.slot_of.values()).count(slot) == 1, "two batches have one slot"
        assert slot not in self.complete, "the consumer has that slot"
        rests = []
        for entry, place in zip(load.entries, places, strict=False):
            if place.fetch is None:
                assert entry == -1
            elif place.origin == STAGING:
                assert entry == place.fetch.entry
            else:
                self._enter(entry, place.fetch)
            rests.append(place.fetch.rest if place.fetch is not None else STAGING)
        # Where a worker takes bytes that are there, nothing is to be kept.
        known = [origin == SOURCE for origin in load.origins]
        return (
            (load.batch, load.epoch, load.step) == (batch.number, batch.epoch, batch.step)
            and load.samples.tolist() == batch.samples
            and list(load.rows) == [place.row for place in places]
            and load.ids.tolist() == [place.sample for place in places]
            and list(load.origins) == [place.origin for place in places]
            and [rest for rest, is_known in zip(load.rests, known, strict=True) if is_known]
            == [rest for rest, is_known in zip(rests, known, strict=True) if is_known]
        )

    def _enter(self, entry: int, fetch: Fetch) -> None:
        others = [each.entry for each in self.obvious.fetches if each is not fetch]
        assert entry >= 0
        assert entry not in others, "two samples on their way have one number"
        assert fetch.entry in (None, entry)
        fetch.entry = entry


def _few_of(count: int) -> st.SearchStrategy[set[int]]:
    """Mostly none."""
    return st.one_of(st.just(set()), st.just(set()), st.sets(st.integers(0, count - 1), max_size=3))


TestSchedulerAgainstObvious = SchedulerMachine.TestCase
TestSchedulerAgainstObvious.settings = settings(max_examples=100, stateful_step_count=40)
