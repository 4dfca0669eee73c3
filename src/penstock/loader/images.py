"""The threads' work on stored samples: read bytes, keep them in a tier, decode them into the slot."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError, WaitTimeout, printable
from penstock.flow.engine import Failed
from penstock.flow.staging import Field
from penstock.loader.probing import from_first, raise_interrupt
from penstock.loader.transforms import Draws, Pipeline, Scratch
from penstock.loader.transforms.jpeg import JpegHeader, is_jpeg, read_header
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.sizes import read_size
from penstock.policy import Extents, Load, merge_reads
from penstock.policy.merge import Price
from penstock.store import MemoryTier, Source, prepare_group, read_all_merged, read_group
from penstock.store.calls import Calls
from penstock.trace.schema import SOURCE, STAGING

_DRAWS_KEPT = 16
# Of a picture that is only guessed at: photographs have 2 to 8.
_MOST_PIXELS_A_BYTE = 8
#: From here on a file's bytes get a mapping of their own. The C library would keep the memory of larger ones for each
#: thread after they are freed: twice the largest file, times 32 readers.
_MAPPED_BYTES = 128 << 10


class Near(NamedTuple):
    """What tells which samples are read together: where all of them lie, and what reads cost."""

    extents: Extents
    price: Price


class ImageWork:
    """Bytes of a source to rows of a batch slot, through a fused pipeline.

    Threads share it; each has its own scratch buffers. Tiers are written by whoever reads a sample that they keep.
    """

    def __init__(self, source: Source, pipeline: Pipeline, tiers: dict[int, MemoryTier]) -> None:
        self._source = source
        self._pipeline = pipeline
        self._tiers = tiers
        self._labels = source.labels
        self._sizes_bytes = source.sizes_bytes
        self._threads = threading.local()
        #: Random draws of the batches that are being decoded; a draw is a function, so losing one costs only time.
        self._draws: dict[int, Draws] = {}
        self._memory: DecodeMemory | None = None
        self._near: Near | None = None

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
        except Exception as error:  # who reads it for a batch says what is wrong
            raise_interrupt(error)
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

    def merge(self, near: Near) -> None:
        """Read samples together that lie near each other, from here on."""
        self._near = near

    def prepare(self) -> None:
        """Load the code that reads, in a thread that is going to."""
        prepare_group(self._source)

    def fetch(
        self, samples: list[int], origin: int, rests: list[int], at: Callable[[int], None], *, lasting: bool
    ) -> list[Any]:
        """See `Fetcher`."""
        at(samples[0])
        if origin != SOURCE:
            return self._from_tier(samples, self._tiers[origin])
        kinds = set(rests)
        if len(kinds) == 1:
            return self._group(samples, rests[0], lasting, at)
        # One read may bring samples for a tier and others: then they are brought together first.
        data: list[Any] = (
            [None] * len(samples) if self._near is None else self._group(samples, STAGING, lasting, at)
        )
        for rest in kinds if self._near is None else kinds - {STAGING}:
            which = [
                index
                for index, each in enumerate(rests)
                if each == rest and not isinstance(data[index], Failed)
            ]
            wanted = [samples[index] for index in which]
            found = (
                self._group(wanted, rest, lasting, at)
                if self._near is None
                else self._copied(wanted, [data[index] for index in which], rest)
            )
            for index, each in zip(which, found, strict=True):
                data[index] = each
        return data

    def _from_tier(self, samples: list[int], tier: MemoryTier) -> list[Any]:
        content = tier.array.data.toreadonly()
        return [
            content[begin:end]
            if begin >= 0
            else Failed(DataError(f"{self.describe(sample)} is not in memory"))
            for sample, (begin, end) in zip(samples, tier.places_of(np.array(samples)).tolist(), strict=True)
        ]

    def _group(self, samples: list[int], rest: int, lasting: bool, at: Callable[[int], None]) -> list[Any]:
        """Read a group from the source, into one piece of memory: a tier's, or one that passes."""
        ids = np.array(samples)
        reads = order = None
        if self._near is not None:
            extents = self._near.extents.of(ids)
            reads = merge_reads(extents, self._near.price)
            # In memory samples follow each other as in the source, so that a read needs no other.
            order = np.concatenate((reads.which, np.flatnonzero(extents.units < 0)))
            ids = ids[order]
        sizes = self._sizes_bytes[ids]
        begins = np.zeros(ids.size + 1, np.int64)
        if rest == STAGING:
            np.cumsum(sizes, out=begins[1:])
            into = self._memory_for(int(begins[-1]), lasting, is_alone=ids.size == 1)
        elif (room := self._tiers[rest].take_room(ids, sizes)) is not None:
            begins, into = room, self._tiers[rest].array.data
        else:
            return self._copied(samples, self._group(samples, STAGING, lasting, at), rest)
        if reads is None:
            failed = read_group(self._source, ids, into, begins, at)
        else:
            failed = read_all_merged(self._source, reads, ids, into, begins)
        marks: list[int] = begins.tolist()
        data: list[Any] = [into[begin:end] for begin, end in pairwise(marks)]
        for index, error in failed:
            data[index] = Failed(self._explained(error, int(ids[index])))
        if rest != STAGING:
            wrong = np.array([index for index, _ in failed], np.int64)
            self._tiers[rest].drop(ids[wrong])
            self._tiers[rest].keep(np.delete(ids, wrong))
        if order is None:
            return data
        in_turn: list[Any] = [None] * len(data)
        for index, each in zip(order.tolist(), data, strict=True):
            in_turn[index] = each
        return in_turn

    def _copied(self, samples: list[int], data: list[Any], rest: int) -> list[Any]:
        """Have a tier keep samples, one by one; return the bytes there."""
        tier = self._tiers[rest]
        kept: list[Any] = []
        for sample, each in zip(samples, data, strict=True):
            if isinstance(each, Failed):
                kept.append(each)
            elif tier.put(sample, each):
                kept.append(tier.view(sample))
            else:
                error = DataError(
                    "the memory that was planned for the samples is full: correct the source's sizes"
                )
                kept.append(Failed(self._explained(error, sample)))
        return kept

    def _memory_for(self, nbytes: int, lasting: bool, *, is_alone: bool) -> memoryview:
        if nbytes >= _MAPPED_BYTES and (lasting or is_alone):
            return memoryview(mmap.mmap(-1, nbytes))
        return memoryview(bytearray(nbytes)) if lasting else self._buffer(nbytes)

    def decode(
        self,
        load: Load,
        rows: list[int],
        samples: list[int],
        data: list[Any],
        arrays: tuple[NDArray[Any], ...],
        at: Callable[[int], None],
    ) -> list[tuple[int, Exception]]:
        """See `Decoder`."""
        images, labels = arrays
        draws = self._draws_of(load)
        scratch = self._scratch()
        failed: list[tuple[int, Exception]] = []
        at(samples[0])
        for index in self._pipeline.run_group(data, images, draws, rows, scratch):
            at(samples[index])
            row = rows[index]
            try:
                self._pipeline.run(data[index], images[row], draws, row, scratch)
            except Exception as error:
                failed.append((index, self._explained(error, samples[index])))
        labels[rows] = self._labels[samples]
        return failed

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], kept: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold the `kept` places of the slot."""
        return arrays

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()

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
