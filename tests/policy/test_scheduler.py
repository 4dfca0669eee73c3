"""The scheduler against a runtime that finishes things in any order it likes."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.policy.from_zero import views_from_zero

from penstock.errors import ConfigError
from penstock.flow.engine import DECISIONS
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, BundleShuffle, Explicit, FullShuffle, Order, Sequential
from penstock.policy import (
    Drop,
    Evict,
    Extents,
    Instruction,
    Load,
    Move,
    OwnRead,
    Placement,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
    decisions,
    place_by_frequency,
)
from penstock.policy.decisions import UNDECODED, UNREAD
from penstock.trace.schema import SOURCE, STAGING

SLOW_SECONDS, FAST_SECONDS = 0.01, 1e-6
#: What a machine says of a store: that it is slow, or what is said of one that nobody measured.
KNOWN_SECONDS, GUESSED_SECONDS = 0.002, 0.001


def machine(tier_latency_seconds: float = 0.0, latency_seconds: float = KNOWN_SECONDS) -> Machine:
    memory = Curve(((1, 1e10),))
    return Machine(
        SharedStore(None, Curve(((1, 1e7),)), latency_seconds),
        (
            StorageClass("staging", 10**9, 1, memory),
            StorageClass("tier", 10**9, 1, memory, latency_seconds=tier_latency_seconds),
            StorageClass("ssd", 10**9, 1, memory, latency_seconds=tier_latency_seconds),
        ),
    )


@dataclass(frozen=True)
class Case:
    """A run, and what its store and tier are like.

    seconds: of a read of the source. tier_seconds: of a read of the tier. lossy: samples that the tier cannot give
    back. broken: samples that the source does not give. undecodable: samples that no decoder takes.
    machine_seconds: what the machine says of the store. is_fickle: whether a worker's own reads are fast or slow by
    chance. order: by default a full shuffle. steps: that a slot has space for. disk_bytes: of a second tier, on a disk.
    left: samples that the disk has from an earlier run. ranks: of which the first is run.
    drops: whether tiers drop what is used no more, and get what fits there of the other samples.
    together: samples that a reader reads from the source together. has_tiers: whether there are any.
    loads_all: whether a Load is all of a step.
    """

    samples: int
    batch: int
    epochs: int
    slots: int
    readers: int
    decoders: int
    undecoded_bytes: int
    tier_bytes: int
    seconds: float
    tier_seconds: float
    seed: int
    lossy: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    undecodable: frozenset[int] = frozenset()
    machine_seconds: float = KNOWN_SECONDS
    is_fickle: bool = False
    order: Order | None = None
    steps: int = 1
    disk_bytes: int = 0
    left: frozenset[int] = frozenset()
    ranks: int = 1
    drops: bool = False
    together: int = 0
    has_tiers: bool = True
    loads_all: bool = False

    @property
    def plan(self) -> AccessPlan:
        order = self.order or FullShuffle(self.samples, self.seed)
        return AccessPlan(order, self.batch * self.ranks, self.epochs, self.ranks)


class FakeRuntime:
    """Obeys a scheduler, finishing moves and loads in random order, and records all that it was told."""

    def __init__(self, case: Case) -> None:
        self.case, self.plan = case, case.plan
        self.chance = random.Random(case.seed)
        self.sizes = np.array([self.chance.randint(1, 200) for _ in range(case.samples)], np.int64)
        space = [case.tier_bytes, case.disk_bytes] if case.has_tiers else []
        self.placement = place_by_frequency(self.plan, 0, self.sizes, space)
        limits = StagingLimits(
            case.slots,
            case.readers,
            case.decoders,
            case.undecoded_bytes,
            steps=case.steps,
            loads_all=case.loads_all,
            read_together=case.together,
        )
        self.limits = limits
        tier_machine = machine(case.tier_seconds, case.machine_seconds)
        if not case.has_tiers:
            tier_machine = replace(tier_machine, storage=tier_machine.storage[:1])
        left = {each for each in case.left - case.broken if each < case.samples}
        #: Bytes of each tier.
        self.space = {1: 10**9, 2: 10**9}
        if case.drops:
            kept, self.space = self.placement.fill_order, {1: case.tier_bytes, 2: case.disk_bytes}
            others = np.setdiff1d(np.arange(case.samples), kept)
            often_first = np.argsort(-self.plan.uses(0)[0][others], kind="stable")
            self.placement = replace(self.placement, spares=others[often_first])
            staging, *tiers = tier_machine.storage
            sized = [replace(t, capacity_bytes=max(1, self.space[n])) for n, t in enumerate(tiers, 1)]
            tier_machine = replace(tier_machine, storage=(staging, *sized))
            left &= set(kept[self.placement.tier_of[kept] == 2].tolist())
        self.left = np.array(sorted(left), np.int64)
        self.scheduler = Scheduler(
            self.plan,
            0,
            self.sizes,
            self.placement,
            tier_machine,
            limits,
            held={2: self.left} if case.has_tiers else {},
        )
        self.moves: list[Move] = []
        self.evicts: list[Evict] = []
        self.evicted = 0
        self.loads: list[Load] = []
        #: Of each step, what is like the notice of a batch of this step alone.
        self.ready: dict[tuple[int, int], Ready] = {}
        #: Of slots with complete batches, how many steps were not let go yet.
        self.lent: Counter[int] = Counter()
        self.steps_together = 0
        self.physical_reads: list[int] = []
        #: Samples that readers moved.
        self.moved = 0
        #: What the driver keeps by entry: the sample whose bytes these are.
        self.bytes: dict[int, int] = {}
        self.tiers: dict[int, set[int]] = {1: set(), 2: set(self.left.tolist())}
        self.loaded: Counter[tuple[int, int]] = Counter()
        self.order: list[tuple[int, int]] = []
        #: Of each batch, the Load that ended last, and what of it could not be had.
        self.last: dict[int, tuple[Load, dict[int, int]]] = {}
        #: Everything it was told, as plain values.
        self.told: list[object] = []

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self.told.append(_plain(instruction))
            match instruction:
                case Move():
                    assert instruction.samples
                    self.moves.append(instruction)
                case Evict():
                    self.evicts.append(instruction)
                case Load():
                    assert instruction.rows
                    others = {load.batch for load in self.loads if load.slot == instruction.slot}
                    assert others <= {instruction.batch}, "two batches have one slot"
                    assert not self.lent[instruction.slot], "a batch is written over"
                    self.loads.append(instruction)
                case Ready():
                    self.arrive(instruction)
                case Staged():
                    self.order.append((instruction.epoch, instruction.step))
                case Drop():
                    for entry in instruction.entries:
                        self.bytes.pop(entry, None)
        assert len(self.moves) <= self.limits.readers
        assert len(self.loads) <= self.limits.decoders
        moving = [sample for move in self.moves for sample in move.samples]
        assert len(moving) == len(set(moving)), "a sample is being fetched twice"
        check_state(self.scheduler._state)

    def arrive(self, ready: Ready) -> None:
        for number, samples in enumerate(ready.samples.reshape(ready.steps, -1)):
            begin, step = number * samples.size, ready.step + number
            failed = tuple(row - begin for row in ready.failed if 0 <= row - begin < samples.size)
            self.ready[ready.epoch, step] = ready._replace(step=step, samples=samples, failed=failed, steps=1)
        self.lent[ready.slot] = ready.steps
        self.steps_together = max(self.steps_together, ready.steps)

    def let_go(self, ready: Ready) -> None:
        self.lent[ready.slot] -= 1
        if not self.lent[ready.slot]:
            self.obey(self.scheduler.slot_freed(ready.slot, 0.0))

    def finish_something(self) -> None:
        """One outstanding move or load ends."""
        candidates: list[Move | Load | Evict] = [*self.moves, *self.loads, *self.evicts]
        assert candidates, "nothing is under way and the consumer waits: a deadlock"
        done = candidates[self.chance.randrange(len(candidates))]
        if isinstance(done, Move):
            self._finish_move(done)
        elif isinstance(done, Evict):
            self._finish_evict(done)
        else:
            self._finish_load(done)

    def _finish_move(self, move: Move) -> None:
        self.moves = [other for other in self.moves if other is not move]
        self.moved += len(move.samples)
        failed = []
        samples = zip(move.entries, move.samples, move.rests, strict=True)
        for index, (entry, sample, rest) in enumerate(samples):
            if self._fetch(sample, move.origin, rest):
                self.bytes[entry] = sample
            else:
                failed.append(index)
        seconds = self.case.seconds if move.origin == SOURCE else self.case.tier_seconds
        self.obey(self.scheduler.moved(move, seconds * len(move.samples), failed, 0.0))

    def _finish_evict(self, evict: Evict) -> None:
        self.evicts = [other for other in self.evicts if other is not evict]
        in_use = {sample for load in self.loads for sample in load.ids.tolist()} | set(self.bytes.values())
        for sample in evict.samples:
            assert sample not in in_use, "bytes that are in use are written over"
            for tier in self.tiers.values():
                self.evicted += sample in tier
                tier.discard(sample)
        self.obey(self.scheduler.evicted(evict, 0.0))

    def _finish_load(self, load: Load) -> None:
        self.loads = [other for other in self.loads if other is not load]
        failed, own = {}, Counter[int]()
        samples = load.ids.tolist()
        for index, sample in enumerate(samples):
            origin, entry, rest = load.origins[index], load.entries[index], load.rests[index]
            if origin == STAGING:
                assert self.bytes[entry] == sample
            elif not self._fetch(sample, origin, rest):
                failed[index] = UNREAD
                continue
            else:
                own[origin] += 1
            if sample in self.case.undecodable:
                failed[index] = UNDECODED
            else:
                self.loaded[load.batch, load.rows[index]] += 1
        seconds = {SOURCE: self.case.seconds, 1: self.case.tier_seconds, 2: self.case.tier_seconds}
        if self.case.is_fickle:
            one_of = [FAST_SECONDS, 100 * SLOW_SECONDS]
            seconds = {origin: each and self.chance.choice(one_of) for origin, each in seconds.items()}
        reads = [OwnRead(origin, count, count * seconds[origin]) for origin, count in own.items()]
        self.last[load.batch] = load, dict(failed)
        self.obey(self.scheduler.loaded(load, failed, reads, 0.0))

    def _fetch(self, sample: int, origin: int, rest: int) -> bool:
        if origin == SOURCE:
            self.physical_reads.append(sample)
            if sample in self.case.broken:
                return False
        elif sample in self.case.lossy:
            self.tiers[origin].discard(sample)
            return False
        else:
            assert sample in self.tiers[origin]
        if rest != STAGING:
            # Of two reads that fail, the second may end when the sample is kept again.
            is_new = sample not in self.tiers[rest] or sample in self.case.lossy
            assert is_new, "a tier was given a sample twice"
            self.tiers[rest].add(sample)
            held = sum(int(self.sizes[each]) for each in self.tiers[rest])
            assert held <= self.space[rest], "a tier was given more than it holds"
        return True

    def take(self, epoch: int, step: int) -> Ready:
        while (epoch, step) not in self.ready:
            self.finish_something()
        return self.ready.pop((epoch, step))

    def run(self, check: Callable[[Ready], None] = lambda ready: None) -> None:
        """Take all batches, one after the other, and let go of each."""
        self.obey(self.scheduler.start(0.0))
        self.go_on(check)

    def go_on(self, check: Callable[[Ready], None] = lambda ready: None) -> None:
        """As `run`, once it has started."""
        for epoch in range(self.plan.epochs):
            for step in range(self.plan.steps(epoch)):
                ready = self.take(epoch, step)
                assert ready.samples.tolist() == self.plan.local_batch(0, epoch, step).tolist()
                check(ready)
                self.let_go(ready)


def _plain(instruction: Instruction) -> object:
    values = (each.tolist() if isinstance(each, np.ndarray) else each for each in instruction)
    return (type(instruction).__name__, *values)


def chain(ints: NDArray[np.int64], first: int, column: int) -> list[int]:
    """Return the items of a linked list. column: with the next one."""
    items: list[int] = []
    while first >= 0:
        items.append(int(first))
        first = int(ints[first + column])
    assert len(set(items)) == len(items), "a list runs in a circle"
    return items


def free_entries(ints: NDArray[np.int64]) -> list[int]:
    """Return the entries of rank 0 that are free."""
    items: list[int] = []
    first = int(ints[decisions.FREE_ENTRY])
    while first >= 0:
        items.append(first)
        first += decisions.ENTRY_COLUMNS + int(ints[first + decisions.ENTRY_AFTER])
    assert len(set(items)) == len(items), "a list runs in a circle"
    return items


def check_state(state: decisions.State) -> None:
    """What must hold of rank 0 between two events."""
    d = decisions
    m = state.ints
    decodable, holders = 0, Counter[int]()
    waiting: dict[int, list[int]] = {}
    for slot in chain(m, m[d.FIRST_SLOT], d.SLOT_AFTER):
        begin = int(m[slot + d.SLOT_PLACES])
        places = range(begin, begin + int(m[slot + d.SLOT_SIZE]) * d.PLACE_COLUMNS, d.PLACE_COLUMNS)
        states = Counter(int(m[place + d.PLACE_STATE]) for place in places)
        offered = chain(m, m[slot + d.SLOT_FIRST], d.PLACE_NEXT)
        assert [m[place + d.PLACE_STATE] for place in offered] == [d.DECODABLE] * len(offered)
        assert m[m[d.SLOTS] + m[slot + d.SLOT_INDEX]] == slot
        assert m[slot + d.SLOT_DECODABLE] == len(offered) == states[d.DECODABLE]
        assert m[slot + d.SLOT_LAST] == [-1, *offered][-1]
        assert m[slot + d.SLOT_RUNNING] == states[d.RUNNING]
        assert m[slot + d.SLOT_FAILED] == states[d.FAILED]
        assert m[slot + d.SLOT_MISSING] == len(places) - states[d.DONE] - states[d.FAILED] > 0
        decodable += len(offered)
        for place in places:
            state_of, entry = m[place + d.PLACE_STATE], int(m[place + d.PLACE_ENTRY])
            if state_of == d.WAITING:
                waiting.setdefault(entry, []).append(place)
            elif state_of in (d.DECODABLE, d.RUNNING) and entry >= 0:
                holders[entry] += 1
                assert m[entry + d.ENTRY_SAMPLE] == m[place + d.PLACE_SAMPLE]
    assert m[d.DECODABLE_PLACES] == decodable
    table = m[m[d.TABLE] : m[d.TABLE] + m[d.TABLE_MASK] + 1]
    used = sorted(table[table > 0].tolist())
    assert all(m[entry + d.ENTRY_STATE] for entry in used)
    free = free_entries(m)
    assert not any(m[entry + d.ENTRY_STATE] for entry in free)
    assert len(set(free + used)) == len(free) + len(used) == entries_of(m)
    assert m[d.USED_ENTRIES] == len(used)
    urgent = chain(m, m[d.FIRST_URGENT], d.ENTRY_AFTER)
    assert sorted(urgent) == [entry for entry in used if m[entry + d.ENTRY_STATE] == d.QUEUED]
    assert m[d.QUEUED_ENTRIES] == len(urgent)
    passing, backlog, in_queue = 0, Counter[int](), Counter[int]()
    for entry in used:
        sample, entry_state = int(m[entry + d.ENTRY_SAMPLE]), m[entry + d.ENTRY_STATE]
        assert decisions.find(state, 0, sample) == entry
        listed = chain(m, m[entry + d.ENTRY_FIRST], d.PLACE_NEXT)
        assert sorted(listed) == sorted(waiting.get(entry, []))
        nbytes = int(state.sizes[sample])
        if entry_state == d.HERE:
            assert m[entry + d.ENTRY_HOLDERS] == holders[entry] > 0
        is_moving = entry_state == d.MOVING
        passing += nbytes * (is_moving or (entry_state == d.HERE and m[entry + d.ENTRY_REST] == STAGING))
        backlog[int(m[entry + d.ENTRY_ORIGIN])] += nbytes * (is_moving or entry_state == d.QUEUED)
        in_queue[int(m[entry + d.ENTRY_ORIGIN])] += entry_state == d.QUEUED
    assert m[d.PASSING] == passing
    for origin in range(SOURCE, int(m[d.TIERS]) + 1):
        row = m[d.ROWS] + (origin + 1) * d.ROW_COLUMNS
        assert (m[row + d.BACKLOG], m[row + d.IN_QUEUE]) == (backlog[origin], in_queue[origin])
        assert m[row + d.IN_FLIGHT] <= m[row + d.MOST_IN_FLIGHT]


def entries_of(ints: NDArray[np.int64]) -> int:
    """Return how many entries there are: one for each place, and a group for each reader."""
    d = decisions
    return int((ints[d.SLOT_COUNT] + ints[d.MOST_READERS]) * ints[d.GROUP_SIZE]) + 1


cases = st.builds(
    Case,
    samples=st.integers(1, 40),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 4),
    slots=st.integers(1, 4),
    readers=st.integers(0, 5),
    decoders=st.integers(1, 3),
    undecoded_bytes=st.integers(1, 500),
    tier_bytes=st.integers(0, 3000),
    seconds=st.sampled_from([SLOW_SECONDS, FAST_SECONDS]),
    tier_seconds=st.sampled_from([SLOW_SECONDS, FAST_SECONDS]),
    seed=st.integers(0, 2**32),
    machine_seconds=st.sampled_from([KNOWN_SECONDS, GUESSED_SECONDS]),
    is_fickle=st.booleans(),
    steps=st.integers(1, 4),
    disk_bytes=st.sampled_from([0, 500, 5000]),
    left=st.frozensets(st.integers(0, 39), max_size=20),
)
#: The same with tiers of memory.
easy_cases = cases.map(lambda case: replace(case, tier_seconds=0.0, left=frozenset()))
some_samples = st.frozensets(st.integers(0, 39), max_size=5)
#: On three ranks, what the tier loses (sample 5) is on its way from there for another place when its turn to be filled
#: comes.
LOSING = Case(1, 9, 4, 3, 4, 1, 465, 1314, FAST_SECONDS, SLOW_SECONDS, 2929, is_fickle=True)


@settings(max_examples=120)
@given(cases, some_samples)
def test_every_batch_arrives_complete_in_order_and_each_sample_once(
    case: Case, lossy: frozenset[int]
) -> None:
    """Whatever a tier loses is read again."""
    runtime = FakeRuntime(replace(case, lossy=lossy))

    def check(ready: Ready) -> None:
        assert ready.failed == ()

    runtime.run(check)

    plan = runtime.plan
    assert set(runtime.loaded.values()) == {1}
    assert len(runtime.loaded) == plan.samples * plan.epochs
    assert runtime.order == sorted(runtime.order)
    if case.steps == 1:
        assert runtime.order == [(e, s) for e in range(plan.epochs) for s in range(plan.steps(e))]
    assert not runtime.bytes, "the driver keeps bytes that nobody wants"


@settings(max_examples=80)
@given(easy_cases)
def test_the_store_is_read_once_per_miss_which_is_the_bound_of_any_policy(case: Case) -> None:
    runtime = FakeRuntime(case)
    runtime.run()

    plan, reads = runtime.plan, Counter(runtime.physical_reads)
    kept = set(runtime.placement.fill_order.tolist())
    assert all(reads[sample] == 1 for sample in kept)
    assert all(reads[sample] <= plan.epochs for sample in range(plan.samples))
    bound = plan.samples + (plan.epochs - 1) * (plan.samples - len(kept))
    assert reads.total() <= bound


@settings(max_examples=80)
@given(easy_cases, st.frozensets(st.integers(0, 39)))
def test_what_an_earlier_run_left_is_not_read_from_the_store_again(case: Case, left: frozenset[int]) -> None:
    """Wherever it is to be kept from now on."""
    runtime = FakeRuntime(replace(case, left=left))
    runtime.run()

    kept = set(runtime.placement.fill_order.tolist())
    assert not set(runtime.physical_reads) & kept & left
    for tier in (1, 2):
        assert set(runtime.placement.samples_in(tier).tolist()) <= runtime.tiers[tier]


@settings(max_examples=120)
@given(cases, st.integers(1, 3), some_samples)
@example(LOSING, 3, frozenset([5]))
@example(
    replace(LOSING, undecoded_bytes=464, seconds=SLOW_SECONDS, machine_seconds=GUESSED_SECONDS),
    3,
    frozenset([5]),
)
def test_what_follows_a_dropped_sample_finds_space_and_nothing_is_dropped_that_is_in_use(
    case: Case, ranks: int, lossy: frozenset[int]
) -> None:
    """`FakeRuntime` checks both at each step."""
    fewest = case.batch * ranks  # so that each rank has a part of some batch
    case = replace(case, samples=max(case.samples, fewest), epochs=case.epochs + 1, lossy=lossy)
    runtime = FakeRuntime(replace(case, drops=True, ranks=ranks))

    runtime.run(lambda ready: None)

    assert set(runtime.loaded.values()) == {1}
    assert len(runtime.loaded) == runtime.plan.reads(0)


def test_samples_are_dropped_after_their_last_use_and_others_are_read_ahead_into_their_space() -> None:
    """A rank of four reads a sample in a fourth of the epochs: many of those it keeps are soon of no use."""
    case = Case(80, 5, 16, 3, 4, 1, 10**6, 2000, SLOW_SECONDS, 0.0, 1, ranks=4)
    keeping, dropping = FakeRuntime(case), FakeRuntime(replace(case, drops=True))
    for runtime in (keeping, dropping):
        runtime.run()

    assert dropping.evicted > 0
    assert len(dropping.physical_reads) < len(keeping.physical_reads)


def test_readers_wait_for_no_read_of_a_store_from_which_nothing_is_read() -> None:
    """All samples are on a disk from an earlier run, and the store is one that nobody measured."""
    case = Case(20, 4, 2, 2, 3, 2, 500, 0, SLOW_SECONDS, 2e-4, 1, machine_seconds=GUESSED_SECONDS)
    runtime = FakeRuntime(replace(case, disk_bytes=10_000, left=frozenset(range(20))))

    runtime.run()

    assert runtime.physical_reads == []


@settings(max_examples=60)
@given(cases, some_samples, some_samples)
def test_a_broken_sample_fails_its_own_rows_and_no_other(
    case: Case, broken: frozenset[int], undecodable: frozenset[int]
) -> None:
    runtime = FakeRuntime(replace(case, broken=broken, undecodable=undecodable))

    def check(ready: Ready) -> None:
        wrong = broken | undecodable
        assert list(ready.failed) == [i for i, sample in enumerate(ready.samples.tolist()) if sample in wrong]

    runtime.run(check)


@settings(max_examples=80)
@given(cases, some_samples, some_samples, st.data())
def test_after_a_seek_the_rest_of_the_run_is_as_if_nothing_had_been_staged(
    case: Case, lossy: frozenset[int], broken: frozenset[int], data: st.DataObject
) -> None:
    runtime = FakeRuntime(replace(case, lossy=lossy, broken=broken))
    plan = runtime.plan
    epoch = data.draw(st.integers(0, plan.epochs - 1))
    step = data.draw(st.integers(0, plan.steps(epoch) - 1))
    before = data.draw(st.integers(0, 30))

    runtime.obey(runtime.scheduler.start(0.0))
    for _ in range(before):
        if runtime.moves or runtime.loads:
            runtime.finish_something()
    given_up = [ready for key, ready in runtime.ready.items() if key < (epoch, step)]
    runtime.ready = {key: ready for key, ready in runtime.ready.items() if key >= (epoch, step)}
    for _ in range(data.draw(st.integers(1, 2))):
        runtime.obey(runtime.scheduler.seek(epoch, step, 0.0))
    for ready in given_up:
        runtime.let_go(ready)

    for later in range(epoch, plan.epochs):
        for current in range(step if later == epoch else 0, plan.steps(later)):
            ready = runtime.take(later, current)
            assert ready.samples.tolist() == plan.local_batch(0, later, current).tolist()
            expected = [i for i, sample in enumerate(ready.samples.tolist()) if sample in broken]
            assert list(ready.failed) == expected
            runtime.let_go(ready)
    while runtime.moves or runtime.loads:
        runtime.finish_something()
    assert not runtime.bytes


@settings(max_examples=50)
@given(cases, st.integers(1, 5))
def test_slots_that_are_added_while_samples_are_on_their_way_are_used(case: Case, more: int) -> None:
    runtime = FakeRuntime(replace(case, steps=1))
    runtime.obey(runtime.scheduler.start(0.0))
    for _ in range(runtime.chance.randrange(10)):
        if runtime.moves or runtime.loads:
            runtime.finish_something()

    for _ in range(2):
        runtime.obey(runtime.scheduler.slots_added(case.slots + more, 0.0))

    plan = runtime.plan
    steps = [(epoch, step) for epoch in range(plan.epochs) for step in range(plan.steps(epoch))]
    assert runtime.order == steps[: case.slots + more]
    for epoch, step in steps:
        ready = runtime.take(epoch, step)
        assert ready.failed == ()
        runtime.let_go(ready)
    assert set(runtime.loaded.values()) == {1}


@pytest.mark.parametrize("has_tiers", [False, True])
def test_batches_are_written_to_the_memory_of_those_before_them_where_the_training_takes_all_at_once(
    has_tiers: bool,
) -> None:
    """Slots take memory once they are written; those that decoding never needs are left as they are."""
    case = Case(60, 3, 2, 8, 2, 1, 10**6, 0, SLOW_SECONDS, 0.0, 7, has_tiers=has_tiers)
    runtime, written = FakeRuntime(case), set[int]()

    runtime.run(lambda ready: written.add(ready.slot))

    assert len(written) <= 3


@settings(max_examples=50)
@given(cases)
def test_bytes_in_passing_stay_within_their_bound_but_for_one_sample(case: Case) -> None:
    runtime = FakeRuntime(case)
    plan, limit = runtime.plan, case.undecoded_bytes

    runtime.obey(runtime.scheduler.start(0.0))
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            while (epoch, step) not in runtime.ready:
                runtime.finish_something()
                moving = [sample for move in runtime.moves for sample in move.samples]
                decoding = {
                    entry: int(load.samples[row])
                    for load in runtime.loads
                    for row, entry, origin, rest in zip(
                        load.rows, load.entries, load.origins, load.rests, strict=True
                    )
                    if origin == STAGING and rest == STAGING
                }
                passing = [*moving, *decoding.values()]
                assert runtime.sizes[passing].sum() <= limit or len(passing) == 1
            runtime.let_go(runtime.take(epoch, step))


@settings(max_examples=120)
@given(cases, some_samples, some_samples, st.booleans())
def test_where_a_load_is_a_whole_step_its_reads_find_space_and_what_a_tier_lost_is_in_it(
    case: Case, lossy: frozenset[int], broken: frozenset[int], is_drawn_with_replacement: bool
) -> None:
    """Bytes of later steps stay until these are complete, and would leave the earliest none."""
    order = None
    if is_drawn_with_replacement:
        chance = random.Random(case.seed)
        drawn = [chance.choices(range(case.samples), k=case.samples) for _ in range(case.epochs)]
        order = Explicit(drawn, case.samples)
    runtime = FakeRuntime(replace(case, lossy=lossy, broken=broken, order=order, steps=1, loads_all=True))
    most_bytes = int(max(runtime.sizes[batch].sum() for batch in local_batches(runtime.plan)))

    def check(ready: Ready) -> None:
        assert [row for row, each in enumerate(ready.samples.tolist()) if each in broken] == [*ready.failed]
        if len(ready.failed) < ready.samples.size:
            load, failed = runtime.last[ready.batch]
            assert sorted({*load.rows, *ready.failed}) == [*range(ready.samples.size)]
            assert {load.rows[index] for index in failed} <= {*ready.failed}
        if case.epochs == 1 and order is None:  # else a later step may keep what the earliest has brought
            passing = runtime.scheduler._ints[decisions.PASSING]
            assert passing <= max(case.undecoded_bytes, runtime.sizes.max()) + most_bytes

    runtime.run(check)
    assert not runtime.bytes


def local_batches(plan: AccessPlan) -> list[NDArray[np.int64]]:
    steps = [(epoch, step) for epoch in range(plan.epochs) for step in range(plan.steps(epoch))]
    return [plan.local_batch(0, *step) for step in steps]


def runtime_of(seconds: float, **options: Any) -> FakeRuntime:
    case = Case(64, 8, 2, 2, 4, 1, 10_000, 0, seconds, 0.0, 0)
    return FakeRuntime(replace(case, **options))


def test_workers_read_by_themselves_once_a_probe_shows_that_reads_cost_less_than_a_hand_over() -> None:
    fast, slow = runtime_of(FAST_SECONDS), runtime_of(SLOW_SECONDS)
    for runtime in (fast, slow):
        runtime.run()

    # The first two batches are staged before the probe has ended.
    assert fast.moved <= 16
    assert slow.moved == 2 * 64 - 2


@pytest.mark.parametrize("seconds", [FAST_SECONDS, SLOW_SECONDS])
def test_readers_of_a_store_that_nobody_measured_wait_for_the_first_own_read(seconds: float) -> None:
    """Or else many of them read small files at once, and keep the worker from finding that it is quicker alone."""
    runtime = runtime_of(seconds, machine_seconds=GUESSED_SECONDS)

    runtime.obey(runtime.scheduler.start(0.0))
    assert not runtime.moves
    runtime.finish_something()

    assert len(runtime.moves) == (0 if seconds == FAST_SECONDS else 4)
    assert len(runtime.loads) == (seconds == FAST_SECONDS)


def test_a_first_own_read_that_fails_or_is_given_up_lets_the_readers_begin() -> None:
    failing = runtime_of(SLOW_SECONDS, machine_seconds=GUESSED_SECONDS)
    failing.case = replace(failing.case, broken=frozenset(range(64)))
    given_up = runtime_of(SLOW_SECONDS, machine_seconds=GUESSED_SECONDS)
    for runtime in (failing, given_up):
        runtime.obey(runtime.scheduler.start(0.0))

    failing.finish_something()
    given_up.obey(given_up.scheduler.seek(0, 1, 0.0))

    assert len(failing.moves) == len(given_up.moves) == 4


def test_a_store_that_turns_out_slow_takes_back_what_workers_would_have_read_by_themselves() -> None:
    """The first read finds its file in the page cache, and no other does."""
    runtime = runtime_of(FAST_SECONDS, slots=4, machine_seconds=GUESSED_SECONDS)
    runtime.obey(runtime.scheduler.start(0.0))
    runtime.finish_something()
    assert not runtime.moves
    assert decisions.reads_by_itself(runtime.scheduler._state, 0, SOURCE)

    runtime.case = replace(runtime.case, seconds=0.5)
    runtime.finish_something()

    assert len(runtime.moves) == 4
    runtime.go_on()
    assert set(runtime.loaded.values()) == {1}


@settings(max_examples=30)
@given(cases, some_samples, st.integers(0, 20), st.booleans())
def test_compiled_decisions_are_those_of_plain_python_from_any_event_on(
    case: Case, lossy: frozenset[int], after: int, has_extents: bool
) -> None:
    """And no index is negative."""
    loop = DECISIONS.wait()
    make = in_chunks if has_extents else FakeRuntime
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.policy.scheduler.views_of", views_from_zero)
        plain, compiled = (make(replace(case, lossy=lossy)) for _ in range(2))

    for runtime in (plain, compiled):
        runtime.obey(runtime.scheduler.start(0.0))
        for _ in range(after):
            if runtime.moves or runtime.loads:
                runtime.finish_something()
    compiled.scheduler.use(loop)
    for runtime in (plain, compiled):
        runtime.obey(runtime.scheduler.slots_added(case.slots + 2, 0.0))
        while runtime.moves or runtime.loads or runtime.ready:
            for ready in list(runtime.ready.values()):
                del runtime.ready[ready.epoch, ready.step]
                runtime.let_go(ready)
            if runtime.moves or runtime.loads:
                runtime.finish_something()

    assert compiled.told == plain.told
    steps = sum(plain.plan.steps(epoch) for epoch in range(case.epochs))
    assert len(plain.order) <= steps <= case.steps * len(plain.order)


CHUNK = 8


def in_chunks(case: Case, bytes_per_second: float = 1e8) -> FakeRuntime:
    """A run whose store has samples in chunks of eight, one behind the other. A request takes 10 ms, 5 on the wire."""
    runtime = FakeRuntime(case)
    wire = Curve(((1, bytes_per_second),))
    store = SharedStore(None, wire, latency_seconds=0.005, request_seconds=0.005)
    on = replace(machine(), source=store)
    units = np.arange(case.samples) // CHUNK
    ends = np.cumsum(runtime.sizes)
    offsets = ends - runtime.sizes - np.concatenate(([0], ends))[units * CHUNK]
    extents = Extents(units, offsets, runtime.sizes)
    limits = runtime.limits
    runtime.scheduler = Scheduler(
        runtime.plan, 0, runtime.sizes, runtime.placement, on, limits, extents, {2: runtime.left}
    )
    return runtime


def reads_of(told: list[object]) -> list[list[int]]:
    """Return the samples of each move from the source."""
    return [each[2] for each in told if isinstance(each, tuple) and each[0] == "Move" and each[3] == SOURCE]


@settings(max_examples=30)
@given(cases)
def test_of_a_source_in_chunks_each_batch_arrives_complete_and_each_sample_is_read_as_often(
    case: Case,
) -> None:
    runtime = in_chunks(case)
    runtime.run()

    assert set(runtime.loaded.values()) == {1}
    assert len(runtime.loaded) == case.samples * case.epochs
    assert not runtime.bytes


@pytest.mark.parametrize(
    ("order", "tier_bytes"),
    [(FullShuffle(384, 7), 0), (BundleShuffle(384, 7, bundle_ratio=CHUNK / 384), 10**6)],
)
def test_reads_of_a_source_in_chunks_are_hardly_more_than_the_chunks_that_a_window_touches(
    order: Order, tier_bytes: int
) -> None:
    """Eight slots of 16 samples are a window; one reader, so that the next samples are known when it takes some."""
    case = Case(384, 16, 1, 8, 1, 1, 10**6, tier_bytes, SLOW_SECONDS, 0.0, 7)
    runtime = in_chunks(replace(case, order=order))
    runtime.run()

    reads = reads_of(runtime.told)
    assert all(len({sample // CHUNK for sample in read}) == 1 for read in reads)
    ids = order.at(0, np.arange(384))
    touched = sum(np.unique(window // CHUNK).size for window in np.array_split(ids, 3))
    assert len(reads) <= 1.1 * touched


def correction_of(scheduler: Scheduler) -> float:
    """Return observed over modelled seconds of readers' reads of the source."""
    state = scheduler._state
    cost = state.ints[state.ints[decisions.ROWS] + decisions.COSTS]
    return float(state.floats[cost + decisions.CORRECTION])


def test_a_source_in_chunks_is_observed_by_the_read_and_not_by_the_sample() -> None:
    """A read takes 5 ms however many samples it brings."""
    runtime = in_chunks(Case(512, 16, 1, 8, 1, 1, 10**6, 0, SLOW_SECONDS, 0.0, 7))
    runtime.obey(runtime.scheduler.start(0.0))
    (move,) = runtime.moves
    assert len(move.samples) > 1

    sizes = runtime.sizes
    # A request counts for a sample of the mean size.
    request_seconds = 0.005 * sizes[move.samples[0]] / sizes.mean()
    seconds = 0.005 + request_seconds + sizes[move.samples].sum() / 1e8
    runtime.scheduler.moved(move, seconds, [], 0.0)

    assert correction_of(runtime.scheduler) == pytest.approx(1.0)


def test_a_hole_that_costs_more_than_a_request_is_not_read_over() -> None:
    """At 1 ms a byte, ten bytes take as long as a request."""
    runtime = in_chunks(Case(256, 16, 1, 8, 1, 1, 10**6, 0, SLOW_SECONDS, 0.0, 7), bytes_per_second=1e3)
    runtime.run()

    ends = np.cumsum(runtime.sizes)
    holes = [
        int(ends[later - 1] - ends[earlier])
        for read in map(sorted, reads_of(runtime.told))
        for earlier, later in pairwise(read)
    ]
    assert len(holes) > 10
    assert 0 < max(holes) < 10


def test_background_fills_take_half_of_the_readers_and_urgent_moves_all_of_them() -> None:
    """One slot of four samples, 64 samples for the tier, six readers; the worker has the probe."""
    runtime = runtime_of(SLOW_SECONDS, batch=4, slots=1, readers=6, tier_bytes=10**6)
    runtime.obey(runtime.scheduler.start(0.0))

    assert [move.batch for move in runtime.moves] == [0, 0, 0, -1, -1, -1]
    for _ in range(3):
        runtime._finish_move(next(move for move in runtime.moves if move.batch == 0))
        assert [move.batch for move in runtime.moves].count(-1) == 3


@pytest.mark.parametrize(("readers", "filled"), [(8, [1, 1, 2, 2]), (3, [1])])
def test_the_fills_of_a_slow_tier_leave_readers_to_those_of_another(readers: int, filled: list[int]) -> None:
    """Both tiers want samples, and no fill of either ends. Half of three readers is one."""
    samples = np.arange(64)
    placement = Placement(np.where(samples < 32, 1, 2).astype(np.int8), samples)
    two = machine()
    two = replace(two, storage=(*two.storage, replace(two.storage[1], name="second")))
    plan = AccessPlan(Sequential(64), 2, 1)
    limits = StagingLimits(slots=1, readers=readers, decoders=1, undecoded_bytes=10**6)
    scheduler = Scheduler(plan, 0, np.full(64, 100), placement, two, limits)

    moves = [each for each in scheduler.start(0.0) if isinstance(each, Move)]

    fills = [move for move in moves if move.batch < 0]
    assert [move.rests[0] for move in fills] == filled


def test_a_worker_has_memory_for_a_few_reads_of_its_own_at_a_time() -> None:
    """Reads of 100 KB that cost next to nothing, and Loads that are quick: ten fit into 1 MiB."""
    plan = AccessPlan(Sequential(64), 16, 1)
    limits = StagingLimits(slots=4, readers=0, decoders=1, undecoded_bytes=10**6)
    nothing = place_by_frequency(plan, 0, np.full(64, 100_000), [])
    scheduler = Scheduler(plan, 0, np.full(64, 100_000), nothing, machine(), limits)

    taken: list[int] = []
    queue = scheduler.start(0.0)
    while queue:
        each = queue.pop(0)
        if isinstance(each, Load):
            taken.append(len(each.rows))
            reads = [OwnRead(SOURCE, len(each.rows), FAST_SECONDS)]
            queue += scheduler.loaded(each, {}, reads, 0.0, FAST_SECONDS * len(each.rows))

    assert sum(taken) == 64
    assert max(taken) == 10


@for_each(
    ("slots", "more", "seconds", "least_seconds", "is_split"),
    [
        (4, 0, 30e-6, 1.5e-3, False),
        (3, 0, 30e-6, 1.5e-3, True),
        (2, 1, 30e-6, 1.5e-3, True),
        (2, 2, 30e-6, 1.5e-3, False),
        (4, 0, 500e-6, 1.5e-3, True),
        (4, 0, 500e-6, 25e-3, False),
    ],
    ids=[
        *("quick", "as few slots as threads", "as few with one that is added", "enough with two", "slow"),
        "slow, and a Load costs much",
    ],
)
def test_a_batch_is_split_among_threads_if_each_part_takes_several_times_what_a_load_costs(
    slots: int, more: int, seconds: float, least_seconds: float, *, is_split: bool
) -> None:
    """Three threads, and batches of 64 that take 2 ms or 32 ms."""
    plan = AccessPlan(Sequential(640), 64, 1)
    limits = StagingLimits(
        slots=slots, readers=0, decoders=3, undecoded_bytes=10**6, least_load_seconds=least_seconds
    )
    nothing = place_by_frequency(plan, 0, np.full(640, 10), [])
    scheduler = Scheduler(plan, 0, np.full(640, 10), nothing, machine(), limits)

    taken: list[int] = []
    queue = [*scheduler.start(0.0), *scheduler.slots_added(slots + more, 0.0)]
    while queue:
        match each := queue.pop(0):
            case Load():
                taken.append(len(each.rows))
                reads = [OwnRead(SOURCE, len(each.rows), FAST_SECONDS)]
                queue += scheduler.loaded(each, {}, reads, 0.0, seconds * len(each.rows))
            case Ready():
                queue += scheduler.slot_freed(each.slot, 0.0)

    assert sum(taken) == 640
    # The first three Loads are of one sample, as nobody knows what one takes.
    assert (min(taken[4:]) < 64) == is_split


def samples_staged(runtime: FakeRuntime, wall_seconds: float) -> list[int]:
    """Return the sizes of what is staged, one after the other, where each sample takes so long to load."""
    sizes: list[int] = []
    queue = runtime.scheduler.start(0.0)
    while queue:
        match each := queue.pop(0):
            case Load():
                reads = [OwnRead(SOURCE, len(each.rows), FAST_SECONDS)]
                queue += runtime.scheduler.loaded(
                    each, {}, reads, 0.0, wall_seconds * len(each.rows), wall_seconds
                )
            case Ready():
                sizes.append(each.samples.size)
                queue += runtime.scheduler.slot_freed(each.slot, 0.0)
    return sizes


@for_each(
    ("seconds", "most"), [(1e-6, 64), (4e-4, 16), (9.6e-4, 8), (4e-2, 8)], ids=["all", "two", "one", "slow"]
)
def test_a_slot_takes_the_steps_of_an_epoch_that_are_loaded_in_eight_milliseconds(
    seconds: float, most: int
) -> None:
    """20 steps of 8 samples an epoch, slots for 8 steps."""
    runtime = runtime_of(FAST_SECONDS, samples=160, epochs=3, slots=1, readers=0, steps=8)

    sizes = samples_staged(runtime, seconds)

    assert max(sizes) == most
    of_an_epoch = {64: [64, 64, 32], 16: [16] * 10, 8: [8] * 20}[most]
    assert sizes[-len(of_an_epoch) :] == of_an_epoch


def test_what_reader_threads_bring_is_staged_step_by_step() -> None:
    """Decoding takes no time, and it may be long until all samples of several steps are there."""
    runtime = runtime_of(SLOW_SECONDS, samples=160, epochs=3, readers=4, steps=8)
    runtime.run()

    assert runtime.steps_together == 1


def test_the_first_read_of_each_epoch_is_a_workers_own_which_shows_what_that_takes_now() -> None:
    runtime = runtime_of(SLOW_SECONDS, epochs=3, slots=1)
    own: list[tuple[int, int]] = []
    obey = runtime.obey

    def watch(instructions: list[Instruction]) -> None:
        own.extend(
            (each.epoch, each.step)
            for each in instructions
            if isinstance(each, Load)
            for origin in each.origins
            if origin == SOURCE
        )
        obey(instructions)

    runtime.obey = watch  # type: ignore[method-assign]
    runtime.run()

    assert own == [(0, 0), (1, 0), (2, 0)]


def test_a_batch_is_due_from_when_the_one_before_it_got_its_slot() -> None:
    runtime = runtime_of(SLOW_SECONDS, slots=2)
    first = runtime.scheduler.start(1.0)
    runtime.obey(first)
    slots = [runtime.take(0, step).slot for step in range(2)]
    answers = [
        first,
        *(runtime.scheduler.slot_freed(slot, now) for slot, now in zip(slots, (5.0, 9.0), strict=True)),
    ]
    notices = [each for answer in answers for each in answer if isinstance(each, Staged)]

    due = [(each.step, each.due_seconds) for each in notices]
    assert due == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 5.0)]


@pytest.mark.parametrize("together", [0, 5])
def test_urgent_moves_go_out_in_the_order_in_which_the_training_needs_them(together: int) -> None:
    """However long a read takes, as many of the source are a move as are asked for together."""
    runtime = runtime_of(SLOW_SECONDS, slots=4, readers=2, together=together)
    runtime.obey(runtime.scheduler.start(0.0))
    moved: list[list[int]] = []
    while runtime.moves:
        moved.append(runtime.moves[0].samples)
        runtime._finish_move(runtime.moves[0])

    order = runtime.plan.stream(0, 0, 0, 32).tolist()
    assert [sample for samples in moved for sample in samples] == order[1:]  # the first one is the probe
    if together:
        assert set(map(len, moved[:-1])) == {together}


@pytest.mark.parametrize("are_near", [False, True])
def test_what_is_read_together_is_of_one_epoch(are_near: bool) -> None:
    """Three slots: at the end of an epoch one or two have steps of the next one."""
    case = replace(runtime_of(SLOW_SECONDS).case, samples=12, batch=4, epochs=6, slots=3, readers=1)
    runtime = (in_chunks if are_near else FakeRuntime)(replace(case, together=1 if are_near else 3))
    runtime.run()
    moves = [told for told in runtime.told if isinstance(told, tuple) and told[0] == "Move"]

    for _, _, samples, *_, epoch, step in moves:
        assert set(samples) <= set(runtime.plan.stream(0, epoch, step, 12 - 4 * step).tolist())
    assert max(len(samples) for _, _, samples, *_ in moves) >= 3


@pytest.mark.parametrize(("readers", "sizes"), [(2, [8]), (3, [4, 4]), (20, [1] * 8)])
def test_a_move_that_would_take_one_reader_long_is_shared_by_those_that_are_idle(
    readers: int, sizes: list[int]
) -> None:
    runtime = runtime_of(SLOW_SECONDS, samples=17, batch=17, epochs=1, readers=readers, together=8)
    runtime.obey(runtime.scheduler.start(0.0))
    while len(runtime.moves) < 2:
        runtime.finish_something()
    move, *others = runtime.moves
    assert (len(move.samples), len(others)) == (8, 1)

    runtime.moves = others
    runtime.obey(runtime.scheduler.divided(move, 0.0))

    parts = runtime.moves[1:]
    assert [len(part.samples) for part in parts] == sizes
    assert [sample for part in parts for sample in part.samples] == move.samples
    assert runtime.scheduler.moves_running == len(runtime.moves)
    runtime.go_on()
    assert sorted(runtime.physical_reads) == list(range(17))
    assert runtime.scheduler.moves_running == 0


def test_samples_are_read_together_only_while_that_is_of_use() -> None:
    """Or else one reader reads one after the other what all of them could read at once."""
    runtime, answers = (
        runtime_of(SLOW_SECONDS, slots=4, readers=2, together=5),
        cycle([True, False]),
    )
    asked = list[bool]()

    def reads_together() -> bool:
        asked.append(next(answers))
        return asked[-1]

    runtime.scheduler._reads_together = reads_together
    runtime.obey(runtime.scheduler.start(0.0))
    sizes = [(asked[-1], len(each.samples)) for each in runtime.moves]
    while runtime.moves and len(sizes) < 8:
        before = list(runtime.moves)
        runtime._finish_move(before[0])
        sizes += [(asked[-1], len(each.samples)) for each in runtime.moves if each not in before]

    assert set(sizes) == {(True, 5), (False, 1)}


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_store_that_turns_out_slow_gives_way_to_a_tier_that_the_machine_calls_slower(is_slow: bool) -> None:
    """The machine says 2 ms of latency for the store and 5 ms for the tier; in truth the store takes 10 ms, or 1."""
    seconds = SLOW_SECONDS if is_slow else 0.001
    runtime = runtime_of(seconds, epochs=4, tier_bytes=10**6, tier_seconds=0.005)
    runtime.run()

    hits = [
        told
        for told in runtime.told
        if isinstance(told, tuple) and told[0] == "Move" and told[3] == 1  # Move.origin
    ]
    assert (len(hits) > 64) == is_slow


@pytest.mark.parametrize(
    ("bytes_per_second", "are_from_store"), [(5e8, False), (1.2e7, True)], ids=["fast disk", "slow disk"]
)
def test_a_queue_at_a_disk_sends_reads_to_the_store_only_where_the_disk_is_the_slower_one(
    bytes_per_second: float, are_from_store: bool
) -> None:
    """Twenty batches are staged at once: 32 ms of work for the fast disk. A read of the store takes 12 ms."""
    samples = np.full(160, 100_000, np.int64)
    disk = StorageClass("ssd", 10**9, 1, Curve(((1, bytes_per_second),)), latency_seconds=1e-4)
    one = replace(machine(latency_seconds=0.01), source=SharedStore(None, Curve(((1, 5e7),)), 0.01))
    one = replace(one, storage=(*one.storage[:2], disk))
    plan, ids = AccessPlan(FullShuffle(160, 1), 8, 1), np.arange(160)
    scheduler = Scheduler(
        plan,
        0,
        samples,
        Placement(np.full(160, 2, np.int8), ids),
        one,
        StagingLimits(slots=20, readers=8, decoders=1, undecoded_bytes=10**9),
        held={2: ids},
    )

    queue = moves_in(scheduler.start(0.0))
    origins = [move.origin for move in queue]
    while queue:  # each takes what the machine says
        move = queue.pop(0)
        rate = 5e7 if move.origin == SOURCE else bytes_per_second
        more = moves_in(scheduler.moved(move, 1e-4 + 1e5 * len(move.samples) / rate, [], 0.0))
        origins += [move.origin for move in more]
        queue += more

    assert (SOURCE in origins) == are_from_store


def test_a_disk_is_read_by_its_own_number_of_threads_while_other_readers_read_the_store() -> None:
    """Sixteen of each batch of 32 are on a disk of two threads; eight readers have all of them to read."""
    sizes, ids = np.full(64, 100_000, np.int64), np.arange(0, 64, 2)
    disk = StorageClass("ssd", 10**9, 2, Curve.flat(1e7), latency_seconds=1e-4)
    one = replace(machine(latency_seconds=0.01), source=SharedStore(None, Curve.flat(1e7), 0.01))
    placement = Placement(np.where(np.arange(64) % 2, SOURCE, 2).astype(np.int8), ids)
    limits = StagingLimits(slots=2, readers=8, decoders=1, undecoded_bytes=10**9)
    one = replace(one, storage=(*one.storage[:2], disk))
    plan = AccessPlan(Sequential(64), 32, 1)
    scheduler = Scheduler(plan, 0, sizes, placement, one, limits, held={2: ids})

    under_way = moves_in(scheduler.start(0.0))
    at_once = [Counter(move.origin for move in under_way)]
    while under_way:
        move = under_way.pop(0)
        under_way += moves_in(scheduler.moved(move, 0.01 * len(move.samples), [], 0.0))
        at_once.append(Counter(move.origin for move in under_way))

    assert at_once[0] == {2: 2, SOURCE: 6}
    assert max(each[2] for each in at_once) == 2


def test_a_tier_that_turns_out_slow_is_no_longer_read_by_the_workers_themselves() -> None:
    """The machine calls it memory; each read of it takes 5 ms."""
    quick, slow = (
        FakeRuntime(Case(64, 8, 4, 2, 4, 1, 10**6, 10**6, SLOW_SECONDS, seconds, 0))
        for seconds in (0.0, 0.005)
    )
    slow.scheduler = Scheduler(slow.plan, 0, slow.sizes, slow.placement, machine(), slow.limits)
    for runtime in (quick, slow):
        runtime.run()

    assert quick.moved <= 64
    assert slow.moved >= 2 * 64


def test_one_read_that_waited_for_something_else_does_not_make_a_tier_slow() -> None:
    """A worker that asks memory for a sample may wait milliseconds for the interpreter's lock."""
    runtime = runtime_of(SLOW_SECONDS, epochs=2, tier_bytes=10**6)
    scheduler = runtime.scheduler
    for seconds in (0.0, 0.02, 0.0):
        scheduler._call(decisions.OBSERVED, 0, 1, 1, seconds)
        assert decisions.reads_by_itself(scheduler._state, 0, 1)

    for _ in range(20):
        scheduler._call(decisions.OBSERVED, 0, 1, 1, 0.02)

    assert not decisions.reads_by_itself(scheduler._state, 0, 1)


def scheduler_of(
    order: Order,
    batch: int,
    limits: StagingLimits,
    kept: list[int],
    epochs: int = 1,
    latency_seconds: float = 0.005,
) -> Scheduler:
    """Samples of 100 bytes, of which the tier keeps some, in this order."""
    plan = AccessPlan(order, batch, epochs)
    tier_of = np.full(plan.samples, SOURCE, np.int8)
    tier_of[kept] = 1
    one = machine()
    one = replace(one, source=replace(one.source, latency_seconds=latency_seconds))
    placement = Placement(tier_of, np.array(kept, np.int64))
    return Scheduler(plan, 0, np.full(plan.samples, 100), placement, one, limits)


def moves_in(instructions: list[Instruction]) -> list[Move]:
    return [each for each in instructions if isinstance(each, Move)]


def loads_in(instructions: list[Instruction]) -> list[Load]:
    return [each for each in instructions if isinstance(each, Load)]


def test_fills_hold_their_share_of_the_readers_however_many_samples_a_move_has() -> None:
    """Reads of 0.2 ms go by about four, and half of eight readers is four of them."""
    limits = StagingLimits(slots=1, readers=8, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Sequential(64), 4, limits, list(range(4, 64)), latency_seconds=0.0002)

    (probe,) = loads_in(scheduler.start(0.0))

    # It waited for a processor: the machine's model says what readers take.
    instructions = scheduler.loaded(probe, {}, [OwnRead(SOURCE, 1, SLOW_SECONDS)], 0.0)

    fills = [move for move in moves_in(instructions) if move.batch < 0]
    assert len(fills) == 4
    assert min(len(move.samples) for move in fills) > 1


def test_a_fill_ends_as_one_though_a_batch_that_waited_for_it_was_given_up() -> None:
    """Two batches wait for sample 5 while it is filled in, and the first of them is given up."""
    limits = StagingLimits(slots=1, readers=2, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Explicit([0, 5, 1, 5], 8), 1, limits, [5, 6])
    (fill,) = moves_in(scheduler.start(0.0))
    scheduler.slots_added(4, 0.0)
    scheduler.seek(0, 2, 0.0)

    (following,) = moves_in(scheduler.moved(fill, 0.001, [], 0.0))

    assert (following.batch, following.samples) == (-1, [6])


def test_a_tier_that_has_failed_is_not_filled_any_more() -> None:
    limits = StagingLimits(slots=1, readers=2, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Sequential(8), 1, limits, [5, 6])
    (fill,) = moves_in(scheduler.start(0.0))
    assert (fill.batch, fill.samples) == (-1, [5])

    scheduler.ended(1)

    assert moves_in(scheduler.moved(fill, 0.001, [], 0.0)) == []


def test_moves_go_out_by_due_time_after_a_batch_was_given_up_too() -> None:
    """Sample 1 was due first, for the batch that is given up; now it is due after 2 and 3."""
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Explicit([9, 8, 1, 4, 2, 3, 3, 1], 10), 2, limits, [])
    moves = moves_in(scheduler.start(0.0))
    scheduler.seek(0, 2, 0.0)

    samples: list[int] = []
    while moves:
        samples += moves[0].samples
        moves = moves_in(scheduler.moved(moves[0], 0.001, [], 0.0))

    assert samples == [8, 2, 3, 1]


def test_a_sample_that_a_batch_has_twice_is_over_with_the_batch_that_is_given_up() -> None:
    """The worker that should have read it for the first place has not begun; the second place waits."""
    limits = StagingLimits(slots=2, readers=0, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Explicit([7, 3, 3, 4, 5, 6], 8), 3, limits, [3])
    queue: list[Instruction] = [*scheduler.start(0.0), *scheduler.seek(0, 1, 0.0)]
    loaded: list[tuple[int, int]] = []
    while queue:
        for load in loads_in([queue.pop(0)]):
            loaded += [(load.step, sample) for sample in load.ids.tolist()]
            queue += scheduler.loaded(load, {}, [], 0.0)

    assert loaded == [(0, 7), (1, 4), (1, 5), (1, 6)]


def test_what_a_tier_could_not_give_to_a_batch_that_was_given_up_is_not_asked_of_it_again() -> None:
    limits = StagingLimits(slots=1, readers=0, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Explicit([[3, 5]] * 3, 8), 1, limits, [3], epochs=3)
    (into_tier,) = loads_in(scheduler.start(0.0))
    scheduler.loaded(into_tier, {}, [], 0.0)
    scheduler.seek(1, 0, 0.0)
    (from_tier,) = loads_in(scheduler.slot_freed(into_tier.slot, 0.0))
    scheduler.seek(2, 0, 0.0)

    (after,) = loads_in(scheduler.loaded(from_tier, {0: UNREAD}, [], 0.0))

    assert (into_tier.rests, from_tier.origins, after.ids.tolist(), after.origins) == (
        [1],
        [1],
        [3],
        [SOURCE],
    )


def test_the_first_read_of_an_epoch_is_a_workers_own_after_an_epoch_that_was_left_early_too() -> None:
    limits = StagingLimits(slots=1, readers=2, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Sequential(8), 1, limits, [], epochs=3)
    (probe,) = loads_in(scheduler.start(0.0))
    scheduler.loaded(probe, {}, [OwnRead(SOURCE, 1, SLOW_SECONDS)], 0.0)
    scheduler.seek(1, 0, 0.0)

    (load,) = loads_in(scheduler.slot_freed(probe.slot, 0.0))

    assert load.origins == [SOURCE]


def test_what_workers_hand_back_to_readers_is_for_the_batch_that_waits_for_it_now() -> None:
    """A worker was to read sample 3 for the batch that is given up; reads turn out slow before it has begun."""
    limits = StagingLimits(slots=3, readers=1, decoders=1, undecoded_bytes=10**6)
    scheduler = scheduler_of(Explicit([0, 1, 3, 4, 3, 5], 8), 2, limits, [3], latency_seconds=0.001)
    (probe,) = loads_in(scheduler.start(0.0))
    (second,) = loads_in(scheduler.loaded(probe, {}, [OwnRead(SOURCE, 1, FAST_SECONDS)], 0.0))
    scheduler.seek(0, 2, 0.0)

    (move,) = moves_in(scheduler.loaded(second, {}, [OwnRead(SOURCE, 1, 0.5)], 0.0))

    assert (move.batch, move.samples) == (2, [3])


def test_pauses_of_the_training_say_nothing_about_the_number_of_threads() -> None:
    """It takes four batches and pauses for a minute, again and again; two threads load twice as fast as one."""
    limits = StagingLimits(slots=4, readers=0, decoders=1, undecoded_bytes=10**6, most_decoders=2)
    scheduler = scheduler_of(Sequential(800), 1, limits, [])
    coming: list[tuple[float, Any]] = [(0.1, load) for load in loads_in(scheduler.start(0.0))]
    for burst in range(1, 60):
        coming += [(60.0 * burst + 0.05 * slot, slot) for slot in range(4)]
        while coming:
            now, what = coming.pop(coming.index(min(coming, key=itemgetter(0))))
            is_load = isinstance(what, Load)
            told = scheduler.loaded(what, {}, [], now, 0.1) if is_load else scheduler.slot_freed(what, now)
            coming += [(now + 0.1, load) for load in loads_in(told)]

    threads = scheduler.threads
    fewer, ratio = threads.fewer or (0, 0.0)
    assert (threads.threads, fewer) == (2, 1)
    assert ratio == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": 0}, r"limits\.slots is 0; it must be at least 1"),
        ({"decoders": 1.5}, r"limits\.decoders is 1\.5; it must be an integer"),
        ({"readers": -1}, r"limits\.readers is -1; it must be at least 0"),
    ],
)
def test_limits_that_cannot_be_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StagingLimits(**{"slots": 2, "readers": 4, "decoders": 2, "undecoded_bytes": 10**6, **changes})


@for_each("seed", range(20))
def test_workers_read_parts_of_a_batch_from_the_source_where_nothing_is_kept(seed: int) -> None:
    case = Case(
        samples=50,
        batch=16,
        epochs=2,
        slots=3,
        readers=0,
        decoders=3,
        undecoded_bytes=10**6,
        tier_bytes=0,
        seconds=FAST_SECONDS,
        tier_seconds=0.0,
        seed=seed,
        broken=frozenset({7} if seed % 2 else ()),
        has_tiers=False,
    )
    runtime, failed = FakeRuntime(case), list[int]()

    runtime.run(lambda ready: failed.extend(ready.samples[list(ready.failed)].tolist()))

    assert failed == [7, 7] * (seed % 2)
    assert len(runtime.physical_reads) == 2 * case.samples
    loads = [told for told in runtime.told if isinstance(told, tuple) and told[0] == "Load"]
    assert len(loads) > 2 * 4, "batches are read in parts"
