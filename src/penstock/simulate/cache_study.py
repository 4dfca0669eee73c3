"""How often the caches of a training job hit: by order, policy, size and number of ranks, next to the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, BundleShuffle, Sequential
from penstock.plan.orders import check_samples, check_seed
from penstock.plan.parse_order import OrderName
from penstock.plan.subsets import OwnSubset, own_subset
from penstock.simulate.bundles import best_hit_share, expected_hit_share
from penstock.simulate.caches import check_eviction, hit_shares, share_of

Ids = NDArray[np.int64]
Ratios = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that read a data set, each through a cache of its own.

    samples: F. epochs: E; caches are empty before the first. ranks: N.
    own_subsets: each rank keeps to a subset of its own and shuffles it (`penstock.plan.subsets`). Otherwise all ranks
        share one order of all samples and each reads its slice of every batch, so that a rank meets a sample again
        after N epochs on average.
    batch_size: B, over all ranks; only with a shared order does it matter.
    """

    samples: int
    epochs: int
    ranks: int = 1
    own_subsets: bool = False
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_seed(self.seed)
        AccessPlan(Sequential(self.samples), self.batch_size, self.epochs, self.ranks)
        if not self.own_samples(self.ranks - 1):
            raise ConfigError(
                f"ranks is {self.ranks}; of {self.samples} samples the last rank's share is nothing: use fewer ranks"
            )

    def own_samples(self, rank: int) -> int:
        """Return the size of the rank's subset, or of a share as large where the order is shared."""
        return self._own(rank).samples

    def _own(self, rank: int) -> OwnSubset:
        return own_subset(self.samples, self.seed, rank, self.ranks)

    def cache_samples(self, rank: int, cache_share: float) -> int:
        """Return the samples that fit into a cache of so large a share of the rank's, an integer."""
        return share_of(self.own_samples(rank), cache_share)

    def string(self, order: OrderName, rank: int) -> Ids:
        """Return the samples that the rank reads over the run: int64[reads]; ids count from 0 within a subset.

        Raises: ConfigError for a file of ids that leaves out or repeats samples in an epoch, or with own subsets.
        """
        if order.kind == "file":
            return self._string_of_file(order, rank)
        if self.own_subsets and self.ranks > 1:
            own = self._own(rank)
            return AccessPlan(order.of(own.samples, own.seed), own.samples, self.epochs).string(0)
        shared = order.of(self.samples, self.seed)
        return AccessPlan(shared, self.batch_size, self.epochs, self.ranks).string(rank)

    def _string_of_file(self, order: OrderName, rank: int) -> Ids:
        if self.own_subsets and self.ranks > 1:
            raise ConfigError(
                f"order is {order.name!r}, of all samples; ranks with subsets of their own shuffle them: use one or "
                "the other"
            )
        plan = AccessPlan(order.of(self.samples, self.seed), self.batch_size, self.epochs, self.ranks)
        for epoch in range(self.epochs):
            ids = plan.sample_at(epoch, np.arange(plan.length(epoch)))
            if not np.array_equal(np.sort(ids), np.arange(self.samples)):
                raise ConfigError(
                    f"{order.name}: epoch {epoch} does not read each of the {self.samples:,} samples once, as the "
                    "bound has it: give samples as the order has them, or replay the requests as a recording"
                )
        return plan.string(rank)

    def bound(self, cache_shares: Sequence[float]) -> Ratios:
        """Return the share of reads that any caches of these sizes hit at most, ranks helping each other or not.

        Source: `penstock.simulate.bundles.best_hit_share`. With a shared order it is reached only by ranks that know
        what the others hold: F + (E - 1) max(0, F - sum of the caches) reads have to come from the data's home.
        """
        if not self.own_subsets:
            sums = [
                sum(self.cache_samples(rank, share) for rank in range(self.ranks)) for share in cache_shares
            ]
            return np.array([best_hit_share(self.samples, caches, self.epochs) for caches in sums])
        return self._mean_over_ranks(
            [
                [best_hit_share(own, self.cache_samples(rank, share), self.epochs) for share in cache_shares]
                for rank, own in enumerate(map(self.own_samples, range(self.ranks)))
            ]
        )

    def expected(self, order: OrderName, cache_shares: Sequence[float]) -> Ratios | None:
        """Return the hit ratio to expect of LRU, by formula; None where there is none.

        For shuffles within bundles, a full one being one bundle, read by one rank or by own subsets: for F large,
        (E - 1) / E (c + (1 - c) ln(1 - c)) under a full shuffle. Source: `penstock.simulate.bundles`.
        """
        if order.kind in ("sequential", "file") or (self.ranks > 1 and not self.own_subsets):
            return None
        ratios = []
        for rank in range(self.ranks):
            own = self.own_samples(rank)
            bundle = BundleShuffle(own, bundle_ratio=order.bundle_ratio or 1.0).bundle
            ratios.append(
                [
                    expected_hit_share(own, self.cache_samples(rank, share), self.epochs, bundle)
                    for share in cache_shares
                ]
            )
        return self._mean_over_ranks(ratios)

    def _mean_over_ranks(self, ratios: Sequence[Sequence[float]]) -> Ratios:
        weights = [self.own_samples(rank) for rank in range(self.ranks)]
        mean: Ratios = np.average(np.array(ratios), axis=0, weights=weights)
        return mean


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Hit ratios by cache size.

    order: of the epochs; "" for a string from a file.
    hit_share: float64[sizes], of all ranks' reads together. lowest, highest: float64[sizes], of single ranks.
    """

    order: str
    eviction: str
    hit_share: Ratios
    lowest: Ratios
    highest: Ratios


def job_curve(job: Job, order: OrderName, eviction: str, cache_shares: Sequence[float]) -> Curve:
    """Return how often the job's caches hit, by size.

    cache_shares: of each rank's share of the samples, 0 or more.
    """
    check_eviction(eviction)
    check_shares(cache_shares)
    strings = (job.string(order, rank) for rank in range(job.ranks))
    reads, ratios = [], []
    for rank, string in enumerate(strings):
        sizes = [job.cache_samples(rank, share) for share in cache_shares]
        reads.append(string.size)
        ratios.append(hit_shares(string, sizes, eviction))
    each = np.array(ratios)
    return Curve(
        order.name, eviction, np.average(each, axis=0, weights=reads), each.min(axis=0), each.max(axis=0)
    )


def string_curve(
    references: ArrayLike, eviction: str, sizes: Sequence[int], *, sizes_bytes: ArrayLike | None = None
) -> Curve:
    """Return how often one cache hits on a string, by size: in objects, or bytes where sizes_bytes are given."""
    ratios = hit_shares(references, sizes, eviction, sizes_bytes=sizes_bytes)
    return Curve("", eviction, ratios, ratios, ratios)


def check_shares(cache_shares: Sequence[float]) -> None:
    """Raise ConfigError unless these are sizes of caches relative to something."""
    for share in cache_shares:
        if not 0 <= share < math.inf:
            raise ConfigError(f"a cache's relative size is {share}; it is 0 or more: 0.3 is 30 %")
