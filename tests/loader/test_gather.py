"""What the compiled loop copies is what NumPy does; what it must not take, it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.loader import Padding, Ragged
from penstock.loader.dataset import numpy_leaf
from penstock.loader.gather import GATHER, find
from penstock.loader.unequal import Joined, Padded


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    GATHER.wait()


def arrays_of(dtype: str, rest: tuple[int, ...]) -> Any:
    shapes = st.integers(0, 9).map(lambda length: (length, *rest))
    return st.lists(shapes.flatmap(lambda shape: hnp.arrays(dtype, shape)), min_size=1, max_size=12)


@given(
    data=st.data(),
    dtype=st.sampled_from(["u1", "i2", "f4", "i8", "c16"]),
    rest=st.sampled_from([(), (3,), (0,), (2, 2)]),
    how=st.sampled_from([None, Padding(7), Padding(7, 4, mask=True)]),
    cut=st.integers(0, 12),
)
@settings(max_examples=100)
def test_batches_hold_the_bytes_that_numpy_puts_there(
    data: st.DataObject, dtype: str, rest: tuple[int, ...], how: Padding | None, cut: int
) -> None:
    rest = () if how else rest
    arrays = data.draw(arrays_of(dtype, rest))
    joined = Joined([np.ones((2, *rest), dtype)], "points", how, numpy_leaf)
    steps = [slice(0, min(cut, len(arrays))), slice(min(cut, len(arrays)), len(arrays))]
    found = find(arrays, np.dtype(dtype), (0, *rest), is_free=True)
    assert found is not None

    for made, step in zip(joined.join_steps(found, steps), steps, strict=True):
        plain = joined.join(arrays[step])
        assert type(made) is type(plain)
        names = {Ragged: ("values", "offsets"), Padded: ("values", "mask")}.get(type(made))
        pairs = [(getattr(made, name), getattr(plain, name)) for name in names] if names else [(made, plain)]
        for one, other in pairs:
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())

    whole = np.zeros((len(arrays), 2, *rest), dtype)
    alike = [np.full((2, *rest), index, dtype) for index in range(len(arrays))]
    same = find(alike, np.dtype(dtype), (2, *rest))
    assert same is not None
    same.copy([slice(0, len(alike))], [whole])
    assert whole.tobytes() == np.stack(alike).tobytes()


class Own(np.ndarray):
    """Somebody's subclass."""


@pytest.mark.parametrize(
    "other",
    [
        np.arange(8)[::2],
        np.arange(4, dtype=np.int32),
        np.arange(4).astype(">i8"),
        np.arange(4).reshape(4, 1),
        np.array(4),
        np.arange(4).view(Own),
        [0, 1, 2, 3],
        None,
    ],
    ids=[
        "strided",
        "of 4 bytes",
        "big-endian",
        "of two dimensions",
        "a number",
        "a subclass",
        "a list",
        "None",
    ],
)
def test_what_is_otherwise_is_left_to_numpy(other: Any) -> None:
    like = np.arange(4)

    assert find([like, like], like.dtype, (0,), is_free=True) is not None
    for column in ([like, other], [other, like]):
        assert find(column, like.dtype, (0,), is_free=True) is None
        assert find(column, like.dtype, (4,)) is None
    assert find([like, np.arange(5)], like.dtype, (4,)) is None
