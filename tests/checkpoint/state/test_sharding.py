"""What ranks hold is written once, evenly, and found again under any other layout."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.state import sharding
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.sharding import Assignment, assign, check_whole, copies_into
from penstock.checkpoint.state.tensors import Box, Layout
from penstock.errors import ConfigError

FLOAT = dtype_named("float32")


def part(name: str, whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    return Layout(name, FLOAT, shape, Box(whole, offsets))


def full(name: str, *shape: int) -> Layout:
    return Layout(name, FLOAT, shape)


def region(layout: Layout) -> tuple[slice, ...]:
    assert layout.box is not None
    return tuple(slice(at, at + size) for at, size in zip(layout.box.offsets, layout.shape, strict=True))


@st.composite
def tilings(draw: st.DrawFn, whole: tuple[int, ...]) -> list[Layout]:
    """Cut a box in two, at any place of any dimension, time and again; empty parts come too."""
    boxes = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 6)) if whole else 0):
        offsets, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(whole) - 1))
        first = draw(st.integers(0, shape[dimension]))
        for start, size in ((0, first), (first, shape[dimension] - first)):
            boxes.append(
                (
                    (*offsets[:dimension], offsets[dimension] + start, *offsets[dimension + 1 :]),
                    (*shape[:dimension], size, *shape[dimension + 1 :]),
                )
            )
    order = draw(st.permutations(boxes))
    return list(dict.fromkeys(part("weight", whole, offsets, shape) for offsets, shape in order))


wholes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


# Who writes what


def test_what_every_rank_holds_is_written_by_one_and_evenly() -> None:
    """Data parallelism: four ranks hold the same twelve tensors."""
    layouts = [full(f"layer{number}", 10 * number) for number in range(1, 13)]

    assigned = assign([layouts] * 4)

    assert sorted(one.layout.name for one in assigned) == sorted(layout.name for layout in layouts)
    assert all(one.holders == (0, 1, 2, 3) for one in assigned)
    written = [sum(one.layout.nbytes for one in assigned if one.writer == rank) for rank in range(4)]
    assert sum(written) == sum(layout.nbytes for layout in layouts)
    assert max(written) <= sum(written) / 4 + 120 * 4


def test_replicated_tensors_even_out_what_single_holders_must_write() -> None:
    held = [[full("table", 500), full("bias", 900)], [full("bias", 900)]]

    assigned = assign(held)

    assert [(one.layout.name, one.writer) for one in assigned] == [("bias", 1), ("table", 0)]


def test_the_largest_are_given_away_first() -> None:
    """In the order of their names, one rank would write three of four."""
    layouts = [full("a", 1), full("b", 1), full("c", 2)]

    assert [one.writer for one in assign([layouts] * 2)] == [1, 1, 0]


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=10), min_size=1, max_size=5), st.randoms())
def test_each_part_is_written_once_by_a_holder_whatever_order_ranks_list_them_in(
    held: list[list[int]], shuffle: random.Random
) -> None:
    layouts = [[full(f"t{number}", 1 + 3 * number) for number in numbers] for numbers in held]
    shuffled = [shuffle.sample(own, len(own)) for own in layouts]

    assigned = assign(layouts)

    assert assigned == assign(shuffled)
    assert [one.layout.name for one in assigned] == sorted(
        {f"t{number}" for number in itertools.chain(*held)}
    )
    for one in assigned:
        assert one.holders == tuple(rank for rank, own in enumerate(layouts) if one.layout in own)
        assert one.writer in one.holders


def test_rows_spread_over_ranks_stay_where_they_are() -> None:
    held = [[part("weight", (8, 3), (2 * rank, 0), (2, 3))] for rank in range(4)]

    assert assign(held) == tuple(Assignment(held[rank][0], (rank,), rank) for rank in range(4))


def test_nothing_held_is_nothing_written() -> None:
    assert assign([[], []]) == ()


def test_a_part_held_twice_by_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bias is held twice by rank 1"):
        assign([[full("bias", 3)], [full("bias", 3), full("bias", 3)]])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (full("bias", 4), r"bias is float32\[3\] on one rank and float32\[4\] on another"),
        (Layout("bias", dtype_named("float16"), (3,)), r"float16\[3\]"),
    ],
)
def test_ranks_that_disagree_on_a_tensor_are_refused(other: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign([[full("bias", 3)], [other]])


# Whether parts make up the whole


@given(st.data())
def test_parts_of_a_cut_box_make_up_the_whole_and_any_one_is_missed(data: st.DataObject) -> None:
    whole = data.draw(wholes)
    parts = data.draw(tilings(whole))
    check_whole(parts)

    victim = data.draw(st.sampled_from(parts))
    rest = [layout for layout in parts if layout is not victim]
    if rest and victim.values:
        with pytest.raises(ConfigError, match=r"^weight lacks \["):
            check_whole(rest)


@given(st.data())
def test_parts_are_told_apart_as_a_count_of_every_number_tells_them(data: st.DataObject) -> None:
    """Boxes at random, most of which overlap or leave gaps; the reference counts who covers each number."""
    whole = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    parts = []
    for _ in range(data.draw(st.integers(1, 5))):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
        shape = tuple(
            data.draw(st.integers(0, size - offset)) for size, offset in zip(whole, offsets, strict=True)
        )
        parts.append(part("weight", whole, offsets, shape))
    count = np.zeros(whole, np.int64)
    for layout in parts:
        count[region(layout)] += 1

    if (count == 1).all():
        check_whole(parts)
    else:
        with pytest.raises(ConfigError, match="twice" if count.max() > 1 else "lacks"):
            check_whole(parts)


@for_each(
    ("whole", "boxes", "problem"),
    [
        (
            (4, 4),
            [((0, 0), (2, 4)), ((2, 0), (2, 3))],
            r"lacks \[2:4, 3:4\]: no rank holds that part of \(4, 4\)",
        ),
        ((4,), [((0,), (3,)), ((2,), (2,))], r"has \[2:3\] twice: in \[0:3\] and in \[2:4\]"),
    ],
)
def test_a_gap_and_an_overlap_are_named_with_their_place(whole: Any, boxes: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"weight {problem}"):
        check_whole([part("weight", whole, *box) for box in boxes])


def test_an_overlap_is_found_across_parts_in_between() -> None:
    tall, between, low = ((0, 0), (4, 1)), ((1, 2), (1, 1)), ((3, 0), (1, 1))

    with pytest.raises(ConfigError, match=r"weight has \[3:4, 0:1\] twice"):
        check_whole([part("weight", (4, 3), offsets, shape) for offsets, shape in (tall, between, low)])


def test_a_scalar_is_one_part() -> None:
    check_whole([part("step", (), (), ())])
    with pytest.raises(ConfigError, match="step has"):
        check_whole([part("step", (), (), ()), full("step")])


@pytest.mark.parametrize(("offsets", "shape"), [((3,), (2,)), ((-1,), (2,)), ((5,), (0,))])
def test_a_part_outside_of_its_tensor_is_refused(offsets: tuple[int], shape: tuple[int]) -> None:
    with pytest.raises(ConfigError, match=r"weight\[.*\] lies outside of the tensor, whose shape is \(4,\)"):
        check_whole([part("weight", (4,), offsets, shape)])


def test_a_box_of_other_dimensions_than_its_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight has 2 dimensions, its box 1 offsets in 1"):
        check_whole([Layout("weight", FLOAT, (2, 2), Box((4,), (0,)))])


def test_parts_along_the_first_dimension_of_a_large_job_are_checked_in_linear_time() -> None:
    """4,096 ranks: pairs of parts would be eight million comparisons, for every tensor."""
    parts = [part("weight", (4096, 2), (row, 0), (1, 2)) for row in range(4096)]

    check_whole(parts)
    with pytest.raises(ConfigError, match=r"lacks \[7:8, 0:2\]"):
        check_whole(parts[:7] + parts[8:])


def test_parts_in_columns_and_points_are_checked_with_few_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many pairs, of which few are compared: these come from files that a stranger made, too."""
    compared, limit = 0, 50_000
    intersection = sharding._intersection

    def counted(*extents: Any) -> Any:
        nonlocal compared
        compared += 1
        return intersection(*extents)

    monkeypatch.setattr(sharding, "_MOST_LOOKED_AT", limit)
    monkeypatch.setattr(sharding, "_intersection", counted)
    columns = [part("weight", (2, 500), (0, column), (2, 1)) for column in range(500)]
    check_whole(columns)
    assert compared == 0
    with pytest.raises(ConfigError, match=r"weight lacks \[0:2, 0:1\]"):
        check_whole(columns[1:])
    assert compared <= limit
    assert len(copies_into(full("weight", 2, 500), columns)) == 500

    compared, bits = 0, [tuple(number >> bit & 1 for bit in range(40)) for number in range(500)]
    points = [part("weight", (2,) * 40, place, (1,) * 40) for place in bits]
    with pytest.raises(ConfigError, match="weight has 500 parts that do not fill"):
        check_whole(points)
    assert compared <= limit


# Laid out anew


@given(st.data())
def test_any_part_is_put_together_from_any_other_cut_of_the_tensor(data: st.DataObject) -> None:
    whole = data.draw(wholes)
    numbers = np.arange(math.prod(whole)).reshape(whole)
    stored = data.draw(tilings(whole))

    for wanted in data.draw(tilings(whole)):
        out = np.full(wanted.shape, -1)
        writes = np.zeros(wanted.shape, np.int64)
        for copy in copies_into(wanted, stored):
            out[copy.target] = numbers[region(stored[copy.part])][copy.source]
            writes[copy.target] += 1
        assert np.array_equal(out, numbers[region(wanted)])
        assert (writes == 1).all()


def test_two_ranks_rows_become_four_ranks_columns() -> None:
    stored = [part("weight", (4, 8), (2 * rank, 0), (2, 8)) for rank in range(2)]

    copies = copies_into(part("weight", (4, 8), (0, 6), (4, 2)), stored)

    assert [(copy.part, copy.source, copy.target) for copy in copies] == [
        (0, (slice(0, 2), slice(6, 8)), (slice(0, 2), slice(0, 2))),
        (1, (slice(0, 2), slice(6, 8)), (slice(2, 4), slice(0, 2))),
    ]


def test_only_the_parts_that_are_touched_are_read() -> None:
    stored = [part("weight", (8,), (2 * rank,), (2,)) for rank in range(4)]

    assert [copy.part for copy in copies_into(part("weight", (8,), (3,), (2,)), stored)] == [1, 2]


def test_a_whole_tensor_is_put_together_from_parts_and_a_part_from_a_whole() -> None:
    halves = [part("weight", (4,), (0,), (2,)), part("weight", (4,), (2,), (2,))]

    assert [copy.target for copy in copies_into(full("weight", 4), halves)] == [
        (slice(0, 2),),
        (slice(2, 4),),
    ]
    assert [copy.source for copy in copies_into(halves[1], [full("weight", 4)])] == [(slice(2, 4),)]


def test_numbers_that_no_stored_part_holds_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weight is stored without \[2:3\], which weight\[1:3\] needs"):
        copies_into(part("weight", (4,), (1,), (2,)), [part("weight", (4,), (0,), (2,))])


def test_a_tensor_of_another_shape_is_not_laid_out_anew() -> None:
    with pytest.raises(ConfigError, match=r"weight is wanted as float32\[5\], but stored as float32\[4\]"):
        copies_into(full("weight", 5), [full("weight", 4)])


def test_a_tensor_that_is_not_in_parts_is_put_together_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of small tensors are read, each as it is stored."""
    monkeypatch.setattr("secrets.randbelow", None)

    (whole,) = copies_into(full("weight", 4, 8), [full("weight", 4, 8)])
    (own,) = copies_into(part("weight", (4, 8), (2, 0), (2, 8)), [part("weight", (4, 8), (2, 0), (2, 8))])

    assert (whole.part, own.part) == (0, 0)
