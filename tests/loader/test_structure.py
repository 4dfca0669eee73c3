"""The nesting of samples is learned once and held to."""

from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.loader.structure import learn_structure

Pair = namedtuple("Pair", "left right")

nested = st.recursive(
    st.integers(),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(st.text(max_size=3), parts, max_size=3),
        st.builds(Pair, parts, parts),
    ),
    max_leaves=8,
)


@given(nested)
def test_what_is_taken_apart_is_put_together_again(value: Any) -> None:
    structure = learn_structure(value)

    assert structure.build(structure.leaves_of(value, "it")) == value


def test_a_mappings_parts_are_found_by_key_whatever_their_order() -> None:
    structure = learn_structure({"image": 1, "target": 2})

    assert list(structure.leaves_of({"target": 20, "image": 10}, "it")) == [10, 20]


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ({"a": 1}, {"b": 1}, r"it is a dict with the keys \['b'\]"),
        ({"a": 1}, {"a": 1, "b": 2}, r"\['a', 'b'\]"),
        ({"a": 1}, [1], "list of 1 parts"),
        ((1, (2, 3)), ((1, 2), 3), r"it\[0\] is a tuple of 2 parts"),
        ((1, 2), (1, 2, 3), "tuple of 3 parts"),
        (({"x": (1, 2)},), ({"x": 5},), r"it\[0\]\['x'\] is a int"),
    ],
)
def test_another_nesting_is_refused_with_its_place(first: Any, later: Any, message: str) -> None:
    structure = learn_structure(first)

    with pytest.raises(DataError, match=message):
        list(structure.leaves_of(later, "it"))
