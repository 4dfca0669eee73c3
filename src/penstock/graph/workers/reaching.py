"""Why a worker does not answer: what a look at its address tells, by TCP and by the keys of its cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from penstock.graph.workers.link import key_of
from penstock.ranks.carrier_zmq import has_key

#: What a look waits for at most: for a connection, for a greeting, for a proof of a key; and before another one.
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
    """What a look at an address found, and in words why the task that should be there does not answer.

    is_final: waiting longer cannot help.
    """

    at: At
    why: str
    is_final: bool = False


def look_at(address: str) -> tuple[At, str]:
    """Return what is found at an address, "tcp://host:port", and more about it; within about a second."""
    found = _look_once(address)
    if found[0] == At.OTHER:  # a process that is just ending cuts its connections first
        time.sleep(_ENDING_SECONDS)
        found = _look_once(address)
    return found


def _look_once(address: str) -> tuple[At, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _LOOK_SECONDS)
    except ConnectionRefusedError:
        return At.NOBODY, ""
    except OSError as error:
        return At.UNREACHED, str(error)
    with connection:
        try:
            is_worker = connection.recv(1) == _GREETING
        except TimeoutError:
            return At.SILENT, ""
        except OSError as error:
            return At.OTHER, str(error)
    return (At.WORKER if is_worker else At.OTHER), ""


def look_for(task: str, address: str, secret: bytes, tasks: Sequence[str]) -> Look:
    """Return why a task does not answer at its address. tasks: all of the cluster; secret: of the cluster."""
    at, more = look_at(address)
    if at != At.WORKER:
        return Look(at, f"{task} at {address}: {at.value}" + (f" ({more})" if more else ""))
    own = key_of(secret, "")
    has = {
        each: has_key(address, key_of(secret, each).public, own, _LOOK_SECONDS)
        for each in sorted(tasks, key=lambda each: each != task)
    }
    if other := next((each for each, is_there in has.items() if is_there), None):
        if other == task:
            return Look(at, f"{task} at {address}: it is there, and does not answer")
        return Look(at, f"the worker at {address} is {other}, and {task} was asked for", is_final=True)
    return Look(
        at,
        f"the worker at {address} has another secret than this program, or is none of {', '.join(tasks)}: give both "
        "the same key file, and each task the address that its own worker prints",
        is_final=None not in has.values(),
    )
