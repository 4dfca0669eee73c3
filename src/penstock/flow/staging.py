"""The staging buffer: batch slots that workers fill out of order and a consumer borrows in order."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StagingError
from penstock.units import format_bytes

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a batch.

    shape: of one sample; a batch adds the leading dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class _Slot:
    """One batch's memory: an anonymous mapping, its arrays one after the other, each on a 64-byte boundary."""

    def __init__(self, fields: Sequence[Field], batch_size: int, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        with contextlib.suppress(OSError):  # huge pages only save page faults; a kernel without them is fine
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.fields = fields
        self.offsets: list[int] = []
        offset = 0
        for field in fields:
            self.offsets.append(offset)
            offset += _aligned(batch_size * field.sample_bytes)
        self.arrays = self.view(batch_size)
        #: Weak references to the arrays that a consumer borrowed; alive while anything refers to them.
        self.borrowed: list[weakref.ref[NDArray[Any]]] = []

    def view(self, rows: int) -> tuple[NDArray[Any], ...]:
        return tuple(
            np.ndarray((rows, *field.shape), field.dtype, buffer=self.memory, offset=offset)
            for field, offset in zip(self.fields, self.offsets, strict=True)
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(fields: Sequence[Field], batch_size: int) -> int:
    """Return the size of a slot for batches of `batch_size` samples of these fields."""
    return sum(_aligned(batch_size * field.sample_bytes) for field in fields)


class StagingBuffer:
    """A growing set of equal batch slots.

    Workers write through `arrays(slot)`. A consumer borrows a whole slot with `lend` and gets fresh arrays over
    its memory, without a copy; when the last reference to them is gone (views, and tensors made from them,
    included) and `in_use` says that no device copy reads them, the slot is free and `on_free` is called.

    on_free: told the slot's number. Called from whichever thread dropped the last reference, at any point of its
        work, inside the garbage collector too: it must neither block nor raise.
    hold: asked at that point whether something still reads the memory asynchronously; returns None if not, else
        a function that is polled by `poll_held` until it says True.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        batch_size: int,
        limit_bytes: int,
        on_free: Callable[[int], None],
        hold: Callable[[], Callable[[], bool] | None] | None = None,
    ) -> None:
        self._fields = tuple(fields)
        self._batch_size = batch_size
        self.slot_bytes = slot_bytes(fields, batch_size)
        self._limit_bytes = limit_bytes
        self._on_free = on_free
        self._hold = hold
        self._slots: list[_Slot] = []
        #: Slots whose references are gone while a device copy may still read them.
        self._held: deque[tuple[int, Callable[[], bool]]] = deque()
        self._count_lock = threading.RLock()
        self._lent = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def lent(self) -> int:
        """Slots that a consumer still refers to."""
        return self._lent

    @property
    def is_held(self) -> bool:
        """Whether a slot waits for a device copy to end; then `poll_held` must be called again."""
        return bool(self._held)

    @property
    def used_bytes(self) -> int:
        return len(self._slots) * self.slot_bytes

    @property
    def can_grow(self) -> bool:
        return self.used_bytes + self.slot_bytes <= self._limit_bytes

    def grow(self) -> int:
        """Allocate one more slot and return its number.

        Raises: StagingError when that would pass the limit.
        """
        if not self.can_grow:
            raise StagingError(
                f"all {len(self)} batch slots ({format_bytes(self.slot_bytes)} each) are still referred to and the "
                f"staging buffer may take {format_bytes(self._limit_bytes)}: batches alias the buffer, so copy what "
                f"you keep (tensor.clone(), array.copy()) and let go of the rest, or give more memory="
            )
        self._slots.append(_Slot(self._fields, self._batch_size, max(self.slot_bytes, 1)))
        return len(self._slots) - 1

    def arrays(self, slot: int) -> tuple[NDArray[Any], ...]:
        """Return the arrays of a slot, [batch_size, *shape] each, for workers to fill."""
        return self._slots[slot].arrays

    def lend(self, slot: int, rows: int) -> tuple[NDArray[Any], ...]:
        """Lend the first `rows` rows of a slot to a consumer."""
        entry = self._slots[slot]
        arrays = entry.view(rows)
        remaining = len(arrays)
        with self._count_lock:
            self._lent += 1

        def dropped(_: object) -> None:
            nonlocal remaining
            with self._count_lock:
                remaining -= 1
                if remaining:
                    return
            entry.borrowed.clear()
            self._release(slot)

        entry.borrowed = [weakref.ref(array, dropped) for array in arrays]
        return arrays

    def poll_held(self) -> None:
        """Free the slots whose device copies have ended."""
        for _ in range(len(self._held)):
            slot, is_over = self._held.popleft()
            if is_over():
                self._free(slot)
            else:
                self._held.append((slot, is_over))

    def _release(self, slot: int) -> None:
        is_over = self._hold() if self._hold is not None else None
        if is_over is None or is_over():
            self._free(slot)
        else:
            self._held.append((slot, is_over))

    def _free(self, slot: int) -> None:
        with self._count_lock:
            self._lent -= 1
        self._on_free(slot)
