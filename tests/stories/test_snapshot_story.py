"""A training saves every few steps, is killed, and goes on: bit for bit as if nothing had happened."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forking import Forks

TRAINING = '''
import os, random, signal, sys
import numpy as np
import torch
from penstock import SnapshotStore
from penstock.checkpoint.state.generators import random_state, set_random_state

folder, fast, killed_at = sys.argv[1:]
fast, steps, killed_at = fast or None, 20, int(killed_at)
torch.set_num_threads(1)
torch.manual_seed(1), random.seed(2), np.random.seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


class Reader:
    """Reads samples in an order of its own, as a loader does."""

    def __init__(self):
        self.position = 0

    def next(self):
        generator = np.random.default_rng([7, self.position])
        self.position += 1
        batch = torch.from_numpy(generator.normal(size=(8, 16)).astype(np.float32))
        return batch * random.random() + np.random.rand()

    def state_dict(self):
        return {"version": 1, "position": self.position, "seed": "7"}

    def load_state_dict(self, state):
        self.position = state["position"]


reader = Reader()


def state():
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "loader": reader.state_dict(),
        "random": random_state(),
    }


with SnapshotStore(folder, fast=fast, schedule="3 steps", threads=1, report=None) as store:
    first = 0
    if store.list():
        restored = store.restore()
        model.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
        schedule.load_state_dict(restored["schedule"])
        reader.load_state_dict(restored["loader"])
        set_random_state(restored["random"])
        first = restored.step
    print("begins at", first, flush=True)
    store.prepare(state())
    for step in range(first, steps):
        optimizer.zero_grad()
        model(reader.next()).square().mean().backward()
        optimizer.step()
        schedule.step()
        if store.is_due(step + 1):
            saving = store.save(step + 1, state())
            if step + 1 == killed_at:
                saving.wait()
        if step + 1 == killed_at + 1:
            os.kill(os.getpid(), signal.SIGKILL)

parts = [*model.state_dict().values()]
for of in optimizer.state_dict()["state"].values():
    parts += of.values()
print("ends with", *(tensor.detach().view(-1).view(torch.uint8).numpy().tobytes().hex() for tensor in parts))
draws = random.random(), np.random.rand(), torch.rand(1).item()
print("draws", draws, schedule.get_last_lr(), reader.position, flush=True)
'''


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Callable[[Path, Path | str, int], tuple[list[str], int]]:
    """Return a function that runs a training and returns what it said, and its exit status.

    It takes the store's folder, that of its fast tier or "", and after which save it is killed.
    """
    script = tmp_path / "training.py"
    script.write_text(TRAINING)

    def one(folder: Path, fast: Path | str, killed_at: int) -> tuple[list[str], int]:
        with forks.start(script, [[[[str(folder), str(fast), str(killed_at)]]]]) as training:
            told, ended = training.wait()
        (status,) = ended.values()
        return told.splitlines(), status

    return one


def test_a_training_that_was_killed_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, run: Callable[[Path, Path | str, int], tuple[list[str], int]]
) -> None:
    never = -5
    through, through_status = run(tmp_path / "through", "", never)
    killed, killed_status = run(tmp_path / "killed", tmp_path / "fast", 9)
    again, again_status = run(tmp_path / "killed", tmp_path / "fast", never)

    assert (through_status, killed_status, again_status) == (0, -signal.SIGKILL, 0), [through, killed, again]
    assert through[0] == killed[0] == "begins at 0"
    assert again[0] == "begins at 9"
    assert len(again) == 3
    assert again[1:] == through[1:]
    kept = sorted(path.name[-2:] for path in (tmp_path / "killed").glob("step-*"))
    assert kept[-4:] == ["09", "12", "15", "18"], "what the killed one did not drain is drained, too"
