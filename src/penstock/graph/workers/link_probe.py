"""What sending takes between two workers: the time of chains of hops, long and short, small and large."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.graph.model.graph import Edge, Graph
from penstock.policy.graph_placement import USUAL_BYTES_PER_SECOND, USUAL_LATENCY_SECONDS

#: Of tensors, float32: the first one's hop is a latency; the next gives the rate where its hop takes so long, else the
#: one after it does. And how many hops a long chain has more than one of two: the difference has no request of the
#: client and no answer.
_COUNTS, _MORE_HOPS, _ENOUGH_SECONDS = (1, 1 << 14, 1 << 18), (20, 4, 4), 5e-3
_REPEATS = 5
#: Memory is not copied faster.
_MOST_BYTES_PER_SECOND = 1e11


class LinkProbe:
    """A graph whose runs send tensors to and fro between each two workers."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.graph = Graph()
        self._chains = {
            pair: [
                (self._chain(pair, count, 2), self._chain(pair, count, 2 + more))
                for count, more in zip(_COUNTS, _MORE_HOPS, strict=True)
            ]
            for pair in itertools.combinations(tasks, 2)
        }

    def _chain(self, pair: tuple[str, str], count: int, hops: int) -> Edge:
        with self.graph.on_device(f"{pair[0]}/device:cpu:0"):
            end: Edge = self.graph.add("Zeros", dtype="float32", shape=[count])
        for hop in range(hops):
            with self.graph.on_device(f"{pair[(hop + 1) % 2]}/device:cpu:0"):
                end = self.graph.add("Identity", end)
        return end

    def measure(
        self, run: Callable[..., Any], clock: Callable[[], float] = time.perf_counter
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the latency and the bytes a second between each two workers; the usual ones where noise hides them.

        run: of a session over the graph.
        """
        found = {}
        for pair, chains in self._chains.items():
            hops = zip(chains, _MORE_HOPS, strict=True)
            latency, latency_noise = _hop_seconds(run, clock, *next(hops))
            rate = USUAL_BYTES_PER_SECOND
            for count, hop in zip(_COUNTS[1:], hops, strict=True):
                seconds, noise = _hop_seconds(run, clock, *hop)
                seconds -= latency
                if seconds > noise + latency_noise:
                    rate = min(4 * count / seconds, _MOST_BYTES_PER_SECOND)
                    if seconds > _ENOUGH_SECONDS:
                        break
            found[pair] = (latency if latency > latency_noise else USUAL_LATENCY_SECONDS, rate)
        return found


def _hop_seconds(
    run: Callable[..., Any], clock: Callable[[], float], chains: Sequence[Edge], more_hops: int
) -> tuple[float, float]:
    """Return what each further hop takes, and how far that may be off. chains: the short one, and the long one."""
    least, noise = [], 0.0
    for end in chains:
        run(targets=[end])
        took = []
        for _ in range(_REPEATS):
            begin = clock()
            run(targets=[end])
            took.append(clock() - begin)
        least.append(min(took))
        noise += statistics.median(took) - min(took)
    return max(0.0, (least[1] - least[0]) / more_hops), noise / more_hops
