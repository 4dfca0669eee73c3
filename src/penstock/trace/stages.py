"""How long each stage of an epoch took, call by call, as histograms of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.trace.schema import JOBS_MEMORY, NO_PEER, SOURCE, STAGING, Kind, Spans

#: Seconds from which on each bucket counts: bucket b >= 1 has what took EDGES[b - 1] or longer, and less than EDGES[b].
#: Bucket 0 has what took less than a microsecond. Four to each doubling: a quantile is known to 19 %, up to 12 days.
EDGES = 1e-6 * 2.0 ** (np.arange(161) / 4)
# As plain numbers, see `penstock.trace.metrics`.
_LAST_KIND, _DECODE = max(Kind).value, Kind.DECODE.value


def describe_place(place: int) -> str:
    """Return what the place of a read or a hit is called where no machine names it."""
    named = {
        SOURCE: "the source",
        STAGING: "staging",
        1: "memory",
        JOBS_MEMORY: "memory shared with other jobs",
    }
    return named.get(place, f"tier {place}")


class Stage(NamedTuple):
    """A kind of span and the place its bytes came from; `of_peers` where that was a tier of another rank."""

    kind: Kind
    place: int
    of_peers: bool = False

    @classmethod
    def of_number(cls, number: int) -> Self:
        """Return the stage of a number: kind << 9 | place + 128 << 1 | of_peers, which sorts as stages do."""
        return cls(Kind(number >> 9), ((number >> 1) & 0xFF) - 128, bool(number & 1))


@dataclass(frozen=True, slots=True)
class Durations:
    """What the calls of a stage took.

    calls, samples, bytes: how many spans there were, and what they stand for.
    seconds, slowest_seconds: of all calls together, and of the slowest.
    counts: calls in each bucket of `EDGES`, only buckets that have any.

    >>> Durations(3, 3, 0, 0.203, 0.2, {40: 2, 71: 1}).quantile(0.5)
    0.001024
    """

    calls: int
    samples: int
    bytes: int
    seconds: float
    slowest_seconds: float
    counts: Mapping[int, int]

    def quantile(self, share: float) -> float:
        """Return seconds that at least this share of the calls took less than, or the slowest took; 0 without calls.

        It is the upper edge of a bucket, at most 19 % too long.
        """
        needed, seen = share * self.calls, 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= needed:
                edge = float(EDGES[bucket]) if bucket < EDGES.size else self.slowest_seconds
                return min(edge, self.slowest_seconds)
        return self.slowest_seconds

    def __add__(self, other: Durations) -> Durations:
        counts = dict(self.counts)
        for bucket, calls in other.counts.items():
            counts[bucket] = counts.get(bucket, 0) + calls
        return Durations(
            self.calls + other.calls,
            self.samples + other.samples,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            max(self.slowest_seconds, other.slowest_seconds),
            counts,
        )


def stage_durations(spans: Spans) -> dict[int, dict[Stage, Durations]]:
    """Sum spans up by epoch and stage, kinds and places ascending; kinds that nobody knows are left out. O(n log n)."""
    is_known = spans["kind"] <= _LAST_KIND
    if not is_known.all():
        spans = spans[is_known]
    place_of_peer = (spans["place"].astype(np.int64) + 128) << 1 | (spans["peer"] != NO_PEER)
    stages, stage, _ = distinct(spans["kind"].astype(np.int64) << 9 | place_of_peer)
    epochs, epoch, _ = distinct(spans["epoch"].astype(np.int64))
    keys, group, calls = distinct(epoch * stages.size + stage)
    seconds = spans["end"] - spans["start"]
    total = np.bincount(group, seconds, keys.size)
    slowest = np.zeros(keys.size)
    np.maximum.at(slowest, group, seconds)
    # In integers: float64 weights of bincount would round above 2**53 bytes.
    samples, sizes = np.zeros((2, keys.size), np.int64)
    np.add.at(samples, group, spans["samples"].astype(np.int64))
    np.add.at(sizes, group, np.where(spans["kind"] == _DECODE, 0, spans["bytes"]))
    cells, _, of_cell = distinct(group * (EDGES.size + 1) + np.searchsorted(EDGES, seconds, "right"))
    counts: list[dict[int, int]] = [{} for _ in keys]
    for cell, count in zip(cells.tolist(), of_cell.tolist(), strict=True):
        counts[cell // (EDGES.size + 1)][cell % (EDGES.size + 1)] = count
    names = [Stage.of_number(each) for each in stages.tolist()]
    found: dict[int, dict[Stage, Durations]] = {}
    for row, each in enumerate(keys.tolist()):
        found.setdefault(int(epochs[each // stages.size]), {})[names[each % stages.size]] = Durations(
            int(calls[row]),
            int(samples[row]),
            int(sizes[row]),
            float(total[row]),
            float(slowest[row]),
            counts[row],
        )
    return found


def distinct(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp]]:
    """Return the different integers, ascending; for each key, which of them it is; and how often each comes.

    As np.unique does, which sorts; here they are counted where they lie close together, as epochs and stages do.

    >>> [found.tolist() for found in distinct(np.array([7, 5, 7]))]
    [[5, 7], [1, 0, 1], [1, 2]]
    """
    least, most = (int(keys.min()), int(keys.max())) if keys.size else (0, -1)
    width = most - least + 1
    if width > 4 * keys.size + 8192:
        values, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
        return values, which, counts
    every = np.bincount(keys - least, minlength=width)
    offsets = np.flatnonzero(every)
    number = np.zeros(width, np.intp)
    number[offsets] = np.arange(offsets.size)
    return offsets + least, number[keys - least], every[offsets]
