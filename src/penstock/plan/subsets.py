"""A data set that is dealt out once: each rank keeps to samples of its own, and shuffles them alone."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.random import derive_key
from penstock.plan.splits import Uniform


@dataclass(frozen=True, slots=True)
class OwnSubset:
    """What one rank has to itself: so many samples, and the seed by which it shuffles them."""

    samples: int
    seed: int


def own_subset(samples: int, seed: int, rank: int, ranks: int) -> OwnSubset:
    """Return a rank's subset, its size as even as ceil(F / N) allows; the last ranks take the rest, perhaps nothing.

    samples: F, of the data set. seed: of the job; each rank has its own of it. ranks: N.
    Source: Lee & Bahn, "Analyzing data reference characteristics of deep learning workloads for improving buffer
        cache performance", Applied Sciences 2023, section 4.2.

    >>> [own_subset(10, seed=0, rank=rank, ranks=4).samples for rank in range(4)]
    [3, 3, 3, 1]
    """
    return OwnSubset(Uniform().size(rank, ranks, samples), derive_key(seed, f"node {rank} of {ranks}"))
