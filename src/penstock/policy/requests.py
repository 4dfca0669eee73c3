"""How many requests to a remote store are under way at once, and when a request that failed is made again.

A store answers each request after some time and delivers all of them at some rate; what keeps it busy is the product of
both, which nobody knows beforehand. So requests in flight are doubled while that raises the rate, then tried a little
more from time to time. Answers that ask for less ("slow down", a time-out) halve them once they are more than a few.

    limit    8    16    32    64       64  80  64       64  ...  32      40  50  64
    rate     r    2r    4r    4.4r     same: back       many 503       as long as it helps

What fails for a while is made again after a random pause, at most twice as long each time, until that has lasted for as
long as the user gave. Pure: it receives events with their times.

Source: Brooker, "Exponential backoff and jitter", AWS Architecture Blog 2015 ("full jitter").
"""

from __future__ import annotations

from dataclasses import dataclass

#: To begin with, and at most: more connections than that no store of one process rewards.
FIRST_LIMIT, MOST_LIMIT = 8, 1024
#: A step up is kept if the rate grows by this share of it.
_KEPT_SHARE = 0.3
#: Steps up: at first, and later.
_FIRST_STEP, _LATER_STEP = 2.0, 1.25
#: After a step that did not help, so many rounds pass before the next. Each round is so many times the limit.
_ROUNDS_OF_REST, _TIMES_THE_LIMIT = 8, 2
#: Of a round's answers, the share that ask for less which is taken for no accident.
_REFUSED_SHARE = 0.2
_LEAST_REFUSED = 4

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0


class RequestLimit:
    """How many requests may be under way at once. Not thread-safe.

    most: more are never allowed.

    Attributes: limit, in_flight.
    """

    def __init__(self, most: int = MOST_LIMIT) -> None:
        self._most = most
        self.limit, self.in_flight = min(FIRST_LIMIT, most), 0
        self._step = _FIRST_STEP
        #: Up to here the way back after a fall is as fast as the way there was; whether a round ended since the fall.
        self._good, self._has_measured = 0, False
        #: What the limit was before the step that is tried, and the rate there; None while none is.
        self._before: tuple[int, float] | None = None
        self._rest = 0
        #: Of the round that is measured: when it began, answers, their bytes, and those that asked for less. It begins
        #: once so many answers have passed of what was asked for under another limit.
        self._began = 0.0
        self._answers = self._nbytes = self._refused = 0
        self._to_pass, self._was_full = 1, False

    @property
    def has_space(self) -> bool:
        return self.in_flight < self.limit

    def began(self) -> None:
        """A request is under way."""
        self.in_flight += 1
        self._was_full |= self.in_flight >= self.limit

    def ended(self, nbytes: int, now: float) -> None:
        """A request was answered with so many bytes, or failed for a reason that has nothing to do with the load."""
        self.in_flight -= 1
        self._count(now)
        self._nbytes += nbytes
        self._look(now)

    def refused(self, now: float) -> None:
        """A request was answered with "too many", or not in time."""
        self.in_flight -= 1
        self._count(now)
        self._refused += 1
        if self._refused >= max(_LEAST_REFUSED, _REFUSED_SHARE * _TIMES_THE_LIMIT * self.limit):
            if self._has_measured:  # else it falls still, as in an outage
                self._good, self._has_measured = 3 * self.limit // 4, False
            self.limit = max(1, self.limit // 2)
            self._step, self._before, self._rest = _LATER_STEP, None, 0
            self._begin_round()

    def _count(self, now: float) -> None:
        if self._to_pass:
            self._to_pass -= 1
            self._refused = self._nbytes = 0
            self._began = now
        else:
            self._answers += 1

    def _begin_round(self) -> None:
        self._answers = self._nbytes = self._refused = 0
        self._to_pass, self._was_full = max(1, self.in_flight), False

    def _look(self, now: float) -> None:
        """See what the round that is over says."""
        if self._to_pass or self._answers < _TIMES_THE_LIMIT * self.limit:
            return
        seconds = now - self._began
        rate = self._nbytes / seconds if seconds > 0 else float("inf")
        if not self._was_full:  # nobody wanted more
            self._begin_round()
            return
        if self._before is not None:
            limit, before = self._before
            self._before = None
            if rate < before * (1 + _KEPT_SHARE * (self.limit / limit - 1)):
                if self._step == _LATER_STEP:
                    self.limit = limit
                self._step, self._rest = _LATER_STEP, _ROUNDS_OF_REST
        self._has_measured = True
        if self._rest:
            self._rest -= 1
        elif self.limit < self._most:
            self._before = self.limit, rate
            step = _FIRST_STEP if 2 * self.limit <= self._good else self._step
            self.limit = min(self._most, max(self.limit + 1, int(self.limit * step)))
        self._begin_round()


@dataclass
class Retrying:
    """When one request that failed is made again.

    budget_seconds: from the first failure to the last attempt, at most. began: the time of the first failure.

    Attributes: count, of failures so far.
    """

    budget_seconds: float
    began: float
    count: int = 0

    def pause_seconds(self, now: float, draw: float) -> float | None:
        """Return how long to wait after one more failure; None if the budget is used up.

        draw: uniform in [0, 1).
        """
        self.count += 1
        left = self.began + self.budget_seconds - now
        if left <= 0:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.count - 1, 30))
        return min(draw * longest, left)
