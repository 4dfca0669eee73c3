"""Data sets that MosaicML's Streaming wrote (MDS shards), read at random where they lie.

A shard is a count (uint32), where each sample begins and the last one ends (uint32 each), a text that nobody needs, and
the samples. A sample is the size of each column that has no fixed one (uint32 each), then the
columns, in the order that index.json has them.
Source: mosaicml-streaming 0.13, `streaming/base/format/mds/writer.py`.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog
from penstock.store.columns import ColumnLabel
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
    read_json,
)
from penstock.units import parse_bytes

#: Encodings whose bytes are a picture, or whatever the user makes of them.
_OF_SAMPLES = ("jpeg", "png", "bytes")
#: Columns that are taken for the label, the first that there is.
_USUAL_LABELS = ("label", "class", "cls", "target")


class MosaicShards(CompressedShards):
    """The samples of a folder of MDS shards, as MosaicML's Streaming wrote it.

    Samples are numbered by shard, then as they lie in it. Nothing is copied or converted. A shard that is compressed
    (zstd, br, gz, bz2), and does not lie there unpacked as well, is unpacked once for the samples that are read
    together, and kept while memory allows; each is unpacked when the folder is opened for the first time, too. That
    takes pyarrow.

    folder: path or address of what has index.json and the shards next to it.
    sample: the column that is the sample: its bytes as stored. Unless given, the first whose encoding is jpeg, png or
        bytes.
    label: the column that is the label, of numbers, arrays of one shape, or text; "auto" is the first that there is of
        label, class, cls and target, or no label; None takes none; a list of columns gives several, by name. Names are
        numbered in sorted order.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    memory: for shards that are unpacked, not the loader's; those that are unpacked while the folder is listed, too.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError naming the folder or shard if one is missing, cut off, damaged, compressed otherwise, or of other
        columns than the first; ConfigError if there is no such column, or an unpacked shard is larger than memory.
    """

    @staticmethod
    def _list(
        place: str, sample: str | None, label: ColumnLabel, memory: str | int, asking: Asking
    ) -> Catalog:
        return list_mosaic(place, sample, label, asking, memory)

    @staticmethod
    def _kinds(place: str, objects: Objects | None) -> dict[str, str]:
        return _kinds_of(_read_index(place, objects)[0])


def is_mosaic(front: bytes) -> bool:
    """Return whether what `front_of_index` found is of MDS shards."""
    return b'"mds"' in front


def list_mosaic(
    place: str, sample: str | None, label: ColumnLabel, asking: Asking, memory: str | int = DECODED_MEMORY
) -> Catalog:
    """Index MDS shards; see `MosaicShards`. Of those that did not change, what an old catalog says is taken."""
    shards = asking.calls.one(place, partial(_read_index, place, asking.objects))
    columns = _columns(place, shards[0], sample, label, asking.calls)
    by_path = {joined(place, _file_of(shard)): shard for shard in shards}
    turns = Turns(parse_bytes(memory))

    def index(file: Opened) -> Indexed:
        shard = by_path[file.path]
        if _facts(shard) != _facts(shards[0]):
            raise DataError(f"{file.path} has other columns than the first shard: write the data set again")

        def rows(opened: Opened) -> Indexed:
            return index_rows(opened, shard["column_sizes"], columns, shard.get("samples"), "MDS shard")

        codec = "" if shard["zip_data"] is None else check_codec(file.path, shard["compression"])
        found = index_unpacked(file, codec, shard["raw_data"]["bytes"], turns, rows) if codec else rows(file)
        asking.progress.found.append(len(found.names))
        return found

    return index_files(asking, tuple(by_path), index, kind="MosaicShards", label=str(label))


def _facts(shard: dict[str, Any]) -> tuple[Any, ...]:
    return shard["column_names"], shard["column_encodings"], shard["column_sizes"]


def _kinds_of(shard: dict[str, Any]) -> dict[str, str]:
    names, encodings, _ = _facts(shard)
    return dict(zip(names, encodings, strict=True))


def _read_index(place: str, objects: Objects | None) -> list[dict[str, Any]]:
    """Return what index.json has of each shard. Raises: DataError."""
    path = joined(place, INDEX_NAME)
    index = read_json(path, "MDS shard", objects)
    try:
        shards = index["shards"]
        for shard in shards:
            names, encodings, sizes = _facts(shard)
            basename = (shard["raw_data"] or {"basename": ""})["basename"]
            if shard["format"] != "mds" or not len(names) == len(encodings) == len(sizes) > 0:
                raise ValueError(f"a shard of format {shard['format']!r}")
            if not all(isinstance(each, str) for each in (*names, *encodings)):
                raise ValueError(f"columns called {names} of {encodings}")
            for size in sizes:
                if size is not None:
                    check_size(size)
            check_beside(basename)
            if shard["zip_data"]:
                packed = shard["zip_data"]["basename"]
                check_beside(packed)
                if objects is None and os.path.exists(joined(place, basename)):
                    shard["zip_data"] = None  # it was unpacked
                elif check_codec(joined(place, packed), shard["compression"]) != codec_by_ending(packed):
                    raise ValueError(
                        f"{packed} as the name of a shard that is compressed by {shard['compression']}"
                    )
                check_size(shard["raw_data"]["bytes"])
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no index of MDS shards ({error!r:.200}): write it again") from error
    if not shards:
        raise DataError(f"{path} names no shard: write the data set again")
    return list(shards)


def _file_of(shard: dict[str, Any]) -> str:
    """Return the name of the file that is read, once `_read_index` has looked whether the shard was unpacked."""
    return str((shard["zip_data"] or shard["raw_data"])["basename"])


def _columns(
    place: str, shard: dict[str, Any], sample: str | None, label: ColumnLabel, calls: Calls
) -> RowColumns:
    kinds = _kinds_of(shard)
    has = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if sample is None:
        sample = next((name for name, kind in kinds.items() if kind in _OF_SAMPLES), None)
    if sample is None or sample not in kinds or kinds[sample] == "pkl":
        raise ConfigError(
            f"{place}: sample is {sample!r}; its columns are {has}: give one of bytes, and of no pickled objects"
        )
    return choose_columns(place, kinds, sample, label, _USUAL_LABELS, calls)
