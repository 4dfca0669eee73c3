"""A save that is being written while the training continues, and what can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.checkpoint.arguments import checked_timeout
from penstock.checkpoint.state.tensors import Piece
from penstock.errors import RankError, WaitTimeout
from penstock.units import format_bytes, format_seconds

#: That a save waited for the one before; less is no wait.
_LEAST_REPORTED_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot that would outlive a loss of power.

    step: of the training. uid: of the snapshot. reference_step: of its reference; None: it is a baseline.
    raw_bytes: of the state. stored_bytes: written to files, of all ranks, the manifest included.
    blocked_seconds: that training stood still. durable_seconds: from the beginning of the save until it was durable.
    blocked_by_previous_seconds: of blocked_seconds, until the save before, of step `previous_step`, was durable.
    tier: where it is. note: what else there is to say, such as why not on a nearer tier.
    """

    step: int
    uid: str
    reference_step: int | None
    raw_bytes: int
    stored_bytes: int
    blocked_seconds: float
    durable_seconds: float
    tier: str
    note: str = ""
    blocked_by_previous_seconds: float = 0.0
    previous_step: int | None = None

    def __str__(self) -> str:
        waited = ""
        if self.previous_step is not None and self.blocked_by_previous_seconds >= _LEAST_REPORTED_SECONDS:
            waited = f" ({format_seconds(self.blocked_by_previous_seconds)} for step {self.previous_step})"
        return self.line(f"blocked {format_seconds(self.blocked_seconds)}{waited}, durable") + self.note

    def line(self, what: str) -> str:
        """Return a line that begins with what was done."""
        share = f" ({self.stored_bytes / self.raw_bytes:.1%})" if self.raw_bytes else ""
        kind = "baseline" if self.reference_step is None else f"delta to step {self.reference_step}"
        return (
            f"step {self.step}: {what} after {format_seconds(self.durable_seconds)}, wrote "
            f"{format_bytes(self.stored_bytes)} of {format_bytes(self.raw_bytes)}{share}, {kind}"
        )


class Waves:
    """What the training thread has staged and the background has not written yet. Shared by these two."""

    def __init__(self, areas: int, waves: int, nbytes: int) -> None:
        """areas: how many waves can be staged at a time. waves: how many there are. nbytes: of all together."""
        self._waves, self.nbytes = waves, nbytes
        #: guards all below
        self._changed = threading.Condition()
        #: All that were handed over, in their order. Those of areas that were reused are lost.
        self._staged: list[Sequence[Piece]] = []
        self._free = areas
        self._is_over = False
        self._is_left_off = False

    @property
    def is_damaged(self) -> bool:
        """Return whether the copying of the state was left off."""
        return self._is_left_off

    def wait_for_area(self) -> bool:
        """Return once a wave can be staged; False if nobody will write it any more."""
        with self._changed:
            while not self._free and not self._is_over:
                self._changed.wait()
            self._free -= 1
            return not self._is_over

    def put(self, pieces: Sequence[Piece]) -> None:
        """Hand a staged wave over."""
        with self._changed:
            self._staged.append(pieces)
            self._changed.notify_all()

    def leave_off(self) -> None:
        """Have `take` raise where it would wait: what is missing of the state will not come."""
        with self._changed:
            self._is_left_off = True
            self._changed.notify_all()

    def take(self) -> Iterator[Sequence[Piece]]:
        """Yield each wave; its area is free again when the next is asked for.

        Raises: RankError if the copying of the state was left off.
        """
        for number in range(self._waves):
            with self._changed:
                while len(self._staged) <= number:
                    if self._is_left_off:
                        # No fault of a tier, on whichever rank.
                        raise RankError("the state was not copied to its end: there is no such snapshot")
                    self._changed.wait()
                pieces = self._staged[number]
            yield pieces
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def again(self) -> None:
        """Return None: a live state cannot be read again."""

    def give_up(self) -> None:
        """Take nothing more, whatever is staged."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Saving:
    """A save whose state is copied, and which is being written in the background."""

    #: Step that is saved.
    step: int = 0
    #: What was saved, once it is; None before that, and if it failed.
    saved: Saved | None = None

    _error: BaseException | None = None
    #: Whether the failure was raised to somebody; used by who waits.
    _was_reported: bool = False
    #: Waited for in place of the thread: a join that a signal interrupts takes a living thread for ended.
    _ended: threading.Event
    _thread: threading.Thread

    @property
    def is_done(self) -> bool:
        """Return whether it is durable or has failed."""
        return self._ended.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Saved:
        """Return once the snapshot is durable, checked, and what it replaces is removed.

        Raises: what the save failed with; WaitTimeout if it takes longer than the time-out; ConfigError if
            that is no time.
        """
        if not self._ended.wait(checked_timeout(timeout_seconds)):
            raise WaitTimeout(f"the save of step {self.step} is still under way after {timeout_seconds:g} s")
        self._thread.join()
        if self._error is not None:
            self._was_reported = True
            raise self._error
        assert self.saved is not None, "a thread that ended without an error has saved"
        return self.saved


class BackgroundSave(Saving):
    """A thread that writes a save whose state is copied, as the store sees it."""

    def __init__(self, step: int, write: Callable[[], Saved], report: Callable[[object], None]) -> None:
        """write: writes the snapshot, on a thread that `start` starts. report: called with the outcome; never fails."""
        self.step = step
        self._ended = threading.Event()
        # No daemon: an interpreter that ends waits for the snapshot.
        self._thread = threading.Thread(target=self._run, name=f"penstock-save-{step}")
        #: None once it is done: who keeps the outcome need not keep what made it.
        self._write: Callable[[], Saved] | None = write
        self._report = report
        #: guards the end, and what is called then
        self._ending = threading.Lock()
        self._then: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin. Raises: RuntimeError if the system has no thread for it."""
        self._thread.start()

    @property
    def is_begun(self) -> bool:
        """Return whether its thread was started."""
        return self._thread.ident is not None

    def _run(self) -> None:
        try:
            assert self._write is not None, "it runs once"
            self.saved = self._write()
        except BaseException as error:
            self._error = error
        self._report(f"step {self.step}: NOT saved: {self._error}" if self._error else self.saved)
        with self._ending:
            self._ended.set()
            to_call, self._then = self._then, []
        for then in to_call:
            then()
        # Last: with it a store may go that nobody closes, and what is called before must find it open.
        self._write = None

    @property
    def has_failed(self) -> bool:
        """Return whether it is known by now that it failed."""
        return self.is_done and self._error is not None

    def forget_failure(self) -> None:
        """Return once it has ended; what it fails with, somebody knows already."""
        self._was_reported = True
        self.joined()

    def joined(self) -> BaseException | None:
        """Return, once it has ended, what it failed with, unless that was raised before."""
        self._ended.wait()
        self._thread.join()
        error = None if self._was_reported else self._error
        self._was_reported = True
        return error

    def at_end(self, then: Callable[[], None]) -> None:
        """Call a function once it has ended and was reported; now, if it has."""
        with self._ending:
            if not self._ended.is_set():
                self._then.append(then)
                return
        then()


def outcome_of(saving: Saving) -> Saved | None:
    """Return what was saved, once it has ended; None if it failed, which the store has yet to report."""
    saving._ended.wait()
    return saving.saved
