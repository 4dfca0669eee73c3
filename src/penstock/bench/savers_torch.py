"""torch.save and PyTorch's distributed checkpoint, each synced: neither syncs all that it writes by itself."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.bench.savers import KEPT, Saver, State, naming_folder, sync_tree
from penstock.ranks import Ranks


class _Synced:
    """Saves by a function of a path and a state, syncs it, and keeps the last `KEPT`. Rank 0 saves, all wait for it."""

    def __init__(
        self, name: str, folder: Path, write: Callable[[Path, dict[str, Any]], object], ranks: Ranks
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._name, self._folder, self._write, self._ranks = name, folder, write, ranks
        self._kept: list[Path] = []

    def save(self, step: int, state: State) -> None:
        self._ranks.on_rank_zero(f"saving step {step}", lambda: self._save(step, state))

    def _save(self, step: int, state: State) -> None:
        path = self._folder / f"step-{step}"
        with naming_folder(self._name, self._folder):
            self._write(path, {name: _tensor(value) for name, value in state.items()})
            sync_tree(path)
        self._kept.append(path)
        if len(self._kept) > KEPT:
            oldest = self._kept.pop(0)
            shutil.rmtree(oldest) if oldest.is_dir() else oldest.unlink()

    def settle(self) -> list[float]:
        return []


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@contextmanager
def open_torch(
    state: State, steps: Sequence[int], folder: Path, fast: Path | None, ranks: Ranks
) -> Iterator[Saver]:
    """Yield a saver by torch.save."""
    assert fast is None, "torch.save has no burst buffer"
    yield _Synced("torch.save", folder, lambda path, each: torch.save(each, path), ranks)


@contextmanager
def open_dcp(
    state: State, steps: Sequence[int], folder: Path, fast: Path | None, ranks: Ranks
) -> Iterator[Saver]:
    """Yield a saver by torch.distributed.checkpoint.save, of a process by itself."""
    assert fast is None, "DCP has no burst buffer"
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def write(path: Path, each: dict[str, Any]) -> None:
        try:
            save(each, storage_writer=FileSystemWriter(path), no_dist=True)
        except CheckpointException as error:  # no Exception; its last line is what happened
            for failed, _ in error.failures.values():
                if isinstance(failed, KeyboardInterrupt | SystemExit):
                    raise failed from None
            raise RuntimeError(str(error).strip().rpartition("\n")[2]) from error

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield _Synced("DCP", folder, write, ranks)
