"""A trace of waits and steps in the run of a `penstock watch`, where no loader with threads of its own records them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.report import print_report
from penstock.trace import TraceWriter
from penstock.trace.file import path_in_run
from penstock.trace.schema import CONSUMER
from penstock.trace.trace import JSON

#: What is recorded reaches the file after so many seconds.
_COLLECT_SECONDS = 5.0
_RING_SPANS = 1 << 13


class WatchedRun:
    """The file of one loader. Used by the thread that iterates; the file ends with its owner, or with the process.

    rank_of: returns the rank of the process. describe: names a sample.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        rank_of: Callable[[], int] = lambda: 0,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        self._clock, self._rank_of, self._describe = clock, rank_of, describe
        self._begin(path)

    def _begin(self, path: Path | None) -> None:
        self._path, self._pid = path, os.getpid()
        self.recorder = Recorder(_RING_SPANS, self._rank_of(), self._clock)
        #: Waits and steps.
        self.ring = self.recorder.ring(CONSUMER)
        self._collector = Collector(self.recorder, None, print_report, self._describe)
        self._collector.hold()
        self._collected = self._clock()
        weakref.finalize(self, self._collector.close)

    def renew(self, asked: float) -> bool:
        """Begin a file of its own in a process that was forked since the last one began; return whether it was.

        asked: when the first wait that it records began.
        """
        if self._pid == os.getpid():
            return False
        self._begin(path_in_run())
        self.recorder.origin = min(asked, self.recorder.origin)
        return True

    def consume(self, meta: dict[str, JSON], epoch: int, step: int) -> None:
        """Note that a batch came, whose wait and step are not recorded yet; write what there is after some seconds.

        meta: of the file; with a rank where this is not the process's.
        """
        if self._path is not None:
            path, self._path = self._path, None
            try:
                self._collector.write_to(TraceWriter(path, {**self.recorder.about, **meta}))
            except OSError as error:
                print_report(f"what a watched loader waits for is not recorded in the run: {error}")
        if self.recorder.clock() - self._collected >= _COLLECT_SECONDS or self.recorder.is_half_full:
            self.collect(epoch, step - 1)

    def collect(self, epoch: int, step: int) -> None:
        """Write what there is. epoch, step: of the last batch whose step is recorded."""
        self._collected = self.recorder.clock()
        self._collector.consumed = (epoch, step)
        self._collector.collect()
