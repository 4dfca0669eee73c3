"""What people write behind options, read alike by every command; errors name the option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.units import format_bytes, parse_bytes, parse_share

_Value = TypeVar("_Value")


#: `penstock.simulate.policies.POLICY_NAMES`, for help texts: they are printed without loading the simulator.
POLICIES = (
    "lower-bound, naive, staging, deepio, deepio-opportunistic, parallel-staging, lbann-dynamic, lbann-preloading, "
    "locality-aware, frequency, frequency-unordered, frequency-cleanup, frequency-alone, hash-home, cover, "
    "cover+local, first-reader, push"
)
#: The names that `penstock.plan.parse_order.OrderName` knows, for help texts.
ORDERS = (
    "full, torch, sequential, bundle or bundle:RATIO, the last three also behind scattered-, or a file of ids "
    "(.npy or .txt)"
)


def parsed(option: str, parse: Callable[[str], _Value], text: str) -> _Value:
    """Return what `parse` makes of the text, as those of `penstock.units` do.

    Raises: ConfigError, what `parse` says behind the option's name.
    """
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def parsed_amount(option: str, parse: Callable[[str], float], text: str) -> float:
    """Return what `parse` makes of the text, where nothing and infinity mean nothing.

    Raises: as `parsed`; ConfigError for 0 and inf.
    """
    amount = float(parsed(option, parse, text))
    if not 0 < amount < math.inf:
        raise ConfigError(f"{option} is {text!r}; it must be finite and above zero")
    return amount


def parsed_size(option: str, text: str) -> int:
    """Return bytes, above zero. Raises: as `parsed_amount`."""
    return int(parsed_amount(option, parse_bytes, text))


def parsed_share(option: str, text: str) -> float:
    """Return 0.3 for "30%" and for "0.3". Raises: as `parsed`; ConfigError for more than all of it."""
    share = parsed(option, parse_share, text)
    if share > 1:
        raise ConfigError(f"{option} is {text!r}; it is a share from 0 to 1: write for example 0.1 or 10%")
    return share


def parsed_count(option: str, text: str, rule: str = "it must be an integer of at least 1") -> int:
    """Return an integer of at least 1, which may be written 7e9. Raises: ConfigError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 1 and number.is_integer()):
        raise ConfigError(f"{option} is {text!r}; {rule}")
    return int(text) if text.strip().isdigit() else int(number)


def given(options: argparse.Namespace, name: str, read: Callable[..., _Value], *how: Any) -> _Value | None:
    """Return what an option means; None where it was not written. read, how: one of the above, what it is to parse."""
    text = getattr(options, name)
    return None if text is None else read(f"--{name.replace('_', '-')}", *how, text)


def parsed_names(text: str, option: str) -> list[str]:
    """Return the words between commas, each once. Raises: ConfigError naming the option if there are none."""
    if not text.strip():
        raise ConfigError(f"{option} is {text!r}: give at least one name, or leave it out")
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_memory(option: str, samples: int, bytes_per_sample: float) -> None:
    """Refuse more samples than this machine's memory can hold, before any of it is taken.

    bytes_per_sample: that are needed at the least; so what passes may still be too much.
    Raises: ConfigError naming the option, what is needed and what there is.
    """
    from penstock.flow.cpus import memory_limit_bytes

    needed, limit = samples * bytes_per_sample, memory_limit_bytes()
    if needed > limit:
        raise ConfigError(
            f"{option} is {samples:,}, which takes at least {format_bytes(needed)} of memory; this machine has "
            f"{format_bytes(limit)}: compute a part of the data set"
        )


def is_given(options: argparse.Namespace, name: str) -> bool:
    """Return whether an option whose default is None or False was written."""
    return getattr(options, name) not in (None, False)


def refuse_together(options: argparse.Namespace, name: str, others: Iterable[str]) -> None:
    """Refuse options that would be ignored next to another one.

    name, others: as attributes of the options. Raises: ConfigError where the one and any of the others are given.
    """
    for other in others:
        if is_given(options, name) and is_given(options, other):
            one, two = (f"--{each.replace('_', '-')}" for each in (name, other))
            raise ConfigError(f"{one} and {two} do not go together: leave one out")


def check_folder(option: str, path: Path) -> None:
    """Refuse a file that cannot be written because its folder is missing, before there is anything to write."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}: make it first")
