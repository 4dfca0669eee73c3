"""An order over ids that are permuted once, for data whose neighbours in id are alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan.bijection import as_ids
from penstock.plan.orders import FullShuffle, OfOrder, Order, RepeatingOrder, check_seed
from penstock.plan.random import derive_key


@dataclass(frozen=True, slots=True)
class Scattered(OfOrder):
    """Another order, whose ids are replaced by those of one random permutation, the same in every epoch.

    A folder of images is sorted by class, so a bundle of consecutive ids holds a few classes; a bundle of
    scattered ids is a random sample of the data set. No file moves: which samples make a bundle changes, not
    how often or when a bundle comes back, so every cache keeps its hit rate. What is lost is that neighbours
    in a bundle are neighbours on disk.

    order: one that reads no sample twice in an epoch.
    seed: of the permutation, 0 to 2**64 - 1; it may be that of the order.
    Raises: ConfigError for an order that may repeat samples, as `Explicit`.

    >>> from penstock.plan import BundleShuffle
    >>> sorted(Scattered(BundleShuffle(8, bundle_ratio=0.5), seed=1).at(0, range(8)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    order: Order
    seed: int = 0
    _permutation: FullShuffle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.order, Order) or isinstance(self.order, RepeatingOrder):
            raise ConfigError(
                f"order is {self.order!r}; ids are scattered under an order that reads each sample at most once "
                "an epoch, as BundleShuffle does: permute the list itself where you made it"
            )
        check_seed(self.seed)
        key = derive_key(self.seed, "scattered ids")
        object.__setattr__(self, "_permutation", FullShuffle(self.order.samples, key))

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        return self._permutation.at(0, self.order.at(epoch, positions))

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        ids = as_ids(samples, self.samples, "samples")
        return self.order.position_of(epoch, self._permutation.position_of(0, ids))
