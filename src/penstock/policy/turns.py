"""Decides who makes the batches of a training that waits for them: threads, ahead of it, or its own thread.

Each side makes batches for a turn, in alternation, and the rates that the training sees decide. Where the rates are
about equal, the side wins that takes less processor time for a sample: usually the own thread. Where the training has
work of its own to hide loading in, rates alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Turns begin once a training waited for `_WAITED_SHARE` of a window of `_LOOK_SECONDS`, or took a batch in less than
# `_QUICK_SECONDS`: where threads hold the interpreter's lock, for 5 ms each, waits look like the training's own work.
_LOOK_SECONDS, _WAITED_SHARE, _QUICK_SECONDS = 1.0, 0.5, 5e-3
# A turn takes `_TURN_SECONDS` after a beginning that does not count: then threads start to load ahead, or what they
# have loaded ahead is handed out.
_TURN_SECONDS, _BEGINNING_SECONDS, _LEAST_PAIRS, _MOST_PAIRS = 1.0, 0.5, 2, 4
# Ratios of rates: from `_CLEAR` on, turns end before the last pair; below `_TIE`, processor time decides; else the own
# thread wins from `_WORTH` on.
_CLEAR, _TIE, _WORTH = 1.2, 1.25, 1.05
# There is no tie where the training's own work takes more than this share of the time: threads can load meanwhile.
_MOST_OF_STEPS = 0.2
# In its first turn the training's thread makes two batches at least, for `_LEAST_SECONDS` at least. The turn ends early
# if its rate stays below `_HOPELESS` of the threads' rate for `_SURE_SECONDS`: such samples wait for a store. At first
# threads may still load ahead and hold the interpreter's lock, so the rate is looked at every `_SHORT_SECONDS`.
_LEAST_SECONDS, _HOPELESS, _SURE_SECONDS, _SHORT_SECONDS = 0.3, 0.2, 0.5, 0.1
# The training's own work between two batches counts for no more than this, or than that of the batch before: one long
# pause, as for validation, does not make a training slower, and steps that are all long do.
_MOST_STEP_SECONDS = 0.1
# After `_AGAIN_SECONDS` a training that makes its batches is checked: does it still wait for them? If not, threads
# have turns again, which cost 2 to 4 % of the time. Where threads lost clearly n times in a row, and steps are no
# longer than `_ALIKE` times what they were, turns are put off 2 ** (n - 1) - 1 times, `_MOST_PUT_OFF` times at most.
_AGAIN_SECONDS, _ALIKE, _MOST_PUT_OFF = 30.0, 1.25, 15


class Given(NamedTuple):
    """Batches that the training was given.

    samples, batches: how many. is_own: whether the training's thread made them.
    step_seconds: time of the training's own work since the batches before. waited_seconds: the rest of the time.
    processor_seconds: of all threads of the process, since the batches before.
    """

    samples: int
    batches: int
    is_own: bool
    step_seconds: float
    waited_seconds: float
    processor_seconds: float


class Choice(NamedTuple):
    """What turns have shown.

    speed: rate of the training's thread over that of threads. work: processor time of a sample that it makes, over that
    of one that threads make. is_own: whether it makes batches from here on.
    """

    speed: float
    work: float
    is_own: bool


@dataclass(slots=True)
class _Sums:
    """Sums of what was given in a stretch of time."""

    samples: int = 0
    batches: int = 0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    processor_seconds: float = 0.0

    def add(self, given: Given) -> None:
        self.samples += given.samples
        self.batches += given.batches
        self.step_seconds += given.step_seconds
        self.waited_seconds += given.waited_seconds
        self.processor_seconds += given.processor_seconds

    @property
    def seconds(self) -> float:
        return self.step_seconds + self.waited_seconds

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def work(self) -> float:
        """Processor seconds of a sample."""
        return self.processor_seconds / max(self.samples, 1)

    @property
    def batch_step_seconds(self) -> float:
        """The training's own work for a batch."""
        return self.step_seconds / max(self.batches, 1)

    @property
    def may_matter(self) -> bool:
        """Whether the training may wait, so that it matters who makes batches."""
        return (
            self.waited_seconds >= _WAITED_SHARE * self.seconds
            or self.seconds < self.batches * _QUICK_SECONDS
        )


class Turns:
    """Decides who makes the batches that come next, by what the training sees of them.

    may_begin: whether turns may begin, asked where the training may wait.
    """

    def __init__(self, may_begin: Callable[[], bool]) -> None:
        self._may_begin = may_begin
        #: Whether the training makes batches; whether turns are under way; whether threads stay for good.
        self._is_own = self.is_trying = self.is_over = False
        #: What the last turns have shown; None before these are over.
        self.choice: Choice | None = None
        #: Each turn of threads, and of the training.
        self._of_threads, self._of_own = list[_Sums](), list[_Sums]()
        #: How often in a row turns ended with threads clearly slower; how often turns were put off since.
        self._lost = self._put_off = 0
        #: How long the training's first turns were hopeless.
        self._hopeless_seconds = 0.0
        #: The training's own work for one of the latest batches.
        self._latest_step_seconds = 0.0
        self._begin_window(0.0)

    def given(self, given: Given) -> float:
        """Take note of batches; return how many samples the training makes from here on, 0 where nothing changes."""
        if self.is_over:
            return 0
        step_seconds = given.step_seconds / given.batches
        most = max(_MOST_STEP_SECONDS, self._latest_step_seconds)
        self._latest_step_seconds = step_seconds
        given = given._replace(step_seconds=given.batches * min(step_seconds, most))
        if given.is_own != self._is_own:  # what the training was to make is made
            return self._look_again() if not self.is_trying else self._end_turn()
        is_beginning = self._all.seconds < self._beginning_seconds
        self._all.add(given)
        if is_beginning:
            return 0
        self._window.add(given)
        if given.is_own or self._window.seconds < (_TURN_SECONDS if self.is_trying else _LOOK_SECONDS):
            return 0
        if self.is_trying:
            return self._end_turn()
        window = self._window
        self._begin_window(0.0)
        if not window.may_matter or not self._may_begin():
            return 0
        self.is_trying = True
        self._of_threads, self._of_own = [window], []
        self._begin_turn(is_own=True)
        return 2.0 * given.samples

    def _begin_window(self, beginning_seconds: float) -> None:
        self._beginning_seconds = beginning_seconds
        #: Of the window, and with its beginning.
        self._window, self._all = _Sums(), _Sums()

    def _begin_turn(self, *, is_own: bool) -> None:
        self._is_own = is_own
        self._begin_window(_BEGINNING_SECONDS)

    def _own_for(self, seconds: float, rate: float) -> float:
        self._begin_turn(is_own=True)
        return max(1.0, seconds * rate)

    def _end_turn(self) -> float:
        """Compare, choose, or have the others take their turn."""
        of_threads, of_own = self._of_threads, self._of_own
        if not self._is_own:
            of_threads.append(self._window)
            return self._own_for(_BEGINNING_SECONDS + _TURN_SECONDS, of_own[-1].rate)
        if self._window.seconds < _LEAST_SECONDS:
            turn = self._all
            if turn.rate > _HOPELESS * of_threads[-1].rate:
                return self._own_for(_BEGINNING_SECONDS + _TURN_SECONDS, turn.rate)
            self._hopeless_seconds += turn.seconds
            if self._hopeless_seconds < _SURE_SECONDS:
                return self._own_for(_SHORT_SECONDS, turn.rate)
            of_own.append(turn)
            return self._settle(choose(of_threads, of_own))
        of_own.append(self._window)
        choice = choose(of_threads, of_own)
        least = _LEAST_PAIRS if not 1 / _CLEAR < choice.speed < _CLEAR else _MOST_PAIRS
        if len(of_own) >= least:
            return self._settle(choice)
        self._begin_turn(is_own=False)
        return 0

    def _settle(self, choice: Choice) -> float:
        self.choice = choice
        self.is_trying, self.is_over = False, not choice.is_own
        self._is_own = False
        self._lost, self._put_off = self._lost + 1 if choice.speed >= _CLEAR else 0, 0
        return self._own_for(_AGAIN_SECONDS, self._of_own[-1].rate) if choice.is_own else 0

    def _look_again(self) -> float:
        """Return for how many samples more the training makes its batches: none, once it has other things to do."""
        window = self._window
        waits = window.waited_seconds >= _WAITED_SHARE * window.seconds
        if window.samples and (waits or self._puts_off(window)):
            return self._own_for(_AGAIN_SECONDS, window.rate)
        self._begin_turn(is_own=False)
        return 0

    def _puts_off(self, window: _Sums) -> bool:
        """Whether threads would hardly win by now, and take note that their turns were put off."""
        are_alike = window.batch_step_seconds <= _ALIKE * self._of_own[-1].batch_step_seconds
        self._put_off += 1
        return are_alike and self._put_off < min(2 ** (self._lost - 1), _MOST_PUT_OFF + 1)


def choose(of_threads: Sequence[_Sums], of_own: Sequence[_Sums]) -> Choice:
    """Return who makes the batches, by turns of threads and of the training's thread.

    In a tie it is who makes more of them for the processor time, of which each side's least counts: other programs add
    to it.
    """
    speed = sum(turn.rate for turn in of_own) / max(sum(turn.rate for turn in of_threads), 1e-9)
    work = min(turn.work for turn in of_own) / max(min(turn.work for turn in of_threads), 1e-12)
    steps = sum(turn.step_seconds for turn in of_own) / max(sum(turn.seconds for turn in of_own), 1e-9)
    is_tie = 1 / _TIE < speed < _TIE and steps <= _MOST_OF_STEPS
    return Choice(speed, work, speed >= (work if is_tie else _WORTH))
