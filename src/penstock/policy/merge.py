"""Which of the next due samples are read together, where many of them lie in one file, chunk or shard.

A source says where each sample lies: in which *unit*, and from which byte on. Samples of one unit that lie side by
side, or with a small hole between them, are one read; which holes are read over follows from what reads cost:

    due order      7  2  9  4  1  8
    unit 0         [1][2]..[4]               one read: 2, 1, 4 (its hole is small)
    unit 1         [7][8].............[9]    two reads: 7, 8 and 9

Source: data sieving in ROMIO (Thakur, Gropp & Lusk, "Data sieving and collective I/O in ROMIO", Frontiers '99).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from penstock.policy.decisions import FIRST, OFFSET, STEP, UNIT

Ids = NDArray[np.int64]
#: Seconds that so many requests of so many bytes in all take, as `Machine.source_seconds`. Convex: the next request, or
#: the next byte, costs no less than the one before.
Price = Callable[[float, float], float]
#: A read of this size takes long enough that a request costs next to nothing, and is short compared with an epoch.
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Where samples lie.

    units: int64[n], numbers of the source's files, chunks or shards; -1 for a sample that cannot be read.
    offsets, lengths: int64[n], in bytes, from the unit's begin.
    """

    units: Ids
    offsets: Ids
    lengths: Ids

    @property
    def table(self) -> Ids:
        """int64[n, 2], contiguous, units next to offsets: what these are columns of, and a copy where they are not."""
        table = self.units.base
        if table is not None and table is self.offsets.base and table.shape == (self.units.size, 2):
            found: Ids = table
            if np.shares_memory(self.units[:1], found[:1, :1]):
                return found
        return np.column_stack((self.units, self.offsets))

    def of(self, which: Ids | slice) -> Extents:
        """Return the extents of some of the samples, by their positions."""
        return Extents(self.units[which], self.offsets[which], self.lengths[which])


@dataclass(frozen=True, slots=True, eq=False)
class ExtentRuns:
    """Where all samples of a source lie, in runs of samples that follow each other in a unit at even steps.

    table: int64[runs, 4]: unit, offset of the first sample, which that is, and bytes from each sample to the next.
    lengths: int64[samples].
    """

    table: Ids
    lengths: Ids

    @property
    def units(self) -> Ids:
        """int64[runs]."""
        return self.table[:, UNIT]

    def of(self, which: Ids) -> Extents:
        """Return the extents of some of the samples, by their positions."""
        runs = self.table[np.searchsorted(self.table[:, FIRST], which, side="right") - 1]
        offsets = runs[:, OFFSET] + (which - runs[:, FIRST]) * runs[:, STEP]
        return Extents(runs[:, UNIT], offsets, self.lengths[which])


#: Of all samples of a source.
AllExtents = Extents | ExtentRuns


def runs_of(units: Ids, offsets: Ids, first: int) -> Ids:
    """Return runs of samples, of which the first one is `first`, as rows of `ExtentRuns.table`."""
    steps = np.diff(offsets)
    begins = np.ones(units.size, bool)
    begins[1:] = units[1:] != units[:-1]
    # The step to a unit's second sample is the run's, whatever it is; where a later one is another, a run begins.
    begins[2:] |= ~begins[1:-1] & (steps[1:] != steps[:-1])
    at = np.flatnonzero(begins)
    is_alone = np.diff(at, append=units.size) == 1
    step = np.where(is_alone, 0, np.append(steps, 0)[at])
    return np.column_stack((units[at], offsets[at], first + at, step))


@dataclass(frozen=True, slots=True, eq=False)
class MergedRead:
    """A read of consecutive bytes.

    unit, begin, end: what is read: the bytes [begin, end) of a unit.
    which: int64[m], which of the samples lie there, as positions among those that were asked for, in the order of their
        offsets. extents: theirs.
    """

    unit: int
    begin: int
    end: int
    which: Ids
    extents: Extents

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, eq=False)
class MergedReads(Sequence[MergedRead]):
    """Reads in the order of their earliest sample, as arrays: a `MergedRead` is made when it is asked for.

    units, begins, ends: int64[reads], as in `MergedRead`.
    firsts, lasts: int64[reads], which part of `which` and `extents` are its samples: [first, last).
    which: int64[n]. extents: n, in the same order.
    """

    units: Ids
    begins: Ids
    ends: Ids
    firsts: Ids
    lasts: Ids
    which: Ids
    extents: Extents

    def __len__(self) -> int:
        return self.units.size

    @overload
    def __getitem__(self, index: int) -> MergedRead: ...
    @overload
    def __getitem__(self, index: slice) -> list[MergedRead]: ...
    def __getitem__(self, index: int | slice) -> MergedRead | list[MergedRead]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        unit, begin, end = int(self.units[index]), int(self.begins[index]), int(self.ends[index])
        part = slice(int(self.firsts[index]), int(self.lasts[index]))
        return MergedRead(unit, begin, end, self.which[part], self.extents.of(part))


def merge_reads(extents: Extents, price: Price, most_bytes: int = MOST_BYTES) -> MergedReads:
    """Merge the reads of samples; return the reads in the order of their earliest sample.

    extents: of the samples, in the order in which they are due.
    price: of the reads; it decides how many holes are read over.
    most_bytes: no read of several samples is larger.

    Each sample whose unit is not negative is in exactly one read, and a read begins and ends with bytes of its samples.
    Complexity: O(n log n).
    """
    known = np.flatnonzero(extents.units >= 0)
    order = known[np.lexsort((extents.offsets[known], extents.units[known]))]
    sorted_extents = extents.of(order)
    begins, ends = sorted_extents.offsets, sorted_extents.offsets + sorted_extents.lengths
    firsts = _cut(_firsts(sorted_extents.units, begins, ends, price), begins, ends, most_bytes)
    if not firsts.size:
        return MergedReads(firsts, firsts, firsts, firsts, firsts, order, sorted_extents)
    in_time = np.argsort(np.minimum.reduceat(order, firsts))
    lasts, until = np.append(firsts[1:], order.size)[in_time], np.maximum.reduceat(ends, firsts)[in_time]
    firsts = firsts[in_time]
    return MergedReads(
        sorted_extents.units[firsts], begins[firsts], until, firsts, lasts, order, sorted_extents
    )


def no_dearer(price: Price, request_seconds: float, bytes_per_second: float) -> Price:
    """Return the price where a request was seen to take no more than this.

    bytes_per_second: of one read, for its bytes.
    """
    if request_seconds >= price(1, 0):
        return price
    return lambda requests, nbytes: requests * request_seconds + nbytes / bytes_per_second


def count_paying_holes(requests: float, nbytes: float, holes: Ids, price: Price) -> int:
    """Return over how many holes, the smallest ones, it pays to read.

    requests, nbytes: without any. holes: int64[h], bytes of each, ascending.

    Of so many holes the smallest ones are the best, so the price is convex in their number.
    """
    read_over = np.concatenate(([0], np.cumsum(holes)))

    def priced(count: int) -> float:
        return price(requests - count, nbytes + int(read_over[count]))

    least, most = 0, holes.size
    while least < most:
        middle = (least + most) // 2
        if priced(middle + 1) < priced(middle):
            least = middle + 1
        else:
            most = middle
    return least


def largest_paying_hole(sample_bytes: float, price: Price) -> int:
    """Return how large a hole between two samples may be, at most, that it pays to read over. 0: none does."""
    least, most = 0, MOST_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        if price(1, 2 * sample_bytes + middle) < price(2, 2 * sample_bytes):
            least = middle
        else:
            most = middle - 1
    return least


def _firsts(units: Ids, begins: Ids, ends: Ids, price: Price) -> Ids:
    """Return int64[reads]: where reads begin in sorted samples, of which none is too large."""
    if not units.size:
        return np.empty(0, np.int64)
    is_new_unit = np.diff(units) != 0
    reached = _reached(is_new_unit, ends)
    holes = begins[1:] - reached[:-1]
    is_hole = ~is_new_unit & (holes > 0)
    is_break = is_new_unit | is_hole
    places = np.flatnonzero(is_hole)
    if places.size:
        places = places[np.argsort(holes[places], kind="stable")]
        edges = np.flatnonzero(is_break)
        first, last = np.concatenate(([0], edges + 1)), np.append(edges, units.size - 1)
        nbytes = int((reached[last] - begins[first]).sum())
        is_break[places[: count_paying_holes(first.size, nbytes, holes[places], price)]] = False
    return np.concatenate(([0], np.flatnonzero(is_break) + 1))


def _reached(is_new_unit: NDArray[np.bool_], ends: Ids) -> Ids:
    """Return the furthest end among the samples of the unit so far. Extents may overlap."""
    if (is_new_unit | (np.diff(ends) >= 0)).all():
        return ends
    pieces = np.split(ends, np.flatnonzero(is_new_unit) + 1)
    return np.concatenate([np.maximum.accumulate(piece) for piece in pieces])


def _cut(firsts: Ids, begins: Ids, ends: Ids, most_bytes: int) -> Ids:
    """Return where reads begin once those are cut that are too large."""
    if not firsts.size:
        return firsts
    lasts = np.append(firsts[1:], ends.size)
    too_large = (np.maximum.reduceat(ends, firsts) - begins[firsts] > most_bytes) & (lasts - firsts > 1)
    cuts: list[int] = []
    for first, last in zip(firsts[too_large].tolist(), lasts[too_large].tolist(), strict=True):
        reached = np.maximum.accumulate(ends[first:last])
        cut = first
        while reached[-1] - begins[cut] > most_bytes and cut + 1 < last:
            fitting = first + int(np.searchsorted(reached, begins[cut] + most_bytes, side="right"))
            cut = max(cut + 1, fitting)
            cuts.append(cut)
    return np.union1d(firsts, np.array(cuts, np.int64)) if cuts else firsts


def cut_windows(sizes_bytes: Ids, window_bytes: int) -> Ids:
    """Return the window of each sample of an access sequence, greedily: int64, from 0 on.

    A window holds as many samples as fit; one that is larger than the window is a window by itself.
    """
    ends = np.cumsum(sizes_bytes)
    starts = [0]
    while starts[-1] < ends.size:
        begin = starts[-1]
        read = int(ends[begin - 1]) if begin else 0
        starts.append(max(begin + 1, int(np.searchsorted(ends, read + window_bytes, side="right"))))
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))
