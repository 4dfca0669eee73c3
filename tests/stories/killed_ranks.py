"""What each rank of a job does that is stopped again and again, for tests/stories/test_killed.py.

Run as: killed_ranks.py FOLDER LIFE RANK RANKS SCENARIO STOP_AT

It trains on FOLDER/photos and stops at a step: SIGTERM comes to the last rank. What it read lies in
FOLDER/read-LIFE-RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import penstock.torch as pt
from penstock import SnapshotStore
from penstock.checkpoint import StopOnSignal
from penstock.loader.transforms import RandomHorizontalFlip, RandomResizedCrop, ToTensor

folder, life = Path(sys.argv[1]), sys.argv[2]
rank, ranks, scenario, stop_at = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
EPOCHS, BATCH = 2, 12
has_signal = rank == ranks - 1


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Numbers; one of them comes once the ranks have decided to stop."""

    def __len__(self) -> int:
        return 10 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if scenario.startswith("waiting") and has_signal and step + 1 >= stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
            while stop._agreement.stop_call is None:
                time.sleep(0.001)
        return torch.tensor(index)


def get_signal() -> None:
    """Get it, and be sure that no step passes before the other ranks can know."""
    os.kill(os.getpid(), signal.SIGTERM)
    while stop._agreement.signal is None:
        time.sleep(0.001)


def digests(batch: Any) -> list[str]:
    rows = batch[0] if isinstance(batch, (list, tuple)) else batch
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]


torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous-{scenario}-{life}", rank=rank, world_size=ranks
)
crops = [RandomResizedCrop(6), RandomHorizontalFlip(), ToTensor()]
source: Any = Slow() if scenario.startswith("waiting") else str(folder / "photos")
transforms = [] if scenario.startswith("waiting") else crops
common: dict[str, Any] = {"batch_size": BATCH, "transforms": transforms, "memory": "8 MiB", "report": None}
if scenario.startswith("waiting"):
    common["decoders"] = 0 if scenario.endswith("own thread") else 1
model = torch.nn.Linear(1, 1)
read: list[list[str]] = []
step = 0
with (
    pt.Loader(source, epochs=EPOCHS, seed=5, rank=rank, world_size=ranks, **common) as loader,
    pt.Loader(
        str(folder / "photos"), epochs=None, shuffle=False, world_size=1, **{**common, "transforms": crops}
    ) as validation,
    SnapshotStore(folder / f"store-{scenario}", codec="stored", threads=1, report=None) as store,
    StopOnSignal(grace_seconds=60, report=None) as stop,
):
    if store.list():
        restored = store.restore()
        model.load_state_dict(restored["model"])
        loader.load_state_dict(restored["loader"])
        step = restored.step
    if scenario == "warm-up" and has_signal:
        get_signal()
    while loader.position[0] < EPOCHS and not stop.exit_code:
        for batch in loader:
            read.append(digests(batch))
            torch.distributed.all_reduce(model.weight.data)
            step += 1
            if scenario == "training" and has_signal and step == stop_at:
                get_signal()
            if step % 4 == 0:  # evaluation within the epoch
                for number, _ in enumerate(validation):
                    if scenario == "evaluation" and has_signal and number == 1 and step == stop_at:
                        get_signal()
            if stop.agreed(step):
                store.save(step, {"model": model, "loader": loader}).wait()
                break
report = {"read": read, "step": step, "state": loader.state_dict(), "exit": stop.exit_code}
(folder / f"read-{scenario}-{life}-{rank}.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
sys.exit(stop.exit_code)
