"""What to vary and what it costs, as people write it: ranges of sizes and numbers, prices.

10GB,20GB,40GB      these
10GB..80GB*2        10, 20, 40 and 80 GB
10GB..40GB+10GB     10, 20, 30 and 40 GB
0                   none at all
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from penstock.errors import ConfigError
from penstock.measure.sweep import MOST_BYTES, Point
from penstock.units import parse_bytes

_RANGE = re.compile(r"(.+?)\.\.(.+?)([*+])(.+)")
#: More values than this in one range are a slip of the hand.
_MOST_VALUES = 1000


def parse_sizes(text: str, option: str, *, may_be_zero: bool) -> tuple[int, ...]:
    """Return the bytes that a list of sizes and ranges names, ascending.

    Raises: ConfigError naming the option, the value and what is expected.
    """

    def size(value: str) -> int:
        found = 0 if value == "0" else parse_bytes(value)
        if not found and not may_be_zero:
            raise ConfigError(f"{value!r} is no space at all; it must be above zero")
        if found > MOST_BYTES:
            raise ConfigError(f"{value!r} is more than any machine has, at most {MOST_BYTES:,} bytes")
        return found

    return _parse(text, option, size, "10GB,20GB, 10GB..80GB*2 or 10GB..40GB+10GB")


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Return the integers that a list of numbers and ranges names, ascending.

    Raises: ConfigError naming the option, the value and what is expected.
    """

    def count(value: str) -> int:
        if not re.fullmatch(r"\d{1,9}", value) or not int(value):
            raise ConfigError(f"{value!r} is not an integer of at least 1")
        return int(value)

    return _parse(text, option, count, "2,4,8, 2..16*2 or 2..8+2")


@dataclass(frozen=True, slots=True)
class Prices:
    """What a machine costs, in any currency.

    rank: of each rank's host. memory, local_disk: of a byte of it in each host; the staging buffer is memory too.
    staging: of a byte of it, where it costs something else than other memory.
    """

    rank: float = 0.0
    memory: float = 0.0
    local_disk: float = 0.0
    staging: float | None = None

    def of(self, point: Point) -> float:
        """Return the price of all hosts of a point together."""
        staging = self.memory if self.staging is None else self.staging
        one = (
            self.rank
            + staging * point.staging_bytes
            + self.memory * point.memory_bytes
            + self.local_disk * point.local_disk_bytes
        )
        return point.ranks * one


def parse_prices(texts: Iterable[str]) -> Prices:
    """Return the prices that texts such as "memory=3/GB", "local-disk=100/TB" and "rank=5000" name.

    Raises: ConfigError naming the text, for an unknown or repeated name, or a price that is none.
    """
    known = [field.name.replace("_", "-") for field in fields(Prices)]
    prices: dict[str, float] = {}
    for text in texts:
        name, is_given, price = (part.strip() for part in text.partition("="))
        if name not in known or not is_given:
            raise ConfigError(
                f"--price {text!r} prices none of {', '.join(known)}: write for example memory=3/GB, local-disk=100/TB "
                "or rank=5000"
            )
        if name in prices:
            raise ConfigError(f"--price gives {name} twice: leave one out")
        prices[name] = _parse_price(text, name, price)
    return Prices(**{name.replace("-", "_"): price for name, price in prices.items()})


def _parse_price(text: str, name: str, price: str) -> float:
    amount, is_per, unit = (part.strip() for part in price.partition("/"))
    if (name == "rank") == bool(is_per):
        example = "rank=5000, of one host" if name == "rank" else f"{name}=3/GB, with what it is for"
        raise ConfigError(f"--price {text!r}: write {example}")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--price {text!r}: {amount!r} is not a finite number of zero or more")
    if not is_per:
        return value
    try:
        return value / parse_bytes(f"1 {unit}")
    except ConfigError as error:
        raise ConfigError(f"--price {text!r}: {error}") from error


def _parse(text: str, option: str, value: Callable[[str], int], example: str) -> tuple[int, ...]:
    found: list[int] = []
    try:
        for part in text.split(","):
            found += _part(part.strip(), value)
    except ConfigError as error:
        raise ConfigError(f"{option} {text!r}: {error}; write for example {example}") from error
    for number, each in enumerate(sorted(found)[1:], 1):
        if each == sorted(found)[number - 1]:
            raise ConfigError(f"{option} {text!r} names {each:,} twice: leave one out")
    return tuple(sorted(found))


def _part(text: str, value: Callable[[str], int]) -> list[int]:
    if not text:
        raise ConfigError("a value is missing")
    match = _RANGE.fullmatch(text)
    if match is None:
        if ".." in text:
            raise ConfigError(f"{text!r} is a range without its step, *FACTOR or +STEP")
        return [value(text)]
    first, last = value(match[1].strip()), value(match[2].strip())
    if last < first or not first:
        raise ConfigError(f"{text!r} is no range: give a smaller value above zero and a larger one")
    found = [first]
    if match[3] == "+":
        step = value(match[4].strip())
        if not step:
            raise ConfigError(f"{text!r} never gets on: its step is zero")
        while found[-1] + step <= last and len(found) <= _MOST_VALUES:
            found.append(found[-1] + step)
    else:
        factor = _factor(match[4].strip())
        while found[-1] * factor <= last and len(found) <= _MOST_VALUES:
            found.append(found[-1] * factor)
    if len(found) > _MOST_VALUES:
        raise ConfigError(f"{text!r} has more than {_MOST_VALUES:,} values: take larger steps")
    return found


def _factor(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < 2:
        raise ConfigError(f"{text!r} is not an integer factor of at least 2")
    return int(text)
