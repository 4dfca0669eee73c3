"""Batches whose images are mixed with each other, in the worker that decodes the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.flow.staging import Field
from penstock.flow.work import Brought
from penstock.loader.images import ImageDecoder
from penstock.loader.transforms.mixing import Drawn, Mixing, one_hot
from penstock.policy import Load


class _Batch:
    """What is there of the batch in a slot. drawn: what is done to it; None for nothing."""

    def __init__(self, number: int, drawn: Drawn | None) -> None:
        self.number, self.drawn = number, drawn
        self.rows: set[int] = set()
        self.is_mixed = False


class MixingDecoder:
    """A `Decoder` of images with one label each, for slots of one step.

    Whoever decodes the last row of a batch mixes it. Where samples failed, the others are mixed when it is handed out.
    """

    def __init__(self, decoder: ImageDecoder, mixing: Mixing) -> None:
        images, _ = decoder.fields
        self.fields = mixed_fields(images, mixing)
        self._decoder, self._mixing = decoder, mixing
        self._batches: dict[int, _Batch] = {}
        self._batches_lock = threading.Lock()

    @property
    def decoded_alone(self) -> int:
        """See `ImageDecoder`."""
        return self._decoder.decoded_alone

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Pictures are decoded."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `Decoder`."""
        images, labels = arrays
        numbers = np.zeros(len(images), np.int64)
        rows = brought.rows
        failed = self._decoder.decode(load, brought, (images, numbers), at)
        labels[list(rows)] = one_hot(numbers[list(rows)], self._mixing.num_classes)
        wrong = {index for index, _ in failed}
        done = {row for index, row in enumerate(rows) if index not in wrong}
        if (batch := self._completed(load, done, images)) is not None and batch.drawn is not None:
            count = load.samples.size
            self._mixing.mix(batch.drawn, images[:count], labels[:count])
        return failed

    def _completed(self, load: Load, rows: set[int], images: NDArray[Any]) -> _Batch | None:
        """Take note of rows; return the batch if they were the last."""
        with self._batches_lock:
            batch = self._batches.get(load.slot)
            if batch is None or batch.number != load.batch or batch.is_mixed:
                drawn = self._mixing.draw(load.epoch, load.step, *self._mixing.size_of(images))
                batch = self._batches[load.slot] = _Batch(load.batch, drawn)
            batch.rows |= rows
            batch.is_mixed = len(batch.rows) == load.samples.size
            return batch if batch.is_mixed else None

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """See `Decoder`: images, and labels float32[batch, num_classes]."""
        batch = self._batches.get(slot)
        if batch is None or batch.is_mixed or batch.drawn is None or not len(rows):
            return arrays
        images, labels = (array.copy() for array in arrays)
        self._mixing.mix(batch.drawn, images, labels)
        return images, labels


def mixed_fields(images: Field, mixing: Mixing) -> tuple[Field, Field]:
    """Return what a batch has: images, and a share of each class for each of them."""
    return images, Field("labels", (mixing.num_classes,), np.dtype(np.float32))
