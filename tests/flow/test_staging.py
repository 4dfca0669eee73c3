"""Slots are lent without a copy and come back when the last reference goes."""

import gc
from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import StagingError
from penstock.flow.staging import Field, StagingBuffer, slot_bytes

FIELDS = (Field("images", (3, 4), np.dtype(np.float32)), Field("labels", (), np.dtype(np.int64)))


def staging(
    slots: int, limit_slots: int = 10, hold: Callable[[], Callable[[], bool] | None] | None = None
) -> tuple[StagingBuffer, list[int]]:
    freed: list[int] = []
    buffer = StagingBuffer(FIELDS, 2, limit_slots * slot_bytes(FIELDS, 2), freed.append, hold)
    for _ in range(slots):
        buffer.grow()
    return buffer, freed


def test_a_lent_batch_is_the_memory_that_workers_wrote() -> None:
    buffer, _ = staging(1)
    images, labels = buffer.arrays(0)
    images[:] = 7
    labels[:] = [3, 4]

    lent_images, lent_labels = buffer.lend(0, 2)

    assert np.shares_memory(lent_images, images)
    assert (lent_images == 7).all()
    assert lent_labels.tolist() == [3, 4]


def test_fields_of_a_slot_do_not_overlap_and_are_aligned() -> None:
    buffer, _ = staging(2)

    first, second = buffer.arrays(0), buffer.arrays(1)

    arrays = [*first, *second]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    assert not any(
        np.shares_memory(arrays[a], arrays[b]) for a in range(len(arrays)) for b in range(a + 1, len(arrays))
    )


def test_a_slot_comes_back_only_when_every_view_of_every_array_is_gone() -> None:
    buffer, freed = staging(1)
    images, labels = buffer.lend(0, 2)
    corner = images[1, 2:, 1:]

    del images
    gc.collect()
    assert freed == []
    del labels
    assert freed == []
    del corner

    assert freed == [0]
    assert buffer.lent == 0


def test_a_tensor_made_from_a_batch_keeps_its_slot() -> None:
    torch = pytest.importorskip("torch")
    buffer, freed = staging(1)
    images, labels = buffer.lend(0, 2)
    tensor = torch.from_numpy(images)[0].view(-1)[3:]

    del images, labels
    gc.collect()
    assert freed == []
    del tensor

    assert freed == [0]


def test_a_short_batch_lends_only_its_rows() -> None:
    buffer, _ = staging(1)

    images, labels = buffer.lend(0, 1)

    assert images.shape == (1, 3, 4)
    assert labels.shape == (1,)


def test_a_slot_that_a_device_copy_reads_is_not_freed_before_the_copy_ends() -> None:
    is_over = False
    buffer, freed = staging(1, hold=lambda: lambda: is_over)
    images, labels = buffer.lend(0, 2)

    del images, labels
    buffer.poll_held()
    assert freed == []
    assert buffer.is_held
    is_over = True
    buffer.poll_held()

    assert freed == [0]
    assert not buffer.is_held


def test_growing_past_the_limit_names_the_cause_and_the_remedy() -> None:
    buffer, _ = staging(2, limit_slots=2)

    with pytest.raises(StagingError, match=r"all 2 batch slots .*clone\(\)"):
        buffer.grow()
