"""The burst buffer's decisions, one by one, then driven at random: what is promised holds between any two of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.policy.delta_schemes import Scheme
from penstock.policy.draining import Admission, TwoTiers, admit, to_drain, to_forget_fast, to_forget_slow
from penstock.policy.retention import Keep, StoredSnapshot, lineage, restorable, to_forget
from penstock.policy.snap_distance import next_reference

KB = 1000


def tiers_of(fast: list[int], slow: list[int], references: dict[int, int] | None = None) -> TwoTiers:
    """Snapshots of 1 kB, committed in the order of their steps."""
    steps = sorted({*fast, *slow})
    snapshots = (StoredSnapshot(step, float(step), KB, (references or {}).get(step)) for step in steps)
    return TwoTiers(tuple(snapshots), dict.fromkeys(fast, KB), frozenset(slow))


def test_the_newest_is_drained_first() -> None:
    """Drains do not keep up: losing the fast tier should cost as little as it can."""
    assert to_drain(tiers_of([1, 2, 3, 4], [1]), Keep(), 0.0) == [4, 3, 2]
    assert to_drain(tiers_of([4], [1, 2, 3, 4]), Keep(), 0.0) == []


def test_what_the_newest_needs_is_drained_before_it() -> None:
    progressive, chain = {2: 1, 3: 2, 5: 4, 6: 5}, {2: 1, 3: 1, 5: 4, 6: 4}

    assert to_drain(tiers_of([1, 2, 3, 4, 5, 6], [], progressive), Keep(6), 0.0) == [4, 5, 6, 1, 2, 3]
    assert to_drain(tiers_of([1, 2, 3, 4, 5, 6], [4], chain), Keep(6), 0.0) == [6, 5, 1, 3, 2]


def test_what_retention_gave_up_meanwhile_is_not_drained_but_forgotten() -> None:
    tiers = tiers_of([1, 2, 3, 4], [1])

    assert to_drain(tiers, Keep(last=2), 0.0) == [4, 3]
    assert to_forget_fast(tiers, Keep(last=2), 0.0) == [2, 1]
    assert to_forget_fast(tiers, Keep(last=2), 0.0, in_use=[2]) == [1]


def test_what_is_damaged_is_not_drained() -> None:
    snapshots = (StoredSnapshot(1, 0.0, KB), StoredSnapshot(2, 0.0, KB, is_intact=False))

    assert to_drain(TwoTiers(snapshots, {1: KB, 2: KB}, frozenset()), Keep(), 0.0) == [1]


def test_the_slow_tier_forgets_nothing_for_the_sake_of_what_is_not_there_yet() -> None:
    """The fast tier is a drive in the node; if the node is lost now, snapshot 1 is all there is."""
    assert to_forget_slow(tiers_of([2, 3], [1]), Keep(last=1), 0.0) == []
    assert to_forget_slow(tiers_of([2, 3], [1, 3]), Keep(last=1), 0.0) == [1]


def test_the_slow_tier_keeps_what_one_on_the_fast_tier_needs() -> None:
    """Snapshot 20 is to be kept for good and still waits; its baseline left the fast tier long ago."""
    tiers = tiers_of([20], [11, 25, 26], {20: 11})

    assert to_forget_slow(tiers, Keep(last=2, every_steps=20), 0.0) == []
    assert to_forget_slow(tiers_of([], [11, 25, 26]), Keep(last=2, every_steps=20), 0.0) == [11]


def test_space_is_made_by_the_oldest_copies_that_are_on_both_tiers() -> None:
    tiers = tiers_of([1, 2, 3, 4], [1, 2, 3])

    assert admit(tiers, 5 * KB, KB) == Admission(True)
    assert admit(tiers, 4 * KB, KB) == Admission(True, (1,))
    assert admit(tiers, 4 * KB, 2 * KB, in_use=[1]) == Admission(True, (2, 3))


def test_what_does_not_fit_falls_through_and_drives_nothing_out() -> None:
    tiers = tiers_of([1, 2, 3, 4], [1, 2, 3])

    assert admit(tiers, 4 * KB, 4 * KB) == Admission(False)
    assert admit(tiers, 4 * KB, 5 * KB) == Admission(False)
    assert admit(tiers_of([3, 4], []), 2 * KB, KB) == Admission(False)


def test_what_the_newest_needs_leaves_last() -> None:
    tiers = tiers_of([1, 2, 3, 4], [1, 2, 3], {2: 1, 3: 1, 4: 1})

    assert admit(tiers, 4 * KB, 2 * KB).forget == (2, 3)
    assert admit(tiers, 4 * KB, 3 * KB).forget == (2, 3, 1)


def test_lists_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="step 2 is on a tier and no snapshot"):
        TwoTiers((StoredSnapshot(1, 0.0, KB),), {1: KB, 2: KB}, frozenset())
    with pytest.raises(ConfigError, match="step 1 is"):
        TwoTiers((StoredSnapshot(1, 0.0, KB),), {}, frozenset())


# -- A store of two tiers that does as it is told ------------------------------------------------------------


@dataclass
class ToldStore:
    """Bytes by step on two tiers, and what was decided; one drain at a time, begun and ended apart."""

    keep: Keep
    scheme: Scheme
    capacity_bytes: int
    committed: list[StoredSnapshot] = field(default_factory=list)
    fast: dict[int, int] = field(default_factory=dict)
    slow: dict[int, int] = field(default_factory=dict)
    draining: int | None = None
    fell_through: int = 0

    @property
    def tiers(self) -> TwoTiers:
        return TwoTiers(tuple(self.committed), self.fast, frozenset(self.slow))

    @property
    def now(self) -> float:
        return float(self.committed[-1].step) if self.committed else 0.0

    @property
    def in_use(self) -> list[int]:
        return [] if self.draining is None else [self.draining]

    def forget(self, tier: dict[int, int], steps: list[int]) -> None:
        for step in steps:
            del tier[step]
            self.committed = [each for each in self.committed if each.step in {*self.fast, *self.slow}]
            self.check()

    def save(self, nbytes: int) -> None:
        step = self.committed[-1].step + 1 if self.committed else 1
        admission = admit(self.tiers, self.capacity_bytes, nbytes, in_use=self.in_use)
        self.forget(self.fast, list(admission.forget))
        since = list[StoredSnapshot]()
        for snapshot in self.committed:
            since = [*(since if snapshot.reference_step is not None else []), snapshot]
        place = next_reference(self.scheme, 4, [each.stored_bytes for each in since])
        reference = None if place is None else since[place].step
        if not admission.to_fast:
            self.fell_through += 1
            if reference is not None and not self.slow.keys() >= set(lineage(self.committed, reference)):
                reference = None
        (self.fast if admission.to_fast else self.slow)[step] = nbytes
        self.committed.append(StoredSnapshot(step, float(step), nbytes, reference))
        self.retain()

    def begin_drain(self) -> None:
        if self.draining is None and (waiting := to_drain(self.tiers, self.keep, self.now)):
            self.draining = waiting[0]

    def end_drain(self) -> None:
        if self.draining is not None:
            self.slow[self.draining], self.draining = self.fast[self.draining], None
            self.retain()

    def retain(self) -> None:
        self.check()
        self.forget(self.fast, to_forget_fast(self.tiers, self.keep, self.now, in_use=self.in_use))
        self.forget(self.slow, to_forget_slow(self.tiers, self.keep, self.now, in_use=self.in_use))

    def check(self) -> None:
        """What must be true whenever a crash may come."""
        listed = [each.step for each in self.committed]
        assert restorable(self.committed) == listed
        assert sum(self.fast.values()) <= self.capacity_bytes
        for step in self.slow:
            assert set(lineage(self.committed, step)) <= set(self.slow)


@settings(max_examples=150)
@given(
    st.builds(
        Keep,
        last=st.integers(1, 4),
        every_steps=st.none() | st.integers(2, 6),
        max_bytes=st.none() | st.integers(1, 20),
    ),
    st.sampled_from(["complete", "progressive", "chain"]),
    st.integers(0, 30),
    st.lists(st.sampled_from(["save", "save", "begin", "end"]), max_size=60),
    st.integers(0, 9),
)
def test_whatever_happens_all_that_is_listed_can_be_restored_and_the_newest_gets_to_the_slow_tier(
    keep: Keep, scheme: Scheme, capacity: int, events: list[str], seed: int
) -> None:
    """Also if the fast tier is lost: then from the slow one alone."""
    store, sizes = ToldStore(keep, scheme, capacity), random.Random(seed)
    for event in events:
        if event == "save":
            store.save(sizes.randint(1, 6))
            assert store.committed[-1].step == store.now
        elif event == "begin":
            store.begin_drain()
        else:
            store.end_drain()
    for _ in range(60):
        store.end_drain()
        store.begin_drain()

    assert to_drain(store.tiers, keep, store.now) == []
    if store.committed:
        assert max(store.slow) == store.committed[-1].step
        wanted = {each.step for each in store.committed} - set(to_forget(store.committed, keep, store.now))
        assert wanted <= set(store.slow)
    assert capacity or store.fell_through == events.count("save")


def test_a_drain_that_is_much_too_slow_takes_the_newest_each_time() -> None:
    """Ten saves in the time of one drain: each drain then brings the newest there is over, the others are let go."""
    store = ToldStore(Keep(last=3), "complete", 20)
    drained = list[int]()
    for number in range(40):
        store.save(4)
        if number % 10 == 0:
            store.end_drain()
            store.begin_drain()
            drained.append(store.draining or 0)

    assert drained == [1, 11, 21, 31]
    assert store.fell_through == 0
