"""Pieces of one size kept in this process's memory: of a sample, or of a sample in one epoch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ClosedError
from penstock.store.host_memory import KeptLog, checksum_of
from penstock.store.memory import check_capacity

#: Behind the last block: compiled loops may read a few bytes on, which weigh nothing.
_SPARE_BYTES = 64


class BlockTier:
    """Blocks of bytes in one arena. Any thread may call anything.

    A block is written by whoever took it, and found once it is kept. One that is of an epoch is found once: its memory
    is free again when the array that `find` returned is gone.

    capacity_bytes: at least 1; a block for each `shape` that fits. shape: of a block.
    new_arena: makes its memory. log: gets what is kept for all epochs, for other ranks; closed with the tier.
    Raises: ConfigError if the capacity is below 1 or the kernel has no such space in its address space.
    """

    def __init__(
        self,
        capacity_bytes: int,
        shape: tuple[int, ...],
        new_arena: Callable[[int], Arena] = Arena,
        log: KeptLog | None = None,
    ) -> None:
        check_capacity(capacity_bytes)
        block_bytes = int(np.prod(shape))
        count = capacity_bytes // block_bytes
        self.arena = new_arena(count * block_bytes + _SPARE_BYTES)
        #: uint8[blocks, *shape]; None once closed.
        self._array: NDArray[np.uint8] | None = self.arena.array[: count * block_bytes].reshape(count, *shape)
        #: Those that hold nothing; what was freed last is taken first, as the kernel has supplied its memory already.
        #: Appending and taking are one step each, in any thread.
        self._free = list(reversed(range(count)))
        #: By sample and epoch. Guarded by the lock while it changes.
        self._blocks: dict[tuple[int, int | None], int] = {}
        self._lock = threading.Lock()
        self._log = log
        #: By block, what tells that nobody reads it any more.
        self._read: dict[int, weakref.ref[NDArray[np.uint8]]] = {}

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8[blocks, *shape]. Write only blocks that were taken. Raises: ClosedError."""
        if self._array is None:
            raise ClosedError("this tier is closed; make a new one")
        return self._array

    def __len__(self) -> int:
        """Return the number of blocks that are kept."""
        return len(self._blocks)

    def take(self, most: int) -> list[int]:
        """Take blocks that hold nothing, as many as there are up to `most`; return their numbers."""
        taken: list[int] = []
        try:
            while len(taken) < most:
                taken.append(self._free.pop())
        except IndexError:  # no more
            pass
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that were taken and are not kept."""
        self._free.extend(blocks)

    def keep(self, block: int, sample: int, epoch: int | None = None) -> None:
        """Have a block found; one that is there for the same stays, and this one is free. epoch: None for all."""
        with self._lock:
            known = self._blocks.setdefault((sample, epoch), block)
        if known != block:
            self._free.append(block)
        elif self._log is not None and epoch is None:
            content = self.array[block].reshape(-1)
            places = content.size * np.array([[block, block + 1]])
            self._log.add(np.array([sample]), places, [checksum_of(content)])

    def find(self, sample: int, epoch: int | None = None) -> NDArray[np.uint8] | None:
        """Return uint8[*shape], read-only, of a sample; None where it is not here. epoch: as for `keep`.

        Raises: ClosedError.
        """
        array = self.array
        if epoch is None:
            block = self._blocks.get((sample, None))
            return None if block is None else _read_only(array[block])
        with self._lock:
            block = self._blocks.pop((sample, epoch), None)
        if block is None:
            return None
        found = _read_only(array[block])
        self._read[block] = weakref.ref(found, partial(self._end_reading, block))
        return found

    def forget(self, samples: Sequence[int], epochs: range) -> None:
        """Free what was kept of samples for epochs that are over, and was not wanted."""
        with self._lock:
            blocks = [self._blocks.pop((sample, epoch), None) for sample in samples for epoch in epochs]
        self._free.extend(block for block in blocks if block is not None)

    def close(self) -> None:
        """Forget everything; memory is freed with the last view. Twice is harmless."""
        self._array = None
        self._blocks = {}
        self.arena.close()
        if self._log is not None:
            self._log.close()

    def _end_reading(self, block: int, _: object) -> None:
        # Called wherever the last reference goes, under the lock too: these are one step each.
        del self._read[block]
        self._free.append(block)


def _read_only(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    array.flags.writeable = False
    return array
