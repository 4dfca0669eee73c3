"""What a loader reports when an epoch ends: what limited it, and what a user could change about that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from penstock.errors import printable
from penstock.flow.collector import Collector
from penstock.flow.engine import Engine
from penstock.flow.lock_use import LockUse
from penstock.loader.failed_samples import SkippedSample
from penstock.loader.image_mixing import MixingDecoder
from penstock.loader.images import ImageDecoder
from penstock.loader.setup import Setup
from penstock.trace import NOTHING_TO_GAIN, EpochMetrics, limiting, stall_share
from penstock.trace.schema import SOURCE, Kind
from penstock.trace.stages import Stage
from penstock.units import format_count, format_seconds

# Of epochs that take less, the training's thread reports several together, but not more than are summed up at once:
# that takes about as long as for one.
_LINES_SECONDS, _MOST_LINES = 0.5, 16


class EpochLines:
    """Words the line of each epoch; remembers what earlier lines said."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self._setup = setup
        self._engine = engine
        #: What shows whether threads wait for the interpreter's lock: when last judged, and what was seen then.
        self._lock_use_before = self._lock_use = LockUse()
        self._reported_threads, self._reported_readers = setup.limits.decoders, setup.limits.readers
        self._has_reported_alone = False

    def line(self, metrics: EpochMetrics, skipped: Sequence[SkippedSample]) -> str:
        """Return the line of an epoch. skipped: its samples that were."""
        # Whether a data set's code reads or computes is not seen here.
        is_of_data_set = self._setup.is_of_data_set
        names = ("the data set", "the data set") if is_of_data_set else ("storage", "decode")
        line = limiting(metrics, *names)
        said = f"{self._threads()}{self._readers()}{self._lock(metrics)}{self._alone()}"
        return f"{line}{said}{retry_clause(metrics)}{skip_clause(skipped)}"

    def _threads(self) -> str:
        """Report the number of threads where it is not what the line before, or that of the start, said."""
        threads = self._engine.threads.threads
        if threads == self._reported_threads:
            return ""
        self._reported_threads = threads
        return f"; loads with {format_count(threads, 'thread')} now"

    def _readers(self) -> str:
        """Report the same of threads that read, where their number is not fixed."""
        reading = self._engine.reading
        if reading is None or reading.threads == self._reported_readers:
            return ""
        self._reported_readers = reading.threads
        return f"; reads with {format_count(reading.threads, 'thread')} now"

    def _lock(self, metrics: EpochMetrics) -> str:
        """Name Python code that holds the interpreter's lock, where the training waited for it."""
        seen, cpus = self._engine.lock_use.since(self._lock_use_before), self._setup.cpus
        if seen.is_enough:
            self._lock_use_before = self._engine.lock_use
            self._lock_use = seen
        elif self._engine.threads.threads > 1:
            # Of an earlier epoch. One thread shows nothing and may be there for it, so that it is kept then.
            self._lock_use = LockUse()
        waited = stall_share(metrics.stall_seconds, metrics.own_seconds)
        is_by_lock = self._setup.calls_python and self._lock_use.is_by_lock(cpus)
        if not is_by_lock or waited < NOTHING_TO_GAIN:
            return ""
        return (
            "; its Python code holds the interpreter's lock: threads that had work used "
            f"{self._lock_use.processors:.2f} of {cpus} processors"
        )

    def _alone(self) -> str:
        """Report once that pictures are decoded one at a time."""
        decoder = self._setup.decoder
        alone = decoder.decoded_alone if isinstance(decoder, ImageDecoder | MixingDecoder) else 0
        if not alone or self._has_reported_alone:
            return ""
        self._has_reported_alone = True
        return (
            f"; decoded {format_count(alone, 'picture')} one at a time, as nothing says beforehand how large they are: "
            "JPEG, PNG, BMP, WebP, GIF, PNM and TIFF are decoded by all threads at once"
        )


class EndedEpochs:
    """Epochs that ended and were not reported yet.

    It refers to no loader, and so the loader's engine reports the last ones of a loader that was dropped.
    """

    def __init__(self, collector: Collector, name: str, report: Callable[[str], None] | None) -> None:
        self._collector, self._name, self._report = collector, name, report
        self._epochs = deque[int]()
        #: When the latest were reported.
        self._reported = -math.inf
        #: Samples that were skipped, of all epochs so far.
        self.skipped: list[SkippedSample] = []
        #: What words their lines; None before any epoch ended.
        self.lines: EpochLines | None = None

    def add(self, epoch: int) -> None:
        """Have an epoch reported by the next `report`."""
        self._epochs.append(epoch)

    def report_if_due(self, now: float) -> None:
        """Report what there is, if the latest report is long ago or there are many."""
        if self._epochs and (now - self._reported >= _LINES_SECONDS or len(self._epochs) >= _MOST_LINES):
            self.report(now)

    def report(self, now: float) -> None:
        """Report them all, with what was recorded by now."""
        self._reported = now
        self._collector.collect()
        while self._epochs:
            epoch = self._epochs.popleft()
            if self._report is None or self.lines is None:
                continue
            metrics = self._collector.epoch(epoch)
            if metrics is not None and metrics.seconds:
                self._report(f"{self._name}: {self.lines.line(metrics, self.skipped_of(epoch))}")

    def skipped_of(self, epoch: int) -> list[SkippedSample]:
        """Return the samples of an epoch that were skipped."""
        return [skip for skip in self.skipped if skip.epoch == epoch]

    def finish(self) -> None:
        """Report what is left, and drain nothing from here on; twice is harmless."""
        try:
            if self._epochs:
                self.report(self._reported)
        finally:
            self._collector.close()


def retry_clause(metrics: EpochMetrics) -> str:
    """Return what had to be read anew: requests to a store, and samples that a tier or another rank should have had.

    Empty where nothing had. It says what failed requests took.
    """
    lost = [durations for stage, durations in metrics.stages.items() if stage == Stage(Kind.RETRY, SOURCE)]
    clause = ""
    if lost:
        calls, seconds = sum(each.calls for each in lost), sum(each.seconds for each in lost)
        clause = (
            f"; {format_count(calls, 'request')} to the store failed and were made again, which took them "
            f"{format_seconds(seconds)} in all"
        )
    for of_peers, what in (
        (False, "could not be had from this rank's memory or disks"),
        (True, "did not come from the rank that keeps them"),
    ):
        missed = sum(
            durations.samples
            for stage, durations in metrics.stages.items()
            if stage.kind == Kind.RETRY and stage.of_peers == of_peers
        )
        if missed:
            clause += f"; {format_count(missed, 'sample')} {what} and were read from the store"
    return clause


def skip_clause(skipped: Sequence[SkippedSample]) -> str:
    """Return how many samples were skipped, and why the first was; empty where none was."""
    if not skipped:
        return ""
    first = skipped[0]
    name = "" if printable(first.name) in first.error else f" ({first.name})"
    return f"; skipped {format_count(len(skipped), 'sample')}, the first{name}: {first.error}"
