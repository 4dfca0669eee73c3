"""Samples kept as decoded pictures: whoever decodes one first does so as a whole, for all epochs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.images import ImageDecoder, ImageGroup, size_of
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.pixels_on_disk import HEAD_BYTES, PixelsOnDisks, head_of, with_spare, write_head
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
from penstock.ranks.peer_messages import MOST_SAMPLES_BYTES
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
    pixels_bytes = math.ceil(max(1.0, each_byte * float(sizes_bytes.mean())))
    return CropForm(HEAD_BYTES + pixels_bytes, is_decoded=True)


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

    Each begins with its rows and columns; those of one that is kept as stored are zero. Behind pixels are bytes that
    compiled loops may read.

    pipeline: one of `front_of_crops`. placement: says of which samples. disks: what they keep.
    shared: memory that other ranks read, in place of the capacity. They count on each sample that is to be there, so
        that one whose pixels cannot be is kept as stored: a plan by `Job.kept_bytes` has space for that.
    sizes_bytes: int64[samples], as stored.
    """

    def __init__(
        self,
        form: CropForm,
        pipeline: Pipeline,
        capacity_bytes: int,
        placement: Placement,
        disks: KeptOnDisks,
        shared: MemoryTier | None,
        sizes_bytes: NDArray[np.int64],
    ) -> None:
        self.form, self.tier = form, MemoryTier(capacity_bytes) if shared is None else shared
        self._is_shared, self._sizes_bytes = shared is not None, sizes_bytes
        self.disks = PixelsOnDisks(disks, placement, None)
        #: bool[samples]
        self.is_kept: NDArray[np.bool_] = placement.tier_of == form.TIER
        self.whole = WholePictures(pipeline)
        kept_bytes = sizes_bytes[self.is_kept]
        #: What those that are to be here, and are not yet, take as stored. Under the lock, as is taking space.
        self._due_bytes = int(kept_bytes.sum()) + HEAD_BYTES * kept_bytes.size
        self._due_lock = threading.Lock()

    def find(self, sample: int, epoch: int = 0) -> NDArray[np.uint8] | None:
        """Return uint8[rows, columns, 3], read-only, or uint8[bytes] as stored; None where it is not here.

        Raises: ClosedError.
        """
        ((begin, end),) = self.tier.places_of(np.array([sample])).tolist()
        if begin < 0:
            return None
        found = self.unpacked(self.tier.array[begin:end])
        if found is not None:
            found.flags.writeable = False
        return found

    def keep(self, sample: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Copy a picture; return the copy, or None without space for it. pixels: uint8[rows, columns, 3]."""
        rows, columns, _ = pixels.shape
        nbytes = pixel_bytes(rows, columns)
        if self._is_shared and HEAD_BYTES + nbytes > MOST_SAMPLES_BYTES:  # ranks keep it as it is stored
            return None
        return self._keep(sample, pixels, rows, columns, nbytes)

    def keep_stored(self, sample: int, data: NDArray[np.uint8]) -> None:
        """Copy what has no pixels here, where other ranks count on it, if there is space. data: uint8[bytes]."""
        if self._is_shared:
            self._keep(sample, data, 0, 0, data.size)

    def _keep(
        self, sample: int, what: NDArray[np.uint8], rows: int, columns: int, nbytes: int
    ) -> NDArray[np.uint8] | None:
        ids, as_stored_bytes = np.array([sample]), HEAD_BYTES + int(self._sizes_bytes[sample])
        with self._due_lock:
            is_as_stored = rows == 0
            others_bytes = self._due_bytes - as_stored_bytes if self._is_shared and not is_as_stored else 0
            if self.tier.used_bytes + HEAD_BYTES + nbytes + others_bytes > self.tier.capacity_bytes:
                return None
            begins = self.tier.take_space(ids, np.array([HEAD_BYTES + nbytes]))
            if begins is None:
                return None
            self._due_bytes -= as_stored_bytes
        content = self.tier.array[begins[0] : begins[1]]
        write_head(content, rows, columns)
        content[HEAD_BYTES:][: what.size] = what.reshape(-1)
        self.tier.keep(ids)
        return self.unpacked(content)

    def unpacked(self, content: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Return what memory has of a sample, here or on another rank, as `find`; None for bytes that are none."""
        rows, columns = head_of(content)
        if rows == columns == 0:
            return content[HEAD_BYTES:] if content.size > HEAD_BYTES else None
        if min(rows, columns) < 1 or content.size != HEAD_BYTES + pixel_bytes(rows, columns):
            return None
        return content[HEAD_BYTES:][: rows * columns * 3].reshape(rows, columns, 3)


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
            if data[index].ndim == 1 and is_wanted and not self._kept.tier.contains(sample):
                at(sample)
                pixels = self._whole(data[index], sample, group)
                data[index] = data[index] if pixels is None else pixels
        return super()._write_images(group._replace(data=data), which, at)

    def _whole(self, data: NDArray[np.uint8], sample: int, group: ImageGroup) -> NDArray[np.uint8] | None:
        """Decode a picture and keep it; return a copy of it.

        None where that is not what its crops are made of, or memory has no space that should keep it.
        """
        found: NDArray[np.uint8] | None = None

        def keep(pixels: NDArray[np.uint8]) -> None:
            nonlocal found
            self._kept.disks.put(sample, pixels)
            found = self._kept.keep(sample, pixels) if self._kept.is_kept[sample] else with_spare(pixels)

        self._kept.whole.decode(data.data, group.scratch, keep)
        if found is None and self._kept.is_kept[sample]:
            self._kept.keep_stored(sample, data)
        return found
