"""Ways of saving a checkpoint: torch.save, PyTorch's DCP, and Penstock's store with and without a burst buffer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.checkpoint import Saving, SnapshotStore, StoreConfig
from penstock.errors import ClosedError, ConfigError, DataError, RankError, WaitTimeout
from penstock.files import sync_folder
from penstock.policy.space import space_needed
from penstock.ranks import Ranks

OWN = "penstock"
#: Snapshots that stay when a newer one is there.
KEPT = 2
#: Those of PyTorch, which `penstock.bench.savers_torch` drives.
PEERS = ("torch", "dcp")
State = Mapping[str, Any]


class Saver(Protocol):
    """A way of saving, ready for the saves of one run."""

    def save(self, step: int, state: State) -> None:
        """Return once the training may change the state; saved durably by then, unless `settle` waits for that."""
        ...

    def settle(self) -> list[float]:
        """Return once all is durable where it is to stay: seconds from the beginning of each save until it was durable.

        Empty where a save returns when it is.
        """
        ...


#: Makes a saver that saves this state, equal on all ranks, after these steps to a folder, through another where given.
OpenSaver = Callable[[State, Sequence[int], Path, Path | None, Ranks], AbstractContextManager[Saver]]


def saver_named(name: str) -> OpenSaver:
    """Return what opens a saver. Raises: ModuleNotFoundError where its package is not installed."""
    if name == OWN:
        return open_own
    return cast(OpenSaver, getattr(importlib.import_module("penstock.bench.savers_torch"), f"open_{name}"))


def check_savers(names: list[str]) -> None:
    """Refuse names of savers that there are not. Raises: ConfigError."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"there is no way of saving {name!r} to compare with: {', '.join(PEERS)}")


@contextmanager
def naming_folder(saver: str, folder: Path) -> Iterator[None]:
    """Raise DataError in place of what savers raise where they cannot write: it names the folder, and what to do."""
    try:
        yield
    except (RankError, WaitTimeout, ClosedError):  # of another rank, or of no folder: they say what to do
        raise
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{saver} could not save to {folder}: {reason}; is there space (df and quota say what is left), and is the "
            "device still there?"
        ) from error


class _Own:
    """Penstock's store: a save returns when the state is copied; the rest happens in the background."""

    def __init__(self, store: SnapshotStore, folder: Path, drains: bool) -> None:
        self._store, self._drains = store, drains
        self._saving: list[Saving] = []
        self._naming = partial(naming_folder, OWN, folder)

    def save(self, step: int, state: State) -> None:
        with self._naming():
            self._saving.append(self._store.save(step, dict(state)))

    def settle(self) -> list[float]:
        with self._naming():
            durable = [saving.wait().durable_seconds for saving in self._saving]
            if self._drains:
                self._store.drain()
            return durable


@contextmanager
def open_own(
    state: State, steps: Sequence[int], folder: Path, fast: Path | None, ranks: Ranks
) -> Iterator[Saver]:
    """Yield Penstock's saver, its memory taken and its codec loaded, as `prepare` of a store has it."""
    with SnapshotStore(folder, fast=fast, keep=KEPT, report=None, ranks=lambda: ranks) as store:
        store.prepare(dict(state), steps)
        yield _Own(store, folder, fast is not None)


def own_bytes(state_bytes: int, steps: Sequence[int]) -> int:
    """Return what Penstock's snapshots of these steps take at most: a delta keeps those that it depends on.

    >>> own_bytes(1_000_000, (5, 10, 15, 20))
    4004000
    """
    settings = StoreConfig(".", keep=KEPT).settings
    encoding = settings.encoding
    return space_needed(state_bytes, steps, settings.keep, encoding.scheme, encoding.snap_dis).peak_bytes


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder and all in it, and the folder above: what is saved would outlive a loss of power."""
    for each in (path, *path.rglob("*")):
        if each.is_dir():
            sync_folder(each)
            continue
        descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(path.parent)
