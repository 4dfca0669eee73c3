"""From timed reads to a model of the store: a latency that overlaps, and a curve of what flows past it.

A reader reads one file after the other. Each read first waits the latency L, however many do, and is then *on
the wire*, where what flows depends on how many reads are on it at that moment: r(n) bytes/s for n of them.
With p readers this is the machine-repairman queue (p machines, of which n are broken), whose throughput X(p)
follows from L and r in closed form; here it is turned round, from X(p) to L and r.

L: one reader alone is never disturbed, so its seconds over its bytes lie on the line L + size / r(1). Where
sizes differ too little to see the slope, r(1) is taken to be the best throughput that was seen.

r: p readers have n = X (T - L) / s reads on the wire in the mean (Little's law; T is a read's mean time and s
    the
mean size), and X is close to r(n) once the wire is hardly ever empty. With fewer readers it is empty part of
the time and X says too little about r(n): the excess is what the queue, given the curve found so far, would
show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Curve

# A slope must stand this many standard errors clear of zero, or the best throughput is used in its place.
_CLEAR = 4.0
_ROUNDS = 30
# Points of a curve that lie nearer to each other than this are one point: their order is noise.
_APART = 1.15
# The fewest readers that come this close to the best throughput are enough.
_ENOUGH = 0.97
# Twice the readers got at least this much more: the store is not full yet.
_GROWING = 1.5
# A read of one reader alone that takes longer than so many medians is somebody else's doing.
_MOST_OF_MEDIAN = 5.0
# Of the throughput of the most readers, what a wire that was never full must explain; and in which steps.
_EXPLAINED, _RAISE, _RAISES = 0.99, 1.1, 40


@dataclass(frozen=True, slots=True)
class Level:
    """Reads by a fixed number of readers, each reading again as soon as it is done.

    sizes_bytes: int64[reads], seconds: float64[reads], of each read in the steady part of the measurement.
    bytes_per_second: of all readers together.
    unsteady_reads: how many reads lie before and behind that part.
    """

    readers: int
    sizes_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    bytes_per_second: float
    unsteady_reads: int = 0

    @property
    def reads(self) -> int:
        return len(self.seconds) + self.unsteady_reads

    @property
    def mean_bytes(self) -> float:
        return float(self.sizes_bytes.mean())

    @property
    def mean_seconds(self) -> float:
        return float(self.seconds.mean())


@dataclass(frozen=True, slots=True)
class StoreFit:
    """latency_seconds and `read` as in `SharedStore`; enough_readers reach the best throughput."""

    latency_seconds: float
    read: Curve
    enough_readers: int

    @property
    def best_bytes_per_second(self) -> float:
        return max(rate for _, rate in self.read.points)


def steady_level(
    readers: int, starts: NDArray[np.float64], ends: NDArray[np.float64], sizes_bytes: NDArray[np.int64]
) -> Level:
    """Cut off the beginning, when all readers start at once, and the end, when some have nothing left to do.

    starts, ends: float64[reads], seconds on one clock, in any order; at least one read.
    The first `readers` completions are left out; the rest count up to the last start of a read. Where that
    leaves fewer reads than readers, everything counts. One reader alone is held up by a single read that met another
    client's burst, so each of its reads counts for at most a few times their median, and what it did between them
    for nothing.
    """
    by_end = np.argsort(ends, kind="stable")
    starts, ends, sizes_bytes = starts[by_end], ends[by_end], sizes_bytes[by_end]
    begin = ends[readers - 1] if len(ends) > readers else starts.min()
    counted = (ends > begin) & (ends <= starts.max())
    if counted.sum() < max(readers, 2):
        begin, counted = starts.min(), np.ones(len(ends), dtype=bool)
    seconds = (ends - starts)[counted]
    elapsed = float(ends[counted].max() - begin)
    if readers == 1:
        seconds = np.minimum(seconds, _MOST_OF_MEDIAN * np.median(seconds))
        elapsed = float(seconds.sum())
    rate = float(sizes_bytes[counted].sum()) / elapsed
    return Level(readers, sizes_bytes[counted], seconds, rate, int((~counted).sum()))


def fit_store(levels: Sequence[Level]) -> StoreFit:
    """Return the latency and curve under which each level's throughput is the measured one, nearly.

    levels: by increasing readers, the first with one reader.
    """
    best = max(level.bytes_per_second for level in levels)
    alone = levels[0]
    fastest_alone = _rate_by_size(alone) or _least_rate_behind(levels)
    if not is_still_growing(levels):
        fastest_alone = min(best, fastest_alone)
    # One reader with nothing but its bytes to wait for cannot be slower than it was.
    fastest_alone = max(fastest_alone, alone.mean_bytes / alone.mean_seconds)
    latency = max(0.0, alone.mean_seconds - alone.mean_bytes / fastest_alone)
    most = max(best, fastest_alone)
    enough = next(level.readers for level in levels if level.bytes_per_second >= _ENOUGH * best)

    knots = [[1.0, fastest_alone]]
    owners: list[list[Level]] = [[]]
    for level in levels[1:]:
        on_wire = level.bytes_per_second * (level.mean_seconds - latency) / level.mean_bytes
        if on_wire > _APART * knots[-1][0]:
            knots.append([on_wire, level.bytes_per_second])
            owners.append([level])
        elif owners[-1]:
            owners[-1].append(level)
    users = np.array([knot[0] for knot in knots])
    rates = np.array([knot[1] for knot in knots])
    for _ in range(_ROUNDS):
        for index, group in enumerate(owners):
            if group:
                short = [
                    level.bytes_per_second / _throughput(level, latency, users, rates) for level in group
                ]
                # While the wire is empty nothing flows, so what flows otherwise is at least the throughput.
                least = min(level.bytes_per_second for level in group)
                rates[index] = min(most, max(least, rates[index] * float(np.mean(short))))
    points = zip(users.tolist(), rates.tolist(), strict=True)
    return StoreFit(latency, Curve(tuple(points)), enough)


def is_still_growing(levels: Sequence[Level]) -> bool:
    """Tell whether the most readers were too few to show what limits the store."""
    return len(levels) > 1 and levels[-1].bytes_per_second > _GROWING * levels[-2].bytes_per_second


def _least_rate_behind(levels: Sequence[Level]) -> float:
    """Return the wire's rate where sizes do not show it: the best throughput, unless the wire was never full.

    Then a wire of just that rate would have held up the most readers, and the rate is raised until it does
    not.
    """
    alone, last = levels[0], levels[-1]
    rate = max(level.bytes_per_second for level in levels)
    if not is_still_growing(levels):
        return rate
    for _ in range(_RAISES):
        latency = max(0.0, alone.mean_seconds - alone.mean_bytes / rate)
        explained = _throughput(last, latency, np.array([1.0]), np.array([rate]))
        if explained >= _EXPLAINED * last.bytes_per_second:
            break
        rate *= _RAISE
    return rate


def _rate_by_size(alone: Level) -> float | None:
    """Return bytes/s from how seconds grow with bytes, or None where that cannot be seen.

    Theil and Sen's slope (the median over pairs of reads), as single reads are now and then delayed by
    others.
    """
    reads = min(len(alone.seconds), 400)
    sizes, seconds = alone.sizes_bytes[:reads].astype(np.float64), alone.seconds[:reads]
    first, second = np.triu_indices(reads, 1)
    apart = sizes[second] - sizes[first]
    differ = np.abs(apart) > 0.05 * sizes.mean()
    if reads < 8 or not differ.any():
        return None
    slope = float(np.median((seconds[second] - seconds[first])[differ] / apart[differ]))
    rest = seconds - slope * sizes
    noise = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    standard_error = noise / (float(sizes.std()) * reads**0.5)
    return 1 / slope if slope > _CLEAR * standard_error and slope > 0 else None


def _throughput(
    level: Level, latency: float, users: NDArray[np.float64], rates: NDArray[np.float64]
) -> float:
    """Return bytes/s of a level's readers on a store of that latency and curve.

    The machine-repairman queue with load-dependent service: the chance of n reads on the wire is in
    proportion to L^(p-n) / (p-n)! times the product of s / r(k) over k = 1..n.
    Source: Kleinrock, "Queueing Systems", volume 1, 1975, section 3.8, with a rate of service for each n.
    """
    flowing = np.arange(1, level.readers + 1)
    rate = np.interp(flowing, users, rates)
    if latency == 0:
        return float(rate[-1])
    # From n - 1 to n reads on the wire: one of p - n + 1 waiting ones arrives, and n share what flows.
    steps = np.log((level.readers - flowing + 1) * level.mean_bytes / (latency * rate))
    log_weight = np.concatenate([[0.0], np.cumsum(steps)])
    weight = np.exp(log_weight - log_weight.max())
    return float((weight[1:] * rate).sum() / weight.sum())
