"""Ranges and windows against a listed run, closed forms of the neighbours, and prices by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Replicated, Sequential, Strided
from penstock.policy.merge import cut_windows
from penstock.simulate.layout import _break_even, compare_layouts, count_ranges
from penstock.simulate.layout_verdict import verdict

MB = 10**6


def machine(ranks: int = 1, window: int = 100 * MB, **changes: Any) -> Machine:
    """A disk for every client: 10 ms of seek, 100 MB/s, as measured with reads of 1 MB."""
    fields: dict[str, Any] = {
        "clients": Curve(((1, 50e6), (100, 5000e6))),
        "sequential": Curve(((1, 100e6), (100, 10_000e6))),
        "random_bytes": MB,
    }
    memory = Curve.flat(1e10)
    return Machine(SharedStore(**{**fields, **changes}), (StorageClass("staging", window, 1, memory),), ranks)


# -- Windows and ranges, against what is simply listed -----------------------------------------------------


def listed_windows(sizes: list[int], window_bytes: int) -> list[int]:
    windows, number, held = [], -1, window_bytes
    for size in sizes:
        if number < 0 or held + size > window_bytes:
            number, held = number + 1, 0
        held += size
        windows.append(number)
    return windows


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 20))
def test_windows_hold_as_many_samples_as_fit(sizes: list[int], window_bytes: int) -> None:
    found = cut_windows(np.array(sizes, np.int64), window_bytes)

    assert found.tolist() == listed_windows(sizes, window_bytes)


def listed_ranges(
    places: list[int], windows: list[int], sizes_by_place: list[int]
) -> tuple[int, int, list[int]]:
    """Ranges, bytes and holes of each window, place by place."""
    ranges, nbytes, holes = 0, 0, []
    for window in sorted(set(windows)):
        needed = {place for place, of in zip(places, windows, strict=True) if of == window}
        is_needed = [place in needed for place in range(len(sizes_by_place))]
        begin, end = min(needed), max(needed)
        stretches = [
            (used, list(places)) for used, places in groupby(range(begin, end + 1), is_needed.__getitem__)
        ]
        for used, members in stretches:
            total = sum(sizes_by_place[place] for place in members)
            if used:
                ranges, nbytes = ranges + 1, nbytes + total
            else:
                holes.append(total)
    return ranges, nbytes, sorted(holes)


@given(st.data())
def test_ranges_and_holes_are_those_of_a_listed_window(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    places = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    windows = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(places), max_size=len(places))))
    begins = np.concatenate(([0], np.cumsum(sizes)))

    found = count_ranges(np.array(places, np.int64), np.array(windows, np.int64), begins)

    assert (found.ranges, found.nbytes, found.holes.tolist()) == listed_ranges(places, windows, sizes)


def test_neighbours_under_a_full_shuffle_are_as_many_as_the_closed_form_says() -> None:
    """A window is a random subset of w of F ids: w (w - 1) / F neighbours, 3.98 in 200 of 10,000.

    In 50 windows that makes 199, give or take 14.
    """
    plan = AccessPlan(FullShuffle(10_000, seed=1), 100, epochs=4)
    sizes = np.full(10_000, MB)

    comparison = compare_layouts(plan, machine(window=200 * MB), sizes)

    assert comparison.window_samples == 200
    assert comparison.neighbour_share == pytest.approx(199 / 10_000, abs=4 * 0.0014 / 2)


def test_a_window_of_the_whole_data_set_has_but_one_range() -> None:
    plan = AccessPlan(FullShuffle(500), 10, epochs=1)

    comparison = compare_layouts(plan, machine(window=10**12), np.full(500, MB))

    assert comparison.option("ranges").first_epoch.requests == 1


# -- Prices ------------------------------------------------------------------------------------------------


def test_samples_by_themselves_cost_a_seek_each() -> None:
    plan = AccessPlan(FullShuffle(1_000), 10, epochs=3)

    option = compare_layouts(plan, machine(), np.full(1_000, MB)).option("samples")

    assert (option.first_epoch.requests, option.first_epoch.read_bytes) == (1_000, 1_000 * MB)
    assert option.first_epoch.seconds == pytest.approx(20.0)
    assert option.run_seconds == pytest.approx(60.0)


def test_a_sequential_epoch_costs_a_seek_per_window() -> None:
    plan = AccessPlan(Sequential(1_000), 10, epochs=1)

    option = compare_layouts(plan, machine(window=100 * MB), np.full(1_000, MB)).option("ranges")

    assert option.first_epoch.requests == 10
    assert option.first_epoch.seconds == pytest.approx(10 * 0.01 + 10.0)


def test_holes_are_read_over_where_that_is_cheaper_than_a_seek() -> None:
    """Of 1,000 samples in order, two ranks read every second one; a seek is worth 1 MB."""
    plan = AccessPlan(Sequential(1_000), 10, epochs=1, ranks=2, split=Strided())

    small = compare_layouts(plan, machine(ranks=2, window=10**12), np.full(1_000, MB // 2))
    large = compare_layouts(plan, machine(ranks=2, window=10**12), np.full(1_000, 2 * MB))

    # Each rank needs 500 samples with 499 holes between them.
    assert small.option("sieving").first_epoch.requests == 2
    assert small.option("sieving").first_epoch.read_bytes == 2 * 999 * MB // 2
    assert small.option("sieving").first_epoch.seconds == pytest.approx(0.01 + 999 * 0.005)
    assert large.option("sieving").first_epoch == replace(large.option("ranges").first_epoch, how="sieving")
    assert large.option("ranges").first_epoch.seconds == pytest.approx(500 * 0.01 + 500 * 0.02)


def test_no_other_choice_of_holes_is_cheaper_than_the_one_that_is_made() -> None:
    """All choices of holes of a small window, with latency beside the seek, tried one by one."""
    sizes = np.array([3, 9, 1, 4, 2, 20, 1, 7, 2, 2, 6, 1]) * MB // 10
    needed = [0, 2, 4, 6, 8, 11]
    slow = machine(window=10**12, latency_seconds=0.02, threads=2)
    holes = [int(sizes[a + 1 : b].sum()) for a, b in pairwise(needed)]
    mean = float(sizes.mean())

    def seconds(chosen: int) -> float:
        over = [hole for index, hole in enumerate(holes) if chosen >> index & 1]
        return slow.source_seconds(6 - len(over), int(sizes[needed].sum()) + sum(over), 1, mean)

    best = min(seconds(chosen) for chosen in range(2 ** len(holes)))
    plan = AccessPlan(FixedOrder(12, needed), len(needed), epochs=1)

    assert compare_layouts(plan, slow, sizes).option("sieving").first_epoch.seconds == pytest.approx(best)


class FixedOrder:
    """The same few samples in every epoch."""

    def __init__(self, samples: int, read: list[int]) -> None:
        self.samples = samples
        self._read = np.array(read)

    def length(self, epoch: int) -> int:
        return self._read.size

    def at(self, epoch: int, positions: Any) -> Any:
        return self._read[np.asarray(positions)]

    def position_of(self, epoch: int, samples: Any) -> Any:
        raise NotImplementedError


def test_ranks_that_read_together_read_each_window_once_in_sequence() -> None:
    """4 ranks whose windows hold the data set between them: one range, of which each reads a quarter."""
    plan = AccessPlan(FullShuffle(1_000), 100, epochs=2, ranks=4)

    option = compare_layouts(plan, machine(ranks=4, window=250 * MB), np.full(1_000, MB)).option("collective")

    assert (option.first_epoch.requests, option.first_epoch.read_bytes) == (4, 1_000 * MB)
    assert option.first_epoch.seconds == pytest.approx(0.01 + 2.5)


def test_ranks_that_read_together_share_the_holes_that_are_read_over() -> None:
    """Two ranks read every second one of 19 samples; the nine holes of half a megabyte are read once, not twice."""
    plan = AccessPlan(FixedOrder(19, list(range(0, 19, 2))), 10, epochs=1, ranks=2)

    option = compare_layouts(plan, machine(ranks=2, window=10**12), np.full(19, MB // 2)).option("collective")

    # Each rank has a range of its own; of nine holes one has five, the other four, and both are taken for five.
    assert (option.first_epoch.requests, option.first_epoch.read_bytes) == (2, 20 * MB // 2)


def test_reading_together_is_limited_by_the_network_of_the_exchange() -> None:
    plan = AccessPlan(FullShuffle(1_000), 100, epochs=1, ranks=4)
    slow = replace(machine(ranks=4, window=250 * MB), network_bytes_per_second=10e6)

    option = compare_layouts(plan, slow, np.full(1_000, MB)).option("collective")

    # Of its 250 MB each rank gets three quarters from the others.
    assert option.first_epoch.seconds == pytest.approx(187.5 / 10)


def test_one_rank_has_nobody_to_read_together_with() -> None:
    plan = AccessPlan(FullShuffle(100), 10, epochs=1)

    names = [option.name for option in compare_layouts(plan, machine(), np.full(100, MB)).options]

    assert names == ["samples", "ranges", "sieving", "rewritten"]


def test_where_every_rank_reads_the_whole_batch_each_reads_every_sample() -> None:
    plan = AccessPlan(FullShuffle(100), 10, epochs=1, ranks=3, split=Replicated())

    comparison = compare_layouts(plan, machine(ranks=3, window=10**12), np.full(100, MB))

    assert comparison.option("samples").first_epoch.read_bytes == 300 * MB
    assert comparison.option("collective").first_epoch.read_bytes == pytest.approx(100 * MB, rel=0.01)


# -- Writing the data set anew -----------------------------------------------------------------------------


def test_after_writing_in_the_order_of_the_first_epoch_that_epoch_is_sequential_and_no_other() -> None:
    plan = AccessPlan(FullShuffle(10_000), 100, epochs=5, ranks=2)

    comparison = compare_layouts(plan, machine(ranks=2, window=50 * MB), np.full(10_000, MB))

    rewritten, found = comparison.option("rewritten"), comparison.option("ranges")
    assert rewritten.later_epoch is not None
    assert found.later_epoch is not None
    # 100 windows of 50 samples for each rank; the next epochs are as scattered as before.
    assert rewritten.first_epoch.requests <= 2 * 100
    assert rewritten.later_epoch.requests == pytest.approx(found.later_epoch.requests, rel=0.01)
    # Each rank's half is 5,000 seeks, 50 s of reading and 50 s of writing: less than two passes in sequence, of 100 s.
    assert rewritten.once_seconds == pytest.approx(150.0)


def test_an_order_that_does_not_change_stays_sequential_in_every_epoch() -> None:
    scattered = [7, 1, 9, 3, 5, 0, 8, 2, 6, 4]
    plan = AccessPlan(FixedOrder(10, scattered), 5, epochs=4)

    rewritten = compare_layouts(plan, machine(window=5 * MB), np.full(10, MB)).option("rewritten")

    assert rewritten.later_epoch is not None
    assert rewritten.first_epoch.requests == rewritten.later_epoch.requests == 2
    # Ten seeks and reads, the writes, and then 4 epochs of two seeks and the bytes.
    assert rewritten.once_seconds == pytest.approx(10 * 0.02 + 10 * 0.01)
    assert rewritten.run_seconds == pytest.approx(0.3 + 4 * (2 * 0.01 + 0.1))


def test_a_data_set_that_fits_the_ranks_memory_is_rewritten_in_one_pass() -> None:
    plan = AccessPlan(FullShuffle(1_000), 100, epochs=2, ranks=4)

    one = compare_layouts(plan, machine(ranks=4, window=250 * MB), np.full(1_000, MB))
    two = compare_layouts(plan, machine(ranks=4, window=249 * MB), np.full(1_000, MB))

    # 2.5 s to read and 2.5 s to write each rank's quarter; without the memory 2.5 s of seeks more (not two passes).
    assert one.option("rewritten").once_seconds == pytest.approx(5.0)
    assert two.option("rewritten").once_seconds == pytest.approx(7.5)


def test_a_slow_write_makes_writing_anew_dear() -> None:
    plan = AccessPlan(FullShuffle(1_000), 100, epochs=2)

    quick, slow = (
        compare_layouts(plan, machine(write=Curve.flat(rate)), np.full(1_000, MB)) for rate in (100e6, 10e6)
    )

    assert slow.option("rewritten").once_seconds == pytest.approx(
        quick.option("rewritten").once_seconds + 90.0
    )


def test_bundles_of_packed_samples_are_read_whole_where_the_ranks_windows_hold_them() -> None:
    """A bundle of 100 samples and windows of 4 times 25: packing pays from the epoch on that the closed form says."""
    plan = AccessPlan(BundleShuffle(2_000, seed=3, bundle_ratio=0.05), 100, epochs=20, ranks=4)

    comparison = compare_layouts(plan, machine(ranks=4, window=25 * MB), np.full(2_000, MB), is_packed=False)

    packed, samples = comparison.option("packed"), comparison.option("samples")
    assert [option.name for option in comparison.options] == ["samples", "packed", "rewritten"]
    assert packed.first_epoch.how == "collective"
    assert packed.first_epoch.requests == 20 * 4
    # Once: 500 seeks, 5 s of reading and 5 s of writing. An epoch: 10 s before, 20 seeks and 5 s after.
    assert packed.once_seconds == pytest.approx(15.0)
    assert samples.first_epoch.seconds == pytest.approx(10.0)
    assert packed.first_epoch.seconds == pytest.approx(5.2)
    assert packed.break_even_epochs == 4  # 15 / (10 - 5.2) = 3.1
    assert comparison.best == packed
    # What was written in the order of the first epoch keeps a bundle together for the next ones too.
    rewritten = comparison.option("rewritten")
    assert packed.later_epoch is not None
    assert rewritten.later_epoch is not None
    assert rewritten.later_epoch.requests == packed.later_epoch.requests == 20 * 4


def listed_break_even(once: float, first: float, later: float, found: float) -> int | None:
    for epochs in range(1, 3_000):
        if once + first + (epochs - 1) * later < epochs * found:
            return epochs
    return None


@given(*[st.integers(0, 1_000) for _ in range(4)])
def test_the_break_even_is_the_first_epoch_that_is_quicker(
    once: int, first: int, later: int, found: int
) -> None:
    assert _break_even(once, first, later, found) == listed_break_even(once, first, later, found)


# -- What is said ------------------------------------------------------------------------------------------


def test_a_machine_that_does_not_tell_them_apart_is_answered_with_what_is_missing() -> None:
    plan = AccessPlan(FullShuffle(100), 10, epochs=2)
    plain = machine(sequential=None)

    comparison = compare_layouts(plan, plain, np.full(100, MB))

    assert comparison.best.name == "samples"
    (said,) = verdict(comparison)
    assert "give the store's `sequential` rate" in said


def test_the_verdict_says_what_pays_and_from_when_on() -> None:
    plan = AccessPlan(BundleShuffle(2_000, seed=3, bundle_ratio=0.05), 100, epochs=3, ranks=4)

    comparison = compare_layouts(plan, machine(ranks=4, window=25 * MB), np.full(2_000, MB), is_packed=False)

    said = "\n".join(verdict(comparison))
    assert "A request costs 10 ms in addition to its bytes, which come at 100 MB/s: as much as 1 MB" in said
    assert (
        "Packing the samples once costs 15 s and 2 GB, and pays from 4 epochs on, too many for this run"
        in said
    )


def test_long_runs_are_counted_in_part_and_say_so() -> None:
    plan = AccessPlan(FullShuffle(10_000), 100, epochs=50)
    sizes = np.full(10_000, MB)

    whole = compare_layouts(plan, machine(), sizes)
    part = compare_layouts(plan, machine(), sizes, counted_reads=10_000)

    assert (whole.counted_epochs, whole.counted_share) == (50, 1.0)
    assert (part.counted_epochs, part.counted_share) == (2, 0.5)
    for name in ("samples", "ranges", "sieving"):
        assert part.option(name).run_seconds == pytest.approx(whole.option(name).run_seconds, rel=0.01)


def test_progress_is_told_epoch_by_epoch() -> None:
    told: list[int] = []

    compare_layouts(AccessPlan(FullShuffle(50), 10, epochs=3), machine(), np.full(50, MB), done=told.append)

    assert told == [1, 2, 3]


def test_an_option_that_was_not_compared_is_answered_with_those_that_were() -> None:
    comparison = compare_layouts(AccessPlan(FullShuffle(50), 10, epochs=1), machine(), np.full(50, MB))

    with pytest.raises(ConfigError, match="'packed' was not compared; the options are samples, ranges"):
        comparison.option("packed")


@pytest.mark.parametrize(
    ("sizes", "window", "message"),
    [(np.full(49, MB), None, "the plan has 50 samples"), (np.full(50, MB), 0, "window_bytes is 0")],
)
def test_what_cannot_be_compared_is_refused(sizes: Any, window: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_layouts(AccessPlan(FullShuffle(50), 10, epochs=1), machine(), sizes, window_bytes=window)
