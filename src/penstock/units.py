"""Quantities as people write them, to and from the seconds and bytes that the code counts in.

``"4 GB"`` is 4 * 10**9 bytes and ``"4 GiB"`` is 4 * 2**30. A small ``b`` is refused: whether ``"10 Gb/s"``
means bits or bytes is a factor of eight, so bits are written ``"10 Gbit/s"``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Integral
from typing import TypeGuard

from penstock.errors import ConfigError

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?|inf|nan)\s*(.*?)\s*")

_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}

# Fractions, so that "80 us" is the float nearest to 0.00008 and written text is read back bit for bit.
_Units = Mapping[str, Fraction]
_BYTES: _Units = {
    unit: Fraction(scale) for unit, scale in {"B": 1, **_DECIMAL, "KB": 10**3, **_BINARY}.items()
}
_RATES: _Units = {
    **{f"{unit}/s": scale for unit, scale in _BYTES.items()},
    **{f"{unit}/s": Fraction(scale, 8) for unit, scale in _BITS.items()},
}
_SAMPLES: _Units = {"samples/s": Fraction(1)}
_FLOPS: _Units = {
    unit: Fraction(scale)
    for unit, scale in {
        "FLOP/s": 1,
        "MFLOP/s": 10**6,
        "GFLOP/s": 10**9,
        "TFLOP/s": 10**12,
        "PFLOP/s": 10**15,
    }.items()
}
_SHARES: _Units = {"%": Fraction(1, 100)}
_SECONDS: _Units = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether an argument is an integer, of Python or NumPy; a boolean is none.

    >>> is_integer(3), is_integer(True), is_integer(3.0)
    (True, False, False)
    """
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def parse_bytes(value: str | int | float) -> int:
    """Return a number of bytes.

    value: bytes as an integer, or text such as ``"4 GB"``, ``"512 MiB"`` (rounded down to a byte).
    Raises: ConfigError if it is not a finite size of zero or more with a known unit.

    >>> parse_bytes("512 MiB")
    536870912
    """
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        raise ConfigError(f"{value!r} bytes is not an integer number of bytes")
    amount = _parse(value, _BYTES, "4 GB")
    if amount == math.inf:
        raise ConfigError(f"{value!r} is not a size: it must be finite")
    return int(amount)


def parse_mean_bytes(value: str | int | float) -> float:
    """Return bytes that need not be an integer, as a mean or a deviation of sizes is not.

    value: bytes, or text such as ``"27.5 kB"``.
    Raises: as `parse_bytes`.
    """
    amount = float(_parse(value, _BYTES, "27.5 kB"))
    if amount == math.inf:
        raise ConfigError(f"{value!r} is not a size: it must be finite")
    return amount


def parse_rate(value: str | int | float) -> float:
    """Return bytes per second; inf means that this never limits.

    value: bytes per second, or text such as ``"200 MB/s"``, ``"10 Gbit/s"``.
    Raises: ConfigError if it is not a rate above zero with a known unit.

    >>> parse_rate("200 MB/s")
    200000000.0
    """
    return _above_zero(value, _parse(value, _RATES, "200 MB/s"))


def parse_samples_rate(value: str | int | float) -> float:
    """Return samples per second, from a number or text such as ``"640 samples/s"``.

    Raises: ConfigError if it is not a rate above zero with that unit.
    """
    return _above_zero(value, _parse(value, _SAMPLES, "640 samples/s"))


def parse_flops_rate(value: str | int | float) -> float:
    """Return floating-point operations per second, from a number or text such as ``"100 GFLOP/s"``.

    Raises: ConfigError if it is not a rate above zero with a known unit.
    """
    return _above_zero(value, _parse(value, _FLOPS, "100 GFLOP/s"))


def parse_seconds(value: str | int | float) -> float:
    """Return seconds, from seconds or text such as ``"5 ms"``; inf means never.

    Raises: ConfigError if it is not a time of zero or more with a known unit.

    >>> parse_seconds("5 ms")
    0.005
    """
    return float(_parse(value, _SECONDS, "5 ms"))


def parse_share(text: str) -> float:
    """Return a share of something, 1 being all of it, from text such as ``"30%"`` or ``"0.3"``.

    Without its sign a number is at most 1, for ``"5"`` may mean five times or 5 %.
    Raises: ConfigError if it is not a finite share of zero or more.

    >>> parse_share("29%")
    0.29
    """
    match = _QUANTITY.fullmatch(text)
    is_bare = match is not None and not match[2]
    share = float(match[1]) if match is not None and is_bare else float(_parse(text, _SHARES, "30%"))
    if not 0 <= share < math.inf:
        raise ConfigError(f"{text!r} is no share: it must be zero or more, and finite")
    if is_bare and share > 1:
        raise ConfigError(
            f"{text!r} is more than all of it: with its sign, 5% or 500%, it is clear what is meant"
        )
    return share


def _parse(value: object, units: _Units, example: str) -> Fraction | float:
    if is_integer(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{value!r} is not a quantity: write for example {example!r}")
    amount = _parse_text(value, units, example) if isinstance(value, str) else value
    if not amount >= 0:
        raise ConfigError(f"{value!r} cannot be: it must be zero or more")
    return amount


def _parse_text(text: str, units: _Units, example: str) -> Fraction | float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} does not begin with a number: write for example {example!r}")
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f"{text!r} has no unit: write for example {example!r}")
    if unit not in units:
        may_be_bits = re.fullmatch(r"[kKMGT]?b(/s)?", unit)
        hint = f"; {unit!r} may mean bits or bytes, write Gbit/s or GB/s" if may_be_bits else ""
        raise ConfigError(f"{text!r}: {unit!r} is not one of {', '.join(units)}{hint}")
    if number in ("inf", "nan"):
        return float(number)
    amount = Fraction(number) * units[unit]
    if amount > _LARGEST:
        raise ConfigError(f"{text!r} is larger than any number that can be counted with")
    return amount


_LARGEST = Fraction(sys.float_info.max)


def _above_zero(value: object, rate: Fraction | float) -> float:
    if rate == 0:
        raise ConfigError(f"{value!r} is a rate of zero: nothing would ever finish; it must be above zero")
    return float(rate)


def format_bytes(size: float) -> str:
    """Return a size for people, three digits of it, in decimal units: ``"118 kB"``."""
    return _for_people(size, {"B": 1, **_DECIMAL})


def format_bytes_up(size: float) -> str:
    """Return a size for people that is no smaller: as `format_bytes`, rounded up.

    >>> format_bytes_up(2_713_600), format_bytes_up(999_001), format_bytes_up(150)
    ('2.72 MB', '1 MB', '150 B')
    """
    count = math.ceil(size)
    step: int = 10 ** max(0, len(str(count)) - 3)
    return format_bytes(-(-count // step) * step)


def format_rate(bytes_per_second: float) -> str:
    """Return a rate for people, three digits of it: ``"50 MB/s"``."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_flops(flops: float) -> str:
    """Return a number of floating-point operations for people, three digits of it: ``"54 MFLOP"``."""
    return _for_people(flops, {"FLOP": 1, "kFLOP": 10**3, "MFLOP": 10**6, "GFLOP": 10**9, "TFLOP": 10**12})


def format_seconds(seconds: float) -> str:
    """Return a time for people, three digits of it: ``"5 ms"``, ``"1.25 s"``."""
    return _for_people(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})


def format_count(count: int, noun: str) -> str:
    """Return a number of things for people.

    >>> format_count(1, "rank"), format_count(300_000, "sample"), format_count(2, "process")
    ('1 rank', '300,000 samples', '2 processes')
    """
    plural = "es" if noun.endswith(("tch", "ss")) else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else plural)


def format_names(names: Iterable[str], most: int = 3, *, none: str = "none") -> str:
    """Return names for a message, of many the first. none: what to say where there are none.

    >>> format_names("abcde"), format_names("abc"), format_names("")
    ('a, b, c and 2 more', 'a, b, c', 'none')
    """
    known = tuple(names)
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    return (", ".join(known[:most]) or none) + more


def format_ratio(ratio: float) -> str:
    """Return how many times for people: ``"1.67 x"``; what is beyond a hundred times only says so."""
    return f"{ratio:.2f} x" if ratio <= 100 else "> 100 x"


def _for_people(amount: float, ascending_units: Mapping[str, float]) -> str:
    if amount == 0 or not math.isfinite(amount):
        unit = next(name for name, scale in ascending_units.items() if scale == 1)
        return f"{amount:g} {unit}"
    chosen = next(iter(ascending_units))
    for unit, scale in ascending_units.items():
        # 999.6 rounds to 1000 at three digits, which reads better as 1 of the next unit.
        if abs(amount) >= 0.9995 * scale:
            chosen = unit
    scaled = amount / ascending_units[chosen]
    return f"{scaled:.0f} {chosen}" if abs(scaled) >= 100 else f"{scaled:.3g} {chosen}"


def exact_bytes(size: int) -> str:
    """Return text that `parse_bytes` reads back as the same number."""
    units = ((unit, scale) for unit, scale in reversed(_DECIMAL.items()) if size and size % scale == 0)
    unit, scale = next(units, ("B", 1))
    return f"{size // scale} {unit}"


def exact_mean_bytes(size: float) -> str:
    """Return text that `parse_mean_bytes` reads back as the same number, bit for bit."""
    return _exact(size, _BYTES, ("GB", "MB", "kB", "B"))


def exact_rate(bytes_per_second: float) -> str:
    """Return text that `parse_rate` reads back as the same number, bit for bit."""
    return _exact(bytes_per_second, _RATES, ("GB/s", "MB/s", "kB/s", "B/s"))


def exact_flops_rate(flops_per_second: float) -> str:
    """Return text that `parse_flops_rate` reads back as the same number, bit for bit."""
    return _exact(flops_per_second, _FLOPS, ("TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"))


def exact_seconds(seconds: float) -> str:
    """Return text that `parse_seconds` reads back as the same number, bit for bit."""
    return _exact(seconds, _SECONDS, ("s", "ms", "us"))


def exact_share(share: float) -> str:
    """Return text in percent that `parse_share` reads back as the same number, bit for bit."""
    percent = f"{100 * share:.15g}"
    if "e" in percent or parse_share(f"{percent} %") != share:
        percent = format(Decimal(share).scaleb(2, _EVERY_DIGIT), "f")
    return f"{percent} %"


#: More than the 767 significant digits that a float can have.
_EVERY_DIGIT = Context(prec=800)


def _exact(amount: float, units: _Units, descending: tuple[str, ...]) -> str:
    for unit in descending:
        text = f"{float(Fraction(amount) / units[unit]):.15g}"
        if float(text) >= 1 and float(Fraction(text) * units[unit]) == amount:
            return f"{text} {unit}"
    return f"{amount!r} {next(unit for unit in descending if units[unit] == 1)}"
