"""The sums of a running epoch, kept without keeping its spans."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from penstock.flow.recorder import Recorder
from penstock.trace import EpochMetrics, TraceWriter
from penstock.trace.metrics import Meanwhile, epoch_metrics, is_of_snapshots
from penstock.trace.schema import SPAN, Kind, Spans

K = TypeVar("K", bound=Hashable)
_OF_TRAINING = (Kind.WAIT.value, Kind.STEP.value)


class RunningMetrics:
    """Epoch metrics from spans that come bit by bit.

    Spans of batches that were consumed are summed up and dropped; those of batches still ahead wait, so that
    memory is bounded by what is staged. What a snapshot's span, a piece of a second, ran beside before it was told is
    not counted.
    """

    def __init__(self) -> None:
        self._ahead: Spans = np.empty(0, SPAN)
        #: Of snapshots, those that batches yet to be summed up may have run beside.
        self._beside: Spans = np.empty(0, SPAN)
        self._epochs: dict[int, EpochMetrics] = {}

    def add(self, spans: Spans, epoch: int, step: int) -> None:
        """Add new spans; all batches up to and including (epoch, step) were consumed."""
        spans = np.concatenate([self._ahead, spans])
        beside = is_of_snapshots(spans)
        self._beside = np.concatenate([self._beside, spans[beside]])
        spans = spans[~beside]
        consumed = (spans["epoch"] < epoch) | ((spans["epoch"] == epoch) & (spans["step"] <= step))
        self._ahead = spans[~consumed]
        for part in epoch_metrics(np.concatenate([spans[consumed], self._beside])):
            known = self._epochs.get(part.epoch)
            self._epochs[part.epoch] = part if known is None else _joined(known, part)
        # The training does one thing after the other: its later waits and steps begin after these.
        of_training = spans[consumed & np.isin(spans["kind"], _OF_TRAINING)]
        if of_training.size:
            self._beside = self._beside[self._beside["end"] > of_training["end"].max()]

    def epoch(self, epoch: int) -> EpochMetrics | None:
        """Return the sums of one epoch so far."""
        return self._epochs.get(epoch)

    def epochs(self) -> list[EpochMetrics]:
        """Return the sums so far, by epoch."""
        return [self._epochs[epoch] for epoch in sorted(self._epochs)]


class Collector:
    """Brings spans from the rings of the threads to the sums, and to the file if there is one. Any thread may ask.

    say: is told when the file cannot be written any more, as on a full disk.
    consumed: (epoch, step) of the last batch whose spans are all recorded. The consumer moves it.
    """

    def __init__(self, recorder: Recorder, writer: TraceWriter | None, say: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._say = say
        self._writer = writer
        self._sums = RunningMetrics()
        self._sums_lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self.consumed = (0, -1)

    def collect(self) -> None:
        """Drain the rings; do nothing once closed, nor in a forked child, where a lock may be held for ever."""
        self._collect(ends=False)

    def _collect(self, ends: bool) -> None:
        if self._is_forked:
            return
        failed: OSError | None = None
        with self._sums_lock:
            if self._is_closed:
                return
            consumed = self.consumed  # before the drain, which then has all spans of these batches
            spans = self._recorder.drain()
            try:
                if self._writer is not None:
                    self._writer.append(spans, dropped=self._recorder.dropped)
                    if ends:
                        self._writer.close()
            except OSError as error:
                self._writer, failed = None, error
            self._sums.add(spans, *consumed)
            self._is_closed = ends
        if failed is not None:
            self._say(f"the trace breaks off here{'' if ends else ', the training goes on'}: {failed}")

    def epoch(self, epoch: int) -> EpochMetrics | None:
        """Return the sums of one epoch as last collected; None where no span of it was."""
        return self._sums.epoch(epoch)

    def epochs(self) -> list[EpochMetrics]:
        """Return the sums so far, by epoch."""
        self.collect()
        return self._sums.epochs()

    def close(self) -> None:
        """Drain the rings once more and end the file, after any thread that is writing to it. Twice is harmless.

        Waits for the disk and for other threads: not for the garbage collector to call.
        """
        self._collect(ends=True)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child's copy: the file is the parent's."""
        return os.getpid() != self._pid


def _joined(first: EpochMetrics, then: EpochMetrics) -> EpochMetrics:
    """The sums of two parts of an epoch that follow each other without a gap."""
    return replace(
        first,
        seconds=first.seconds + then.seconds,
        samples=first.samples + then.samples,
        steps=first.steps + then.steps,
        stall_seconds=first.stall_seconds + then.stall_seconds,
        stall_by_cause=_added(first.stall_by_cause, then.stall_by_cause),
        own_seconds=first.own_seconds + then.own_seconds,
        reads_by_place=_added(first.reads_by_place, then.reads_by_place),
        bytes_by_place=_added(first.bytes_by_place, then.bytes_by_place),
        hits_by_place=_added(first.hits_by_place, then.hits_by_place),
        save_seconds=first.save_seconds + then.save_seconds,
        meanwhile=_added(first.meanwhile, then.meanwhile),
    )


V = TypeVar("V", int, float, Meanwhile)


def _added(first: Mapping[K, V], then: Mapping[K, V]) -> dict[K, V]:
    total = dict(first)
    for key, value in then.items():
        total[key] = total[key] + value if key in total else value
    return total
