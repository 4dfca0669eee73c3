"""How the processes of a cluster find each other, and prove that they belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version

import torch

from penstock.errors import ConfigError
from penstock.graph.errors import MismatchError, VersionError
from penstock.ranks.access import SECRET_BYTES, Address, SecretFile
from penstock.ranks.access import address_of as any_address_of

#: Unless an address names another one.
PORT = 7448

KEY = SecretFile("graph's workers", "penstock graph worker", "PENSTOCK_GRAPH_KEY", "graph.key")


def address_of(text: object) -> Address:
    """Return the address of a worker that a text says. Raises: ConfigError."""
    return any_address_of(text, "worker", PORT)


def versions_here() -> dict[str, str]:
    """Return the versions that a client and its workers have in common: builds of PyTorch for other devices do."""
    return {"Penstock": version("penstock"), "PyTorch": torch.__version__.partition("+")[0]}


def check_versions(task: str, versions: Mapping[str, str]) -> None:
    """Refuse a worker of other versions than this process. Raises: VersionError."""
    here = versions_here()
    if versions != here:
        there, own = (
            " and ".join(f"{name} {each.get(name, 'unknown')}" for name in here) for each in (versions, here)
        )
        raise VersionError(
            f"{task} has {there}, and this process {own}: install the same versions on each machine"
        )


#: As names of devices begin.
_TASK = re.compile(r"/job:[\w.-]+(/replica:\d+)?/task:\d+")
_DEVICE = re.compile(rf"({_TASK.pattern}/device:)?[A-Za-z_]+:\d+")


def check_task(task: object, what: str = "") -> None:
    """Refuse what is no name of a worker. what: names it, for the error. Raises: ConfigError."""
    if not (isinstance(task, str) and _TASK.fullmatch(task)):
        raise ConfigError(f"{what}{task!r:.80} is no name of a worker: give one such as /job:worker/task:0")


def is_device(name: str) -> bool:
    """Return whether a text names a device as workers do: with its task, or without."""
    return _DEVICE.fullmatch(name) is not None


def checked_workers(workers: Mapping[str, str], secret: bytes) -> dict[str, str]:
    """Return the addresses of workers as ZeroMQ takes them, "tcp://host:port".

    Raises: ConfigError for what is no name, no address or no secret; MismatchError for none, or two with one address.
    """
    if not isinstance(workers, Mapping):
        raise ConfigError(
            f'workers is {workers!r:.80}; give addresses by task: {{"/job:worker/task:0": "tcp://host:{PORT}"}}'
        )
    if not workers:
        raise MismatchError("workers is empty; give the address of each task")
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"the secret is no {SECRET_BYTES} bytes: give what KEY.read(KEY.path()) or LocalWorkers.secret is"
        )
    found: dict[str, str] = {}
    by_address: dict[str, str] = {}
    for task, given in workers.items():
        check_task(task)
        address = f"tcp://{address_of(given.removeprefix('tcp://') if isinstance(given, str) else given)}"
        if (other := by_address.setdefault(address, task)) != task:
            raise MismatchError(f"{other} and {task} have one address, {address}; a worker is one task")
        found[task] = address
    return found
