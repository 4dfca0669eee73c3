"""Shards of rows whose files are compressed as a whole: each is unpacked once for the samples that are wanted of it.

Where no file is compressed, samples lie in files as they are and are read so.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Unpack

import numpy as np

from penstock.errors import DataError
from penstock.store.catalog import Catalog
from penstock.store.columns import AUTO_LABEL, ColumnLabel, check_label, import_pyarrow
from penstock.store.decoded import DECODED_MEMORY, DecodedFiles, Turns
from penstock.store.group import Bytes
from penstock.store.labels import check_names
from penstock.store.listing import Asking, ListingArguments
from penstock.store.packed_listing import CataloguedFiles, Indexed, Opened, opened_object
from penstock.store.patterns import place_of_paths
from penstock.store.remote import Objects

#: How shards are compressed, as their indexes and the ends of their names have it; and what pyarrow calls it.
_CODECS = {"zstd": "zstd", "br": "brotli", "gz": "gzip", "bz2": "bz2"}
#: How MDS and LitData say that a column is text.
_TEXTS = ("str", "text")


class CompressedShards(DecodedFiles, CataloguedFiles):
    """Samples of shards of rows, compressed or not; made to be used by what indexes a format.

    folder: path or address of what has an index and the shards next to it. The rest is as of the formats.
    """

    units_are = "shards"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sample: str | None = None,
        label: ColumnLabel = AUTO_LABEL,
        classes: Sequence[str] | None = None,
        memory: str | int = DECODED_MEMORY,
        **listing: Unpack[ListingArguments],
    ) -> None:
        check_names(sample=sample)
        check_label(label)
        place = place_of_paths(folder)
        list_anew = partial(self._list, place, sample, label, memory)
        super().__init__(place, list_anew, listing, sample=sample, label=label, classes=classes)
        self._folder, self._sample = place, sample
        self._codecs = [codec_by_ending(path) for path in self.files]
        if any(self._codecs):
            # What lies behind the last sample of a shard is nobody's.
            firsts = np.concatenate(([0], self._ends[:-1]))
            nbytes = np.maximum.reduceat(self._offsets + self.sizes_bytes, firsts)
            self._decode_in(memory, nbytes, np.arange(len(self.files)))

    @staticmethod
    @abstractmethod
    def _list(
        place: str, sample: str | None, label: ColumnLabel, memory: str | int, asking: Asking
    ) -> Catalog:
        """Index the shards."""

    @staticmethod
    @abstractmethod
    def _kinds(place: str, objects: Objects | None) -> dict[str, str]:
        """Return how each column is stored, by name."""

    @cached_property
    def is_text(self) -> bool:
        """Whether the samples are text, which has to be asked for. The index is read when it is wanted first."""
        return self._sample is not None and self._kinds(self._folder, self.objects)[self._sample] in _TEXTS

    def _unit_named(self, unit: int) -> str:
        return "all samples"

    def _decode(self, unit: int, descriptor: int) -> Bytes:
        path, size = self.files[unit], int(self._decoded.sizes_bytes[unit])
        if self.objects is not None:
            file = opened_object(self.objects, self.facts_of(unit))
        else:
            file = Opened(path, descriptor, os.fstat(descriptor).st_size, 0, 0)
        packed = file.whole()
        content = unpacked(path, packed, self._codecs[unit], size) if self._codecs[unit] else packed
        return np.frombuffer(content, np.uint8)[:size]


def codec_by_ending(path: str) -> str:
    """Return how a file is compressed, by its name; "" where it is not.

    >>> codec_by_ending("a.mds.gz"), codec_by_ending("chunk-0-1.zstd:4.bin"), codec_by_ending("a.mds")
    ('gz', 'zstd', '')
    """
    ending = path.removesuffix(".bin").rpartition(".")[2].partition(":")[0]
    return ending if ending in _CODECS else ""


def check_codec(path: str, name: object) -> str:
    """Return how a file is compressed. name: as an index has it, with a level or without: "zstd:7".

    Raises: DataError if it is none that is known.
    """
    codec = str(name).partition(":")[0]
    if codec not in _CODECS:
        known = ", ".join(_CODECS)
        raise DataError(f"{path} is compressed ({name}): of compressed shards, those by {known} are read")
    return codec


def index_unpacked(
    file: Opened, codec: str, nbytes: int, turns: Turns, index: Callable[[Opened], Indexed]
) -> Indexed:
    """Index a file by what it is unpacked.

    codec: as `check_codec` returns it, "" where the file is not compressed. nbytes: of it unpacked, as the index says.
    turns: of what is unpacked at the same time. Raises: DataError if it is damaged, or has another size.
    """
    if not codec:
        return index(file)
    with turns.of(file.file_bytes + nbytes):
        content = unpacked(file.path, file.whole(), codec, nbytes + 1)
        if len(content) != nbytes:
            raise DataError(
                f"{file.path} is damaged: unpacked it has {'more than ' * (len(content) > nbytes)}"
                f"{min(len(content), nbytes):,} bytes, and its index says {nbytes:,}; copy or write it again"
            )
        found = index(file._replace(content=content))
    return found._replace(file=file)


def unpacked(path: str, packed: bytes, codec: str, most_bytes: int) -> bytes:
    """Return how a file begins once it is unpacked: so many bytes, or all where it has fewer.

    Raises: DataError if it is damaged or cut off before.
    """
    pa = import_pyarrow(path, f"a shard compressed by {codec}")
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), _CODECS[codec]) as stream:
            parts, left = list[bytes](), most_bytes
            while left and (part := stream.read(left)):
                parts.append(part)
                left -= len(part)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is cut off, damaged or not compressed by {codec} ({error}); copy or write it again"
        ) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)
