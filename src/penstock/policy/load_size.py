"""How many samples a Load takes: a millisecond's worth, or more where a call costs much however many it is for."""

from __future__ import annotations

# What an instruction costs (about 50 us) should be little beside its work, and a batch not wait for one of its Loads.
_LOAD_SECONDS = 1e-3
# By what factor samples are believed to have become slower for each Load that says so.
_SLOWER = 1.25
# Twice as many samples are worth it where each takes this share of the time at most, the median of so many Loads.
_WORTH_DOUBLING = 0.8
_TRIED_LOADS = 3


class LoadSize:
    """Found by doubling: a Load of twice as many samples stays where each of them takes clearly less of its time.

    That is so for a data set whose `__getitems__` asks a database once, and not for one that decodes pictures.
    """

    def __init__(self) -> None:
        #: Of a Load: of the fastest lately, as others may only have waited for a processor; None until one has ended.
        self._sample_seconds: float | None = None
        #: What is tried, how long each sample took in Loads of that size, and in those of half of it.
        self._tried = 1
        self._seconds: list[float] = []
        self._half_seconds = float("inf")
        self._is_settled = False

    @property
    def samples(self) -> int:
        """How many samples the next Load should take; 1 until one has ended."""
        if self._sample_seconds is None:
            return 1
        return max(self._tried, int(_LOAD_SECONDS / max(self._sample_seconds, 1e-9)))

    def load_done(self, samples: int, seconds: float) -> None:
        """Take note that a Load of so many samples took so long."""
        each, usual = seconds / samples, self._sample_seconds
        self._sample_seconds = each if usual is None else min(each, _SLOWER * usual)
        if self._is_settled or samples != self._tried:
            return
        self._seconds.append(each)
        if len(self._seconds) < _TRIED_LOADS:
            return
        median = sorted(self._seconds)[_TRIED_LOADS // 2]
        self._seconds = []
        if median <= _WORTH_DOUBLING * self._half_seconds:
            self._half_seconds = median
            self._tried *= 2
        else:
            self._is_settled = True
            self._tried //= 2
