"""Measuring, in seconds, what this machine's store, memory and decoder deliver."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.cpus import available_cpus, memory_limit_bytes
from penstock.loader.transforms import Scratch, compile_pipeline
from penstock.loader.transforms.pipeline import Transform
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.evidence import LEAST_SAMPLES, reads_needed, seconds_needed, weigh
from penstock.measure.file_rates import Access, MeasuredCurve
from penstock.measure.fit import Level, fit_store, is_still_growing, steady_level
from penstock.measure.in_threads import Clock, repeat_until, run_together
from penstock.measure.memory_rates import COPIED_BYTES, copier, thread_counts
from penstock.measure.pagecache import cached_share, drop_cached
from penstock.measure.spread import Spread
from penstock.plan.random import derive_key, generator_for
from penstock.store import FileBacked, Source, open_source
from penstock.store.files import read_file_into
from penstock.store.patterns import Paths
from penstock.store.remote import objects_in
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.validate import check_above_zero

Decode = Callable[[bytes], object]
#: called with what has been measured, one line of text each
Progress = Callable[[str], None]

_READERS = (1, 2, 4, 8, 16, 32, 64)
# Of the time that the caller gives; the rest is the source's. There one reader alone decides on the latency, so it
# has two levels' time.
_MEMORY_SHARE, _DECODE_SHARE = 0.1, 0.2
# Of what was read within less than this, the report says that it is a moment's speed.
_FEW_SECONDS = 1.0
_MOST_READS = 4096
_PROBED_FILES = 32
_DECODED_SAMPLES = 64
_DECODED_BYTES = 64_000_000
_STAGING_MEGABYTES = 1000


class PageCache(StrEnum):
    """Where the bytes of the files that were read lay at that moment."""

    COLD = "cold"
    WARM = "warm"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine and the measurements it was made from.

    levels: one for each number of readers that read enough.
    not_measured: numbers of readers with too few reads to count, for want of time.
    page_cache: of the files at the time of reading; unknown where samples are not files of this host, or are files of
        which the kernel does not say it to this user.
    unreadable: reads that failed; a sample may be tried once for each level.
    """

    machine: Machine
    levels: tuple[Level, ...]
    page_cache: PageCache
    unreadable: int
    not_measured: tuple[int, ...] = ()
    #: Of samples by number of readers, where they were read several times over; else empty.
    curves: tuple[MeasuredCurve, ...] = ()

    def to_toml(self, more: Sequence[str] = ()) -> str:
        """Return the machine's TOML under a comment that says what was measured, and how far to trust it.

        more: lines of the comment, about other places than the source.
        """
        reads = sum(level.reads for level in self.levels)
        mean_bytes = float(np.concatenate([level.sizes_bytes for level in self.levels]).mean())
        lines = [
            f"Measured by penstock calibrate from {reads:,} samples of {format_bytes(mean_bytes)} in the mean.",
            CACHE_REMARKS[self.page_cache],
        ]
        clients = self.machine.source.clients
        if clients is None or len(clients.points) == 1:  # no ranks read side by side
            lines.append(
                "One client was measured; that all clients share its best rate (source.clients) is the worst case."
            )
        read_seconds = sum(level.reads * level.mean_bytes / level.bytes_per_second for level in self.levels)
        if read_seconds < _FEW_SECONDS:
            lines.append(
                f"CAUTION: all of this was read within {format_seconds(read_seconds)}, so that other users of the "
                "store may have changed the rates: give more --seconds, or a folder with more samples."
            )
        if self.unreadable:
            lines.append(f"{self.unreadable} reads failed and were left out.")
        if is_still_growing(self.levels):
            lines.append(
                "More readers would have got more: the store's limit was not reached, its rate is a guess."
            )
        if self.not_measured:
            lines.append(
                f"CAUTION: {' and '.join(map(str, self.not_measured))} readers did too few reads to count. The rate "
                f"had stopped growing before, so it is taken for the store's; more --seconds measures them too."
            )
        if not self.machine.knows_decoding:
            lines.append("Decoding was not measured: predictions take it as free.")
        lines += [*(_describe(level) for level in self.levels), *more]
        return "".join(f"# {line}\n" for line in lines) + "\n" + self.machine.to_toml()


CACHE_REMARKS = {
    PageCache.COLD: "The files were not in the page cache (cold): this is the speed of the store itself.",
    PageCache.WARM: "CAUTION: the files stayed in the page cache (warm): the store itself may be slower.",
    PageCache.MIXED: "CAUTION: some files stayed in the page cache (mixed): the store itself may be slower.",
    PageCache.UNKNOWN: "Whether the samples were cached (cold or warm) is unknown: the kernel says it only of files of "
    "this host that are this user's or that this user may write to.",
}


def _describe(level: Level) -> str:
    readers = "1 reader" if level.readers == 1 else f"{level.readers} readers"
    return f"{readers}: {format_rate(level.bytes_per_second)}, {format_seconds(level.mean_seconds)} a read"


def calibrate(
    source: Source | Paths,
    *,
    decode: Decode | None = None,
    max_seconds: float = 10.0,
    progress: bool | None = None,
) -> Machine:
    """Measure the source, the memory and the decoder, and return the machine that they make.

    Random samples are read by 1, 2, 4 to 64 readers. Each reader opens a file, drops it from the page cache, and
    reads it, so that the store itself is measured; the seconds of dropping are subtracted. One client is
    measured, and all clients of the machine share what it saw.

    source: one that is open, or the path or paths of one, see `penstock.open_source`.
    decode: turns a sample's bytes into anything, for example `penstock.measure.calibrate.decode_with` a
        loader's transforms; it is run on all processors at once. Without it decoding is not measured, and
        predictions on the machine take it as free.
    max_seconds: how long to measure, above zero. Reads under way at the end are waited for.
    progress: show a progress bar on stderr; by default where that is a terminal.
    Returns: a machine of one rank, whose staging buffer and memory tier share a quarter of the memory that
        this process may use; the training's own speed is left open.
    Raises: ConfigError if max_seconds is not finite and above zero, if the source has fewer than 8 samples, or
        if max_seconds were too few to find a latency and what limits the store; DataError if no sample can be
        read; what `open_source` raises.
    """
    opened = source if isinstance(source, Source) else open_source(source)
    return measure_machine(opened, decode=decode, max_seconds=max_seconds, progress=progress).machine


def decode_rate(source: Source, transforms: Sequence[Transform], max_seconds: float = 1.0) -> float:
    """Return the bytes, as stored, that one thread decodes in a second while every processor does.

    Some samples are read for it, evenly spaced. Raises: ConfigError if none is small enough, DataError if none is good.
    """
    samples = np.unique(np.linspace(0, len(source) - 1, _DECODED_SAMPLES).astype(np.int64))
    small = samples[source.sizes_bytes[samples] * _DECODED_SAMPLES <= _DECODED_BYTES]
    contents = [source.read(sample) for sample in small.tolist()]
    clock, cpus = time.perf_counter, available_cpus()
    return _measure_decode(decode_with(transforms), contents, cpus, clock() + max_seconds, clock)


def decode_with(transforms: Sequence[Transform]) -> Decode:
    """Return a `decode` that puts a sample through transforms, as a loader's threads would."""
    pipeline = compile_pipeline(transforms, seed=0)
    draws = pipeline.draw(0, np.zeros(1, np.int64))
    threads = threading.local()

    def decode(data: bytes) -> None:
        if not hasattr(threads, "scratch"):
            pipeline.probe(data)
            threads.scratch = Scratch()
            threads.out = np.empty(pipeline.output_shape, pipeline.storage_dtype)
        pipeline.run(data, threads.out, draws, 0, threads.scratch)

    return decode


def measure_machine(
    source: Source,
    *,
    decode: Decode | None = None,
    max_seconds: float = 10.0,
    progress: bool | None = None,
    clock: Clock = time.perf_counter,
    repeats: int = 1,
) -> Calibration:
    """Do as `calibrate` and return the measurements too.

    repeats: how often each number of readers is measured, each time on other samples; the medians count.
    """
    check_above_zero("max_seconds", max_seconds)
    if len(source) < LEAST_SAMPLES:
        raise ConfigError(
            f"the source has {len(source)} samples; a store is measured by at least {LEAST_SAMPLES}: calibrate on a "
            f"larger folder of the same store"
        )
    cpus = available_cpus()
    decode_seconds = 0.0 if decode is None else max_seconds * _DECODE_SHARE
    memory_seconds = max_seconds * _MEMORY_SHARE
    with shown(progress, repeats * len(_READERS) + 3) as report:
        report("reading")
        end = clock() + max_seconds
        passes = []
        for left in range(repeats, 0, -1):
            seconds = end - decode_seconds - memory_seconds - clock()
            passes.append(_measure_source(source, clock() + seconds / left, clock, report))
        tried = [_joined(readers, levels) for readers, levels in _levels_of(passes).items()]
        errors = [error for each in passes for error in each.errors]
        evidence = weigh(tried, passes[0].planned, max_seconds, errors)
        memory = _measure_memory(cpus, min(end - decode_seconds, clock() + memory_seconds), clock)
        report(f"memory: {format_rate(memory.at(cpus))} by {cpus} threads")
        preprocess = math.inf
        if decode is not None:
            until = min(end, clock() + decode_seconds)
            preprocess = _measure_decode(decode, passes[0].contents, cpus, until, clock)
            report(f"decoding: {format_rate(preprocess)} by each of {cpus} threads")
    fit = fit_store(evidence.levels)
    return Calibration(
        machine=Machine(
            source=SharedStore(
                clients=Curve.flat(_rounded(fit.best_bytes_per_second)),
                read=Curve(tuple((_rounded(users), _rounded(rate)) for users, rate in fit.read.points)),
                latency_seconds=_rounded(fit.latency_seconds),
                # Readers of a running job pause now and then, so twice as many as just suffice without
                # pauses.
                threads=min(
                    2 * fit.enough_readers,
                    _READERS[-1] if is_still_growing(evidence.levels) else evidence.levels[-1].readers,
                ),
            ),
            storage=_storage_in(memory_limit_bytes() // 4, memory, cpus),
            preprocess_bytes_per_second=_rounded(preprocess),
            decode_threads=cpus,
            processors=cpus,
        ),
        levels=evidence.levels,
        page_cache=page_cache_of([share for each in passes for share in each.shares]),
        unreadable=len(errors),
        not_measured=evidence.not_measured,
        curves=_curves_of(passes),
    )


def _rounded(measured: float) -> float:
    """Return four digits, which is more than any of these measurements has."""
    return float(f"{measured:.4g}")


def _storage_in(memory_bytes: int, memory: Curve, cpus: int) -> tuple[StorageClass, StorageClass]:
    megabytes = memory_bytes // 10**6
    staging_megabytes = max(1, min(_STAGING_MEGABYTES, megabytes // 4))
    tier_megabytes = max(1, megabytes - staging_megabytes)
    return (
        StorageClass("staging", staging_megabytes * 10**6, cpus, memory),
        StorageClass("memory", tier_megabytes * 10**6, cpus, memory),
    )


# -- The source ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SourceReads:
    """One pass over the planned numbers of readers. tried: those with too few reads to count among them."""

    planned: list[int]
    tried: list[Level]
    shares: list[float | None]
    contents: list[bytes]
    errors: list[DataError]


@dataclass(slots=True)
class TimedReads:
    """What one level's readers did; lists are appended to by all of them.

    starts: when a read would have started that took as long and had no pages to drop.
    """

    starts: list[float]
    ends: list[float]
    sizes_bytes: list[int]
    contents: list[bytes]
    errors: list[DataError]


def _measure_source(source: Source, deadline: float, clock: Clock, report: Progress) -> _SourceReads:
    draw = generator_for(derive_key(int.from_bytes(os.urandom(8), "little"), "calibrate"), 0, 0)
    planned = [readers for readers in _READERS if readers == 1 or 2 * readers <= len(source)]
    slice_seconds = (deadline - clock()) / (len(planned) + 1)
    tried: list[Level] = []
    shares: list[float | None] = []
    contents: list[bytes] = []
    errors: list[DataError] = []
    for readers in planned:
        if tried and clock() + seconds_needed(readers, tried) > deadline:
            break
        level_seconds = slice_seconds * (2 if readers == 1 else 1)
        most = min(len(source), _MOST_READS)
        if tried:
            rate = tried[-1].bytes_per_second / tried[-1].mean_bytes
            # Twice the readers do at most twice as much.
            most = min(most, 4 * readers + math.ceil(2 * rate * level_seconds))
        samples = draw.choice(len(source), most, replace=False)
        reader = StoreReader(source, clock)
        until = min(clock() + level_seconds, deadline)
        timed = read_until(reader, samples, readers, until, deadline, clock, keep=not tried)
        errors += timed.errors
        contents += timed.contents
        shares += reader.cached_shares
        if timed.ends:
            tried.append(
                steady_level(
                    readers,
                    np.array(timed.starts),
                    np.array(timed.ends),
                    np.array(timed.sizes_bytes, np.int64),
                )
            )
            report(_describe(tried[-1]))
        elif not tried:
            raise errors[0]
        if tried[0].reads < reads_needed(1):
            break
    return _SourceReads(planned, tried, shares, contents, errors)


def _joined(readers: int, levels: Sequence[Level]) -> Level:
    """Return several measurements of one number of readers as one; the median of their rates counts."""
    return Level(
        readers,
        np.concatenate([level.sizes_bytes for level in levels]),
        np.concatenate([level.seconds for level in levels]),
        float(np.median([level.bytes_per_second for level in levels])),
        sum(level.unsteady_reads for level in levels),
    )


def _levels_of(passes: Sequence[_SourceReads]) -> dict[int, list[Level]]:
    found: dict[int, list[Level]] = {}
    for level in (level for each in passes for level in each.tried):
        found.setdefault(level.readers, []).append(level)
    return dict(sorted(found.items()))


def _curves_of(passes: Sequence[_SourceReads]) -> tuple[MeasuredCurve, ...]:
    if len(passes) == 1:
        return ()
    points = (
        (readers, Spread.of([level.bytes_per_second for level in own]))
        for readers, own in _levels_of(passes).items()
    )
    return (MeasuredCurve(Access(False, True, 0), tuple(points)),)


class StoreReader:
    """Reads samples as a loader does, but files from the store itself.

    What the page cache holds of a file is dropped between its open and its read: an open of its own would wait as long
    as that of the read does on a network's file system, and leave the readers less to do.
    Any thread may read.
    """

    def __init__(self, source: Source, clock: Clock) -> None:
        #: Of the first files: the share of each that stayed in the page cache; None where it is not known.
        self.cached_shares: list[float | None] = []
        self.source = source
        is_of_files = isinstance(source, FileBacked) and objects_in(source) is None
        self._files = source if isinstance(source, FileBacked) and is_of_files else None
        self._clock = clock

    def read_into(self, sample: int, buffer: memoryview) -> tuple[int, float]:
        """Return the sample's bytes, and the seconds that went into dropping pages.

        Raises: DataError as the source does.
        """
        if self._files is None:
            return self.source.read_into(sample, buffer), 0.0
        dropping_seconds = 0.0

        def drop(descriptor: int) -> None:
            nonlocal dropping_seconds
            begin = self._clock()
            with suppress(OSError):  # what has no pages is read as it is
                drop_cached(descriptor)
                if len(self.cached_shares) < _PROBED_FILES:
                    self.cached_shares.append(cached_share(descriptor))
            dropping_seconds = self._clock() - begin

        size = int(self.source.sizes_bytes[sample])
        read_file_into(self._files.path_of(sample), size, buffer, opened=drop)
        return size, dropping_seconds


def page_cache_of(shares: Sequence[float | None]) -> PageCache:
    """Return where files lay, of whose pages these shares were in memory; None: not known."""
    known = [share for share in shares if share is not None]
    if not known:
        return PageCache.UNKNOWN
    share = sum(known) / len(known)
    if share < 0.05:
        return PageCache.COLD
    return PageCache.WARM if share > 0.95 else PageCache.MIXED


def read_until(
    reader: StoreReader,
    samples: NDArray[np.int64],
    readers: int,
    until: float,
    deadline: float,
    clock: Clock,
    *,
    keep: bool,
) -> TimedReads:
    """Read samples by so many threads, one sample at least.

    until: moment on the clock at which they stop, unless too few reads are done to make a level; those are gone on
        with until the deadline, or until the samples are over.
    keep: keep the first contents, for the decoder.
    """
    timed = TimedReads([], [], [], [], [])
    todo = iter(samples.tolist())
    stop = threading.Event()
    largest = int(reader.source.sizes_bytes[samples].max())
    stored = threading.Lock()

    def read_on() -> None:
        buffer = memoryview(bytearray(max(1, largest)))
        for sample in todo:
            start = clock()
            try:
                size, dropping_seconds = reader.read_into(sample, buffer)
            except DataError as error:
                timed.errors.append(error)
            else:
                end = clock()
                with stored:
                    timed.starts.append(start + dropping_seconds)
                    timed.ends.append(end)
                    timed.sizes_bytes.append(size)
                if (
                    keep
                    and len(timed.contents) < _DECODED_SAMPLES
                    and size * _DECODED_SAMPLES <= _DECODED_BYTES
                ):
                    timed.contents.append(bytes(buffer[:size]))
            wanted = until if len(timed.ends) >= reads_needed(readers) else deadline
            if stop.is_set() or clock() >= wanted:
                return

    run_together([read_on] * readers, stop)
    return timed


# -- Memory and decoder --------------------------------------------------------------------------------


def _measure_memory(cpus: int, until: float, clock: Clock) -> Curve:
    """Return bytes/s copied by all threads together, by number of threads."""
    counts = thread_counts(cpus)
    points = []
    for done, threads in enumerate(counts):
        copies = partial(copier, COPIED_BYTES // threads)
        begin = clock()
        copied = repeat_until(begin + (until - begin) / (len(counts) - done), clock, [copies] * threads)
        points.append((float(threads), _rounded(copied)))
    return Curve(tuple(points))


def _measure_decode(
    decode: Decode, contents: Sequence[bytes], cpus: int, until: float, clock: Clock
) -> float:
    """Return bytes/s that one thread decodes while every processor does."""
    if not contents:
        raise ConfigError(
            f"no sample is small enough to decode a few of ({format_bytes(_DECODED_BYTES // _DECODED_SAMPLES)}): "
            f"calibrate without decode and set preprocess in the machine by hand"
        )
    good = []
    for content in contents:
        try:
            decode(content)
        except DataError:
            continue  # a damaged file says nothing about the speed of the others
        good.append(content)
    if not good:
        raise DataError(f"none of {len(contents)} samples could be decoded: are they of the decoder's kind?")

    def decoder() -> Iterator[int]:
        while True:
            for content in good:
                decode(content)
                yield len(content)

    return repeat_until(until, clock, [decoder] * cpus) / cpus


# -- What people see -----------------------------------------------------------------------------------


@contextmanager
def shown(wanted: bool | None, steps: int) -> Iterator[Progress]:
    """Yield what is called with a line at each of so many steps; it moves a bar on stderr.

    wanted: None: where stderr is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("calibrating"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)

        def report(line: str) -> None:
            bar.update(task, advance=1, description=line)

        yield report
