"""A device without a device: streams whose work waits for the test, in memory of PyTorch's CPU tensors."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.patience import patient

from penstock.errors import StagingError
from penstock.flow.copying import Copied
from penstock.loader.front_end import with_images
from penstock.loader.transforms.sink import ByteValues
from penstock.torch.device import changed, looked_up, table_of, tensors_of

PATIENCE_SECONDS = patient(20)


class Mark:
    """A point in a stream."""

    def __init__(self, device: StandIn) -> None:
        self._device, self.is_passed = device, False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        with self._device.changed:
            self._device.waiting += 1
            self._device.changed.notify_all()
            assert self._device.changed.wait_for(self.query, PATIENCE_SECONDS), "the stream is held"
            self._device.waiting -= 1

    def be_passed(self) -> None:
        self.is_passed = True


class Stream:
    """Work in order. Each piece is a function and the mark that it waits for, if any."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self._work: deque[tuple[Callable[[], object], Mark | None]] = deque()
        self._is_held = False

    def enqueue(self, work: Callable[[], object], after: Mark | None = None) -> None:
        with self._device.changed:
            self._work.append((work, after))
            self._device.run()

    def mark(self) -> Mark:
        mark = Mark(self._device)
        self.enqueue(mark.be_passed)
        return mark

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have what is enqueued wait until the block is left."""
        self._is_held = True
        try:
            yield
        finally:
            with self._device.changed:
                self._is_held = False
                self._device.run()

    def run(self) -> bool:
        """Do what can be done; return whether that was anything."""
        done = False
        while self._work and not self._is_held and (self._work[0][1] is None or self._work[0][1].is_passed):
            self._work.popleft()[0]()
            done = True
        return done


class StandIn:
    """A `BatchDevice` whose copies read their source when the stream comes to them, as a device's do.

    copies, main: its streams, of the copier and of the consumer. copied: batches so far.
    capacity_bytes: of its memory; a batch takes some as long as anybody refers to it.
    """

    def __init__(
        self, limit_bytes: int | None = None, finishes: bool | None = None, capacity_bytes: int = 1 << 40
    ) -> None:
        self.name = "stand-in"
        self.limit_bytes, self.finishes, self.capacity_bytes = limit_bytes, finishes, capacity_bytes
        self.changed = threading.Condition()
        self.copies, self.main = Stream(self), Stream(self)
        self.copied = self.used_bytes = 0
        #: Threads that wait for a mark.
        self.waiting = 0
        self._values: ByteValues | None = None

    def run(self) -> None:
        """Do what the streams can do by now."""
        while self.copies.run() or self.main.run():
            pass
        self.changed.notify_all()

    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def finish_there(self, values: ByteValues) -> None:
        self._values = values

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copy(self, batch: Any) -> Copied:
        moved = self._enqueued(batch, self.copies)
        with self.changed:
            self.copied += 1
            self.changed.notify_all()
        return Copied(moved, sum(each.nbytes for each in tensors_of(moved)), self.copies.mark())

    def hand_over(self, copied: Copied) -> Any:
        done = copied.done
        assert isinstance(done, Mark)
        self.main.enqueue(lambda: None, after=done)
        return copied.batch

    def move(self, batch: Any) -> Any:
        moved = self._enqueued(batch, self.main)
        self.main.mark().synchronize()
        return moved

    def mark(self) -> Mark:
        return self.main.mark()

    def wait_until_copied(self, batches: int) -> None:
        """Wait until so many copies have been asked for."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.copied >= batches, PATIENCE_SECONDS), self.copied

    def wait_until_waited_for(self) -> None:
        """Wait until a thread waits for a mark."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.waiting, PATIENCE_SECONDS)

    def _enqueued(self, batch: Any, stream: Stream) -> Any:
        made = {id(each): self._place_for(each, stream) for each in tensors_of(batch)}
        moved = changed(batch, lambda leaf: made.get(id(leaf), leaf))
        if self._values is None:
            return moved
        table, channels_last = table_of(self._values), self._values.channels_last

        def finish(images: torch.Tensor) -> torch.Tensor:
            out = torch.full(images.shape, torch.nan, dtype=table.dtype)
            stream.enqueue(lambda: out.copy_(looked_up(images, table, channels_last=channels_last)))
            return out

        return with_images(moved, finish)

    def _place_for(self, source: torch.Tensor, stream: Stream) -> torch.Tensor:
        if self.used_bytes + source.nbytes > self.capacity_bytes:
            raise StagingError(f"stand-in has no memory for {source.nbytes} bytes")
        place = torch.full_like(source, 111)
        self.used_bytes += source.nbytes
        weakref.finalize(place, partial(self._give_back, source.nbytes))
        stream.enqueue(partial(place.copy_, source))
        return place

    def _give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


class FakePinning:
    """A `Pinning` that notes what is locked, by its address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.closed = 0

    def pin(self, memory: NDArray[np.uint8]) -> None:
        assert memory.ctypes.data not in self.locked, "locked twice"
        self.locked[memory.ctypes.data] = memory.nbytes

    def close(self) -> None:
        self.closed += 1
