"""How many threads load samples at once: as many as raise the rate, and no more.

One thread per processor is right for code that computes without the interpreter's lock. Code that waits for a store
wants more, code that holds the lock wants one. From outside both look alike, a thread that takes longer than it
computes, so they are distinguished by what another number of threads does to the rate of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A rate is taken over this long at least, and over so many Loads of each thread.
_WINDOW_SECONDS = 0.1
_WINDOW_LOADS = 4
# Windows with the candidate, each between two with the settled number, before a comparison that is not clear is
# decided. More threads must win each time, fewer must not lose in sum: other programs on the same processors change
# rates as much as threads do.
_MOST_TRIES = 4
# At the beginning, windows count from the first whose rate is not above this many times that of the one before:
# while files are opened and kernels loaded, the rate rises by itself.
_RISES = 1.25
# A rate this many times what is asked, compared with the windows before and after it, decides at once.
_CLEAR = 1.4
# Share of waiting below which threads compute in parallel and nothing can be gained; from which it is worth trying
# twice as many; from which that is tried before fewer.
_COMPUTES = 0.1
_WAITS = 0.5
_MOSTLY_WAITS = 0.8
# A thread that loads a sample in less waits for the others, whose Python code takes 30 to 70 us of it, more than for a
# store: fewer are tried before more.
_QUICK_SECONDS = 200e-6
# More threads must raise the rate by this factor for each doubling and for one thread more; fewer may lower it by that.
_WORTH_DOUBLING = 1.15
_WORTH_ONE = 1.05
_WORTH_KEEPING = 0.98
# What was settled is asked again after this long, which doubles each time, or when rate or waiting are other than then.
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 640.0
# With fewer threads than processors, which may be a mistake, made while other programs ran, that halves the rate.
_LONGEST_PAUSE_BELOW_SECONDS = 16.0
_OTHER_RATE = 2.0
_OTHER_WAITING = 0.3
_OTHER_WINDOWS = 5
# One thread of so many is between two requests.
_BETWEEN_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """How many threads load, and why, for whoever reports it.

    threads: that load now. least, most: between which the number may change; equal for a number that was given.
    waiting: share of a Load's time in which its thread did not compute: it waited for a store, the lock, a processor.
    more: a larger number that was tried, and its rate over that of `threads`; None where none was.
    fewer: the same of a smaller number, the latest that was tried.
    """

    threads: int
    least: int
    most: int
    waiting: float
    more: tuple[int, float] | None
    fewer: tuple[int, float] | None


@dataclass(slots=True)
class _Sums:
    """Of Loads that ended while all threads had work."""

    loads: int = 0
    samples: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, other: _Sums) -> None:
        self.loads += other.loads
        self.samples += other.samples
        self.seconds += other.seconds
        self.wall_seconds += other.wall_seconds
        self.cpu_seconds += other.cpu_seconds

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def waiting(self) -> float:
        return max(0.0, 1.0 - self.cpu_seconds / self.wall_seconds) if self.wall_seconds else 0.0


class ThreadCount:
    """The number of threads that load, found by comparing windows of time with one number and another.

    Windows with the settled number and with a candidate take turns; a candidate that wins becomes the settled number,
    one that loses is not tried again until the pause is over or the work has changed. So the number changes finitely
    often in a pause, whatever the rates do. Call `load_done` for each Load that ended, and read `threads` after it.

    first: to begin with. most: the largest that may be tried; the number stays at `first` unless that is larger or
        `least` smaller.
    """

    __slots__ = (
        "_beaten",
        "_candidate",
        "_candidate_latest",
        "_compared",
        "_fewer",
        "_first",
        "_least",
        "_mixed",
        "_more",
        "_most",
        "_other_windows",
        "_pause_ends",
        "_pause_seconds",
        "_rising",
        "_settled",
        "_settled_before",
        "_since",
        "_then",
        "_tries",
        "_waiting",
        "_window",
        "_with_candidate",
        "_with_settled",
    )

    def __init__(self, first: int, most: int, least: int = 1) -> None:
        self._least, self._most = min(least, first), max(first, most)
        self._settled = first
        self._first = first
        #: The number that windows run with instead, and the one that the comparison under way is about.
        self._candidate: int | None = None
        self._compared = first
        #: Numbers that lost against the settled one, or against one that did, since the last pause.
        self._beaten: set[int] = set()
        self._window = _Sums()
        #: Samples per second of the window before, until the rate stops to rise by itself; then None.
        self._rising: float | None = 0.0
        #: Since the comparison began; the latest window of each number in it.
        self._with_settled, self._with_candidate = _Sums(), _Sums()
        self._settled_before, self._candidate_latest = _Sums(), _Sums()
        self._tries = 0
        #: Loads to come that ran with another number of threads, in part.
        self._mixed = 2 * first  # the first ones open files and compile
        self._since: float | None = None
        #: Of the settled number, when it was: what a change of the work is seen by.
        self._then: _Sums | None = None
        self._other_windows = 0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._pause_ends = float("inf")
        self._waiting = 0.0
        self._more: tuple[int, float] | None = None
        self._fewer: tuple[int, float] | None = None

    @property
    def threads(self) -> int:
        """How many may load now."""
        return self._settled if self._candidate is None else self._candidate

    @property
    def settled(self) -> int:
        """The number that has won so far, whatever is tried now."""
        return self._settled

    @property
    def facts(self) -> ThreadFacts:
        """What is known so far."""
        return ThreadFacts(self._settled, self._least, self._most, self._waiting, self._more, self._fewer)

    def load_done(
        self, samples: int, wall_seconds: float, cpu_seconds: float, now: float, were_busy: bool
    ) -> None:
        """Take note that a Load ended.

        wall_seconds, cpu_seconds: from its begin to its end, but for waiting for a processor, and what its thread
            computed meanwhile.
        were_busy: whether all threads had work since the last Load ended; what the consumer or the store limits says
            nothing about threads.
        """
        since, self._since = self._since, now
        if self._least == self._most:
            return
        if self._mixed:
            self._mixed -= 1
            return
        if not were_busy or since is None:
            return
        self._window.add(_Sums(1, samples, now - since, wall_seconds, cpu_seconds))
        if self._window.seconds < _WINDOW_SECONDS or self._window.loads < _WINDOW_LOADS * self.threads:
            return
        window, self._window = self._window, _Sums()
        if self._candidate is None:
            self._settled_window(window, now)
        else:
            self._candidate_window(window)

    def limit(self, most: int) -> None:
        """Take note that there can be no more threads than these, so that no number is judged that nobody tried."""
        self._most = min(self._most, most)
        self._least = min(self._least, self._most)
        if max(self._settled, self._compared) > self._most:
            self._settled = self._compared = min(self._settled, self._most)
            self._tries, self._window = 0, _Sums()
            self._run_with(None)

    def _settled_window(self, window: _Sums, now: float) -> None:
        self._waiting = window.waiting
        if self._rising is not None:
            is_rising = window.rate > _RISES * self._rising
            self._rising = window.rate if is_rising else None
            if is_rising:
                return
        if self._tries:
            self._with_settled.add(window)
            before, self._settled_before = self._settled_before, window
            self._compare(before.rate, window.rate)
            return
        if self._then is not None:
            self._look_for_change(window, now)
            if self._then is not None:
                return
        candidate = self._next_candidate(window)
        if candidate is None:
            self._then = window
            self._other_windows = 0
            self._pause_ends = now + self._pause_seconds
            return
        self._with_settled, self._with_candidate, self._settled_before = _Sums(), _Sums(), window
        self._with_settled.add(window)
        self._compared = candidate
        self._run_with(candidate)

    def _candidate_window(self, window: _Sums) -> None:
        self._with_candidate.add(window)
        self._candidate_latest = window
        self._tries += 1
        self._run_with(None)

    def _compare(self, rate_before: float, rate_after: float) -> None:
        """Decide between the settled number and the candidate, or try the candidate once more."""
        tried, before = self._compared, self._settled
        ratio = self._with_candidate.rate / self._with_settled.rate
        latest = self._candidate_latest.rate
        worth = self._worth(tried)
        has_won = latest >= worth * _CLEAR * max(rate_before, rate_after)
        has_lost = latest < worth / _CLEAR * min(rate_before, rate_after) or (
            tried > before and latest < worth * (rate_before + rate_after) / 2
        )
        if not has_won and not has_lost and self._tries < _MOST_TRIES:
            self._run_with(tried)
            return
        self._tries = 0
        if has_lost or (not has_won and ratio < worth):
            self._beaten.add(tried)
            self._note(tried, ratio)
            return
        self._beaten.add(before)
        # Those beyond the number that lost lose too.
        self._beaten.update(range(self._least, before) if tried > before else range(before, self._most + 1))
        self._settled = tried
        self._run_with(None)
        self._more = self._fewer = None
        self._note(before, 1.0 / ratio)

    def _run_with(self, candidate: int | None) -> None:
        self._mixed = self.threads
        self._candidate = candidate

    def _note(self, threads: int, ratio: float) -> None:
        if threads > self._settled:
            self._more = (threads, ratio)
        else:
            self._fewer = (threads, ratio)

    def _next_candidate(self, window: _Sums) -> int | None:
        """Return a number to compare with the settled one; None if there is no reason to."""
        now = self._settled
        step = max(1, now // 4)
        more, fewer = [now + step], [now // 2, now - step]
        if window.waiting >= _WAITS:
            more.insert(0, 2 * now)
        if window.waiting < _COMPUTES:  # in parallel, unless there are too few to tell
            ordered = more if now < self._first else []
        else:
            is_quick = window.wall_seconds < _QUICK_SECONDS * window.samples
            ordered = [*more, *fewer] if window.waiting >= _MOSTLY_WAITS and not is_quick else [*fewer, *more]
        return next(
            (count for count in ordered if self._least <= count <= self._most and count not in self._beaten),
            None,
        )

    def _worth(self, candidate: int) -> float:
        if candidate < self._settled:
            return _WORTH_KEEPING if 2 * candidate <= self._settled else 1.0
        return _WORTH_DOUBLING if candidate >= 2 * self._settled > 2 else _WORTH_ONE

    def _look_for_change(self, window: _Sums, now: float) -> None:
        """Forget what was settled once the pause is over, or the work is another than then for some windows."""
        assert self._then is not None, "asked only when settled"
        ratio = window.rate / self._then.rate
        is_other = (
            not 1.0 / _OTHER_RATE < ratio < _OTHER_RATE
            or abs(window.waiting - self._then.waiting) > _OTHER_WAITING
        )
        self._other_windows = self._other_windows + 1 if is_other else 0
        if self._other_windows >= _OTHER_WINDOWS:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        elif now < self._pause_ends:
            return
        else:
            is_below = self._settled < self._first
            longest = _LONGEST_PAUSE_BELOW_SECONDS if is_below else _LONGEST_PAUSE_SECONDS
            self._pause_seconds = min(2.0 * self._pause_seconds, longest)
        self._beaten.clear()
        self._then = None


class FollowingCount:
    """The number of threads that read from a store which says how many requests it rewards: as many, used as
    `ThreadCount` is.

    least: there are always so many. most: and never more. wanted: returns how many requests may be under way now.
    """

    __slots__ = ("_least", "_most", "_wanted")

    def __init__(self, least: int, most: int, wanted: Callable[[], int]) -> None:
        self._least, self._most, self._wanted = least, max(least, most), wanted

    @property
    def threads(self) -> int:
        """How many may read now: some more than requests, as a thread is not always at one."""
        wanted = self._wanted()
        return min(self._most, max(self._least, wanted + wanted // _BETWEEN_REQUESTS))

    @property
    def settled(self) -> int:
        return self.threads

    @property
    def facts(self) -> ThreadFacts:
        """See `ThreadCount.facts`: nothing is tried here."""
        return ThreadFacts(self.threads, self._least, self._most, 1.0, None, None)

    def load_done(
        self, samples: int, wall_seconds: float, cpu_seconds: float, now: float, were_busy: bool
    ) -> None:
        """What the store rewards is found out elsewhere."""

    def limit(self, most: int) -> None:
        """See `ThreadCount.limit`."""
        self._most = min(self._most, most)
        self._least = min(self._least, self._most)
