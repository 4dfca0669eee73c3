"""What a read from each place is expected to cost, as a table: the machine's model, which `decisions` corrects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.policy import decisions


def cost_tables(
    machine: Machine, readers: int, sample_bytes: float, *, maps_peers: bool = False
) -> NDArray[np.float64]:
    """Return the floats of one rank's rows, as `decisions.LATENCY` and the columns after it: float64[2 tiers + 2, n].

    sample_bytes: mean size of a sample, for which the store's seconds per request are exact.
    maps_peers: other ranks' tiers are memory that this rank maps, and cost what its own do.
    The rate of 0 reads is that of 1. What a worker's own read of the source takes is unknown until it was tried.

    Source: thesis, equations 3.5 to 3.7, with reads that share what a place delivers.
    """
    tiers = len(machine.storage) - 1
    places = 2 * tiers + 2
    counts = [1, *range(1, max(readers, 1) + 1)]
    costs = np.zeros((places, decisions.RATES + len(counts)))
    costs[:, decisions.LEAST_CORRECTION] = 1.0
    rate = costs[:, decisions.RATES :]
    rate[1] = np.inf
    costs[0, decisions.LATENCY] = machine.source.latency_seconds
    costs[0, decisions.WORKER_SECONDS] = decisions.UNKNOWN
    request_seconds = machine.ranks * machine.source.request_seconds
    costs[0, decisions.REQUEST] = request_seconds / sample_bytes
    for column, reads in enumerate(counts):
        bare = machine.source_rate(machine.ranks, reads) * reads
        rate[0, column] = sample_bytes / (sample_bytes / bare + request_seconds) if request_seconds else bare
        for tier in range(1, tiers + 1):
            rate[tier + 1, column] = machine.local_rate(tier, reads) * reads
            rate[tiers + tier + 1, column] = machine.remote_rate(tier, reads) * reads
    for tier in range(1, tiers + 1):
        latency = machine.storage[tier].latency_seconds
        # What is in memory is decoded where it lies.
        wire = 0.0 if machine.storage[tier].is_memory else sample_bytes / rate[tier + 1, 1]
        costs[tier + 1, decisions.LATENCY] = latency
        costs[tier + 1, decisions.WORKER_SECONDS] = latency + wire
        costs[tiers + tier + 1, decisions.LATENCY] = latency
        costs[tiers + tier + 1, decisions.WORKER_SECONDS] = decisions.UNKNOWN
    if maps_peers:
        costs[tiers + 2 :] = costs[2 : tiers + 2]
    return costs
