"""Fields that not every sample has: what stands in their place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.structure import is_dataclass_value, with_field


def check_defaults(values: object) -> None:
    """Raise ConfigError unless these may be a loader's `optional=`. None is no default: no field is stacked with it."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise ConfigError(f"optional is {values!r:.80}; it maps names of fields to defaults")
    for name, default in values.items():
        if default is None:
            raise ConfigError(f"optional has None for {name!r}: give what a batch is to hold in its place")


class Defaults:
    """Gives samples the optional fields that they lack, or that are None.

    values: defaults by the name of the field: a key, the name of a dataclass's or named tuple's field, the index of a
        sequence's part; "target.boxes" is a field of a field, unless a sample has a key of that name.
    Raises: ConfigError for None, which no field can be stacked with.
    """

    def __init__(self, values: Mapping[Hashable, Any]) -> None:
        check_defaults(values)
        self._values = dict(values)

    def __bool__(self) -> bool:
        return bool(self._values)

    def fill(self, sample: Any, *, always: bool = False) -> Any:
        """Return a sample that has all optional fields, its own or the defaults; the sample itself is not changed.

        always: take the defaults, whatever the sample has. Raises: ConfigError for a name that it cannot have.
        """
        for name, default in self._values.items():
            sample = _filled(sample, name, default, always, name)
        return sample

    def added_to(self, sample: Any) -> list[Hashable]:
        """Return which of the fields a sample does not have, not even as None."""
        added: list[Hashable] = []
        for name, default in self._values.items():
            _filled(sample, name, default, False, name, added)
        return added


def _filled(
    value: Any,
    name: Hashable,
    default: Any,
    always: bool,
    full_name: Hashable,
    added: list[Hashable] | None = None,
) -> Any:
    """Return a value with one field filled.

    full_name: in the sample, for messages. added: gets it where a mapping does not have it.
    """
    head, rest = (name, "")
    if isinstance(name, str) and "." in name and not (isinstance(value, Mapping) and name in value):
        first, _, after = name.partition(".")
        if not isinstance(value, Mapping) or first in value:
            head, rest = first, after
    if isinstance(value, Mapping):
        member = value.get(head)
        if added is not None and head not in value:
            added.append(full_name)
    elif isinstance(value, (tuple, list)):
        head = _index_of(value, head, full_name)
        member = value[head]
    elif is_dataclass_value(value) and isinstance(head, str) and hasattr(value, head):
        member = getattr(value, head)
    else:
        raise _not_there(value, full_name)
    if rest:
        filled = _filled(member, rest, default, always, full_name, added)
    else:
        filled = default if always or member is None else member
    if filled is member:
        return value
    if isinstance(value, Mapping):
        return {**value, head: filled}
    return with_field(value, head, filled)


def _index_of(value: Any, head: Hashable, full_name: Hashable) -> int:
    names = getattr(value, "_fields", ())
    if head in names:
        return int(names.index(head))
    try:
        index = int(head)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise _not_there(value, full_name) from None
    if not 0 <= index < len(value):
        raise _not_there(value, full_name)
    return int(index)


def _not_there(value: Any, full_name: Hashable) -> ConfigError:
    return ConfigError(
        f"optional names {full_name!r}, and a sample has a {type(value).__name__} there, which cannot have it: give a "
        'key, the name or number of a field, or several with dots between, as "target.boxes"'
    )
