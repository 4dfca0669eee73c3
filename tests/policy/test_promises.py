"""What another rank has promised to read is waited for, and read from the source where that takes too long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.policy.test_scheduler import KNOWN_SECONDS, machine

from penstock.errors import ConfigError
from penstock.machine import Curve, StorageClass
from penstock.plan import AccessPlan, Sequential
from penstock.policy import Instruction, Load, Move, OwnRead, Placement, Scheduler, StagingLimits
from penstock.policy.decisions import HEARD_SECONDS, SILENT_SECONDS, VAIN_SECONDS, reads_by_itself
from penstock.policy.loading import Fill
from penstock.policy.placement import Kept, Shared
from penstock.trace.schema import SOURCE

#: Rank 0 of 2 reads samples 0 and 1, 4 and 5 of eight; rank 1 is to keep 1 and 4, and has promised 4.


def _scheduler(
    first: tuple[int, int] = (0, 0), epochs: int = 1, latency_seconds: float = KNOWN_SECONDS
) -> Scheduler:
    nothing = Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    others = Kept(np.array([1, 4]), np.ones(2, np.int8))
    plan = AccessPlan(Sequential(8), 4, epochs, 2)
    return Scheduler(
        plan,
        0,
        np.full(8, 10),
        Placement(np.full(8, SOURCE, np.int8), np.empty(0, np.int64)),
        machine(latency_seconds=latency_seconds),
        StagingLimits(2, readers=4, decoders=1, undecoded_bytes=10**6),
        shared=Shared((nothing, others), np.array([4]), first),
    )


def _read(instructions: list[Instruction]) -> dict[int, int]:
    """Return from where each sample is to be read, by a reader or a worker."""
    found: dict[int, int] = {}
    for each in instructions:
        if isinstance(each, Move):
            found |= dict.fromkeys(each.samples, each.origin)
        elif isinstance(each, Load):
            found |= {k: origin for k, origin in zip(each.ids, each.origins, strict=True) if origin != 0}
    return found


def _all_done(
    scheduler: Scheduler, instructions: list[Instruction], own_seconds: float | None = None
) -> dict[int, int]:
    """Do all that is said until nothing more is; return from where each sample was read.

    own_seconds: how long a worker's own read of the source takes; None reports no time.
    """
    found: dict[int, int] = {}
    while instructions:
        found |= _read(instructions[:1])
        each, *instructions = instructions
        if isinstance(each, Move):
            instructions += scheduler.moved(each, 0.01, [], 0.0)
        elif isinstance(each, Load):
            own = [OwnRead(SOURCE, 1, own_seconds)] if own_seconds and SOURCE in each.origins else []
            instructions += scheduler.loaded(each, {}, own, 0.0)
    return found


def test_a_promised_sample_is_read_where_it_was_promised_once_it_is_announced() -> None:
    scheduler = _scheduler()

    assert _all_done(scheduler, scheduler.start(0.0)) == {0: SOURCE, 1: SOURCE, 5: SOURCE}
    assert scheduler.expects_others
    assert scheduler.waited(1e-6, 0.0) == []

    ((sample, place),) = _all_done(scheduler, scheduler.announced(1, np.array([4, 7]), 0.0)).items()
    assert sample == 4
    assert scheduler.where(place) == (1, 1)
    assert not scheduler.expects_others


def test_a_promise_that_takes_longer_than_a_read_is_waited_for_no_more() -> None:
    scheduler = _scheduler()
    _all_done(scheduler, scheduler.start(0.0))

    assert _all_done(scheduler, scheduler.waited(10.0, 0.0)) == {4: SOURCE}
    assert not scheduler.expects_others


def test_a_store_that_workers_read_by_themselves_ends_no_promise_before_others_are_heard_of() -> None:
    scheduler = _scheduler(latency_seconds=0.0)
    read = _all_done(scheduler, scheduler.start(0.0), own_seconds=1e-6)
    assert reads_by_itself(scheduler._views, 0, SOURCE)

    assert scheduler.expects_others
    assert scheduler.waited(0.9 * HEARD_SECONDS, 0.0) == []
    read |= _all_done(scheduler, scheduler.waited(10.0, 0.0))
    assert read[4] == SOURCE


PROMISED = np.arange(1, 24, 4)


def _six_steps() -> Scheduler:
    """Rank 1 has promised one sample of each of the six steps of rank 0, which has one slot."""
    nothing = Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    return Scheduler(
        AccessPlan(Sequential(24), 4, 1, 2),
        0,
        np.full(24, 10),
        Placement(np.full(24, SOURCE, np.int8), np.empty(0, np.int64)),
        machine(),
        StagingLimits(1, readers=4, decoders=1, undecoded_bytes=10**6),
        shared=Shared((nothing, Kept(PROMISED, np.ones(6, np.int8))), PROMISED, (0, 0)),
    )


def test_a_rank_that_is_stopped_costs_one_wait_and_is_counted_on_again_once_it_announces_something() -> None:
    """Rank 1 resumes after the fourth step, and announces samples once."""
    scheduler = _six_steps()
    waits, read = list[bool](), dict[int, int]()
    instructions = scheduler.start(0.0)
    for step in range(6):
        now = 10.0 * step
        read |= _all_done(scheduler, instructions)
        waits.append(scheduler.expects_others)
        read |= _all_done(scheduler, scheduler.waited(SILENT_SECONDS, now))
        if step == 3:
            scheduler.announced(1, PROMISED[-1:], now)
        instructions = scheduler.slot_freed(0, now)

    assert waits == [True, False, False, False, True, False]
    places = {sample: scheduler.where(place) for sample, place in read.items()}
    assert {sample for sample, place in places.items() if place == (1, 1)} == {21}


def test_a_rank_is_waited_for_as_long_as_it_announces_anything() -> None:
    """It is behind, as one that does not end each step together with this one may be."""
    scheduler = _six_steps()
    _all_done(scheduler, scheduler.start(0.0))
    for now in np.arange(0.5, 8, 0.5) * SILENT_SECONDS:
        assert scheduler.waited(now, now) == []
        scheduler.announced(1, PROMISED[-1:], now)
    assert scheduler.expects_others

    assert _all_done(scheduler, scheduler.waited(9.0, 9.0)) == {1: SOURCE}


def test_a_rank_that_announces_others_and_never_what_it_promised_costs_ten_seconds_of_the_run() -> None:
    scheduler = _six_steps()
    read = _all_done(scheduler, scheduler.start(0.0))
    for now in np.arange(0.5, VAIN_SECONDS, 0.5):
        scheduler.announced(1, PROMISED[-1:], now)
        assert scheduler.waited(now, now) == []
    read |= _all_done(scheduler, scheduler.waited(VAIN_SECONDS, VAIN_SECONDS))
    assert read[1] == SOURCE

    scheduler.announced(1, PROMISED[-1:], VAIN_SECONDS)
    read = _all_done(scheduler, scheduler.slot_freed(0, VAIN_SECONDS))
    assert scheduler.expects_others, "it was heard of"
    scheduler.announced(1, PROMISED[-1:], VAIN_SECONDS + 0.1)
    read |= _all_done(scheduler, scheduler.waited(0.1, VAIN_SECONDS + 0.1))
    assert read[5] == SOURCE


def test_what_was_waited_for_in_vain_is_not_waited_for_again_in_a_later_epoch() -> None:
    scheduler = _scheduler(epochs=2)
    _all_done(scheduler, scheduler.start(0.0))
    read = _all_done(scheduler, scheduler.waited(SILENT_SECONDS, 1.0))
    assert read[4] == SOURCE

    scheduler.announced(1, np.array([1]), 2.0)
    read = _all_done(scheduler, scheduler.slot_freed(0, 2.0) + scheduler.slot_freed(1, 2.0))

    assert read[4] == SOURCE
    assert scheduler.where(read[1]) == (1, 1)
    assert not scheduler.expects_others


def test_what_a_disk_was_to_keep_is_waited_for_no_longer_as_it_may_have_been_too_slow_to_take_it() -> None:
    """Rank 1 is to keep sample 1 in memory and 2 on its disk, and announces others."""
    disk = StorageClass("disk", 10**9, 2, Curve.flat(1e9), backend="filesystem", path="/disk")
    nothing = Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    promised = np.array([1, 2])
    scheduler = Scheduler(
        AccessPlan(Sequential(8), 8, 1, 2),
        0,
        np.full(8, 10),
        Placement(np.full(8, SOURCE, np.int8), np.empty(0, np.int64)),
        replace(machine(), storage=(*machine().storage[:2], disk)),
        StagingLimits(1, readers=4, decoders=1, undecoded_bytes=10**6),
        shared=Shared((nothing, Kept(promised, np.array([1, 2], np.int8))), promised, (0, 0)),
    )
    _all_done(scheduler, scheduler.start(0.0) + scheduler.announced(1, np.array([7]), 0.0))

    assert _all_done(scheduler, scheduler.waited(0.1, 0.1)) == {2: SOURCE}
    assert scheduler.expects_others


@pytest.mark.parametrize("is_before", [True, False])
def test_what_was_promised_to_a_tier_that_gets_no_more_is_read_at_once(is_before: bool) -> None:
    """As when its disk has failed. Promises of the rank's other tiers stand."""
    scheduler, ended = _scheduler(), np.array([-1])
    other = scheduler.announced(1, np.array([-2, -9]), 0.0)
    if is_before:
        other += scheduler.announced(1, ended, 0.0)
    read = _all_done(scheduler, other + scheduler.start(0.0))
    assert (4 in read) == is_before

    read |= _all_done(scheduler, scheduler.announced(1, ended, 0.0))

    assert read == dict.fromkeys([0, 1, 4, 5], SOURCE)
    assert not scheduler.expects_others


def test_a_run_that_begins_elsewhere_holds_nobody_to_a_promise() -> None:
    scheduler = _scheduler(first=(0, 1))

    assert _all_done(scheduler, scheduler.seek(0, 0, 0.0) + scheduler.start(0.0))[4] == SOURCE


def test_what_was_announced_before_it_is_needed_is_read_there_at_once() -> None:
    scheduler = _scheduler()
    instructions = scheduler.announced(1, np.array([1, 4]), 0.0)

    read = _all_done(scheduler, instructions + scheduler.start(0.0))

    assert {sample: scheduler.where(place) for sample, place in read.items()} == {
        0: (SOURCE, -1),
        1: (1, 1),
        4: (1, 1),
        5: (SOURCE, -1),
    }


def test_only_what_is_read_from_the_store_during_the_training_can_be_promised() -> None:
    with pytest.raises(ConfigError, match="a rank promises what it reads from the store"):
        Fill(0, 1, np.array([1]), "hand-over", is_promised=True)
