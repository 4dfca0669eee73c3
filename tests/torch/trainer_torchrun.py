"""What each process that torchrun started trains, for tests/torch/test_trainer.py.

Run as: python -m torch.distributed.run --nproc-per-node 2 trainer_torchrun.py FOLDER LIFE

LIFE: "killed": train until all ranks are killed after step 5; "again": go on from what is there, then train without a
break in a folder of its own, and report both.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from penstock import SnapshotStore
from penstock.torch.trainer import SnapshotCallback


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(values).square().mean()}


class Watch(TrainerCallback):
    """Notes the steps, and kills this process after one of them, once what was saved before is durable."""

    def __init__(self, snapshots: SnapshotCallback, last: int | None) -> None:
        self.snapshots, self.last = snapshots, last
        self.steps: list[int] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.last:
            assert self.snapshots._saving is not None, "a snapshot was saved before"
            self.snapshots._saving.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, seed: int, last: int | None = None) -> dict[str, Any]:
    """Train to step 8; return which steps, whether the store was one rank's, and a digest of the model."""
    set_seed(seed)
    generator = torch.Generator().manual_seed(0)
    data = [{"values": torch.randn(6, generator=generator)} for _ in range(64)]
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(Net(), arguments, train_dataset=data)
    with SnapshotStore(folder / "store", schedule="3 steps", report=None, threads=1) as store:
        snapshots = SnapshotCallback(trainer, store)
        trainer.add_callback(snapshots)
        trainer.add_callback(watch := Watch(snapshots, last))
        snapshots.train()
        digest = hashlib.sha256()
        for tensor in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
            digest.update(tensor.numpy().data)
        return {"steps": watch.steps, "is alone": store.is_alone, "model": digest.hexdigest()}


folder, life = Path(sys.argv[1]), sys.argv[2]
if life == "killed":
    train(folder, seed=7, last=5)
# Other weights and random numbers: all that counts comes from the snapshot.
reports = [train(folder, seed=8), train(folder / "straight", seed=7)]
(folder / f"report-{os.environ['RANK']}.json").write_text(json.dumps(reports))
torch.distributed.destroy_process_group()
