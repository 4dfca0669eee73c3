"""A TOML text read field by field, so that whatever is wrong is named by its path and its unit.

Machines and scenarios are read by it. A reader of a value takes what stands in the file and returns what it means, or
raises `ConfigError`; the table puts the field's path in front.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import tomli_w

from penstock.errors import ConfigError
from penstock.units import is_integer, parse_bytes, parse_rate, parse_seconds

T = TypeVar("T")
_REQUIRED: Any = object()


def load_toml(text: str, what: str) -> Table:
    """Return the outermost table of a TOML text.

    what: what the text should be, for the error, such as ``"the machine"``.
    Raises: ConfigError naming the line where the text is not TOML.
    """
    try:
        return Table(tomllib.loads(text), "")
    except RecursionError:
        raise ConfigError(f"{what} is not valid TOML: brackets in brackets, too many to count") from None
    except ValueError as error:  # of tomllib, or of a number of thousands of digits
        raise ConfigError(f"{what} is not valid TOML: {error}") from error


def to_toml(values: Mapping[str, Any]) -> str:
    """Return the TOML text of a table; NumPy's integers are written as Python's."""
    return tomli_w.dumps(_plain(values))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {field: _plain(entry) for field, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return int(value) if is_integer(value) else value


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a table, and the attribute that it stands for.

    parse: what stands in the file to the attribute's value. write: back. default: of a field that is left out.
    """

    name: str
    attribute: str
    parse: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    default: Any = _REQUIRED


def write_fields(fields: Sequence[Field], instance: object) -> dict[str, Any]:
    """Return the table from which `Table.read_all` makes the attributes of an object again.

    Left out is what is None, and a quantity that is its default.
    """
    values = ((field, getattr(instance, field.attribute)) for field in fields)
    return {
        field.name: field.write(value)
        for field, value in values
        if value is not None and not (isinstance(value, float) and value == field.default)
    }


class Table:
    """A TOML table that is asked for every field it may have, and knows where in the file it stands.

    path: of the table itself, as in ``machine.storage[1]``; empty for the outermost.
    """

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self.path = path
        self._values = values
        self._known: list[str] = []

    def read(self, field: str, parse: Callable[[Any], T], default: Any = _REQUIRED) -> T:
        """Return what `parse` makes of a field, or the default where the field is left out.

        Raises: ConfigError naming the field by its path if it is wrong, or missing and without a default.
        """
        self._known.append(field)
        if field in self._values:
            try:
                return parse(self._values[field])
            except ConfigError as error:
                raise ConfigError(f"{self.path_of(field)}: {error}") from None
            except (OverflowError, ValueError):  # not even text has space for a hexadecimal number of a page
                raise ConfigError(f"{self.path_of(field)}: the number is too large to count with") from None
        if default is _REQUIRED:
            # A misspelt required field is both unknown and missing; the first of the two says more.
            self._refuse_likely_misspelling(field)
            raise ConfigError(f"{self.path_of(field)} is missing: add it")
        found: T = default
        return found

    def read_all(self, fields: Sequence[Field]) -> dict[str, Any]:
        """Return attributes by their names. Raises: as `read`."""
        return {field.attribute: self.read(field.name, field.parse, field.default) for field in fields}

    def table(self, field: str) -> Table:
        """Return the table under a field; an empty one where it is left out."""
        return Table(self.read(field, _as_table, {}), self.path_of(field))

    def required_table(self, field: str) -> Table:
        """Return the table under a field that must be there."""
        return Table(self.read(field, _as_table), self.path_of(field))

    def required_tables(self, field: str) -> list[Table]:
        """Return the tables under a field that must be there, each with its index in its path."""
        path = self.path_of(field)

        def as_tables(value: object) -> list[Mapping[str, object]]:
            if not isinstance(value, list):
                raise ConfigError(f"{value!r} is not a list of tables: write each one under [[{path}]]")
            return [_as_table(entry) for entry in value]

        entries = self.read(field, as_tables)
        return [Table(entry, f"{path}[{index}]") for index, entry in enumerate(entries)]

    def tables(self, field: str) -> list[Table]:
        """Return the tables under a field; none where it is left out."""
        return self.required_tables(field) if field in self else self.read(field, list, [])

    def value(self, field: str) -> object:
        """Return what stands under a field, unread; None where it is left out."""
        return self._values.get(field)

    def rest(self) -> list[str]:
        """Return the fields that were not asked for yet, in the order of the file."""
        return [field for field in self._values if field not in self._known]

    def __contains__(self, field: str) -> bool:
        return field in self._values

    def refuse_unknown(self) -> None:
        """Raise ConfigError if there is a field that was never asked for, with the one that may be meant."""
        for field in self.rest():
            close = get_close_matches(field, self._known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(self._known)}"
            raise ConfigError(f"{self.path_of(field)} is not a field; {hint}")

    def path_of(self, field: str) -> str:
        """Return how messages name a field of this table."""
        return f"{self.path}.{field}" if self.path else field

    def _refuse_likely_misspelling(self, field: str) -> None:
        for close in get_close_matches(field, self._values.keys() - set(self._known), n=1):
            raise ConfigError(f"{self.path_of(close)} is not a field; did you mean {field}?")


@contextmanager
def at(path: str) -> Iterator[None]:
    """Put the path in front of what is wrong with the value built inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


def _as_table(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{value!r} is not a table")
    return value


def text(value: object) -> str:
    """Return text as it stands."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not text in quotes")
    return value


def flag(value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither true nor false")
    return value


def integer(value: object) -> int:
    """Return an integer of any sign, of 64 bits; above 2**63 for seeds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{value!r} is not an integer")
    if not -(2**63) <= value < 2**64:
        raise OverflowError
    return value


def count(value: object) -> int:
    """Return an integer of at least 1."""
    if integer(value) < 1:
        raise ConfigError(f"{value} is below 1")
    return integer(value)


def number(value: object) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{value!r} is not a number")
    if not math.isfinite(value):
        raise ConfigError(f"{value!r} is not finite")
    return float(value)


def with_unit(value: object, example: str) -> str:
    """Return the text of a quantity; a bare number is refused."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} has no unit: write for example {example!r}")
    return value


def size(value: object) -> int:
    """Return bytes, zero or more, from text with a unit."""
    return parse_bytes(with_unit(value, "4 GB"))


def seconds(value: object) -> float:
    """Return finite seconds, zero or more, from text with a unit."""
    found = parse_seconds(with_unit(value, "5 ms"))
    if math.isinf(found):
        raise ConfigError(f"{value!r} never ends: a latency is finite")
    return found


def unbounded_rate(value: object) -> float:
    """Return bytes per second from text with a unit, or inf."""
    if isinstance(value, float) and math.isinf(value):
        return parse_rate(value)
    return parse_rate(with_unit(value, "200 MB/s"))
