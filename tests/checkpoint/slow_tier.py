"""A slow tier on which a test decides when drains write, and what is drained to it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier, LocalWriter
from penstock.checkpoint.tiers.tier import MANIFEST

BIG = 1 << 16


def state_of(step: int, nbytes: int = BIG) -> dict[str, Any]:
    """Return a state of so many bytes, of which a little changes from step to step."""
    generator = np.random.default_rng(0)
    weights = generator.normal(size=nbytes // 4).astype(np.float32)
    for number in range(1, step + 1):
        weights[number % 7 :: 7] *= np.float32(1 + 1e-4 * number)
    return {"weights": weights, "step": step}


class SlowTier(LocalTier):
    """A folder on which a test decides when snapshots begin, and which of them fail."""

    def __init__(self, path: Path, waits: str = "penstock-drain") -> None:
        """waits: how the names of the threads begin that wait for the test."""
        super().__init__(path)
        self.waits = waits
        self.changed = threading.Condition()
        #: How many more may begin; a drain waits for one.
        self.permits = 1_000_000
        #: What the next ones raise, in place of beginning.
        self.refusals: list[BaseException] = []
        self.is_waiting = False

    def begin(self, folder: str, uid: str, *, join: bool = False) -> LocalDraft:
        draft = super().begin(folder, uid, join=join)
        create = draft.create

        def create_once_let(file: str) -> LocalWriter:
            if file != MANIFEST:
                self._wait()
            return create(file)

        draft.create = create_once_let  # type: ignore[method-assign]
        return draft

    def _wait(self) -> None:
        if threading.current_thread().name.startswith(self.waits):
            with self.changed:
                self.is_waiting = True
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.permits > 0, 60)
                self.is_waiting = False
                self.permits -= 1
        if self.refusals:
            raise self.refusals.pop(0)

    def let(self, drains: int) -> None:
        with self.changed:
            self.permits += drains
            self.changed.notify_all()

    def wait_until_quiet(self, store: SnapshotStore) -> None:
        """Return once the drain waits for the test, or none is under way."""
        drainer = store._drainer
        assert drainer is not None
        with self.changed:
            # The end of the drain's thread is told on a condition of its own.
            while drainer._thread is not None and not (self.is_waiting and not self.permits):
                self.changed.wait(0.005)
