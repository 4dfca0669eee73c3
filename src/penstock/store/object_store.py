"""What a client of a remote store must offer, and how its objects are named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import xxhash

from penstock.errors import ConfigError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PASSWORD = re.compile(r"(//[^/:@]*):[^/@]*@")


def is_address(place: str) -> bool:
    """Return whether a place is an address such as s3://bucket/train, and not a path."""
    return _ADDRESS.match(place) is not None


def without_secrets(address: str) -> str:
    """Return an address as it may be shown: without a password, and without what a signature has behind the `?`."""
    shown = _PASSWORD.sub(r"\1:***@", address)
    return shown.partition("?")[0] + "?..." if shown.startswith("http") and "?" in shown else shown


def check_address(address: str) -> None:
    """Raise ConfigError for an address with a password or a signature, which would be in messages and catalogs."""
    if _PASSWORD.search(address):
        raise ConfigError(
            f"{without_secrets(address)} has a password in it: give it apart, as storage_options={{'username': ..., "
            "'password': ...}, or as the driver of the address calls it"
        )
    if address.startswith("http") and "?" in address:
        raise ConfigError(
            f"{without_secrets(address)}: what is behind the ? is often a signature, and is given apart: leave it out, "
            "and give storage_options={'params': {'NAME': 'VALUE'}}, with which every file is asked for. Where each "
            "file has its own signature, use one of their folder, headers, or the store's own address (s3://, gs://)"
        )


def joined(folder: str, name: str) -> str:
    """Return the path or address of what a folder has."""
    return f"{folder.rstrip('/')}/{name}" if is_address(folder) else os.path.join(folder, name)


class Facts(NamedTuple):
    """What a store says of an object.

    address: with which it is read. nbytes: its size; -1 where that was not said. stamp: a number that changes with its
    content, above zero.
    """

    address: str
    nbytes: int
    stamp: int


def stamp_of_tag(tag: str | None, time_seconds: float | None) -> int:
    """Return the stamp of an object: of its entity tag, or of the time of its last change where it has none."""
    text = tag.removeprefix("W/").strip('"') if tag else f"{int(time_seconds or 0)}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1 | 1


class Piece(NamedTuple):
    """A part of an object to be read into a buffer. nbytes, stamp: of the object, as it was listed."""

    address: str
    begin: int
    into: memoryview
    nbytes: int
    stamp: int


class RequestError(Exception):
    """What became of a request that failed.

    kind: "refused" (too many, or not in time), "passing" (worth trying again), "missing", "forbidden", or "final".
    is_answer: whether the store has said anything.
    """

    def __init__(
        self,
        kind: Literal["refused", "passing", "missing", "forbidden", "final"],
        text: str,
        *,
        is_answer: bool = True,
    ) -> None:
        super().__init__(text)
        self.kind, self.is_answer = kind, is_answer


class ObjectStore(Protocol):
    """A client of a store. Any thread may call it at any time; each call is one attempt, or raises RequestError."""

    @property
    def identity(self) -> str:
        """Who asks, for messages: an access key's id or "anonymous", never a secret."""
        ...

    def facts(self, address: str) -> Facts:
        """Ask for size and entity tag of an object."""
        ...

    def walk(self, address: str) -> Iterable[Facts]:
        """List all objects below an address, at any depth."""
        ...

    def level(self, address: str) -> tuple[list[Facts], list[str]]:
        """List what is directly below an address: objects, and the addresses of folders."""
        ...

    def read(self, piece: Piece) -> None:
        """Fill a piece's buffer, if the object is as it was listed."""
        ...
