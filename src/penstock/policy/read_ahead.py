"""How many batch slots are in use: as many as spare the training waits, and no more.

More batches ahead bridge the times in which a store answers late. Where the store, or decoding, is slower on the whole,
they bring nothing. Where all decode threads had work all the time, it is decoding; else only trying tells which it is.
"""

from __future__ import annotations

from dataclasses import dataclass

# A window is so many batches for each slot, and so long, at least: stores that stop now and then do so every second.
_WINDOW_BATCHES = 2
_WINDOW_SECONDS = 1.0
# Share of the time that the training has to wait for twice as many slots to be tried; to what share of that wait these
# must bring it down; windows with each of the two numbers, in turns.
_WORTH_TRYING = 0.02
_GAIN = 0.75
_PAIRS = 3
# Windows before what has lost is tried again, which doubles each time; or so many windows in a row in which the
# training waits this many times as long.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512
_OTHER_WINDOWS, _OTHER_WAIT = 3, 2.0


@dataclass(slots=True)
class _Sums:
    """Of batches that were taken: how many, the time from one to the next, and what the training waited of it.

    has_idled: whether a decode thread had no work at some time.
    """

    batches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    has_idled: bool = False

    def add(self, batches: int, seconds: float, waited: float) -> None:
        self.batches += batches
        self.seconds += seconds
        self.waited += waited

    @property
    def wait(self) -> float:
        """Seconds for each batch: what the training does between two, such as a validation, changes nothing."""
        return self.waited / self.batches


class ReadAhead:
    """The number of slots in use, found by comparing windows with one number and twice as many.

    first: to begin with, and the fewest. most: that memory holds.
    Call `freed` for each batch that the training has released, and read `slots` after it.
    """

    def __init__(self, first: int, most: int) -> None:
        self._most = max(first, most)
        #: The number that has won so far; and the one that is compared with it now.
        self.settled = first
        self._candidate: int | None = None
        self._is_trying = False
        self._window, self._with_settled, self._with_candidate = _Sums(), _Sums(), _Sums()
        self._pairs = 0
        #: Batches to come before a window begins: at the start, or after the number has changed.
        self._filling = 2 * first
        self._before: tuple[float, float] | None = None
        #: Windows to pass before the next comparison, how many there were at first, and the wait at that time.
        self._pause, self._pause_windows, self._then = 0, _FIRST_PAUSE, 0.0
        self._other_windows = 0

    @property
    def slots(self) -> int:
        """How many may be in use now."""
        return self._candidate if self._candidate is not None and self._is_trying else self.settled

    def freed(self, now: float, stall_seconds: float, *, has_idled: bool) -> None:
        """Take note that the training has released a batch, and has waited so long in all.

        has_idled: whether a decode thread has had no work at some time since the last call.
        """
        before, self._before = self._before, (now, stall_seconds)
        if self._filling or before is None:
            self._filling = max(0, self._filling - 1)
            return
        window = self._window
        window.add(1, now - before[0], stall_seconds - before[1])
        window.has_idled |= has_idled
        if window.batches < _WINDOW_BATCHES * self.slots or window.seconds < _WINDOW_SECONDS:
            return
        self._window = _Sums()
        if self._candidate is None:
            self._watch(window)
        else:
            self._compare(window)

    def _watch(self, window: _Sums) -> None:
        """Begin a comparison if the training waits, unless one was lost lately and the wait is as it was then."""
        is_other = self._pause > 0 and window.wait > _OTHER_WAIT * self._then
        self._other_windows = self._other_windows + 1 if is_other else 0
        self._pause = max(0, self._pause - 1)
        if self._other_windows == _OTHER_WINDOWS:
            self._pause, self._pause_windows = 0, _FIRST_PAUSE
        waits = window.has_idled and window.waited >= _WORTH_TRYING * window.seconds
        if self._pause or self.settled == self._most or not waits:
            return
        self._with_settled, self._with_candidate, self._pairs = _Sums(), _Sums(), 0
        self._candidate = min(2 * self.settled, self._most)
        self._run_with_candidate(True)

    def _compare(self, window: _Sums) -> None:
        assert self._candidate is not None, "the caller has seen to it"
        sums = self._with_candidate if self._is_trying else self._with_settled
        sums.add(window.batches, window.seconds, window.waited)
        self._pairs += not self._is_trying
        if self._pairs < _PAIRS:
            self._run_with_candidate(not self._is_trying)
            return
        if self._with_candidate.wait <= _GAIN * self._with_settled.wait:
            self.settled, self._pause_windows = self._candidate, _FIRST_PAUSE
            self._filling = self.settled
        else:
            self._pause, self._then = self._pause_windows, self._with_settled.wait
            self._pause_windows = min(2 * self._pause_windows, _LONGEST_PAUSE)
        self._candidate = None

    def _run_with_candidate(self, is_trying: bool) -> None:
        self._is_trying = is_trying
        self._filling = self.slots
