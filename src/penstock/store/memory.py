"""Samples kept in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ClosedError, ConfigError

Ids = NDArray[np.int64]

_FEWEST_ROWS = 1024


class MemoryTier:
    """A `SizedTier` in one arena. Nothing is ever evicted, and space is lost to no other sample than larger ones.

    Beside the arena it takes 4 bytes for each id up to the largest, and 16 for each sample kept; at times half of that
    is not in use yet.

    capacity_bytes: at least 1. new_arena: makes its memory, one that other processes can map if it is shared.
    Raises: ConfigError if the capacity is below 1 or the kernel has no such space in its address space.
    """

    def __init__(self, capacity_bytes: int, new_arena: Callable[[int], Arena] = Arena) -> None:
        if capacity_bytes < 1:
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes}; a tier needs space for at least one sample"
            )
        self._capacity_bytes = capacity_bytes
        self.arena = new_arena(capacity_bytes)
        #: uint8[capacity_bytes]; None once closed.
        self._array: NDArray[np.uint8] | None = self.arena.array
        #: Guards all below; not held while samples arrive. Lookups do without it: they read `_rows` before `_places`,
        #: which has every row that was ever in `_rows`. Both are replaced when they grow.
        self._lock = threading.Lock()
        #: int32[largest id + 3], at id + 1: 0 if the sample is not here, its row in `_places` once it is, minus the row
        #: while it arrives. The ends stay 0: an id that is out of range is looked up there.
        self._rows = np.zeros(2, np.int32)
        #: int64[rows, 2], begin and end in the arena. Row 0 stands for a sample that is not here.
        self._places = np.full((1, 2), -1, np.int64)
        #: Rows that were ever used, row 0 included, and those of them that are free again.
        self._row_count = 1
        self._free_rows: list[int] = []
        #: Behind the last sample, where the next one begins, and what is free before: begins and ends, ascending.
        self._end = 0
        self._holes: list[tuple[int, int]] = []
        self._used_bytes = self._kept = 0

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def array(self) -> NDArray[np.uint8]:
        if self._array is None:
            raise ClosedError("this memory tier is closed; make a new one")
        return self._array

    def __len__(self) -> int:
        """Return the number of samples kept."""
        return self._kept

    def take_space(self, ids: Ids, sizes: Ids) -> Ids | None:
        count, nbytes = ids.size, int(sizes.sum())
        if count and ids.min() < 0:
            raise IndexError(f"there is no sample {ids.min()}")
        with self._lock:
            _ = self.array  # raises if the tier is closed
            if count:
                self._grow_rows(int(ids.max()))
            at = ids + 1
            if self._rows[at].any():
                return None
            rows = self._new_rows(count)
            self._rows[at] = -rows
            is_twice = bool((self._rows[at] != -rows).any())
            begin = None if is_twice else self._take(nbytes)
            if begin is None:
                self._rows[at] = 0
                self._free_rows += rows.tolist()
                return None
            begins = np.empty(count + 1, np.int64)
            begins[0] = begin
            np.cumsum(sizes, out=begins[1:])
            begins[1:] += begin
            self._places[rows, 0], self._places[rows, 1] = begins[:-1], begins[1:]
            self._used_bytes += nbytes
        return begins

    def keep(self, ids: Ids) -> None:
        with self._lock:
            self._rows[ids + 1] = self._arriving(ids)
            self._kept += ids.size

    def drop(self, ids: Ids) -> None:
        with self._lock:
            rows = self._arriving(ids)
            self._rows[ids + 1] = 0
            self._free_rows += rows.tolist()
            places = self._places[rows]
            self._used_bytes -= int((places[:, 1] - places[:, 0]).sum())
            self._give_back([(int(begin), int(end)) for begin, end in places])

    def places_of(self, ids: Ids) -> Ids:
        rows = self._rows.take(ids + 1, mode="clip")
        return self._places.take(np.maximum(rows, 0), axis=0)

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        content = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        if sample < 0:
            raise IndexError(f"there is no sample {sample}")
        with self._lock:
            array = self.array
            self._grow_rows(sample)
            if self._rows[sample + 1]:
                return True
            begin = self._take(content.size)
            if begin is None:
                return False
            end = begin + content.size
            (row,) = self._new_rows(1).tolist()
            self._rows[sample + 1] = -row
            self._places[row] = begin, end
            self._used_bytes += content.size
        # NumPy copies outside the interpreter's lock; a first write to fresh pages is slow (2 GB/s).
        array[begin:end] = content
        with self._lock:
            _ = self.array  # raises if the tier is closed
            self._rows[sample + 1] = row
            self._kept += 1
        return True

    def contains(self, sample: int) -> bool:
        return self._row_of(sample) > 0

    def view(self, sample: int) -> memoryview:
        array, row = self.array, self._row_of(sample)
        if row <= 0:
            raise KeyError(sample)
        begin, end = self._places[row].tolist()
        return array[begin:end].data.toreadonly()

    def _row_of(self, sample: int) -> int:
        rows = self._rows
        return int(rows[sample + 1]) if 0 <= sample < rows.size - 1 else 0

    def close(self) -> None:
        with self._lock:
            self._array = None
            self.arena.close()
            self._rows = np.zeros(2, np.int32)
            self._used_bytes = self._kept = 0

    # Under the lock

    def _arriving(self, ids: Ids) -> Ids:
        """Return the rows of samples that arrive."""
        _ = self.array  # raises if the tier is closed
        rows = -self._rows.take(ids + 1, mode="clip")
        if not (rows > 0).all():
            raise KeyError(f"no space was taken for sample {ids[rows <= 0][0]}")
        return rows.astype(np.int64)

    def _grow_rows(self, largest: int) -> None:
        if largest + 3 > self._rows.size:
            rows = np.zeros(max(largest + 3, 2 * self._rows.size), np.int32)
            rows[: self._rows.size] = self._rows
            self._rows = rows

    def _new_rows(self, count: int) -> Ids:
        if len(self._free_rows) >= count > 0:
            rows = np.array(self._free_rows[-count:])
            del self._free_rows[-count:]
            return rows
        rows = np.arange(self._row_count, self._row_count + count)
        self._row_count += count
        if self._row_count > len(self._places):
            places = np.full((max(self._row_count, 2 * len(self._places), _FEWEST_ROWS), 2), -1)
            places[: len(self._places)] = self._places
            self._places = places
        return rows

    def _take(self, nbytes: int) -> int | None:
        """Return where so many bytes were free, behind each other, and take them."""
        for index, (begin, end) in enumerate(self._holes):
            if end - begin >= nbytes:
                self._holes[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        if self._end + nbytes > self._capacity_bytes:
            return None
        self._end += nbytes
        return self._end - nbytes

    def _give_back(self, places: list[tuple[int, int]]) -> None:
        holes: list[tuple[int, int]] = []
        for begin, end in sorted(self._holes + places):
            if holes and holes[-1][1] == begin:
                holes[-1] = holes[-1][0], end
            elif end > begin:
                holes.append((begin, end))
        if holes and holes[-1][1] == self._end:
            self._end = holes.pop()[0]
        self._holes = holes
