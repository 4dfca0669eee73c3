"""In which order an epoch reads its samples.

An order is a function, not a table: it answers "which sample is at position p of epoch e" and "at which
position of epoch e is sample k" without having listed the epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan.bijection import LARGEST_SAMPLES, BlockShuffle, as_ids
from penstock.units import is_integer

LARGEST_EPOCH = 2**32 - 1
#: The number of epochs of a run without end: all that can be counted.
ENDLESS = LARGEST_EPOCH + 1


@runtime_checkable
class Order(Protocol):
    """Which sample is read at each position of each epoch."""

    @property
    def samples(self) -> int:
        """F, the number of samples that ids are drawn from: each id is in [0, F)."""
        ...

    def length(self, epoch: int) -> int:
        """Return the number of positions of the epoch; F for orders that read each sample once."""
        ...

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the sample at each position, int64 in the shape of positions.

        Raises: ConfigError if a position is outside [0, length(epoch)).
        """
        ...

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        """Return the position of each sample, int64 in the shape of samples.

        -1 where the epoch does not read the sample; the first position where it reads it more than once.
        Raises: ConfigError if a sample is outside [0, F).
        """
        ...


@runtime_checkable
class RepeatingOrder(Order, Protocol):
    """An order whose epochs may read a sample more than once; other orders read it once at most."""

    @property
    def repeats(self) -> bool:
        """True; other orders do not have it."""
        ...


@runtime_checkable
class EvenOrder(Order, Protocol):
    """An order that knows from which epoch on all are equally long; other orders are asked for the length of each."""

    @property
    def even_from(self) -> int:
        """The epoch from which on all have the same length, 0 where all do."""
        ...


@runtime_checkable
class CutOrder(Order, Protocol):
    """An order that says where its epochs are cut into batches; other orders are cut every batch_size positions.

    Batches are local ones: the first `ranks` of them are the first step, one for each rank, and so on.
    """

    @property
    def most(self) -> int:
        """No batch of any epoch has more samples: what a batch slot has space for."""
        ...

    def bounds(self, epoch: int, ranks: int) -> NDArray[np.int64]:
        """Return where the epoch's batches begin and end: int64[batches + 1], ascending from 0 to length(epoch).

        ranks: that share the batches out. An order that can makes as many batches as each of them gets equally many.
        """
        ...


@runtime_checkable
class DescribedOrder(Order, Protocol):
    """An order over large tables that says in short what fixes it; of others, the ids are digested."""

    def describe(self) -> dict[str, Any]:
        """Return its arguments as JSON, a table as a digest."""
        ...


class _OfAll:
    """What orders share whose epochs all read F samples."""

    __slots__ = ()
    samples: int

    @property
    def even_from(self) -> int:
        """0: all epochs read F samples."""
        return 0

    def length(self, epoch: int) -> int:
        """Return F."""
        check_epoch(epoch)
        return self.samples


class OfOrder:
    """What orders share that read the positions of another one."""

    __slots__ = ()
    order: Order

    @property
    def samples(self) -> int:
        """F, that of the order."""
        return self.order.samples

    @property
    def even_from(self) -> int:
        """See `EvenOrder.even_from`: that of the order."""
        return even_from(self.order)

    def length(self, epoch: int) -> int:
        """Return the length that the order has."""
        return self.order.length(epoch)


@dataclass(frozen=True, slots=True)
class Sequential(_OfAll):
    """Every epoch reads the samples in the order of their ids.

    samples: F, 1 to 2**62.
    """

    samples: int

    def __post_init__(self) -> None:
        check_samples(self.samples)

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the positions themselves, checked."""
        check_epoch(epoch)
        return as_ids(positions, self.samples, "positions")

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        """Return the samples themselves, checked."""
        check_epoch(epoch)
        return as_ids(samples, self.samples, "samples")


@dataclass(frozen=True, slots=True)
class BundleShuffle(_OfAll):
    """Shuffle within bundles of consecutive ids; bundles follow each other in sequence.

    Every second epoch (1, 3, ...) takes the bundles in reverse, so that what an epoch read last, and a cache
    may still hold, the next one reads first.

    samples: F, 1 to 2**62.
    seed: 0 to 2**64 - 1.
    bundle_ratio: size of a bundle relative to F, in (0, 1]. A bundle is ceil(bundle_ratio * F) ids, the last
        one may be shorter. At 1 the order is that of `FullShuffle` with the same seed.
    alternate: reverse the order of the bundles every second epoch.
    Source: Lee & Bahn, "Analyzing data reference characteristics of deep learning workloads for improving
        buffer cache performance", Applied Sciences 2023, section 3; the default ratio from section 4.1.

    >>> BundleShuffle(8, seed=0, bundle_ratio=0.25).at(0, range(8)) // 2
    array([0, 0, 1, 1, 2, 2, 3, 3])
    """

    samples: int
    seed: int = 0
    bundle_ratio: float = 0.1
    alternate: bool = True
    _shuffle: BlockShuffle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_seed(self.seed)
        ratio: object = self.bundle_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < float(ratio) <= 1:
            raise ConfigError(
                f"bundle_ratio is {self.bundle_ratio!r}; it is the size of a bundle relative to the data "
                "set, above 0 and at most 1: 0.1 makes ten bundles, 1 shuffles fully"
            )
        # The decimal that was written counts, not the binary number next to it: 0.1 of 10**12 is 10**11.
        bundle = math.ceil(Fraction(repr(float(self.bundle_ratio))) * self.samples)
        object.__setattr__(self, "_shuffle", BlockShuffle(self.samples, bundle, self.seed))

    @property
    def bundle(self) -> int:
        """Samples per bundle; the last bundle may have fewer."""
        return self._shuffle.block

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        check_epoch(epoch)
        straight = as_ids(positions, self.samples, "positions")
        if self._is_reversed(epoch):
            last = self._last_bundle()
            bundle, offset = np.divmod(straight - last, self.bundle)
            straight = np.where(bundle < 0, straight + (self.samples - last), self._reversed(bundle) + offset)
        return self._shuffle.forward(epoch, straight)

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        check_epoch(epoch)
        straight = self._shuffle.inverse(epoch, as_ids(samples, self.samples, "samples"))
        if not self._is_reversed(epoch):
            return straight
        last = self._last_bundle()
        bundle, offset = np.divmod(straight, self.bundle)
        is_last = straight >= self.samples - last
        return np.where(is_last, straight - (self.samples - last), last + self._reversed(bundle) + offset)

    def _is_reversed(self, epoch: int) -> bool:
        return self.alternate and epoch % 2 == 1 and self.bundle < self.samples

    def _last_bundle(self) -> int:
        return (self.samples - 1) % self.bundle + 1

    def _reversed(self, bundles: NDArray[np.int64]) -> NDArray[np.int64]:
        """First id of the bundle that stands in place of each, all but the last bundle being reversed."""
        before_last = (self.samples - 1) // self.bundle
        return (before_last - 1 - bundles) * self.bundle


@dataclass(frozen=True, slots=True)
class FullShuffle(_OfAll):
    """Shuffle all samples anew each epoch; every permutation as likely as any other.

    samples: F, 1 to 2**62.
    seed: 0 to 2**64 - 1.
    Source: `penstock.plan.bijection`. Measured: docs/decisions/0003-full-shuffle-bijection.md.

    >>> order = FullShuffle(10**12, seed=7)
    >>> order.position_of(3, order.at(3, [0, 999_999_999_999]))
    array([           0, 999999999999])
    """

    samples: int
    seed: int = 0
    _shuffle: BlockShuffle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_seed(self.seed)
        object.__setattr__(self, "_shuffle", BlockShuffle(self.samples, self.samples, self.seed))

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        check_epoch(epoch)
        return self._shuffle.forward(epoch, as_ids(positions, self.samples, "positions"))

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        check_epoch(epoch)
        return self._shuffle.inverse(epoch, as_ids(samples, self.samples, "samples"))


def check_samples(samples: int) -> None:
    """Raise ConfigError unless samples is an integer from 1 to 2**62."""
    if not is_integer(samples) or not 1 <= samples <= LARGEST_SAMPLES:
        raise ConfigError(
            f"samples is {samples!r}; an order needs from 1 to 2**62 samples, an integer: "
            "is the data set empty?"
        )


def check_seed(seed: int) -> None:
    """Raise ConfigError unless seed is an integer from 0 to 2**64 - 1."""
    if not is_integer(seed) or not 0 <= seed < 2**64:
        raise ConfigError(f"seed is {seed!r}; a seed is an integer from 0 to 2**64 - 1: choose another")


def even_from(order: Order) -> int:
    """Return the epoch from which on all have the same length; the largest there is where the order does not tell."""
    return order.even_from if isinstance(order, EvenOrder) else LARGEST_EPOCH


def check_epoch(epoch: int) -> None:
    """Raise ConfigError unless epoch is an integer from 0 to 2**32 - 1."""
    if not is_integer(epoch) or not 0 <= epoch <= LARGEST_EPOCH:
        raise ConfigError(f"epoch is {epoch!r}; epochs count from 0 to 2**32 - 1: check the caller's counter")
