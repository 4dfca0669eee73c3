"""Data sets that LitData's `optimize` wrote, read at random where they lie.

A chunk is a shard of rows (`row_shards`) in which each column has its size before it; or, where samples are flat dicts
of plain values and a later LitData wrote them, a file of Arrow's behind an empty table, with its length and a mark
behind it.
Source: litdata 0.2.76, `streaming/writer.py` and `streaming/item_loader.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.store.arrow import index_arrow
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog
from penstock.store.columns import ColumnLabel, Columns
from penstock.store.compressed_shards import CompressedShards, check_codec, codec_by_ending, index_unpacked
from penstock.store.decoded import DECODED_MEMORY, Turns
from penstock.store.listing import Asking
from penstock.store.object_store import joined
from penstock.store.packed_listing import Indexed, Opened, index_files
from penstock.store.remote import Objects
from penstock.store.row_shards import (
    INDEX_NAME,
    RowColumns,
    check_beside,
    check_size,
    choose_columns,
    index_rows,
    read_at,
    read_json,
)
from penstock.units import parse_bytes

_KIND = "LitData chunk"
#: Encodings whose bytes are a picture, text, or whatever the user makes of them; those that are taken first.
_PICTURES = ("jpeg", "image", "bytes", "file")
_OF_SAMPLES = (*_PICTURES, "str", "text", "no_header_tensor", "no_header_numpy")
_USUAL_LABELS = ("label", "labels", "class", "cls", "target")
#: How a chunk ends that is an Arrow file: its length (uint32), and this.
_ARROW_MARK = b"LDARW01\0"
_ARROW_END_BYTES = 12


class LitDataChunks(CompressedShards):
    """The samples of a folder of chunks, as LitData's `optimize` wrote it.

    Samples are numbered by chunk, then as they lie in it. Nothing is copied or converted. A chunk that is compressed as
    a whole (.zstd.bin) is unpacked once for the samples that are read together, and kept while memory allows; each
    is unpacked when the folder is opened for the first time, too. That takes pyarrow.

    folder: path or address of what has index.json and the chunks next to it.
    sample: the column that is the sample, by its key, or by its number where samples are tuples ("0", "1" ...): its
        bytes as stored. Unless given, the first that is stored as jpeg, image, bytes or file.
    label: the column that is the label, of numbers, arrays of one shape, or text; "auto" is the first that there is of
        label, labels, class, cls and target, or no label; None takes none; a list of columns gives several, by name.
        Names are numbered in sorted order.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    memory: for chunks that are unpacked, not the loader's; those that are unpacked while the folder is listed, too.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError naming the folder or chunk if one is missing, cut off, damaged, compressed otherwise or encrypted;
        ConfigError if there is no such column, or an unpacked chunk is larger than memory.
    """

    @staticmethod
    def _list(
        place: str, sample: str | None, label: ColumnLabel, memory: str | int, asking: Asking
    ) -> Catalog:
        return list_litdata(place, sample, label, asking, memory)

    @staticmethod
    def _kinds(place: str, objects: Objects | None) -> dict[str, str]:
        return _read_index(place, objects).kinds


def is_litdata(front: bytes) -> bool:
    """Return whether what `front_of_index` found is of LitData's chunks."""
    return b'"chunks"' in front and b'"chunk_size"' in front


def list_litdata(
    place: str, sample: str | None, label: ColumnLabel, asking: Asking, memory: str | int = DECODED_MEMORY
) -> Catalog:
    """Index LitData's chunks; see `LitDataChunks`. Of those that did not change, what an old catalog says is taken."""
    found = asking.calls.one(place, partial(_read_index, place, asking.objects))
    columns = _columns(place, found.kinds, sample, label, asking.calls)
    by_path = {joined(place, name): chunk for name, chunk in found.chunks.items()}
    keys, turns = list(found.kinds), Turns(parse_bytes(memory))

    def rows(file: Opened) -> Indexed:
        begin, count = _begin_of_arrow(file), by_path[file.path].samples
        if begin is None:
            return index_rows(file, [None] * len(keys), columns, count, _KIND)
        one = [keys[label.column] for label in columns.labels if label.is_class]
        others = {keys[label.column]: label.name for label in columns.labels if not label.is_class}
        named = Columns(keys[columns.sample], one[0] if one else "", None, others)
        indexed = index_arrow(file, named, turns, (begin, file.nbytes - _ARROW_END_BYTES))
        if (found := len(indexed.names)) != count:
            raise DataError(
                f"{file.path} has {found:,} samples, and {INDEX_NAME} says {count}: write it again"
            )
        return indexed

    def index(file: Opened) -> Indexed:
        chunk = by_path[file.path]
        indexed = index_unpacked(file, chunk.codec, chunk.nbytes, turns, rows)
        asking.progress.found.append(len(indexed.names))
        return indexed

    return index_files(asking, tuple(by_path), index, kind="LitDataChunks", label=str(label))


class _Chunk(NamedTuple):
    """What index.json says of a chunk. codec: how it is compressed, "" if it is not. nbytes: of it unpacked."""

    samples: Any
    codec: str
    nbytes: int


class _Index(NamedTuple):
    """What index.json has. chunks: by name. kinds: by key how a column is stored."""

    chunks: dict[str, _Chunk]
    kinds: dict[str, str]


def _read_index(place: str, objects: Objects | None) -> _Index:
    """Raises: DataError."""
    path = joined(place, INDEX_NAME)
    found = read_json(path, _KIND, objects)
    try:
        config = found["config"]
        within = config.get("compression_level") not in (None, "chunk")
        if how := config.get("ipc_compression") or (config["compression"] if within else None):
            raise DataError(
                f"{place} is compressed within its chunks ({how}): write it with optimize(..., compression=None), or "
                'compression_level="chunk"; pictures are compressed themselves'
            )
        if config["encryption"]:
            raise DataError(f"{place} is encrypted: write it with optimize(..., encryption=None)")
        if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
            raise DataError(
                f"{place} was written for {loader}, which keeps other things than samples of columns: write its "
                "content as a .npy file, which Arrays and Tokens read"
            )
        kinds = dict(zip(_keys_of(config["data_spec"]), config["data_format"], strict=True))
        chunks = {}
        for each in found["chunks"]:
            name, is_packed = each["filename"], config["compression"] is not None
            check_beside(name)
            codec = check_codec(joined(place, name), config["compression"]) if is_packed else ""
            if codec != codec_by_ending(name):
                raise ValueError(
                    f"{name} as the name of a chunk, and {config['compression']} as its compression"
                )
            nbytes = each["chunk_bytes"] if is_packed else 0
            check_size(nbytes)
            chunks[name] = _Chunk(each["chunk_size"], codec, nbytes)
        if wrong := [kind for kind in kinds.values() if not isinstance(kind, str)]:
            raise ValueError(f"a column stored as {wrong[0]!r}")
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no index of {_KIND}s ({error!r:.200}): write it again") from error
    if not chunks:
        raise DataError(f"{path} names no chunk: write the data set again")
    return _Index(chunks, kinds)


def _keys_of(spec: Any) -> list[str]:
    """Return what the leaves of a sample are called, by the description of a tree that torch writes."""

    def walk(node: Any, at: str) -> Iterator[str]:
        if node["type"] is None:
            yield at
            return
        children = node["children_spec"]
        names = json.loads(node["context"]) if node["context"] else None
        if not isinstance(names, list) or len(names) != len(children):
            names = range(len(children))
        for name, child in zip(names, children, strict=True):
            yield from walk(child, f"{at}.{name}" if at else str(name))

    _, tree = json.loads(spec)
    return list(walk(tree, ""))


def _columns(
    place: str, kinds: dict[str, str], sample: str | None, label: ColumnLabel, calls: Calls
) -> RowColumns:
    has = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
    if sample is None:
        sample = next((name for name, kind in kinds.items() if kind.partition(":")[0] in _PICTURES), None)
    if sample not in kinds or kinds[sample].partition(":")[0] not in _OF_SAMPLES:
        raise ConfigError(
            f"{place}: sample is {sample!r}; its columns are {has}: give sample= to penstock.store.LitDataChunks, one "
            f"stored as {', '.join(_OF_SAMPLES)}"
        )
    return choose_columns(place, kinds, sample, label, _USUAL_LABELS, calls)


def _begin_of_arrow(file: Opened) -> int | None:
    """Return where the Arrow file in a chunk begins; None where there is none."""
    if file.nbytes < _ARROW_END_BYTES:
        return None
    end = read_at(file, _KIND, file.nbytes - _ARROW_END_BYTES, _ARROW_END_BYTES)
    if not end.endswith(_ARROW_MARK):
        return None
    begin = file.nbytes - _ARROW_END_BYTES - int.from_bytes(end[:4], "little")
    if begin < 0:
        raise DataError(
            f"{file.path} is cut off or damaged: its Arrow file is longer than it; copy or write it again"
        )
    return begin
