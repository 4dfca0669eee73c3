"""What differs between frameworks, as a value: how samples come in, how batches go out, what threads need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.flow.channel import Reducers
from penstock.flow.copying import Device
from penstock.flow.staging import DeviceEvent, Pinning
from penstock.loader.dataset import copies_nothing, numpy_leaf
from penstock.loader.transforms.sink import ByteValues


def _do_nothing() -> None:
    """Where threads need nothing to begin."""


def _is_plain() -> bool:
    """Where nothing can be set for a thread."""
    return True


def _as_it_is(batch: Any) -> Any:
    return batch


def _is_not_computing() -> bool:
    """Where it has computed when it returns."""
    return False


def _no_device() -> None:
    """Where memory that nobody refers to is free at once."""


class BatchDevice(Device, Protocol):
    """A device, as a framework's front end has it."""

    @property
    def limit_bytes(self) -> int | None:
        """For batches that are there, as the user says; None where nobody does."""
        ...

    @property
    def finishes(self) -> bool | None:
        """Whether the last steps of images are to be done there; None: where they can be."""
        ...

    def free_bytes(self) -> int:
        """Return what is free there now."""
        ...

    def finish_there(self, values: ByteValues) -> None:
        """Have bytes of images become these numbers there, from here on."""
        ...


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A framework's functions, called by a `Loader`. The first two each framework has; the others may be left out.

    present_made: what the caller gets of a batch that its collate_fn made.
    present: present(batch, dtype) turns a structure of NumPy arrays, most of them over a slot, into what the caller
        gets, without a copy. dtype: number format of the images, None for the batch of a data set.
    as_array: turns a part of a data set's sample into an array; None for what is neither array nor number.
    copy_leaves: copies parts of samples that are neither numbers nor NumPy arrays, see `SampleDecoder`.
    reducers: what pickles some types for another process, see `penstock.flow.channel`.
    begin_thread: what each thread that decodes does first.
    is_plain_thread: whether nothing is set for the calling thread that changes what a data set's code computes in it.
    as_workers: has the calling thread compute as those do that `begin_thread` was called in, while it lasts.
    is_computing: whether the framework still computes with batches that nobody else refers to: they are free soon.
    device_event: asked when a loader is made for the `device_event` of its `StagingBuffer`.
    device: where batches are copied to, by one loader; None where they stay in their slots.
    pinning: locks the memory of its slots; None where it stays as it is.
    """

    present: Callable[[Any, str | None], Any]
    as_array: Callable[[Any], NDArray[Any] | None]
    copy_leaves: Callable[[Sequence[Any], NDArray[Any]], bool] = copies_nothing
    begin_thread: Callable[[], None] = _do_nothing
    device_event: Callable[[], Callable[[], DeviceEvent | None] | None] = _no_device
    reducers: Reducers = field(default_factory=dict)
    present_made: Callable[[Any], Any] = _as_it_is
    device: BatchDevice | None = None
    pinning: Pinning | None = None
    is_plain_thread: Callable[[], bool] = _is_plain
    as_workers: Callable[[], AbstractContextManager[None]] = nullcontext
    is_computing: Callable[[], bool] = _is_not_computing


#: Batches as they are: NumPy arrays.
NUMPY = FrontEnd(present=lambda batch, dtype: batch, as_array=numpy_leaf)


def with_images(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch of a folder or source with its images changed; see `Loader` for what it may be."""
    if isinstance(batch, dict):
        return {**batch, "images": change(batch["images"])}
    if isinstance(batch, tuple):
        images, *labels = batch
        return change(images), *labels
    return change(batch)
