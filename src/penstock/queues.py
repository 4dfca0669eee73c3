"""Waiting for a queue no longer than allowed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def get_within(queue: SimpleQueue[T], seconds: float | None) -> T:
    """Return the next item of a queue; None: wait for it however long that takes. Raises: Empty after so many seconds.

    `get(timeout=...)` alone may wait forever: where the queue's lock is free it takes that first, then computes how
    much time is left, and takes less than none for no limit (CPython 3.11). A thread that a busy machine suspends in
    between is late. A look that waits for nothing takes the lock before.
    """
    with suppress(Empty):
        return queue.get_nowait()
    return queue.get(timeout=seconds)


class WakingQueue(SimpleQueue[T]):
    """A queue whose reader may wait for other things, too: what is put calls `wake`, where that is set.

    The reader sets it, then looks whether the queue is empty, then waits.
    """

    wake: Callable[[], None] | None = None

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        SimpleQueue.put(self, item)  # it never blocks; `super` is dearer, and a step puts for each tensor
        if (wake := self.wake) is not None:
            wake()
