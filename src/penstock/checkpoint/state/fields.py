"""Fields of JSON that comes from a disk or a stranger: each is what it must be, or a FormatError names it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.errors import FormatError
from penstock.units import format_count

LEAST_INT, LARGEST_INT = -(2**63), 2**63 - 1
T = TypeVar("T")


def expect(kind: type[T], value: object, name: str) -> T:
    """Return a dict, a list or a text."""
    if not isinstance(value, kind):
        raise FormatError(f"{name} is {excerpt(value)}, not a {kind.__name__}")
    return value


def items(count: int, value: object, name: str) -> Sequence[Any]:
    """Return a list, or a tuple that JSON has not made one yet, of so many."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise FormatError(f"{name} is {excerpt(value)}, not a list of {count}")
    return value


def integer(value: Any, name: str, least: int = 0, most: int = LARGEST_INT) -> int:
    """Return an integer within bounds, both included; a boolean is none."""
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"{name} is {excerpt(value)}, not an integer from {least} to {most}")
    return value


def integers(value: object, name: str) -> tuple[int, ...]:
    """Return a list of integers of 64 bits."""
    return tuple(integer(each, name, LEAST_INT) for each in expect(list, value, name))


def number(value: Any, name: str) -> float:
    """Return a finite number."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST_INT:
        raise FormatError(f"{name} is {excerpt(value)}, not a number")
    return float(value)


def matched(pattern: re.Pattern[str], value: object, name: str) -> str:
    """Return a text that is all of a pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"{name} is {excerpt(value)}, not {pattern.pattern}")
    return value


def excerpt(value: object) -> str:
    """Return a value as text, of 60 characters at most."""
    # A container may be of any size and depth, and its text is made only to be cut.
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {format_count(len(value), 'part')}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INT:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
