"""The loop over batches: which comes next, who waits for it, and when an epoch begins and ends.

    start ── begin_at, ensure_started ──> Engine.start
    iter ── begin_epoch ──> a Pass
    next ── StepClock.begin_wait ──> take ── failed_samples.judge ──> StepClock.end_wait ──> the training has a batch
    another iter, set_epoch, the last batch ── leave_epoch ──> EndedEpochs

`own or engine` is whoever gives a batch: where there is an OwnThread, it passes `take` on to the engine, or makes the
batches of some steps itself. Either gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import current_thread, get_ident
from threading import enumerate as enumerate_threads
from typing import Any, TypeVar

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.flow.batches import Departure, StagedBatch
from penstock.loader.epoch_lines import skip_clause
from penstock.loader.failed_samples import SkippedSample, judge
from penstock.loader.on_device import made
from penstock.loader.own_thread import OwnThread
from penstock.loader.parts import Parts
from penstock.loader.run_trace import begin_trace
from penstock.loader.starting import Starter

_Found = TypeVar("_Found")


@dataclass(slots=True, eq=False)
class Pass:
    """A pass over an epoch.

    epoch: None once it has ended. whole_steps: of the epoch, how many have all their samples.
    first_step: at which it began. delivered: batches that it has handed out.
    end: the error, or Ctrl-C, that came in place of a batch, StopIteration after the last one; None before.
    departure: tells when its iterator was dropped: a `for` loop that is left drops that at once.
    """

    epoch: int | None = None
    whole_steps: int = 0
    first_step: int = 0
    delivered: int = 0
    end: type[BaseException] | None = None
    departure: Departure | None = None

    @property
    def is_left(self) -> bool:
        """Whether the loop over it has ended, by an error or because its iterator was dropped."""
        has_failed = self.end is not None and self.end is not StopIteration
        return has_failed or (self.departure is not None and self.departure() is None)


class EpochLoop:
    """Hands out the batches of a run, epoch by epoch, to one thread at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._clock, self._engine = parts, parts.clock, parts.engine
        self._plan, self._rank = parts.setup.plan, parts.setup.rank
        self._on_error, self._describe = parts.agreed.config.on_error, parts.fetcher.describe
        self._starter = Starter()
        #: (epoch, step) of the next batch to hand out.
        self.position = self._plan.first_read_from(self._rank, 0, 0)
        #: Where prefetching began; None before.
        self.started_at: tuple[int, int] | None = None
        #: The pass that is under way, or the latest.
        self.current = Pass()
        self._has_reported_start = self._is_closed = False
        #: The thread that is inside `start`, `iter` or `next`, None while none is.
        self._thread_inside: int | None = None

    # Who may ask, and what it begins with

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._is_closed:
            raise ClosedError("this loader is closed: make a new one to read on")

    def _alone(self, call: Callable[[], _Found]) -> _Found:
        """Return what a call returns, while no other thread is inside. Raises: ConfigError if one is."""
        me = get_ident()
        # No call from here to the `try`: neither Ctrl-C nor another thread can come between.
        inside = self._thread_inside
        if inside is not None and inside != me:
            raise _used_by(inside)
        self._thread_inside = me
        try:
            return call()
        finally:
            self._thread_inside = None

    def start(self, epoch: int | None, step: int) -> None:
        """See `Loader.start`."""
        self._alone(partial(self._start_at, epoch, step))

    def _start_at(self, epoch: int | None, step: int) -> None:
        self.check_open()
        if epoch is None:
            epoch, step = (0, step) if step else self.position
        first = self._plan.first_of_run(self._rank, epoch, step)
        if self.started_at is not None and not self.started_at == self.position == first:
            raise ConfigError(
                f"this loader was started already and is at epoch {self.position[0]}, step {self.position[1]}: "
                "start() comes before the first loop, which starts at epoch 0 without it"
            )
        self.begin_at(first)
        self.ensure_started()

    def ensure_started(self, *, reports: bool = True) -> None:
        """Start the threads, and report it, unless that was done. Raises: as `Loader.start`."""
        if not self._starter.is_started:
            if self._engine.is_forked:
                raise ClosedError(
                    "this loader was made in the process that this one was forked from: make a loader of its own here"
                )
            self.started_at = self.position
            if self.position != self._plan.first_read_from(self._rank, 0, 0):
                # Before there are threads, so that it is the first event they see.
                self._engine.seek(*self.position)
            if self._parts.ahead is not None:
                self._parts.ahead.go_to(self.position)
        self._starter.ensure_started(self._start)
        if not self._has_reported_start:
            self._has_reported_start = True
            if reports:
                self._parts.report_start()

    def _start(self) -> None:
        """Begin the trace, which says where the run begins, and then the run."""
        begin_trace(self._parts, self.position)
        self._engine.start()

    # Where it is

    @property
    def next_place(self) -> tuple[int, int]:
        """(epoch, step) that the next loop begins with, or that the one which is under way comes to."""
        if self.current.is_left and self._is_begun():
            return self._plan.first_read_from(self._rank, self.position[0] + 1, 0)
        return self.position

    def begin_at(self, place: tuple[int, int]) -> None:
        """Have the first batch be that of a place, also for an iterator that there is; nothing was handed out."""
        self.position = place
        if self.current.epoch is not None:
            if place[0] < self._plan.epochs:
                self._enter(self.current)
            else:
                self.current.epoch = None

    def go_to(self, place: tuple[int, int]) -> None:
        """Let the next loop begin at a place, or where it would have if that is further."""
        if self.started_at is None:
            self.begin_at(max(self.position, place))
            return
        if self.current.epoch is not None:
            self._leave_epoch()
        if self.position < place:
            self._engine.seek(*place)
            self.position = place

    def _enter(self, begun: Pass) -> None:
        """Have a pass begin where the loop is."""
        begun.epoch, begun.first_step = self.position
        begun.whole_steps = self._plan.steps_alike(begun.epoch)

    def _is_begun(self) -> bool:
        """Whether the pass has handed out some, not all, of its epoch's batches."""
        epoch, step = self.position
        return epoch == self.current.epoch and step != self.current.first_step

    # Epochs

    def begin_epoch(self, new_iterator: Callable[[Pass], Iterator[Any]]) -> Iterator[Any]:
        """Begin the next epoch; return an iterator over it, which calls `next`. Raises: as `Loader.__iter__`."""
        return self._alone(partial(self._begin_epoch, new_iterator))

    def _begin_epoch(self, new_iterator: Callable[[Pass], Iterator[Any]]) -> Iterator[Any]:
        self.check_open()
        if self.current.epoch is not None:
            self._leave_epoch()
        if self.position[0] >= self._plan.epochs:
            raise ClosedError(
                f"all {self._plan.epochs} epochs of this loader were read: loop while loader.position[0] < "
                f"{self._plan.epochs}, or give a larger epochs= (or steps=) to plan for more"
            )
        begun = Pass()
        self._enter(begun)
        self.current = begun
        iterator = new_iterator(begun)
        begun.departure = self._engine.await_departure(iterator)
        return iterator

    def _leave_epoch(self) -> None:
        epoch, own = self.position[0], self._parts.own_thread
        if self._is_begun():  # left early: what is staged of this epoch is not wanted
            if own is not None:
                own.forget_made()
            following = self._plan.first_read_from(self._rank, epoch + 1, 0)
            self._engine.seek(*following)
            self.position = following
            self._parts.collector.consumed = (epoch, self._plan.steps(epoch))
        self._end_epoch(may_wait=own is not None and own.makes(self.position))

    def _end_epoch(self, *, may_wait: bool = False) -> None:
        """Close the sums of the epoch that a pass was in, and report them. may_wait: until others have ended, too."""
        now, departure, reports = self._parts.recorder.clock(), self.current.departure, self._parts.ended
        left = None if departure is None else departure.seconds
        self._clock.end_step(now if left is None else left)
        self.current.departure = None
        ended, self.current.epoch = self.current.epoch, None
        if ended is not None:
            reports.add(ended)
        (reports.report_if_due if may_wait else reports.report)(now)

    def close(self) -> None:
        """End the epoch that is under way: no batch is handed out any more. Twice is harmless."""
        try:
            if not self._is_closed and not self._engine.is_forked:
                own, departure = self._parts.own_thread, self.current.departure
                if own is not None and departure is not None and departure() is None:
                    own.forget_made()
                self._end_epoch()
        finally:
            self._is_closed = True

    # Batches

    def next(self, begun: Pass) -> Any:
        """Return the next batch of a pass. Raises: StopIteration after its last one; ClosedError if it is over."""
        if begun.end is not None:
            raise _ended_with(begun.end)
        me = get_ident()
        inside = (
            self._thread_inside
        )  # as in `_alone`; first, as a pass may end while another thread is inside
        if inside is not None and inside != me:
            raise _used_by(inside)
        epoch = begun.epoch
        if begun is not self.current or epoch is None:
            self.check_open()
            raise ClosedError(
                "this pass over an epoch ended when another `for` loop over the same loader began (or `set_epoch` "
                "chose another): a loader runs one epoch at a time; make a second loader to read in two places at once"
            )
        self._thread_inside = me
        try:
            return self._next(begun, epoch)
        except BaseException as error:
            begun.end = type(error)
            raise
        finally:
            self._thread_inside = None

    def _next(self, begun: Pass, epoch: int) -> Any:
        if not self._has_reported_start:
            self.ensure_started()
        own, ahead = self._parts.own_thread, self._parts.ahead
        # What ending the step takes, a drain of the trace perhaps, is the loader's time, which the training waits for.
        asked = self._clock.begin_wait()
        if own is not None:
            own.end_step(asked)
        self._parts.ended.report_if_due(asked)
        if ahead is not None:
            ahead.passed(self.position)
        try:
            return self._wait_for_batch(begun, epoch, own)
        except BaseException:
            self._clock.end_wait_in_vain(epoch)
            if own is not None:
                own.begin_step(self._parts.recorder.clock())
            raise

    def _wait_for_batch(self, begun: Pass, epoch: int, own: OwnThread | None) -> Any:
        giver, ended, has_skipped_batch = own or self._engine, self._parts.ended, False
        while self.position[0] == epoch:
            step, fitted = self.position[1], 0.0
            skipped: list[SkippedSample] = []  # `list[SkippedSample]()` takes 0.3 us more
            if own is not None and (ready := own.ready(self.position)) is not None:
                batch, samples = ready
            else:
                staged = giver.take(epoch, step)
                kept, skipped, error = judge(staged, self._on_error, self._describe)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # The traceback refers to this frame, and to the caller's, which has batches: no circle, please.
                        del error, staged
                batch = self._batch_of(staged, kept) if kept else None
                samples, fitted = len(kept), staged.fitted
            following = (epoch, step + 1)
            if step + 1 >= begun.whole_steps:  # before, every step is as large as this one
                following = self._plan.first_read_from(self._rank, *following)
            # Ctrl-C before this line, and the same batch comes again; after it, the next one.
            self.position = following
            giver.let_go(epoch, step)
            ended.skipped += skipped
            if batch is None:
                has_skipped_batch = True
                continue
            now = self._clock.end_wait(epoch, step, samples, fitted)
            if own is not None:
                own.begin_step(now)
            begun.delivered += 1
            return batch
        if begun.delivered == 0 and (skips := skip_clause(ended.skipped_of(epoch))):
            raise DataError(f"epoch {epoch} has no sample left{skips}")
        if has_skipped_batch:
            self._clock.end_wait_in_vain(epoch)
        self._clock.forget_wait()
        self._leave_epoch()
        raise StopIteration

    def _batch_of(self, staged: StagedBatch, kept: Sequence[int]) -> Any:
        """Return what the caller gets of a batch."""
        setup, front_end = self._parts.setup, self._parts.front_end
        if front_end.device is not None and staged.copied is not None:
            return front_end.device.hand_over(staged.copied)
        batch = made(setup.decoder, front_end, setup.dtype_in_slot, staged, kept)
        return batch if front_end.device is None else front_end.device.move(batch)


def _ended_with(end: type[BaseException]) -> BaseException:
    """Return what to raise where a batch is asked of a pass that ended with an error, or after its last batch."""
    if end is StopIteration:
        return StopIteration()
    # Not so after an error: the rest of the epoch would be missing, and nobody told.
    return ClosedError(
        f"this pass over an epoch ended with {end.__name__}: begin another `for` loop, which runs the next epoch; or "
        'make the loader with on_error="skip", which leaves out samples that cannot be had'
    )


def _used_by(inside: int) -> ConfigError:
    """Return what to raise in a thread that asks for a batch while another one does."""
    user = {thread.ident: thread.name for thread in enumerate_threads()}.get(inside, inside)
    return ConfigError(
        f"thread {user!r} is inside this loader while {current_thread().name!r} asks it for a batch: a loader serves "
        "one thread at a time, so let one thread read and pass batches on through a queue.Queue, or make a loader for "
        "each thread"
    )
