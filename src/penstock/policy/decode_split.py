"""Where the next samples are decoded: here, or on which decode server. Times in, places out.

A place has a line of samples that it was given, and has shown how long a sample of its line takes: from the moment at
which some are given to it until it has done with them, over all that were in the line then. That counts reading,
decoding, the link and every thread of the place in one number, which is right where the line is long, the only case in
which it matters. Samples go where they are done first, so that in a run that waits for decoding all lines take equally
long, and all places are busy.

What a server decodes still costs something here: it is received, decrypted and normalised, by processors that decode
else. So crops stand in this process's line, too, each as the part of a sample that it costs; and where they cost more
of a processor than decoding, all is decoded here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: The place that is this process. Servers are 1, 2 and so on.
HERE = 0
#: Observations are forgotten over so many groups; over the fewer where a place is faster than it was known to be, as
#: the first groups wait for what is loaded. One that took longer than so many times what is known counts as that many.
_MEMORY, _FASTER_MEMORY, _LATE_FACTOR = 8.0, 2.0, 4.0
#: What nothing is given to is tried again after so many samples: it may have become faster. A server with so few.
TRIED_EVERY, _TRIED_TOGETHER = 1024, 2
#: A server that was asked and has not shown how fast it is yet: so many times slower than this process, up to so many
#: samples.
_UNKNOWN_FACTOR, _MOST_UNKNOWN = 2.0, 64
#: By so much each group that is finished lets the least that finishing takes grow.
_FORGETTING = 1.1
#: Crops that are not finished after so long never are: another step was sought.
FORGOTTEN_SECONDS = 30.0


class Given(NamedTuple):
    """Samples that were given to a place. line: its length then, in samples, with these. began: when, in seconds."""

    place: int
    samples: int
    line: float
    began: float


@dataclass(slots=True)
class Place:
    """What is known of one place.

    line: samples that it was given and has not done. seconds: of a sample of its line; 0 until one is done.
    passed_over: samples that went elsewhere since it was given any. tried_with: samples that it is tried with.
    """

    line: int = 0
    seconds: float = 0.0
    passed_over: int = 0
    tried_with: int = _TRIED_TOGETHER

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known and nothing is to be learned soon."""
        return self.seconds == 0.0 and self.line == 0

    def done_in(self, more: float) -> float:
        """Return after how many seconds its line is done, so much longer; inf while that is not known."""
        return (self.line + more) * self.seconds if self.seconds else math.inf


class DecodeSplit:
    """Shares samples out between this process and its decode servers. Not thread-safe.

    servers: how many there are. receive_seconds: of a processor, to receive one decoded sample.
    """

    def __init__(self, servers: int, receive_seconds: float) -> None:
        self.places = [Place() for _ in range(servers + 1)]
        self._receive_seconds = receive_seconds
        #: Of a processor, that a sample takes here which is decoded here, and one that a server decoded: the least of
        #: late, as crops are all alike, and the first ones may wait for what is compiled. 0: not known.
        self.decode_seconds = self.finish_seconds = 0.0
        #: Crops that servers made and nobody has finished: when they came, and how many.
        self._unfinished: deque[tuple[float, int]] = deque()

    def give(self, samples: int, now: float, away: Sequence[int]) -> Given:
        """Choose where the next samples are decoded: all, or the first few, by which a server is tried again.

        away: servers that do not answer.
        """
        while self._unfinished and now - self._unfinished[0][0] > FORGOTTEN_SECONDS:
            self._unfinished.popleft()
        chosen, samples = self._choose(samples, away)
        for place in self.places:
            place.passed_over += samples
        place = self.places[chosen]
        place.passed_over = 0
        place.line += samples
        return Given(chosen, samples, place.line + (self._crops() if chosen == HERE else 0.0), now)

    def done(self, given: Given, now: float, came: int | None = None) -> None:
        """Learn from samples that are decoded. came: so many of them, where not all that a server was given."""
        place, each = self.places[given.place], (now - given.began) / given.line
        place.line -= given.samples
        if known := place.seconds:
            late = min(each, _LATE_FACTOR * known) - known
            place.seconds += late / (_MEMORY if late > 0 else _FASTER_MEMORY)
        else:
            place.seconds = each
        if given.place != HERE:
            self._unfinished.append((now, given.samples if came is None else came))
            # Of a few most of the time may be a read of the store: what held up nothing is followed by twice as many.
            held_up = came not in (None, given.samples) or now - given.began >= self.places[HERE].done_in(0)
            if self.is_worth_sending and not held_up:
                place.tried_with, place.passed_over = max(place.tried_with, 2 * given.samples), TRIED_EVERY
            else:
                place.tried_with = _TRIED_TOGETHER

    def missed(self, given: Given) -> None:
        """Take note of samples that are not had from where they were given to."""
        self.places[given.place].line -= given.samples

    def computed(self, samples: int, seconds: float, *, is_here: bool) -> None:
        """Learn what a thread of this process computed for samples: to decode them, or to finish what a server did."""
        each = seconds / samples
        if is_here:
            known = self.decode_seconds
            self.decode_seconds = known + (each - known) / _MEMORY if known else each
            return
        self.finish_seconds = min(each, _FORGETTING * self.finish_seconds) if self.finish_seconds else each
        while samples > 0 and self._unfinished:
            came, count = self._unfinished.popleft()
            if count > samples:
                self._unfinished.appendleft((came, count - samples))
            samples -= count

    @property
    def is_worth_sending(self) -> bool:
        """Whether a sample that a server decodes costs a processor of this host less than one that it decodes."""
        return self._crop_share < 1.0

    @property
    def _crop_share(self) -> float:
        """What a crop costs a processor of this host, over what a sample does that is decoded here."""
        if not self.decode_seconds or not self.finish_seconds:
            return 0.0
        return (self.finish_seconds + self._receive_seconds) / self.decode_seconds

    def _crops(self) -> float:
        """Return how much longer crops make this process's line."""
        return self._crop_share * sum(count for _, count in self._unfinished)

    def _choose(self, samples: int, away: Sequence[int]) -> tuple[int, int]:
        """Return a place, and how many of the samples it gets."""
        there = [place for place in range(1, len(self.places)) if place not in away]
        if not there or self.places[HERE].is_unknown:
            return HERE, samples
        for place in (HERE, *there):
            known = self.places[place]
            if known.is_unknown:
                return place, samples
            if known.line == 0 and known.passed_over >= TRIED_EVERY:
                return place, samples if place == HERE else min(samples, known.tried_with)
        if not self.is_worth_sending:
            return HERE, samples
        here, crops = self.places[HERE], self._crops()
        finished = here.done_in(crops + self._crop_share * samples)
        seconds = {place: max(self._done_in(self.places[place], samples), finished) for place in there}
        seconds[HERE] = here.done_in(crops + samples)
        # Nothing is known at first: then by the length of the lines.
        return min(seconds, key=lambda place: (seconds[place], self.places[place].line)), samples

    def _done_in(self, server: Place, samples: int) -> float:
        """Return after how many seconds a server has done with its line and some more."""
        if server.seconds or server.line + samples > _MOST_UNKNOWN:
            return server.done_in(samples)
        return (server.line + samples) * _UNKNOWN_FACTOR * (self.places[HERE].seconds or math.inf)
