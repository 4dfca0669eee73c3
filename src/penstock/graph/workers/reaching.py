"""Why a worker does not answer: what a look at its address shows, by TCP and by the keys of its cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import NamedTuple

from penstock.graph.workers.link import key_of
from penstock.ranks.carrier_zmq import has_key

#: How long a look takes at most: for a connection and a greeting, or for a proof of a key; and the time before another.
_LOOK_SECONDS, _ENDING_SECONDS = 0.5, 0.05
#: With this byte, who speaks as ZeroMQ greets whoever connects. Source: ZMTP 3.1, RFC 37, section 3.
_GREETING = b"\xff"


class At(Enum):
    """What is found at an address."""

    NOBODY = "nobody listens"
    UNREACHED = "it cannot be reached"
    SILENT = "a process listens that does nothing: it is stopped, or hangs"
    OTHER = "no worker listens"
    WORKER = "a worker listens"


class Look(NamedTuple):
    """In words, why tasks do not answer. is_final: waiting longer cannot help."""

    why: str
    is_final: bool = False


def look_at(address: str) -> tuple[At, str]:
    """Return what is found at an address, "tcp://host:port", and more about it: in half a second, once resolved."""
    end = time.monotonic() + _LOOK_SECONDS
    found = _look_once(address, end)
    if found[0] == At.OTHER:  # a process that is just ending cuts its connections first
        time.sleep(_ENDING_SECONDS)
        found = _look_once(address, end)
    return found


def look_at_all(addresses: Sequence[str]) -> list[tuple[At, str]]:
    """Return what is found at each of some addresses, as `look_at` does, in the time of one look."""
    with ThreadPoolExecutor(len(addresses) or 1, "penstock-graph-look") as threads:
        return list(threads.map(look_at, addresses))


def resolved(address: str) -> str:
    """Return an address with a number in place of a name, which need not be looked up later; as it is, if unknown."""
    host, port = _parts(address)
    if ":" in host:
        return address
    try:
        # IPv4, and the first, as ZeroMQ has it for a name.
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return address
    return f"tcp://{found[0][4][0]}:{port}"


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _look_once(address: str, end: float) -> tuple[At, str]:
    try:
        connection = socket.create_connection(_parts(address), _left(end))
    except ConnectionRefusedError:
        return At.NOBODY, ""
    except OSError as error:
        return At.UNREACHED, str(error)
    with connection:
        try:
            connection.settimeout(_left(end))
            is_worker = connection.recv(1) == _GREETING
        except TimeoutError:
            return At.SILENT, ""
        except OSError as error:
            return At.OTHER, str(error)
    return (At.WORKER if is_worker else At.OTHER), ""


def _left(end: float) -> float:
    """Return the time-out of a socket that ends then."""
    return max(end - time.monotonic(), 1e-3)


def look_for(silent: Sequence[str], addresses: Mapping[str, str], secret: bytes, end: float) -> Look:
    """Return why some tasks do not answer at their addresses: what is final of one of them, else of each in turn.

    addresses: of all tasks of the cluster. secret: of the cluster. end: by the monotonic clock, until when keys are
    tried.
    """
    found = look_at_all([addresses[task] for task in silent])
    looks: list[str] = []
    for task, (at, more) in zip(silent, found, strict=True):
        if at != At.WORKER:
            looks.append(f"{task} at {addresses[task]}: {at.value}" + (f" ({more})" if more else ""))
        elif time.monotonic() >= end:
            looks.append(f"{task} at {addresses[task]}: {at.value}")
        elif (look := _look_for_key(task, addresses, secret)).is_final:
            return look
        else:
            looks.append(look.why)
    return Look("; ".join(looks))


def _look_for_key(task: str, addresses: Mapping[str, str], secret: bytes) -> Look:
    """Return why a task does not answer, where a worker listens: by the first key that this proves to have."""
    own, address = key_of(secret, ""), addresses[task]
    for each in sorted(addresses, key=lambda each: each != task):
        has = has_key(address, key_of(secret, each).public, own, _LOOK_SECONDS)
        if has and each != task:
            return Look(f"the worker at {address} is {each}, and {task} was asked for", is_final=True)
        if has or has is None:  # who does not answer at all answers no other key
            return Look(f"{task} at {address}: it is there, and does not answer")
    return Look(
        f"the worker at {address} has another secret than this program, or is none of {', '.join(addresses)}: give "
        "both the same key file, and each task the address that its own worker prints",
        is_final=True,
    )
