"""The nesting of samples is learned once and held to."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import DataError
from penstock.loader.structure import JsonArray, learn_structure

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Both:
    """Refuses, as it is made, what is no sample; and has a field that its constructor does not take."""

    left: Any
    right: Any
    sum: Any = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.left, list):
            raise TypeError("of one sample")
        object.__setattr__(self, "sum", 5)


@dataclass(slots=True)
class Slots:
    left: Any
    right: Any


nested = st.recursive(
    st.integers(),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(st.text(max_size=3), parts, max_size=3),
        st.builds(Pair, parts, parts),
        st.builds(Slots, parts, parts),
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


@for_each(
    ("first", "later", "message"),
    [
        ({"a": 1}, {"b": 1}, "^it lacks 'a' and has 'b', unlike the first sample: return the same"),
        (
            {"a": 1},
            {"a": 1, "b": 2},
            "^it has 'b', which the first sample lacks: give 'b' a default by optional=",
        ),
        (
            {"a": 1, "b": 2, "c": 3},
            {"a": 1},
            "^it lacks 'b' and 'c', .*: give 'b' and 'c' a default by optional=",
        ),
        ({"x": {"a": 1}}, {"x": {"a": 1, 3: 2}}, r"^it\['x'\] has 3, .*: give 'x\.3' a default by optional="),
        ({"a": 1}, [1], "list of 1 parts"),
        ((1, (2, 3)), ((1, 2), 3), r"it\[0\] is a tuple of 2 parts"),
        ((1, 2), (1, 2, 3), r"tuple of 3 parts, .*: padded=\{'': 0\} pads each batch"),
        ({"x": {"a": [1, 2]}}, {"x": {"a": JsonArray()}}, r"is a list of 0 parts, .*ragged=\['x\.a'\] puts"),
        ({"a": JsonArray()}, {"a": [1]}, r"is a list of 1 parts, .* an empty list: padded=\{'a': 0\} pads"),
        ({"a": [1, 2]}, {"a": ["b"]}, "a sequence of 2 parts: return the same structure for every sample$"),
        (({"x": (1, 2)},), ({"x": 5},), r"it\[0\]\['x'\] is a int"),
        (Slots(1, 2), (1, 2), "it is a tuple of 2 parts, in the first sample it was a Slots"),
        ({"pair": Slots(1, 2)}, {"pair": Slots(1, {})}, r"it\['pair'\]\.right is a dict"),
    ],
)
def test_another_nesting_is_refused_with_its_place(first: Any, later: Any, message: str) -> None:
    structure = learn_structure(first)

    with pytest.raises(DataError, match=message):
        list(structure.leaves_of(later, "it"))


@given(nested, st.integers(1, 4))
def test_columns_are_the_leaves_of_all_values(value: Any, count: int) -> None:
    structure = learn_structure(value)

    columns = structure.columns([value] * count)

    assert columns is not None
    assert [(list(column), kinds) for column, kinds in columns] == [
        ([leaf] * count, {type(leaf)}) for leaf in structure.leaves_of(value, "it")
    ]
    assert len(columns) == len(list(structure.places()))


@for_each("unlike", [5, (1,), [1, 2, 3], {"x": 1, "y": 2}, Slots(1, 2), {"x": (1, 1), "y": 2}])
@for_each("value", [(1, 2), {"x": (1, 2), "y": 3}, Slots(1, (2, 3)), 7])
def test_values_nested_otherwise_have_no_columns(value: Any, unlike: Any) -> None:
    structure = learn_structure(value)
    try:
        list(structure.leaves_of(unlike, "it"))
    except DataError:
        assert structure.columns([value, unlike, value]) is None
    else:
        assert structure.columns([value, unlike, value]) is not None


def test_a_batch_of_a_dataclass_is_made_without_its_constructor() -> None:
    structure = learn_structure(Both(1, 2))

    batch = structure.build(iter([[1, 3], [2, 4], [5, 5]]))

    assert (type(batch), batch.left, batch.right, batch.sum) == (Both, [1, 3], [2, 4], [5, 5])


def test_places_are_expressions_behind_a_values_name() -> None:
    value = {"image": Slots(1, (2, 3)), 4: 5}

    assert list(learn_structure(value).places()) == [
        "['image'].left",
        "['image'].right[0]",
        "['image'].right[1]",
        "[4]",
    ]
