"""Batches that a loader hands out on a device: what is copied there, ahead, and how much of it there may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.flow.batches import StagedBatch
from penstock.flow.copying import CopyAhead
from penstock.flow.work import Decoder
from penstock.loader.front_end import BatchDevice, FrontEnd
from penstock.loader.setup import Setup
from penstock.policy import device_depth
from penstock.units import format_bytes


def made(
    decoder: Decoder, front_end: FrontEnd, dtype: str | None, staged: StagedBatch, places: Sequence[int]
) -> Any:
    """Return some places of a batch as the caller gets it, over its slot. dtype: of images, as they are in the slot."""
    finished = decoder.finish(staged.slot, staged.keep(places), staged.rows(places))
    return front_end.present(finished, dtype)


def copy_ahead(
    setup: Setup, front_end: FrontEnd, clock: Callable[[], float], report: Callable[[str], None]
) -> CopyAhead | None:
    """Return what copies batches ahead; None where none are, or nothing is ahead of the training.

    Raises: ConfigError if the device's limit is less than two batches.
    """
    device = front_end.device
    if device is None:
        return None
    if setup.byte_values is not None:
        device.finish_there(setup.byte_values)
    if setup.works_in_own_thread:
        return None
    plan, rank = setup.plan, setup.rank

    def make(staged: StagedBatch) -> Any:
        return made(setup.decoder, front_end, setup.dtype_in_slot, staged, range(len(staged.samples)))

    def following(epoch: int, step: int) -> tuple[int, int]:
        return plan.first_read_from(rank, epoch, step + 1)

    return CopyAhead(
        device, _limit_bytes(setup, device), make=make, following=following, clock=clock, report=report
    )


def batch_bytes(setup: Setup) -> int:
    """Return what a rank's largest batch takes on a device; 0 where only the batch itself can say.

    While the last steps of images are done there, their bytes are there, too.
    """
    sample_bytes = sum(field.sample_bytes for field in setup.decoder.fields)
    if setup.pipeline is None and (setup.beside is not None or setup.collates):
        return 0
    if setup.byte_values is not None:
        images = setup.decoder.fields[0]
        sample_bytes += math.prod(images.shape) * setup.byte_values.numbers.itemsize
    return sample_bytes * setup.plan.max_local_batch(setup.rank)


def _limit_bytes(setup: Setup, device: BatchDevice) -> int:
    needed, limit_bytes = batch_bytes(setup), device.limit_bytes
    if limit_bytes is None:
        return device_depth.default_bytes(needed, device.free_bytes())
    if limit_bytes < device_depth.LEAST * needed:
        raise ConfigError(
            f"device_memory is {format_bytes(limit_bytes)}, and a batch takes {format_bytes(needed)} on {device.name}, "
            f"of which {device_depth.LEAST} are there at once: give {format_bytes(device_depth.LEAST * needed)} or "
            "more, or a smaller batch_size"
        )
    return limit_bytes


def device_line(setup: Setup, device: BatchDevice, ahead: CopyAhead | None) -> str:
    """Say what goes to a device, for people."""
    how = ", whose images cross as bytes and get their last steps there" if setup.byte_values else ""
    if ahead is None:
        return f"copies each batch to {device.name} when it is asked for{how}"
    needed = batch_bytes(setup)
    each = f" of {format_bytes(needed)}" if needed else ""
    return (
        f"copies batches{each} to {device.name} ahead of the training{how}; they take at most "
        f"{format_bytes(ahead.limit_bytes)} there"
    )
