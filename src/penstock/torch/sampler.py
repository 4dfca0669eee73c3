"""Penstock's orders as samplers of PyTorch's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, Order

_IDS_AT_ONCE = 65_536


class OrderSampler(Sampler[int]):
    """Yield the ids of an order, one epoch per iteration.

    Used as ``DataLoader(dataset, batch_size, sampler=OrderSampler(order))``. Each iteration takes the epoch
    after the last one, beginning with 0; `set_epoch` chooses the next. Memory does not grow with the number
    of samples where the order is a function.

    order: its samples are the ids of the dataset.
    Raises: ConfigError if it is no order.
    """

    def __init__(self, order: Order) -> None:
        if isinstance(order, type) or not isinstance(order, Order):
            raise ConfigError(
                f"order is {order!r}; it is one of penstock.plan, for example FullShuffle(len(dataset))"
            )
        self.order = order
        #: The epoch of the latest iteration or, until one has begun since `set_epoch`, of the next.
        self.epoch = 0
        self._is_begun = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration yield this epoch, as ``DistributedSampler.set_epoch`` does."""
        self.order.length(epoch)
        self.epoch = epoch
        self._is_begun = False

    def __iter__(self) -> Iterator[int]:
        # A generator: DataLoader makes more iterators than it draws from, and only those drawn from count.
        if self._is_begun:
            self.epoch += 1
        self._is_begun = True
        epoch = self.epoch
        length = self.order.length(epoch)
        for begin in range(0, length, _IDS_AT_ONCE):
            yield from self.order.at(epoch, np.arange(begin, min(begin + _IDS_AT_ONCE, length))).tolist()

    def __len__(self) -> int:
        return self.order.length(self.epoch)


class BundleRandomSampler(OrderSampler):
    """Shuffle within bundles of consecutive samples, bundles in sequence and reversed every second epoch.

    data_source: the dataset, of which only the length counts.
    bundle_ratio, seed, alternate: see `penstock.plan.BundleShuffle`.
    Source: Lee & Bahn, "Analyzing data reference characteristics of deep learning workloads for improving
        buffer cache performance", Applied Sciences 2023, section 3, whose class this is.

    >>> sampler = BundleRandomSampler(range(8), bundle_ratio=0.5)
    >>> sorted(list(sampler)[:4]), sorted(list(sampler)[:4])
    ([0, 1, 2, 3], [4, 5, 6, 7])
    """

    def __init__(
        self, data_source: Sized, bundle_ratio: float = 0.1, seed: int = 0, alternate: bool = True
    ) -> None:
        super().__init__(BundleShuffle(len(data_source), seed, bundle_ratio, alternate))
