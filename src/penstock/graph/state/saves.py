"""Saving a session's state as a schedule says, and continuing from it when the run starts again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.saving import Saving
from penstock.graph.state.tensors import open_folder


class HasState(Protocol):
    """What is saved: a session's resources, or a session on workers."""

    def state(self) -> dict[str, Any]:
        """Return the state."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class Saves:
    """Saves the state of a session when it is due; made by `Session.saving`."""

    def __init__(self, store: SnapshotStore, resources: HasState) -> None:
        self._store, self._resources = store, resources
        self._step = 0
        #: That of the last step, until somebody asked whether it is whole.
        self._saving: tuple[int, Saving] | None = None
        self.go_back()

    @property
    def step(self) -> int:
        """The step of the newest whole save, from which the session continued; 0 if there is none.

        After a WorkerLostError the session goes on from its state. A save that is under way is waited for. Raises:
        DataError if it failed.
        """
        if self._saving is not None:
            (step, under_way), self._saving = self._saving, None
            under_way.wait()
            self._step = step
        return self._step

    def after(self, step: int) -> bool:
        """Save the state if the schedule says so after that many steps; return whether it did.

        The state is copied at once and written in the background. Raises: DataError if the save before failed.
        """
        is_due = self._store.is_due(step)
        if is_due:
            self._saving = step, self._store.save(step, self._resources.state())
        return is_due

    def go_back(self) -> None:
        """Let the session go on from the newest whole save, if there is one."""
        if self.step or self._store.list():
            restored = self._store.restore()
            self._resources.load(restored)
            self._step = restored.step


@contextmanager
def saving(resources: HasState, folder: str, schedule: Any, keep: int) -> Iterator[Saves]:
    """Open the saves of a folder, which ends with the last one written."""
    with open_folder(folder, schedule=schedule, keep=keep) as store:
        yield Saves(store, resources)
