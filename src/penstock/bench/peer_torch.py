"""PyTorch's DataLoader over the same source, with worker processes that outlive a pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from penstock.bench.loaders import TRANSFORMS, Pass, RunPass, Setting, Work, checked
from penstock.errors import DataError
from penstock.measure.demo import StoredImages, many_workers
from penstock.store.remote import objects_in


class _Samples(Dataset[Any]):
    """Samples as the work makes them; None for one that is skipped."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._images = StoredImages(setting.source, TRANSFORMS) if setting.work is Work.DECODE else None

    def __len__(self) -> int:
        return len(self._setting.source)

    def __getitem__(self, index: int) -> Any:
        try:
            if self._images is None:
                return len(self._setting.source.read(index))
            return self._images.image(index)
        except DataError:
            if self._setting.on_error == "raise":
                raise
            return None


def _collate(samples: list[Any]) -> tuple[Any, int]:
    kept = [sample for sample in samples if sample is not None]
    return (default_collate(kept) if kept else None), len(samples) - len(kept)


@contextmanager
def open_loader(setting: Setting) -> Iterator[RunPass]:
    """Yield passes of a DataLoader; its workers, one for each thread, start with the first and end here."""
    order: list[int] = []
    with many_workers():
        loader = DataLoader(
            _Samples(setting),
            batch_size=setting.batch_size,
            sampler=order,
            num_workers=setting.threads,
            persistent_workers=True,
            prefetch_factor=4,
            collate_fn=_collate,
            # Threads that have read from a remote store are not in a process that is forked.
            multiprocessing_context=None if objects_in(setting.source) is None else "forkserver",
        )

        def run(ids: Sequence[int]) -> Pass:
            order[:] = ids
            begin = time.perf_counter()
            skipped = sum(lacking for _, lacking in loader)
            return checked(ids, time.perf_counter() - begin, skipped)

        try:
            yield run
        finally:
            iterator, loader._iterator = loader._iterator, None
            if iterator is not None:
                iterator._shutdown_workers()  # type: ignore[attr-defined]  # PyTorch has no public way
