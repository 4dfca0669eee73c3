"""Why a worker does not answer: what a look at its address shows, by TCP and by the keys of its cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.graph.workers.link import key_of
from penstock.ranks import reaching
from penstock.ranks.carrier_zmq import has_key
from penstock.ranks.reaching import At, in_words, look_at_all, parts_of


class Look(NamedTuple):
    """In words, why tasks do not answer. is_final: waiting longer cannot help."""

    why: str
    is_final: bool = False


def resolved(address: str) -> str:
    """Return an address with a number in place of a name, which need not be looked up later; as it is, if unknown."""
    host, port = parts_of(address)
    if ":" in host:
        return address
    try:
        # IPv4, and the first, as ZeroMQ has it for a name.
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return address
    return f"tcp://{found[0][4][0]}:{port}"


def look_for(silent: Sequence[str], addresses: Mapping[str, str], secret: bytes, end: float) -> Look:
    """Return why some tasks do not answer at their addresses: what is final of one of them, else of each in turn.

    addresses: of all tasks of the cluster. secret: of the cluster. end: by the monotonic clock, until when keys are
    tried.
    """
    found = look_at_all([addresses[task] for task in silent])
    looks: list[str] = []
    for task, (at, more) in zip(silent, found, strict=True):
        if at != At.THERE or time.monotonic() >= end:
            looks.append(f"{task} at {addresses[task]}: {in_words(at, more)}")
        elif (look := _look_for_key(task, addresses, secret)).is_final:
            return look
        else:
            looks.append(look.why)
    return Look("; ".join(looks))


def _look_for_key(task: str, addresses: Mapping[str, str], secret: bytes) -> Look:
    """Return why a task does not answer, where a worker listens: by the first key that this proves to have."""
    own, address = key_of(secret, ""), addresses[task]
    for each in sorted(addresses, key=lambda each: each != task):
        has = has_key(address, key_of(secret, each).public, own, reaching.LOOK_SECONDS)
        if has and each != task:
            return Look(f"the worker at {address} is {each}, and {task} was asked for", is_final=True)
        if has or has is None:  # who does not answer at all answers no other key
            return Look(f"{task} at {address}: it is there, and does not answer")
    return Look(
        f"the worker at {address} has another secret than this program, or is none of {', '.join(addresses)}: give "
        "both the same key file, and each task the address that its own worker prints",
        is_final=True,
    )
