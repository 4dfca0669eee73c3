"""What samples look like in shards that are written: tar as WebDataset reads it, MDS, .npy.

A format says of which bytes a shard is, so that whoever writes it need know nothing of it:

    begin(ids) | sample(ids[0], data) | sample(ids[1], data) ... | end(bytes)

and which files are next to the shards. All of it follows from the source alone: the same source has the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.store.arrays import Arrays
from penstock.store.calls import Calls
from penstock.store.catalog import CatalogKey
from penstock.store.files import FileSource
from penstock.store.group import Bytes, Ids
from penstock.store.labels import Labels, labels_of
from penstock.store.listing import IMAGE_EXTENSIONS, MOST_CLASSES, NO_LABEL, Asking
from penstock.store.listing_progress import ListingProgress
from penstock.store.mosaic import list_mosaic
from penstock.store.patterns import place_of_paths
from penstock.store.selection import Selection, unselected
from penstock.store.shards import TarShards, list_shards
from penstock.store.source import Numeric, Source

_BLOCK = 512
#: A tar ends with two blocks of zeros, and is a multiple of that long, as GNU's are.
_TAR_RECORD = 10_240
#: Offsets in MDS shards have 32 bits.
_MOST_MDS_BYTES = 2**32 - 1
_MDS_NAMES, _MDS_ENCODINGS, _MDS_SIZES = ["image", "label", "name"], ["bytes", "int", "str"], [None, 8, None]
#: How the contents of files begin, and how their names end.
_SIGNS = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"P5", "pgm"),
    (b"P6", "ppm"),
)
_UNKNOWN, _OF_LABELS = "bin", ("cls", "json")

Part = bytes | Bytes


class ShardFormat(ABC):
    """How the samples of a source are written to shards.

    endings: of the members that were written so far, where a shard has members.
    """

    #: Of a shard by its number. most_bytes: of a shard.
    file_name: str
    most_bytes: int | None = None

    def __init__(self, source: Source) -> None:
        self.source = source
        self.labels = labels_of(source.labels, len(source))
        self.endings: set[str] = set()

    @abstractmethod
    def stored_bytes(self) -> Ids:
        """Return int64[samples], what each takes in a shard, at most."""

    @abstractmethod
    def begin(self, ids: Ids) -> bytes:
        """Return what a shard of these samples begins with."""

    @abstractmethod
    def sample(self, sample: int, data: Bytes) -> Sequence[Part]:
        """Return what stands for a sample."""

    def end(self, written_bytes: int) -> bytes:
        """Return what a shard ends with. written_bytes: before."""
        return b""

    def beside(
        self, names: Sequence[str], file_bytes: Sequence[int], order: Sequence[Ids]
    ) -> dict[str, bytes]:
        """Return the files next to the shards, by name. names, file_bytes, order: of each shard, its samples last."""
        return {}

    @abstractmethod
    def how_to_open(self, out: str) -> str:
        """Return the expression that opens what was written."""

    @abstractmethod
    def read_back(self, files: Sequence[str]) -> tuple[Ids, Labels | None]:
        """Return size and label of each sample as a reader of the files finds them; None where it takes no label."""

    @property
    def _has_one_integer(self) -> bool:
        """Whether there is one label, the number of a class."""
        labels = self.labels
        if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.ndim != 1:
            return False
        return bool(labels.min() >= NO_LABEL and labels.max() < MOST_CLASSES)

    @property
    def _has_labels(self) -> bool:
        """Whether a sample has another label than -1."""
        return bool(len(self.labels)) and not (self._has_one_integer and (np.asarray(self.labels) < 0).all())


class TarFormat(ShardFormat):
    """`key.ending` for each sample; its label as `key.cls` if that is one integer, else all of them as `key.json`."""

    file_name = "shard-{:06}.tar"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._names = _keys_of(source)

    def stored_bytes(self) -> Ids:
        members = 2 if self._has_labels else 1
        # A header, and what fills the last block; two blocks and the name again where it is long or not plain.
        heads = np.array([self._head_bytes(key) for key, _ in self._names], np.int64)
        found: Ids = self.source.sizes_bytes + members * (2 * _BLOCK + heads) + (members - 1) * _BLOCK
        return found

    @staticmethod
    def _head_bytes(key: str) -> int:
        return 0 if key.isascii() and len(key) < 90 else 3 * _BLOCK + 4 * len(key)

    def begin(self, ids: Ids) -> bytes:
        return b""

    def sample(self, sample: int, data: Bytes) -> Sequence[Part]:
        key, ending = self._names[sample]
        ending = ending or _ending_of(data)
        self.endings.add(ending.lower())
        parts: list[Part] = [_tar_header(f"{key}.{ending}", data.size), data, bytes(-data.size % _BLOCK)]
        if self._has_labels:
            kind, text = self._label(sample)
            parts += [_tar_header(f"{key}.{kind}", len(text)), text, bytes(-len(text) % _BLOCK)]
        return parts

    def end(self, written_bytes: int) -> bytes:
        return bytes(2 * _BLOCK + -(written_bytes + 2 * _BLOCK) % _TAR_RECORD)

    def how_to_open(self, out: str) -> str:
        arguments = [repr(out)]
        if not {f".{ending}" for ending in self.endings} <= {*IMAGE_EXTENSIONS}:
            arguments.append(f"member={';'.join(sorted(self.endings))!r}")
        if self._has_labels and not self._has_one_integer:
            arguments.append(f"label={self._fields!r}")
        return f"TarShards({', '.join(arguments)})" if len(arguments) > 1 else f"open_source({out!r})"

    @property
    def _fields(self) -> str | tuple[str, ...]:
        """What `TarShards` takes as label= where labels are in JSON."""
        return (
            tuple(f"json:{name}" for name in self.labels) if isinstance(self.labels, dict) else "json:label"
        )

    def read_back(self, files: Sequence[str]) -> tuple[Ids, Labels | None]:
        label = "cls" if self._has_one_integer else self._fields
        endings = tuple(f".{ending}" for ending in sorted(self.endings))
        place = place_of_paths(list(files))
        found = list_shards(place, endings, True, label if self._has_labels else None, _asking(place))
        return found.sizes_bytes, found.labels if self._has_labels else None

    def _label(self, sample: int) -> tuple[str, bytes]:
        if self._has_one_integer:
            return "cls", b"%d" % int(np.asarray(self.labels)[sample])
        labels = self.labels if isinstance(self.labels, dict) else {"label": self.labels}
        return "json", json.dumps({name: array[sample].tolist() for name, array in labels.items()}).encode()


class MosaicFormat(ShardFormat):
    """MDS shards of the columns image, label and name."""

    file_name = "shard.{:05}.mds"
    most_bytes = _MOST_MDS_BYTES

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        if self._has_labels and not self._has_one_integer:
            raise ConfigError(
                "the labels of the source are not one integer for each sample, which records have: --to tar keeps them"
            )
        self._names = [
            ".".join(filter(None, each)).encode("utf-8", "surrogateescape") for each in _keys_of(source)
        ]

    def stored_bytes(self) -> Ids:
        # Where it begins, the sizes of two columns, and the label.
        return self.source.sizes_bytes + np.array([4 + 8 + 8 + len(name) for name in self._names], np.int64)

    def begin(self, ids: Ids) -> bytes:
        facts = {"column_encodings": _MDS_ENCODINGS, "column_names": _MDS_NAMES, "column_sizes": _MDS_SIZES}
        text = json.dumps(facts, sort_keys=True).encode()
        sizes = self.stored_bytes()[ids] - 4
        begins = 4 * (ids.size + 2) + len(text) + np.concatenate(([0], np.cumsum(sizes)))
        return struct.pack("<I", ids.size) + begins.astype("<u4").tobytes() + text

    def sample(self, sample: int, data: Bytes) -> Sequence[Part]:
        name = self._names[sample]
        label = int(np.asarray(self.labels)[sample]) if len(self.labels) else -1
        return [struct.pack("<II", data.size, len(name)), data, struct.pack("<q", label), name]

    def beside(
        self, names: Sequence[str], file_bytes: Sequence[int], order: Sequence[Ids]
    ) -> dict[str, bytes]:
        shards = [
            {
                "column_encodings": _MDS_ENCODINGS,
                "column_names": _MDS_NAMES,
                "column_sizes": _MDS_SIZES,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": nbytes, "hashes": {}},
                "samples": ids.size,
                "size_limit": None,
                "version": 2,
                "zip_data": None,
            }
            for name, nbytes, ids in zip(names, file_bytes, order, strict=True)
        ]
        return {"index.json": json.dumps({"shards": shards, "version": 2}).encode()}

    def read_back(self, files: Sequence[str]) -> tuple[Ids, Labels | None]:
        place = os.path.dirname(files[0])
        found = list_mosaic(place, "image", "label", _asking(place))
        return found.sizes_bytes, found.labels if self._has_labels else None

    def how_to_open(self, out: str) -> str:
        return f"open_source({out!r})"


class ArrayFormat(ShardFormat):
    """Rows of numbers as .npy files, and their labels as others."""

    file_name = "part-{:05}.npy"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        assert isinstance(source, Numeric), "what is no row of numbers has another format"
        self._numbers = source.numbers

    def stored_bytes(self) -> Ids:
        return self.source.sizes_bytes

    def begin(self, ids: Ids) -> bytes:
        head = io.BytesIO()
        facts: dict[str, Any] = {
            "descr": self._numbers.dtype,
            "fortran_order": False,
            "shape": (ids.size, *self._numbers.shape),
        }
        np.lib.format.write_array_header_1_0(head, facts)
        return head.getvalue()

    def sample(self, sample: int, data: Bytes) -> Sequence[Part]:
        return [data]

    def beside(
        self, names: Sequence[str], file_bytes: Sequence[int], order: Sequence[Ids]
    ) -> dict[str, bytes]:
        ids = np.concatenate(order)
        return {name: _as_npy(labels[ids]) for name, labels in self._label_files().items()}

    def how_to_open(self, out: str) -> str:
        paths, files = repr(os.path.join(out, "part-*.npy")), list(self._label_files())
        if not files:
            return f"open_source({paths})"
        if isinstance(self.labels, dict):
            loaded = (
                f"{name!r}: np.load({os.path.join(out, file)!r})"
                for name, file in zip(self.labels, files, strict=True)
            )
            return f"Arrays({paths}, labels={{{', '.join(loaded)}}})"
        return f"Arrays({paths}, labels={os.path.join(out, files[0])!r})"

    def read_back(self, files: Sequence[str]) -> tuple[Ids, Labels | None]:
        return Arrays(list(files)).sizes_bytes, None

    def _label_files(self) -> dict[str, NDArray[Any]]:
        if isinstance(self.labels, dict):
            return {f"labels-{number}.npy": array for number, array in enumerate(self.labels.values())}
        return {"labels.npy": self.labels}


def format_for(to: str, source: Source) -> ShardFormat:
    """Return how a source is written: "tar", or "records", which are rows of numbers as .npy, and all else as MDS.

    Raises: ConfigError for another word, and for labels that records do not have.
    """
    if to == "tar":
        return TarFormat(source)
    if to == "records":
        return ArrayFormat(source) if isinstance(source, Numeric) else MosaicFormat(source)
    raise ConfigError(f'to is {to!r}; it is "tar" or "records"')


def _asking(place: str) -> Asking:
    calls = Calls()
    return Asking(CatalogKey("pack", place), None, calls, ListingProgress("what was written", calls.report))


def _as_npy(array: NDArray[Any]) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _tar_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _ending_of(data: Bytes) -> str:
    front = data[:16].tobytes()
    if front[:4] == b"RIFF" and front[8:12] == b"WEBP":
        return "webp"
    return next((ending for sign, ending in _SIGNS if front.startswith(sign)), _UNKNOWN)


def _keys_of(source: Source) -> list[tuple[str, str]]:
    """Return key and ending of each sample: of its name, or of its number; an empty ending follows from the content.

    A key has no dot in its last part, is below the folder, and occurs once. What a name may not have there is written
    as %2E, so that no two names become one; a name that is there twice gets a number.
    """
    keys, seen = [], dict[str, int]()
    for sample, name in _named(source):
        key, ending = f"{sample:09}", ""
        if name:
            stem, dot, ending = name.rpartition(".")
            if not dot or "/" in ending or not stem.rpartition("/")[2] or ending.lower() in _OF_LABELS:
                stem, ending = name, ""
            *folders, last = (part for part in stem.replace("%", "%25").split("/") if part)
            folders = [part.replace(".", "%2E") if part in (".", "..") else part for part in folders]
            key = "/".join([*folders, last.replace(".", "%2E")])
        seen[key] = times = seen.get(key, 0) + 1
        keys.append((key if times == 1 else f"{key}%x{times}", ending))
    return keys


def _named(source: Source) -> Iterator[tuple[int, str]]:
    """Yield number and name of each sample, as the source that a selection is of has them; "" where it has no names."""
    whole = unselected(source)
    ids = source.ids.tolist() if isinstance(source, Selection) else range(len(source))
    if not isinstance(whole, FileSource | TarShards):
        yield from ((sample, "") for sample in ids)
        return
    starts = np.append(np.flatnonzero(whole.names == 0) + 1, 0)  # of the next one; the first begins at 0
    for sample in ids:
        begin, end = int(starts[sample - 1]), int(starts[sample])
        yield sample, os.fsdecode(whole.names[begin : end - 1].tobytes())
