"""Memory of arrays that nobody refers to any more: used again, never under somebody's hands, and within bounds."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.loader import reused
from penstock.loader.reused import Reused, _LargePages, _Mappings
from penstock.store.direct import BLOCK_BYTES, in_blocks

BYTES = np.dtype(np.uint8)


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


@for_each("large_pages", [False, True])
def test_memory_is_used_again_once_no_view_is_left_and_no_earlier(large_pages: bool) -> None:
    memory = Reused(large_pages=large_pages)
    array = memory.empty((500, 300), BYTES)
    place, row = address_of(array), array[7:, 1]
    array[:] = 7
    del array

    other = memory.empty((300, 501), BYTES)
    assert not np.shares_memory(other, row)
    del row
    assert address_of(memory.empty((150_200,), BYTES)) == place  # of about the same size
    assert memory.empty((140_000,), BYTES)[-1] == 7, "of the next smaller one"


@for_each("large_pages", [False, True])
def test_after_the_end_memory_goes_with_its_arrays(large_pages: bool) -> None:
    memory = Reused(large_pages=large_pages)
    held, other = memory.empty((200_000,), BYTES), memory.empty((200_000,), BYTES)

    del other
    memory.close()
    held[:] = 1
    del held

    assert not memory._returned
    assert memory._space.lent_bytes == 0
    assert memory.empty((200_000,), BYTES).size == 200_000  # whoever is late gets memory that is not kept


ASKED = st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 5)), max_size=40)


@given(ASKED)
def test_all_memory_is_no_more_than_what_arrays_took_at_one_time(asked: list[tuple[int, int]]) -> None:
    memory, held, most = Reused(), list[np.ndarray](), 0
    for value, (nbytes, kept) in enumerate(asked):
        del held[kept:]
        array = memory.empty((nbytes,), BYTES)
        array[:] = value
        held.append(array)
        large = [each.nbytes for each in held if each.nbytes >= 64 << 10]
        most = max(most, sum(large))
        space = memory._space
        assert isinstance(space, _Mappings)
        assert space.lent_bytes + space.idle_bytes <= 1.25 * most
        assert all((each[:1] == each[-1:]).all() for each in held)
        assert not any(np.shares_memory(array, other) for other in held[:-1])
        del array


@given(ASKED)
def test_pieces_of_large_pages_begin_at_blocks_share_nothing_and_leave_no_hole_behind(
    asked: list[tuple[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reused, "_REGION_BYTES", 1 << 20)
        memory, held, large = Reused(large_pages=True), list[np.ndarray](), list[np.ndarray]()
        space = memory._space
        assert isinstance(space, _LargePages)
        for value, (nbytes, kept) in enumerate(asked):
            del held[kept:]
            array = memory.empty((nbytes,), BYTES)
            array[:] = value
            held.append(array)
            large = [each for each in held if each.nbytes >= 64 << 10]
            assert all(address_of(each) % BLOCK_BYTES == 0 for each in large)
            assert sum(in_blocks(each.nbytes) for each in large) <= space.lent_bytes
            assert all((each[:1] == each[-1:]).all() for each in held)
            assert not any(np.shares_memory(array, other) for other in held[:-1])
            del array

        held = large = []
        memory._take_back()

        assert space.lent_bytes == 0
        for region in space._regions.values():
            ((begin, end),) = region.holes
            assert (region.lent_bytes, end - begin) == (0, region.nbytes)


def test_mappings_of_which_nothing_is_lent_are_given_up_for_larger_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reused, "_REGION_BYTES", 1 << 20)
    memory = Reused(large_pages=True)
    space = memory._space
    assert isinstance(space, _LargePages)

    for megabytes in range(2, 9):
        array = memory.empty((megabytes << 20,), BYTES)
        assert sum(each.nbytes for each in space._regions.values()) <= space._most_bytes == array.nbytes
        del array


def test_pages_in_holes_go_back_to_the_kernel_and_those_that_hold_something_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_private(nbytes: int) -> tuple[mmap.mmap, int]:  # of which any kernel takes pages back
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0

    monkeypatch.setattr(reused, "new_large_pages", new_private)
    monkeypatch.setattr(reused, "_REGION_BYTES", 1 << 20)
    monkeypatch.setattr(reused, "_PAGE_BYTES", 128 << 10)
    memory = Reused(large_pages=True)
    space = memory._space
    assert isinstance(space, _LargePages)

    held = [memory.empty((64 << 10,), BYTES) for _ in range(128)]
    for value, array in enumerate(held):
        array[:] = 1 + value
        del array
    held = held[::8]  # two in each mapping are left, so that larger ones need others
    for _ in range(7):
        held.append(memory.empty((1 << 20,), BYTES))
        held[-1][:] = 200

    assert space._most_bytes == space.lent_bytes == 8 << 20
    assert sum(len(each.supplied) for each in space._regions.values()) << 17 <= 9 << 20
    assert [each.min() for each in held] == [each.max() for each in held] == [*range(1, 129, 8), *[200] * 7]
    for region in space._regions.values():
        pages = np.frombuffer(region.memory, np.uint8).reshape(-1, 128 << 10)
        assert set(np.flatnonzero(pages.any(axis=1))) <= region.supplied
