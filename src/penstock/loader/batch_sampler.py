"""Somebody's batch sampler: each epoch of it is drawn once, when it is first needed, whoever asks and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.plan import Batches, CutOrder, Flat
from penstock.plan.batches import flatten
from penstock.units import format_count

#: Epochs that are kept of a run without end, the first one besides: as many as are read ahead, and more.
_EPOCHS_KEPT = 8
#: Later epochs' batches may be so much larger than those of the first, where these differ.
_ROOM = 1.5


class DrawnBatches:
    """The batches of each epoch, drawn from a batch sampler as PyTorch's DataLoader draws them.

    Epochs are drawn in their order, as a sampler with a random state of its own demands; one with `set_epoch`, or whose
    `sampler` has it, is told which comes. What was drawn is kept, 4 bytes an id: all of it in a run that ends.

    sampler: any iterable of lists of ids that can be gone through again. keeps_all: False in a run without end.
    """

    def __init__(self, sampler: Iterable[Sequence[int]], keeps_all: bool) -> None:
        self.sampler = sampler
        self._keeps_all = keeps_all
        owner = next(
            (each for each in (sampler, getattr(sampler, "sampler", None)) if hasattr(each, "set_epoch")),
            None,
        )
        self._set_epoch = None if owner is None else owner.set_epoch
        #: Guards the sampler and what was drawn: the training's thread and those that load may ask.
        self._lock = Lock()
        self._drawn: dict[int, Flat] = {}
        self._next = 0

    def __call__(self, epoch: int) -> Flat:
        """Return the batches of an epoch. Raises: ConfigError for what is no batch; what the sampler raises."""
        with self._lock:
            if self._set_epoch is not None and epoch not in self._drawn:
                self._set_epoch(epoch)
                self._draw(epoch)
            while self._set_epoch is None and epoch >= self._next:
                self._draw(self._next)
                self._next += 1
            if epoch not in self._drawn:
                raise ConfigError(
                    f"epoch {epoch} of {self!r} is asked for again, long after it was drawn: give the sampler a "
                    "set_epoch, or the loader epochs="
                )
            return self._drawn[epoch]

    def _draw(self, epoch: int) -> None:
        flat = flatten(self.sampler, epoch)
        is_narrow = flat.ids.size == 0 or -(2**31) <= flat.ids.min() <= flat.ids.max() < 2**31
        ids, bounds = flat.ids.astype(np.int32) if is_narrow else flat.ids, flat.bounds
        before = self._drawn.get(epoch - 1)
        if before is not None and np.array_equal(before.ids, ids) and np.array_equal(before.bounds, bounds):
            ids, bounds = before
        self._drawn[epoch] = Flat(ids, bounds)
        if not self._keeps_all:
            for old in [each for each in self._drawn if 0 < each <= epoch - _EPOCHS_KEPT]:
                del self._drawn[old]

    def order(self, samples: int) -> Batches:
        """Return the order of a run over so many samples."""
        sizes = np.diff(self(0).bounds)
        largest = int(sizes.max())
        if (sizes[:-1] != largest).any():
            largest = int(_ROOM * largest) + 1
        return Batches(self, samples, largest)

    def __repr__(self) -> str:
        return repr(self.sampler)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrawnBatches) and self.sampler is other.sampler

    def __hash__(self) -> int:
        return id(self.sampler)

    def __reduce__(self) -> tuple[Any, ...]:
        return DrawnBatches, (self.sampler, self._keeps_all)


def as_batch_sampler(given: object, *, is_endless: bool) -> CutOrder | DrawnBatches:
    """Return what draws the batches of a loader. Raises: ConfigError for what cannot."""
    if isinstance(given, (CutOrder, DrawnBatches)):
        return given
    if isinstance(given, (str, bytes, type)) or not isinstance(given, Iterable):
        raise ConfigError(
            f"batch_sampler is {given!r:.80}; it is an iterable of lists of ids, such as PyTorch's BatchSampler, or "
            "batches that penstock.plan makes, such as Batches(...)"
        )
    if isinstance(given, Iterator):
        raise ConfigError(
            f"batch_sampler is {given!r:.80}, which can be gone through once: give what makes a new one each epoch, an "
            "object with __iter__, or a list of it"
        )
    return DrawnBatches(given, keeps_all=not is_endless)


def uneven_line(order: object) -> str:
    """Say how often listed batches repeat samples, and how many they leave out; nothing where they do neither."""
    if not isinstance(order, Batches):
        return ""
    ids = order.at(0, np.arange(order.length(0)))
    distinct = int(np.unique(ids).size)
    found = []
    if left_out := order.samples - distinct:
        found.append(f"leaves out {format_count(left_out, 'sample')}")
    if repeated := ids.size - distinct:
        found.append(f"reads {format_count(repeated, 'sample')} more than once")
    if not found:
        return ""
    return f"batch_sampler's first epoch {' and '.join(found)} of {order.samples:,}"
