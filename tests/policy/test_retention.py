"""What retention lets go of, against a slow count by the words of the rules, and against the paper's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.policy.delta_schemes import Scheme, needed_to_restore, reference_of
from penstock.policy.retention import Keep, StoredSnapshot, dependents, lineage, pinned, restorable, to_forget

KB = 1000


def run_of(
    steps: Sequence[int], scheme: Scheme = "complete", snap_dis: int = 3, *, damaged: Sequence[int] = ()
) -> list[StoredSnapshot]:
    """Snapshots of 1 kB, committed ten seconds apart."""
    snapshots = []
    for place, step in enumerate(steps):
        reference = reference_of(scheme, place, snap_dis)
        snapshots.append(
            StoredSnapshot(
                step, 10.0 * place, KB, None if reference is None else steps[reference], step not in damaged
            )
        )
    return snapshots


def test_the_five_latest_are_kept_unless_asked_otherwise() -> None:
    assert to_forget(run_of(range(100, 900, 100)), Keep(), 1e9) == [300, 200, 100]
    assert to_forget(run_of(range(100, 600, 100)), Keep(), 1e9) == []
    assert to_forget(run_of(range(100, 900, 100)), Keep(last=None), 1e9) == []


def test_the_drawing_in_the_module_is_true() -> None:
    snapshots = run_of(range(900, 1500, 100), "progressive", 3)

    assert to_forget(snapshots, Keep(last=2, every_steps=1000), 0.0) == [1100]
    assert pinned(snapshots, [1000, 1300, 1400]) == [900, 1200]


def test_children_go_before_their_parents() -> None:
    """A crash between two deletions then leaves nothing that is listed and cannot be restored."""
    snapshots = run_of(range(1, 8), "progressive", 3)

    assert to_forget(snapshots, Keep(last=1), 0.0) == [6, 5, 4, 3, 2, 1]


def test_a_parent_stays_while_a_child_of_its_child_is_wanted() -> None:
    snapshots = run_of([1, 2, 3], "progressive", 3)

    assert to_forget(snapshots, Keep(last=1), 0.0) == []
    assert pinned(snapshots, [3]) == [1, 2]
    assert lineage(snapshots, 3) == [1, 2, 3]
    assert dependents(snapshots, 1) == [3, 2]


def test_a_damaged_snapshot_does_not_count_as_one_of_the_latest() -> None:
    """ "Retention deleted everything": the last ones were torn, counted, and the good ones before them went."""
    snapshots = run_of(range(1, 9), damaged=[6, 7, 8])

    assert to_forget(snapshots, Keep(last=2), 0.0) == [3, 2, 1]
    assert to_forget(run_of(range(1, 9), damaged=[2, 6, 7]), Keep(last=2), 0.0) == [4, 3, 2, 1]


def test_what_is_stored_as_a_difference_to_a_damaged_one_counts_no_more_than_it() -> None:
    snapshots = run_of(range(1, 7), "progressive", 3, damaged=[4])

    assert restorable(snapshots) == [1, 2, 3]
    assert to_forget(snapshots, Keep(last=1), 0.0) == []


def test_nothing_is_forgotten_while_nothing_can_be_restored() -> None:
    snapshots = run_of(range(1, 9), damaged=range(1, 9))
    keep = Keep(last=1, max_age_seconds=1.0, max_bytes=1)

    assert to_forget(snapshots, keep, 1e9) == []


def test_the_first_at_or_after_each_multiple_stays_for_good() -> None:
    """By minutes a schedule hits no multiple, and the one that should have been at 3,000 failed."""
    keep = Keep(last=1, every_steps=1000)

    assert to_forget(run_of([250, 500, 990, 1007, 1500, 2003, 2900, 3400, 3500]), keep, 0.0) == [
        *(2900, 1500, 990, 500, 250)
    ]
    assert to_forget(run_of(range(0, 3000, 500)), keep, 0.0) == [1500, 500]
    assert to_forget(run_of([1000, 1100, 1200, 1300], damaged=[1000]), keep, 0.0) == [1200, 1000]


def test_what_is_too_old_goes_but_never_the_newest() -> None:
    """The training stood still over the holidays."""
    keep = Keep(last=None, max_age_seconds=25.0)

    assert to_forget(run_of(range(1, 9)), keep, 70.0) == [5, 4, 3, 2, 1]
    assert to_forget(run_of(range(1, 9)), keep, 1e9) == [7, 6, 5, 4, 3, 2, 1]
    assert to_forget(run_of(range(1, 9), damaged=[8]), keep, 1e9) == [8, 6, 5, 4, 3, 2, 1]


def test_a_clock_that_was_set_back_forgets_nothing() -> None:
    assert to_forget(run_of(range(1, 9)), Keep(last=None, max_age_seconds=25.0), -1e9) == []


def test_a_snapshot_of_a_clock_that_was_ahead_grows_old_with_the_one_after_it() -> None:
    """Else it was younger than any age for a year, as was what was stored as a difference to it."""
    times = [(0.0, 0.0), (10.0, 10.0), (3e7, 3e7), (3.1e7, 3.1e7), (3.1e7 + 1, 30.0), (3.1e7 + 2, 40.0)]
    snapshots = [
        StoredSnapshot(step, created, KB, clock_seconds=said) for step, (created, said) in enumerate(times, 1)
    ]
    keep = Keep(last=None, max_age_seconds=100.0)

    assert to_forget(snapshots, keep, 120.0) == [2, 1]
    assert to_forget(snapshots, keep, 130.0) == [2, 1]
    assert to_forget(snapshots, keep, 131.0) == [5, 4, 3, 2, 1]
    assert to_forget(snapshots[:4], keep, 1e6) == [2, 1], "these may be of this minute"


def test_a_clock_that_was_behind_once_makes_nothing_look_old() -> None:
    """A machine without a battery saved before it had asked what time it is."""
    times = [(1000.0, 1000.0), (1010.0, 1010.0), (1010.1, 0.0), (1030.0, 1030.0)]
    snapshots = [
        StoredSnapshot(step, created, KB, clock_seconds=said) for step, (created, said) in enumerate(times, 1)
    ]
    keep = Keep(last=None, max_age_seconds=100.0)

    assert to_forget(snapshots[:3], keep, 1.0) == []
    assert to_forget(snapshots, keep, 1100.0) == []
    assert to_forget(snapshots, keep, 1105.0) == [1]
    assert to_forget(snapshots, keep, 1111.0) == [3, 2, 1]


def test_the_oldest_go_until_the_bytes_fit_whichever_rule_wanted_them() -> None:
    keep = Keep(last=3, every_steps=2, max_bytes=3 * KB)

    assert to_forget(run_of([2, 4, 6, 7, 8]), keep, 0.0) == [4, 2]
    assert to_forget(run_of(range(1, 9)), Keep(max_bytes=1), 0.0) == [7, 6, 5, 4, 3, 2, 1]


def test_bytes_of_pinned_snapshots_count() -> None:
    """Three are wanted, but the first of them needs two more."""
    snapshots = run_of(range(1, 7), "progressive", 3)

    assert to_forget(snapshots, Keep(last=4, max_bytes=6 * KB), 0.0) == []
    assert to_forget(snapshots, Keep(last=4, max_bytes=5 * KB), 0.0) == [3, 2, 1]


def test_damaged_ones_go_first_for_lack_of_space() -> None:
    keep = Keep(last=3, max_bytes=3 * KB)

    assert to_forget(run_of(range(1, 6), damaged=[4]), keep, 0.0) == [4, 1]


def test_what_is_in_use_stays_with_all_it_needs() -> None:
    """A save is under way as a difference to step 3 when a later baseline is committed."""
    snapshots = run_of(range(1, 8), "progressive", 3)
    keep = Keep(last=1, max_bytes=1, max_age_seconds=0.1)

    assert to_forget(snapshots, keep, 1e9, in_use=[2, 99]) == [6, 5, 4, 3]


def test_a_training_that_was_set_back_keeps_what_it_writes_now() -> None:
    """It went back to step 500 and saves 550: the newest by its commit, the smallest but one by its step."""
    snapshots = run_of([500, 600, 700, 550])

    assert to_forget(snapshots, Keep(last=2), 0.0) == [600, 500]


@for_each("snap_dis", [1, 2, 3, 5, 10])
@for_each("scheme", ["complete", "progressive", "chain"])
def test_keeping_one_is_algorithm_2_but_after_the_commit(scheme: Scheme, snap_dis: int) -> None:
    unit, stored = 100, list[StoredSnapshot]()
    for number in range(4 * snap_dis + 3):
        reference = reference_of(scheme, number, snap_dis)
        reference_step = None if reference is None else unit * (reference + 1)
        stored.append(StoredSnapshot(unit * (number + 1), float(number), KB, reference_step))
        gone = to_forget(stored, Keep(last=1), float(number))
        stored = [snapshot for snapshot in stored if snapshot.step not in gone]

        expected = [unit * (needed + 1) for needed in needed_to_restore(scheme, number, snap_dis)]
        assert [snapshot.step for snapshot in stored] == expected


# -- Properties --------------------------------------------------------------------------------------------


@st.composite
def stores(draw: st.DrawFn) -> list[StoredSnapshot]:
    """Any store: references to any earlier one, some missing or damaged, steps in no order, clocks that jump."""
    steps = draw(st.lists(st.integers(0, 40), unique=True, max_size=14))
    snapshots = []
    for place, step in enumerate(steps):
        earlier = st.sampled_from(steps[:place]) if place else st.none()
        snapshots.append(
            StoredSnapshot(
                step,
                float(draw(st.integers(0, 30))),
                draw(st.integers(0, 5)),
                draw(st.one_of(st.none(), earlier, earlier, st.sampled_from([*steps, 99]))),
                draw(st.sampled_from([True, True, True, False])),
                draw(st.one_of(st.none(), st.integers(0, 30).map(float))),
            )
        )
    return snapshots


KEEPS = st.one_of(
    st.builds(
        Keep,
        last=st.integers(1, 6),
        every_steps=st.one_of(st.none(), st.integers(1, 15)),
        max_age_seconds=st.one_of(st.none(), st.integers(1, 30).map(float)),
        max_bytes=st.one_of(st.none(), st.integers(1, 30)),
    ),
    st.builds(Keep, last=st.none(), max_bytes=st.one_of(st.none(), st.integers(1, 30))),
)


def slow_kept(snapshots: list[StoredSnapshot], keep: Keep, now_seconds: float, in_use: set[int]) -> set[int]:
    """The rules, one after the other, each as it is said; everything is counted anew each time."""
    where = {snapshot.step: place for place, snapshot in enumerate(snapshots)}

    def ancestors(place: int) -> set[int]:
        found: set[int] = set()
        reference = snapshots[place].reference_step
        while reference in where and where[reference] < place:
            place = where[reference]
            found.add(place)
            reference = snapshots[place].reference_step
        return found

    def fine(place: int) -> bool:
        snapshot = snapshots[place]
        reference = snapshot.reference_step
        if not snapshot.is_intact:
            return False
        return reference is None or (
            reference in where and where[reference] < place and fine(where[reference])
        )

    places = range(len(snapshots))
    whole = [place for place in places if fine(place)]
    if not whole:
        return set(where)
    newest = whole[-1]
    wanted: set[int] = set()
    for place in places:
        if keep.last is None or sum(other > place for other in whole) < keep.last:
            wanted.add(place)
    if keep.every_steps is not None:
        for multiple in range(0, 50, keep.every_steps):
            after = [p for p in whole if multiple <= snapshots[p].step < multiple + keep.every_steps]
            if after:
                first = min(after, key=lambda place: snapshots[place].step)
                if multiple > 0 or snapshots[first].step == 0:
                    wanted.add(first)

    @functools.cache
    def made(place: int) -> float:
        snapshot = snapshots[place]
        if snapshot.created_seconds <= now_seconds:
            return snapshot.created_seconds
        clock = snapshot.created_seconds if snapshot.clock_seconds is None else snapshot.clock_seconds
        return min(now_seconds, clock, *(made(later) for later in places if later > place))

    if keep.max_age_seconds is not None:
        wanted = {place for place in wanted if now_seconds - made(place) <= keep.max_age_seconds}
    must = {newest} | {where[step] for step in in_use if step in where}

    def everything() -> set[int]:
        return wanted | must | {other for place in wanted | must for other in ancestors(place)}

    for place in sorted(wanted - must, key=lambda place: (fine(place), place)):
        if (
            keep.limit_bytes is not None
            and sum(snapshots[p].stored_bytes for p in everything()) > keep.limit_bytes
        ):
            wanted.remove(place)
    return {snapshots[place].step for place in everything()}


def check_what_is_kept(snapshots: list[StoredSnapshot], keep: Keep, now: int, in_use: set[int]) -> None:
    gone = to_forget(snapshots, keep, float(now), in_use=in_use)

    assert len(gone) == len(set(gone))
    assert {snapshot.step for snapshot in snapshots} - set(gone) == slow_kept(
        snapshots, keep, float(now), in_use
    )


@settings(max_examples=200)
@given(stores(), KEEPS, st.integers(0, 60), st.sets(st.integers(0, 40), max_size=2))
@example(run_of(range(1, 9), "chain", 4), Keep(last=2, max_bytes=3 * KB), 0, set())
def test_what_is_kept_is_what_a_slow_count_of_the_rules_keeps(
    snapshots: list[StoredSnapshot], keep: Keep, now: int, in_use: set[int]
) -> None:
    check_what_is_kept(snapshots, keep, now, in_use)


@pytest.mark.slow
@settings(max_examples=5_000)
@given(stores(), KEEPS, st.integers(0, 60), st.sets(st.integers(0, 40), max_size=2))
def test_what_is_kept_of_many_stores_is_what_a_slow_count_of_the_rules_keeps(
    snapshots: list[StoredSnapshot], keep: Keep, now: int, in_use: set[int]
) -> None:
    check_what_is_kept(snapshots, keep, now, in_use)


@settings(max_examples=200)
@given(stores(), KEEPS, st.integers(0, 60))
def test_whatever_is_deleted_first_nothing_that_could_be_restored_and_is_left_cannot_any_more(
    snapshots: list[StoredSnapshot], keep: Keep, now: int
) -> None:
    """The deletions may stop at any of them."""
    fine = restorable(snapshots)
    gone = to_forget(snapshots, keep, float(now))

    left = list(snapshots)
    for step in gone:
        left = [snapshot for snapshot in left if snapshot.step != step]
        assert restorable(left) == [each for each in fine if any(each == other.step for other in left)]
    assert not fine or restorable(left)[-1] == fine[-1]


@settings(max_examples=200)
@given(stores(), KEEPS, st.integers(0, 60))
def test_asking_again_forgets_nothing_more(snapshots: list[StoredSnapshot], keep: Keep, now: int) -> None:
    gone = to_forget(snapshots, keep, float(now))
    left = [snapshot for snapshot in snapshots if snapshot.step not in gone]

    assert to_forget(left, keep, float(now)) == []


@settings(max_examples=200)
@given(stores(), KEEPS, st.integers(0, 60), st.integers(0, 5))
def test_a_stricter_rule_or_a_later_hour_keeps_nothing_more(
    snapshots: list[StoredSnapshot], keep: Keep, now: int, more: int
) -> None:
    def larger(field: float | None) -> float | None:
        return None if field is None else field + more

    loose = Keep(
        None if keep.last is None else keep.last + more,
        None if keep.last is None else keep.every_steps,
        larger(keep.max_age_seconds),
        None if keep.limit_bytes is None else keep.limit_bytes + more,
    )

    gone = set(to_forget(snapshots, keep, float(now)))
    if (
        keep.max_bytes is None
    ):  # with it, what is wanted more, or no more, takes or leaves space for the others
        assert set(to_forget(snapshots, loose, float(now))) <= gone
        if all(snapshot.created_seconds <= now for snapshot in snapshots):
            # Else what was not there yet may be by then, and is as young as it said.
            assert gone <= set(to_forget(snapshots, keep, float(now + more)))


@given(stores())
def test_lineage_pins_and_dependents_agree(snapshots: list[StoredSnapshot]) -> None:
    for step in restorable(snapshots):
        line = lineage(snapshots, step)

        assert line[-1] == step
        assert pinned(snapshots, [step]) == line[:-1]
        assert all(step in dependents(snapshots, parent) for parent in line[:-1])


def test_what_goes_in_circles_is_no_snapshot_and_hangs_nothing() -> None:
    """Files of somebody who means harm."""
    one, other, itself = (
        StoredSnapshot(1, 0.0, KB, 2),
        StoredSnapshot(2, 1.0, KB, 1),
        StoredSnapshot(3, 2.0, KB, 3),
    )
    good = StoredSnapshot(4, 3.0, KB)

    assert restorable([one, other, itself, good]) == [4]
    assert to_forget([one, other, itself, good], Keep(last=1), 0.0) == [3, 2, 1]
    with pytest.raises(ConfigError, match="step 1 refers to itself"):
        lineage([one, other, itself, good], 1)
    with pytest.raises(ConfigError, match="no snapshot of step 1, which that of step 2 needs"):
        lineage([other], 2)


@for_each(
    ("made", "told"),
    [
        (lambda: Keep(last=0), "last is 0; the newest snapshot is always kept"),
        (lambda: Keep(every_steps=0), "every_steps is 0"),
        (lambda: Keep(last=None, every_steps=5), "keeps every snapshot, so every_steps 5 would do nothing"),
        (lambda: Keep(max_age_seconds=0.0), "max_age_seconds is 0.0"),
        (lambda: Keep(max_age_seconds=math.inf), "max_age_seconds is inf"),
        (lambda: Keep(max_bytes=0), "max_bytes is 0"),
        (lambda: to_forget(run_of([1, 1]), Keep(), 0.0), "two snapshots are of step 1"),
    ],
)
def test_what_cannot_be_is_refused(made: object, told: str) -> None:
    assert callable(made)
    with pytest.raises(ConfigError, match=told):
        made()
