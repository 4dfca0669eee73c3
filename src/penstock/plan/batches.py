"""Batches that somebody else made: listed, or of a function of the epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.explicit import Explicit
from penstock.plan.orders import check_epoch
from penstock.units import format_count
from penstock.validate import check_count

Ids = NDArray[np.int64]

_EPOCHS_KEPT = 3


class Flat(NamedTuple):
    """The batches of an epoch, end to end.

    ids: int[length]. bounds: int[batches + 1], batch b is ids[bounds[b]:bounds[b + 1]].
    """

    ids: NDArray[np.signedinteger[Any]]
    bounds: Ids


#: The batches of an epoch.
Listed = Flat | Iterable[Sequence[int] | NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Each epoch reads the batches that are listed for it, as they are: what a batch sampler yields.

    A batch is a rank's in a step: the first `ranks` of them are the first step, and so on. Ids may repeat, and an epoch
    may leave some out.

    batches: one of
        - lists of ids: every epoch reads these batches;
        - a sequence of such, [epoch][batch][id]: epoch e reads batches[e], and there are no more epochs;
        - a function, called as batches(epoch), that returns the lists of the epoch, or a `Flat`. It must return the
          same for the same epoch at any time, on any thread: it is called again when its answer is no longer kept.
    samples: F; ids are in [0, F).
    largest: no batch has more samples. Of lists, and of the first epoch of a function, that is counted unless given.
    Raises: ConfigError for ids that are not integers in [0, F), an empty batch, an epoch without any, or a batch that
        is larger than `largest`.

    >>> from penstock.plan import AccessPlan
    >>> plan = AccessPlan.of_batches(Batches([[3, 1, 1], [0]], samples=4), epochs=2)
    >>> [plan.local_batch(rank=0, epoch=1, step=step).tolist() for step in range(2)]
    [[3, 1, 1], [0]]
    """

    repeats: ClassVar[bool] = True
    batches: Sequence[Any] | Callable[[int], Listed] = field(repr=False)
    samples: int
    largest: int | None = None
    _ids: Explicit = field(init=False, repr=False)
    #: Of each epoch where they are listed, of every one if there is a single entry.
    _lists: tuple[Flat, ...] | None = field(init=False, repr=False)
    _made: Recent[int, Flat] = field(default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.largest is not None:
            check_count("largest", self.largest)
        lists = None
        if not callable(self.batches):
            is_one_list = not _are_epochs(self.batches)
            epochs = [self.batches] if is_one_list else self.batches
            lists = tuple(flatten(batches, epoch) for epoch, batches in enumerate(epochs))
            object.__setattr__(self, "batches", lists)  # the copy that was checked, not the caller's
        object.__setattr__(self, "_lists", lists)
        if self.largest is None:
            first = lists if lists is not None else (self._of(0),)
            object.__setattr__(self, "largest", max(int(np.diff(each.bounds).max()) for each in first))
        elif lists is not None:
            for epoch, each in enumerate(lists):
                self._check(each, epoch)
        listed: Any = self._ids_of if lists is None else [each.ids for each in lists]
        is_of_every_epoch = lists is not None and is_one_list
        object.__setattr__(self, "_ids", Explicit(listed[0] if is_of_every_epoch else listed, self.samples))

    @property
    def most(self) -> int:
        """See `CutOrder.most`."""
        assert self.largest is not None, "it was counted"
        return int(self.largest)

    @property
    def even_from(self) -> int:
        """See `EvenOrder.even_from`."""
        return self._ids.even_from

    def bounds(self, epoch: int, ranks: int) -> Ids:
        """See `CutOrder.bounds`: those that are listed, however many there are."""
        return self._of(epoch).bounds

    def length(self, epoch: int) -> int:
        """Return the number of ids listed for the epoch."""
        return self._ids.length(epoch)

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        return self._ids.at(epoch, positions)

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        return self._ids.position_of(epoch, samples)

    def _of(self, epoch: int) -> Flat:
        check_epoch(epoch)
        if self._lists is None:
            function = self.batches
            assert callable(function), "without lists there is a function"
            return self._made.get(epoch, lambda: self._check(flatten(function(epoch), epoch), epoch))
        self._ids.length(epoch)  # raises where there is none
        return self._lists[min(epoch, len(self._lists) - 1)]

    def _ids_of(self, epoch: int) -> NDArray[Any]:
        return self._of(epoch).ids

    def _check(self, flat: Flat, epoch: int) -> Flat:
        if self.largest is not None and (sizes := np.diff(flat.bounds)).max() > self.largest:
            batch = int(np.argmax(sizes > self.largest))
            raise ConfigError(
                f"batch {batch} of epoch {epoch} has {format_count(int(sizes[batch]), 'sample')}, and space is taken "
                f"for {self.largest}, the most of the first epoch or what was given: give the order as "
                f"penstock.plan.Batches(..., largest={int(sizes.max())})"
            )
        return flat


def flatten(batches: Listed, epoch: int) -> Flat:
    """Return the batches of an epoch end to end. Raises: ConfigError for an empty one, and what is no list of ids."""
    if isinstance(batches, Flat):
        flat = Flat(np.asarray(batches.ids), np.asarray(batches.bounds, np.int64))
    else:
        try:
            lists = [each if isinstance(each, (list, tuple, np.ndarray)) else list(each) for each in batches]
            sizes = np.fromiter(map(len, lists), np.int64, len(lists))
            ids = np.fromiter(map(operator.index, chain.from_iterable(lists)), np.int64, int(sizes.sum()))
        except TypeError as error:
            raise ConfigError(
                f"batches of epoch {epoch} are no lists of ids ({error}): list the ids of each batch, [[3, 1], [0, 2]]"
            ) from None
        flat = Flat(ids, np.concatenate(([0], np.cumsum(sizes))))
    if flat.bounds.size < 2:
        raise ConfigError(f"epoch {epoch} has no batch: list one at least, or plan fewer epochs")
    if (np.diff(flat.bounds) <= 0).any():
        batch = int(np.argmax(np.diff(flat.bounds) <= 0))
        raise ConfigError(f"batch {batch} of epoch {epoch} is empty: list at least one id, or leave it out")
    return flat


def _are_epochs(batches: Sequence[Any]) -> bool:
    """Whether these are lists of batches, epoch by epoch, rather than batches."""
    if isinstance(batches, Flat) or not len(batches):
        return False
    first = batches[0]
    return isinstance(first, Flat) or (
        isinstance(first, Sequence) and len(first) > 0 and isinstance(first[0], (Sequence, np.ndarray))
    )
