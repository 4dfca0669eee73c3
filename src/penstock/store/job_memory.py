"""Samples that processes of one host keep in memory together: whoever reads one has it there for all.

    table      of each sample: where it lies, its checksum, and a seal over these
    memory     |  kept, filled once and never freed    |  passing: a ring, written over  |

No process owns it: each maps both and writes both, and they go with the last of them. Who reads a sample from its
source holds a lock on it meanwhile, of the kind that goes with the process, and the others wait for that. Who takes a
sample copies it and compares its checksum then: what is written over, half written or damaged is read from the source.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.host_memory import checksum_of

Numbers = NDArray[np.uint64]
#: Reads samples of the source: ids, into, begins, as `read_group`.
Read = Callable[[Ids, Bytes, Ids], Sequence[tuple[int, Exception]]]

#: The table begins with these numbers of 64 bits, and has three for each sample.
_VERSION, _GENERATION, _SAMPLES, _KEPT_END, _NEXT_KEPT, _NEXT_PASSING, _HEAD = *range(6), 8
_BEGIN, _CHECKSUM, _SEAL, _COLUMNS = range(4)
_VERSION_HERE = 1
#: Of memory that does not hold all samples: what those have that are not kept, for jobs that are about as far.
_PASSING_SHARE = 1 / 8
#: For a sample that another process reads; after that it is read here, too.
_PATIENCE_SECONDS, _LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 2.0, 0.001, 0.016
_LOCK = struct.Struct("hhqqi4x")
_SPREADS = np.uint64(0x9E3779B97F4A7C15)


class _Group(NamedTuple):
    """Samples that a thread asks for, as `read_group` takes them."""

    ids: Ids
    into: Bytes
    begins: Ids
    sizes: Ids


class JobMemory:
    """One process's part of the memory. Any thread may call anything.

    table, memory: made by `new_arenas`, here or in another process; closed with this. The table's descriptor is an open
        file that no other process has, as locks belong to it.
    sizes_bytes: int64[samples].
    Raises: ConfigError for a table of another version or data set.
    """

    def __init__(self, table: Arena, memory: Arena, sizes_bytes: Ids) -> None:
        self._arenas, self._sizes_bytes = (table, memory), sizes_bytes
        self._memory: Bytes = memory.array
        self._head = np.frombuffer(table.mapping, np.uint64)[:_HEAD]
        if self._head[_VERSION] != _VERSION_HERE or self._head[_SAMPLES] != sizes_bytes.size:
            raise ConfigError(
                "other processes of this host share samples by another version of Penstock, or of other data: end "
                "them, or leave share= out"
            )
        self._rows: Numbers = np.frombuffer(table.mapping, np.uint64)[_HEAD:].reshape(-1, _COLUMNS)
        self._generation = self._head[_GENERATION]
        #: Guards what follows, and the places that are given out, among threads; a lock on the table does the latter
        #: among processes.
        self._places_lock = threading.Lock()
        #: Samples that threads of this process have locked: to the kernel all of these are one.
        self._locked_here: set[int] = set()

    @property
    def capacity_bytes(self) -> int:
        return int(self._memory.size)

    def read_group(
        self,
        ids: Ids,
        into: Bytes,
        begins: Ids,
        read: Read,
        sizes: Ids | None = None,
        shared: list[int] | None = None,
    ) -> Failed:
        """Take samples from here, and have those read that are not; as `penstock.store.read_group`.

        sizes: int64[n], where they are others than `sizes_bytes`, which is then about what samples take. Whoever asks
            for a sample gives the same. shared: gets the ids of those that were here.
        """
        group = _Group(ids, into, begins, self._sizes_bytes[ids] if sizes is None else sizes)
        failed, left = Failed(), self._not_taken(range(ids.size), group)
        read_here = set[int]()
        deadline, pause = time.monotonic() + _PATIENCE_SECONDS, _LEAST_PAUSE_SECONDS
        while left:
            with self._locked(left, group) as (mine, others):
                # Of nobody any more, or for too long of another: then it is read twice.
                if not mine and time.monotonic() > deadline:
                    mine, others = others, []
                if mine:
                    read_here.update(mine)
                    wrong = read(ids[mine], into, np.append(begins[mine], begins[-1]))
                    failed += [(mine[index], error) for index, error in wrong]
                    not_read = {index for index, _ in failed}
                    self._keep([index for index in mine if index not in not_read], group)
            if others == left:
                # Nothing is done until then but to ask for locks: many threads may wait here.
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)
            left = others
        if shared is not None:
            shared += [sample for index, sample in enumerate(ids.tolist()) if index not in read_here]
        return sorted(failed, key=lambda each: each[0])

    def close(self) -> None:
        """Let the memory go, which does once no process maps it. Twice is harmless."""
        for arena in self._arenas:
            arena.close()

    def _not_taken(self, which: Sequence[int], group: _Group) -> list[int]:
        """Copy samples that are here to their places; return the indices of the others."""
        if not len(which):
            return []
        ids, into, begins, all_sizes = group
        some, sizes = ids[list(which)], all_sizes[list(which)]
        rows = self._rows[some]
        is_here = (rows[:, _SEAL] == _seals(some, rows, self._generation)) & (
            rows[:, _BEGIN] + sizes.astype(np.uint64) <= self._memory.size
        )
        left = []
        for index, good, begin, size, checksum in zip(
            which,
            is_here.tolist(),
            rows[:, _BEGIN].tolist(),
            sizes.tolist(),
            rows[:, _CHECKSUM].tolist(),
            strict=True,
        ):
            if good:
                place = into[begins[index] : begins[index] + size]
                place[:] = self._memory[begin : begin + size]
                good = checksum_of(place) == checksum
                if not good and self._rows[ids[index], _CHECKSUM] == checksum:
                    self._rows[ids[index], _SEAL] = 0  # whoever reads it has it here anew
            if not good:
                left.append(index)
        return left

    @contextlib.contextmanager
    def _locked(self, which: list[int], group: _Group) -> Iterator[tuple[list[int], list[int]]]:
        """Lock samples that nobody reads, in the context; yield those that are still to be read, and the others."""
        locked, others = list[int](), list[int]()
        try:
            for index in which:
                (locked if self._lock_sample(int(group.ids[index])) else others).append(index)
            # One that was kept since it was looked for is here now.
            yield self._not_taken(locked, group), others
        finally:
            for index in locked:
                self._lock(int(group.ids[index]), fcntl.F_UNLCK)
                self._locked_here.discard(int(group.ids[index]))

    def _lock_sample(self, sample: int) -> bool:
        with self._places_lock:
            if sample in self._locked_here or not self._lock(sample, fcntl.F_WRLCK):
                return False
            self._locked_here.add(sample)
        return True

    def _keep(self, which: list[int], group: _Group) -> None:
        ids, into, begins, all_sizes = group
        # What was read twice, as the other reader took so long, is there by now.
        rows = self._rows[ids[which]]
        is_there = rows[:, _SEAL] == _seals(ids[which], rows, self._generation)
        which = [index for index, there in zip(which, is_there.tolist(), strict=True) if not there]
        if not which:
            return
        some = ids[which]
        sizes = all_sizes[which].tolist()
        places = self._take_space(sizes)
        for index, sample, size, place in zip(which, some.tolist(), sizes, places, strict=True):
            if place < 0:
                continue
            data = into[begins[index] : begins[index] + size]
            self._memory[place : place + size] = data
            row = np.array([[place, checksum_of(data), 0]], np.uint64)
            row[0, _SEAL] = _seals(np.array([sample]), row, self._generation)[0]
            self._rows[sample] = row[0]

    def _take_space(self, sizes: list[int]) -> list[int]:
        """Return where samples go: among those that are kept, else in the ring; -1 for one that fits into neither."""
        capacity, kept_end = self._memory.size, int(self._head[_KEPT_END])
        places = []
        with self._places_lock, self._all_locked():
            for size in sizes:
                kept, passing = int(self._head[_NEXT_KEPT]), int(self._head[_NEXT_PASSING])
                if kept + size <= kept_end:
                    places.append(kept)
                    self._head[_NEXT_KEPT] = kept + size
                elif kept_end + size <= capacity:
                    passing = passing if kept_end <= passing <= capacity - size else kept_end
                    places.append(passing)
                    self._head[_NEXT_PASSING] = passing + size
                else:
                    places.append(-1)
        return places

    @contextlib.contextmanager
    def _all_locked(self) -> Iterator[None]:
        """Hold the lock that all processes take to give out places; nobody waits for anything else meanwhile."""
        at = self._sizes_bytes.size
        self._lock(at, fcntl.F_WRLCK, waits=True)
        try:
            yield
        finally:
            self._lock(at, fcntl.F_UNLCK)

    def _lock(self, at: int, kind: int, *, waits: bool = False) -> bool:
        """Change the lock on a number; return False if another process has it."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._arenas[0].descriptor, command, _LOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


def new_arenas(capacity_bytes: int, sizes_bytes: Ids) -> tuple[Arena, Arena]:
    """Return a new table and memory. capacity_bytes: no more are taken than all samples have. Raises: as `Arena`."""
    total = int(sizes_bytes.sum())
    capacity_bytes = max(1, min(capacity_bytes, total))
    table = Arena(8 * (_HEAD + _COLUMNS * max(1, sizes_bytes.size)), is_shared=True)
    try:
        memory = Arena(capacity_bytes, is_shared=True)
    except BaseException:
        table.close()
        raise
    head = np.frombuffer(table.mapping, np.uint64)
    head[[_VERSION, _GENERATION, _SAMPLES]] = _VERSION_HERE, secrets.randbits(63), sizes_bytes.size
    head[_KEPT_END] = (
        capacity_bytes if capacity_bytes == total else int(capacity_bytes * (1 - _PASSING_SHARE))
    )
    return table, memory


def _seals(ids: Ids, rows: Numbers, generation: np.uint64) -> Numbers:
    """Return a number for each row, by which one that is half written or of another sample is found out; never 0."""
    seals = np.full(len(rows), generation, np.uint64)
    for column in (ids.astype(np.uint64), rows[:, _BEGIN], rows[:, _CHECKSUM]):
        seals = (seals ^ column) * _SPREADS
        seals ^= seals >> np.uint64(32)
    return seals | np.uint64(1)
