"""What callers give, checked where it comes in: an error names the argument, what was given, and what it must be."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from penstock.checkpoint.state.flatten import Flat, flatten
from penstock.errors import ConfigError
from penstock.flow.recorder import Recorder
from penstock.plan.saves import SaveSchedule, read_schedule
from penstock.policy.retention import Keep
from penstock.ranks import Ranks, alone, ranks_of_this_job
from penstock.trace.file import check_writable
from penstock.units import is_integer

#: A manifest and the name of a folder hold no larger one.
_LARGEST_STEP = 2**63 - 1

Value = TypeVar("Value")


def checked_step(step: Any, name: str = "step") -> int:
    """Return a step that a folder can be named after, of NumPy or not. Raises: ConfigError."""
    if not isinstance(step, bool):
        try:
            number = operator.index(step)
        except TypeError:
            pass
        else:
            if 0 <= number <= _LARGEST_STEP:
                return number
    raise ConfigError(f"{name} is {step!r:.80}; it must be an integer from 0 to 2**63 - 1")


def checked_folder(folder: Any, name: str = "folder") -> str:
    """Return a path, or an address, as text. Raises: ConfigError."""
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{name} is {folder!r:.80}; give the path of a folder, such as 'runs/a', or an address such as "
            "'s3://bucket/runs/a'"
        )
    return path


def checked_path(folder: Any, name: str, what: str) -> str:
    """Return the path of a folder of a file system, as text. what: it is. Raises: ConfigError."""
    path = checked_folder(folder, name)
    if "://" in path:
        raise ConfigError(
            f"{name} is {folder!r:.80}; it is {what}: give its path, such as '/nvme/runs/a', and the address as folder"
        )
    return path


def checked_quantity(name: str, read: Callable[[Any], Value], value: Any) -> Value | None:
    """Return what a quantity as people write it is; None is None. read: such as `parse_bytes`. Raises: ConfigError."""
    try:
        return None if value is None else read(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def check_given(name: str, value: Any, *, is_one: bool, rule: str) -> None:
    """Raise ConfigError where an argument is not one that it can be. rule: what it must be."""
    if not is_one:
        raise ConfigError(f"{name} is {value!r:.80}; {rule}")


def checked_schedule(schedule: Any) -> SaveSchedule | None:
    """Return the schedule that is meant. Raises: ConfigError."""
    if isinstance(schedule, str):
        return checked_quantity("schedule", read_schedule, schedule)
    is_one = callable(getattr(schedule, "is_due", None)) and isinstance(
        getattr(schedule, "is_known_ahead", None), bool
    )
    rule = (
        "write it, such as '1000 steps' or '30 min', or give a value of penstock.plan.saves, such as EverySteps(1000), "
        "or None"
    )
    check_given("schedule", schedule, is_one=schedule is None or is_one, rule=rule)
    return schedule  # type: ignore[no-any-return]


def checked_keep(keep: Any) -> Keep:
    """Return which snapshots stay; a number is how many of the newest. Raises: ConfigError."""
    if isinstance(keep, Keep):
        return keep
    if is_integer(keep) and keep >= 1:
        return Keep(last=int(keep))
    raise ConfigError(
        f"keep is {keep!r:.80}; give how many of the newest snapshots stay, 1 or more, or a Keep, such as "
        "Keep(last=3, every_steps=1000)"
    )


def ranks_or_reader(make: Any) -> tuple[Ranks, str]:
    """Return the ranks that use a store together, and why this process may only read it, or "".

    make: returns the ranks; None: the ranks of this job. A process that was started as one of several, and does not
        know the others yet, reads by itself.
    Raises: ConfigError as `made_ranks`.
    """
    if make is not None:
        return made_ranks(make), ""
    try:
        return ranks_of_this_job(), ""
    except ConfigError as error:
        return alone(), str(error)


def made_ranks(make: Any) -> Ranks:
    """Return the ranks that a function makes. Raises: ConfigError."""
    if not callable(make):
        raise ConfigError(
            f"ranks is {make!r:.80}; it is a function that returns them: give ranks=ranks_of_this_job, not called"
        )
    ranks = make()
    if not isinstance(ranks, Ranks):
        raise ConfigError(f"ranks returned {ranks!r:.80}, which are none: give ranks=ranks_of_this_job")
    return ranks


def checked_options(options: Any) -> Mapping[str, Any] | None:
    """Return options of a driver. Raises: ConfigError."""
    is_one = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    rule = "give the driver's options by their names, such as {'endpoint_url': 'http://...'}, or None"
    check_given("storage_options", options, is_one=options is None or is_one, rule=rule)
    return options  # type: ignore[no-any-return]


def taken_apart(state: Any) -> Flat:
    """Take a state to be saved apart, see `flatten`; it has its parts by names. Raises: ConfigError."""
    flat = flatten(state, with_state_dicts=True)
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"state is of type {type(state).__qualname__}; it must be a mapping: name its parts, as in "
            '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
        )
    return flat


def checked_trace(trace: Any) -> str | os.PathLike[str] | Recorder | None:
    """Return where to record. Raises: ConfigError; DataError if the file cannot be written."""
    is_one = trace is None or isinstance(trace, (str, os.PathLike, Recorder))
    check_given("trace", trace, is_one=is_one, rule="give the path of a file, loader.recorder, or None")
    if isinstance(trace, (str, os.PathLike)):
        check_writable(trace)
    return trace  # type: ignore[no-any-return]


def checked_only(only: Any) -> Iterable[str] | None:
    """Return names and patterns that can be gone through more than once. Raises: ConfigError."""
    if only is None or isinstance(only, str):
        return only  # text is refused where it is known what it could be meant for
    if isinstance(only, bytes) or not isinstance(only, Iterable):
        raise ConfigError(
            f"only is {only!r:.80}; give a list of names or patterns, such as ['model/*'], or None"
        )
    return tuple(only)


def checked_timeout(timeout_seconds: Any) -> float | None:
    """Return how long to wait, None: for ever. Raises: ConfigError."""
    if timeout_seconds is None:
        return None
    try:
        seconds = math.nan if isinstance(timeout_seconds, (str, bytes, bool)) else float(timeout_seconds)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(
            f"timeout_seconds is {timeout_seconds!r:.80}; give seconds as a number of 0 or more, or None to wait as "
            "long as it takes"
        )
    return None if seconds > threading.TIMEOUT_MAX else seconds
