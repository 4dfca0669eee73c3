"""Memory of arrays that nobody refers to any more: used again, never under somebody's hands, and within bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.reused import Reused

BYTES = np.dtype(np.uint8)


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_once_no_view_is_left_and_no_earlier() -> None:
    memory = Reused()
    array = memory.empty((500, 300), BYTES)
    place, row = address_of(array), array[7:, 1]
    del array

    other = memory.empty((300, 501), BYTES)
    assert not np.shares_memory(other, row)
    del row
    assert address_of(memory.empty((150_200,), BYTES)) == place  # of about the same size


def test_after_the_end_memory_goes_with_its_arrays() -> None:
    memory = Reused()
    held, _ = memory.empty((200_000,), BYTES), memory.empty((200_000,), BYTES)

    memory.close()
    held[:] = 1
    del held

    assert not memory._returned
    assert memory._lent_bytes == memory._idle_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 5)), max_size=40))
def test_all_memory_is_no_more_than_what_arrays_took_at_one_time(asked: list[tuple[int, int]]) -> None:
    memory, held, most = Reused(), list[np.ndarray](), 0
    for value, (nbytes, kept) in enumerate(asked):
        del held[kept:]
        array = memory.empty((nbytes,), BYTES)
        array[:] = value
        held.append(array)
        large = [each.nbytes for each in held if each.nbytes >= 64 << 10]
        most = max(most, sum(large))
        assert memory._lent_bytes + memory._idle_bytes <= 1.125 * most
        assert all((each[:1] == each[-1:]).all() for each in held)
        assert not any(np.shares_memory(array, other) for other in held[:-1])
        del array
