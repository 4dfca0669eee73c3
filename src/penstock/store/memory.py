"""Samples kept in this process's memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ClosedError, ConfigError
from penstock.store.host_memory import KeptLog, checksum_of
from penstock.store.places import Ids, SamplePlaces


class MemoryTier:
    """A `SizedTier` in one arena.

    capacity_bytes: at least 1; what `SamplePlaces` takes comes besides.
    new_arena: makes its memory, one that other processes can map if it is shared.
    log: gets what is kept, for these; closed with the tier.
    Raises: ConfigError if the capacity is below 1 or the kernel has no such space in its address space.
    """

    def __init__(
        self, capacity_bytes: int, new_arena: Callable[[int], Arena] = Arena, log: KeptLog | None = None
    ) -> None:
        check_capacity(capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self.arena = new_arena(capacity_bytes)
        #: uint8[capacity_bytes]; None once closed.
        self._array: NDArray[np.uint8] | None = self.arena.array
        self._places = SamplePlaces(capacity_bytes)
        self._log = log

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._places.used_bytes

    @property
    def array(self) -> NDArray[np.uint8]:
        if self._array is None:
            raise ClosedError("this memory tier is closed; make a new one")
        return self._array

    def __len__(self) -> int:
        """Return the number of samples kept."""
        return len(self._places)

    def take_space(self, ids: Ids, sizes: Ids) -> Ids | None:
        _ = self.array  # raises if the tier is closed
        return self._places.take(ids, sizes)

    def keep(self, ids: Ids) -> None:
        array = self.array
        self._places.keep(ids)
        if self._log is not None:
            places = self._places.of(ids)
            self._log.add(ids, places, [checksum_of(array[begin:end]) for begin, end in places.tolist()])

    def drop(self, ids: Ids) -> None:
        _ = self.array
        self._places.drop(ids)

    def evict(self, ids: Ids) -> None:
        """Give the space of samples to others. Nobody reads them any more; ids that are not here are passed by."""
        assert self._log is None, "other processes read what it says"
        _ = self.array
        self._places.evict(ids)

    def places_of(self, ids: Ids) -> Ids:
        return self._places.of(ids)

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        content = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        array, ids = self.array, np.array([sample])
        begins = self._places.take(ids, np.array([content.size]))
        if begins is None:
            return self._places.is_known(sample)
        # NumPy copies outside the interpreter's lock; a first write to fresh pages is slow (2 GB/s).
        array[begins[0] : begins[1]] = content
        self.keep(ids)
        return True

    def contains(self, sample: int) -> bool:
        return self._places.contains(sample)

    def view(self, sample: int) -> memoryview:
        array = self.array
        ((begin, end),) = self._places.of(np.array([sample])).tolist()
        if begin < 0:
            raise KeyError(sample)
        return array[begin:end].data.toreadonly()

    def close(self) -> None:
        self._array = None
        self.arena.close()
        if self._log is not None:
            self._log.close()
        self._places.forget()


def check_capacity(capacity_bytes: int) -> None:
    """Raise ConfigError unless a tier has space for anything."""
    if capacity_bytes < 1:
        raise ConfigError(f"capacity_bytes is {capacity_bytes}; a tier needs space for at least one sample")
