"""How long to wait for what another rank sends, and when to ask it again after it did not answer: times in, times out.

    asked ──answered──> learn how much slower than modelled
      └───late──> AWAY: nobody asks; a probe now and then ──any message──> asked again

One late answer is enough: who is asked less often than it could be costs reads of the store, who is asked in vain costs
the time-out for each request.
"""

from __future__ import annotations

from dataclasses import dataclass

#: An answer is late after so many times what it should take, at least, and at most so many seconds. The least is above
#: what a thread waits for a busy processor.
LATE_FACTOR = 8.0
LEAST_SECONDS, MOST_SECONDS = 0.25, 10.0
#: What is never observed has to be allowed for: a round trip, and the time a thread takes to answer.
ROUND_TRIP_SECONDS = 1e-3
#: Between two probes of a rank that is away: doubled each time.
FIRST_PROBE_SECONDS, MOST_PROBE_SECONDS = 0.25, 15.0
#: Observations are forgotten over so many answers.
_MEMORY = 16.0


@dataclass(slots=True)
class PeerPatience:
    """What is known of one other rank.

    bytes_per_second: of its link, as modelled; inf where nothing is known.
    slower: observed over modelled seconds. asked_bytes: that are on their way.
    probe_at: when to see whether it is back; None while it is not away. pause_seconds: until the probe after that.
    """

    bytes_per_second: float
    slower: float = 1.0
    asked_bytes: int = 0
    probe_at: float | None = None
    pause_seconds: float = FIRST_PROBE_SECONDS

    @property
    def is_away(self) -> bool:
        """Whether it did not answer, and was not heard of since."""
        return self.probe_at is not None

    def ask(self, nbytes: int) -> float:
        """Return after how many seconds the answer to a request for so many bytes is late."""
        self.asked_bytes += nbytes
        seconds = LATE_FACTOR * self.slower * self._modelled(self.asked_bytes)
        return min(max(LEAST_SECONDS, seconds), MOST_SECONDS)

    def answered(self, nbytes: int, seconds: float) -> None:
        """Learn from an answer in time. nbytes: as asked for."""
        ratio = seconds / self._modelled(self.asked_bytes)
        self.asked_bytes -= nbytes
        self.slower += (ratio - self.slower) / _MEMORY

    def was_late(self, nbytes: int, now: float) -> bool:
        """Take note of an answer that did not come; return whether that is news."""
        self.asked_bytes -= nbytes
        return self.left(now)

    def left(self, now: float) -> bool:
        """Ask it nothing until it is heard of; return whether that is news."""
        if self.is_away:
            return False
        self.pause_seconds = FIRST_PROBE_SECONDS
        self.probe_at = now + self.pause_seconds
        return True

    def probed(self, now: float) -> None:
        """Take note that a probe is sent."""
        self.pause_seconds = min(2 * self.pause_seconds, MOST_PROBE_SECONDS)
        self.probe_at = now + self.pause_seconds

    def heard(self) -> bool:
        """Take note of any message from it; return whether it was away."""
        was_away, self.probe_at = self.is_away, None
        return was_away

    def _modelled(self, nbytes: int) -> float:
        return ROUND_TRIP_SECONDS + nbytes / self.bytes_per_second
