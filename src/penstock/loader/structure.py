"""The nesting of a sample: mappings, tuples, lists and dataclasses around leaves, learned once and held to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from penstock.errors import DataError

#: A leaf of several values, and of which types it is: none for a leaf that may be of any.
Column = tuple[Sequence[Any], set[type]]


class JsonObject(dict[str, Any]):
    """What a sample has as an object of JSON, of whatever keys: it is a leaf, which a batch has in a list."""


class JsonArray(list[Any]):
    """The same of an array of JSON that has other things than numbers, or nothing."""


def as_json_leaf(value: Any) -> Any:
    """Return what JSON has as a leaf, where it is an object, or an array that is none of numbers."""
    if isinstance(value, dict):
        return JsonObject(value)
    if not isinstance(value, list) or (value and all(isinstance(each, int | float) for each in value)):
        return value
    return JsonArray(value)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not looked into.

    takes_any: whether it may be nested all the same, as a list of numbers that becomes an array.
    is_empty: whether it was an array of JSON without anything, and may be one of numbers in another sample.
    """

    takes_any: bool = False
    is_empty: bool = False

    def leaves_of(self, value: Any, where: str, name: str = "") -> Iterator[Any]:
        """Yield the leaves of a value of this nesting, in the nesting's order.

        where: what the value is, for the message. name: of the part of a sample that it is, as of `names`.
        Raises: DataError if the value is nested otherwise.
        """
        if not self.takes_any and is_nested(value):
            was = "an empty list" if self.is_empty else "a plain value"
            advice = unequal_advice(name) if self.is_empty and _are_numbers(value) else _ADVICE
            raise DataError(f"{where} is a {_named(value)}, in the first sample it was {was}: {advice}")
        yield value

    def columns(self, values: Sequence[Any]) -> list[Column] | None:
        """Return each leaf of several values, in the nesting's order; None where some are nested otherwise."""
        if self.takes_any:
            return [(values, set())]
        kinds = set(map(type, values))
        return None if any(map(_is_nested_type, kinds)) else [(values, kinds)]

    def places(self, where: str = "") -> Iterator[str]:
        """Yield where each leaf is, as an expression behind the value's name: "['image'][0]"."""
        yield where

    def names(self, name: str = "") -> Iterator[str]:
        """Yield the name of each leaf: "target.boxes", "1" for a sequence's second part, "" for the value itself."""
        yield name

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return a value of this nesting with the next of `leaves`, as PyTorch's default_collate nests batches."""
        return next(leaves)


@dataclass(frozen=True, slots=True)
class Branch:
    """A mapping (with keys), a dataclass (with the names of its fields, and kind) or a sequence of parts.

    kind: of a dataclass or named tuple.
    """

    parts: tuple[Leaf | Branch, ...]
    keys: tuple[Hashable, ...] | None = None
    kind: Any = None
    #: One for each part, which takes it from a value.
    _getters: tuple[Callable[[Any], Any], ...] = field(init=False, repr=False, compare=False)
    #: The parts with these, where they are, as of `places`, and what they are called.
    _named_parts: tuple[tuple[Leaf | Branch, Callable[[Any], Any], str, Hashable], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        at: Sequence[Any] = range(len(self.parts)) if self.keys is None else self.keys
        names = _numbered(self.parts, self.kind) if self.keys is None else self.keys
        has_attributes = self.keys is not None and self.kind is not None
        getters = tuple(attrgetter(str(key)) if has_attributes else itemgetter(key) for key in at)
        places = [f".{key}" if has_attributes else f"[{key!r}]" for key in at]
        object.__setattr__(self, "_getters", getters)
        object.__setattr__(self, "_named_parts", tuple(zip(self.parts, getters, places, names, strict=True)))

    def leaves_of(self, value: Any, where: str, name: str = "") -> Iterator[Any]:
        """See `Leaf.leaves_of`. A mapping's parts are found by key, whatever their order."""
        if wrong := self._difference(value, name):
            raise DataError(f"{where} {wrong}")
        for part, get, place, key in self._named_parts:
            yield from part.leaves_of(get(value), where + place, _name_within(name, key))

    def columns(self, values: Sequence[Any]) -> list[Column] | None:
        """See `Leaf.columns`. No object is made for each value: the collector of garbage would go through them all."""
        kinds = set(map(type, values))
        if any(map(self._is_unlike, kinds)):
            return None
        if self.keys is not None and self.kind is None and set(map(len, values)) != {len(self.parts)}:
            return None
        members: list[Sequence[Any]]
        try:
            if self.keys is None:
                members = list(zip(*values, strict=True))
            else:
                members = [list(map(get, values)) for get in self._getters]
        except (KeyError, ValueError):  # of other keys, or lengths
            return None
        if len(members) != len(self.parts):
            return None
        found: list[Column] = []
        for part, column in zip(self.parts, members, strict=True):
            columns = part.columns(column)
            if columns is None:
                return None
            found += columns
        return found

    def places(self, where: str = "") -> Iterator[str]:
        """See `Leaf.places`."""
        for part, _, place, _ in self._named_parts:
            yield from part.places(where + place)

    def names(self, name: str = "") -> Iterator[str]:
        """See `Leaf.names`."""
        for part, _, _, key in self._named_parts:
            yield from part.names(_name_within(name, key))

    def build(self, leaves: Iterator[Any]) -> Any:
        """See `Leaf.build`. A dataclass is made without its constructor, which expects a sample."""
        built = [part.build(leaves) for part in self.parts]
        if self.keys is None:
            return built if self.kind is None else self.kind(*built)
        members = dict(zip(self.keys, built, strict=True))
        return members if self.kind is None else _made(self.kind, members)

    def _is_unlike(self, kind: type) -> bool:
        if self.keys is None:
            return not issubclass(kind, (tuple, list))
        return kind is not (dict if self.kind is None else self.kind)

    def _difference(self, value: Any, name: str) -> str:
        """Return what a value is and this nesting is not, and what to do; empty if it is of this nesting."""
        advice = _ADVICE
        if self.keys is None:
            if isinstance(value, (tuple, list)):
                if len(value) == len(self.parts):
                    return ""
                if self.kind is None and _are_numbers(value):
                    advice = unequal_advice(name)
            was = f"a sequence of {len(self.parts)} parts"
        elif self.kind is not None:
            if type(value) is self.kind:
                return ""
            was = f"a {self.kind.__name__}"
        elif isinstance(value, Mapping):
            return self._other_keys(value, name)
        else:
            was = f"a mapping with the keys {sorted(map(str, self.keys))}"
        return f"is a {_named(value)}, in the first sample it was {was}: {advice}"

    def _other_keys(self, value: Mapping[Any, Any], name: str) -> str:
        """The same of a mapping. Keys of both are not named: those may be there by `optional=`."""
        own = self.keys or ()
        if value.keys() == set(own):
            return ""
        lacks, has = ([key for key in own if key not in value], [key for key in value if key not in own])
        if lacks and has:
            return f"lacks {_listed(lacks)} and has {_listed(has)}, unlike the first sample: {_ADVICE}"
        keys = lacks or has
        said = ("lacks", "has") if lacks else ("has", "lacks")
        fields = _listed([_name_within(name, key) for key in keys] if name else keys)
        return (
            f"{said[0]} {_listed(keys)}, which the first sample {said[1]}: give {fields} a default by optional=, or "
            f"{_ADVICE}"
        )


_ADVICE = "return the same structure for every sample"


def unequal_advice(field: str) -> str:
    """Return what to do about a field whose samples differ in length. field: its name, as of `Leaf.names`."""
    return (
        f"padded={{{field!r}: 0}} pads each batch to its longest, ragged=[{field!r}] puts samples end to end; or crop "
        "or pad them in the data set"
    )


def _are_numbers(value: Any) -> bool:
    """Whether a value is a sequence of numbers, or of nothing."""
    return isinstance(value, (tuple, list)) and all(isinstance(each, int | float) for each in value)


def _listed(keys: Sequence[Hashable]) -> str:
    return " and ".join(map(repr, keys))


def learn_structure(value: Any, leaves: Collection[str] = (), name: str = "") -> Leaf | Branch:
    """Return the nesting of a value.

    leaves: names, as of `Leaf.names`, of parts that are not looked into. name: of the value.
    """
    if name in leaves:
        return Leaf(takes_any=True)
    keys, kind, members = None, None, value
    if isinstance(value, JsonObject | JsonArray):
        return Leaf(is_empty=value == [])
    if isinstance(value, Mapping):
        keys = tuple(value)
    elif isinstance(value, (tuple, list)):
        kind = type(value) if hasattr(value, "_fields") else None
    elif is_dataclass_value(value):
        members = _members(value)
        keys, kind = tuple(members), type(value)
    else:
        return Leaf()
    if keys is None:
        members = dict(zip(_numbered(value, kind), value, strict=True))
    parts = (learn_structure(part, leaves, _name_within(name, key)) for key, part in members.items())
    return Branch(tuple(parts), keys, kind)


def _numbered(parts: Sequence[Any], kind: Any) -> Sequence[Hashable]:
    """Return what the parts of a sequence are called. kind: the named tuple that it is, or None."""
    names: Sequence[Hashable] = range(len(parts)) if kind is None else kind._fields
    return names


def _name_within(name: str, key: Hashable) -> str:
    return f"{name}.{key}" if name else str(key)


def is_nested(value: Any) -> bool:
    """Whether a value is a branch."""
    return _is_nested_type(type(value))


def is_dataclass_value(value: Any) -> bool:
    """Whether a value is of a dataclass, with fields; not a dataclass itself."""
    return bool(_field_names(type(value)))


def _find_field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; none of another type."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


_field_names: Callable[[type], tuple[str, ...]] = functools.lru_cache(maxsize=256)(_find_field_names)


def with_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dataclass's value with each field changed, made without the constructor."""
    return _made(type(value), {name: change(member) for name, member in _members(value).items()})


def with_field(value: Any, which: Any, member: Any) -> Any:
    """Return a sequence or dataclass's value with another part. which: its index, or its name."""
    if not isinstance(value, (tuple, list)):
        return _made(type(value), {**_members(value), which: member})
    parts = [*value[:which], member, *value[which + 1 :]]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _members(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _field_names(type(value))}


def _made(kind: type, members: Mapping[Any, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, member in members.items():
        object.__setattr__(made, name, member)
    return made


def _find_is_nested(kind: type) -> bool:
    is_branch = issubclass(kind, (tuple, list, Mapping)) and not issubclass(kind, (JsonObject, JsonArray))
    return is_branch or bool(_field_names(kind))


_is_nested_type: Callable[[type], bool] = functools.lru_cache(maxsize=256)(_find_is_nested)


def _named(value: Any) -> str:
    kind = next(each for each in type(value).__mro__ if each not in (JsonObject, JsonArray)).__name__
    if isinstance(value, Mapping):
        return f"{kind} with the keys {sorted(map(str, value))}"
    return f"{kind} of {len(value)} parts" if isinstance(value, (tuple, list)) else kind


def is_same(first: Any, second: Any) -> bool:
    """Whether two samples hold equal values, as far as that can be asked."""
    try:
        structure = learn_structure(first)
        pairs = zip(structure.leaves_of(first, ""), structure.leaves_of(second, ""), strict=True)
        return all(_are_equal(one, other) for one, other in pairs)
    except Exception:  # of another structure, or of objects that compare in their own way
        return False


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if hasattr(one, "__array__"):
        left, right = np.asarray(one), np.asarray(other)
        return left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(one, (bool, int, float, complex, str, bytes, type(None))):
        return one == other or one != one  # NaN is no difference
    if isinstance(one, JsonObject | JsonArray):
        return repr(one) == repr(other)  # nor is it there
    return True  # of other objects nobody knows what equal means
