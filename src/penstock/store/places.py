"""Where samples lie in the bytes of a tier: which are there, which arrive, and what is free."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from penstock.store.direct import BLOCK_BYTES, in_blocks

Ids = NDArray[np.int64]

_FEWEST_ROWS = 1024


class SamplePlaces:
    """Takes and gives back places of samples in so many bytes. Space is lost to no other sample than larger ones.

    It takes 4 bytes for each id up to the largest, and 17 for each sample that is there; at times half of that is not
    in use yet. Any thread may call any method at any time; lookups wait for none.

    padding_bytes: of the capacity, may be left between samples: as long as some are, each begins at a block.
    """

    def __init__(self, capacity_bytes: int, padding_bytes: int = 0) -> None:
        self._capacity_bytes, self._padding_bytes = capacity_bytes, padding_bytes
        #: Guards all below. Lookups do without it: they read `_rows` before `_places`, which has every row that was
        #: ever in `_rows`. Both are replaced when they grow.
        self._lock = threading.Lock()
        #: int32[largest id + 3], at id + 1: 0 if the sample is not here, its row in `_places` once it is, minus the row
        #: while it arrives. The ends stay 0: an id that is out of range is looked up there.
        self._rows = np.zeros(2, np.int32)
        #: int64[rows, 2], begin and end. Row 0 stands for a sample that is not here.
        self._places = np.full((1, 2), -1, np.int64)
        #: bool[rows]: whether the blocks of a sample have no other.
        self._is_padded = np.zeros(1, bool)
        #: Rows that were ever used, row 0 included, and those of them that are free again.
        self._row_count = 1
        self._free_rows: list[int] = []
        #: Behind the last sample, where the next one begins, and what is free before: begins and ends, ascending.
        self._end = 0
        self._holes: list[tuple[int, int]] = []
        #: Of holes, what counts as padding: those smaller than a block, as before samples that begin at one.
        self._small_bytes = 0
        self._used_bytes = self._kept = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the samples that are there or arrive."""
        return self._used_bytes

    @property
    def nbytes(self) -> int:
        """Memory that all of this takes, about."""
        return self._rows.nbytes + self._places.nbytes + self._is_padded.nbytes

    def __len__(self) -> int:
        """Return the number of samples that are there."""
        return self._kept

    def take(self, ids: Ids, sizes: Ids) -> Ids | None:
        """Take space, one piece, for a whole group or for none; see `SizedTier.take_space`. Raises: IndexError."""
        count, nbytes = ids.size, int(sizes.sum())
        if count and ids.min() < 0:
            raise IndexError(f"there is no sample {ids.min()}")
        with self._lock:
            if count:
                self._grow_rows(int(ids.max()))
            at = ids + 1
            if self._rows[at].any():
                return None
            rows = self._new_rows(count)
            self._rows[at] = -rows
            is_twice = bool((self._rows[at] != -rows).any())
            padding = in_blocks(nbytes) - nbytes
            left_bytes = self._padding_bytes - self._small_bytes
            is_padded = count == 1 and nbytes > 0 and 0 < left_bytes >= padding
            begin = None
            if is_padded and not is_twice:
                begin = self._take(nbytes + padding, BLOCK_BYTES, left_bytes - padding)
            if begin is None and not is_twice:
                is_padded, begin = False, self._take(nbytes)
            if begin is None:
                self._rows[at] = 0
                self._free_rows += rows.tolist()
                return None
            begins = np.empty(count + 1, np.int64)
            begins[0] = begin
            np.cumsum(sizes, out=begins[1:])
            begins[1:] += begin
            self._places[rows, 0], self._places[rows, 1] = begins[:-1], begins[1:]
            self._is_padded[rows] = is_padded
            self._padding_bytes -= padding * is_padded
            self._used_bytes += nbytes
        return begins

    def is_known(self, sample: int) -> bool:
        """Return whether a sample is there or arrives."""
        rows = self._rows
        return 0 <= sample < rows.size - 1 and bool(rows[sample + 1])

    def contains(self, sample: int) -> bool:
        """Return whether a sample is there."""
        rows = self._rows
        return 0 <= sample < rows.size - 1 and bool(rows[sample + 1] > 0)

    def keep(self, ids: Ids) -> None:
        """Let samples be found that have arrived; see `SizedTier.keep`. Raises: KeyError."""
        with self._lock:
            self._rows[ids + 1] = self._arriving(ids)
            self._kept += ids.size

    def drop(self, ids: Ids) -> None:
        """Give back the space of samples that do not arrive. Raises: KeyError."""
        with self._lock:
            self._free(ids, self._arriving(ids))

    def evict(self, ids: Ids) -> Ids:
        """Give back the space of samples that are there; return which of `ids` these were."""
        with self._lock:
            here = np.unique(ids[self._rows.take(ids + 1, mode="clip") > 0])
            self._free(here, self._rows[here + 1].astype(np.int64))
            self._kept -= here.size
        return here

    def of(self, ids: Ids) -> Ids:
        """Return where samples lie: int64[n, 2], begin and end; -1, -1 for one that is not there. ids: any numbers."""
        rows = self._rows.take(ids + 1, mode="clip")
        return self._places.take(np.maximum(rows, 0), axis=0)

    def table(self) -> tuple[NDArray[np.int32], Ids]:
        """Return, for a loop that looks samples up, int32[ids + 2], at id + 1 the row of one that is there, and rows.

        Rows are int64[rows, 2], as of `of`. Numbers below 1, and ids outside, are of samples that are not there: row 0.
        """
        rows = self._rows
        return rows, self._places

    def kept(self) -> Ids:
        """Return the samples that are there, ascending."""
        return np.flatnonzero(self._rows > 0) - 1

    def restore(self, ids: Ids, begins: Ids, ends: Ids) -> None:
        """Have samples there, in these places, which do not overlap. Nothing was there before."""
        if not ids.size:
            return
        order = np.argsort(begins, kind="stable")
        with self._lock:
            self._grow_rows(int(ids.max()))
            rows = self._new_rows(ids.size)
            self._rows[ids + 1] = rows
            self._places[rows, 0], self._places[rows, 1] = begins, ends
            self._used_bytes, self._kept = int((ends - begins).sum()), ids.size
            begins, ends = begins[order], np.maximum.accumulate(ends[order])
            whole = in_blocks(ends)
            is_padded = (begins % BLOCK_BYTES == 0) & (whole <= np.append(begins[1:], self._capacity_bytes))
            self._is_padded[rows[order]] = is_padded
            self._padding_bytes -= int((whole - ends)[is_padded].sum())
            ends = np.where(is_padded, whole, ends)
            before = np.concatenate(([0], ends[:-1]))
            is_hole = begins > before
            self._holes = list(zip(before[is_hole].tolist(), begins[is_hole].tolist(), strict=True))
            self._small_bytes = _small_bytes(self._holes)
            self._end = int(ends.max())

    def forget(self) -> None:
        """Have nothing there any more."""
        with self._lock:
            self._rows = np.zeros(2, np.int32)
            self._used_bytes = self._kept = 0

    # Under the lock

    def _free(self, ids: Ids, rows: Ids) -> None:
        self._rows[ids + 1] = 0
        self._free_rows += rows.tolist()
        begins, ends = self._places[rows].T
        whole = np.where(self._is_padded[rows], in_blocks(ends), ends)
        self._used_bytes -= int((ends - begins).sum())
        self._padding_bytes += int((whole - ends).sum())
        self._give_back(list(zip(begins.tolist(), whole.tolist(), strict=True)))

    def _arriving(self, ids: Ids) -> Ids:
        """Return the rows of samples that arrive."""
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
            self._is_padded = np.append(self._is_padded, np.zeros(len(places) - len(self._places), bool))
            self._places = places
        return rows

    def _take(self, nbytes: int, multiple: int = 1, most_before: int = 0) -> int | None:
        """Return where so many bytes were free, behind each other, and take them.

        multiple: of which the place is. most_before: bytes that may stay free before it for that.
        """
        for index, (begin, end) in enumerate(self._holes):
            first = -(-begin // multiple) * multiple
            if end - first >= nbytes and first - begin <= most_before:
                left = [(begin, first), (first + nbytes, end)]
                self._small_bytes += _small_bytes(left) - _small_bytes([(begin, end)])
                self._holes[index : index + 1] = [hole for hole in left if hole[0] < hole[1]]
                return first
        first = -(-self._end // multiple) * multiple
        if first + nbytes > self._capacity_bytes or first - self._end > most_before:
            return None
        if first > self._end:
            self._small_bytes += first - self._end
            self._holes.append((self._end, first))
        self._end = first + nbytes
        return first

    def _give_back(self, places: list[tuple[int, int]]) -> None:
        holes: list[tuple[int, int]] = []
        for begin, end in sorted(self._holes + places):
            if holes and holes[-1][1] == begin:
                holes[-1] = holes[-1][0], end
            elif end > begin:
                holes.append((begin, end))
        if holes and holes[-1][1] == self._end:
            self._end = holes.pop()[0]
        self._holes, self._small_bytes = holes, _small_bytes(holes)


def _small_bytes(holes: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in holes if end - begin < BLOCK_BYTES)
