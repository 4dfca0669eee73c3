"""How short messages travel between the ranks of a job: the seam between what ranks agree on and who carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.units import format_names

#: How long a rank may give no sign of life before it is named.
TIMEOUT_SECONDS = 60.0

#: Ranks named in one message; more are counted.
NAMED_RANKS = 8

#: Between two looks for a message: an eighth of the time waited so far, within these bounds. A wait is prolonged by
#: an eighth at most, and thousands of waiting ranks do not flood the one that holds their messages.
LEAST_PAUSE_SECONDS = 0.0002
MOST_PAUSE_SECONDS = 0.05


class RankTransport(Protocol):
    """Carries messages from each rank to each other, in order. Used by one thread at a time, any thread."""

    @property
    def rank(self) -> int:
        """Return this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        ...

    def send(self, to: int, message: bytes) -> None:
        """Send a message; it arrives without another call on this side.

        Raises: RankError if it cannot be sent; WaitTimeout if whoever must take it does not.
        """
        ...

    def receive(self, sender: int) -> bytes | None:
        """Return the next message from a rank; None, at once, if there is none yet. Raises: RankError, WaitTimeout."""
        ...


class NoTransport:
    """The transport of a rank that is alone."""

    rank = 0
    size = 1

    def send(self, to: int, message: bytes) -> None:
        raise AssertionError("a rank alone has nobody to write to")

    def receive(self, sender: int) -> bytes | None:
        raise AssertionError("a rank alone hears of nobody")


def pause_seconds(elapsed_seconds: float) -> float:
    """Return how long to sleep before the next look for a message."""
    return min(max(LEAST_PAUSE_SECONDS, elapsed_seconds / 8), MOST_PAUSE_SECONDS)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them: "rank 2", "ranks 1, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_names(map(str, ranks), NAMED_RANKS)}"
