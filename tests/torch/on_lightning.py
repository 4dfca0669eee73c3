"""What the tests of Lightning import from it and make of it."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment
    from lightning.fabric.utilities.data import _update_dataloader
    from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.torch.lightning import LoaderState, RandomState, SaveOnSignal, SnapshotIO

__all__ = [
    "LoaderState",
    "MPIEnvironment",
    "ModelCheckpoint",
    "Net",
    "RandomState",
    "SaveOnSignal",
    "Seeing",
    "Seen",
    "Signalled",
    "SnapshotIO",
    "_update_dataloader",
    "pl",
]


class Net(pl.LightningModule):
    def __init__(self, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hyper_parameters)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Seeing(Net):
    """Notes the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append(batch[:, 0].tolist())
        return super().training_step(batch, _)

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        pass


class Signalled(Seeing):
    """Gets SIGTERM with a batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, number)


class Seen(pl.LightningModule):
    """Notes the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen.append(batch.tolist())
        loss: torch.Tensor = self.layer(batch.float()[:, None]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)
