"""A job whose ranks are threads of this process, and whose messages travel in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.patience import patient

from penstock.ranks import Ranks


class MemoryJob:
    """The messages of all ranks, in memory."""

    def __init__(self, size: int) -> None:
        self.boxes: dict[tuple[int, int], deque[bytes]] = {
            (sender, to): deque() for sender in range(size) for to in range(size)
        }
        self.size = size
        self.sent = [0] * size
        self.changed = threading.Condition()

    def wait_until_sent(self, messages: int, by: list[int]) -> None:
        """Return once each of these ranks has sent so many messages, whoever took them."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.sent[rank] >= messages for rank in by), patient(30))

    def wait_until_read(self, sender: int, to: int) -> None:
        """Return once no message from one rank to the other is left."""
        with self.changed:
            assert self.changed.wait_for(lambda: not self.boxes[sender, to], patient(30))

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(self, rank)


class MemoryTransport:
    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.rank = rank
        self.size = job.size
        self.job = job

    def send(self, to: int, message: bytes) -> None:
        self.job.boxes[self.rank, to].append(message)
        with self.job.changed:
            self.job.sent[self.rank] += 1
            self.job.changed.notify_all()

    def receive(self, sender: int) -> bytes | None:
        box = self.job.boxes[sender, self.rank]
        if not box:
            return None
        with self.job.changed:
            self.job.changed.notify_all()
            return box.popleft()


def run(
    size: int,
    part: Callable[[Ranks], Any],
    timeout_seconds: float = patient(30),
    job: MemoryJob | None = None,
) -> list[Any]:
    """Return what each rank's part returns or raises."""
    job = job or MemoryJob(size)

    def one(rank: int) -> Any:
        try:
            return part(Ranks(job.transport(rank), timeout_seconds=timeout_seconds))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
