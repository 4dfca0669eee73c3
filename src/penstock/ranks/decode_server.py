"""A decode server's half of the messages: who it knows is asked by, what it answers with, on threads of its own.

    carrier ──> one thread ── (ids) ──> decode threads ── crops ──> the same thread ──> carrier

What is asked for is described once, by who asks; the digest of that is the generation of all its messages. A server
that does not know a description, as after its restart, passes requests by: they are late, and it is sent it again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.ranks.peer_messages import (
    ANSWER,
    ASK,
    GREET,
    NO_IDS,
    REFUSE,
    Ids,
    Message,
    answered,
    packed,
    unpacked,
)
from penstock.ranks.remote_peers import Carrier

Bytes = NDArray[np.uint8]

#: Descriptions that are known at once; and parts of requests that wait for a thread. What is more is late.
_MOST_KNOWN, _MOST_WAITING = 64, 1024
#: Of one answer; samples behind that are not had.
MOST_ANSWER_BYTES = 64 << 20


def digest_of(description: bytes) -> int:
    """Return the 64 bits by which a description is known."""
    return int.from_bytes(hashlib.blake2b(description, digest_size=8).digest(), "little")


class Maker(Protocol):
    """Makes what one description asks for. Any thread may call it."""

    @property
    def each_bytes(self) -> int:
        """Return what each result takes."""
        ...

    def make(self, ids: Ids) -> Sequence[Bytes | None]:
        """Return what there is of each id; None for one that cannot be had."""
        ...


@dataclass(slots=True)
class _Job:
    """A request. found: what there is of each id by now. left: parts that threads are still at."""

    who: Any
    message: Message
    maker: Maker
    found: list[tuple[Bytes, int] | None]
    left: int


class DecodeServer:
    """Answers until it is closed; `run` is its main loop.

    carrier: listens; closed with this. accept: returns what makes that which a description asks for, or raises
        ConfigError saying why there is none. checksum_of: of a result's bytes. threads: that make.
    """

    def __init__(
        self,
        carrier: Carrier,
        accept: Callable[[bytes], Maker],
        checksum_of: Callable[[Bytes], int],
        threads: int,
    ) -> None:
        self._carrier, self._accept, self._checksum_of = carrier, accept, checksum_of
        self._known: dict[int, Maker] = {}
        #: Parts of requests: whole ones where many wait, so that all threads have some.
        self._parts: SimpleQueue[tuple[_Job, slice] | None] = SimpleQueue()
        self._job_lock = threading.Lock()
        self._answers: SimpleQueue[tuple[Any, list[Any]]] = SimpleQueue()
        #: Samples made so far, and requests that were passed by as too many waited.
        self.made = self.dropped = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-decode-{number}", daemon=True)
            for number in range(threads)
        ]

    def run(self) -> None:
        """Answer until another thread calls `stop`, or an exception such as KeyboardInterrupt comes."""
        for each in self._threads:
            each.start()
        try:
            while not self._is_closed:
                for _, who, parts in self._carrier.receive(None):
                    self._handle(who, parts)
                while not self._answers.empty():
                    self._carrier.answer(*self._answers.get())
        finally:
            for _ in self._threads:
                self._parts.put(None)
            for each in self._threads:
                each.join()
            self._carrier.close()

    def stop(self) -> None:
        """Have `run` return. Twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._carrier.wake()

    def _handle(self, who: Any, parts: list[Any]) -> None:
        message = unpacked(parts[0]) if parts else None
        if message is None:
            return
        if message.kind == GREET and len(parts) == 2:
            self._greet(who, message, bytes(parts[1]))
        elif message.kind == ASK and (maker := self._known.get(message.generation)) is not None:
            self._begin(who, message, maker)

    def _begin(self, who: Any, message: Message, maker: Maker) -> None:
        """Have threads make what a request asks for."""
        waiting = self._parts.qsize()
        if waiting >= _MOST_WAITING:
            self.dropped += 1
            return
        count = message.numbers.size
        most = min(count, MOST_ANSWER_BYTES // max(1, maker.each_bytes))
        size = max(1, -(-most // max(1, len(self._threads) - waiting)))
        parts = [slice(first, min(first + size, most)) for first in range(0, max(most, 1), size)]
        job = _Job(who, message, maker, [None] * count, len(parts))
        for part in parts:
            self._parts.put((job, part))

    def _greet(self, who: Any, message: Message, description: bytes) -> None:
        """Learn what will be asked for, and say so; or why it will not be answered."""
        generation = digest_of(description)
        if generation != message.generation:
            return
        if generation not in self._known:
            try:
                maker = self._accept(description)
                if maker.each_bytes > MOST_ANSWER_BYTES:
                    raise ConfigError(f"a sample takes {maker.each_bytes:,} bytes, more than one answer may")
            except ConfigError as error:
                refusal = packed(Message(REFUSE, 0, generation, NO_IDS))
                self._carrier.answer(who, [refusal, str(error).encode("utf-8", "backslashreplace")])
                return
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[generation] = maker
        self._carrier.answer(who, [packed(Message(ANSWER, 0, generation, NO_IDS))])

    # -- The decode threads --

    def _work(self) -> None:
        while (given := self._parts.get()) is not None:
            if self._is_closed:
                continue
            job, part = given
            made = job.maker.make(job.message.numbers[part])
            job.found[part] = [None if each is None else (each, self._checksum_of(each)) for each in made]
            with self._job_lock:
                self.made += len(made)
                job.left -= 1
                is_done = job.left == 0
            if is_done:
                message = job.message
                parts = answered(message.number, message.generation, message.numbers, job.found)
                self._answers.put((job.who, parts))
                self._carrier.wake()
