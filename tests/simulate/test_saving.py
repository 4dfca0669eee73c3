"""Saves in virtual time: by hand where a run is simple, and beside a store that decides over real folders."""

from __future__ import annotations

import math
import tempfile
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.slow_tier import SlowTier
from tests.for_each import for_each

from penstock.checkpoint import opened as opened_module
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError
from penstock.machine import Machine, SharedStore, StorageClass
from penstock.machine.curve import Curve
from penstock.policy.retention import Keep
from penstock.simulate import saving
from penstock.simulate.saving import FastTier, PredictedSaves, SavePlan, predict_saves


def machine(
    *, copy: float = 1000.0, ssd: float = 100.0, write: float = 10.0, read: float = math.inf, ranks: int = 1
) -> Machine:
    """Return a machine; rates in bytes/s. The store is shared by the ranks, the other tiers are of each."""
    staging = StorageClass("staging", 10**9, 1, Curve.flat(copy))
    disk = StorageClass(
        "ssd", 250, 1, Curve.flat(min(read, 1e12)), Curve.flat(ssd), 0.0, "filesystem", "/ssd"
    )
    store = SharedStore(Curve.flat(min(read, 1e12)), write=Curve.flat(write))
    return Machine(store, (staging, disk), ranks)


def plan(*steps: int, last_step: int = 100, **options: Any) -> SavePlan:
    given: dict[str, Any] = {"steps": steps, "step_seconds": 1.0, "state_bytes": 100, **options}
    return SavePlan(last_step=last_step, **given)


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-6)


# -- By hand -----------------------------------------------------------------------------------------------------


def test_a_save_blocks_while_the_state_is_copied_and_is_durable_once_it_is_written() -> None:
    predicted = predict_saves(machine(), plan(10, 50))

    for save, begin in zip(predicted.saves, (10.0, 50.1), strict=True):
        assert save.begin_seconds == near(begin)
        assert (save.blocked_by_previous_seconds, save.blocked_seconds) == (0.0, near(0.1))
        assert save.durable_seconds == near(0.1 + 10.0)
        assert save.drained_seconds is None
    assert [save.reference_step for save in predicted.saves] == [None, 10]
    assert predicted.run_seconds == near(100.2)
    assert predicted.blocked_seconds == near(0.2)
    assert predicted.slowed_seconds == 0.0


def test_a_save_waits_until_the_one_before_is_read_back() -> None:
    """10 s to write and 10 s to read back, and the next save comes after 5 s."""
    first, second = predict_saves(machine(read=10.0), plan(10, 15)).saves

    assert first.durable_seconds == near(10.1)
    assert second.blocked_by_previous_seconds == near(20.0 - 5.0)
    assert second.blocked_seconds == near(15.1)
    assert second.durable_seconds == near(15.1 + 10.0)


def test_a_run_ends_once_its_last_save_is_read_back() -> None:
    predicted = predict_saves(machine(read=20.0), plan(10, last_step=10))
    assert predicted.run_seconds == near(10.1)
    assert predicted.end_seconds == near(10.1 + 10.0 + 5.0)


def test_what_is_stored_of_a_state_and_how_fast_it_is_encoded_count() -> None:
    """A baseline of 80 bytes is bound by the wire, a delta of 20 by encoding."""
    saves = predict_saves(
        machine(), plan(10, 30, baseline_share=0.8, delta_share=0.2, encode_bytes_per_second=25.0)
    ).saves
    assert [save.durable_seconds for save in saves] == [near(0.1 + 8.0), near(0.1 + 4.0)]


def test_ranks_write_their_shares_at_the_same_time() -> None:
    """Each copies a quarter; the store is no faster for it."""
    [save] = predict_saves(machine(ranks=4), plan(10)).saves
    assert (save.blocked_seconds, save.durable_seconds) == (near(0.025), near(0.025 + 10.0))


def test_a_fast_tier_is_drained_while_the_training_goes_on() -> None:
    predicted = predict_saves(machine(), plan(10, 50), FastTier("ssd"))

    for save in predicted.saves:
        assert (save.tier, save.blocked_seconds) == (0, near(0.1))
        assert save.durable_seconds == near(0.1 + 1.0)
        assert save.drained_seconds == near(0.1 + 1.0 + 10.0)
    assert predicted.is_fast_sufficient
    assert predicted.peak_fast_bytes == 200
    assert predicted.end_seconds == near(100.2)


def test_a_capped_drain_takes_as_long_as_the_cap_says_and_leaves_the_rest_to_reads() -> None:
    """Reading takes 8 of 10 bytes/s: uncapped, both get 5; a drain of 2 leaves as much as is read."""
    reads = plan(10, read_bytes_per_second=8.0, last_step=200)
    equal = machine(write=10.0, read=10.0)

    uncapped = predict_saves(equal, reads, FastTier("ssd", capacity_bytes=250))
    capped = predict_saves(equal, reads, FastTier("ssd", drain_bytes_per_second=2.0))

    # 1 s to the fast tier and 10 s to read it back, 10 s to drain and 10 s to read that back, at half the rate.
    assert uncapped.saves[0].drained_seconds == near(0.1 + 11.0 + 20.0)
    assert uncapped.slowed_seconds == near(2 * 20.0 * (1 - 5 / 8))
    assert capped.saves[0].drained_seconds == near(0.1 + 11.0 + 50.0)
    assert capped.slowed_seconds == near(20.0 * (1 - 5 / 8)), "what is read back is not capped"
    assert uncapped.run_seconds == near(200.0 + 0.1 + uncapped.slowed_seconds)


def test_the_process_of_a_drain_starts_once_for_drains_that_follow_each_other() -> None:
    """A drain takes 10 s; the second snapshot waits for the first one's, the third comes when none is under way."""
    tier = FastTier("ssd", drain_start_seconds=3.0)
    first, second, third = predict_saves(machine(), plan(10, 15, 50), tier).saves

    assert first.drained_seconds == near(0.1 + 1.0 + 3.0 + 10.0)
    assert second.drained_seconds == near(14.1 - 5.1 + 10.0)
    assert third.drained_seconds == near(0.1 + 1.0 + 3.0 + 10.0)


def test_a_commit_takes_its_time_on_each_tier_and_counts_until_a_snapshot_is_durable() -> None:
    alone = predict_saves(machine(), plan(10, 11, commit_seconds=2.0)).saves
    assert alone[0].durable_seconds == near(0.1 + 10.0 + 2.0)
    assert alone[1].blocked_by_previous_seconds == near(10.0 + 2.0 - 1.0)

    tier = FastTier("ssd", commit_seconds=0.5)
    (save,) = predict_saves(machine(), plan(10, commit_seconds=2.0), tier).saves
    assert save.durable_seconds == near(0.1 + 1.0 + 0.5)
    assert save.drained_seconds == near(0.1 + 1.0 + 0.5 + 10.0 + 2.0)


def test_a_snapshot_is_deleted_from_each_tier_once_newer_ones_are_checked_there() -> None:
    """Saves take 1 s on the fast tier, drains 10 s after that; two stay."""
    kept = plan(10, 30, 50, keep=Keep(last=2), scheme="complete")
    first, *others = predict_saves(machine(), kept, FastTier("ssd", capacity_bytes=1000)).saves

    assert first.deleted_seconds == (near(50.2 + 0.1 + 1.0), near(50.2 + 0.1 + 1.0 + 10.0))
    assert [save.deleted_seconds for save in others] == [(None, None)] * 2


def test_a_save_that_finds_no_space_goes_to_the_slow_tier_at_once() -> None:
    """Two snapshots fit; a drain takes 100 s, and saves come every 20 s."""
    predicted = predict_saves(machine(), plan(10, 30, 50, last_step=60), FastTier("ssd", 200, 1.0))

    assert [save.tier for save in predicted.saves] == [0, 0, 1]
    assert not predicted.is_fast_sufficient
    # The drain asks for a tenth of the slow tier and gets it; the save gets the rest.
    assert predicted.saves[2].durable_seconds == near(0.1 + 10.0 / 0.9)


def test_a_drain_that_ends_does_not_let_a_save_overtake_the_one_before() -> None:
    """The second save takes the slow tier 20 s beside the drain, which ends after 12 s, while the third waits."""
    shared = machine(copy=1e12, ssd=100.0, write=10.0)
    saves = predict_saves(shared, plan(10, 12, 14, last_step=15), FastTier("ssd", capacity_bytes=100)).saves

    assert [save.tier for save in saves] == [0, 1, 0]
    first, second, third = saves
    assert first.drained_seconds is not None
    drained = first.begin_seconds + first.drained_seconds
    second_ends = second.begin_seconds + second.durable_seconds
    assert third.begin_seconds < drained < second_ends
    assert third.begin_seconds + third.blocked_by_previous_seconds == near(second_ends)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_a_tier_is_shared_fairly_and_wholly(asked: list[float]) -> None:
    most = saving._fair_share(asked)
    given_out = [min(share, most) for share in asked]

    assert sum(given_out) == pytest.approx(min(1.0, sum(asked)))
    assert most >= 1 / len(asked) - 1e-12


def test_encoding_comes_first_once_it_is_known_to_be_quicker() -> None:
    """Raw, 100 bytes take 10 s on the fast tier; encoded they are 10, and take 1 s."""
    slow_disk = machine(ssd=10.0, write=100.0)
    saves = predict_saves(slow_disk, plan(10, 50, baseline_share=0.1), FastTier("ssd")).saves
    assert [save.durable_seconds for save in saves] == [near(0.1 + 10.0), near(0.1 + 1.0)]


@for_each(
    ("wrong", "match"),
    [
        ({"steps": (3, 2)}, "^steps is"),
        ({"steps": (11,)}, "^steps is"),
        ({"state_bytes": 0}, "^state_bytes is 0"),
        ({"step_seconds": -1.0}, "^step_seconds is"),
        ({"commit_seconds": -1.0}, "^commit_seconds is"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_its_field(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(**({"last_step": 10} | wrong))


def test_a_fast_tier_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="fast is 'nvme'; the machine has ssd besides its staging buffer"):
        predict_saves(machine(), plan(1), FastTier("nvme"))


# -- Beside a store ----------------------------------------------------------------------------------------------

STATE_BYTES = 200_000
#: Of a snapshot besides its state, and what a store counts for a new one at most.
BESIDE_BYTES = 40_000


def state_of(step: int) -> dict[str, Any]:
    """Return numbers that are hardly smaller when they are encoded, but for what they are a delta to."""
    weights = np.random.default_rng(1).integers(256, size=STATE_BYTES, dtype=np.uint8)
    weights[step] ^= 1
    return {"weights": weights}


def step_of(line: str) -> int:
    return int(line.split()[1].removesuffix(":"))


def steps_in(folder: Path) -> frozenset[int]:
    return frozenset(int(path.name[5:]) for path in folder.glob("step-*"))


@settings(max_examples=15, deadline=None)
@given(
    gaps=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    drain_seconds=st.sampled_from([1.7, 9.3, 33.1]),
    most=st.integers(1, 3),
    last=st.integers(1, 3),
    snap_dis=st.integers(1, 3),
)
def test_tiers_drains_references_and_deletions_are_those_of_a_store(
    gaps: list[int], drain_seconds: float, most: int, last: int, snap_dis: int
) -> None:
    """The store saves, and its drains end, in the predicted order; what it decides then is compared.

    What is on each tier is compared after each event, so what is pruned, and when.
    """
    steps = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    saves = SavePlan(steps, steps[-1], 1.0, STATE_BYTES, Keep(last=last), snap_dis=snap_dis)
    tier = FastTier("ssd", most * STATE_BYTES, STATE_BYTES / drain_seconds)
    quick = machine(copy=1e12, ssd=1e12, write=1e12)
    predicted = predict_saves(quick, saves, tier)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        top = Path(folder)
        slow = SlowTier(top / "slow")
        slow.permits = 0
        patch.setattr(opened_module, "open_tier", lambda folder, options=None: slow)
        told: list[str] = []
        store = SnapshotStore(
            top / "slow",
            fast=top / "fast",
            fast_bytes=most * STATE_BYTES + BESIDE_BYTES,
            keep=Keep(last=last),
            snap_dis=snap_dis,
            codec="balance",
            threads=1,
            report=told.append,
        )
        with store:
            outcome, left = [], []
            for _, step, is_drain in events_of(predicted):
                if is_drain:
                    slow.let(1)
                else:
                    store.save(step, state_of(step)).wait()
                slow.wait_until_quiet(store)
                outcome.append((step_of(told[-1]), ": drained after" in told[-1]))
                left.append((steps_in(top / "fast"), steps_in(top / "slow")))
            is_more_to_drain = slow.is_waiting
            slow.let(100)
        with SnapshotStore(top / "slow", report=None) as reader:
            references = {one.step: one.reference_step for one in reader.list()}
    assert outcome == [(step, is_drain) for _, step, is_drain in events_of(predicted)]
    assert not is_more_to_drain
    assert {step_of(line) for line in told if "at once" in line} == {
        save.step for save in predicted.saves if save.tier
    }
    # Saves and the copies of the state take next to no time, drains more than a second.
    times = [seconds + 0.01 for seconds, _, _ in events_of(predicted)]
    assert left == [(there_at(predicted, 0, now), there_at(predicted, 1, now)) for now in times]
    assert left[-1] == predicted.left
    assert references == {
        save.step: save.reference_step for save in predicted.saves if save.step in references
    }


@settings(max_examples=10, deadline=None)
@given(gaps=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_saves_of_a_store_wait_for_the_one_before_where_it_is_predicted(gaps: list[int]) -> None:
    """A save takes 10 s. The training asks for one, and one ends, in the predicted order."""
    steps = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    slow_machine = machine(copy=1e12, write=STATE_BYTES / 9.5)
    predicted = predict_saves(slow_machine, SavePlan(steps, steps[-1], 1.0, STATE_BYTES, scheme="complete"))
    expected: list[tuple[str, int]] = []
    for number, save in enumerate(predicted.saves):
        before = [("ended", predicted.saves[number - 1].step)] if number else []
        asked = [("asked", save.step)]
        expected += [
            *(asked + before if save.blocked_by_previous_seconds else before + asked),
            ("goes on", save.step),
        ]
    log: Queue[tuple[str, int]] = Queue()
    go_on = threading.Semaphore(0)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        slow = SlowTier(Path(folder), waits="penstock-save")
        slow.permits = 0
        patch.setattr(opened_module, "open_tier", lambda folder, options=None: slow)

        def train() -> None:
            for step in steps:
                go_on.acquire()
                log.put(("asked", step))
                store.save(step, state_of(step))
                log.put(("goes on", step))

        def report(line: str) -> None:
            log.put(("ended", step_of(line)))

        with SnapshotStore(folder, scheme="complete", threads=1, report=report) as store:
            training = threading.Thread(target=train)
            training.start()
            try:
                for what, step in expected:
                    if what == "asked":
                        go_on.release()
                    elif what == "ended":
                        slow.let(1)
                    assert log.get(timeout=60) == (what, step)
            finally:
                go_on.release(len(steps))
                slow.let(100)
                training.join()


def there_at(predicted: PredictedSaves, tier: int, now_seconds: float) -> frozenset[int]:
    """Return the steps of the snapshots that are on one of two tiers at a moment."""
    there = set()
    for save in predicted.saves:
        after_seconds = save.durable_seconds if save.tier == tier else save.drained_seconds if tier else None
        deleted_seconds = save.deleted_seconds[tier]
        is_deleted = deleted_seconds is not None and deleted_seconds <= now_seconds
        if after_seconds is not None and save.begin_seconds + after_seconds <= now_seconds and not is_deleted:
            there.add(save.step)
    return frozenset(there)


def events_of(predicted: PredictedSaves) -> list[tuple[float, int, bool]]:
    """Return when each save began and each drain ended, with its step and whether it was a drain."""
    events = [
        (save.begin_seconds + save.blocked_by_previous_seconds, save.step, False) for save in predicted.saves
    ]
    return sorted(
        events
        + [
            (save.begin_seconds + save.drained_seconds, save.step, True)
            for save in predicted.saves
            if save.drained_seconds is not None
        ]
    )
