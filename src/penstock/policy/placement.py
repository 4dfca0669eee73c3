"""Which sample lives in which tier, decided once from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.plan import AccessPlan
from penstock.trace.schema import SOURCE


@dataclass(frozen=True, slots=True)
class Placement:
    """A fixed home for some of the samples.

    tier_of: int8[samples], the tier (1 is the first after the staging buffer) that keeps a sample, or SOURCE
        where none does.
    fill_order: int64[placed], the placed samples by their first use.
    """

    tier_of: NDArray[np.int8]
    fill_order: NDArray[np.int64]

    def samples_in(self, tier: int) -> NDArray[np.int64]:
        """Return the ids that `tier` keeps, in filling order."""
        chosen: NDArray[np.int64] = self.fill_order[self.tier_of[self.fill_order] == tier]
        return chosen


def place_by_frequency(
    plan: AccessPlan, rank: int, sizes_bytes: NDArray[np.int64], capacities_bytes: Sequence[int]
) -> Placement:
    """Give the samples that a rank reads most often a place in its fastest tiers.

    Samples are taken by the number of times that `rank` reads them over the run, most first, ties by id; each
    tier takes them in this order until the next one no longer fits. Samples that the rank never reads get no
    place. On one rank every sample of a shuffled epoch is read once per epoch, so no policy, clairvoyant or
    not, hits more often than such a fixed set.

    capacities_bytes: of tier 1, 2, ..., fastest first.
    Source: thesis, section 3.2 (choice by access frequency, filling by first access).
    """
    tier_of = np.full(plan.samples, SOURCE, np.int8)
    if not any(capacities_bytes):
        return Placement(tier_of, np.empty(0, np.int64))
    uses = plan.frequency(rank)
    candidates = np.argsort(-uses, kind="stable")
    candidates = candidates[uses[candidates] > 0]
    begin = 0
    for tier, capacity_bytes in enumerate(capacities_bytes, start=1):
        ends_bytes = np.cumsum(sizes_bytes[candidates[begin:]])
        count = int(np.searchsorted(ends_bytes, capacity_bytes, side="right"))
        tier_of[candidates[begin : begin + count]] = tier
        begin += count
    placed = candidates[:begin]
    first_use = plan.first_use(rank)[placed]
    return Placement(tier_of, placed[np.argsort(first_use, kind="stable")])
