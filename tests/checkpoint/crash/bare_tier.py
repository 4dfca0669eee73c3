"""The folder of snapshots that the store stands on, with as little above it as makes it a store."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tests.checkpoint.crash.subject import State

from penstock.checkpoint.local import LocalTier
from penstock.checkpoint.tier import MANIFEST

STEP = "step-"


class TierSubject:
    """Snapshots in a LocalTier."""

    keep = 2

    def state(self, step: int) -> State:
        generator = np.random.default_rng(step)
        return {"part-00000.pst": generator.bytes(9_000), "part-00001.pst": generator.bytes(300)}

    def open(self, folder: Path) -> TierStore:
        return TierStore(LocalTier(folder), self.keep)

    def steps(self, folder: Path) -> list[int]:
        return _steps(LocalTier(folder))

    def leftovers(self, folder: Path, steps: list[int]) -> list[str]:
        explained = {_name(step) for step in steps}
        return [name for name in os.listdir(folder) if name not in explained]


class TierStore:
    """A manifest of names, parts of bytes, and the latest few kept."""

    def __init__(self, tier: LocalTier, keep: int) -> None:
        self._tier, self._keep = tier, keep
        tier.sweep()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def restore(self, step: int) -> State:
        names = json.loads(self._tier.read(_name(step), MANIFEST))
        parts = {}
        for name in names:
            reader = self._tier.open(_name(step), name)
            out = np.zeros(reader.nbytes, np.uint8)
            reader.read_into(0, out)
            reader.close()
            parts[name] = out.tobytes()
        return parts

    def save(self, step: int, state: State) -> None:
        draft = self._tier.begin(_name(step), "tried")
        try:
            for name, data in state.items():
                writer = draft.create(name)
                try:
                    for start in range(0, len(data), 4_000):
                        writer.write(np.frombuffer(data[start : start + 4_000], np.uint8))
                    writer.finish()
                finally:
                    writer.abandon()
            draft.commit(json.dumps(list(state)).encode())
        except OSError:
            draft.abort()
            raise
        for old in _steps(self._tier)[: -self._keep]:
            self._tier.delete(_name(old))


def _steps(tier: LocalTier) -> list[int]:
    return [int(name.removeprefix(STEP)) for name in tier.folders()]


def _name(step: int) -> str:
    return f"{STEP}{step:012d}"
