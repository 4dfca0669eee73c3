"""What the engine's threads call: a fetcher brings what there is of samples, a decoder writes it into a batch slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.flow.pieces import Pieces
from penstock.flow.staging import Field
from penstock.policy import Load
from penstock.trace.schema import SOURCE, STAGING


class Failed(NamedTuple):
    """Why one sample of a group could not be had, in the place of its bytes."""

    error: Exception


class InParts(list[Any]):
    """Nothing, in place of what there is of samples: for parts of these the fetcher is asked again, by idle readers."""


class Latest(Protocol):
    """Tells which sample a thread is at, whenever that is asked."""

    @property
    def latest(self) -> int:
        """The sample; -1 where the thread is at none."""
        ...


class Taken(NamedTuple):
    """Samples that are taken from an iterator over them, faster than by a call for each."""

    samples: list[int]
    following: Iterator[int]

    @property
    def latest(self) -> int:
        """The one that was taken last; the first, if none was."""
        return self.samples[max(0, len(self.samples) - 1 - length_hint(self.following))]


class Request(NamedTuple):
    """Samples that a thread wants, all from one place.

    ids: int64[n], of the samples.
    origin: SOURCE, or the number of the tier to take them from.
    rests: of each sample, the tier that is to keep what comes from the source, or STAGING; empty where none keeps any.
    at: called with each sample in its turn; where it follows, also with `Taken`, once for all of its samples.
    lasting: whether the bytes are wanted beyond this thread's next request.
    into: where their bytes may be put one behind the other, if all have one size and fill it.
    epoch: that they are for; code of a user may ask for it.
    shared: gets those of the ids that come from memory of the host's jobs, in place of the source; None: nobody asks.
    """

    ids: NDArray[np.int64]
    at: Callable[[Any], None]
    origin: int = SOURCE
    rests: Sequence[int] = ()
    lasting: bool = False
    into: NDArray[np.uint8] | None = None
    epoch: int = 0
    follows: bool = False
    shared: list[int] | None = None

    def one_by_one(self, samples: list[int]) -> Iterator[int]:
        """Return `samples` for code that takes them one by one, and let `at` know which it has taken."""
        if not self.follows:
            return map(self._at_of, samples)
        taken = Taken(samples, iter(samples))
        self.at(taken)
        return taken.following

    def _at_of(self, sample: int) -> int:
        self.at(sample)
        return sample

    @property
    def samples(self) -> list[int]:
        """The same for code that takes them one by one."""
        found: list[int] = self.ids.tolist()
        return found

    @property
    def is_kept(self) -> bool:
        """Whether a tier is to keep any of them."""
        return self.rests.count(STAGING) < len(self.rests)


class Fetcher(Protocol):
    """Brings the bytes of samples, from their source or a tier. Any thread may call it at any time."""

    @property
    def place(self) -> str:
        """Name the store that is read from, for messages."""
        ...

    def fetch(self, request: Request) -> list[Any] | Pieces:
        """Return what there is of each sample, uint8[bytes] of stored ones, or `Failed`; `Pieces` where none is.

        `InParts` where the request is lasting and one thread would take long.
        """
        ...

    def describe(self, sample: int) -> str:
        """Name a sample for messages, by its path where it has one."""
        ...

    def take_lost(self) -> Sequence[tuple[float, float]]:
        """Return when attempts to read began that failed, and when they were made again, since the last call.

        By the clock that a recorder has unless it is given another.
        """
        ...

    def ended_tiers(self) -> Sequence[int]:
        """Return the numbers of the tiers that have failed, and keep no more samples."""
        ...

    def evict(self, ids: NDArray[np.int64]) -> None:
        """Keep samples in no tier any longer, which no other call is about. ids: int64[n]."""
        ...

    def end_waits(self) -> None:
        """Have reads that wait to be tried again fail: their results are not wanted any more."""
        ...

    def close(self) -> None:
        """Give back what it holds. No thread runs any more."""
        ...


class Peers(Protocol):
    """What other ranks keep for this one. One thread at a time asks."""

    @property
    def has_news(self) -> bool:
        """Whether they keep samples that they did not keep the last time."""
        ...

    def take_news(self) -> Sequence[tuple[int, NDArray[np.int64] | None]]:
        """Return, by rank, the samples that it keeps since the last time; None where it gives none from now on.

        -t among them: its tier t gets no more.
        """
        ...


class FetcherOver(ABC):
    """A `Fetcher` that has another one do most of the work."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    @abstractmethod
    def fetch(self, request: Request) -> list[Any] | Pieces:
        """See `Fetcher`."""

    @property
    def place(self) -> str:
        return self._fetcher.place

    def describe(self, sample: int) -> str:
        return self._fetcher.describe(sample)

    def take_lost(self) -> Sequence[tuple[float, float]]:
        return self._fetcher.take_lost()

    def ended_tiers(self) -> Sequence[int]:
        return self._fetcher.ended_tiers()

    def evict(self, ids: NDArray[np.int64]) -> None:
        self._fetcher.evict(ids)

    def end_waits(self) -> None:
        self._fetcher.end_waits()

    def close(self) -> None:
        self._fetcher.close()


class Brought(NamedTuple):
    """Some rows of a batch to be decoded: of each, its sample and what the fetcher brought.

    shared: gets those of the ids whose pixels come from memory of the host's jobs; None: nobody asks.
    """

    rows: Sequence[int]
    ids: NDArray[np.int64]
    data: Sequence[Any]
    shared: list[int] | None = None


def without_failed(brought: Brought) -> tuple[Brought, Sequence[int], list[tuple[int, Exception]]]:
    """Return those rows that were brought, their indices, and of the others index and error."""
    rows, ids, data, shared = brought
    had: Sequence[int] = range(len(rows))
    if isinstance(data, Pieces) or Failed not in set(map(type, data)):
        return brought, had, []
    failed = [(index, each.error) for index, each in enumerate(data) if isinstance(each, Failed)]
    had = [index for index in had if not isinstance(data[index], Failed)]
    return (
        Brought([rows[index] for index in had], ids[list(had)], [data[index] for index in had], shared),
        had,
        failed,
    )


class Decoder(Protocol):
    """Turns what a fetcher brings into rows of a batch slot. Any thread may call it at any time."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a batch: what it writes of each sample."""
        ...

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> NDArray[np.uint8] | None:
        """Return where in a slot the bytes of some rows belong as they are stored; None where they do not."""
        ...

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Write some rows of a slot; return the failed ones, each by its index in them, with the reason.

        arrays: of the slot, [batch size, *shape] each. at: called with each sample in its turn, or once with `Latest`.
        """
        ...

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold these rows of the slot."""
        ...
