"""What the tests of the Trainer of Hugging Face import from it and make of it."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        set_seed,
    )

from penstock.torch import Loader
from penstock.torch.trainer import SnapshotCallback

__all__ = [
    "Reading",
    "Signalling",
    "SnapshotCallback",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "set_seed",
]


class Reading(Trainer):
    """Reads from a loader of Penstock, and notes which rows."""

    def __init__(self, loader: Loader, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loader = loader
        self.seen: list[list[float]] = []

    def get_train_dataloader(self) -> Any:
        return self.loader

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        self.seen.append(inputs["values"][:, 0].tolist())
        return super().training_step(model, inputs, *rest)


class Signalling(TrainerCallback):
    """Sends SIGTERM with a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
