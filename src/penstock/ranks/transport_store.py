"""Messages between ranks through the key-value store by which their framework made them find each other."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from penstock.errors import RankError, WaitTimeout
from penstock.queues import get_within
from penstock.ranks.transport import MOST_PAUSE_SECONDS, TIMEOUT_SECONDS, named_ranks, pause_seconds

#: A TCPStore closes the connection on a value above 8 MiB; longer messages are sent in pieces.
PIECE_BYTES = 4 << 20

#: Before a short message; or alone, for a long one: how many pieces it has, and its number among the sender's.
_HEAD = struct.Struct("<II")

#: How long rank 0 stays at its end while nobody reads its last messages; who waits for them looks far more often.
LINGER_SECONDS = 1.0


class StoreTransport:
    """Messages in a store.

    store: any `Store` of torch.distributed, TCPStore, FileStore, HashStore; or what has its methods `set`, `check`,
        `get`, `add` and `delete_key`.
    keeper: who answers for the store, for messages. timeout_seconds: after which one that does not answer is given up.

    The i-th message from rank a to rank b is the value of the key "a>b/i" until b has taken it. The pieces of the j-th
    long message of rank a are those of "a*/j/...": one that goes to many ranks in a row is stored once. Each who has
    them adds 1 to "a*/j"; the sender subtracts how many will. Who then finds a 0 is the last, and deletes them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        keeper: str = "who keeps the store",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._clerk = _Clerk(keeper, timeout_seconds)
        self._sent = [0] * size
        self._received = [0] * size
        self._long_messages = 0
        #: The long message that was sent last, and to which ranks, until one of them is sent another: no more get it.
        self._long: tuple[bytes, set[int]] | None = None

    def send(self, to: int, message: bytes) -> None:
        if self._long is not None and (
            to in self._long[1] or (self._long[0] is not message and _is_long(message))
        ):
            self._end_long_message()
        value = self._stored(to, message) if _is_long(message) else _HEAD.pack(0, 0) + message
        self._clerk.ask(self._store.set, f"{self.rank}>{to}/{self._sent[to]}", value)  # now it is seen
        self._sent[to] += 1

    def _stored(self, to: int, message: bytes) -> bytes:
        """Store the pieces of a long message, unless they are. Returns: its head."""
        if self._long is None:
            self._long_messages += 1
            for number, begin in enumerate(range(0, len(message), PIECE_BYTES)):
                key = f"{self.rank}*/{self._long_messages}/{number}"
                self._clerk.ask(self._store.set, key, message[begin : begin + PIECE_BYTES])
            self._long = message, set()
        self._long[1].add(to)
        return _HEAD.pack(_pieces(message), self._long_messages)

    def _end_long_message(self) -> None:
        if self._long is not None:
            (message, ranks), self._long = self._long, None
            self._count_takers(f"{self.rank}*/{self._long_messages}", -len(ranks), _pieces(message))

    def _count_takers(self, key: str, change: int, pieces: int) -> None:
        if self._clerk.ask(self._store.add, key, change) == 0:
            for taken in [*(f"{key}/{number}" for number in range(pieces)), key]:
                self._clerk.ask(self._store.delete_key, taken)

    def receive(self, sender: int) -> bytes | None:
        key = f"{sender}>{self.rank}/{self._received[sender]}"
        if not self._clerk.ask(self._store.check, [key]):
            return None
        value: bytes = self._clerk.ask(self._store.get, key)
        pieces, number = _HEAD.unpack_from(value)
        message = value[_HEAD.size :]
        if pieces:
            shared = f"{sender}*/{number}"
            message = b"".join(
                self._clerk.ask(self._store.get, f"{shared}/{piece}") for piece in range(pieces)
            )
            self._count_takers(shared, 1, pieces)
        self._clerk.ask(self._store.delete_key, key)
        self._received[sender] += 1
        return message

    def untaken(self) -> list[int]:
        """Return the ranks that have not received all messages from this one. Raises: RankError, WaitTimeout."""
        self._end_long_message()
        return [
            rank
            for rank, sent in enumerate(self._sent)
            if sent and self._clerk.ask(self._store.check, [f"{self.rank}>{rank}/{sent - 1}"])
        ]


def asked_in_time(function: Callable[[], Any], keeper: str, timeout_seconds: float) -> Any:
    """Return what a function that asks a store returns, such as one that opens another connection to it.

    keeper, timeout_seconds: as of `StoreTransport`. Raises: RankError, WaitTimeout.
    """
    return _Clerk(keeper, timeout_seconds).ask(function)


def name_of_life(
    store: Any, rank: int, size: int, *, keeper: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> str:
    """Return a name that all ranks of this life of a job have, and no process of an earlier one; all call this.

    The store of a launcher outlives processes, and has what those wrote that are gone. So each rank writes a number of
    its own, which rank 0 answers with the name, and each that has taken it says so.

    Arguments: as of `StoreTransport`.
    Raises: RankError; WaitTimeout, naming ranks that did not come.
    """
    clerk, own = _Clerk(keeper, timeout_seconds), secrets.token_hex(16)
    waiting, answered = list(range(1, size)) if rank == 0 else [0], dict[int, str]()
    if rank:
        clerk.ask(store.set, f"hello/{rank}", own)
    began = time.monotonic()
    while waiting:
        if rank and clerk.ask(store.check, [f"answer/{own}"]):
            name = _text_of(clerk.ask(store.get, f"answer/{own}"))
            clerk.ask(store.set, f"taken/{own}", name)
            return name
        for other in [] if rank else [*waiting]:
            if not clerk.ask(store.check, [f"hello/{other}"]):
                continue
            hello = _text_of(clerk.ask(store.get, f"hello/{other}"))
            if answered.get(other) != hello:
                clerk.ask(store.set, f"answer/{hello}", own)
                answered[other] = hello
            # Who is gone may have taken the name of an earlier life.
            elif clerk.ask(store.check, [taken := f"taken/{hello}"]) and own == _text_of(
                clerk.ask(store.get, taken)
            ):
                waiting.remove(other)
        if time.monotonic() - began > timeout_seconds:
            raise WaitTimeout(
                f"{named_ranks(waiting)} of {size} did not come within {timeout_seconds:g} s to where ranks meet; the "
                "log there may say whether it ended or what it waits for"
            )
        time.sleep(pause_seconds(time.monotonic() - began))
    return own


def _text_of(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("ascii")


def _is_long(message: bytes) -> bool:
    return len(message) > PIECE_BYTES


def _pieces(message: bytes) -> int:
    return -(-len(message) // PIECE_BYTES)


class _Clerk:
    """Asks the store, in a thread of its own: it has no time-out, so whoever asks a process that hangs waits for ever.

    The thread ends with this object.
    """

    def __init__(self, keeper: str, timeout_seconds: float) -> None:
        self._keeper = keeper
        self._timeout_seconds = timeout_seconds
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        weakref.finalize(self, self._questions.put, None)
        threading.Thread(
            target=_answer, args=(self._questions, self._idle), name="penstock-store-clerk", daemon=True
        ).start()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of the store returns. Raises: RankError, WaitTimeout."""
        if not self._idle.is_set():  # still at what timed out before
            raise self._timed_out()
        self._idle.clear()
        answer: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._questions.put((function, arguments, answer))
        try:
            value, error = get_within(answer, self._timeout_seconds)
        except Empty:
            raise self._timed_out() from None
        if isinstance(error, RuntimeError):  # DistError of PyTorch, JaxRuntimeError
            reason = str(error).partition("\n")[0]
            raise RankError(
                f"{self._keeper} cannot be reached: {reason}; the log there may say whether it ended"
            ) from error
        if error is not None:
            raise error
        return value

    def _timed_out(self) -> WaitTimeout:
        return WaitTimeout(
            f"{self._keeper} did not answer within {self._timeout_seconds:g} s; the log there may say what it waits for"
        )


_Question = tuple[Callable[..., Any], tuple[Any, ...], SimpleQueue[tuple[Any, Exception | None]]]


def _answer(questions: SimpleQueue[_Question | None], idle: threading.Event) -> None:
    while (question := questions.get()) is not None:
        function, arguments, answer = question
        answered: tuple[Any, Exception | None]
        try:
            answered = function(*arguments), None
        except Exception as error:
            answered = None, error
        idle.set()
        answer.put(answered)


def keep_until_taken(transport: StoreTransport, server: Any) -> None:
    """Stay, at rank 0's end, until all have read what it wrote: the store may live in this process.

    server: keeps the store running, which the framework's end would close.
    """
    if transport.rank == 0:
        atexit.register(_wait_until_taken, transport, server)


def _wait_until_taken(transport: StoreTransport, server: Any) -> None:
    with contextlib.suppress(RankError, WaitTimeout):
        untaken, last_taken = transport.untaken(), time.monotonic()
        while untaken and time.monotonic() - last_taken < LINGER_SECONDS:
            time.sleep(MOST_PAUSE_SECONDS)
            before, untaken = untaken, transport.untaken()
            if untaken != before:
                last_taken = time.monotonic()
