"""What workers send each other in steps: a value and the Recv that waits for it meet, whichever comes first."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from penstock.queues import WakingQueue, get_within

Values = Mapping[int, Any]
_Give = Callable[[Any, Values], None]
_Key = tuple[int, str]


class Mail:
    """The values on their way to the Recvs of one session's steps on one worker.

    send: sends a message to a task: its name, the number of the step, the name of a node, and its outputs by port; None
    asks for them. lend: gives memory of so many bytes in which a task has what is sent to it, where there is such.
    get_within: waits for what happens to a step, as `penstock.queues.get_within`.
    """

    def __init__(
        self,
        send: Callable[[str, int, str, Values | None], None],
        lend: Callable[[str, int], Any] = lambda to, nbytes: None,
        get_within: Callable[[WakingQueue[Any], float | None], Any] = get_within,
    ) -> None:
        self.send, self.lend, self._get_within = send, lend, get_within
        self._waited = threading.local()
        #: By step, node and task: what waits until that asks, with who waits; and who asked for what is not there yet.
        self._offers: dict[tuple[int, str, str], tuple[Any, Values]] = {}
        self._asked: set[tuple[int, str, str]] = set()
        #: Bytes of each tensor that arrived and is in use; the most since `watched`, and how many want to know.
        self._in_use: dict[int, int] = {}
        self._numbers = itertools.count()
        self.peak_bytes = self._watchers = 0
        self._lock = threading.Lock()
        self._arrived: dict[_Key, Values] = {}
        self._waiting: dict[_Key, tuple[Any, _Give]] = {}
        #: Steps that are over here: what is still sent to them is dropped.
        self._over: set[int] = set()
        self._oldest = 0

    def get_within(self, queue: WakingQueue[Any], seconds: float | None) -> Any:
        """Wait for what happens to a step, as `penstock.queues.get_within`, and count that."""
        begin = time.perf_counter()
        try:
            return self._get_within(queue, seconds)
        finally:
            self._waited.seconds = self.waited_seconds + time.perf_counter() - begin

    @property
    def waited_seconds(self) -> float:
        """How long this thread has waited so far in `get_within`."""
        return getattr(self._waited, "seconds", 0.0)

    def offer(self, step: int, node: str, to: str, values: Values, waiter: Any) -> None:
        """Send outputs of a node to a task once it asks for them, and let the waiter finish."""
        key = (step, node, to)
        with self._lock:
            if key not in self._asked:
                waiter.withdraw = partial(self._withdraw, key)
                self._offers[key] = (waiter, values)
                return
            self._asked.discard(key)
        self.send(to, step, node, values)
        waiter.finish(())

    def _withdraw(self, key: tuple[int, str, str]) -> None:
        with self._lock:
            self._offers.pop(key, None)

    def ask(self, step: int, node: str, of: str) -> None:
        """Ask another task for outputs of a node."""
        self.send(of, step, node, None)

    def asked(self, step: int, node: str, by: str) -> None:
        """Learn that a task asks for outputs of a node."""
        key = (step, node, by)
        with self._lock:
            if step < self._oldest or step in self._over:
                return
            offer = self._offers.pop(key, None)
            if offer is None:
                self._asked.add(key)
                return
        waiter, values = offer
        try:
            self.send(by, step, node, values)
        except Exception as error:  # nobody else hears of it: whose thread this is only brings messages
            waiter.fail(error)
        else:
            waiter.finish(())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look for the most bytes anew: of what came and waits, and of what comes."""
        with self._lock:
            self._watchers += 1
            if self._watchers == 1:
                self._in_use.clear()  # what waits since an earlier watch is counted anew
                for values in self._arrived.values():
                    self._count(values)
            self.peak_bytes = sum(list(self._in_use.values()))
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1

    def _count(self, values: Values) -> None:
        for value in values.values():
            if isinstance(value, torch.Tensor):
                number = next(self._numbers)
                self._in_use[number] = value.nbytes
                # Without the lock: it may run anywhere.
                weakref.finalize(value, self._in_use.pop, number, None).atexit = False
        self.peak_bytes = max(self.peak_bytes, sum(list(self._in_use.values())))

    def receive(self, step: int, node: str, waiter: Any, give: _Give) -> None:
        """Let a waiter have the outputs of a node as soon as they are here. Each step asks once."""
        key = (step, node)
        with self._lock:
            values = self._arrived.pop(key, None)
            if values is None:
                waiter.withdraw = partial(self._forget, key)
                self._waiting[key] = (waiter, give)
                return
        give(waiter, values)

    def put(self, step: int, node: str, values: Values) -> None:
        """Take outputs that arrived."""
        with self._lock:
            if step < self._oldest or step in self._over:
                return
            if self._watchers:
                self._count(values)
            found = self._waiting.pop((step, node), None)
            if found is None:
                self._arrived[step, node] = values
                return
        waiter, give = found
        give(waiter, values)

    def end(self, step: int) -> None:
        """Drop what is there for a step that is over, and what will come."""
        with self._lock:
            self._over.add(step)
            for key in [key for key in self._arrived if key[0] == step]:
                del self._arrived[key]
            self._asked = {key for key in self._asked if key[0] != step}

    def begin(self, oldest: int) -> None:
        """Learn of a new step, and that all those with lower numbers than `oldest` are over everywhere."""
        with self._lock:
            if oldest > self._oldest:
                self._oldest = oldest
                self._over = {step for step in self._over if step >= oldest}
                self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= oldest}

    def _forget(self, key: _Key) -> None:
        with self._lock:
            self._waiting.pop(key, None)
