"""A process's connections to workers and clients, in a thread of its own: what is said waits for nobody.

Everyone who has the secret of a cluster makes the keys of all: a task's by its name, and those of clients. So each end
knows who the other is, and a stranger reaches nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.graph.errors import CorruptError
from penstock.graph.workers.wire import packed, unpacked
from penstock.ranks.carrier_zmq import KeyPair, ZmqCarrier, ZmqSender

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier

    Carrier = ZmqCarrier | MpiCarrier

#: Number of a client among those who may connect; workers have those of their places in the list of workers.
CLIENT = -1
_RETRY_SECONDS = 0.005


class Link:
    """Sends and receives messages, as `penstock.graph.workers.wire` has them.

    on_message: called in the link's thread with the number of who sent, whom to answer (None: nobody) and the message;
    it returns at once. on_tick: called about every tick_seconds. on_cut: called with the numbers of workers whose
    connections are watched, and were cut. on_wrong: called as on_message, with why a message cannot be read. posts:
    whether `post` has a connection of its own.
    """

    def __init__(
        self,
        carrier: Carrier,
        on_message: Callable[[int, Any, dict[str, Any]], None],
        *,
        on_tick: Callable[[], None] | None = None,
        tick_seconds: float | None = None,
        on_cut: Callable[[set[int]], None] | None = None,
        on_wrong: Callable[[int, Any, CorruptError], None] | None = None,
        posts: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._carrier = carrier
        self._on_message, self._on_tick, self._tick_seconds = on_message, on_tick, tick_seconds
        self._on_cut, self._on_wrong, self._posts, self._report = on_cut, on_wrong, posts, report
        self._outbox: deque[tuple[Any, Callable[[Carrier], bool]]] = deque()
        #: What a destination cannot take yet, in order: the others do not wait for it.
        self._stalled: dict[Any, deque[Callable[[Carrier], bool]]] = {}
        self._connected: dict[int, dict[str, str]] = {}
        #: Of a worker: by number of those that it is connected to.
        self._senders: dict[int, ZmqSender] = {}
        #: Of those that are watched, whom this one is connected to; and notified of a change.
        self._reached: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        self._is_over, self._closing = False, threading.RLock()
        self._thread = threading.Thread(target=self._run, name="penstock-graph-link", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def connect(self, offers: Mapping[int, dict[str, str]], *, cut_seconds: float | None = None) -> None:
        """Connect to workers by number; those that are connected already stay so. Any thread may.

        cut_seconds: watch the connections: one is cut, too, when the worker is silent for so long. None: do not.
        """
        if any(self._connected.get(number) != offer for number, offer in offers.items()):
            self._do(None, partial(self._connect, offers, cut_seconds))

    def admit(self, offers: Mapping[int, dict[str, str]]) -> None:
        """Let workers connect; those to whom this one connects may already."""
        self._do(None, partial(self._admit, offers))

    def reaches(self, number: int, seconds: float | None) -> bool:
        """Return whether a worker is connected whose connection is watched; wait for that, so long at most."""
        if number in self._reached:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: number in self._reached, seconds)

    def ask(self, number: int, parts: list[Any]) -> int:
        """Send the parts of a message to a worker that is connected, and return its bytes."""
        self._do(number, lambda carrier: carrier.ask(number, parts))
        return sum(memoryview(part).nbytes for part in parts)

    def post(self, number: int, parts: list[Any]) -> None:
        """Send the parts of a message to a worker from this very thread, in no order with what `ask` sends."""
        sender = self._senders.get(number)
        if sender is None or not sender.send(parts):
            self._do(number, lambda carrier: carrier.ask(number, parts))

    def answer(self, who: Any, message: Mapping[str, Any]) -> None:
        """Send a message back to who sent one. Raises: MismatchError, TypeError for what cannot be sent."""
        parts = packed(message)
        self._do(who, lambda carrier: carrier.answer(who, parts))

    def _do(self, to: Any, action: Callable[[Carrier], bool]) -> None:
        self._outbox.append((to, action))
        with self._closing:
            if not self._is_over:  # the carrier's descriptor may be closed, or another file's by now
                self._carrier.wake()

    def close(self) -> None:
        """Send what waits, and end all connections. Twice is harmless."""
        with self._closing:
            if self._is_over:
                return
            self._is_over = True
            self._carrier.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            next_tick = time.monotonic()
            while not self._is_over:
                stalled = self._send()
                now = time.monotonic()
                if self._on_tick is not None and now >= next_tick:
                    self._on_tick()
                    next_tick = now + (self._tick_seconds or 0.0)
                until_tick = None if self._on_tick is None else max(next_tick - time.monotonic(), 0.0)
                wait = _RETRY_SECONDS if stalled else until_tick
                for number, who, parts in self._carrier.receive(wait):
                    self._take(number, who, parts)
                if self._on_cut is not None and isinstance(self._carrier, ZmqCarrier):
                    if self._carrier.reached is not self._reached:
                        with self._changed:
                            self._reached = self._carrier.reached
                            self._changed.notify_all()
                    if cut := self._carrier.take_cut():
                        self._on_cut(cut)
            self._send()
        finally:
            for sender in self._senders.values():
                sender.close()
            self._carrier.close()

    def _admit(self, offers: Mapping[int, dict[str, str]], carrier: Carrier) -> bool:
        assert isinstance(carrier, ZmqCarrier), "that of MPI is connected from the start"
        for number, offer in offers.items():
            carrier.admit(offer["key"].encode("ascii"), number)
        return True

    def _connect(
        self, offers: Mapping[int, dict[str, str]], cut_seconds: float | None, carrier: Carrier
    ) -> bool:
        assert isinstance(carrier, ZmqCarrier), "that of MPI is connected from the start"
        new = {number: offer for number, offer in offers.items() if self._connected.get(number) != offer}
        self._connected.update(new)
        carrier.connect(new, cut_seconds=cut_seconds)
        if self._posts:
            for number, offer in new.items():
                if number in self._senders:
                    self._senders[number].close()
                self._senders[number] = carrier.sender(number, offer, cut_seconds=cut_seconds)
        return True

    def _send(self) -> bool:
        """Send what waits, to each destination in order; return whether some has to wait still."""
        for to in list(self._stalled):
            waiting = self._stalled[to]
            while waiting and waiting[0](self._carrier):
                waiting.popleft()
            if not waiting:
                del self._stalled[to]
        while self._outbox:
            to, action = self._outbox.popleft()
            if to in self._stalled:
                self._stalled[to].append(action)
            elif not action(self._carrier):
                self._stalled[to] = deque([action])
        return bool(self._stalled)

    def _take(self, number: int, who: Any, parts: list[Any]) -> None:
        try:
            message = unpacked(parts)
        except CorruptError as error:
            if self._report is not None:
                self._report(f"a message was left out: {error}")
            if self._on_wrong is not None:
                self._on_wrong(number, who, error)
            return
        self._on_message(number, who, message)


def key_of(secret: bytes, task: str) -> KeyPair:
    """Return the keys of a task, or of clients where task is ""."""
    return KeyPair.of(secret, f"graph {task}")


def offers_of(secret: bytes, addresses: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return how tasks are reached. addresses: "tcp://host:port" by task."""
    return {
        task: {"address": address, "key": key_of(secret, task).public.decode("ascii")}
        for task, address in addresses.items()
    }
