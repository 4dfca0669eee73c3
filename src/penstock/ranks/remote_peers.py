"""What ranks of other hosts keep, asked for by message; and what this rank keeps, sent to them.

    reader threads ── read ──> outbox ──┐                               ┌──> answers: who waits for them verifies them
                                        ├── one thread, one carrier ────┤
    this rank's tier, and its log ──────┘                               └──> news: `take_news`, for the scheduler

The thread works when something comes, and sleeps otherwise. It believes nothing: a message that is malformed, of
another generation, or not of a rank of the job is passed by; ids that this rank does not keep are answered as absent.
Bytes of another size or checksum than the reader expects are a miss, and so is an answer that is late (`PeerPatience`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.policy.peer_patience import PeerPatience
from penstock.queues import get_within
from penstock.ranks.peer_messages import (
    ABSENT,
    ANSWER,
    ANSWER_COLUMNS,
    ASK,
    FOLLOW,
    LEAVE,
    MOST_IDS,
    MOST_SAMPLES_BYTES,
    NEWS,
    NO_IDS,
    REFUSE,
    Message,
    answered,
    packed,
    unpacked,
)

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]

#: News are gathered for so many times as long as it took to send the last, so that many ranks cost no more than this
#: share of the thread.
_NEWS_PAUSE = 8.0
#: A rank that has not announced all that it shall keep is asked for news again after so long without any: it may have
#: been connected to anew.
_FOLLOW_SECONDS = 2.0


class Carrier(Protocol):
    """Carries messages, in parts, to other ranks and back. One thread uses it; any may `wake` it."""

    def ask(self, rank: int, parts: Sequence[Any]) -> bool:
        """Send a message to a rank; False: not now, too many wait."""
        ...

    def answer(self, who: Any, parts: Sequence[Any]) -> bool:
        """Send a message back to who sent one, as `receive` names it."""
        ...

    def receive(self, seconds: float | None) -> list[tuple[int, Any, list[Any]]]:
        """Wait for messages, so long at most, or until `wake`. Returns: rank, whom to answer, parts of each."""
        ...

    def wake(self) -> None:
        """Have `receive` return."""
        ...

    def close(self) -> None:
        """End, once no thread uses it."""
        ...


class Shelf(Protocol):
    """What this rank keeps for others. One thread uses it."""

    @property
    def generation(self) -> int:
        """Return what tells its log from all others."""
        ...

    def take_news(self) -> Ids:
        """Return what is kept since the last time; -t: tier t gets no more."""
        ...

    def look_up(self, ids: Ids, sizes: Ids) -> Sequence[tuple[Bytes, int] | None]:
        """Return bytes and checksum of samples; None for one that is not there. sizes: below zero, any."""
        ...

    def close(self) -> None:
        """Let go what it holds."""
        ...


class FarRank(NamedTuple):
    """What is known of a rank of another host.

    generation: of its log. kept: how many samples it shall keep.
    greeting: what a decode server is sent, and has to answer, before it is asked for anything; empty for ranks.
    """

    generation: int
    kept: int
    greeting: Sequence[bytes] = ()


class _Asked:
    """A request under way. answer: gets its records and parts, None where there will be none."""

    __slots__ = ("answer", "began", "ids", "nbytes", "rank")

    def __init__(self, rank: int, ids: Ids, nbytes: int) -> None:
        self.rank, self.ids, self.nbytes, self.began = rank, ids, nbytes, time.monotonic()
        self.answer: SimpleQueue[tuple[Ids, list[Any]] | None] = SimpleQueue()


class _Follower:
    """Who gets news: whom to answer, and how many ids were sent."""

    __slots__ = ("sent", "who")

    def __init__(self, who: Any, sent: int) -> None:
        self.who, self.sent = who, sent


class RemotePeers:
    """The ranks of other hosts, as places to read from; and their requests, answered.

    carrier: connected; closed with this, as is the shelf.
    ranks: by number. sizes_bytes: int64[samples]; -n: about n, as the record says. checksum_of: of a sample's bytes.
    bytes_per_second: of the link, as modelled.
    Any thread may read; one at a time takes news.
    """

    def __init__(
        self,
        carrier: Carrier,
        shelf: Shelf,
        ranks: Mapping[int, FarRank],
        sizes_bytes: Ids,
        checksum_of: Callable[[Bytes], int],
        bytes_per_second: float,
    ) -> None:
        self._carrier, self._shelf, self._ranks = carrier, shelf, dict(ranks)
        self._sizes_bytes, self._checksum_of = sizes_bytes, checksum_of
        #: Guards what follows, but for news and outbox.
        self._lock = threading.Lock()
        self._patience = {rank: PeerPatience(bytes_per_second) for rank in ranks}
        self._asked: dict[int, _Asked] = {}
        self._next_number = 1
        self._is_closed = self._is_over = False
        #: By number, why a decode server will never answer. `greeted`: whether all have answered, or refused, once.
        self.refused: dict[int, str] = {}
        self.greeted = threading.Event()
        self._not_heard_of = {rank for rank, each in ranks.items() if each.greeting}
        for rank in self._not_heard_of:
            self._patience[rank].probe_at = 0.0
        #: Samples that were not had as announced: absent, with wrong bytes, and answered too late, or not.
        self.absent = self.wrong = self.late = 0
        #: Ids that a rank keeps; None: nothing for now.
        self._news: deque[tuple[int, Ids | None]] = deque()
        self._outbox: SimpleQueue[tuple[int, _Asked]] = SimpleQueue()

        # The thread's own: ids that this rank keeps, by the order of its log, and those that came since; who gets news.
        self._kept = NO_IDS
        self._fresh: list[Ids] = []
        self._followers: dict[int, _Follower] = {}
        self._next_news = 0.0
        #: How many ids each rank has announced, and when to ask it for news.
        self._heard = dict.fromkeys(ranks, 0)
        self._follow_at = dict.fromkeys(ranks, 0.0)
        self._thread = threading.Thread(target=self._run, name="penstock-peers", daemon=True)
        self._thread.start()

    @property
    def ranks(self) -> Mapping[int, FarRank]:
        """Who they are, by number."""
        return self._ranks

    def is_away(self, rank: int) -> bool:
        """Return whether a rank did not answer, and was not heard of since."""
        return self._patience[rank].is_away

    @property
    def misses(self) -> int:
        """Samples that a rank had announced and that were not had from it."""
        return self.absent + self.wrong + self.late

    @property
    def has_news(self) -> bool:
        """Whether ranks keep samples that they did not keep the last time, or do not answer any more."""
        return bool(self._news)

    def take_news(self) -> list[tuple[int, Ids | None]]:
        """Return, by rank, the samples that it keeps since the last time; None where it gives none from now on."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def read(self, rank: int, ids: Ids) -> list[Bytes | DataError]:
        """Return the bytes of samples that a rank keeps, read-only; an error in the place of what is not had."""
        sizes = self._sizes_bytes[ids]
        nbytes = int(np.abs(sizes).sum())
        if ids.size > MOST_IDS or (ids.size > 1 and nbytes > MOST_SAMPLES_BYTES):
            return [each for part in np.array_split(ids, 2) for each in self.read(rank, part)]
        asked = _Asked(rank, ids, nbytes)
        with self._lock:
            patience = self._patience[rank]
            if patience.is_away or self._is_closed:
                self.late += ids.size
                return _missing(rank, ids, "does not answer")
            seconds = patience.ask(asked.nbytes)
            number, self._next_number = self._next_number, self._next_number + 1
            self._asked[number] = asked
        self._outbox.put((number, asked))
        self._carrier.wake()
        try:
            answer = get_within(asked.answer, seconds)
        except Empty:
            answer = None
        with self._lock:
            is_open = self._asked.pop(number, None) is not None
            if answer is None:
                self.late += ids.size
                if is_open and patience.was_late(asked.nbytes, time.monotonic()):
                    self._news.append((rank, None))
                    self._carrier.wake()  # for the first probe
                return _missing(rank, ids, f"did not answer within {seconds:.2g} s")
        return self._verified(rank, ids, sizes, *answer)

    def _verified(
        self, rank: int, ids: Ids, sizes: Ids, records: Ids, parts: list[Any]
    ) -> list[Bytes | DataError]:
        found: list[Bytes | DataError] = []
        absent = wrong = 0
        is_fit = records.shape[0] == ids.size == len(parts) and bool((records[:, 0] == ids).all())
        if not is_fit:
            records, parts = np.zeros((ids.size, ANSWER_COLUMNS), np.int64), [None] * ids.size
        sent, checksums = records[:, 1].tolist(), records[:, 2].view(np.uint64).tolist()
        for sample, size, sent_size, checksum, part in zip(
            ids.tolist(), sizes.tolist(), sent, checksums, parts, strict=True
        ):
            if sent_size == ABSENT:
                absent += 1
                found.append(DataError(f"rank {rank} does not have sample {sample} as it announced"))
                continue
            data = np.frombuffer(part, np.uint8) if is_fit else None
            expected = size if size >= 0 else sent_size
            if data is not None and data.size == expected and self._checksum_of(data) == checksum:
                data.flags.writeable = False
                found.append(data)
            else:
                wrong += 1
                found.append(DataError(f"rank {rank} sent other bytes than those of sample {sample}"))
        if absent or wrong:
            with self._lock:
                self.absent, self.wrong = self.absent + absent, self.wrong + wrong
        return found

    def end_waits(self) -> None:
        """Have all that wait for answers get none."""
        with self._lock:
            self._is_closed = True
            asked, self._asked = list(self._asked.values()), {}
        for each in asked:
            each.answer.put(None)

    def close(self) -> None:
        """Tell the others that this rank answers no more, and end the thread. Twice is harmless."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self.end_waits()
        self._carrier.wake()
        self._thread.join()
        self._carrier.close()
        self._shelf.close()

    # -- The thread --

    def _run(self) -> None:
        try:
            while not self._is_closed:
                wait = self._due(time.monotonic())
                for rank, who, parts in self._carrier.receive(wait):
                    self._handle(rank, who, parts)
                self._send_asked()
                if wait == 0.0:  # a look at each of many ranks, not after each message
                    self._send_probes(time.monotonic())
                self._spread_news()
            for follower in self._followers.values():
                self._carrier.answer(follower.who, [packed(self._said(LEAVE))])
        finally:
            self.end_waits()

    def _due(self, now: float) -> float | None:
        """Return how many seconds the thread may sleep; None: until something comes."""
        with self._lock:
            waiting = [each for rank, each in self._patience.items() if rank not in self.refused]
            dues = [each.probe_at for each in waiting if each.probe_at is not None]
        dues += [self._follow_at[rank] for rank in self._ranks if self._wants_news(rank)]
        if (self._fresh and self._followers) or any(
            each.sent < self._kept.size for each in self._followers.values()
        ):
            dues.append(self._next_news)
        return max(0.0, min(dues) - now) if dues else None

    def _wants_news(self, rank: int) -> bool:
        return self._heard[rank] < self._ranks[rank].kept and not self._patience[rank].is_away

    def _said(self, kind: int, number: int = 0, numbers: Ids = NO_IDS) -> Message:
        return Message(kind, number, self._shelf.generation, numbers)

    def _handle(self, rank: int, who: Any, parts: list[Any]) -> None:
        message = unpacked(parts[0]) if parts else None
        if message is None or rank not in self._ranks:
            return
        if who is not None:
            if message.generation == self._shelf.generation:
                self._serve(rank, who, message)
            return
        if message.generation != self._ranks[rank].generation:
            return
        if message.kind == REFUSE:
            self.refused[rank] = b"".join(map(bytes, parts[1:])).decode("utf-8", "replace")
        if message.kind in (LEAVE, REFUSE):
            self._miss(rank)
        else:
            self._take(rank, message, parts)
        # Last: who waits for it asks the rank at once.
        self._not_heard_of.discard(rank)
        if not self._not_heard_of:
            self.greeted.set()

    def _take(self, rank: int, message: Message, parts: list[Any]) -> None:
        """Take an answer, news, or a sign of life."""
        with self._lock:
            was_away = self._patience[rank].heard()
            asked = self._asked.get(message.number) if message.kind == ANSWER else None
            if asked is not None and asked.rank == rank:
                del self._asked[message.number]
                self._patience[rank].answered(asked.nbytes, time.monotonic() - asked.began)
            else:  # of one that was given up, or a probe
                asked = None
        if was_away:  # all that it keeps is news again
            self._heard[rank] = 0
            self._follow(rank, time.monotonic())
        if asked is not None:
            asked.answer.put((message.numbers.reshape(-1, ANSWER_COLUMNS), parts[1:]))
        elif message.kind == NEWS:
            self._hear(rank, message)

    def _hear(self, rank: int, message: Message) -> None:
        """Take note of what a rank keeps, unless some before it is missing: then it is asked for anew."""
        heard = self._heard[rank]
        ids = message.numbers[max(0, heard - message.number) :]
        if message.number > heard or not ids.size:
            return
        self._heard[rank] = message.number + message.numbers.size
        self._follow_at[rank] = time.monotonic() + _FOLLOW_SECONDS
        self._news.append((rank, ids[ids < self._sizes_bytes.size]))

    def _miss(self, rank: int) -> None:
        """A rank gives nothing any more."""
        with self._lock:
            asked = [each for each in self._asked.values() if each.rank == rank]
            self._asked = {number: each for number, each in self._asked.items() if each.rank != rank}
            is_news = self._patience[rank].left(time.monotonic())
            self._patience[rank].asked_bytes = 0
        for each in asked:
            each.answer.put(None)
        if is_news:
            self._news.append((rank, None))

    def _serve(self, rank: int, who: Any, message: Message) -> None:
        if message.kind == FOLLOW:
            self._followers[rank] = _Follower(who, message.number)
            if not self._kept.size:
                self._carrier.answer(who, [packed(self._said(NEWS))])  # a sign of life
        elif message.kind == ASK and message.numbers.size <= MOST_IDS:
            ids = message.numbers
            is_known = (ids >= 0) & (ids < self._sizes_bytes.size)
            sizes = self._sizes_bytes[np.where(is_known, ids, 0)]
            found = self._shelf.look_up(ids, sizes)
            kept = [each if is_known[index] else None for index, each in enumerate(found)]
            # Where too much waits, it is late.
            self._carrier.answer(who, answered(message.number, self._shelf.generation, ids, kept))

    def _send_asked(self) -> None:
        while True:
            try:
                number, asked = self._outbox.get_nowait()
            except Empty:
                return
            message = Message(ASK, number, self._ranks[asked.rank].generation, asked.ids)
            self._carrier.ask(asked.rank, [packed(message)])  # what cannot be sent is late

    def _send_probes(self, now: float) -> None:
        """Ask who is away for a sign of life, and who has more to announce for news."""
        for rank in self._ranks:
            with self._lock:
                patience = self._patience[rank]
                is_due = patience.probe_at is not None and now >= patience.probe_at
                is_due = is_due and rank not in self.refused
                if is_due:
                    patience.probed(now)
            if is_due:
                probe = [packed(Message(ASK, 0, self._ranks[rank].generation, NO_IDS))]
                self._carrier.ask(rank, self._ranks[rank].greeting or probe)
            elif self._wants_news(rank) and now >= self._follow_at[rank]:
                self._follow(rank, now)

    def _follow(self, rank: int, now: float) -> None:
        self._follow_at[rank] = now + _FOLLOW_SECONDS
        following = Message(FOLLOW, self._heard[rank], self._ranks[rank].generation, NO_IDS)
        self._carrier.ask(rank, [packed(following)])

    def _spread_news(self) -> None:
        """Send followers the ids that they have not got, now and then."""
        if (fresh := self._shelf.take_news()).size:
            self._fresh.append(fresh)
        began = time.monotonic()
        if not self._followers or began < self._next_news:
            return
        self._kept, self._fresh = np.concatenate([self._kept, *self._fresh]), []
        for follower in self._followers.values():
            while follower.sent < self._kept.size:
                ids = self._kept[follower.sent : follower.sent + MOST_IDS]
                if not self._carrier.answer(follower.who, [packed(self._said(NEWS, follower.sent, ids))]):
                    break
                follower.sent += ids.size
        ended = time.monotonic()
        self._next_news = ended + _NEWS_PAUSE * (ended - began)


def _missing(rank: int, ids: Ids, why: str) -> list[Bytes | DataError]:
    return [DataError(f"rank {rank}, which keeps sample {sample}, {why}") for sample in ids.tolist()]
