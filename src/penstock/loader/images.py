"""Encoded pictures to rows of a batch slot, with their labels."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.staging import Field
from penstock.flow.work import Brought
from penstock.loader.fetching import located
from penstock.loader.transforms import Draws, Pipeline, Scratch
from penstock.loader.transforms.joint import MaskPass
from penstock.loader.transforms.jpeg import JpegHeader, is_jpeg, read_header
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.sizes import read_size
from penstock.loader.transforms.stages import Beside
from penstock.policy import Load

#: Of batches and epochs.
_DRAWS_KEPT = 64
#: Pictures that are decoded by one call where a step of its own follows for each: they stay in the processor's cache.
FRONTS = 8
# Of a picture that is only guessed at: photographs have 2 to 8.
_MOST_PIXELS_A_BYTE = 8


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a source of pictures, each behind its picture in what is read.

    front_bytes: int64[samples], of the picture. describe: names the mask of a sample.
    """

    front_bytes: NDArray[np.int64]
    write: MaskPass
    describe: Callable[[int], str]


class ImageGroup(NamedTuple):
    """Pictures that a thread brings into a slot.

    rows, ids, data: of each, its place in the batch, its sample, and what the fetcher brought. images: of the slot.
    draws: of the batch. scratch: the thread's. shared: as of `Brought`. beside: of one alone, see `Pipeline.run`.
    """

    load: Load
    rows: Sequence[int]
    ids: NDArray[np.int64]
    data: Sequence[Any]
    images: NDArray[Any]
    draws: Draws
    scratch: Scratch
    shared: list[int] | None = None
    beside: Beside | None = None

    def sample(self, index: int) -> int:
        """Return the sample of one of them."""
        return int(self.ids[index])


class ImageDecoder:
    """A `Decoder` of encoded pictures, through a fused pipeline. Each thread has its own scratch buffers.

    labels: as `labels_of` returns them; where they have names, batches are dicts, and arrays where there are none.
    describe: names a sample, in errors; None for a copy in a worker process, whose parent does. memory: bounds what all
        threads take. masks: None where there are none.
    processes: that have a copy, and share the memory.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        labels: NDArray[Any] | dict[str, NDArray[Any]],
        describe: Callable[[int], str] | None,
        memory: DecodeMemory,
        masks: Masks | None = None,
        processes: int = 1,
    ) -> None:
        self._processes = processes
        self._given_labels = labels
        self.fields = image_fields(pipeline, labels, masks)
        self._masks = masks
        self._pipeline = pipeline
        self._is_named = len(self.fields) > 1 and isinstance(labels, dict)
        self._is_alone = len(self.fields) == 1
        #: As many as there are fields behind the images.
        self._labels = list(labels.values()) if isinstance(labels, dict) else [labels]
        self._describe = describe
        self._memory = memory
        self._threads = threading.local()
        #: Random draws of the batches that are being decoded; a draw is a function, so losing one costs only time.
        self._draws: dict[tuple[int, int], Draws] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of: a worker process has a copy, and its part of the memory."""
        memory = self._memory.part(self._processes)
        masks = None if self._masks is None else replace(self._masks, describe=_its_mask)
        return ImageDecoder, (self._pipeline, self._given_labels, None, memory, masks)

    @property
    def decoded_alone(self) -> int:
        """How many pictures were decoded one at a time so far: their headers do not say how large they are."""
        return self._memory.alone

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> NDArray[np.uint8] | None:
        """See `Decoder`."""
        return self._pipeline.place_of(rows, arrays[0])

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `Decoder`."""
        rows, ids, data, shared = brought
        images, *labels = arrays
        draws = self._draws_of(load, load.epoch)
        failed: list[tuple[int, Exception]] = []
        at(int(ids[0]))
        masks = self._masks
        files = list[NDArray[np.uint8]]()
        if masks is not None:
            ends = masks.front_bytes[ids].tolist()
            files = [each[end:] for each, end in zip(data, ends, strict=True)]
            data = [each[:end] for each, end in zip(data, ends, strict=True)]
        group = ImageGroup(load, rows, ids, data, images, draws, self._scratch(), shared)
        which: Sequence[int] = range(len(rows))
        if masks is not None:
            failed = self._write_masks(masks, group, files, labels.pop(0), at)
            wrong = {index for index, _ in failed}
            which = [] if masks.write.has_images else [index for index in which if index not in wrong]
        failed += self._write_images(group, which, at)
        where = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        for array, known in zip(labels, self._labels, strict=True):
            array[where] = known[ids]
        return failed

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Write the images of some of a group; return the failed ones, as `decode`. which: indices, ascending."""
        failed: list[tuple[int, Exception]] = []
        if not which:
            return failed
        _, rows, _, data, images, draws, scratch, _, beside = group
        some_data, some_rows = data, rows
        if len(which) < len(rows):
            some_data, some_rows = [data[index] for index in which], [rows[index] for index in which]
        left = [
            which[place] for place in self._pipeline.run_group(some_data, images, draws, some_rows, scratch)
        ]
        for some in (left[first : first + FRONTS] for first in range(0, len(left), FRONTS)):
            at(group.sample(some[0]))
            of_some = [data[index] for index in some]
            fronts = self._pipeline.run_front(of_some, draws, [rows[index] for index in some], scratch)
            for index, front in zip(some, fronts, strict=True):
                at(group.sample(index))
                row = rows[index]
                try:
                    self._pipeline.run(data[index].data, images[row], draws, row, scratch, front, beside)
                except Exception as error:
                    failed.append((index, self._located(error, group.sample(index))))
        return failed

    def _write_masks(
        self,
        masks: Masks,
        group: ImageGroup,
        files: Sequence[NDArray[np.uint8]],
        out: NDArray[Any],
        at: Callable[[int], None],
    ) -> list[tuple[int, Exception]]:
        """Write the masks of a group, and its images where a step is called with both; return the failed ones."""
        failed: list[tuple[int, Exception]] = []
        for index, file in enumerate(files):
            row, sample = group.rows[index], group.sample(index)
            try:
                mask = masks.write.begin(file, size_of(group.data[index]))
                wrong = list[tuple[int, Exception]]()
                if masks.write.has_images:
                    wrong = self._write_images(group._replace(beside=mask), [index], at)
                if not wrong:
                    masks.write.end(mask, out[row], group.draws, row)
                failed += wrong
            except Exception as error:
                failed.append((index, self._located(located(error, sample, masks.describe), sample)))
        return failed

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """See `Decoder`: images and labels, or a dict with these by name; the images alone where there are none."""
        if self._is_alone:
            return arrays[0]
        if not self._is_named:
            return arrays
        return {field.name: array for field, array in zip(self.fields, arrays, strict=True)}

    def apart(self) -> ImageDecoder:
        """See `MovableDecoder`: this one, as all that it writes is in the slot."""
        return self

    def take(self, slot: int, rows: Sequence[int]) -> None:
        """See `MovableDecoder`."""

    def put(self, slot: int, rows: Sequence[int], what: None) -> None:
        """See `MovableDecoder`."""

    def _located(self, error: Exception, sample: int) -> Exception:
        return error if self._describe is None else located(error, sample, self._describe)

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            scratch = self._threads.scratch = Scratch(memory=self._memory)
        return scratch

    def _draws_of(self, load: Load, epoch: int) -> Draws:
        """Return the draws of a batch's samples in an epoch, its own or a later one."""
        draws = self._draws.get((load.batch, epoch))
        if draws is None:
            draws = self._draws[load.batch, epoch] = self._pipeline.draw(epoch, load.samples)
            if len(self._draws) > _DRAWS_KEPT:
                self._draws.pop(min(self._draws), None)
        return draws


def _its_mask(sample: int) -> str:
    """Name a mask in a worker process, whose parent names the picture."""
    return "its mask"


def image_fields(
    pipeline: Pipeline, labels: NDArray[Any] | dict[str, NDArray[Any]], masks: Masks | None = None
) -> tuple[Field, ...]:
    """Return what `ImageDecoder` writes. The pipeline's shape is known.

    Raises: ConfigError if there are labels called images.
    """
    named = labels if isinstance(labels, dict) else {"labels": labels}
    if "images" in named:
        raise ConfigError(
            "labels['images'] of the source has the name of the images in a batch: call it otherwise"
        )
    return (
        Field("images", pipeline.output_shape, pipeline.storage_dtype),
        *(() if masks is None else [Field("masks", masks.write.shape, masks.write.dtype)]),
        *(Field(name, array.shape[1:], array.dtype) for name, array in named.items()),
    )


def size_of(data: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return the (height, width) that the header of a picture says; None where it says none, or is damaged."""
    try:
        if not is_jpeg(data.data):
            return read_size(data.data)
        header = read_header(data.data)
    except DataError:  # who decodes it says what is wrong
        return None
    return header.height, header.width


def picture_bytes(
    pipeline: Pipeline, sizes_bytes: NDArray[np.int64], sample: bytes | None
) -> tuple[int, int]:
    """Return what it takes to decode a sample, and about what one whose file is larger than 99 in a hundred.

    sizes_bytes: int64[samples], of the files. sample: tells how many pixels there are to a byte, and in which format; a
        photograph is assumed for None, and where it cannot be read.
    Returns: zeros where samples are no pictures to the pipeline.
    """
    if not pipeline.is_visual:
        return 0, 0
    like: JpegHeader | bytes = JpegHeader(1, 8, 3, 8, is_lossless=False, unit_columns=16, has_end=True)
    height, width, nbytes = 3, 4, 2
    try:
        if sample is not None:
            like = read_header(sample) if is_jpeg(sample) else sample[:4]
            size = read_size(sample) if isinstance(like, bytes) else (like.height, like.width)
            if size is not None:
                (height, width), nbytes = size, len(sample)
    except Exception:  # who reads it for a batch says what is wrong
        pass
    large = max(nbytes, float(np.percentile(sizes_bytes, 99)))
    # A blank picture has thousands of pixels to a byte, and the others are hardly all blank.
    most_pixels = max(height * width, min(height * width / nbytes, _MOST_PIXELS_A_BYTE) * large)
    scale = math.sqrt(most_pixels / (height * width))
    known = pipeline.decode_bytes(height, width, like)
    guessed = pipeline.decode_bytes(math.ceil(scale * height), math.ceil(scale * width), like)
    # Random crops are not all seen.
    return int(known + known // 8 + nbytes), int(guessed + guessed // 8 + large)
