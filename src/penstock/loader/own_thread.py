"""The training's thread makes batches itself, where that proves faster than threads that load them ahead.

    threads ── the training waits, or takes batches within 5 ms, and processes cannot help ──> its thread makes the next
            <── these are handed out: threads have a turn ── ... ──> the faster ones, as long as the training waits

A sample that takes microseconds of Python code is made no sooner by a thread: it holds the interpreter's lock for as
long, and the batch has to be handed over. Either makes the same batches. Threads begin behind those that the training
makes itself, and wait there with what their slots hold: a turn is a range of steps.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.flow.batches import MADE, StagedBatch
from penstock.flow.engine import Engine
from penstock.loader.collating import CollatingDecoder, nbytes_of
from penstock.loader.config import LoaderConfig
from penstock.loader.front_end import FrontEnd
from penstock.loader.on_device import made
from penstock.loader.setup import Setup
from penstock.loader.switching import Switching
from penstock.plan.orders import even_from
from penstock.policy.tried_again import is_due
from penstock.policy.turns import Choice, Given, Turns

#: The training's thread makes no larger batches, and no more of them together: what they take is beside the slots. What
#: a function makes of samples is known once it is there: of larger ones each is made alone.
_MOST_OWN_BYTES = 4 << 20
# Steps are made together up to so many samples that take so long: what each costs beside its samples is less then, and
# the training waits no longer at once than it would notice. They take no more than `_TOGETHER_BYTES`, which a
# second-level cache holds. Of the samples so many are there at once. What is one array for several steps takes so many
# bytes at most, or has two: who keeps one of the batches keeps all of it.
_TOGETHER, _TOGETHER_SECONDS, _AT_ONCE, _ARRAY_BYTES, _MOST_COLLATED = 1024, 5e-3, 512, 512 << 10, 4
_TOGETHER_BYTES = 1 << 20
#: Batches as the caller gets them, and how many samples they have, by place.
_Presented = dict[tuple[int, int], tuple[Any, int]]
_Made = TypeVar("_Made")


def may_be_own(config: LoaderConfig, setup: Setup, front_end: FrontEnd) -> bool:
    """Return whether the training's thread may make batches where that is faster."""
    plan = setup.plan
    # Whoever says how long a wait may last, or how many batches are ahead, wants threads; and a device reads slots.
    return not (
        not setup.is_of_data_set  # bytes are read ahead
        or config.timeout_seconds is not None
        or config.prefetch is not None
        or front_end.device is not None
        or front_end.pinning is not None
        or plan.is_cut_by_order
        or even_from(plan.order) != 0
        or _batch_bytes(setup) > _MOST_OWN_BYTES
    )


def _batch_bytes(setup: Setup) -> int:
    """What a batch takes, as far as it is known."""
    return setup.budget.slot_bytes // setup.limits.steps


class OwnThread:
    """Takes the batches of a run from the engine, or makes them in the calling thread.

    setup: its plan's epochs are all equally long; its fetcher and decoder make a batch as threads do.
    front_end: of the framework, which says how threads compute.
    switching: whether processes load; it does not look at threads while they take turns with this.
    clock: also of the readings that `begin_step` and `end_step` get.
    """

    def __init__(
        self,
        setup: Setup,
        front_end: FrontEnd,
        engine: Engine,
        switching: Switching,
        report: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        plan, decoder = setup.plan, setup.decoder
        self._plan, self._rank, self._engine, self._fields = plan, setup.rank, engine, decoder.fields
        self._fetcher, self._decoder, self._beside = setup.fetcher, decoder, setup.beside
        self._switching, self._front_end, self._clock = switching, front_end, clock
        self._turns = Turns(lambda: front_end.is_plain_thread() and switching.pause_if_left_to_threads())
        self._report = report
        #: (epoch, step) before which batches are made here.
        self._until = (0, 0)
        #: When it was last taken note of batches, and the process's processor time then; when the step began that the
        #: training is at, None while it waits; what its steps took since that note.
        self._noted, self._processor_noted = clock(), time.process_time()
        self._step_began: float | None = self._noted
        self._step_seconds = 0.0
        #: From the plan: a place, the samples of the steps from there on, and what follows these.
        self._first, self._ids = (0, 0), np.empty((0, 0), np.int64)
        self._following: Iterator[tuple[int, int, NDArray[np.int64]]] = iter(())
        #: By place: complete batches, until `let_go` removes them; those with samples that failed, until `take` returns
        #: them. Whether anything was made in this turn; how long a sample took.
        self._ready = _Presented()
        self._failed: dict[tuple[int, int], StagedBatch] = {}
        self._has_made = False
        self._sample_seconds = math.inf
        #: How many times some were made.
        self._times = 0
        #: How many steps are made together, and how many of these have one array: each its own where a function
        #: collates.
        self._most_steps, self._steps_in_array = _MOST_COLLATED, 1
        #: What the largest batch took that a function made here, of those that were looked at; None before.
        self._collated_bytes: float | None = None
        if not setup.collates:
            batch_bytes = _batch_bytes(setup)
            array_bytes = plan.max_local_batch(setup.rank) * sum(field.sample_bytes for field in self._fields)
            together = _TOGETHER_BYTES // max(1, array_bytes, batch_bytes)
            most = min(_ARRAY_BYTES // max(1, array_bytes), _MOST_OWN_BYTES // max(1, batch_bytes))
            self._steps_in_array = in_array = max(1, most, min(2, together))
            self._most_steps = max(in_array, together - together % in_array)

    @property
    def is_trying(self) -> bool:
        """Whether turns are under way that nothing was decided by yet."""
        return self._turns.is_trying

    def begin_step(self, now: float) -> None:
        """The training has its batch, or an error, and does its own work."""
        self._step_began = now

    def end_step(self, now: float) -> None:
        """The training asks for a batch."""
        if self._step_began is not None:
            self._step_seconds += now - self._step_began
            self._step_began = None

    def makes(self, place: tuple[int, int]) -> bool:
        """Whether the training makes the batch of a place, as far as is known now."""
        return place < self._until

    def ready(self, place: tuple[int, int]) -> tuple[Any, int] | None:
        """Return a batch that the training makes, as the caller gets it, and how many samples it has.

        It returns the same batch until `let_go`. None: `take` returns it, as threads made it or samples of it failed.
        """
        if not self.makes(place):
            return None
        self._engine.check_usable()
        if place not in self._ready and place not in self._failed:
            self._make_from(place)
        return self._ready.get(place)

    def take(self, epoch: int, step: int) -> StagedBatch:
        """Return a batch; see `Engine.take`."""
        if (staged := self._failed.pop((epoch, step), None)) is not None:
            return staged
        if self._has_made:  # the last one was handed out
            self.forget_made()
        staged = self._engine.take(epoch, step)
        if self._turns.is_over:
            return staged
        count = self._note(staged.samples.size, 1, is_own=False)
        if count:
            self._until = self._place_after((epoch, step), count)
            self._engine.seek(*self._until)
        self._pause(bool(count) or self._turns.is_trying)
        return staged

    def let_go(self, epoch: int, step: int) -> None:
        """See `Engine.let_go`."""
        if self._ready.pop((epoch, step), None) is None:
            self._engine.let_go(epoch, step)

    def _note(self, samples: int, batches: int, *, is_own: bool) -> float:
        """Take note of batches that are there now; see `Turns.given`."""
        now, processor = self._clock(), time.process_time()
        steps, seconds = self._step_seconds, now - self._noted
        before = self._turns.choice
        count = self._turns.given(
            Given(samples, batches, is_own, steps, seconds - steps, processor - self._processor_noted)
        )
        self._noted, self._processor_noted, self._step_seconds = now, processor, 0.0
        if (choice := self._turns.choice) is not None and (before is None or choice.is_own != before.is_own):
            self._report(_line(choice))
        return count

    def _pause(self, is_paused: bool) -> None:
        if is_paused != self._switching.is_paused:
            self._switching.pause(is_paused)

    def forget_made(self) -> None:
        """Keep nothing of what was made here, as when all of it was taken, or the epoch was left."""
        self._has_made = False
        self._ready.clear()
        self._failed.clear()
        slots = range(MADE, MADE + self._most_steps, self._steps_in_array)
        if isinstance(self._decoder, CollatingDecoder):
            for slot in slots:
                self._decoder.take(slot, ())
            self._decoder.forget_latest()
        elif self._beside is not None:
            for slot in slots:
                self._beside.drop(slot)

    def close(self) -> None:
        """Keep no batch. Also while another thread is inside, which then finds that the engine is closed."""
        self._ready, self._failed = _Presented(), {}

    def _place_after(self, place: tuple[int, int], samples: float) -> tuple[int, int]:
        epoch, step = place
        size = max(1, self._plan.local_batch_size(self._rank, epoch, 0))
        # One at least, also after the last of an epoch, which may have few samples: a turn of none tells nothing.
        epochs, step = divmod(step + 1 + max(1, int(samples / size)), self._plan.steps(epoch))
        if epoch + epochs >= self._plan.epochs:
            return self._plan.epochs, 0
        return self._plan.first_read_from(self._rank, epoch + epochs, step)

    def _make_from(self, place: tuple[int, int]) -> None:
        """Make some batches from a place on."""
        begin = self._clock()
        samples = self._samples_from(place)
        collates = isinstance(self._decoder, CollatingDecoder)
        at_once = 1 if collates else max(1, _AT_ONCE // samples.shape[1])
        make = partial(
            self._engine.make, *place, samples, self._steps_in_array, at_once, self._fetcher, self._decoder
        )
        self._has_made = True
        if self._front_end.is_plain_thread():
            with self._front_end.as_workers():
                found, ready = self._presented(make)
        else:
            found, ready = _in_new_thread(self._front_end.begin_thread, partial(self._presented, make))
        self._ready = ready
        self._failed = {(staged.epoch, staged.step): staged for staged in found if staged.failed}
        # A thread that other programs kept from the processors is no slower for long.
        self._sample_seconds = min((self._clock() - begin) / samples.size, 1.1 * self._sample_seconds)
        self._times += 1
        # Not each time: objects have many parts.
        if collates and place in self._ready and (self._collated_bytes is None or is_due(self._times)):
            self._collated_bytes = max(self._collated_bytes or 0.0, nbytes_of(self._ready[place][0]))
        self._note(samples.size, len(samples), is_own=True)
        self._pause(True)

    def _presented(self, make: Callable[[], list[StagedBatch]]) -> tuple[list[StagedBatch], _Presented]:
        """Make some batches; return them, and those that lack nothing as the caller gets them.

        In one thread: what is set in the caller's while it asks for one batch, as inference mode, is not for the rest.
        """
        found, ready = make(), _Presented()
        for staged in found:
            if not staged.failed:
                size = staged.samples.size
                batch = made(self._decoder, self._front_end, None, staged, range(size))
                ready[staged.epoch, staged.step] = batch, size
        return found, ready

    def _samples_from(self, place: tuple[int, int]) -> NDArray[np.int64]:
        """Return the samples of the steps that are made together, int64[steps, local batch]."""
        (epoch, first), (wanted, step) = self._first, place
        if epoch != wanted or not first <= step < first + len(self._ids):
            epoch, first, self._ids = next(self._following, (-1, 0, self._ids))
            if (epoch, first) != place:
                self._following = self._plan.batches(self._rank, *place)
                epoch, first, self._ids = next(self._following)
            self._first = epoch, first
        begin, size = step - first, self._ids.shape[1]
        count = int(min(_TOGETHER, _TOGETHER_SECONDS / self._sample_seconds)) // size
        if self._collated_bytes is not None:
            count = min(count, int(_MOST_OWN_BYTES / max(1.0, self._collated_bytes)))
        end = begin + max(1, min(self._most_steps, count))
        if epoch == self._until[0]:  # threads have made what follows
            end = min(end, self._until[1] - first)
        return self._ids[begin:end]


def _line(choice: Choice) -> str:
    chosen = "it makes them" if choice.is_own else "threads load them ahead"
    return (
        f"the training's thread makes batches {choice.speed:.2f} x as fast as threads, with {choice.work:.2f} of their "
        f"processor time: {chosen} from here on"
    )


def _in_new_thread(begin: Callable[[], None], make: Callable[[], _Made]) -> _Made:
    """Return what is made in a thread for which nobody has set anything. begin: see `FrontEnd.begin_thread`."""
    made: list[Any] = []

    def run() -> None:
        try:
            begin()
            made.append(make())
        except BaseException as error:  # raised again in the thread that waits
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    finally:  # Ctrl-C waits for it, as both record in one place; the next one does not
        thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    what: _Made = made[0]
    return what
