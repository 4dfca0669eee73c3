"""Saving a session's state as a schedule says, and continuing from it when the run starts again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.saving import Saving, outcome_of
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
        #: The last one, until it is known to be intact, or its failure was raised.
        self._saving: Saving | None = None
        self.go_back()

    @property
    def step(self) -> int:
        """The step of the newest intact save, from which the session continued; 0 if there is none.

        After a WorkerLostError the session continues from its state. A save that is under way is waited for. Raises:
        DataError, once, if it failed.
        """
        if (saving := self._saving) is not None:
            outcome_of(saving)  # who interrupts this wait finds the save under way as before
            self._saving = None
            self._step = saving.wait().step
        return self._step

    @property
    def has_any(self) -> bool:
        """Whether there is an intact save. One that is under way is waited for."""
        return bool(self._step) or (self._saving is not None and outcome_of(self._saving) is not None)

    def after(self, step: int) -> bool:
        """Save the state if the schedule says so after that many steps; return whether it did.

        The state is copied at once and written in the background. Raises: DataError if the save before failed.
        """
        is_due = self._store.is_due(step)
        if is_due:
            saving = self._store.save(step, self._resources.state())
            before, self._saving = self._saving, saving
            if before is not None:
                self._step = before.wait().step  # it has ended; `go_back` may have found that it failed
        return is_due

    def go_back(self) -> bool:
        """Continue the session from the newest intact save, and return whether there is one.

        One that failed is left out; `step` or `after` raises what it failed with.
        """
        if (saving := self._saving) is not None:
            with suppress(Exception):
                self._step, self._saving = saving.wait().step, None
        if not self._step and not self._store.list():
            return False
        restored = self._store.restore()
        self._resources.load(restored)
        self._step = restored.step
        return True


@contextmanager
def saving(resources: HasState, folder: str, schedule: Any, keep: int) -> Iterator[Saves]:
    """Open the saves of a folder, which ends with the last one written."""
    with open_folder(folder, schedule=schedule, keep=keep) as store:
        yield Saves(store, resources)
