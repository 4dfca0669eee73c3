"""After which step all ranks stop, when some of them get a signal to: the decision alone, which receives events.

Costs nothing before a signal: no message per step. When a signal comes, training is held for one exchange.

    a rank is told          told ──▶ rank 0
    rank 0 holds all        hold ──▶ every rank: from here on `may_pass` says wait
    each says where it is   at c ──▶ rank 0: it has passed c calls
    rank 0 decides          stop ──▶ every rank: at call max(c) + 1, which no rank has passed

A rank that waits between two steps keeps no other from its answer, so this ends however far apart the ranks are;
and since it waits, none passes the call that is decided.
"""

from __future__ import annotations

from typing import Any

#: A message to a rank.
Messages = list[tuple[int, dict[str, Any]]]


class StopAgreement:
    """One rank's part. Every method that takes an event returns the messages to send now.

    Calls: how often the loop asked whether to stop, which is once per step on every rank; so steps may have any
    numbers. Not thread-safe.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.calls = 0  #: that this rank has passed
        self.signal: int | None = None  #: which stops the job, once this rank knows that one does
        self.stop_call: int | None = None  #: decided
        self.over = False  #: a rank left its loop before any stop was decided: none will be
        self.failure: str | None = None  #: why it is over, if something failed
        self._at: dict[int, int] = {}  # on rank 0, once it holds: calls that each rank has passed
        self._told = False

    @property
    def is_held(self) -> bool:
        """Return whether the loop must wait: a stop is being decided."""
        return self.signal is not None and self.stop_call is None and not self.over

    @property
    def awaits_others(self) -> bool:
        """Return whether this rank has asked for something that is not answered yet."""
        return (self._told or self.is_held) and self.stop_call is None and not self.over

    @property
    def missing(self) -> list[int]:
        """Return the ranks whose answers are awaited."""
        if not self.awaits_others:
            return []
        return [rank for rank in range(self.size) if rank not in self._at] if self.rank == 0 else [0]

    def pass_call(self) -> bool:
        """Count a call, which must not be held, and return whether the loop stops at it."""
        assert not self.is_held, "a loop that is held went on"
        self.calls += 1
        return self.stop_call is not None and self.calls >= self.stop_call

    def tell(self, signal: int) -> Messages:
        """This rank got a signal to stop."""
        if self._told or self.signal is not None or self.over:
            return []
        self._told = True
        return self._hold(signal) if self.rank == 0 else [(0, {"told": signal})]

    def leave(self, failure: str | None = None) -> Messages:
        """This rank's loop is over. failure: why, if it did not end by itself."""
        if self.stop_call is not None or self.over:
            return []
        if self.rank == 0:
            return self._end(failure)
        self.over = True
        return [(0, {"left": failure})]

    def receive(self, sender: int, message: dict[str, Any]) -> Messages:
        """A message came."""
        if self.over or self.stop_call is not None:
            return []
        match message:
            case {"told": signal}:
                return self._hold(signal) if self.signal is None else []
            case {"at": calls}:
                self._at[sender] = calls
                return self._decide()
            case {"left": failure}:
                return self._end(failure)
            case {"hold": signal}:
                self.signal = signal
                return [(0, {"at": self.calls})]
            case {"stop": call}:
                self.stop_call = call
            case {"over": failure}:
                self.over, self.failure = True, failure
        return []

    def give_up(self, failure: str) -> Messages:
        """Whoever is awaited does not come."""
        if self.rank == 0:
            return self._end(failure)
        self.over, self.failure = True, failure
        return [(0, {"left": failure})]

    def _hold(self, signal: int) -> Messages:
        self.signal = signal
        self._at = {0: self.calls}
        return self._to_all({"hold": signal}) + self._decide()

    def _decide(self) -> Messages:
        if len(self._at) < self.size:
            return []
        self.stop_call = 1 + max(self._at.values())
        return self._to_all({"stop": self.stop_call})

    def _end(self, failure: str | None) -> Messages:
        self.over, self.failure = True, failure
        return self._to_all({"over": failure})

    def _to_all(self, message: dict[str, Any]) -> Messages:
        return [(rank, message) for rank in range(1, self.size)]
