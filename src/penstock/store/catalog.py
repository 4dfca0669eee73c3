"""The listing of a data set of plain files, as a value: names, sizes, labels, and what shows that a folder changed.

A catalog takes 16 bytes a sample besides the names, 24 where they share files. As bytes (`to_bytes`) it is a file, or a
message to another rank:

    magic, version, length of the header, length of what follows (24 bytes) | xxh3_64 of these
    xxh3_128 of what follows
    header (JSON, padded to 8 bytes) | sizes | labels | stamps | counts (int64 each) | names, each closed by a NUL

Version 2 is that of packed samples: offsets, file_bytes and file_times (int64 each) stand behind the counts. Version 3
is that of objects of a remote store, one for each sample: their stamps (int64 each) stand there. Version 4
is that of labels that are not one int64 for each sample: one array behind the other, padded to 8 bytes each. Its header
says of which type and shape they are.
Little-endian. The first 24 bytes are checked by themselves, so that a damaged version is no newer one.

Source: Dryden et al. 2021 (NoPFS): the options `checkpoint` and `checkpoint_path` of its library hdmlp keep what was
parsed of a data set for the next run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.store.labels import Labels

VERSION = 4
_MAGIC = b"PENSCAT\n"
_FRONT = struct.Struct("<8sIIQ")
DIGEST_BYTES = 16
_FRONT_BYTES = _FRONT.size + 8 + DIGEST_BYTES
_INTS = np.dtype("<i8")

Ints = NDArray[np.int64]


class NewerCatalog(FormatError):
    """A catalog was written by a later Penstock."""


class CatalogKey(NamedTuple):
    """What a catalog lists, and for whom.

    opener: name of the class or function that lists: of one folder each may see other samples.
    place: real path of the folder or list file. extensions: endings of samples, None for all files.
    """

    opener: str
    place: str
    extensions: tuple[str, ...] | None = None


class Packed(NamedTuple):
    """Where samples lie that share files, which are then the catalog's `folders`.

    offsets: int64[samples], where each begins in its file.
    file_bytes, file_times: int64[files], size of each file and the time of its last change, in ns since 1970; of an
        object of a remote store its stamp.
    """

    offsets: Ints
    file_bytes: Ints
    file_times: Ints


@dataclass(frozen=True, eq=False)
class Catalog:
    """A data set as it was listed. Arrays are read-only.

    kind: name of the class of the source. listed_seconds: when, since 1970.
    names: uint8[...], of the samples' files, in their order, each closed by a NUL; relative to the root, or absolute.
    sizes_bytes: int64[samples]. labels: as in `Source`. classes: names of the labels.
    folders: relative to the root, whose name is ""; those with samples in the samples' order. Of a list of files, the
        list, and the folders that its files are in.
    stamps: int64[folders], what changes with the content of each (`listing.stamp_of`).
    counts: int64[folders], how many samples each has directly in it; of a list zeros.
    packed: where samples lie that share files, as in shards: `folders` are these files, `names` those of their members.
    label_classes: where labels have names, by name what the numbers stand for.
    object_stamps: int64[samples], where each is an object of a remote store, what changes with it.
    """

    key: CatalogKey
    kind: str
    listed_seconds: float
    names: NDArray[np.uint8]
    sizes_bytes: Ints
    labels: Labels
    classes: tuple[str, ...]
    folders: tuple[str, ...]
    stamps: Ints
    counts: Ints
    packed: Packed | None = None
    label_classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    object_stamps: Ints | None = None

    def __post_init__(self) -> None:
        arrays: list[NDArray[Any]] = [self.names, self.sizes_bytes, *self._behind_labels()]
        for array in (*arrays, *_by_name(self.labels).values()):
            array.flags.writeable = False

    def __len__(self) -> int:
        return self.sizes_bytes.size

    def starts(self) -> Ints:
        """Return int64[samples + 1]: where each name begins, and the end of the last one."""
        return np.concatenate(([0], np.flatnonzero(self.names == 0) + 1))

    def digest(self) -> bytes:
        """Return 16 bytes that no other catalog has."""
        return _digest_of(self._parts())

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` takes."""
        header, *arrays = self._parts()
        front = _FRONT.pack(_MAGIC, self._version, len(header), len(header) + sum(map(len, arrays)))
        return b"".join([front, xxhash.xxh3_64_digest(front), _digest_of([header, *arrays]), header, *arrays])

    @property
    def _version(self) -> int:
        return 4 if _described(self.labels) else self._version_with_plain_labels

    @property
    def _version_with_plain_labels(self) -> int:
        if self.object_stamps is not None:
            return 3
        return 1 if self.packed is None else 2

    def _behind_labels(self) -> list[Ints]:
        of_objects = [] if self.object_stamps is None else [self.object_stamps]
        return [self.stamps, self.counts, *(self.packed or ()), *of_objects]

    def _parts(self) -> list[bytes]:
        """Return the header and the arrays as bytes."""
        facts: dict[str, Any] = {
            "key": self.key,
            "kind": self.kind,
            "listed_seconds": self.listed_seconds,
            "samples": len(self),
            "classes": self.classes,
            "folders": self.folders,
        }
        described = _described(self.labels)
        if described:
            facts |= {"version": self._version_with_plain_labels, "labels": described}
            facts |= {"label_classes": dict(self.label_classes)}
        header = json.dumps(facts).encode()
        header += b" " * (-len(header) % 8)
        labels = [_padded(array) for array in _by_name(self.labels).values()]
        return [
            header,
            self.sizes_bytes.astype(_INTS, copy=False).tobytes(),
            *labels,
            *(array.astype(_INTS, copy=False).tobytes() for array in self._behind_labels()),
            self.names.tobytes(),
        ]

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """Return the catalog that `to_bytes` wrote.

        Raises: FormatError if it is cut off, damaged or no catalog; NewerCatalog if a later Penstock wrote it.
        """
        header_bytes = check_front(data)
        content = memoryview(data)[_FRONT_BYTES:]
        _, version, _, length = _FRONT.unpack_from(data)
        if len(content) != length:
            raise FormatError(f"is cut off: {len(content):,} of {length:,} bytes are there")
        if xxhash.xxh3_128_digest(content) != data[_FRONT_BYTES - DIGEST_BYTES : _FRONT_BYTES]:
            raise FormatError("is damaged: its checksum is another")
        try:
            catalog = _unpacked(content, header_bytes, version)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"is damaged: {error!r:.200}") from error
        names = catalog.names
        if np.count_nonzero(names == 0) != len(catalog) or (names.size and names[-1]):
            raise FormatError("is damaged: it has more or fewer names than samples")
        return catalog


def _digest_of(parts: list[bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _by_name(labels: Labels) -> Mapping[str, NDArray[Any]]:
    return labels if isinstance(labels, Mapping) else {"": labels}


def _described(labels: Labels) -> list[tuple[str | None, str, tuple[int, ...]]]:
    """Return name, type and shape of each label; nothing for one int64 for each sample, which needs no words."""
    if not isinstance(labels, Mapping) and labels.dtype == np.int64 and labels.ndim == 1:
        return []
    has_names = isinstance(labels, Mapping)
    return [
        (name if has_names else None, array.dtype.newbyteorder("<").str, array.shape)
        for name, array in _by_name(labels).items()
    ]


def _padded(array: NDArray[Any]) -> bytes:
    content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return content + bytes(-len(content) % 8)


def _unpacked_labels(content: memoryview, described: list[Any]) -> tuple[Labels, int]:
    """Return labels as `_described` has them, and how many bytes they take. content: from where they begin."""
    labels: dict[str | None, NDArray[Any]] = {}
    at = 0
    for name, text, shape in described:
        dtype = np.dtype(text)
        nbytes = dtype.itemsize * math.prod(shape)
        if dtype.kind not in "biufc" or min(shape) < 0 or at + nbytes > len(content):
            raise ValueError(f"labels {name!r} of {text}{shape}")
        labels[name] = (
            np.frombuffer(content[at : at + nbytes], dtype).reshape(shape).astype(dtype.newbyteorder("="))
        )
        at += nbytes + -nbytes % 8
    if None in labels:
        return labels[None], at
    return {str(name): array for name, array in labels.items()}, at


def _unpacked(content: memoryview, header_bytes: int, version: int) -> Catalog:
    header = json.loads(bytes(content[:header_bytes]))
    labels: Labels | None = None
    begin = header_bytes
    if version == 4:
        version = header["version"]
        begin += 8 * header["samples"]
        labels, label_bytes = _unpacked_labels(content[begin:], header["labels"])
    samples, folders = header["samples"], tuple(header["folders"])
    label_words = samples if labels is None else label_bytes // 8
    lengths = [0, samples, label_words, len(folders), len(folders)]
    if version > 1:
        lengths += [samples] if version == 3 else [samples, len(folders), len(folders)]
    bounds = header_bytes + 8 * np.cumsum(lengths)
    sizes, plain, stamps, counts, *more = (
        np.frombuffer(content[begin:end], _INTS).astype(np.int64, copy=False)
        for begin, end in pairwise(bounds.tolist())
    )
    return Catalog(
        _key_of(header),
        header["kind"],
        header["listed_seconds"],
        np.frombuffer(content[bounds[-1] :], np.uint8),
        sizes,
        plain if labels is None else labels,
        tuple(header["classes"]),
        folders,
        stamps,
        counts,
        Packed(*more) if version == 2 else None,
        {name: tuple(classes) for name, classes in header.get("label_classes", {}).items()},
        more[0] if version == 3 else None,
    )


def _key_of(header: dict[str, Any]) -> CatalogKey:
    opener, place, extensions = header["key"]
    return CatalogKey(opener, place, None if extensions is None else tuple(extensions))


def read_key(file: BinaryIO) -> CatalogKey:
    """Return what a file says that it is a catalog of: of all that it has, the header alone is read.

    Raises: FormatError.
    """
    header = file.read(check_front(file.read(_FRONT_BYTES)))
    try:
        return _key_of(json.loads(header))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"is damaged: {error!r:.200}") from error


def check_front(data: bytes) -> int:
    """Return the length of the header. data: a catalog's first bytes at least. Raises: as `Catalog.from_bytes`."""
    there = f"is cut off: {len(data)} bytes are there, and its front alone has {_FRONT_BYTES}"
    if len(data) < _FRONT.size + 8:
        raise FormatError(there)
    magic, version, header_bytes, _ = _FRONT.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError("is no catalog")
    if xxhash.xxh3_64_digest(data[: _FRONT.size]) != data[_FRONT.size : _FRONT.size + 8]:
        raise FormatError("is damaged: the checksum of its front is another")
    if version > VERSION:
        raise NewerCatalog(f"was written by a later Penstock (version {version}; this one reads {VERSION})")
    if len(data) < _FRONT_BYTES:
        raise FormatError(there)
    return int(header_bytes)
