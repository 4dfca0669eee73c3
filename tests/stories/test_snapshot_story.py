"""A training saves every few steps, is killed, and goes on: bit for bit as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

TRAINING = '''
import os, random, signal, sys
import numpy as np
import torch
from penstock import SnapshotStore
from penstock.checkpoint.generators import random_state, set_random_state

folder, fast, steps, killed_at = sys.argv[1], sys.argv[2] or None, int(sys.argv[3]), int(sys.argv[4])
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
    print("begins at", first)
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
print("draws", random.random(), np.random.rand(), torch.rand(1).item(), schedule.get_last_lr(), reader.position)
'''


def run(folder: Path, fast: Path | None, *, killed_at: int) -> tuple[int, list[str]]:
    """Return the exit status, and what the training says: where it begins, and what it ends with."""
    ended = subprocess.run(
        [sys.executable, "-c", TRAINING, str(folder), str(fast or ""), "20", str(killed_at)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=100,
    )
    return ended.returncode, ended.stdout.splitlines()


def test_a_training_that_was_killed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    status, through = run(tmp_path / "through", None, killed_at=-5)
    assert (status, through[0]) == (0, "begins at 0")

    killed, _ = run(tmp_path / "killed", tmp_path / "fast", killed_at=9)
    status, again = run(tmp_path / "killed", tmp_path / "fast", killed_at=-5)

    assert (killed, status) == (-signal.SIGKILL, 0)
    assert again[0] == "begins at 9"
    assert again[1:] == through[1:]
    kept = sorted(path.name[-2:] for path in (tmp_path / "killed").glob("step-*"))
    assert kept[-4:] == ["09", "12", "15", "18"], "what the killed one did not drain is drained, too"
