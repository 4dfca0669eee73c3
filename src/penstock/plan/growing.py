"""Batches that a caller asks for while the run is under way, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.plan.bijection import as_ids

Ids = NDArray[np.int64]
#: (epoch, step) of a batch.
Place = tuple[int, int]


class Growing:
    """A `CutOrder` for one rank whose caller knows no more of the future than the batches that it has asked for.

    Its plan has those that were asked for and not forgotten, see `AccessPlan.batches`; each is at a later place than
    the one before. One thread asks and forgets, any thread may read. As a table it has what is known before the run,
    the first batch.

    samples: F; ids are in [0, F). most: no batch has more samples. first: int64[local batch], the first batch.
    """

    repeats: ClassVar[bool] = True
    even_from: ClassVar[int] = 0

    def __init__(self, samples: int, most: int, first: Ids) -> None:
        self.samples, self.most = samples, most
        self._first = first
        self._asked: dict[Place, Ids] = {}

    def ask(self, place: Place, ids: Ids) -> None:
        """Add a batch, at a place after all others."""
        self._asked[place] = ids

    def forget_before(self, place: Place) -> None:
        """Leave out the batches before a place: they were had, or are not wanted."""
        for earlier in [each for each in self._asked if each < place]:
            del self._asked[earlier]

    def batch(self, epoch: int, step: int) -> Ids:
        """Return the samples of a batch; none where it was not asked for, or is forgotten."""
        return self._asked.get((epoch, step), np.empty(0, np.int64))

    def batches(self, epoch: int, step: int) -> Iterator[tuple[int, int, Ids]]:
        """Iterate over what is asked for from a place on, as `AccessPlan.batches`; after the end there may be more."""
        return _Following(self._asked, (epoch, step))

    def bounds(self, epoch: int, ranks: int) -> Ids:
        """See `CutOrder.bounds`: of the first batch."""
        return np.array([0, self._first.size])

    def length(self, epoch: int) -> int:
        """Return the size of the first batch."""
        return self._first.size

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        return self._first[as_ids(positions, self._first.size, "positions")]

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        wanted = as_ids(samples, self.samples, "samples")
        found = wanted[..., None] == self._first
        return np.where(found.any(-1), found.argmax(-1), -1)


class _Following(Iterator[tuple[int, int, Ids]]):
    """Goes through batches as they are asked for. No generator: those are exhausted once nothing is left."""

    def __init__(self, asked: dict[Place, Ids], place: Place) -> None:
        self._asked, self._place = asked, place

    def __next__(self) -> tuple[int, int, Ids]:
        asked = self._asked.copy()  # in one go, whatever the thread that asks does meanwhile
        place = min((each for each in asked if each >= self._place), default=None)
        if place is None:
            raise StopIteration
        epoch, step = place
        self._place = epoch, step + 1
        return epoch, step, asked[place][None]
