"""What the header of a loader's trace says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.loader.budget import MemoryBudget
from penstock.policy import StagingLimits
from penstock.policy.forms import CropForm

Made = TypeVar("Made", StagingLimits, MemoryBudget, CropForm)


def field_of(meta: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a field of a header. Raises: ConfigError if it is not of a kind."""
    value = meta.get(name)
    if not isinstance(value, kind):
        raise ConfigError(
            f"its header says {name} = {value!r}: give a trace that a loader of this version wrote with trace="
        )
    return value


def made_of(kind: type[Made], meta: Mapping[str, Any], name: str) -> Made:
    """Return an object of the counts in a field of a header. Raises: ConfigError if it is not made of these."""
    values = field_of(meta, name, dict)
    try:
        if not all(type(value) in (int, bool) and value >= 0 for value in values.values()):
            raise TypeError("not a count")
        return kind(**values)
    except TypeError as error:
        raise ConfigError(
            f"its header says {name} = {values!r}: give a trace that a loader of this version wrote with trace="
        ) from error


def form_in(meta: Mapping[str, Any]) -> CropForm | None:
    """Return the form in which a run kept samples; None for samples as stored. Raises: as `made_of`."""
    return None if meta.get("keep") is None else made_of(CropForm, meta, "keep")
