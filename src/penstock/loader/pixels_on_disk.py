"""Crops and decoded pictures on local disks: written by whoever decodes a sample, and read in its place ever after."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.flow.work import Failed
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.resume import describe_object, describe_pixels
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.decoders import decoder_versions
from penstock.loader.transforms.geometry import pixel_bytes
from penstock.policy import Placement
from penstock.policy.forms import CropForm
from penstock.store.direct import new_memory
from penstock.store.group import Bytes
from penstock.store.write_behind import WriteBehind

#: In front of a picture, whose size no other place knows: rows and columns.
_HEAD = struct.Struct("<ii")
HEAD_BYTES = CropForm.HEAD_BYTES
#: Behind pixels whose rows are not known before they are read: compiled loops read on by three bytes for each weight of
#: a pixel and 13 more, which weigh nothing. A crop is made of at most some dozens of pixels of a row for each of its
#: own.
_SPARE_BYTES = 1024

Pixels = NDArray[np.uint8]


def describe_form(form: CropForm, pipeline: Pipeline) -> dict[str, object]:
    """Return what fixes the pixels that are kept for all epochs: the form, its steps, and who decodes and resizes."""
    front = pipeline.front
    assert front is not None, "it was checked when the form was chosen"
    steps = (
        []
        if form.is_decoded
        else [describe_object(step) for step in pipeline.transforms[: len(front.stages)]]
    )
    made_by = {**decoder_versions(), "penstock": version("penstock")}
    return {"form": form.name, "steps": steps, "pixels": describe_pixels(), "made by": made_by}


class PixelsOnDisks:
    """What disks keep of pictures in place of their files. Any thread may call anything.

    kept: the tiers by number, and what goes to each besides what it shall keep. placement: which tier keeps what.
    shape: of all that is kept, (rows, columns, 3); None for pictures, each of its own.
    """

    def __init__(self, kept: KeptOnDisks, placement: Placement, shape: tuple[int, ...] | None) -> None:
        self._tiers: Mapping[int, WriteBehind] = {
            number: tier for number, tier in kept.tiers.items() if number in kept.in_form
        }
        self._copied, self._shape = kept.copied, shape
        #: What each takes; 0 for pictures.
        self._bytes = 0 if shape is None else math.prod(shape)
        self._tier_of = placement.tier_of

    def has_tier(self, number: int) -> bool:
        """Return whether a tier is one of these."""
        return number in self._tiers

    def is_wanted(self, sample: int) -> bool:
        """Return whether a disk shall keep a sample."""
        return self._tier_of[sample] in self._tiers

    def put(self, sample: int, pixels: Pixels) -> None:
        """Have a sample written where it shall be, if it is not there. pixels: uint8[rows, columns, 3]."""
        for number, tier in self._tiers.items():
            is_copied = number in self._copied and self._copied[number][sample]
            if (self._tier_of[sample] == number or is_copied) and not tier.contains(sample):
                tier.put(sample, self._packed(pixels))

    def read(
        self, number: int, samples: list[int], memory_for: Callable[[int], Bytes]
    ) -> list[Pixels | Failed]:
        """Return uint8[rows, columns, 3] of each sample of a tier, read-only, or `Failed`.

        memory_for: returns uint8 of so many bytes at least, as for `WriteBehind.read`.
        """
        tier, ids = self._tiers[number], np.array(samples)
        sizes = tier.sizes_of(ids)
        # One that comes meanwhile has no space here.
        there = np.flatnonzero(sizes >= 0)
        memory, begins, failed = tier.read(ids[there], sizes[there] + _SPARE_BYTES, memory_for)
        wrong = dict(failed)
        found: list[Pixels | Failed | None] = [None] * len(samples)
        for place, (index, size) in enumerate(zip(there.tolist(), sizes[there].tolist(), strict=True)):
            pixels = self._unpacked(memory[begins[place] : begins[place] + size])
            if place in wrong:
                found[index] = Failed(wrong[place])
            elif pixels is not None:
                pixels.flags.writeable = False
                found[index] = pixels
        return [
            Failed(DataError(f"sample {sample} is on no disk as pixels")) if each is None else each
            for sample, each in zip(samples, found, strict=True)
        ]

    def find(self, sample: int) -> Pixels | None:
        """Return a sample that a disk has, whichever shall keep it."""
        for number, tier in self._tiers.items():
            if tier.contains(sample):
                (found,) = self.read(number, [sample], new_memory)
                return None if isinstance(found, Failed) else found
        return None

    def _packed(self, pixels: Pixels) -> Bytes:
        if self._shape is not None:
            return pixels.reshape(-1)
        packed = np.empty(HEAD_BYTES + pixels.size, np.uint8)
        write_head(packed, *pixels.shape[:2])
        packed[HEAD_BYTES:] = pixels.reshape(-1)
        return packed

    def _unpacked(self, content: Bytes) -> Pixels | None:
        """Return the picture; None for bytes that are none."""
        if self._shape is not None:
            return content.reshape(self._shape) if content.size == self._bytes else None
        rows, columns = head_of(content)
        if content.size < HEAD_BYTES or content.size != HEAD_BYTES + 3 * rows * columns:
            return None
        return content[HEAD_BYTES:].reshape(rows, columns, 3)


def write_head(content: Bytes, rows: int, columns: int) -> None:
    """Write what is in front of a picture."""
    _HEAD.pack_into(content.data, 0, rows, columns)


def head_of(content: Bytes) -> tuple[int, int]:
    """Return rows and columns, as `write_head` wrote them; zeros of what is too short to have any."""
    if content.size < HEAD_BYTES:
        return 0, 0
    rows, columns = _HEAD.unpack_from(content.data)
    return rows, columns


def with_spare(pixels: Pixels) -> Pixels:
    """Return a copy of a picture, with bytes behind it that compiled loops may read."""
    memory = np.empty(pixel_bytes(*pixels.shape[:2]), np.uint8)
    found = memory[: pixels.size].reshape(pixels.shape)
    found[...] = pixels
    return found
