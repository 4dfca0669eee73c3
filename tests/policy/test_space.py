"""The space told ahead, against what runs came to, and against what can be said in a sentence."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan.saves import EveryMinutes, EverySteps
from penstock.policy.delta_schemes import Scheme
from penstock.policy.retention import Keep, StoredSnapshot, to_forget
from penstock.policy.snap_distance import AutoDistance, SnapDistance, with_next
from penstock.policy.space import SpaceNeeded, check_space, space_needed

MB = 10**6


def needed(
    keep: Keep, scheme: Scheme = "complete", snap_dis: SnapDistance = 1, saves: int = 100, delta: float = 0.5
) -> SpaceNeeded:
    """For a state of 1 MB, baselines as they are."""
    steps = EverySteps(10).steps(10 * saves)
    return space_needed(MB, steps, keep, scheme, snap_dis, baseline_share=1.0, delta_share=delta)


def test_five_are_kept_while_a_sixth_is_written() -> None:
    assert needed(Keep(last=5)) == SpaceNeeded(6 * MB, 5 * MB, MB)
    assert needed(Keep(last=5), saves=3) == SpaceNeeded(3 * MB, 3 * MB, MB)
    assert needed(Keep(last=None), saves=30).peak_bytes == 30 * MB


def test_a_series_goes_only_once_the_next_baseline_is_there() -> None:
    """Progressive at 4: one baseline and three differences, then the next baseline beside them."""
    assert needed(Keep(last=1), "progressive", 4) == SpaceNeeded(int(3.5 * MB), int(2.5 * MB), MB)
    assert needed(Keep(last=1), "chain", 4) == SpaceNeeded(int(2.5 * MB), int(1.5 * MB), MB)


def test_pinned_snapshots_are_counted() -> None:
    """The second latest of two is the last of five that need each other; the latest is a baseline."""
    assert needed(Keep(last=2), "progressive", 5).kept_bytes == 4 * MB


def test_those_kept_for_good_add_up_over_the_run() -> None:
    assert needed(Keep(last=1, every_steps=100), saves=100).kept_bytes == 10 * MB
    assert needed(Keep(last=1, every_steps=100), saves=105).kept_bytes == 11 * MB


def test_a_very_long_run_is_told_from_how_it_began() -> None:
    """10,000 are kept for good; going through all 100,000 would take minutes."""
    long = needed(Keep(last=1, every_steps=100), saves=100_000)

    assert long.kept_bytes == pytest.approx(10_000 * MB, rel=0.05)


def test_how_old_a_snapshot_may_get_counts_with_the_time_between_saves() -> None:
    keep, steps = Keep(last=None, max_age_seconds=3600.0), EveryMinutes(10).steps(6000, step_seconds=6.0)

    assert len(steps) == 60
    assert space_needed(MB, steps, keep, "complete", 1, baseline_share=1.0, seconds_between_saves=600.0) == (
        SpaceNeeded(8 * MB, 7 * MB, MB)
    )
    assert space_needed(MB, steps, keep, "complete", 1, baseline_share=1.0).kept_bytes == 60 * MB


def test_what_is_too_old_when_a_run_goes_on_is_gone_after_its_first_save() -> None:
    """It stood still for a day: it must not be counted that they stay as long as if it had gone on."""
    stored = [StoredSnapshot(step, 600.0 * step, 5 * MB) for step in (1, 2)]
    keep = Keep(last=None, max_age_seconds=3600.0)

    def kept(now_seconds: float) -> int:
        return space_needed(
            MB,
            range(3, 40),
            keep,
            "complete",
            1,
            baseline_share=1.0,
            seconds_between_saves=600.0,
            stored=stored,
            now_seconds=now_seconds,
        ).kept_bytes

    assert kept(1200.0) == (10 + 5) * MB, "both, until after five more the first is too old"
    assert kept(90_000.0) == 10 * MB, "what is there now; later seven of the new ones"


def test_without_a_measurement_the_most_that_a_codec_may_take_is_counted() -> None:
    assert space_needed(MB, range(1, 99), Keep(), "progressive", 10).largest_bytes == 1_001_000


def test_a_limit_of_bytes_bounds_what_stays_but_not_what_the_newest_needs() -> None:
    assert needed(Keep(last=5, max_bytes=3 * MB)) == SpaceNeeded(4 * MB, 3 * MB, MB)
    assert needed(Keep(last=5, max_bytes=99 * MB)) == needed(Keep(last=5))
    assert needed(Keep(last=5, max_bytes=1), "progressive", 4) == needed(Keep(last=1), "progressive", 4)


def test_what_is_there_already_counts() -> None:
    stored = [StoredSnapshot(step, 0.0, 2 * MB) for step in (10, 20)]
    found = space_needed(MB, [30, 40, 50, 60], Keep(last=2), "complete", 1, baseline_share=1.0, stored=stored)

    assert found == SpaceNeeded(5 * MB, 4 * MB, MB)


@settings(max_examples=100)
@example(Keep(last=1, every_steps=13), "chain", AutoDistance(2.0, 3), 6, 1.0, 0)
@example(Keep(last=1, every_steps=13), "chain", AutoDistance(2.0, 3), 7, 1.0, 0)
@given(
    st.builds(
        Keep,
        last=st.integers(1, 6),
        every_steps=st.none() | st.integers(1, 90),
        max_bytes=st.none() | st.integers(1, 9000),
    ),
    st.sampled_from(get_args(Scheme)),
    st.one_of(st.integers(1, 8), st.builds(AutoDistance, st.floats(2, 8), st.integers(1, 9))),
    st.integers(0, 40),
    st.floats(0.1, 1.0),
    st.integers(0, 99),
)
def test_no_run_ever_needs_more_than_was_told(
    keep: Keep, scheme: Scheme, snap_dis: SnapDistance, saves: int, delta_share: float, seed: int
) -> None:
    """Baselines take what was told or less, differences too; with automatic distances, just that."""
    sizes, is_auto = Random(seed), isinstance(snap_dis, AutoDistance)
    most_delta = int(1000 * delta_share)
    told = space_needed(
        1000,
        range(10, 10 * saves + 1, 10),
        keep,
        scheme,
        snap_dis,
        baseline_share=1.0,
        delta_share=most_delta / 1000,
    )

    there, since = list[StoredSnapshot](), tuple[StoredSnapshot, ...]()
    for number in range(1, saves + 1):
        taken = [most if is_auto else sizes.randint(most // 2, most) for most in (1000, most_delta)]
        since = with_next(since, scheme, snap_dis, 10 * number, float(number), *taken)
        there.append(since[-1])
        assert sum(each.stored_bytes for each in there) <= told.peak_bytes
        gone = to_forget(there, keep, float(number))
        there = [each for each in there if each.step not in gone]
        assert sum(each.stored_bytes for each in there) <= told.kept_bytes


def test_a_fast_tier_holds_one_that_drains_and_one_that_is_written() -> None:
    five = needed(Keep(last=5))

    assert five.fast_bytes(drains_keep_up=True) == 2 * MB
    assert five.fast_bytes(drains_keep_up=False) == 7 * MB


def test_a_tier_that_will_not_do_is_told_before_the_first_step() -> None:
    five = needed(Keep(last=5))

    check_space(five, 0, None, "runs/a")
    check_space(five, 0, 6 * MB, "runs/a")
    check_space(five, 2 * MB, 4 * MB, "runs/a")
    with pytest.raises(ConfigError) as told:
        check_space(five, 2 * MB, 3 * MB, "runs/a")
    assert str(told.value) == (
        "runs/a has 3 MB free, and snapshots will need 4 MB: 5 MB stay, and a new one of 1 MB is written before old "
        "ones go (2 MB is there already); keep fewer, set max_bytes, take a smaller snap_dis, or make space"
    )


def test_a_bound_that_leaves_out_age_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError, match=r"or make space\. It may be less: that snapshots grow older than"):
        check_space(needed(Keep(last=5)), 0, MB, "runs/a", counts_age=False)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="state_bytes is -1"):
        space_needed(-1, [], Keep(), "complete", 1)
    with pytest.raises(ConfigError, match="delta_share is 50"):
        space_needed(1, [], Keep(), "complete", 1, delta_share=50)
