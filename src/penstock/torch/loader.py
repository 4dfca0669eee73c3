"""The loader for users of PyTorch: batches as tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.base import BaseLoader
from penstock.loader.dataset import MapDataset, numpy_leaf
from penstock.store import Source


class Loader(BaseLoader[Any]):
    """Batches as tensors that alias the staging buffer, without a copy.

    Takes the arguments of `penstock.loader.BaseLoader`; dtype may be a torch.dtype. rank and world_size are those
    of torch.distributed where it is initialised, unless given.

    A folder gives tuples of images, [batch, channels, height, width] (or channels last) and labels, int64[batch].
    A map-style data set gives what PyTorch's own loader makes of it.

    A slot is filled again when no tensor refers to it any more and, where CUDA is in use, the copies that were
    enqueued on the current stream when the last one went have ended: `.to(device, non_blocking=True)` is safe.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Source | MapDataset,
        *,
        dtype: str | torch.dtype = "float32",
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ConfigError("rank and world_size belong together: give both or neither")
        if rank is None or world_size is None:
            distributed = torch.distributed
            if distributed.is_available() and distributed.is_initialized():
                rank, world_size = distributed.get_rank(), distributed.get_world_size()
            else:
                rank, world_size = 0, 1
        name = str(dtype).removeprefix("torch.")
        self._dtype = name
        super().__init__(source, dtype=name, rank=rank, world_size=world_size, **options)

    def _present(self, batch: Any) -> Any:
        return _tensors(batch, self._dtype == "bfloat16")

    @staticmethod
    def _as_array(leaf: Any) -> NDArray[Any] | None:
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu()
            return None if leaf.dtype == torch.bfloat16 else leaf.numpy()
        return numpy_leaf(leaf)

    @staticmethod
    def _hold() -> Callable[[], Callable[[], bool] | None] | None:
        return after_current_stream if torch.backends.cuda.is_built() else None  # type: ignore[no-untyped-call]


def after_current_stream() -> Callable[[], bool] | None:
    """Return a question whether all that is enqueued on the current CUDA stream by now is done; None without CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


def _tensors(batch: Any, is_bfloat16: bool) -> Any:
    """Turn every array of a structure into a tensor over the same memory."""
    if isinstance(batch, np.ndarray):
        tensor = torch.from_numpy(batch)
        return tensor.view(torch.bfloat16) if is_bfloat16 and batch.dtype == np.uint16 else tensor
    if isinstance(batch, dict):
        return {key: _tensors(part, is_bfloat16) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_tensors(part, is_bfloat16) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_tensors(part, is_bfloat16) for part in batch)
    return batch
