"""The nesting of a sample: mappings, tuples and lists around leaves, learned once and held to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not looked into."""

    def leaves_of(self, value: Any, where: str) -> Iterator[Any]:
        """Yield the leaves of a value of this nesting, in the nesting's order.

        where: what the value is, for the message. Raises: DataError if the value is nested otherwise.
        """
        if _is_nested(value):
            raise DataError(
                f"{where} is a {_named(value)}, in the first sample it was a plain value: {_ADVICE}"
            )
        yield value

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return a value of this nesting with the next of `leaves`, as PyTorch's default_collate nests batches."""
        return next(leaves)


@dataclass(frozen=True, slots=True)
class Branch:
    """A mapping (with keys) or a sequence of parts. kind: of a named tuple."""

    parts: tuple[Leaf | Branch, ...]
    keys: tuple[Hashable, ...] | None = None
    kind: Any = None

    def leaves_of(self, value: Any, where: str) -> Iterator[Any]:
        """See `Leaf.leaves_of`. A mapping's parts are found by key, whatever their order."""
        if self.keys is not None:
            if not isinstance(value, Mapping) or value.keys() != set(self.keys):
                raise DataError(
                    f"{where} is a {_named(value)}, in the first sample it was a mapping with the keys "
                    f"{sorted(map(str, self.keys))}: {_ADVICE}"
                )
            for key, part in zip(self.keys, self.parts, strict=True):
                yield from part.leaves_of(value[key], f"{where}[{key!r}]")
            return
        if not isinstance(value, (tuple, list)) or len(value) != len(self.parts):
            raise DataError(
                f"{where} is a {_named(value)}, in the first sample it was a sequence of {len(self.parts)} parts: "
                f"{_ADVICE}"
            )
        for index, (member, part) in enumerate(zip(value, self.parts, strict=True)):
            yield from part.leaves_of(member, f"{where}[{index}]")

    def build(self, leaves: Iterator[Any]) -> Any:
        """See `Leaf.build`."""
        built = [part.build(leaves) for part in self.parts]
        if self.keys is not None:
            return dict(zip(self.keys, built, strict=True))
        return built if self.kind is None else self.kind(*built)


_ADVICE = "return the same structure for every sample"


def learn_structure(value: Any) -> Leaf | Branch:
    """Return the nesting of a value."""
    if isinstance(value, Mapping):
        return Branch(tuple(map(learn_structure, value.values())), tuple(value))
    if isinstance(value, (tuple, list)):
        kind = type(value) if hasattr(value, "_fields") else None
        return Branch(tuple(map(learn_structure, value)), kind=kind)
    return Leaf()


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple, list))


def _named(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)} parts"
    return type(value).__name__
