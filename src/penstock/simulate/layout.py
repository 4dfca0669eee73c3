"""How the shared store should be read, scattered or in sequence, and whether the data set should be written anew.

A rank knows what it will read, so it may read a *window* ahead, as many of its next samples as its staging buffer
holds, and within a window the order of the reads is free. Four ways to read it:

    samples      each sample by itself, wherever it lies
    ranges       samples of the window that lie side by side in one read
    sieving      the same, and holes between them are read and thrown away where that costs less than another read
    collective   the ranks' windows as one: each reads its part of what they cover together and sends the others theirs

and two ways to write the data set anew before the training: *packed* (files of one sample each, one after the other
in the order of their ids) and *rewritten* (in the order in which the ranks read in the first epoch). Source: thesis,
chapter 7, which asks the question; sieving and collective reads are those of ROMIO (Thakur, Gropp & Lusk, "Data sieving
and collective I/O in ROMIO", Frontiers '99).

Windows and neighbours are counted from the plan. No tier keeps anything here: this is what the wire of the shared store
carries if every epoch is read from it, by all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy.merge import count_paying_holes, cut_windows

Ids = NDArray[np.int64]
How = Literal["samples", "ranges", "sieving", "collective"]
Name = Literal["samples", "ranges", "sieving", "collective", "packed", "rewritten"]

#: Reads that are counted one by one; beyond them, counts of a part stand for the whole.
_COUNTED_READS = 20_000_000


@dataclass(frozen=True, slots=True)
class Reading:
    """One epoch read in one way.

    how: of the four ways.
    requests: reads of the shared store, of all ranks. read_bytes: what they bring, holes included.
    seconds: until the slowest rank has read its epoch.
    """

    how: How
    requests: float
    read_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LayoutOption:
    """One way to lay the data set out and to read it.

    name: of the module's list; the ways to read are options of the layout as it is found.
    epochs: of the run.
    once_seconds: of writing the data set anew, however many epochs there are; 0 where it stays.
    first_epoch: its reading. later_epoch: of each other epoch, the mean of those that were counted; None if there
        is but one epoch.
    stored_bytes: that the store holds in addition to the data set as found.
    break_even_epochs: the fewest epochs from which on this is quicker than the best way to read the data set as found;
        None where it never is, and for that way itself.
    """

    name: Name
    epochs: int
    once_seconds: float
    first_epoch: Reading
    later_epoch: Reading | None
    stored_bytes: int
    break_even_epochs: int | None

    @property
    def run_seconds(self) -> float:
        """Of writing and of reading all epochs."""
        return self.seconds_after(self.epochs)

    def seconds_after(self, epochs: int) -> float:
        """Return the time of writing and reading if the run had so many epochs."""
        later = self.first_epoch if self.later_epoch is None else self.later_epoch
        return self.once_seconds + self.first_epoch.seconds + (epochs - 1) * later.seconds


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """Ways to lay out and to read the data set of one plan on one machine.

    options: as found first, in the order of the module's list.
    epochs, counted_epochs: of the plan, and those of them that were counted. counted_share: of each such epoch's steps.
    sample_bytes: mean size. window_samples: mean length of a rank's window.
    neighbour_share: share of a rank's samples that continue a range of the window, as found, in (0, 1).
    request_seconds: what a request costs a rank in addition to its bytes. sequential_bytes_per_second: of one rank.
    hole_bytes: the largest hole that is read over rather than skipped, as far as the wire is what counts.
    is_packed: whether samples lie side by side as found.
    """

    options: tuple[LayoutOption, ...]
    epochs: int
    counted_epochs: int
    counted_share: float
    sample_bytes: float
    window_samples: float
    neighbour_share: float
    request_seconds: float
    sequential_bytes_per_second: float
    hole_bytes: float
    is_packed: bool

    @property
    def best(self) -> LayoutOption:
        """The option of the shortest run; of equal ones the first, which does less."""
        return min(self.options, key=lambda option: option.run_seconds)

    def option(self, name: Name) -> LayoutOption:
        """Return an option by its name.

        Raises: ConfigError listing those that were compared.
        """
        for option in self.options:
            if option.name == name:
                return option
        known = ", ".join(option.name for option in self.options)
        raise ConfigError(f"{name!r} was not compared; the options are {known}")


def compare_layouts(
    plan: AccessPlan,
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
    *,
    is_packed: bool = True,
    window_bytes: int | None = None,
    counted_reads: int = _COUNTED_READS,
    done: Callable[[int], None] = lambda _: None,
) -> LayoutComparison:
    """Compare the ways to lay out and to read a data set.

    sizes_bytes: int64[F], as stored.
    is_packed: whether the samples lie one after the other in the order of their ids, as in shards or one array; else
        each is a file of its own, next to which nothing lies.
    window_bytes: how far a rank reads ahead; by default its staging buffer, and at least one sample.
    counted_reads: of all ranks, that are counted one by one; of longer runs the first epochs, at least two, and of
        those the first steps.
    done: called with how many of the epochs of `counted_epochs` are done.
    Raises: ConfigError if a size is missing or the window has no bytes.
    """
    if sizes_bytes.shape != (plan.samples,):
        raise ConfigError(
            f"sizes_bytes has the shape {sizes_bytes.shape}; the plan has {plan.samples:,} samples"
        )
    window_bytes = machine.storage[0].capacity_bytes if window_bytes is None else window_bytes
    if window_bytes < 1:
        raise ConfigError(f"window_bytes is {window_bytes}; a rank reads at least a sample ahead: raise it")
    return _Comparison(plan, machine, sizes_bytes, window_bytes, counted_reads).compare(is_packed, done)


def count_epochs(plan: AccessPlan, counted_reads: int = _COUNTED_READS) -> int:
    """Return how many epochs `compare_layouts` counts: at least two, or all."""
    longest = max(plan.length(epoch) for epoch in range(min(plan.epochs, 2)))
    return min(plan.epochs, max(2, counted_reads // max(1, longest)))


@dataclass(frozen=True, slots=True)
class Ranges:
    """What some windows need, as ranges of the store.

    ranges: of samples side by side. nbytes: of the samples.
    holes: int64[ranges less windows], bytes between a range and the next of its window, ascending.
    """

    ranges: int
    nbytes: int
    holes: Ids


def count_ranges(places: Ids, windows: Ids, begins: Ids) -> Ranges:
    """Count the ranges that cover windows.

    places: int64[reads], where each sample lies: its rank among all samples in the order of the store.
    windows: int64[reads], which window each read belongs to. A sample that a window has twice is read once.
    begins: int64[F + 1], byte at which the sample of each place begins, and the end of the last.
    """
    # One more than there are places, so that the last of a window and the first of the next are never neighbours.
    span = begins.size
    keys = np.sort(windows * span + places)
    keys = keys[np.diff(keys, prepend=-1) != 0]
    places = keys % span
    is_break = np.diff(keys) != 1
    before, after = places[:-1][is_break], places[1:][is_break]
    is_hole = np.diff(keys // span)[is_break] == 0
    holes = (begins[after] - begins[before + 1])[is_hole]
    return Ranges(
        int(is_break.sum()) + min(1, keys.size),
        int((begins[places + 1] - begins[places]).sum()),
        np.sort(holes),
    )


@dataclass(frozen=True, slots=True)
class _Epoch:
    """A counted part of an epoch: each rank's samples and their windows, in the order in which it reads them."""

    strings: list[Ids]
    windows: list[Ids]
    #: The whole epoch relative to the part.
    scale: float


class _Comparison:
    """The counts and prices of one comparison."""

    def __init__(
        self, plan: AccessPlan, machine: Machine, sizes_bytes: Ids, window_bytes: int, counted_reads: int
    ) -> None:
        self._plan = plan
        self._machine = machine
        self._sizes = sizes_bytes
        self._window_bytes = window_bytes
        self._total_bytes = int(sizes_bytes.sum())
        self._mean_bytes = self._total_bytes / sizes_bytes.size
        self._counted_epochs = count_epochs(plan, counted_reads)
        reads_of_an_epoch = max(plan.batch_size, counted_reads // self._counted_epochs)
        self._counted_steps = reads_of_an_epoch // plan.batch_size

    def compare(self, is_packed: bool, done: Callable[[int], None]) -> LayoutComparison:
        plan, machine = self._plan, self._machine
        in_order = np.arange(plan.samples)
        rewritten = in_order
        found: list[dict[How, Reading]] = []
        anew: list[dict[How, Reading]] = []
        windows = neighbours = reads = 0
        for number in range(self._counted_epochs):
            epoch = self._epoch(number)
            if number == 0:
                rewritten = self._places_in_order_of(epoch)
            readings, ranges = self._readings(epoch, in_order)
            found.append(readings)
            anew.append(self._readings(epoch, rewritten)[0])
            windows += sum(int(rank[-1]) + 1 for rank in epoch.windows if rank.size)
            reads += sum(string.size for string in epoch.strings)
            neighbours += sum(string.size for string in epoch.strings) - ranges
            done(number + 1)
        ways: list[How] = [how for how in found[0] if is_packed or how == "samples"]
        as_found = [self._option(how, 0.0, how, found, 0, None) for how in ways]
        best = min(as_found, key=lambda option: option.run_seconds)
        options = list(as_found)
        if not is_packed:
            options.append(self._best("packed", self._pack_seconds(), found, self._total_bytes, best))
        once = self._rewrite_seconds() if is_packed else self._pack_seconds()
        options.append(self._best("rewritten", once, anew, self._total_bytes, best))
        clients = plan.ranks
        request, rate = (
            machine.source_request_seconds(clients, self._mean_bytes),
            machine.sequential_rate(clients),
        )
        return LayoutComparison(
            options=tuple(options),
            epochs=plan.epochs,
            counted_epochs=self._counted_epochs,
            counted_share=min(1.0, self._counted_steps / max(1, plan.steps(0))),
            sample_bytes=self._mean_bytes,
            window_samples=reads / max(1, windows),
            neighbour_share=neighbours / max(1, reads),
            request_seconds=request,
            sequential_bytes_per_second=rate,
            hole_bytes=request * rate,
            is_packed=is_packed,
        )

    # Counting

    def _epoch(self, number: int) -> _Epoch:
        plan = self._plan
        steps = plan.steps(number)
        counted = min(steps, self._counted_steps)
        strings, windows = [], []
        for rank in range(plan.ranks):
            string = plan.stream(rank, number, 0, int(plan.local_batch_sizes(rank, number)[:counted].sum()))
            strings.append(string)
            windows.append(cut_windows(self._sizes[string], self._window_bytes))
        positions = plan.first_position(number, counted)
        return _Epoch(strings, windows, plan.length(number) / max(1, positions))

    def _places_in_order_of(self, epoch: _Epoch) -> Ids:
        """Return where each sample lies when the windows of all ranks follow each other: int64[F].

        First the first window of each rank, rank by rank, then the second ones: what is read at one time lies together,
        and each window is one range. What the counted part does not read follows at the end.
        """
        ranks = np.repeat(np.arange(len(epoch.strings)), [string.size for string in epoch.strings])
        samples, windows = np.concatenate(epoch.strings), np.concatenate(epoch.windows)
        in_time = samples[np.lexsort((ranks, windows))]
        first = np.sort(np.unique(in_time, return_index=True)[1])
        places = np.full(self._plan.samples, -1, np.int64)
        places[in_time[first]] = np.arange(first.size)
        places[places < 0] = np.arange(first.size, self._plan.samples)
        return places

    def _readings(self, epoch: _Epoch, places: Ids) -> tuple[dict[How, Reading], int]:
        """Return the epoch's reading in each way from samples that lie so, and the number of ranges of all ranks."""
        at = np.empty_like(places)
        at[places] = np.arange(places.size)
        begins = np.concatenate(([0], np.cumsum(self._sizes[at])))
        of_rank = [
            count_ranges(places[string], windows, begins)
            for string, windows in zip(epoch.strings, epoch.windows, strict=True)
        ]
        readings: dict[How, Reading] = {
            "samples": self._sum("samples", epoch, [self._scattered(string) for string in epoch.strings]),
            "ranges": self._sum(
                "ranges", epoch, [self._priced(each.ranges, each.nbytes) for each in of_rank]
            ),
            "sieving": self._sum("sieving", epoch, [self._sieved(each) for each in of_rank]),
        }
        if self._plan.ranks > 1:
            readings["collective"] = self._collective(epoch, places, begins)
        return readings, sum(each.ranges for each in of_rank)

    def _collective(self, epoch: _Epoch, places: Ids, begins: Ids) -> Reading:
        ranks = self._plan.ranks
        together = count_ranges(places[np.concatenate(epoch.strings)], np.concatenate(epoch.windows), begins)
        # Each rank takes the same part of the bytes of each window, and so of its holes.
        windows, holes = together.ranges - together.holes.size, together.holes[::ranks]
        part = Ranges(windows + holes.size, -(-together.nbytes // ranks), holes)
        requests, nbytes, seconds = self._sieved(part)
        needed = max(int(self._sizes[string].sum()) for string in epoch.strings)
        exchange = needed * (ranks - 1) / ranks / self._machine.network_bytes_per_second
        scale = epoch.scale
        return Reading(
            "collective", scale * requests * ranks, scale * nbytes * ranks, scale * max(seconds, exchange)
        )

    # Pricing: (requests, bytes, seconds) of one rank

    def _scattered(self, string: Ids) -> tuple[float, float, float]:
        return self._priced(string.size, int(self._sizes[string].sum()))

    def _priced(self, requests: float, nbytes: float) -> tuple[float, float, float]:
        seconds = self._machine.source_seconds(requests, nbytes, self._plan.ranks, self._mean_bytes)
        return requests, nbytes, seconds

    def _sieved(self, ranges: Ranges) -> tuple[float, float, float]:
        """Return the price with as many holes read over as pays."""
        count = count_paying_holes(
            ranges.ranges,
            ranges.nbytes,
            ranges.holes,
            lambda requests, nbytes: self._priced(requests, nbytes)[2],
        )
        return self._priced(ranges.ranges - count, ranges.nbytes + int(ranges.holes[:count].sum()))

    def _sum(self, how: How, epoch: _Epoch, of_rank: list[tuple[float, float, float]]) -> Reading:
        requests, nbytes, seconds = zip(*of_rank, strict=True)
        return Reading(
            how, epoch.scale * sum(requests), epoch.scale * sum(nbytes), epoch.scale * max(seconds)
        )

    # Writing anew

    def _pack_seconds(self) -> float:
        """Each rank reads its part of the samples one by one and writes them one after the other."""
        ranks = self._plan.ranks
        part = self._total_bytes / ranks
        _, _, reading = self._priced(self._plan.samples / ranks, part)
        return reading + part / self._machine.source_write_rate(ranks)

    def _rewrite_seconds(self) -> float:
        """The cheaper of reading scattered and writing in sequence, and passes that do both in sequence.

        One such pass will do where all ranks' memory holds the data set, which they then exchange; else two, the first
        of which writes buckets that fit: a distribution sort.
        """
        ranks, machine = self._plan.ranks, self._machine
        part = self._total_bytes / ranks
        a_pass = part / machine.sequential_rate(ranks) + part / machine.source_write_rate(ranks)
        exchange = part * (ranks - 1) / ranks / machine.network_bytes_per_second
        in_sequence = max(a_pass, exchange) if self._fits_memory() else 2 * a_pass
        return min(self._pack_seconds(), in_sequence)

    def _fits_memory(self) -> bool:
        memory = sum(each.capacity_bytes for each in self._machine.storage if each.is_memory)
        return self._total_bytes <= self._plan.ranks * memory

    # Putting together

    def _best(
        self, name: Name, once: float, epochs: list[dict[How, Reading]], stored: int, as_found: LayoutOption
    ) -> LayoutOption:
        """Return the option that reads samples side by side in the way that is best for the run."""
        return min(
            (self._option(name, once, how, epochs, stored, as_found) for how in epochs[0]),
            key=lambda option: option.run_seconds,
        )

    def _option(
        self,
        name: Name,
        once: float,
        how: How,
        epochs: list[dict[How, Reading]],
        stored: int,
        as_found: LayoutOption | None,
    ) -> LayoutOption:
        first = epochs[0][how]
        later = _mean([readings[how] for readings in epochs[1:]])
        later_seconds = first.seconds if later is None else later.seconds
        found = None if as_found is None else as_found.run_seconds / self._plan.epochs
        return LayoutOption(
            name=name,
            epochs=self._plan.epochs,
            once_seconds=once,
            first_epoch=first,
            later_epoch=later,
            stored_bytes=stored,
            break_even_epochs=None
            if found is None
            else _break_even(once, first.seconds, later_seconds, found),
        )


def _mean(readings: list[Reading]) -> Reading | None:
    if not readings:
        return None
    requests, nbytes, seconds = (
        sum(values) / len(readings)
        for values in zip(*((each.requests, each.read_bytes, each.seconds) for each in readings), strict=True)
    )
    return Reading(readings[0].how, requests, nbytes, seconds)


def _break_even(once: float, first: float, later: float, found: float) -> int | None:
    """Return the fewest epochs after which once + first + (epochs - 1) later is below epochs * found.

    A gain of less than a thousandth per epoch is taken for none: counts of different epochs differ by more.
    """
    if once + first < found:
        return 1
    if later >= found or later > 0.999 * found:
        return None
    return math.floor((once + first - later) / (found - later)) + 1
