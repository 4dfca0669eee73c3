"""Batches on a CUDA device, and slots that it reads by itself."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import ConfigError, StagingError
from penstock.flow.copying import Copied
from penstock.loader.front_end import with_images
from penstock.loader.structure import is_dataclass_value, with_fields
from penstock.loader.transforms.sink import ByteValues
from penstock.loader.unequal import Ragged
from penstock.units import format_bytes

#: `cudaHostRegisterPortable`: for all devices of the process.
_PORTABLE = 1
#: Elements whose places in a table are there at once: 4 bytes each.
_LOOKED_UP_AT_ONCE = 1 << 22


def changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with each leaf changed: what is in dicts, tuples, lists and dataclasses, however deep."""
    kind = type(batch)
    if kind is np.ndarray or kind is torch.Tensor:  # most of what there is, and asked first
        return change(batch)
    if kind is list:
        return [changed(part, change) for part in batch]
    if kind is Ragged:
        return Ragged(change(batch.values), change(batch.offsets))
    if isinstance(batch, (np.ndarray, torch.Tensor)):
        return change(batch)
    if isinstance(batch, dict):
        return {key: changed(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*[changed(part, change) for part in batch])
    if isinstance(batch, (tuple, list)):
        return kind([changed(part, change) for part in batch])
    return with_fields(batch, partial(changed, change=change)) if is_dataclass_value(batch) else change(batch)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure."""
    found: list[torch.Tensor] = []
    changed(batch, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


def copied_to(batch: Any, device: torch.device) -> Any:
    """Return a structure with its tensors on a device, enqueued on the current stream: the small ones first.

    A small one may lie in memory that is not page-locked, and CUDA may end what is enqueued before it reads that.
    What is no tensor stays.
    """
    tensors = sorted({id(each): each for each in tensors_of(batch)}.values(), key=lambda each: each.nbytes)
    found = {id(each): each.to(device, non_blocking=True) for each in tensors}
    return changed(batch, lambda leaf: found.get(id(leaf), leaf))


def looked_up(images: torch.Tensor, values: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return what a table has for bytes of images, on their device.

    images: uint8[batch, channels, height, width], or channels last. values: [channels * 256], of any dtype.
    """
    out = torch.empty(images.shape, dtype=values.dtype, device=images.device)
    channels = images.shape[-1 if channels_last else 1]
    begins = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=images.device)
    begins = begins if channels_last else begins[:, None, None]
    at_once = max(1, _LOOKED_UP_AT_ONCE // max(1, images[:1].numel()))
    for some, place in zip(torch.split(images, at_once), torch.split(out, at_once), strict=True):
        torch.index_select(values, 0, (some + begins).view(-1), out=place.view(-1))
    return out


def table_of(values: ByteValues) -> torch.Tensor:
    """Return what bytes become, [channels * 256], as PyTorch's own type."""
    numbers = values.numbers.reshape(-1)
    if (
        values.dtype != "float32"
    ):  # their bits, of which PyTorch has no unsigned type that it can see as floats
        numbers = numbers.view(np.int16)
    return torch.from_numpy(numbers).view(getattr(torch, values.dtype))


def device_of(device: str | torch.device | None) -> torch.device | None:
    """Return the CUDA device that an argument names, with its number; None for the CPU.

    Raises: ConfigError for another kind, or where this machine does not have it.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device is {device!r}; it is "cuda", "cuda:1", "cpu" or a torch.device') from error
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ConfigError(
            f"device is {str(found)!r}; batches are copied to CUDA devices: leave it out, and copy to others by "
            ".to(device)"
        )
    if not torch.cuda.is_available():
        built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        reason = "no driver or device is found" if built else "this PyTorch is built without CUDA"
        raise ConfigError(f'device is {str(found)!r}, and {reason}: leave device out, or give "cpu"')
    number = torch.cuda.current_device() if found.index is None else found.index
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {str(found)!r}, and this process sees {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if number == 0 and local_rank != "0" and torch.cuda.device_count() > 1:
        warnings.warn(
            f"device is {str(found)!r} on the rank with LOCAL_RANK={local_rank}: batches of several ranks go to "
            f"cuda:0. Call torch.cuda.set_device({local_rank}) before, or give device='cuda:{local_rank}'",
            RuntimeWarning,
            stacklevel=3,
        )
    return torch.device("cuda", number)


class CudaDevice:
    """A `BatchDevice`: copies on a stream of its own, into memory of PyTorch's allocator.

    That memory belongs to the stream of copies. The allocator hands it to the next copy once the streams that the
    batch was handed over to have passed what they had to do when its last tensor went: a tensor may be kept for ever.

    limit_bytes, finishes: see `BatchDevice`.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, finishes: bool | None) -> None:
        self._device = device
        self.limit_bytes, self.finishes = limit_bytes, finishes
        self._values: ByteValues | None = None
        #: On the device, once the first batch is there.
        self._table: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def name(self) -> str:
        """See `Device`."""
        return str(self._device)

    def free_bytes(self) -> int:
        """See `BatchDevice`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def finish_there(self, values: ByteValues) -> None:
        """See `BatchDevice`."""
        self._values = values

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """See `Device`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def copy(self, batch: Any) -> Copied:
        """See `Device`."""
        moved = self.move(batch)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        nbytes = sum(each.nbytes for each in tensors_of(moved))
        if self._values is not None:
            nbytes += sum(each.nbytes for each in tensors_of(batch) if each.dtype == torch.uint8)
        return Copied(moved, nbytes, done)

    def hand_over(self, copied: Copied) -> Any:
        """See `Device`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(cast(torch.cuda.Event, copied.done))
        for tensor in tensors_of(copied.batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return copied.batch

    def move(self, batch: Any) -> Any:
        """See `Device`."""
        try:
            moved = copied_to(batch, self._device)
            return moved if self._values is None else with_images(moved, self._finished)
        except torch.OutOfMemoryError as error:
            wanted = sum(each.nbytes for each in tensors_of(batch))
            reserved = torch.cuda.memory_reserved(self._device)
            raise StagingError(
                f"{self.name} has no memory for a batch of {format_bytes(wanted)}: {format_bytes(self.free_bytes())} "
                f"are free, and this process's PyTorch has {format_bytes(reserved)}; give a smaller batch_size, less "
                "device_memory=, or the training less to keep"
            ) from error

    def mark(self) -> torch.cuda.Event:
        """See `Device`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _finished(self, images: torch.Tensor) -> torch.Tensor:
        values = self._values
        assert values is not None, "images get their last steps here"
        if self._table is None:
            self._table = table_of(values).to(self._device)
        return looked_up(images, self._table, channels_last=values.channels_last)


class PinnedSlots:
    """A `Pinning` by the CUDA driver (`cudaHostRegister`): the memory stays where it is, shared with others or not.

    What is registered is kept until it is not, so that the driver never has an address whose memory is gone.
    A loader that is dropped closes it with the last reference.
    """

    def __init__(self, device: torch.device, report: Callable[[str], None] | None) -> None:
        self._device, self._report = device, report
        self._lock = threading.Lock()
        self._locked: list[NDArray[np.uint8]] = []
        self._close = weakref.finalize(self, _unlock, device, self._locked, os.getpid())
        self._close.atexit = False  # the driver does, when the process ends

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See `Pinning`."""
        with torch.cuda.device(self._device):
            error = int(_driver().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if not error:
            with self._lock:
                self._locked.append(memory)
        elif self._report is not None:
            report, self._report = self._report, None
            report(
                f"a batch slot of {format_bytes(memory.nbytes)} cannot be page-locked (cudaHostRegister: error "
                f"{error}): copies to the device take longer; `ulimit -l` limits what a process may lock"
            )

    def close(self) -> None:
        """See `Pinning`."""
        self._close()


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unlock(device: torch.device, locked: list[NDArray[np.uint8]], pid: int) -> None:
    if locked and pid == os.getpid():  # a forked process has neither the driver nor its locks
        torch.cuda.synchronize(device)
        for memory in locked:
            _driver().cudaHostUnregister(memory.ctypes.data)
    locked.clear()


def pinned(batch: Any) -> Any:
    """Return a structure whose tensors are all in page-locked memory: those of slots are, others are copied there.

    As with DataLoader, what has a method `pin_memory` is asked for it.
    """
    return changed(batch, lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf)
