"""Saving a session's state as a schedule says, and continuing from it when the run starts again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.checkpoint import SnapshotStore
from penstock.graph.state.tensors import open_folder


class HasState(Protocol):
    """What is saved: a session's resources, or a session on workers."""

    def state(self) -> dict[str, Any]:
        """Return the state."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class Saves:
    """Saves the state of a session when it is due; made by `Session.saving`.

    step: of the newest state of the folder, from which the session continued; 0 if there was none.
    """

    def __init__(self, store: SnapshotStore, resources: HasState) -> None:
        self._store, self._resources = store, resources
        self.step = 0
        if store.list():
            restored = store.restore()
            resources.load(restored)
            self.step = restored.step

    def after(self, step: int) -> bool:
        """Save the state if the schedule says so after that many steps; return whether it did.

        The state is copied at once and written in the background. Raises: DataError if the save before failed.
        """
        is_due = self._store.is_due(step)
        if is_due:
            self._store.save(step, self._resources.state())
        return is_due


@contextmanager
def saving(resources: HasState, folder: str, schedule: Any, keep: int) -> Iterator[Saves]:
    """Open the saves of a folder, which ends with the last one written."""
    with open_folder(folder, schedule=schedule, keep=keep) as store:
        yield Saves(store, resources)
