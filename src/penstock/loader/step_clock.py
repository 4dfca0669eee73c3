"""What the training does between two batches, as spans of the trace: it waits for a batch, and does its own step."""

from __future__ import annotations

from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.trace.schema import CONSUMER, NO_STEP, Kind

_DRAIN_SECONDS = 5.0


class StepClock:
    """Records each wait for a batch, and each step of the training. Called by the thread that asks for batches."""

    def __init__(self, recorder: Recorder, collector: Collector) -> None:
        self._recorder, self._collector, self._ring = recorder, collector, recorder.ring(CONSUMER)
        #: Since when the caller waits for a batch; None while it has one.
        self._asked: float | None = None
        #: Epoch, step and samples of the batch handed out last, and when; None once its step has ended.
        self._handed: tuple[int, int, float, int] | None = None
        self._drained = recorder.clock()

    def begin_wait(self) -> float:
        """The caller asks for a batch: what it did since the last one was its own step. Return the time."""
        self._asked = now = self._recorder.clock()
        self.end_step(now)
        return now

    def end_wait(self, epoch: int, step: int, samples: int, fitted: float) -> float:
        """Record a wait that got a batch, whose step begins. Return the time. fitted: see `StagedBatch`."""
        now = self._recorder.clock()
        assert self._asked is not None, "a wait that got no batch has not ended yet"
        # A device that is still at steps before is not waited for in vain.
        begin, self._asked = min(max(self._asked, fitted), now), None
        self._ring.record(Kind.WAIT, begin, now, epoch=epoch, step=step, samples=samples)
        self._collector.consumed = (epoch, step)
        self._handed = (epoch, step, now, samples)
        return now

    def end_wait_in_vain(self, epoch: int) -> None:
        """Record a wait that got no batch: it ended in an error or an interrupt, or all that was left is skipped."""
        if self._asked is None:
            return
        begin, self._asked = self._asked, None
        self._ring.record(Kind.WAIT, begin, self._recorder.clock(), epoch=epoch, step=NO_STEP, samples=0)
        self._collector.consumed = max(self._collector.consumed, (epoch, NO_STEP))

    def forget_wait(self) -> None:
        """Record no wait: the epoch had no batch left to wait for."""
        self._asked = None

    def end_step(self, end: float) -> None:
        """Record the step of the batch that was handed out last, up to a time, unless that is done."""
        if self._handed is None:
            return
        epoch, step, since, samples = self._handed
        self._handed = None
        self._ring.record(Kind.STEP, since, end, epoch=epoch, step=step, samples=samples)
        # Workers collect when their own rings are half full; what a run that is killed has not written is seconds old.
        if self._ring.is_half_full or end - self._drained >= _DRAIN_SECONDS:
            self._drained = end
            self._collector.collect()
