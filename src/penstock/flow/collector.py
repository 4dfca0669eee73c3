"""What a run records, summed up while it runs and written to its file."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.flow.recorder import Recorder
from penstock.flow.sums import Sums
from penstock.trace import EpochMetrics, TraceWriter
from penstock.trace.schema import NO_SAMPLE, GroupIds, Spans, join_spans
from penstock.trace.summary import RunningMetrics

#: Groups of which nothing is summed up yet, at most: as many as rings hold.
_MOST_GROUPS = 1 << 14
#: Spans are summed up together that came within so long, but not more of them: 1 MiB. A call of its own for each of
#: many short epochs costs more than recording does.
_TOGETHER_SECONDS, _MOST_TOGETHER = 1.0, 1 << 14
#: The slowest samples are named in the file once so much time was recorded, and at its end: a run of short epochs finds
#: others in each of them.
_NAME_SECONDS = 1.0


class Collector:
    """Brings spans from the rings of the threads to the sums, and to the file if there is one. Any thread may ask.

    report: called when the file cannot be written any more, as on a full disk.
    describe: names a sample; the slowest are named in the file.
    hosts: of ranks, by rank, as far as they are known.
    consumed: (epoch, step) of the last batch whose spans are all recorded. The consumer moves it.
    """

    def __init__(
        self,
        recorder: Recorder,
        writer: TraceWriter | None,
        report: Callable[[str], None],
        describe: Callable[[int], str] | None = None,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self._recorder = recorder
        self._report = report
        self._writer = writer
        self._describe = describe
        self._sums = RunningMetrics(Sums())
        #: Drained and not summed up yet, and up to which (epoch, step) all of it was consumed; when last summed, too.
        self._unsummed: list[Spans] = []
        self._reached = self._summed_to = (0, -1)
        self._sums_lock = threading.Lock()
        #: Of the slowest samples, by id, in the file; and the spans that these were the samples of.
        self._names: dict[int, str] = {}
        self._named: Spans | None = None
        self._names_due = -math.inf
        #: Given by `name`: all; those that the file does not have yet.
        self._given: dict[int, str] = {}
        self._new: dict[int, str] = {}
        self._hosts = dict(hosts or {})
        self._are_hosts_written = False
        #: What was chosen while it ran, by rank; and whether that is still to be written.
        self._choices: dict[int, str] = {}
        self._has_new_choice = False
        #: Ids of groups of which nothing is summed up yet, by (rank, flow).
        self._ids: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._pid = os.getpid()
        self._is_closed = self._is_held = False
        self.consumed = (0, -1)

    def hold(self) -> None:
        """Drain nothing before `write_to`, so that what is recorded until then is in the file."""
        self._is_held = True

    def write_to(self, writer: TraceWriter) -> None:
        """Write to a file from now on. Before there are threads."""
        self._writer, self._is_held = writer, False

    def break_off(self, error: OSError, ends: bool = False) -> None:
        """Report that the file cannot be written, from its beginning or any more. ends: with the training."""
        self._is_held = False
        self._report(f"the trace breaks off here{'' if ends else '; the training continues'}: {error}")

    def name(self, names: Mapping[int, str]) -> None:
        """Have the file say what these samples are called, slow or not."""
        with self._sums_lock:
            self._given |= names
            self._new |= names

    def note_choice(self, line: str) -> None:
        """Have the file say what this rank has chosen; the latest line counts."""
        self._choices, self._has_new_choice = {self._recorder.rank: line}, True

    def collect(self) -> None:
        """Drain the rings; do nothing once closed, nor in a forked child, where a lock may be held for ever."""
        self._collect(ends=False)

    def _collect(self, ends: bool) -> None:
        if self._is_forked:
            return
        failed: OSError | None = None
        with self._sums_lock:
            if self._is_closed or (self._is_held and not ends):
                return
            spans, ids = self._drain()
            if ends or self._is_due():
                self._sum_up()
            if self._writer is not None:
                try:
                    self._write(self._writer, spans, ids, ends)
                    if ends:
                        self._writer.close()
                except OSError as error:
                    self._writer, failed = None, error
            self._is_closed = ends
        if failed is not None:
            self.break_off(failed, ends)

    def _drain(self) -> tuple[Spans, GroupIds]:
        self._reached = self.consumed  # before the drain, which then has all spans of these batches
        spans = self._recorder.drain()
        ids = self._recorder.drain_ids()  # after it, which then has all ids of these spans
        if spans.size:
            self._unsummed.append(spans)
        if self._writer is not None:
            self._ids.update(ids)
        return spans, ids

    def _is_due(self) -> bool:
        if len(self._ids) > _MOST_GROUPS or sum(part.size for part in self._unsummed) > _MOST_TOGETHER:
            return True
        return bool(self._unsummed) and (
            self._unsummed[-1]["end"][-1] - self._unsummed[0]["end"][0] >= _TOGETHER_SECONDS
        )

    def _sum_up(self) -> None:
        """Sum up what was drained. With the lock."""
        is_new = bool(self._unsummed) or self._reached != self._summed_to
        if not is_new and len(self._ids) <= _MOST_GROUPS:
            return
        parts, self._unsummed, self._summed_to = self._unsummed, [], self._reached
        summed = self._sums.add(join_spans(parts), *self._reached)
        for flow in np.unique(summed["flow"]).tolist() if self._ids else ():
            self._ids.pop((self._recorder.rank, flow), None)
        for group in list(self._ids)[:-_MOST_GROUPS]:  # that could not be had, or never end
            del self._ids[group]

    def _write(self, writer: TraceWriter, spans: Spans, ids: GroupIds, ends: bool) -> None:
        writer.append(spans, self._recorder.dropped, ids)
        new, self._new = self._new, {}
        now = float(spans["end"][-1]) if spans.size else -math.inf
        if ends or now >= self._names_due or writer.is_turn_due:
            new, self._names_due = self._name_slowest() | new, now + _NAME_SECONDS
        has_new, self._has_new_choice = self._has_new_choice, False
        writer.name(new, {} if self._are_hosts_written else self._hosts, self._choices if has_new else {})
        self._are_hosts_written = True
        if writer.is_turn_due:
            self._sum_up()
            names = self._ids, self._names | self._given, self._hosts, self._choices
            writer.turn(self._sums.summary(), self._sums.waiting, *names)

    def _name_slowest(self) -> dict[int, str]:
        """Forget the names of samples that are no longer among the slowest; return the new ones."""
        slowest = self._sums.slowest
        if self._describe is None or slowest is self._named:
            return {}
        samples = np.unique(slowest["sample"][slowest["sample"] != NO_SAMPLE]).tolist()
        new = {sample: self._name_of(sample) for sample in samples if sample not in self._names}
        if new:
            known = self._names | new
            self._names = {sample: known[sample] for sample in samples}
        self._named = slowest
        return new

    def _name_of(self, sample: int) -> str:
        assert self._describe is not None, "asked before"
        try:
            return self._describe(sample)
        except Exception as error:  # of a source's own code: a name in a trace must not end the training
            return f"which cannot be described ({type(error).__name__})"

    def epoch(self, epoch: int) -> EpochMetrics | None:
        """Return the sums of one epoch as last collected; None where no span of it was."""
        return self._summed().epoch(epoch)

    def epoch_by_now(self, epoch: int) -> EpochMetrics | None:
        """Return the sums of one epoch; None where no span of it is summed up.

        With what was not summed up yet, unless another thread is at that: not waited for.
        """
        if self._is_forked or not self._sums_lock.acquire(blocking=False):
            return self._sums.epoch(epoch)
        try:
            consumed = self.consumed
            spans = join_spans([*self._unsummed, self._recorder.peek()])
            return self._sums.with_spans(spans, *consumed).epoch(epoch)
        finally:
            self._sums_lock.release()

    def epochs(self) -> list[EpochMetrics]:
        """Return the sums so far, by epoch."""
        self.collect()
        return self._summed().epochs()

    def _summed(self) -> RunningMetrics:
        if not self._is_forked:
            with self._sums_lock:
                self._sum_up()
        return self._sums

    def close(self) -> None:
        """Drain the rings once more and end the file, after any thread that is writing to it. Twice is harmless.

        Waits for the disk and for other threads: not for the garbage collector to call.
        """
        self._collect(ends=True)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child's copy: the file is the parent's."""
        return os.getpid() != self._pid
