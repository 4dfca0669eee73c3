"""Samples per second by number of threads, batch size and loader, next to what the device delivers in sequence.

A benchmark in the manner of STREAM. Each setting is measured six times, each time on other samples whose pages were
dropped from the page cache before; the first run is left out, and the loaders of a setting take turns. Source: Chien et
al. 2018, sections III.A and IV.A.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.bench.checks import check_repeats, check_shared, installed, rounds
from penstock.bench.loaders import OWN, Pass, RunPass, Setting, Work, files_of, loader_named
from penstock.errors import ConfigError, DataError
from penstock.measure.calibrate import CACHE_REMARKS, PageCache, page_cache_of
from penstock.measure.file_rates import SequentialMaximum, measure_maximum
from penstock.measure.pagecache import drop_files
from penstock.measure.spread import Spread
from penstock.plan import FullShuffle
from penstock.ranks import Ranks
from penstock.store import Numeric, Source
from penstock.units import format_count, format_rate, format_seconds

REPEATS = 6
#: Passes to begin with: the first loads and compiles, the second says how fast one thread is.
_PROBES = 2
#: Samples looked at to find whether they are pictures.
_LOOKED_AT = 16
#: The second reading of the same samples is this many times as fast as the first where a store keeps what it sent.
_CACHED_FACTOR = 1.5
#: A rate this much above the device's own is no device's.
_ABOVE_MAXIMUM = 1.1
_MAXIMUM_SECONDS = 10.0
#: Runs end early where all would take this many times as long as they were to: the machine is busy, or a loader slow.
_MOST_OVERTIME = 2.0

Done = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InputResult:
    """What one loader reached. threads: of each rank. batch_size: over all ranks. skipped: samples, over all runs."""

    loader: str
    work: Work
    threads: int
    batch_size: int
    samples_per_second: Spread
    skipped: int


@dataclass(frozen=True, slots=True)
class InputRates:
    """All results. samples: of each run. left_out: what was not measured and why. cautions: what to distrust."""

    results: tuple[InputResult, ...]
    samples: int
    ranks: int
    bytes_per_sample: float
    page_cache: PageCache
    maximum: SequentialMaximum | None
    left_out: tuple[str, ...]
    cautions: tuple[str, ...]

    def best(self, work: Work, loader: str = OWN) -> InputResult | None:
        """Return the fastest of a loader; None where it has none of this work."""
        own = [each for each in self.results if (each.work, each.loader) == (work, loader)]
        return max(own, key=lambda each: each.samples_per_second.median, default=None)

    @property
    def meaning(self) -> str:
        """What the figures mean for a training, in a sentence."""
        best = self.best(Work.DECODE) or self.best(Work.READ)
        if best is None:
            return "Nothing was measured."
        rate = best.samples_per_second.median
        step = best.batch_size / rate
        what = "its input" if best.work is Work.DECODE else "its reads"
        return (
            f"A training that uses up to {rate:,.0f} samples/s need not wait for {what} here: a step of "
            f"{best.batch_size} samples that computes for {format_seconds(step)} or longer hides it, with "
            f"{format_count(best.threads, 'thread')}"
            + (f" on each of {self.ranks} ranks." if self.ranks > 1 else ".")
        )


@dataclass(frozen=True, slots=True)
class InputSettings:
    """What is measured of a source.

    threads: numbers of readers, each with as many decoders; worker processes of a DataLoader. batch_sizes: over all
        ranks; reads alone are measured with the first. peers: names of `penstock.bench.loaders.PEERS`.
    samples: of each run, over all ranks; as many as the time allows unless given.
    on_error: whether a sample that cannot be read or decoded ends the measurement, or is skipped and counted.
    """

    threads: Sequence[int]
    batch_sizes: Sequence[int]
    works: Sequence[Work] = tuple(Work)
    peers: Sequence[str] = ()
    samples: int | None = None
    on_error: Literal["raise", "skip"] = "skip"

    def of(self, works: Sequence[Work]) -> list[tuple[Work, int, int]]:
        """Return what each loader is measured by, in order: the work, threads, samples of a batch."""
        return [
            (work, count, size)
            for work in works
            for size in (self.batch_sizes if work is Work.DECODE else self.batch_sizes[:1])
            for count in self.threads
        ]

    @property
    def runs(self) -> int:
        """How many runs all settings and loaders take at most, each once."""
        return len(self.of(self.works)) * (1 + len(self.peers))


def measure_input(
    source: Source,
    asked: InputSettings,
    *,
    max_seconds: float = 120.0,
    repeats: int = REPEATS,
    beside: str | None = None,
    is_beside_asked: bool = True,
    ranks: Ranks,
    done: Done = lambda _: None,
) -> InputRates:
    """Measure a source by all settings, each `repeats` times, or twice where all would take twice the time.

    beside: a folder on the source's file system where a file without a name may be written: the device's maximum.
        is_beside_asked: False leaves the maximum out where that folder does not allow it.
    ranks: of the job; each calls this, and all read at the same time, each its own samples.
    done: is called after each run, with a line.
    Raises: ConfigError for fewer samples than a batch, a batch that the ranks cannot share equally, less than two
        repeats; DataError if no sample can be read, and with on_error="raise" for the first that cannot.
    """
    largest = max(asked.batch_sizes)
    end = time.perf_counter() + _MOST_OVERTIME * max_seconds
    _check(source, asked.batch_sizes, repeats, ranks.size)
    opened, left_out = installed(asked.peers, loader_named)
    measured, reason = _works_of(source, asked.works)
    left_out += reason
    bench = _Bench(source, ranks, asked.on_error)
    maximum, doubts, reason = _maximum(beside, is_beside_asked, ranks)
    left_out += reason
    seconds_a_sample = {work: bench.probe(work, largest // ranks.size) for work in measured}
    settings, samples = asked.of(measured), asked.samples
    if samples is None:
        one_of_each = sum(seconds_a_sample[work] for work, _, _ in settings) * (1 + len(opened)) * repeats
        samples = int(max_seconds / one_of_each) * ranks.size
    a_run = samples_of_run(samples, largest, len(source))
    doubts += bench.look_for_a_cache(a_run, max(asked.threads))
    results: list[InputResult] = []
    for number, (work, count, size) in enumerate(settings):
        setting = Setting(source, work, count, size // ranks.size, asked.on_error)
        seconds = (end - time.perf_counter()) / (len(settings) - number)
        found, missing = bench.measure(setting, [OWN, *opened], a_run, repeats, seconds, done)
        left_out += [each for each in missing if each not in left_out]
        results += [InputResult(name, work, count, size, *each) for name, each in found.items()]
    page_cache = page_cache_of(bench.shares)
    bytes_per_sample = float(source.sizes_bytes.mean())
    if any(each.samples_per_second.repeats < repeats - 1 for each in results):
        doubts.append(
            f"Time was up before every setting had {repeats} runs: the spread is of fewer. More --seconds, or fewer "
            "settings, give them all."
        )
    doubts += doubts_about(results, page_cache, bytes_per_sample, maximum)
    if bench.begun_again:
        doubts.append(
            f"The data set has {len(source):,} samples; some were read more than once, which a server may cache."
        )
    return InputRates(
        tuple(results),
        a_run,
        ranks.size,
        bytes_per_sample,
        page_cache,
        maximum,
        tuple(left_out),
        tuple(doubts),
    )


def samples_of_run(wanted: int, batch_size: int, available: int) -> int:
    """Return the samples of a run: complete batches, two at least where there are as many samples.

    >>> samples_of_run(1000, 64, 10**6), samples_of_run(3, 64, 10**6), samples_of_run(1000, 64, 100)
    (960, 128, 64)
    """
    return min(max(wanted, 2 * batch_size), available) // batch_size * batch_size


def is_cached(first_seconds: float, again_seconds: float) -> bool:
    """Return whether samples that were read a second time came so much faster that something kept them."""
    return first_seconds > _CACHED_FACTOR * again_seconds


def doubts_about(
    results: Sequence[InputResult],
    page_cache: PageCache,
    bytes_per_sample: float,
    maximum: SequentialMaximum | None,
) -> list[str]:
    """Return what makes results doubtful, a sentence each."""
    found = [] if page_cache is PageCache.COLD else [CACHE_REMARKS[page_cache]]
    best = max((each.samples_per_second.median for each in results), default=0.0) * bytes_per_sample
    if maximum is not None and best > _ABOVE_MAXIMUM * maximum.read.median:
        found.append(
            f"CAUTION: {format_rate(best)} is more than one stream reads in sequence "
            f"({format_rate(maximum.read.median)}): the device serves several streams faster, or a cache was warm."
        )
    skipped = sum(each.skipped for each in results)
    if skipped:
        found.append(
            f"CAUTION: {format_count(skipped, 'sample')} could not be read or decoded and were skipped: penstock "
            "check lists them."
        )
    return found


def _check(source: Source, batch_sizes: Sequence[int], repeats: int, ranks: int) -> None:
    check_repeats(repeats, "measure")
    for size in batch_sizes:
        if size > len(source):
            raise ConfigError(
                f"the source has {format_count(len(source), 'sample')}, fewer than a batch of {size}: give a smaller "
                "batch size, or more samples"
            )
        check_shared(size, ranks)


def _works_of(source: Source, works: Sequence[Work]) -> tuple[list[Work], list[str]]:
    """Return the works that these samples allow, and what to say of the others."""
    from penstock.measure.calibrate import decode_with  # OpenCV comes with it

    if Work.DECODE not in works:
        return list(works), []
    reason = "they are numbers, not pictures" if isinstance(source, Numeric) else ""
    if not reason:
        from penstock.bench.loaders import TRANSFORMS

        decode = decode_with(TRANSFORMS)
        for sample in range(min(_LOOKED_AT, len(source))):
            try:
                decode(source.read(sample))
            except DataError as error:
                reason = str(error)
            else:
                return list(works), []
    rest: list[Work] = [work for work in works if work is not Work.DECODE]
    if not rest:
        raise DataError(f"the samples cannot be decoded: {reason}; --work read reads alone")
    return rest, [f"decoding was left out: {reason}"]


def _maximum(
    beside: str | None, is_asked: bool, ranks: Ranks
) -> tuple[SequentialMaximum | None, list[str], list[str]]:
    """Return the device's maximum, measured by rank 0 alone, what to distrust about it, and why there is none."""
    found: list[Any] = [None, [], []]

    def measure() -> None:
        try:
            maximum, doubts = measure_maximum(beside or "", _MAXIMUM_SECONDS, time.perf_counter)
        except DataError as error:
            if is_asked:
                raise
            found[2] = [f"the device's maximum was left out: {error}"]
        else:
            found[:2] = maximum, list(doubts)

    if beside is not None:
        ranks.on_rank_zero("measuring the device's maximum", measure)
    return found[0], found[1], found[2]


class _Bench:
    """Draws fresh samples, drops their pages, and has all ranks run at once. Used by one thread."""

    def __init__(self, source: Source, ranks: Ranks, on_error: Literal["raise", "skip"]) -> None:
        self._source, self._ranks, self._on_error = source, ranks, on_error
        seed = ranks.on_rank_zero("drawing the samples", lambda: int(np.random.default_rng().integers(2**31)))
        self._order = FullShuffle(len(source), int(seed))
        self._position = 0
        #: Of the files that were looked at after dropping, what stayed in the page cache.
        self.shares: list[float | None] = []
        #: Whether samples had to be read a second time.
        self.begun_again = False

    def probe(self, work: Work, local_batch: int) -> float:
        """Return the seconds that one thread takes for a sample."""
        seconds = 0.0
        setting = Setting(self._source, work, 1, local_batch, self._on_error)
        for _ in range(_PROBES):
            with loader_named(OWN)(setting) as run:
                each = self._run(run, self._draw(local_batch * self._ranks.size))
            seconds = each.seconds / max(1, each.samples) * self._ranks.size
        return seconds

    def look_for_a_cache(self, samples: int, threads: int) -> list[str]:
        """Read samples twice, and return what to say where the second time was much faster."""
        ids = self._draw(samples)
        with loader_named(OWN)(Setting(self._source, Work.READ, threads, 1, self._on_error)) as run:
            first, again = (self._run(run, ids) for _ in range(2))
        if not is_cached(first.seconds / first.samples, again.seconds / again.samples):
            return []
        factor = first.seconds / first.samples / (again.seconds / again.samples)
        return [
            f"CAUTION: samples came {factor:.1f} times as fast when they were read again: something beyond this host's "
            "page cache keeps them (warm), and a data set that was read before is faster than a new one."
        ]

    def measure(
        self, setting: Setting, names: Sequence[str], samples: int, repeats: int, seconds: float, done: Done
    ) -> tuple[dict[str, tuple[Spread, int]], list[str]]:
        """Return of each loader its rate and how many samples it skipped; and what to say of those left out.

        seconds: for the runs of all loaders, of which there are `repeats`, or fewer but two at least.
        """
        passes: dict[str, list[Pass]] = {}
        left_out: list[str] = []
        with ExitStack() as stack:
            runs: dict[str, RunPass] = {}
            for name in names:
                try:
                    runs[name] = stack.enter_context(loader_named(name)(setting))
                except ConfigError as error:
                    left_out.append(f"{name} was left out: {error}")
            for number in rounds(repeats, seconds, self._ranks):
                for name in list(runs)[:: -1 if number % 2 else 1]:
                    passes.setdefault(name, []).append(self._run(runs[name], self._draw(samples)))
                    done(f"{name}, {setting.work}, {format_count(setting.threads, 'thread')}")
        return {
            name: (
                Spread.after_first([each.samples / each.seconds for each in passes[name]]),
                sum(each.skipped for each in passes[name]),
            )
            for name in runs
        }, left_out

    def _draw(self, count: int) -> NDArray[np.int64]:
        """Return this rank's of the next so many samples of a permutation, of one after another."""
        places = (self._position + np.arange(count)) % len(self._source)
        self._position += count
        self.begun_again |= self._position > len(self._source)
        return self._order.at(0, places)[self._ranks.rank :: self._ranks.size]

    def _run(self, run: RunPass, ids: NDArray[np.int64]) -> Pass:
        """Return what all ranks did at the same time: their samples, in the seconds of the slowest."""
        self.shares += drop_files(files_of(self._source, ids))
        self._ranks.all_gather("beginning a run", None)
        # A rank that works is heard of, however long it takes, and one that fails is named on all of them.
        every = [Pass(*each) for each in self._ranks.gather_then_decide("a run", lambda: run(ids.tolist()))]
        return Pass(
            sum(each.samples for each in every),
            max(each.seconds for each in every),
            sum(each.skipped for each in every),
        )
