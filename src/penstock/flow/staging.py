"""The staging buffer: batch slots that workers fill out of order and a consumer borrows in order."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import StagingError
from penstock.units import format_bytes

_ALIGNMENT = 64
#: Less than this CUDA copies out of pageable memory at once, as fast.
_LEAST_PINNED_BYTES = 1 << 16
#: An array of at most this share of a sample is handed out as a copy: it costs next to nothing, and whoever keeps it
#: keeps no slot that is many times larger.
_SMALL_SHARE = 1 / 64


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
        return math.prod(self.shape) * self.dtype.itemsize


#: For decoders that write nothing to slots: a slot is free when nothing refers to its arrays, so it has one.
ROW = Field("row", (), np.dtype(np.uint8))


class _Slot:
    """One batch's memory."""

    def __init__(self, fields: Sequence[Field], batch_size: int, arena: Arena, begin: int = 0) -> None:
        self.arena, self.begin = arena, begin
        self.view = partial(slot_arrays, arena.mapping, fields, batch_size, begin=begin)
        self.arrays = self.view(batch_size)
        self.loan: _Loan | None = None
        self.is_pinned = False


def slot_arrays(
    memory: mmap.mmap, fields: Sequence[Field], batch_size: int, rows: int, begin: int = 0
) -> tuple[NDArray[Any], ...]:
    """Return the arrays of a slot, [rows, *shape] each: one behind the other, each on a 64-byte boundary.

    memory: the arena of the slot, in this process or in another that has attached it. begin: of the slot there, see
        `slot_begin`. batch_size: that the slot has space for.
    """
    arrays, offset = [], begin
    for field in fields:
        arrays.append(np.ndarray((rows, *field.shape), field.dtype, buffer=memory, offset=offset))
        offset += _aligned(batch_size * field.sample_bytes)
    return tuple(arrays)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(fields: Sequence[Field], batch_size: int) -> int:
    """Return what a slot for batches of `batch_size` samples of these fields takes of memory, and of an arena.

    Those of empty samples have a place, too. Large ones may be locked, which is done by the page: no page has parts of
    two of them.
    """
    nbytes = max(_ALIGNMENT, sum(_aligned(batch_size * field.sample_bytes) for field in fields))
    return nbytes if nbytes < _LEAST_PINNED_BYTES else -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def slot_begin(fields: Sequence[Field], batch_size: int, slot: int) -> int:
    """Return where a slot begins in the arena that all slots share."""
    return slot * slot_bytes(fields, batch_size)


def are_small(fields: Sequence[Field]) -> tuple[bool, ...]:
    """Return, for each field, whether it is so small next to the others that a copy is better than an alias.

    The largest one is not, however many there are.

    >>> are_small((Field("images", (3, 224, 224), np.dtype("f4")), Field("labels", (), np.dtype("i8"))))
    (False, True)
    """
    sizes_bytes = [field.sample_bytes for field in fields]
    most_bytes = min(_SMALL_SHARE * sum(sizes_bytes), max(sizes_bytes) - 1)
    return tuple(size_bytes <= most_bytes for size_bytes in sizes_bytes)


class Reference(weakref.ref["NDArray[Any]"]):
    """A weak reference to one array of a loan."""

    __slots__ = ("loan",)

    loan: _Loan


class DeviceEvent(Protocol):
    """A mark in the work of a device. Its methods are written in C: Ctrl-C would be lost in a Python frame."""

    def record(self) -> None:
        """Put the mark behind all that this thread has enqueued on its current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the mark; True where it was never put."""
        ...


class Pinning(Protocol):
    """Makes memory page-locked, so that a device reads it by itself."""

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Lock memory, and keep it until `close`. Where it cannot be, copies take longer, and that is reported."""
        ...

    def close(self) -> None:
        """Unlock all of it, once no copy is under way. Twice is harmless."""
        ...


class Beside(Protocol):
    """What batches have outside their slots."""

    @property
    def held_bytes(self) -> int:
        """What it takes."""
        ...

    def drop(self, slot: int) -> None:
        """Keep nothing of a slot any more."""
        ...

    def close(self) -> None:
        """Keep no memory to use again."""
        ...


class _Guard(weakref.ref["NDArray[Any]"]):
    """A weak reference to one array of a loan, whose callback `_RECORD` records the array's event.

    record: the event's bound method, in the place where `_RECORD` looks for it.
    """

    __slots__ = ("event", "record")

    event: DeviceEvent
    record: Callable[[], None]


#: Calls `record` of what it is given. No Python frame: what a signal handler raises in a callback's frame, as in any
#: callback of a weak reference, is printed and dropped.
_RECORD = methodcaller("record")


class _Loan:
    """A slot in a consumer's hands, until nothing refers to any of its arrays.

    references: weak, one for each array over its memory; kept here, as a weak reference that is gone itself calls
        nobody.
    left: arrays that were not handed to `settle` yet.
    guards: one for each array where a device may copy from them, else empty.
    """

    __slots__ = ("guards", "left", "references", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.references: list[Reference] = []
        self.left = 0
        self.guards: list[_Guard] = []


class StagingBuffer:
    """A growing set of equal batch slots.

    Workers write through `arrays(slot)`. A consumer gets a full slot by `lend`: fresh arrays over its memory, without
    a copy, but for small ones. Whoever has the others has the slot; when the last reference to them is gone (views, and
    tensors made from them, included) and no device copy reads them any more, the slot is free. There is no moment at
    which an interrupted consumer could lose one.

    device_event: returns a fresh event for an array that is handed out, or None where no device is in use. The thread
        that drops the array's last reference records it at that moment; the slot is free once the event has passed.
    is_shared: whether other processes may map the slots (`arena`, `slot_arrays`, `slot_begin`). Then all have one
        arena, which takes as much address space as the limit, memory as slots are first written, and one descriptor.
        Else each has an arena of its own, which is freed with the last reference to it.
    beside: what batches have beside their slots, which the limit includes.
    pinning: locks the memory of each slot, when a worker first writes to it; not that of small slots, which a driver
        copies on the way.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        batch_size: int,
        limit_bytes: int,
        device_event: Callable[[], DeviceEvent | None] | None = None,
        is_shared: bool = False,
        beside: Beside | None = None,
        pinning: Pinning | None = None,
    ) -> None:
        self._fields = tuple(fields)
        self._batch_size = batch_size
        self.slot_bytes = slot_bytes(fields, batch_size)
        self._are_copied = are_small(fields)
        self._limit_bytes = limit_bytes
        self._device_event = device_event
        nbytes = max(limit_bytes, self.slot_bytes)
        #: Of all slots; None where each has its own.
        self.arena = Arena(nbytes, is_shared=True, huge_pages=True) if is_shared else None
        self._most_slots = math.inf if self.arena is None else nbytes // self.slot_bytes
        self._slots: list[_Slot] = []
        self._beside = beside
        self._pinning = None if self.slot_bytes < _LEAST_PINNED_BYTES else pinning
        #: Slots that are not used any more.
        self._retired: set[int] = set()
        #: Loans whose references are gone while a device copy may still read the slot.
        self._held: list[_Loan] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def batch_size(self) -> int:
        """How many rows a slot has space for."""
        return self._batch_size

    @property
    def is_held(self) -> bool:
        """Whether a slot waits for a device copy to end; then `poll_held` must be called again."""
        return bool(self._held)

    @property
    def used_bytes(self) -> int:
        """What slots that are in use take, and what batches have outside them."""
        in_use = len(self._slots) - len(self._retired)
        return in_use * self.slot_bytes + (self._beside.held_bytes if self._beside else 0)

    @property
    def can_grow(self) -> bool:
        return self.used_bytes + self.slot_bytes <= self._limit_bytes and len(self) < self._most_slots

    def grow(self) -> int:
        """Allocate one more slot and return its number.

        Raises: StagingError when that would pass the limit.
        """
        if not self.can_grow:
            raise StagingError(
                f"all {len(self)} batch slots ({format_bytes(self.slot_bytes)} each{self._beside_them()}) are still "
                f"referred to and the "
                f"staging buffer may take {format_bytes(self._limit_bytes)}: batches alias the buffer, so copy what "
                f"you keep (tensor.clone(), array.copy()) and drop the rest, or give more memory="
            )
        arena, begin = self.arena, slot_begin(self._fields, self._batch_size, len(self))
        if arena is None:
            arena, begin = Arena(self.slot_bytes, huge_pages=True), 0
        self._slots.append(_Slot(self._fields, self._batch_size, arena, begin))
        return len(self._slots) - 1

    def _beside_them(self) -> str:
        held_bytes = self._beside.held_bytes if self._beside else 0
        return f", and {format_bytes(held_bytes)} outside them" if held_bytes else ""

    def arrays(self, slot: int) -> tuple[NDArray[Any], ...]:
        """Return the arrays of a slot, [batch_size, *shape] each, for workers to fill."""
        entry = self._slots[slot]
        if self._pinning is not None and not entry.is_pinned:
            # By one of several workers; the batch is complete only when that one has done its part of it, too.
            entry.is_pinned = True
            self._pinning.pin(np.frombuffer(entry.arena.mapping, np.uint8, self.slot_bytes, entry.begin))
        return entry.arrays

    def lend(self, slot: int, rows: int, on_drop: Callable[[Reference], None]) -> tuple[NDArray[Any], ...]:
        """Lend the first `rows` rows of a slot: [rows, *shape] each, those that `are_small` as copies.

        on_drop: called once for each array that is no copy, by the thread that drops its last reference, wherever that
            thread is, in the garbage collector too; the reference is for `settle`. It must neither block nor be written
            in Python, where Ctrl-C could stop it: `SimpleQueue.put` is made for this.
        """
        entry = self._slots[slot]
        loan = _Loan(slot)
        lent: list[NDArray[Any]] = []
        for array, is_copied in zip(entry.view(rows), self._are_copied, strict=True):
            if is_copied:
                lent.append(array.copy())
                continue
            reference = Reference(array, on_drop)
            reference.loan = loan
            loan.references.append(reference)
            lent.append(array)
        loan.left = len(loan.references)
        entry.loan = loan
        return tuple(lent)

    def guard(self, slot: int) -> None:
        """Free a lent slot only after the device copies out of it, where a device is in use by now.

        Call it before a batch is handed out: its arrays are referred to. Twice is harmless. A device that comes into
        use later needs no guard: slots are pageable memory where it was not in use when they were made, and CUDA has
        staged a copy out of such memory before the call that asks for it returns.
        """
        loan = self._slots[slot].loan
        if self._device_event is None or loan is None or loan.guards:
            return
        guards = []
        for reference in loan.references:
            array, event = reference(), self._device_event()
            if array is None or event is None:
                return
            # Called before `reference`: the last weak reference made is the first.
            guard = _Guard(array, _RECORD)
            guard.event, guard.record = event, event.record
            guards.append(guard)
        loan.guards = guards

    def is_referred_to(self, slot: int) -> bool:
        """Whether anything refers to an array of the slot's latest loan, or the slot is retired."""
        loan = self._slots[slot].loan
        return slot in self._retired or (loan is not None and any(map(_is_alive, loan.references)))

    def retire(self, slot: int, least: int) -> bool:
        """Use a free slot no more, if the limit is passed and so many others are left; return whether it was done.

        What batches have outside their slots may turn out to be larger than was expected.
        """
        in_use = len(self._slots) - len(self._retired)
        if self._beside is None or in_use <= least or self.used_bytes <= self._limit_bytes:
            return False
        self._retired.add(slot)
        self._beside.drop(slot)
        self._give_back(slot)
        return True

    def _give_back(self, slot: int) -> None:
        entry = self._slots[slot]
        entry.arena.give_back(entry.begin, entry.begin + self.slot_bytes)

    def close(self) -> None:
        """Give back what nobody refers to, once no worker writes any more; other slots go with their references.

        Of slots that are shared, the memory of those that are referred to is given back with the last of them. Twice is
        harmless.
        """
        if self._pinning is not None:
            self._pinning.close()
        if self._beside is not None:
            self._beside.close()
        arena, self.arena = self.arena, None
        if arena is not None:
            for slot in range(len(self)):
                if not self.is_referred_to(slot):
                    self._give_back(slot)
            arena.close()

    def settle(self, reference: Reference) -> int | None:
        """Take note that an array of a loan is gone; return the slot once it is free. One thread at a time."""
        loan = reference.loan
        loan.left -= 1
        if loan.left:
            return None
        if _is_over(loan):
            return loan.slot
        self._held.append(loan)
        return None

    def poll_held(self) -> list[int]:
        """Return the slots whose device copies have ended; they are free. In the thread of `settle`."""
        over = [loan for loan in self._held if _is_over(loan)]
        self._held = [loan for loan in self._held if loan not in over]
        return [loan.slot for loan in over]


def _is_alive(reference: Reference) -> bool:
    """Return whether the array is referred to, without a reference that could be the last one, in another thread."""
    return reference.__callback__ is not None


def _is_over(loan: _Loan) -> bool:
    return all(guard.event.query() for guard in loan.guards)
