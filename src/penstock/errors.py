"""The errors a user can meet, as one small tree.

    PenstockError
    ├── ConfigError (ValueError)     you asked wrongly: an argument or a field of a file
    ├── DataError (OSError)          the world failed: a sample cannot be read or decoded
    ├── FormatError (ValueError)     a file that Penstock wrote, or should have, is damaged or too new
    ├── StagingError (MemoryError)   no memory for one more batch: what was given, or a device, is full
    ├── WaitTimeout (TimeoutError)   a wait outlasted `timeout=`
    ├── RankError (RuntimeError)     another rank of the job failed, or is not where this one is
    └── ClosedError (RuntimeError)   used after close, in a forked process, or past the last epoch

Messages name the value, the rule it broke and the next move. They name files, too, and a file name on Linux is any
bytes: what a terminal would obey or an encoding refuse is escaped (`printable`).
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Return text on one line that any terminal shows and UTF-8 encodes.

    What is not printable (control characters, line ends, bytes of a file name that are not UTF-8) is escaped as in
    Python's source; all else stays. Text that was escaped before stays as it is.

    >>> print(printable("Übung\n\x1b[2J\udcff.jpg"))
    Übung\n\x1b[2J\udcff.jpg
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose. Its message is printable, whatever it names."""

    def __str__(self) -> str:
        return printable(super().__str__())


def reason_of(error: BaseException) -> str:
    """Return what an error says; of one that is not Penstock's its type, too."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


class ConfigError(PenstockError, ValueError):
    """An argument, field or environment value is not one that can work."""


def given_beside(config: object, arguments: Iterable[str]) -> ConfigError:
    """Return what to raise where arguments are given next to a configuration, which has all of them."""
    names = ", ".join(arguments)
    return ConfigError(
        f"{names} given with a {type(config).__name__}, which has all arguments: change it by "
        f"dataclasses.replace(config, {names}=...)"
    )


class DataError(PenstockError, OSError):
    """A sample or its file cannot be read or decoded."""


def no_thread(error: RuntimeError) -> DataError:
    """Return what to raise where the interpreter could not start the only thread that would have done the work."""
    return DataError(
        f"{error}: this user or container has as many as it may: raise `ulimit -u` or the container's limit of "
        "processes, or end other threads"
    )


class FormatError(PenstockError, ValueError):
    """A file of Penstock's own formats is damaged, cut off in its header, or of an unknown version."""


class StagingError(PenstockError, MemoryError):
    """No batch slot is free because the caller still holds the batches, and no memory is left for more; or a device has
    no memory for a batch."""


class WaitTimeout(PenstockError, TimeoutError):
    """A wait lasted longer than the caller allowed; the message says who waited for what."""


class RankError(PenstockError, RuntimeError):
    """What the ranks of a job do together failed on one of them; the message names it."""


class ClosedError(PenstockError, RuntimeError):
    """A loader, store or tier was used after it was closed, or in a process forked from the one that opened it.

    A loader closes an epoch loop, too: past its last epoch, and when another loop over it begins.
    """
