"""What a read from each place is expected to cost, as tables: the machine's model, which `decisions` corrects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.policy import decisions


def cost_tables(
    machine: Machine, readers: int, sample_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what `decisions.State` calls rate, float64[tiers + 2, readers + 1], and costs (of one rank).

    sample_bytes: mean size of a sample, for which the store's seconds per request are exact.
    Column 0 of rate is as column 1. What a worker's own read of the source takes is unknown until it was tried.

    Source: thesis, equations 3.5 and 3.7, with reads that share what a place delivers.
    """
    places = len(machine.storage) + 1
    counts = [1, *range(1, max(readers, 1) + 1)]
    rate, costs = np.full((places, len(counts)), np.inf), np.zeros((places, 3))
    costs[0] = machine.source.latency_seconds, 0.0, decisions.UNKNOWN
    request_seconds = machine.ranks * machine.source.request_seconds
    for column, reads in enumerate(counts):
        bare = machine.source_rate(machine.ranks, reads) * reads
        rate[0, column] = sample_bytes / (sample_bytes / bare + request_seconds) if request_seconds else bare
        for tier in range(1, places - 1):
            rate[tier + 1, column] = machine.local_rate(tier, reads) * reads
    for tier in range(1, places - 1):
        latency = machine.storage[tier].latency_seconds
        # What is in memory is decoded where it lies.
        wire = 0.0 if machine.storage[tier].backend == "memory" else sample_bytes / rate[tier + 1, 1]
        costs[tier + 1] = latency, 0.0, latency + wire
    return rate, costs
