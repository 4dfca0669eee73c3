"""The snapshot store, each of its schemes, put to the test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.checkpoint.crash.subject import State

from penstock.checkpoint.files.manifest import folder_of, step_of
from penstock.checkpoint.store import SnapshotStore
from penstock.policy.delta_schemes import Scheme
from penstock.policy.retention import Keep

#: Files of the store itself.
OWN = (".lock", ".fast-tier")
#: Space for two snapshots beside one that takes as much as one might.
FAST_BYTES = (1 << 20) + 45_000


@dataclass(frozen=True)
class RealSubject:
    """A SnapshotStore with baselines close to each other, so that a few saves see several.

    has_fast_tier: whether it commits to a burst buffer, with space for a few snapshots, and drains from there.
    """

    scheme: Scheme
    has_fast_tier: bool = False

    keep = 2

    def state(self, step: int) -> State:
        return {name: array.tobytes() for name, array in _arrays(step).items()} | {"step": str(step).encode()}

    def open(self, folder: Path) -> RealStore:
        return RealStore(*self._tiers(folder), self.scheme, self.keep)

    def _tiers(self, folder: Path) -> tuple[Path, Path | None]:
        return (folder / "slow", folder / "fast") if self.has_fast_tier else (folder, None)

    def steps(self, folder: Path) -> list[int]:
        """Every folder that is called as a snapshot is one that must be restored."""
        main, fast = self._tiers(folder)
        # The fast tier first: what leaves it meanwhile is on the other.
        names = [
            name for tier in (fast, main) if tier is not None and tier.exists() for name in os.listdir(tier)
        ]
        return sorted({step for step in map(step_of, names) if step is not None})

    def leftovers(self, folder: Path, steps: list[int]) -> list[str]:
        explained = {*map(folder_of, steps), *OWN}
        tiers = [tier for tier in self._tiers(folder) if tier is not None]
        return [str(path) for tier in tiers for path in tier.iterdir() if path.name not in explained]


class RealStore:
    """An open SnapshotStore."""

    def __init__(self, folder: Path, fast: Path | None, scheme: Scheme, keep: int) -> None:
        self._store = SnapshotStore(
            folder,
            keep=Keep(last=keep),
            scheme=scheme,
            snap_dis=3,
            fast=fast,
            fast_bytes=None if fast is None else FAST_BYTES,
            threads=1,
            report=None,
        )
        self._has_fast_tier = fast is not None

    def save(self, step: int, state: State) -> None:
        self._store.save(step, {"model": _arrays(step), "step": step}).wait()

    def restore(self, step: int) -> State:
        restored = self._store.restore(step)
        assert restored.step == step
        model: Mapping[str, Any] = restored["model"]
        arrays = {name: np.asarray(array).tobytes() for name, array in model.items()}
        return arrays | {"step": str(restored["step"]).encode()}

    def settle(self) -> None:
        if self._has_fast_tier:
            self._store.drain()

    def close(self) -> None:
        self._store.close()


def _arrays(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a small model in training: weights that drift, moments that jump, a table that stays."""
    weights = np.random.default_rng(0).normal(0, 0.1, 2_000).astype(np.float32)
    drift = np.random.default_rng(step).normal(0, 1e-4, 2_000).astype(np.float32)
    return {
        "weight": weights + drift,
        "moment": np.random.default_rng(step).normal(0, 1, (10, 50)),
        "table": np.arange(500, dtype=np.int64),
        "empty": np.zeros((0, 3), np.float16),
    }
