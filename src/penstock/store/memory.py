"""Samples kept in this process's memory."""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, LoaderClosed


class MemoryTier:
    """A `SizedTier` in one anonymous mapping, whose pages the kernel supplies as they are first written.

    Samples lie one behind the other in the order of their arrival. Because nothing is ever evicted, no room
    is lost between them.

    capacity_bytes: at least 1.
    Raises: ConfigError if the capacity is below 1 or the kernel has no such room in its address space.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes}; a tier needs room for at least one sample"
            )
        try:
            # Private, so that a forked child cannot write into what its parent holds.
            arena = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes:,}, more than can be mapped: {error}"
            ) from error
        self._capacity_bytes = capacity_bytes
        #: uint8[capacity_bytes]; None once closed
        self._arena: NDArray[np.uint8] | None = np.frombuffer(arena, np.uint8)
        #: guards `_used_bytes`, `_places` and `_arriving`; never held while bytes are copied
        self._places_lock = threading.Lock()
        #: end of the last sample in the arena, and where the next one begins
        self._used_bytes = 0
        #: sample -> (start, end) in the arena; only samples whose bytes are all there
        self._places: dict[int, tuple[int, int]] = {}
        #: samples whose room is taken and whose bytes are being copied; disjoint from `_places`
        self._arriving: set[int] = set()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        """Return the number of samples held."""
        return len(self._places)

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        content = memoryview(data).cast("B")
        with self._places_lock:
            arena = self._open_arena()
            if sample in self._places or sample in self._arriving:
                return True
            start = self._used_bytes
            end = start + len(content)
            if end > self._capacity_bytes:
                return False
            self._used_bytes = end
            self._arriving.add(sample)
        # NumPy copies outside the interpreter's lock; a first write to fresh pages is slow (2 GB/s).
        arena[start:end] = np.frombuffer(content, np.uint8)
        with self._places_lock:
            self._arriving.discard(sample)
            self._places[sample] = (start, end)
        return True

    def contains(self, sample: int) -> bool:
        return sample in self._places

    def view(self, sample: int) -> memoryview:
        arena = self._open_arena()
        start, end = self._places[sample]
        return arena[start:end].data.toreadonly()

    def close(self) -> None:
        with self._places_lock:
            self._arena = None
            self._places.clear()
            self._used_bytes = 0

    def _open_arena(self) -> NDArray[np.uint8]:
        arena = self._arena
        if arena is None:
            raise LoaderClosed("this memory tier is closed; make a new one")
        return arena
