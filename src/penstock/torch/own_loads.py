"""What a DataLoader records under `penstock watch` where the thread of the training loads: num_workers=0."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from penstock.flow.watched_run import WatchedRun
from penstock.ranks.transport_of_job import rank_of_this_process
from penstock.trace.file import path_in_run
from penstock.trace.schema import NO_SAMPLE, NO_STEP, SOURCE, Kind

#: Of what loads, as of a loader with decoders=0.
_WORKER = 2


class OwnLoads:
    """Records the waits and steps of a DataLoader's passes, and how long its data set and its collate_fn took.

    One thread asks for batches at a time.
    """

    def __init__(self, run: WatchedRun, place: str) -> None:
        """place: what the data set is called."""
        self._run, self._place = run, place
        self._waits, self._loads = run.ring, run.recorder.ring(_WORKER)
        self._clock = run.recorder.clock
        #: The batch handed out last, (epoch, step, when, samples); None while the caller waits.
        self._handed: tuple[int, int, float, int] | None = None
        self._asked = self._drawn = self._made = 0.0
        #: The pass of that batch, and when it was dropped, if it was.
        self._pass: weakref.ref[Any] | None = None
        self._left: list[float] = []

    @classmethod
    def of(cls, dataset: object) -> Self | None:
        """Return what records for a DataLoader over a data set; None where no run of `penstock watch` does."""
        if (path := path_in_run()) is None:
            return None
        place = type(dataset).__name__
        run = WatchedRun(path, time.perf_counter, rank_of_this_process, lambda sample: f"{place}[{sample}]")
        return cls(run, place)

    def begin(self, fetcher: Any) -> None:
        """Begin a pass. fetcher: PyTorch's code that makes a batch."""
        self._end_step(self._clock())
        fetcher.collate_fn = _Timed(fetcher.collate_fn, self)

    def ask(self) -> None:
        """Note that the caller asks for a batch."""
        self._asked = self._clock()
        if self._run.renew(self._asked):
            self._waits, self._loads = self._run.ring, self._run.recorder.ring(_WORKER)
            self._handed = None  # to the process that this one was forked from
        self._end_step(self._asked)

    def load(self) -> None:
        """Note that the samples of the batch are known and the data set makes them now."""
        self._drawn = self._made = self._clock()

    def collate(self) -> None:
        """Note that the data set has made the samples."""
        self._made = self._clock()

    def end(self, of_pass: object, epoch: int, step: int, ids: Sequence[int] | None) -> None:
        """Record a wait that got a batch. of_pass: whose it is. ids: its samples; None where they are no numbers."""
        now, recorder = self._clock(), self._run.recorder
        count, flow = (0 if ids is None else len(ids)), recorder.next_flow()
        first = ids[0] if ids else NO_SAMPLE
        if count > 1:
            self._loads.record_ids(flow, ids or ())
        what = (first, 0, epoch, step)
        self._loads.record(Kind.READ, self._drawn, self._made, *what, SOURCE, samples=count, flow=flow)
        self._loads.record(Kind.DECODE, self._made, now, *what, samples=count, flow=flow)
        about: dict[str, Any] = {
            "loader": self._place,
            "source": self._place,
            "reads": "data set",
            "loads": "when asked",
        }
        self._run.consume(about, epoch, step)
        self._waits.record(Kind.WAIT, self._asked, now, epoch=epoch, step=step, samples=count)
        self._follow(of_pass)
        self._handed = epoch, step, self._clock(), count

    def end_in_vain(self, epoch: int, step: int) -> None:
        """Record a wait that got no batch: the pass is over, or an error came. step: of the last batch."""
        self._waits.record(Kind.WAIT, self._asked, self._clock(), epoch=epoch, step=NO_STEP, samples=0)
        self._run.collect(epoch, step)

    def _follow(self, of_pass: object) -> None:
        """Note when a pass is dropped, rather than another one, which may continue meanwhile."""
        if self._pass is None or self._pass() is not of_pass:
            clock, self._left = self._clock, (left := [])
            self._pass = weakref.ref(of_pass, lambda _: left.append(clock()))

    def _end_step(self, now: float) -> None:
        if self._handed is not None:
            (epoch, step, since, samples), self._handed = self._handed, None
            end = self._left[0] if self._left else now
            self._waits.record(Kind.STEP, since, end, epoch=epoch, step=step, samples=samples)


class _Timed:
    """A collate_fn that notes when it is called, as the samples are there then."""

    def __init__(self, function: Callable[[Any], Any], loads: OwnLoads) -> None:
        self._function, self._loads = function, loads

    def __call__(self, samples: Any) -> Any:
        self._loads.collate()
        return self._function(samples)
