"""From where to take a sample: the performance model, corrected by what reads really took."""

from __future__ import annotations

from penstock.machine import Machine
from penstock.trace.schema import SOURCE

_MEMORY_OF_A_READ = 1 / 16


class FetchCosts:
    """Expected seconds of a fetch from each place that holds a sample.

    The model is the machine's (thesis, equations 3.5 to 3.7). Each place has one correction factor, the ratio
    of observed to modelled seconds, forgotten exponentially over about 16 reads.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._correction: dict[int, float] = {}

    def modelled_seconds(self, origin: int, nbytes: int, in_flight: int) -> float:
        """Return what the machine alone predicts for one of `in_flight` concurrent reads."""
        machine = self._machine
        if origin == SOURCE:
            rate = machine.source_rate(machine.ranks, in_flight)
            return machine.source.latency_seconds + nbytes / rate
        return machine.storage[origin].latency_seconds + nbytes / machine.local_rate(origin, in_flight)

    def seconds(self, origin: int, nbytes: int, in_flight: int = 1) -> float:
        """Return the expected seconds of a read, observations included.

        origin: SOURCE or a local tier's number.
        """
        return self.modelled_seconds(origin, nbytes, in_flight) * self._correction.get(origin, 1.0)

    def observe(self, origin: int, nbytes: int, seconds: float, in_flight: int = 1) -> None:
        """Learn from a read that took `seconds` while `in_flight` reads, itself included, shared the place."""
        modelled = self.modelled_seconds(origin, nbytes, in_flight)
        if not modelled:  # an empty sample of a store without latency teaches nothing
            return
        ratio = seconds / modelled
        known = self._correction.get(origin)
        self._correction[origin] = ratio if known is None else known + _MEMORY_OF_A_READ * (ratio - known)

    def prefers_tier(self, tier: int, nbytes: int) -> bool:
        """Tell whether a sample that lies in `tier` should be taken from there rather than from the source."""
        return self.seconds(tier, nbytes) <= self.seconds(SOURCE, nbytes)
