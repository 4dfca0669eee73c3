"""The scheduler against a runtime that finishes things in any order it likes."""

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy import (
    FetchCosts,
    Load,
    Placement,
    Read,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
    place_by_frequency,
)
from penstock.trace.schema import SOURCE, STAGING

SLOW_SECONDS, FAST_SECONDS = 0.01, 1e-6


def machine() -> Machine:
    memory = Curve(((1, 1e10),))
    return Machine(
        SharedStore(None, Curve(((1, 1e7),)), latency_seconds=0.001),
        (StorageClass("staging", 10**9, 1, memory), StorageClass("memory", 10**9, 1, memory)),
    )


class FakeRuntime:
    """Obeys a scheduler, finishing reads and loads in random order, and records all that it was told."""

    def __init__(
        self,
        plan: AccessPlan,
        sizes: np.ndarray,
        placement: Placement,
        limits: StagingLimits,
        chance: random.Random,
        read_seconds: float = SLOW_SECONDS,
        broken: frozenset[int] = frozenset(),
    ) -> None:
        self.scheduler = Scheduler(plan, 0, sizes, placement, FetchCosts(machine()), limits)
        self.limits = limits
        self.chance = chance
        self.read_seconds = read_seconds
        self.broken = broken
        self.reads: list[Read] = []
        self.loads: list[Load] = []
        self.ready: dict[tuple[int, int], Ready] = {}
        self.physical_reads: list[int] = []
        self.filled: Counter[int] = Counter()
        self.tier: set[int] = set()
        self.loaded: Counter[tuple[int, int]] = Counter()
        self.slots_in_use: set[int] = set()
        self.order: list[tuple[int, int]] = []

    def obey(self, instructions: list[Read | Load | Staged | Ready]) -> None:
        for instruction in instructions:
            match instruction:
                case Read():
                    assert not instruction.by_worker
                    self.reads.append(instruction)
                case Load():
                    self.loads.append(instruction)
                case Ready():
                    self.ready[instruction.epoch, instruction.step] = instruction
                case Staged():
                    self.order.append((instruction.epoch, instruction.step))
        assert len(self.reads) <= self.limits.readers
        assert len(self.loads) <= self.limits.decoders
        in_flight = [read.sample for read in self.reads if read.tier != STAGING]
        assert len(in_flight) == len(set(in_flight)), "a sample is being fetched twice"

    def finish_something(self) -> None:
        """One outstanding read or load ends."""
        candidates = self.reads + self.loads
        assert candidates, "nothing is under way and the consumer waits: a deadlock"
        done = self.chance.choice(candidates)
        if isinstance(done, Read):
            self.reads.remove(done)
            self.physical_reads.append(done.sample)
            if done.sample in self.broken:
                self.obey(self.scheduler.read_failed(done, 0.0))
            else:
                self._keep(done)
                self.obey(self.scheduler.read_done(done, self.read_seconds, 0.0))
        else:
            self.loads.remove(done)
            failed, seconds = [], []
            for item in done.items:
                assert done.samples[item.index] == item.sample
                if item.origin == SOURCE:
                    assert item.read is not None or not self.limits.readers
                    self.physical_reads.append(item.sample)
                    if item.sample in self.broken:
                        failed.append(item)
                        continue
                    if item.read is not None:
                        self._keep(item.read)
                    seconds.append(self.read_seconds)
                elif item.origin == STAGING:
                    assert item.read is not None
                    assert item.read.sample == item.sample
                else:
                    assert item.sample in self.tier
                self.loaded[done.batch, item.index] += 1
            self.obey(self.scheduler.load_done(done, failed, seconds, 0.0))

    def _keep(self, read: Read) -> None:
        if read.tier != STAGING:
            assert read.sample not in self.tier, "a tier was given a sample twice"
            self.tier.add(read.sample)

    def take(self, epoch: int, step: int) -> Ready:
        while (epoch, step) not in self.ready:
            self.finish_something()
        return self.ready.pop((epoch, step))


cases = st.tuples(
    st.integers(1, 40),  # samples
    st.integers(1, 9),  # batch size
    st.integers(1, 4),  # epochs
    st.integers(1, 4),  # slots
    st.integers(0, 5),  # readers
    st.integers(1, 3),  # decoders
    st.integers(1, 500),  # undecoded bytes
    st.integers(0, 3000),  # tier bytes
    st.sampled_from([SLOW_SECONDS, FAST_SECONDS]),
    st.integers(0, 2**32),
)


def staged_reads(load: Load) -> list[Read]:
    """The reads whose bytes a Load is decoding."""
    return [
        item.read
        for item in load.items
        if item.read is not None and item.read.tier == STAGING and not item.read.by_worker
    ]


def set_up(
    case: tuple[int, int, int, int, int, int, int, int, float, int], broken: frozenset[int] = frozenset()
) -> tuple[AccessPlan, Placement, FakeRuntime]:
    samples, batch, epochs, slots, readers, decoders, undecoded, tier_bytes, seconds, seed = case
    plan = AccessPlan(FullShuffle(samples, seed), batch, epochs)
    chance = random.Random(seed)
    sizes = np.array([chance.randint(1, 200) for _ in range(samples)], np.int64)
    placement = place_by_frequency(plan, 0, sizes, [tier_bytes])
    limits = StagingLimits(slots, readers, decoders, undecoded)
    return plan, placement, FakeRuntime(plan, sizes, placement, limits, chance, seconds, broken)


@settings(max_examples=300)
@given(cases)
def test_every_batch_arrives_whole_in_order_and_each_sample_once(
    case: tuple[int, int, int, int, int, int, int, int, float, int],
) -> None:
    plan, _, runtime = set_up(case)

    runtime.obey(runtime.scheduler.start(0.0))
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            ready = runtime.take(epoch, step)
            assert ready.samples.tolist() == plan.local_batch(0, epoch, step).tolist()
            assert ready.failed == ()
            runtime.obey(runtime.scheduler.slot_freed(ready.slot, 0.0))

    assert set(runtime.loaded.values()) == {1}
    assert len(runtime.loaded) == plan.samples * plan.epochs
    assert runtime.order == [(e, s) for e in range(plan.epochs) for s in range(plan.steps(e))]


@settings(max_examples=200)
@given(cases)
def test_the_store_is_read_once_per_miss_which_is_the_bound_of_any_policy(
    case: tuple[int, int, int, int, int, int, int, int, float, int],
) -> None:
    plan, placement, runtime = set_up(case)

    runtime.obey(runtime.scheduler.start(0.0))
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            runtime.obey(runtime.scheduler.slot_freed(runtime.take(epoch, step).slot, 0.0))

    reads = Counter(runtime.physical_reads)
    kept = set(placement.fill_order.tolist())
    assert all(reads[sample] == 1 for sample in kept)
    assert all(reads[sample] <= plan.epochs for sample in range(plan.samples))
    bound = plan.samples + (plan.epochs - 1) * (plan.samples - len(kept))
    assert reads.total() <= bound


@settings(max_examples=150)
@given(cases, st.sets(st.integers(0, 39), min_size=1, max_size=5))
def test_a_broken_sample_fails_its_own_places_and_no_other(
    case: tuple[int, int, int, int, int, int, int, int, float, int], broken: set[int]
) -> None:
    plan, _, runtime = set_up(case, frozenset(broken))

    runtime.obey(runtime.scheduler.start(0.0))
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            ready = runtime.take(epoch, step)
            expected = [i for i, sample in enumerate(ready.samples.tolist()) if sample in broken]
            assert list(ready.failed) == expected
            runtime.obey(runtime.scheduler.slot_freed(ready.slot, 0.0))


@settings(max_examples=200)
@given(cases, st.data())
def test_after_a_seek_the_rest_of_the_run_is_as_if_nothing_had_been_staged(
    case: tuple[int, int, int, int, int, int, int, int, float, int], data: st.DataObject
) -> None:
    plan, _, runtime = set_up(case)
    epoch = data.draw(st.integers(0, plan.epochs - 1))
    step = data.draw(st.integers(0, plan.steps(epoch) - 1))
    before = data.draw(st.integers(0, 30))

    runtime.obey(runtime.scheduler.start(0.0))
    for _ in range(before):
        if runtime.reads or runtime.loads:
            runtime.finish_something()
    given_up = [ready for key, ready in runtime.ready.items() if key < (epoch, step)]
    runtime.ready = {key: ready for key, ready in runtime.ready.items() if key >= (epoch, step)}
    for _ in range(data.draw(st.integers(1, 2))):
        runtime.obey(runtime.scheduler.seek(epoch, step, 0.0))
    for ready in given_up:
        runtime.obey(runtime.scheduler.slot_freed(ready.slot, 0.0))

    for later in range(epoch, plan.epochs):
        for current in range(step if later == epoch else 0, plan.steps(later)):
            ready = runtime.take(later, current)
            assert ready.samples.tolist() == plan.local_batch(0, later, current).tolist()
            assert ready.failed == ()
            runtime.obey(runtime.scheduler.slot_freed(ready.slot, 0.0))


@settings(max_examples=100)
@given(cases)
def test_bytes_in_passing_stay_within_their_bound_but_for_one_read(
    case: tuple[int, int, int, int, int, int, int, int, float, int],
) -> None:
    plan, _, runtime = set_up(case)
    limit = runtime.limits.undecoded_bytes

    runtime.obey(runtime.scheduler.start(0.0))
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            while (epoch, step) not in runtime.ready:
                runtime.finish_something()
                waiting = {id(read): read for load in runtime.loads for read in staged_reads(load)}
                in_passing = [*runtime.reads, *waiting.values()]
                total = sum(read.nbytes for read in in_passing)
                assert total <= limit or len(in_passing) == 1
            runtime.obey(runtime.scheduler.slot_freed(runtime.take(epoch, step).slot, 0.0))


def test_workers_read_by_themselves_once_a_probe_shows_that_reads_cost_less_than_a_hand_over() -> None:
    plan = AccessPlan(FullShuffle(64, 0), 8, 2)
    sizes = np.full(64, 100, np.int64)
    placement = place_by_frequency(plan, 0, sizes, [])
    limits = StagingLimits(slots=2, readers=4, decoders=1, undecoded_bytes=10_000)

    fast = FakeRuntime(plan, sizes, placement, limits, random.Random(0), FAST_SECONDS)
    slow = FakeRuntime(plan, sizes, placement, limits, random.Random(0), SLOW_SECONDS)
    for runtime in (fast, slow):
        runtime.obey(runtime.scheduler.start(0.0))
        for step in range(plan.steps(0)):
            runtime.obey(runtime.scheduler.slot_freed(runtime.take(0, step).slot, 0.0))

    assert not fast.reads
    assert slow.reads
