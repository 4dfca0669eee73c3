"""The rules that arguments of all kinds share: counts, times, rates, shares; errors name argument, value and rule."""

from __future__ import annotations

import math
from numbers import Rational, Real

from penstock.errors import ConfigError
from penstock.units import is_integer

#: No process has more; a model keeps a place in memory for each.
_MOST_THREADS = 65_536


def check_count(field: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Refuse anything but an integer of at least, and at most, so many."""
    if not is_integer(value):
        raise ConfigError(f"{field} is {value!r}; it must be an integer")
    if value < least:
        raise ConfigError(f"{field} is {value}; it must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{field} is {value}; it must be at most {most:,}")


def check_threads(field: str, value: int) -> None:
    """Refuse anything but a number of threads from 1 to 65,536."""
    check_count(field, value, most=_MOST_THREADS)


def check_seconds(field: str, value: float) -> None:
    """Refuse a time that is negative, or never ends."""
    _check_number(field, value)
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{field} is {value!r}; it must be finite and zero or more")


def check_wait(field: str, value: float) -> None:
    """Refuse anything but a time above zero; inf is one, which never ends."""
    _check_number(field, value)
    if not value > 0:
        raise ConfigError(f"{field} is {value!r}; it is a number of seconds above zero")


def check_rate(field: str, value: float) -> None:
    """Refuse a rate of zero or less; inf is one."""
    _check_number(field, value)
    if not value > 0:
        raise ConfigError(f"{field} is {value!r}; a rate must be above zero (inf means that it never limits)")


def check_above_zero(field: str, value: float) -> None:
    """Refuse what is not above zero, or has no end."""
    _check_number(field, value)
    if not 0 < value < math.inf:
        raise ConfigError(f"{field} is {value!r}; it must be finite and above zero")


def check_share(field: str, value: float) -> None:
    """Refuse anything but a share of something, neither none nor all of it."""
    _check_number(field, value)
    if not 0 < value < 1:
        raise ConfigError(f"{field} is {value!r}; it is a share, above 0 and below 1")


def is_number(value: object) -> bool:
    """Return whether a value is an integer or a float, of NumPy too; a boolean and a fraction are none."""
    return is_integer(value) or (isinstance(value, Real) and not isinstance(value, Rational))


def _check_number(field: str, value: float) -> None:
    # Text with a unit is read by penstock.units, or by from_toml; here it would compare with nothing.
    if not is_number(value):
        raise ConfigError(f"{field} is {value!r}; it must be a number")
