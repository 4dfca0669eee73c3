"""Slots are lent without a copy and come back when the last reference goes."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import StagingError
from penstock.flow.staging import DeviceEvent, Field, Reference, StagingBuffer, are_small, slot_bytes

FIELDS = (Field("images", (3, 4), np.dtype(np.float32)), Field("labels", (), np.dtype(np.int64)))


class Borrower:
    """Borrows from a staging buffer, and settles what is dropped at once."""

    def __init__(
        self, slots: int, limit_slots: int = 10, device_event: Callable[[], DeviceEvent] | None = None
    ) -> None:
        self.buffer = StagingBuffer(FIELDS, 2, limit_slots * slot_bytes(FIELDS, 2), device_event)
        self.freed: list[int] = []
        for _ in range(slots):
            self.buffer.grow()

    def lend(self, slot: int, rows: int) -> tuple[np.ndarray, ...]:
        return self.buffer.lend(slot, rows, self.settle)

    def settle(self, reference: Reference) -> None:
        slot = self.buffer.settle(reference)
        if slot is not None:
            self.freed.append(slot)


def staging(slots: int, **options: Any) -> tuple[Borrower, list[int]]:
    borrower = Borrower(slots, **options)
    return borrower, borrower.freed


def test_a_lent_batch_is_the_memory_that_workers_wrote() -> None:
    borrower, _ = staging(1)
    images, labels = borrower.buffer.arrays(0)
    images[:] = 7
    labels[:] = [3, 4]

    lent_images, lent_labels = borrower.lend(0, 2)

    assert np.shares_memory(lent_images, images)
    assert (lent_images == 7).all()
    assert lent_labels.tolist() == [3, 4]


def test_fields_of_a_slot_do_not_overlap_and_are_aligned() -> None:
    borrower, _ = staging(2)

    first, second = borrower.buffer.arrays(0), borrower.buffer.arrays(1)

    arrays = [*first, *second]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    assert not any(
        np.shares_memory(arrays[a], arrays[b]) for a in range(len(arrays)) for b in range(a + 1, len(arrays))
    )


@for_each("size_bytes", [0, 8, 1000, 80_000, 1 << 17])
def test_as_many_shared_slots_fit_as_memory_holds_of_them(size_bytes: int) -> None:
    fields = (Field("row", (size_bytes,), np.dtype(np.uint8)),)

    for count in range(1, 30):
        buffer = StagingBuffer(fields, 1, count * slot_bytes(fields, 1), is_shared=True)
        for _ in range(count):
            buffer.grow()
        assert not buffer.can_grow
        buffer.close()


def test_a_slot_comes_back_only_when_every_view_of_every_array_is_gone() -> None:
    borrower, freed = staging(1)
    images, labels = borrower.lend(0, 2)
    corner = images[1, 2:, 1:]

    del images
    gc.collect()
    assert freed == []
    del labels
    assert freed == []
    del corner

    assert freed == [0]
    assert not borrower.buffer.is_referred_to(0)


def test_a_tensor_made_from_a_batch_keeps_its_slot() -> None:
    torch = pytest.importorskip("torch")
    borrower, freed = staging(1)
    images, labels = borrower.lend(0, 2)
    tensor = torch.from_numpy(images)[0].view(-1)[3:]

    del images, labels
    gc.collect()
    assert freed == []
    del tensor

    assert freed == [0]


def test_a_short_batch_lends_only_its_rows() -> None:
    borrower, _ = staging(1)

    images, labels = borrower.lend(0, 1)

    assert images.shape == (1, 3, 4)
    assert labels.shape == (1,)


class Event:
    """An event of a device whose work the test ends."""

    def __init__(self) -> None:
        self.is_recorded = False
        self.is_over = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_over


def test_a_slot_that_a_device_copy_reads_is_not_freed_before_the_copy_ends() -> None:
    events: list[Event] = []

    def event() -> Event:
        events.append(Event())
        return events[-1]

    borrower, freed = staging(1, device_event=event)
    images, labels = borrower.lend(0, 2)
    borrower.buffer.guard(0)
    borrower.buffer.guard(0)  # again, as for a batch that Ctrl-C kept from being handed out
    assert [event.is_recorded for event in events] == [False, False]

    del images
    assert [event.is_recorded for event in events] == [True, False]
    del labels
    freed.extend(borrower.buffer.poll_held())
    assert [event.is_recorded for event in events] == [True, True]
    assert freed == []
    assert borrower.buffer.is_held
    for event_of_array in events:
        event_of_array.is_over = True
    freed.extend(borrower.buffer.poll_held())

    assert freed == [0]
    assert not borrower.buffer.is_held


def test_growing_past_the_limit_names_the_cause_and_the_remedy() -> None:
    borrower, _ = staging(2, limit_slots=2)

    with pytest.raises(StagingError, match=r"all 2 batch slots .*clone\(\)"):
        borrower.buffer.grow()


def test_what_a_kept_array_would_pin_many_times_over_is_small() -> None:
    label, picture = Field("labels", (), np.dtype(np.int64)), Field("images", (3, 32, 32), np.dtype(np.uint8))
    boxes = Field("boxes", (12,), np.dtype(np.float32))  # 48 bytes, of 3,072 + 8 + 48

    assert are_small((picture, label, boxes)) == (False, True, True)
    assert are_small((boxes, label)) == (False, False)
    assert are_small((label,)) == (False,)
    assert not any(are_small((label,) * 70))


def test_a_small_array_is_lent_as_a_copy_that_has_no_slot() -> None:
    picture, label = Field("images", (3, 32, 32), np.dtype(np.uint8)), Field("labels", (), np.dtype(np.int64))
    buffer = StagingBuffer((picture, label), 2, 10_000)
    slot, freed = buffer.grow(), list[int | None]()
    buffer.arrays(slot)[1][:] = [3, 4]

    images, labels = buffer.lend(slot, 2, lambda reference: freed.append(buffer.settle(reference)))
    del images
    buffer.arrays(slot)[1][:] = 0

    assert freed == [slot]
    assert labels.tolist() == [3, 4]
