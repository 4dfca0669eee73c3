"""What worker processes of the drop-in DataLoader import."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

COUNT = 24


class Telling(Dataset[Any]):
    """Samples that say where they come from. Sample `broken` cannot be had, sample `fatal` ends its process."""

    def __init__(self) -> None:
        self.epoch = 0
        self.initialised_by = -1
        self.broken = self.fatal = -1

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise KeyError(f"sample {index}")
        if index == self.fatal:
            os._exit(3)
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return {
            "index": index,
            "pid": os.getpid(),
            "worker": (info.id, info.num_workers),
            "epoch": self.epoch,
            "initialised": self.initialised_by == info.id,
            "drawn": torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]),  # noqa: NPY002
            "row": torch.full((20_000,), index, dtype=torch.bfloat16),
        }


class Wholes(Dataset[Any]):
    """Makes whole batches as it likes."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("lists are asked for")

    def __getitems__(self, indices: list[int]) -> Any:
        info = get_worker_info()
        assert info is not None
        return {"rows": torch.tensor(indices) * 2, "is_own": info.dataset is self}


def note_worker(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.initialised_by = number  # type: ignore[attr-defined]


def unchanged(made: Any) -> Any:
    return made
