"""Which samples are read together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.policy import ExtentRuns, Extents, MergedRead, decisions, merge_reads
from penstock.policy.decision_state import new_state
from penstock.policy.merge import Price, count_paying_holes, no_dearer, runs_of
from penstock.policy.placement import Kept


def extents_of(*places: tuple[int, int, int]) -> Extents:
    """Of (unit, offset, length) of each sample."""
    return Extents(*np.array(places, np.int64).reshape(-1, 3).T)


def as_text(reads: Sequence[MergedRead]) -> list[tuple[int, int, int, list[int]]]:
    return [(read.unit, read.begin, read.end, read.which.tolist()) for read in reads]


def priced(request_seconds: float) -> Price:
    """A byte takes a second."""
    return lambda requests, nbytes: request_seconds * requests + nbytes


def test_neighbours_of_one_unit_are_one_read_and_reads_follow_their_earliest_sample() -> None:
    extents = extents_of((1, 10, 10), (0, 30, 5), (1, 0, 10), (0, 0, 10), (1, 20, 7), (0, 35, 1))

    reads = merge_reads(extents, priced(0), 1000)

    assert as_text(reads) == [(1, 0, 27, [2, 0, 4]), (0, 30, 36, [1, 5]), (0, 0, 10, [3])]
    assert reads[1].extents.offsets.tolist() == [30, 35]
    assert reads[1].extents.lengths.tolist() == [5, 1]
    assert reads[1].nbytes == 6
    assert as_text(reads[:-1]) == as_text(reads)[:2]


@pytest.mark.parametrize(("request_seconds", "ends"), [(4.9, [10, 25, 40]), (5.1, [25, 40]), (7, [40])])
def test_a_hole_is_read_over_where_it_takes_less_than_a_request(
    request_seconds: float, ends: list[int]
) -> None:
    extents = extents_of((0, 0, 10), (0, 15, 10), (0, 31, 9))

    assert [read.end for read in merge_reads(extents, priced(request_seconds), 1000)] == ends


def test_a_read_is_no_larger_than_it_may_be_unless_one_sample_is() -> None:
    extents = extents_of(*((0, 10 * k, 10) for k in range(7)), (0, 70, 100), (0, 170, 10))

    assert [read.nbytes for read in merge_reads(extents, priced(1), 30)] == [30, 30, 10, 100, 10]


def test_a_sample_that_cannot_be_read_is_in_no_read() -> None:
    extents = extents_of((-1, 0, 10), (0, 10, 10), (-1, 20, 10))

    assert as_text(merge_reads(extents, priced(100), 1000)) == [(0, 10, 20, [1])]
    assert len(merge_reads(extents_of((-1, 0, 10)), priced(1), 10)) == 0
    assert len(merge_reads(extents_of(), priced(1), 10)) == 0


def test_a_sample_twice_and_samples_that_overlap_are_read_once() -> None:
    extents = extents_of((0, 0, 50), (0, 10, 5), (0, 0, 50), (0, 52, 5))

    assert as_text(merge_reads(extents, priced(1), 1000)) == [(0, 0, 50, [0, 2, 1]), (0, 52, 57, [3])]


PLACES = st.tuples(st.integers(-1, 2), st.integers(0, 60), st.integers(0, 12))


@given(st.lists(PLACES, max_size=40), st.floats(0, 30), st.integers(0, 60))
def test_every_sample_is_in_one_read_which_begins_and_ends_with_samples(
    places: list[tuple[int, int, int]], request_seconds: float, most_bytes: int
) -> None:
    reads = merge_reads(extents_of(*places), priced(request_seconds), most_bytes)

    readable = [index for index, (unit, _, _) in enumerate(places) if unit >= 0]
    assert sorted(index for read in reads for index in read.which.tolist()) == readable
    assert [min(read.which) for read in reads] == sorted(min(read.which) for read in reads)
    for read in reads:
        its = [places[index] for index in read.which.tolist()]
        assert {unit for unit, _, _ in its} == {read.unit}
        assert min(offset for _, offset, _ in its) == read.begin
        assert max(offset + length for _, offset, length in its) == read.end
        assert [offset for _, offset, _ in its] == read.extents.offsets.tolist()
        assert [length for _, _, length in its] == read.extents.lengths.tolist()
        assert read.nbytes <= most_bytes or len(its) == 1


def machine(latency_seconds: float, request_seconds: float, threads: int) -> Machine:
    store = SharedStore(None, Curve.flat(100.0), latency_seconds, threads, request_seconds=request_seconds)
    return Machine(store, (StorageClass("staging", 1000, 1, Curve.flat(1e9)),))


@given(
    st.sets(st.integers(0, 14), min_size=1),
    st.floats(0, 1),
    st.floats(0, 0.3),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_no_other_way_to_merge_is_quicker(
    slots: set[int], latency_seconds: float, request_seconds: float, threads: int, spread: int
) -> None:
    """All ways are tried: each neighbour joined, or not."""
    price: Price = partial(
        machine(latency_seconds, request_seconds, threads).source_seconds, clients=1, sample_bytes=10.0
    )
    offsets = sorted(10 * slot + spread * slot % 7 for slot in slots)[:8]
    extents = extents_of(*((0, offset, 10) for offset in offsets))

    reads = merge_reads(extents, price, 10**6)

    def seconds_of(cuts: tuple[int, ...]) -> float:
        pieces = [offsets[a:b] for a, b in pairwise((0, *cuts, len(offsets)))]
        return price(len(pieces), sum(piece[-1] + 10 - piece[0] for piece in pieces))

    inner = range(1, len(offsets))
    best = min(seconds_of(cuts) for count in range(len(offsets)) for cuts in combinations(inner, count))
    assert price(len(reads), sum(read.nbytes for read in reads)) == pytest.approx(best)


def test_holes_are_counted_from_the_smallest() -> None:
    assert count_paying_holes(5, 100, np.array([1, 2, 8, 9]), priced(7)) == 2
    assert count_paying_holes(5, 100, np.empty(0, np.int64), priced(7)) == 0


def test_a_request_costs_no_more_than_was_seen() -> None:
    extents = extents_of((0, 0, 10), (0, 15, 10), (0, 26, 10))

    assert [as_text(merge_reads(extents, no_dearer(priced(8), seen, 1))) for seen in (9, 3, 0.5)] == [
        [(0, 0, 36, [0, 1, 2])],
        [(0, 0, 10, [0]), (0, 15, 36, [1, 2])],
        [(0, 0, 10, [0]), (0, 15, 25, [1]), (0, 26, 36, [2])],
    ]


def test_what_decides_copies_nothing_that_is_known_of_all_samples() -> None:
    """Of 10^9 samples each copied column would be 8 GB."""
    samples, disk = 1000, Curve.flat(1e8)
    table = np.column_stack((np.repeat([0, 1], samples // 2), np.arange(samples) * 100))
    extents = Extents(table[:, 0], table[:, 1], np.full(samples, 100))
    tiers = tuple(StorageClass(name, 100 * samples, 1, disk) for name in ("staging", "ram"))
    kept = Kept(np.random.default_rng(0).permutation(samples), np.ones(samples, np.int8))
    state = new_state(
        extents.lengths,
        [kept],
        Machine(SharedStore(disk), tiers),
        slots=1,
        local_batch=1,
        readers=1,
        undecoded_bytes=1,
        extents=extents,
    )

    for found, known in (
        (state.extents, table),
        (state.sizes, extents.lengths),
        (state.fill_samples, kept.samples),
    ):
        assert np.shares_memory(found, known)
        assert np.array_equal(found, known)
    for others in (extents.of(np.arange(samples)), Extents(table[:, 1], table[:, 0], extents.lengths)):
        assert np.array_equal(others.table, np.column_stack((others.units, others.offsets)))


def state_of(runs: ExtentRuns) -> decisions.State:
    """Return the state of a rank that keeps nothing."""
    return new_state(
        runs.lengths,
        [Kept(np.empty(0, np.int64), np.empty(0, np.int8))],
        Machine(SharedStore(Curve.flat(1e8)), (StorageClass("staging", 1000, 1, Curve.flat(1e8)),)),
        slots=1,
        local_batch=1,
        readers=1,
        undecoded_bytes=1,
        extents=runs,
    )


@given(
    st.lists(st.tuples(st.integers(-1, 1), st.sampled_from([0, 10, 10, 10, 20])), min_size=1, max_size=30),
    st.sampled_from([0, 15]),
    st.sampled_from([35, 4 << 20]),
)
def test_runs_of_samples_say_of_each_where_it_lies_and_what_may_be_near(
    found: list[tuple[int, int]], hole: int, span: int
) -> None:
    units, steps = np.array(found, np.int64).T
    units, offsets = np.sort(units), np.cumsum(steps)
    lengths = np.arange(units.size)

    runs = ExtentRuns(runs_of(units, offsets, 0), lengths)

    which = np.random.default_rng(0).permutation(units.size)
    for known, expected in zip(dataclasses.astuple(runs.of(which)), (units, offsets, lengths), strict=True):
        assert np.array_equal(known, expected[which])
    state = state_of(runs)
    ends = (units, offsets, offsets + lengths)
    for sample in range(units.size):
        assert decisions.extent_of(state, sample) == tuple(int(column[sample]) for column in ends)
    state.ints[decisions.HOLE_BYTES] = hole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "SPAN_BYTES", span)
        for sample in range(units.size):
            place = decisions.extent_of(state, sample)
            least, most = decisions._may_be_near(state, 0, sample, *place[1:])
            near = [other for other in range(units.size) if decisions.is_near(state, 0, other, *place)]
            assert all(least <= other <= most for other in near)


def test_only_few_samples_of_a_long_run_may_be_near_one_of_them() -> None:
    sizes = np.full(10_000, 1000)
    extents = ExtentRuns(runs_of(sizes * 0, np.cumsum(sizes), 0), sizes)
    state = state_of(extents)
    state.ints[decisions.HOLE_BYTES] = 5000

    _, begin, end = decisions.extent_of(state, 7000)

    assert decisions._may_be_near(state, 0, 7000, begin, end) == (2806, 7006)


def test_a_run_ends_where_the_unit_or_the_step_changes() -> None:
    units = np.repeat([0, 1, 3], [5, 4, 1])
    offsets = np.array([0, 8, 16, 100, 108, 0, 8, 16, 24, 7])

    assert runs_of(units, offsets, 20).tolist() == [
        [0, 0, 20, 8],
        [0, 100, 23, 0],
        [0, 108, 24, 0],
        [1, 0, 25, 8],
        [3, 7, 29, 0],
    ]
