"""Why nobody answers at an address: what a look by TCP finds there, in half a second."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

#: How long a look takes at most, for a connection and a greeting; and the time before another.
LOOK_SECONDS, _ENDING_SECONDS = 0.5, 0.05
_Place = TypeVar("_Place")
_Found = TypeVar("_Found")
#: With this byte, who speaks as ZeroMQ greets whoever connects. Source: ZMTP 3.1, RFC 37, section 3.
_GREETING = b"\xff"


class At(Enum):
    """What is found at an address."""

    NOBODY = "nobody listens"
    UNREACHED = "it cannot be reached"
    SILENT = "a process listens that does nothing: it is stopped, or hangs"
    OTHER = "something else listens"
    THERE = "a process that speaks ZeroMQ listens there"


def in_words(at: At, more: str) -> str:
    """Return what a look found, as `look_at` returns it, for people."""
    return f"{at.value} ({more})" if more else at.value


def look_at(address: str) -> tuple[At, str]:
    """Return what is found at an address, "tcp://host:port", and more about it: in half a second, once resolved."""
    end = time.monotonic() + LOOK_SECONDS
    found = _look_once(address, end)
    if found[0] == At.OTHER:  # a process that is just ending cuts its connections first
        time.sleep(_ENDING_SECONDS)
        found = _look_once(address, end)
    return found


def look_at_all(addresses: Sequence[str]) -> list[tuple[At, str]]:
    """Return what is found at each of some addresses, as `look_at` does, in the time of one look."""
    return at_once(look_at, addresses)


def at_once(look: Callable[[_Place], _Found], places: Sequence[_Place]) -> list[_Found]:
    """Return what `look` returns for each of some places, in the time of one. Raises: what it raises for the first."""
    with ThreadPoolExecutor(len(places) or 1, "penstock-look") as threads:
        return list(threads.map(look, places))


def parts_of(address: str) -> tuple[str, int]:
    """Return host and port of an address, "tcp://host:port"."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _look_once(address: str, end: float) -> tuple[At, str]:
    try:
        connection = socket.create_connection(parts_of(address), _left(end))
    except ConnectionRefusedError:
        return At.NOBODY, ""
    except OSError as error:
        return At.UNREACHED, str(error)
    with connection:
        try:
            connection.settimeout(_left(end))
            greets = connection.recv(1) == _GREETING
        except TimeoutError:
            return At.SILENT, ""
        except OSError as error:
            return At.OTHER, str(error)
    return (At.THERE if greets else At.OTHER), ""


def _left(end: float) -> float:
    """Return the time-out of a socket that ends then."""
    return max(end - time.monotonic(), 1e-3)
