"""Where baselines come, on the sizes of two models that were really trained, against the best that could have been.

sizes_of_every_pair.json holds, in the way of benchmarks/snapshots/record_sizes.py and of the same two runs, what
snapshot i takes as a difference to snapshot j (row i, place j, DynRLE) and alone (place i, Huffman).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.papers.deltas import TABLE_9
from penstock.policy.delta_schemes import Scheme, reference_of
from penstock.policy.retention import StoredSnapshot, possible_references
from penstock.policy.snap_distance import (
    AutoDistance,
    SnapDistance,
    best_snap_dis,
    needs_baseline,
    next_reference,
    useful_bytes,
)
from penstock.simulate.snapshots import TIMED_SNAP_DIS, method_named, recorded_sizes
from penstock.units import format_bytes

Sizes = list[list[int]]
ALL_SIZES: dict[str, Sizes] = json.loads((Path(__file__).parent / "sizes_of_every_pair.json").read_text())


def store(sizes: Sizes, scheme: Scheme, snap_dis: SnapDistance) -> tuple[list[int], list[int], int]:
    """Store a run: what each snapshot takes, which are baselines, the most that any needs to be restored."""
    stored, baselines, needed = list[int](), list[int](), [0]
    for snapshot, row in enumerate(sizes):
        since = stored[baselines[-1] :] if baselines else []
        reference = next_reference(scheme, snap_dis, since)
        if reference is None:
            baselines.append(snapshot)
            stored.append(row[snapshot])
            needed.append(stored[-1])
        else:
            stored.append(row[baselines[-1] + reference])
            base = since[0] if scheme == "chain" else sum(since)
            needed.append(base + stored[-1])
    return stored, baselines, max(needed)


def least_written(sizes: Sizes) -> int:
    """Return what the chain scheme writes with the best of all choices of baselines, known in hindsight."""
    least = [0]
    for end in range(1, len(sizes) + 1):
        least.append(
            min(
                least[first] + sizes[first][first] + sum(row[first] for row in sizes[first + 1 : end])
                for first in range(end)
            )
        )
    return least[-1]


@for_each("snap_dis", [1, 2, 3, 5, 10])
@for_each("scheme", get_args(Scheme))
def test_a_fixed_distance_is_the_papers(scheme: Scheme, snap_dis: int) -> None:
    references, first = [], 0
    for snapshot in range(25):
        reference = next_reference(scheme, snap_dis, [100] * (snapshot - first))
        if reference is None:
            first = snapshot
        references.append(None if reference is None else first + reference)

    assert references == [reference_of(scheme, snapshot, snap_dis) for snapshot in range(25)]


@for_each("name", list(ALL_SIZES))
@for_each("scheme", ["progressive", "chain"])
def test_distances_are_small_early_and_larger_near_convergence(name: str, scheme: Scheme) -> None:
    """Section 3.3.1, on two real trainings; the last distance may be cut off by the end of the run."""
    _, baselines, _ = store(ALL_SIZES[name], scheme, AutoDistance())
    distances = [later - earlier for earlier, later in zip(baselines, [*baselines[1:], 25], strict=True)]

    assert distances[0] == min(distances[:-1])
    assert max(distances[-2:]) == max(distances)
    assert max(distances) > distances[0]


@pytest.mark.parametrize("name", list(ALL_SIZES))
def test_an_automatic_chain_writes_little_more_than_hindsight_could(name: str) -> None:
    sizes = ALL_SIZES[name]
    written = sum(store(sizes, "chain", AutoDistance())[0])
    fixed = {snap_dis: sum(store(sizes, "chain", snap_dis)[0]) for snap_dis in range(1, 13)}

    assert written <= 1.025 * least_written(sizes)
    assert written <= 1.01 * min(fixed.values())
    assert written < fixed[10]


@pytest.mark.parametrize("name", list(ALL_SIZES))
def test_an_automatic_progressive_restore_reads_no_more_than_was_allowed(name: str) -> None:
    sizes = ALL_SIZES[name]
    for ratio in (2.0, 4.0, 6.0, 8.0):
        stored, _, needed = store(sizes, "progressive", AutoDistance(ratio))

        assert needed <= 1.01 * ratio * sizes[-1][-1]  # baselines grow by half a percent over the run
        assert sum(stored) < sum(row[-1] for row in sizes)
    assert sum(store(sizes, "progressive", AutoDistance(8.0))[0]) < sum(store(sizes, "progressive", 5)[0])


def test_the_storage_that_the_newest_snapshot_may_need_bounds_the_distance() -> None:
    sizes = ALL_SIZES["text-gpt"]

    assert store(sizes, "progressive", AutoDistance(useful_bytes=5_000_000))[2] <= 5_000_000
    assert store(sizes, "chain", AutoDistance(useful_bytes=2_000_000))[1] == list(range(25))


def test_a_baseline_comes_where_a_difference_would_not_be_smaller() -> None:
    """As after the learning rate was raised, or for momentum."""
    for scheme in ("progressive", "chain"):
        assert next_reference(scheme, AutoDistance(), [100, 100]) is None
        assert next_reference(scheme, AutoDistance(), [100]) == 0
        assert next_reference(scheme, AutoDistance(), []) is None
        assert next_reference(scheme, AutoDistance(most=2), [100, 10]) is None


def test_a_chain_of_equal_differences_never_ends_but_by_its_most() -> None:
    """A frozen model: the mean only falls."""
    assert next_reference("chain", AutoDistance(), [100, *[1] * 98]) == 0
    assert next_reference("chain", AutoDistance(), [100, *[1] * 99]) is None


@given(
    st.sampled_from(["progressive", "chain"]),
    st.integers(2, 1000),
    st.lists(st.integers(1, 999), min_size=1, max_size=40),
    st.builds(AutoDistance, st.floats(2, 12), st.integers(1, 20), st.none() | st.integers(1, 9000)),
)
def test_no_run_goes_beyond_the_longest_distance_that_is_told_ahead(
    scheme: Scheme, baseline: int, deltas: list[int], auto: AutoDistance
) -> None:
    """Told for the smallest of the differences."""
    smallest = min(deltas)
    since = [baseline]
    for delta in deltas:
        if next_reference(scheme, auto, since) is None:
            break
        since.append(delta)

    assert len(since) <= auto.longest(scheme, baseline, smallest)


# -- Table 10 ----------------------------------------------------------------------------------------------


def advice_for(name: str, method: str, storage_bytes: int | None = None) -> tuple[int, str]:
    (sizes,) = (each for each in recorded_sizes() if each.name == name)
    stored = {snap_dis: sizes.stored_bytes(method_named(method), snap_dis) or [] for snap_dis in (3, 5, 10)}
    scheme = method_named(method).scheme
    written = {snap_dis: sum(each) for snap_dis, each in stored.items()}
    useful = {snap_dis: max(useful_bytes(scheme, each, snap_dis)) for snap_dis, each in stored.items()}
    advice = best_snap_dis(scheme, written, useful, storage_bytes)
    return advice.snap_dis, advice.reason


def stored_by(name: str, method: str, snap_dis: int) -> list[int]:
    """Return what the snapshots take, from the sizes of every pair."""
    sizes, scheme = ALL_SIZES[name], method_named(method).scheme
    references = [reference_of(scheme, snapshot, snap_dis) for snapshot in range(len(sizes))]
    return [
        row[snapshot if reference is None else reference]
        for snapshot, (row, reference) in enumerate(zip(sizes, references, strict=True))
    ]


def test_recorded_sizes_are_those_of_every_pair() -> None:
    for sizes in recorded_sizes():
        for (snapshot, reference), size in sizes.deltas["dynrle"].items():
            assert ALL_SIZES[sizes.name][snapshot][reference] == size


def test_table_10_advises_the_largest_progressive_distance_that_fits() -> None:
    """The useful storage is the baseline and every difference since: 5.2, 8.5 and 16.6 MB of digits-cnn."""
    assert advice_for("digits-cnn", "dynrle-progressive")[0] == 10
    assert advice_for("digits-cnn", "dynrle-progressive", 10_000_000)[0] == 5
    stored = stored_by("digits-cnn", "dynrle-progressive", 3)
    useful = max(sum(stored[first : first + 3]) for first in range(0, 25, 3))
    assert advice_for("digits-cnn", "dynrle-progressive", 6_000_000) == (
        3,
        "the largest of those that fit 6 MB: in the progressive scheme a larger one writes less "
        f"({format_bytes(sum(stored))} written, {format_bytes(useful)} useful at most)",
    )


def test_table_10_advises_the_chain_distance_that_writes_least() -> None:
    """What Figure 9 shows at 3, 5 and 10 of these two: least at 5 of one, at 3 of the other."""
    stored = stored_by("digits-cnn", "dynrle-chain", 5)
    useful = max(stored[first] + max(stored[first + 1 : first + 5]) for first in range(0, 25, 5))
    assert advice_for("digits-cnn", "dynrle-chain") == (
        5,
        "the least written: in the chain scheme differences grow with it, while baselines get fewer "
        f"({format_bytes(sum(stored))} written, {format_bytes(useful)} useful at most)",
    )
    assert advice_for("text-gpt", "dynrle-chain")[0] == 3
    assert advice_for("digits-cnn", "dynrle-chain", 3_600_000)[0] == 3


def test_where_nothing_fits_the_least_that_would_do_is_named() -> None:
    stored = stored_by("digits-cnn", "dynrle-progressive", 3)
    least = max(sum(stored[first : first + 3]) for first in range(0, 25, 3))

    with pytest.raises(
        ConfigError, match=f"storage_bytes is 1000, and the least that can be is {least} at snap_dis 3"
    ):
        advice_for("digits-cnn", "dynrle-progressive", 1000)


def test_useful_storage_is_table_9s() -> None:
    for scheme in ("progressive", "chain"):
        published = [row.useful_pages for row in TABLE_9[scheme]]
        stored = []
        for snapshot, pages in enumerate(published):
            reference = reference_of(scheme, snapshot, TIMED_SNAP_DIS)
            stored.append(pages if reference is None else pages - published[reference])

        assert useful_bytes(scheme, stored, TIMED_SNAP_DIS) == published


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="snap_dis is 0"):
        next_reference("chain", 0, [1])
    with pytest.raises(ConfigError, match="restore_ratio is 1"):
        AutoDistance(1.5)
    with pytest.raises(ConfigError, match="most is 0"):
        AutoDistance(most=0)
    with pytest.raises(ConfigError, match="useful_bytes is 0"):
        AutoDistance(useful_bytes=0)
    with pytest.raises(ConfigError, match="useful_bytes is '1 GB'; it must be an integer"):
        AutoDistance(useful_bytes="1 GB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every snapshot is a baseline"):
        best_snap_dis("complete", {1: 1}, {1: 1})
    with pytest.raises(ConfigError, match=r"of snap_dis \[3\], useful bytes of \[5\]"):
        best_snap_dis("chain", {3: 1}, {5: 1})


def test_a_difference_is_only_to_a_snapshot_that_can_be_restored_and_was_saved_before() -> None:
    stored = [
        StoredSnapshot(1, 10.0, 100),
        StoredSnapshot(2, 20.0, 50, 1),
        StoredSnapshot(3, 30.0, 100, is_intact=False),
        StoredSnapshot(4, 40.0, 50, 3),
        StoredSnapshot(5, 50.0, 100),
    ]

    found = [possible_references(stored, seconds) for seconds in (9.0, 10.0, 45.0, 60.0)]

    assert found == [[], [1], [1, 2], [1, 2, 5]]


def test_more_than_a_thousandth_of_a_state_in_changed_tensors_needs_a_baseline() -> None:
    found = [needs_baseline(changed, state) for changed, state in [(0, 0), (1, 1000), (2, 1000), (1, 0)]]

    assert found == [False, False, True, True]
