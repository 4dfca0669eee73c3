"""Samples kept as decoded pictures: whoever decodes one first does so as a whole, for all epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.images import ImageDecoder, ImageGroup, size_of
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.pixels_on_disk import PixelsOnDisks, with_spare
from penstock.loader.transforms import Scratch
from penstock.loader.transforms.decoders import Picture
from penstock.loader.transforms.geometry import (
    MIRROR,
    RANDOM_CROP,
    REDUCING_GAP,
    TURN_OVER,
    WIDENED,
    Box,
    pixel_bytes,
)
from penstock.loader.transforms.jpeg import is_jpeg
from penstock.loader.transforms.pipeline import Front, Pipeline
from penstock.policy import Placement
from penstock.policy.forms import CropForm
from penstock.store import MemoryTier

#: Of a photograph: what a byte of its file is decoded to.
_BYTES_A_BYTE = 6.0


def front_of_crops(pipeline: Pipeline) -> Front | None:
    """Return what a pipeline begins with if that cuts one random crop of a picture, and mirrors it; None otherwise.

    Those are the steps of which it is known which pictures they shrink while these are decoded.
    """
    front = pipeline.front
    if front is None:
        return None
    kinds = [step.what for step in front.numbers]
    is_one = kinds.count(RANDOM_CROP) == 1 and set(kinds) <= {RANDOM_CROP, MIRROR, TURN_OVER}
    return front if is_one else None


def decoded_form(pipeline: Pipeline, sizes_bytes: NDArray[np.int64], sample: bytes | None) -> CropForm:
    """Return the form of decoded pictures. sizes_bytes: int64[samples], as stored.

    sample: tells how many pixels there are to a byte; a photograph is assumed for None, and where it cannot be read.
    Raises: ConfigError where crops of all epochs are not made of pixels of the full size.
    """
    if front_of_crops(pipeline) is None:
        raise ConfigError(
            'keep is "decoded", and the transforms do not begin with one RandomResizedCrop, and flips perhaps: put '
            'these first, or give keep="crops", for which one crop serves all epochs where nothing is drawn'
        )
    size = None if sample is None else size_of(np.frombuffer(sample, np.uint8))
    each_byte = _BYTES_A_BYTE if sample is None or size is None else pixel_bytes(*size) / len(sample)
    return CropForm(math.ceil(max(1.0, each_byte * float(sizes_bytes.mean()))), is_decoded=True)


class WholePictures:
    """Decodes pictures as a whole, as crops of all epochs are made of them. pipeline: one of `front_of_crops`."""

    def __init__(self, pipeline: Pipeline) -> None:
        front = front_of_crops(pipeline)
        assert front is not None, "it was checked when the form was chosen"
        (crop,) = [step for step in front.numbers if step.what == RANDOM_CROP]
        self._target = crop.height, crop.width
        self._shrinks = crop.resampling & WIDENED != 0

    def serves(self, data: memoryview, rows: int, columns: int) -> bool:
        """Return whether crops of all epochs are made of pixels of the full size: decoders shrink JPEG files only."""
        height, width = self._target
        is_small = min(rows / height, columns / width) < 2 * REDUCING_GAP
        return is_small or not self._shrinks or not is_jpeg(data)

    def decode(self, data: memoryview, scratch: Scratch, keep: Callable[[NDArray[np.uint8]], object]) -> bool:
        """Decode a picture, and have its pixels copied; return whether its crops are made of them, and it is intact.

        keep: gets uint8[rows, columns, 3], which is valid until it returns.
        """
        try:
            picture = Picture(data, scratch.decoders, scratch.reserve)
            if not self.serves(data, picture.height, picture.width):
                return False
            box = Box(0, 0, picture.height, picture.width)
            if (need := picture.need(box, 1)) is not None:
                scratch.reserve(need)
            keep(picture.decode(box, 1).array)
        except DataError:  # whether this epoch's crop is among what is damaged, decoding that alone says
            return False
        finally:
            scratch.end_picture()
        return True


class KeptPictures:
    """The pictures in memory, and those on disks. Any thread may call anything.

    pipeline: one of `front_of_crops`. placement: says of which samples. disks: what they keep.
    """

    def __init__(
        self,
        form: CropForm,
        pipeline: Pipeline,
        capacity_bytes: int,
        placement: Placement,
        disks: KeptOnDisks,
    ) -> None:
        self.form, self.tier = form, MemoryTier(capacity_bytes)
        self.disks = PixelsOnDisks(disks, placement, None)
        #: bool[samples]
        self.is_kept: NDArray[np.bool_] = placement.tier_of == form.TIER
        #: int32[samples, 2], rows and columns of those that are here.
        self._shapes = np.zeros((self.is_kept.size, 2), np.int32)
        self.whole = WholePictures(pipeline)

    def find(self, sample: int, epoch: int = 0) -> NDArray[np.uint8] | None:
        """Return uint8[rows, columns, 3], read-only; None where it is not here. Raises: ClosedError."""
        ((begin, end),) = self.tier.places_of(np.array([sample])).tolist()
        if begin < 0:
            return None
        found = self._picture(sample, begin, end)
        found.flags.writeable = False
        return found

    def keep(self, sample: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Copy a picture; return the copy, or None without space for it. pixels: uint8[rows, columns, 3]."""
        ids = np.array([sample])
        begins = self.tier.take_space(ids, np.array([pixel_bytes(*pixels.shape[:2])]))
        if begins is None:
            return None
        self._shapes[sample] = pixels.shape[:2]
        found = self._picture(sample, *begins.tolist())
        found[...] = pixels
        self.tier.keep(ids)
        return found

    def _picture(self, sample: int, begin: int, end: int) -> NDArray[np.uint8]:
        rows, columns = self._shapes[sample].tolist()
        # Behind the pixels are bytes that compiled loops may read.
        return self.tier.array[begin:end][: rows * columns * 3].reshape(rows, columns, 3)


class PictureDecoder(ImageDecoder):
    """An `ImageDecoder` that keeps the pictures it decodes, and takes those that it gets in place of bytes."""

    def __init__(self, kept: KeptPictures, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        data = list(group.data)
        for index in which:
            sample = group.sample(index)
            is_wanted = self._kept.is_kept[sample] or self._kept.disks.is_wanted(sample)
            if data[index].ndim == 1 and is_wanted:
                at(sample)
                pixels = self._whole(data[index].data, sample, group)
                data[index] = data[index] if pixels is None else pixels
        return super()._write_images(group._replace(data=data), which, at)

    def _whole(self, data: memoryview, sample: int, group: ImageGroup) -> NDArray[np.uint8] | None:
        """Decode a picture and keep it; return a copy of it.

        None where that is not what its crops are made of, or memory has no space that should keep it.
        """
        found: NDArray[np.uint8] | None = None

        def keep(pixels: NDArray[np.uint8]) -> None:
            nonlocal found
            self._kept.disks.put(sample, pixels)
            found = self._kept.keep(sample, pixels) if self._kept.is_kept[sample] else with_spare(pixels)

        self._kept.whole.decode(data, group.scratch, keep)
        return found
