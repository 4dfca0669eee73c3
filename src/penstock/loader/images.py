"""The threads' work on stored samples: read bytes, keep them in a tier, decode them into the slot."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError, WaitTimeout, printable
from penstock.flow.engine import LoadResult
from penstock.flow.recorder import Ring
from penstock.flow.staging import Field, StagingBuffer
from penstock.loader.probing import from_first
from penstock.loader.transforms import Draws, Pipeline, Scratch
from penstock.loader.transforms.jpeg import JpegHeader, is_jpeg, read_header
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.sizes import read_size
from penstock.policy import Load, Read
from penstock.policy.scheduler import Item
from penstock.store import MemoryTier, Source
from penstock.store.calls import Calls
from penstock.trace.schema import SOURCE, STAGING, Kind

_DRAWS_KEPT = 16
# Of a picture that is only guessed at: photographs have 2 to 8.
_MOST_PIXELS_A_BYTE = 8
#: From here on a file's bytes get a mapping of their own. The C library would keep the memory of larger ones for each
#: thread after they are freed: twice the largest file, times 32 readers.
_MAPPED_BYTES = 128 << 10


class ImageWork:
    """Bytes of a source to rows of a batch slot, through a fused pipeline.

    Threads share it; each has its own scratch buffers. Tiers are written by whoever reads a sample that they keep.
    """

    def __init__(self, source: Source, pipeline: Pipeline, tiers: dict[int, MemoryTier]) -> None:
        self._source = source
        self._pipeline = pipeline
        self._tiers = tiers
        self._labels = source.labels
        self._threads = threading.local()
        #: Random draws of the batches that are being decoded; a draw is a function, so losing one costs only time.
        self._draws: dict[int, Draws] = {}
        self._staging: StagingBuffer | None = None
        self._memory: DecodeMemory | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        return (
            Field("images", self._pipeline.output_shape, self._pipeline.storage_dtype),
            Field("labels", (), np.dtype(np.int64)),
        )

    def learn_shape(self, samples: Iterable[int], on_error_raise: bool, calls: Calls) -> None:
        """Find the shape of a sample where the transforms do not fix it, from the first of these that can be had."""
        if not self._pipeline.needs_probe:
            return
        from_first(samples, partial(self._probe, calls), on_error_raise=on_error_raise)

    def picture_bytes(self, sizes_bytes: NDArray[np.int64], sample: int, calls: Calls) -> tuple[int, int]:
        """Return what it takes to decode a sample, and about what one whose file is larger than 99 in a hundred.

        sizes_bytes: int64[samples], of the files. sample: tells how many pixels there are to a byte, and in which
            format; a photograph is assumed where it cannot be read.
        """
        like: JpegHeader | bytes = JpegHeader(1, 8, 3, 8, is_lossless=False, unit_columns=16, has_end=True)
        height, width, nbytes = 3, 4, 2
        try:
            data = calls.one(self.describe(sample), lambda: self._source.read(sample))
            like = read_header(data) if is_jpeg(data) else bytes(data[:4])
            size = read_size(data) if isinstance(like, bytes) else (like.height, like.width)
            if size is not None:
                (height, width), nbytes = size, len(data)
        except WaitTimeout:
            raise
        except Exception:  # who reads it for a batch says what is wrong
            pass
        large = max(nbytes, float(np.percentile(sizes_bytes, 99)))
        # A blank picture has thousands of pixels to a byte, and the others are hardly all blank.
        most_pixels = max(height * width, min(height * width / nbytes, _MOST_PIXELS_A_BYTE) * large)
        scale = math.sqrt(most_pixels / (height * width))
        known = self._pipeline.decode_bytes(height, width, like)
        guessed = self._pipeline.decode_bytes(math.ceil(scale * height), math.ceil(scale * width), like)
        # Random crops are not all seen.
        return int(known + known // 8 + nbytes), int(guessed + guessed // 8 + large)

    def limit_decoding(self, limit_bytes: int) -> None:
        """Say how much memory all threads may take to decode, before the first Load."""
        self._memory = DecodeMemory(limit_bytes)

    @property
    def decoded_alone(self) -> int:
        """How many pictures were decoded one at a time so far: their headers do not say how large they are."""
        return self._memory.alone if self._memory is not None else 0

    def attach(self, staging: StagingBuffer) -> None:
        """Say where decoded samples go, before the first Load."""
        self._staging = staging

    @property
    def classes(self) -> tuple[str, ...]:
        return self._source.classes

    @property
    def name(self) -> str:
        """The source in a word, for lines about an epoch."""
        return os.path.basename(self._path) if self._path else type(self._source).__name__

    @property
    def _path(self) -> str | None:
        return getattr(self._source, "list_file", None) or getattr(self._source, "root", None)

    @property
    def dtype(self) -> str:
        """Name of the images' number format."""
        return self._pipeline.dtype

    @property
    def has_byte_values(self) -> bool:
        """Whether images are numbers from 0 to 255 in a type that is not made for them."""
        return self._pipeline.has_byte_values

    @property
    def seed_of_draws(self) -> int | None:
        """Seed of the random transforms; None where there are none."""
        return self._pipeline.seed if self._pipeline.is_random else None

    @property
    def calls_python(self) -> bool:
        """Whether a user's own code runs for each sample."""
        return self._pipeline.calls_python

    @property
    def place_of_data(self) -> str:
        """The source's kind and where its data are."""
        return type(self._source).__name__ + (f" {self._path!r}" if self._path else "")

    @property
    def read_from(self) -> str:
        """What reads that take long are blamed on."""
        return "storage"

    @property
    def place(self) -> str:
        return repr(self._source)

    def describe(self, sample: int) -> str:
        return self._source.describe(sample)

    def read(self, read: Read) -> Any:
        data = self._bytes_from_source(read)
        if read.tier == STAGING:
            return data
        tier = self._tiers[read.tier]
        if not tier.put(read.sample, data):
            raise DataError(
                f"{self.describe(read.sample)}: has {len(data):,} bytes where the source's sizes_bytes says "
                f"{read.nbytes:,}, so that the memory planned for the samples is full: correct the source"
            )
        return tier.view(read.sample)

    def load(self, load: Load, ring: Ring, at: Callable[[int], None]) -> LoadResult:
        assert self._staging is not None, "attach comes before the first Load"
        images, labels = self._staging.arrays(load.slot)
        draws = self._draws_of(load)
        scratch = self._scratch()
        failed: list[tuple[Item, Exception]] = []
        read_seconds: list[float] = []
        clock = time.perf_counter
        for item in load.items:
            at(item.sample)
            try:
                begin = clock()
                data = self._bytes_of(item)
                fetched = clock()
                self._pipeline.run(data, images[item.index], draws, item.index, scratch)
            except Exception as error:
                failed.append((item, self._explained(error, item.sample)))
                continue
            end = clock()
            labels[item.index] = self._labels[item.sample]
            if item.read is not None and item.origin == SOURCE:
                read_seconds.append(fetched - begin)
                ring.record(
                    Kind.READ, begin, fetched, item.sample, item.read.nbytes, load.epoch, load.step, SOURCE
                )
            elif item.origin != STAGING:
                ring.record(
                    Kind.HIT, begin, begin, item.sample, len(data), load.epoch, load.step, item.origin
                )
            ring.record(Kind.DECODE, fetched, end, item.sample, epoch=load.epoch, step=load.step)
        return LoadResult(failed, read_seconds)

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], kept: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold the `kept` places of the slot."""
        return arrays

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _bytes_of(self, item: Item) -> Any:
        """Return an item's bytes, reading them where no reader thread did; valid until this thread's next item."""
        if item.origin == STAGING:
            assert item.read is not None, "an item in staging carries its read"
            return item.read.payload
        if item.origin != SOURCE:
            return self._tiers[item.origin].view(item.sample)
        assert item.read is not None, "an item from the source carries its read"
        if item.read.tier != STAGING:
            return self.read(item.read)
        if item.read.nbytes >= _MAPPED_BYTES:
            return self._bytes_from_source(item.read)
        buffer = self._buffer(item.read.nbytes)
        return buffer[: self._source.read_into(item.sample, buffer)]

    def _bytes_from_source(self, read: Read) -> Any:
        if read.nbytes < _MAPPED_BYTES:
            return self._source.read(read.sample)
        buffer = memoryview(mmap.mmap(-1, read.nbytes))
        return buffer[: self._source.read_into(read.sample, buffer)]

    def _buffer(self, nbytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._threads, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._threads.buffer = memoryview(bytearray(2 * nbytes))
        return buffer

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            scratch = self._threads.scratch = Scratch(memory=self._memory)
        return scratch

    def _draws_of(self, load: Load) -> Draws:
        draws = self._draws.get(load.batch)
        if draws is None:
            draws = self._draws[load.batch] = self._pipeline.draw(load.epoch, load.samples)
            if len(self._draws) > _DRAWS_KEPT:
                self._draws.pop(min(self._draws), None)
        return draws

    def _probe(self, calls: Calls, sample: int) -> None:
        try:
            self._pipeline.probe(calls.one(self.describe(sample), lambda: self._source.read(sample)))
        except Exception as error:
            explained = self._explained(error, sample)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: Exception, sample: int) -> Exception:
        """Give an error its place. What the source raised names the file already."""
        path = printable(self.describe(sample))
        if isinstance(error, DataError) and path not in str(error):
            located = DataError(f"{path}: {error}")
            located.__cause__ = error
            return located
        error.add_note(f"while loading sample {sample} ({path})")
        return error
