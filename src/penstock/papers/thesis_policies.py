"""The thesis's loading policies in the form that its tables were computed with.

Where that form is what `penstock.policy.loading` has, it is used. Source: R. Böhringer, ETH Zürich 2020, section 4.1.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.plan.frequency import uses_of
from penstock.plan.random import derive_key, draw_uniform
from penstock.policy.loading import (
    DeepIO,
    Fill,
    Ids,
    Job,
    LbannStore,
    Loading,
    LoadingPolicy,
    LowerBound,
    Naive,
    NotSupported,
    Staging,
    equal_parts,
    ids_that_fit,
)
from penstock.policy.placement import fill_in_order


@dataclass(frozen=True, slots=True)
class PublishedFrequency:
    """HDMLP: what a rank reads most often, then what it never reads if it has space for that.

    The list is cut into pieces as large as the staging buffer, the first tier, ..., each a class too early, and each
    piece is sorted by first use; tiers are filled along the list. Staging reads no other rank's tiers.
    """

    name: str = "frequency"

    def prepare(self, job: Job) -> Loading:
        fills = []
        for rank in range(job.ranks):
            uses = uses_of(job.plan, rank)
            order = np.argsort(-uses.counts, kind="stable")
            is_unread = np.ones(job.plan.samples, np.bool_)
            is_unread[uses.samples] = False
            unread = np.flatnonzero(is_unread)
            listed = np.concatenate([uses.samples[order], unread])
            never = np.full(unread.size, job.strings[rank].size)
            in_pieces = _sort_pieces(job, listed, np.concatenate([uses.first[order], never]))
            listed = listed[in_pieces]
            tiers = fill_in_order(job.sizes_bytes[listed], job.capacities_bytes())
            kept = listed[: tiers.size]
            fills += [Fill(rank, int(tier), kept[tiers == tier]) for tier in np.unique(tiers)]
        return Loading(fills)


def _sort_pieces(job: Job, listed: Ids, first_use: Ids) -> Ids:
    """Return the order of the list with its pieces sorted, each as large as a storage class and one sample more."""
    pieces, begin = [], 0
    ends_bytes = np.cumsum(job.sizes_bytes[listed])
    for storage_class in job.machine.storage:
        before = int(ends_bytes[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends_bytes, before + storage_class.capacity_bytes, side="right")) + 1
        pieces.append(begin + np.argsort(first_use[begin:end], kind="stable"))
        begin = min(end, listed.size)
    return np.concatenate([*pieces, np.arange(begin, listed.size)])


@dataclass(frozen=True, slots=True)
class PublishedParallelStaging:
    """Parallel data staging: an own part in tier 2, then copies of ids below it; trains on its own part alone.

    Rank 0 copies none.
    """

    name: str = "parallel-staging"

    def prepare(self, job: Job) -> Loading:
        capacity_bytes = job.tier(2, self.name)
        key = derive_key(job.seed, "parallel staging order")
        fills, strings = [], []
        for rank, (begin, end) in enumerate(equal_parts(job.plan.samples, job.ranks)):
            own = ids_that_fit(np.arange(begin, end), job.sizes_bytes, capacity_bytes)
            left_bytes = capacity_bytes - int(job.sizes_bytes[own].sum())
            copied = ids_that_fit(np.arange(begin), job.sizes_bytes, left_bytes)
            fills.append(Fill(rank, 2, own, before_training=True))
            fills.append(Fill(rank, 2, copied, "peers", before_training=True))
            if not own.size:
                raise NotSupported(
                    f"{self.name}: storage class 2 of rank {rank} holds no sample: make it larger"
                )
            draws = draw_uniform(key, rank, np.arange(job.strings[rank].size), 1)[:, 0]
            strings.append(own[(draws * own.size).astype(np.int64)])
        return Loading(fills, strings, stages_from_store=False)


@dataclass(frozen=True, slots=True)
class PublishedLbann:
    """LBANN's dynamic store: what a rank reads first is read from the store by threads of its own as well."""

    name: str = "lbann-dynamic"

    def prepare(self, job: Job) -> Loading:
        loading = LbannStore().prepare(job)
        fills = [replace(fill, origin="store") for fill in loading.fills]
        return replace(loading, fills=fills, stages_from_store=False)


@dataclass(frozen=True, slots=True)
class PublishedLocality:
    """Locality-aware loading whose exchange never takes effect: a contiguous part in tier 2."""

    name: str = "locality-aware"

    def prepare(self, job: Job) -> Loading:
        capacity_bytes = job.tier(2, self.name)
        fills = []
        for rank, (begin, end) in enumerate(equal_parts(job.plan.samples, job.ranks)):
            own = ids_that_fit(np.arange(begin, end), job.sizes_bytes, capacity_bytes)
            fills.append(Fill(rank, 2, own, before_training=True))
        return Loading(fills, stages_from_peers=True)


#: Those of the tables, in the order of their rows.
POLICIES: tuple[LoadingPolicy, ...] = (
    LowerBound(),
    Naive(),
    PublishedFrequency(),
    Staging(),
    DeepIO(),
    DeepIO(opportunistic=True),
    PublishedParallelStaging(),
    PublishedLbann(),
    LbannStore(preloading=True),
    PublishedLocality(),
)
