"""Writing samples to a tier that is slow to write to, on its own threads, so that readers wait for no write."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClosedError
from penstock.store.direct import lay_out
from penstock.store.disk import DiskTier
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.tier import SlowTier

#: How long closing waits for what is still to be written, which later runs would otherwise read anew.
_CLOSING_SECONDS = 10.0


class WriteBehind:
    """A tier that is written to in the background. What waits to be written is read from memory.

    Any thread may call any method.

    tier: closed with this object.
    queue_bytes: most bytes of samples that wait. Threads are started by the first sample.
    is_shared: whether other ranks wait for what is put here. If so, a sample that finds no space in the queue is
        written by the caller of `put`, who waits for the write. Else that sample is not kept, and `put` never waits.
    """

    def __init__(
        self, tier: SlowTier, queue_bytes: int, threads: int = 1, *, is_shared: bool = False
    ) -> None:
        self.tier, self._is_shared = tier, is_shared
        self._queue_bytes, self._most_threads = queue_bytes, threads
        #: Guards all below; notified when a sample is queued, the queue is empty, or this is closed.
        self._changed = threading.Condition()
        #: By sample, its bytes, and how many of them are counted; and those that threads are writing. A sample is among
        #: these before it leaves the queue, so that who looks at both in this order without the lock misses none.
        self._queued: OrderedDict[int, tuple[Bytes, int]] = OrderedDict()
        self._writing: dict[int, tuple[Bytes, int]] = {}
        self._waiting_bytes = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def put(self, sample: int, data: NDArray[np.uint8], *, stays: bool = False) -> bool:
        """Queue a sample, or write it where the queue has no space and other ranks wait for it.

        stays: whether the bytes stay where they are, as in a memory tier; else a copy of them is queued.
        Returns: whether the tier has the sample, or it is queued; one that is queued may not fit the tier later.
        Raises: ClosedError.
        """
        nbytes = 0 if stays else data.size
        with self._changed:
            if self._is_closed:
                raise ClosedError("this tier is closed; make a new one")
            if self._has(sample):
                return True
            has_space = self._waiting_bytes + nbytes <= self._queue_bytes
            if has_space:
                self._waiting_bytes += nbytes
        if not has_space:
            return self._is_shared and self.tier.put(sample, data.data)
        content = data if stays else data.copy()  # not under the lock: it may be large
        with self._changed:
            if self._has(sample):
                self._waiting_bytes -= nbytes
                return True
            self._queued[sample] = content, nbytes
            if len(self._threads) < min(self._most_threads, len(self._queued)):
                self._threads.append(threading.Thread(target=self._write, name="penstock-disk", daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        return True

    def contains(self, sample: int) -> bool:
        """Return whether the tier has a sample, or is about to."""
        with self._changed:
            return self._has(sample)

    def sizes_of(self, ids: Ids) -> Ids:
        """Return the bytes of samples of the tier, or of what waits; as `SlowTier.sizes_of`."""
        waiting = self._waiting_of(ids)
        sizes = self.tier.sizes_of(ids)
        for index, found in enumerate(waiting):
            if found is not None:
                sizes[index] = found[0].size
        return sizes

    def _has(self, sample: int) -> bool:
        return sample in self._queued or sample in self._writing or self.tier.contains(sample)

    def read(
        self, ids: Ids, sizes: Ids, memory_for: Callable[[int], Bytes]
    ) -> tuple[Bytes, list[int], Failed]:
        """Read samples to memory; return that, where in it each begins, and those that failed, as `read_group`.

        sizes: int64[n], bytes of each. memory_for: returns uint8 of so many bytes at least, from
            `penstock.store.direct.new_memory`.
        """
        waiting = self._waiting_of(ids)
        disk = self.tier if isinstance(self.tier, DiskTier) and self.tier.is_direct else None
        if disk is not None and not any(waiting) and (found := lay_out(sizes, memory_for)) is not None:
            memory, begins = found
            failed = disk.read_group(ids, memory, begins, is_loose=True)
            return memory, begins[:-1].tolist(), failed
        # As in `lay_out`: of few items a list takes a third of what arrays do, 6 us of the 150 that eight reads take.
        firsts = [0, *accumulate(sizes.tolist())]
        begins = np.array(firsts)
        memory = memory_for(firsts.pop())
        return memory, firsts, self._read(waiting, ids, memory, begins)

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples of the tier, or of what waits; as `SlowTier.read_group`."""
        return self._read(self._waiting_of(ids), ids, into, begins)

    def _waiting_of(self, ids: Ids) -> list[tuple[Bytes, int] | None]:
        """Return what waits of some samples, with None for the others; an empty list if nothing does."""
        if not self._queued and not self._writing:
            return []
        with self._changed:
            return [self._queued.get(sample, self._writing.get(sample)) for sample in ids.tolist()]

    def _read(self, waiting: list[tuple[Bytes, int] | None], ids: Ids, into: Bytes, begins: Ids) -> Failed:
        if not any(waiting):
            return self.tier.read_group(ids, into, begins)
        there = [index for index, found in enumerate(waiting) if found is None]
        for found, begin in zip(waiting, begins.tolist(), strict=False):
            if found is not None:
                into[begin : begin + found[0].size] = found[0]
        if not there:
            return []
        ends = np.append(begins[there], begins[-1])
        return [(there[index], error) for index, error in self.tier.read_group(ids[there], into, ends)]

    def evict(self, ids: Ids) -> None:
        """Keep samples no longer, those that wait included; one that is being written at the time stays."""
        with self._changed:
            for sample in ids.tolist():
                if sample in self._queued:
                    self._waiting_bytes -= self._queued.pop(sample)[1]
        self.tier.evict(ids)

    def close(self) -> None:
        """Write what waits, as far as that is done in ten seconds, and close the tier. Twice is harmless."""
        with self._changed:
            if not self._is_closed:
                self._changed.wait_for(lambda: not self._queued and not self._writing, _CLOSING_SECONDS)
            self._is_closed = True
            self._queued.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self.tier.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closed)
                if not self._queued:
                    return
                sample, (content, nbytes) = next(iter(self._queued.items()))
                self._writing[sample] = content, nbytes
                del self._queued[sample]
            try:
                self.tier.put(sample, content.data)
            finally:
                with self._changed:
                    del self._writing[sample]
                    self._waiting_bytes -= nbytes
                    self._changed.notify_all()
