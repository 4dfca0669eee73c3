"""Penstock as a loader and a way of saving of DLIO, the storage industry's benchmark: give their names in a workload.

    workload.reader.data_loader_classname: penstock_dlio.PenstockDataLoader
    workload.reader.data_loader_sampler: index
    workload.checkpoint.checkpoint_mechanism_classname: penstock_dlio.PenstockCheckpointing

Samples are read by DLIO's own readers, one for each thread, so that both sides do the same work for a sample; what
differs is when they are read, and by whom. DLIO calls `read` once, `next` in each epoch, and `finalize` after each of
them: what ends with the process is closed by `atexit`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, Shuffle
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.reader_factory import ReaderFactory
from numpy.typing import NDArray

import penstock
from penstock.checkpoint import SnapshotStore


class _Samples:
    """DLIO's samples by number, those of all ranks; each thread has a reader of its own."""

    def __init__(self, loader: PenstockDataLoader) -> None:
        args, self._loader = loader._args, loader
        files = args.file_list_train if loader.dataset_type is DatasetType.TRAIN else args.file_list_eval
        each = args.num_samples_per_file
        self._places = {
            number: (files[number // each], number % each) for number in range(loader.num_samples)
        }
        self._own = threading.local()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, sample: int) -> NDArray[np.uint8]:
        reader = getattr(self._own, "reader", None)
        if reader is None:
            made = self._loader
            reader = ReaderFactory.get_reader(
                type=made.format_type,
                dataset_type=made.dataset_type,
                thread_index=-1,
                epoch_number=made.epoch_number,
            )
            reader.global_index_map = self._places  # DLIO's has those of its own rank alone
            self._own.reader = reader
        image: NDArray[np.uint8] = reader.read_index(sample, 0)
        return image


class PenstockDataLoader(BaseDataLoader):  # type: ignore[misc]  # of a package without types
    """A shuffle of all samples anew each epoch, read ahead by as many threads as `reader.read_threads` says."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        args = self._args
        self._batches = penstock.Loader(
            _Samples(self),
            batch_size=self.batch_size * args.comm_size,
            epochs=args.epochs,
            shuffle=args.sample_shuffle is not Shuffle.OFF,
            seed=args.seed,
            decoders=max(1, args.read_threads),
            drop_last=True,
            rank=args.my_rank,
            world_size=args.comm_size,
            report=None,
        )
        atexit.register(self._batches.close)

    def next(self) -> Iterator[Any]:
        yield from self._batches

    def finalize(self) -> None:
        pass


class PenstockCheckpointing(BaseCheckpointing):  # type: ignore[misc]  # of a package without types
    """Snapshots that hold the training for a copy in memory; DLIO's end waits until all of them are durable."""

    _instance: PenstockCheckpointing | None = None

    @classmethod
    def get_instance(cls) -> PenstockCheckpointing:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        super().__init__("penstock")
        self._state: dict[str, Any] = {}
        folder = f"{self.args.checkpoint_folder}/penstock-{self.args.my_rank}"
        # As many threads as read: DLIO's own saves by one, and steps wait for batches while these write. Stored as it
        # is, like torch.save does: DLIO's numbers are random and never change, so that a codec would spend seconds of
        # processor time on the first save, and have nothing to write in those after it.
        threads = max(1, self.args.read_threads)
        self._store = SnapshotStore(folder, keep=2, threads=threads, codec="stored", report=None)
        atexit.register(self._store.close)
        super().checkpoint(0, 0)  # gathers the state, for which memory is taken before the first save
        self._store.prepare(self._state)

    def get_tensor(self, size: int) -> torch.Tensor:
        return torch.randint(high=127, size=(size,), dtype=torch.int8)

    def save_state(self, suffix: str, state: Any) -> None:
        # "layer-3-EPOCH-STEP-RANK": what is saved at one step is one snapshot, whatever its parts are called.
        self._state["-".join(suffix.split("-")[:-3])] = state

    def checkpoint(self, epoch: int, step_number: int) -> None:
        super().checkpoint(epoch, step_number)
        self._store.save(epoch * 10**6 + step_number, self._state)

    def finalize(self) -> None:
        self._store.close()
