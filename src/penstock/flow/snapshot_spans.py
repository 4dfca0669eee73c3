"""Recording what is done for snapshots into a trace: one span each, or pieces of a second of what runs meanwhile."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.report import print_report
from penstock.trace.file import TraceWriter, path_in_run
from penstock.trace.schema import NO_EPOCH, NO_PLACE, NO_SAMPLE, Kind

#: What runs next to the training comes in pieces, see `penstock.trace.Kind`.
_PIECE_SECONDS = {Kind.WRITE: 1.0, Kind.DRAIN: 1.0}
#: A ring of its own for each kind, for a thread of its own does it: counted from the last number down, since the
#: workers of a loader that the recorder may belong to are counted from the first up.
_RINGS = {Kind.SAVE: 65_535, Kind.WRITE: 65_534, Kind.DRAIN: 65_533, Kind.LOAD: 65_532}
_RING_SPANS = 256
#: Several stores may record into the rings of one loader.
_recording = threading.Lock()

#: Takes numbers and does nothing with them, without a call of Python.
_uncounted: Callable[[int], None] = deque[int](maxlen=0).append


class SnapshotSpans:
    """Records what a snapshot store does: in the trace that it was given or, under `penstock watch`, in one of its run.

    Its own is a file, made with the first span. Any thread may record.
    """

    def __init__(
        self,
        trace: str | os.PathLike[str] | Recorder | None = None,
        rank: int = 0,
        report: Callable[[str], None] = print_report,
    ) -> None:
        """trace: a file, or the recorder of a trace that somebody else collects. rank: of this process, in the file.

        report: gets a line if that cannot be written any more.
        """
        self._recorder, self._report = trace if isinstance(trace, Recorder) else None, report
        self._collector: Collector | None = None
        path = None if isinstance(trace, Recorder) else path_in_run() if trace is None else trace
        #: Absolute, as the process may be in another folder by the first span. None once the file is made, or without.
        self._path = None if path is None else os.path.abspath(path)
        if path is not None:
            self._recorder = Recorder(_RING_SPANS, rank)
            self._collector = Collector(self._recorder, None, report)
            #: Ends the file; also if the store is never closed.
            self._end = weakref.finalize(self, self._collector.close)

    @property
    def has_file(self) -> bool:
        """Whether a trace of its own was begun."""
        return self._collector is not None and self._path is None

    def span(
        self, kind: Kind, step: int, tier: int = NO_PLACE
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Record the time that the block of a `with` takes, at its end; also where it raises.

        kind: `SAVE`, `WRITE`, `DRAIN` or `LOAD`. step: of the snapshot.
        tier: number of the tier in the store, 0 is written first.
        Returns: a context; in the block, a function is called with the bytes that were done since the call before.

        >>> recorder = Recorder(16)
        >>> with SnapshotSpans(recorder).span(Kind.SAVE, step=1000) as add:
        ...     add(600_000_000)
        >>> recorder.drain()[["kind", "bytes", "step"]].tolist()
        [(6, 600000000, 1000)]
        """
        if self._recorder is None:
            return nullcontext(_uncounted)
        return self._spanned(self._recorder, kind, step, tier)

    def record(self, kind: Kind, step: int, seconds: float, nbytes: int) -> None:
        """Record what has just ended, as `span` would have. seconds: that it took. nbytes: that were done."""
        if self._recorder is not None:
            end = self._recorder.clock()
            self._record(self._recorder, kind, step, NO_PLACE, end - seconds, end, nbytes)

    @contextmanager
    def _spanned(
        self, recorder: Recorder, kind: Kind, step: int, tier: int
    ) -> Iterator[Callable[[int], None]]:
        piece_seconds = _PIECE_SECONDS.get(kind, math.inf)
        begin, nbytes = recorder.clock(), 0

        def record() -> None:
            nonlocal begin, nbytes
            end = recorder.clock()
            self._record(recorder, kind, step, tier, begin, end, nbytes)
            begin, nbytes = end, 0

        def add(more_bytes: int) -> None:
            nonlocal nbytes
            nbytes += more_bytes
            if recorder.clock() - begin >= piece_seconds:
                record()

        try:
            yield add
        finally:
            record()

    def _record(
        self, recorder: Recorder, kind: Kind, step: int, tier: int, begin: float, end: float, nbytes: int
    ) -> None:
        ring = recorder.ring(_RINGS[kind], _RING_SPANS)
        with _recording:
            ring.record(kind, begin, end, NO_SAMPLE, nbytes, NO_EPOCH, step, tier, samples=0)
        self._collect()

    def _collect(self) -> None:
        collector = self._collector
        if collector is None:
            return
        with _recording:
            path, self._path = self._path, None
            if path is not None and self._recorder is not None:
                try:
                    collector.write_to(TraceWriter(path, {"snapshots": True, **self._recorder.about}))
                except OSError as error:
                    self._report(f"saves are not recorded in {path}: {error}")
        collector.collect()

    def close(self) -> None:
        """End a trace of its own. Twice is harmless."""
        if self._collector is not None:
            self._end()
