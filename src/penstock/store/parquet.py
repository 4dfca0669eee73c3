"""Data sets in Parquet files, such as those on Hugging Face's hub: rows, one of whose columns has the samples as bytes.

A value of Parquet has no place of its own in the file: the column of a row group is decoded as a whole, and kept while
memory allows. How large the values are is found out once, by reading the column, and kept in the catalog.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog, Ints
from penstock.store.columns import (
    AUTO_LABEL,
    ColumnLabel,
    Columns,
    choose_columns,
    column_of,
    import_pyarrow,
    places_of,
)
from penstock.store.decoded import DECODED_MEMORY, DecodedFiles, Turns
from penstock.store.files import named_as
from penstock.store.group import Bytes, Ids
from penstock.store.listing import Asking, ListingArguments
from penstock.store.packed_listing import CataloguedFiles, Indexed, Opened, files_below, index_files, opened
from penstock.store.patterns import Paths, files_of, place_of_paths
from penstock.store.remote import Objects, RemoteFile
from penstock.units import parse_bytes

#: How the names of Parquet files usually end.
PARQUET_ENDINGS = (".parquet", ".pq", ".parq")

#: In a catalog, a sample's offset has the row group that it is in above these bits, and its place in that below them.
_PLACE_BITS = 40
_PLACE_MASK = (1 << _PLACE_BITS) - 1
#: Files whose ends are remembered.
_MOST_METADATA = 64
#: Rows that are decoded at a time to see how large their values are.
_ROWS_AT_ONCE = 256
_READ_AT_ONCE_BYTES = 1 << 20


class ParquetFiles(DecodedFiles, CataloguedFiles):
    """The rows of Parquet files, of which one column has the samples as bytes. It takes pyarrow to read them.

    Samples are numbered as their rows are, file by file. When it is opened for the first time, the columns are read
    once for the sizes of the samples, which are kept as a catalog.

    paths: a path, a pattern such as "train-*.parquet", a folder of Parquet files, or a list of these.
    sample, label, classes: as in `ArrowFiles`.
    memory: for row groups that are decoded, not the loader's; of one, the column of the samples alone. Those that
        are being decoded, as many as there are cores, take up to four times their size meanwhile; while files are
        indexed, as many as memory holds.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError naming the file if it is missing, no Parquet file, cut off, damaged, encrypted, of other columns
        than the first, or has a row without a sample or label; ConfigError if the columns do not tell which is the
        sample, or a row group is larger than memory.
    """

    #: Whether the samples are text.
    is_text = False

    def __init__(
        self,
        paths: Paths,
        *,
        sample: str | None = None,
        label: ColumnLabel = AUTO_LABEL,
        classes: Sequence[str] | None = None,
        memory: str | int = DECODED_MEMORY,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(paths)
        listing["calls"] = calls = listing.get("calls") or Calls()
        self.units_are = "row groups"
        list_anew = partial(list_parquet, place, sample, label, memory=memory)
        super().__init__(place, list_anew, listing, sample=sample, label=label, classes=classes)
        first = partial(_columns, self.files[0], sample, None, self.objects)
        columns = calls.one(self.files[0], first)
        self._column, self.is_text = columns.sample, columns.is_text
        self.facts = columns.sample
        #: By file what its end says, of a few.
        self._metadata: dict[int, Any] = {}
        groups = self._offsets >> _PLACE_BITS
        files = np.searchsorted(self._ends, np.arange(len(self)), side="right")
        firsts = np.flatnonzero((np.diff(files, prepend=-1) != 0) | (np.diff(groups, prepend=-1) != 0))
        #: int64[units] each: of a row group that has samples its number in its file, and its first sample.
        self._groups, self._firsts = groups[firsts], firsts
        self._decode_in(memory, np.add.reduceat(self.sizes_bytes, firsts), files[firsts])

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        units = np.searchsorted(self._firsts, ids, side="right") - 1
        return units, self._offsets[ids] & _PLACE_MASK, self.sizes_bytes[ids]

    def _unit_named(self, unit: int) -> str:
        return f"row group {self._groups[unit]:,}"

    def _decode(self, unit: int, descriptor: int) -> Bytes:
        number = self._unit_files[unit]
        path, parts, sizes, row = self.files[number], list[Bytes](), list[Ints](), 0
        pa = import_pyarrow(path, "a Parquet file")
        remote = None if self.objects is None else RemoteFile(self.objects, self.facts_of(number))
        with _parquet(path, descriptor, pa, self._metadata.get(number), remote) as file:
            if len(self._metadata) >= _MOST_METADATA:
                self._metadata.clear()
            self._metadata[number] = file.metadata
            if remote is not None:
                group = file.metadata.row_group(int(self._groups[unit]))
                remote.bring(_places_of(_chunks_of(group, [self._column])))
            table = file.read_row_group(int(self._groups[unit]), columns=[self._column], use_threads=False)
            for batch in table.to_batches():
                part, size = _values(path, column_of(path, batch, self._column, row), pa)
                parts.append(part)
                sizes.append(size)
                row += batch.num_rows
        first = int(self._firsts[unit])
        if not np.array_equal(np.concatenate(sizes), self.sizes_bytes[first : first + row]):
            raise DataError(
                f"{path}: {self._unit_named(unit)} has other samples than when it was listed: open it again"
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def list_parquet(
    place: str, sample: str | None, label: ColumnLabel, asking: Asking, memory: str | int = DECODED_MEMORY
) -> Catalog:
    """Index Parquet files; see `ParquetFiles`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(place, lambda: _files_of(place, asking.objects))
    columns = asking.calls.one(files[0], partial(_columns, files[0], sample, label, asking.objects))
    index = partial(_index, columns, asking, Turns(parse_bytes(memory)))
    return index_files(
        asking, files, index, kind="ParquetFiles", label=columns.label, classes=columns.classes
    )


def _files_of(place: str, objects: Objects | None) -> tuple[str, ...]:
    found: list[str] = []
    for path in files_of(place, objects):
        files = files_below(path, [PARQUET_ENDINGS], "Parquet files", objects)
        names = map(os.path.basename, files)
        splits = {name.partition("-")[0] for name in names if "-of-" in name}
        if len(splits) > 1:  # of a folder
            raise ConfigError(
                f"{path} has the splits {', '.join(sorted(splits))}: give one, such as "
                f"{os.path.join(path, max(splits))}-*.parquet"
            )
        found += files
    return tuple(found)


def _columns(path: str, sample: str | None, label: ColumnLabel, objects: Objects | None) -> Columns:
    """Return which columns are meant, by the schema of a file."""
    pa = import_pyarrow(path, "a Parquet file")
    with opened(path, objects) as file, _parquet(path, file.descriptor, pa, None, file.remote) as parquet:
        return choose_columns(path, parquet.schema_arrow, sample, label, pa=pa, opener="ParquetFiles")


@contextlib.contextmanager
def _parquet(path: str, descriptor: int, pa: Any, metadata: Any, remote: RemoteFile | None) -> Iterator[Any]:
    """Open a Parquet file that is open already. Raises: DataError, also for what pyarrow raises while it is read.

    metadata: what its end says, where that is known. remote: what reads it where it is an object.
    """
    try:
        # A descriptor has one position; opened again, each reader has its own.
        opened = pa.OSFile(f"/proc/self/fd/{descriptor}") if remote is None else pa.PythonFile(remote, "r")
        with opened as file:
            yield pa.parquet.ParquetFile(
                file, metadata=metadata, pre_buffer=False, buffer_size=_READ_AT_ONCE_BYTES
            )
    except Exception as error:
        if "encrypt" in str(error).lower() and not isinstance(error, PenstockError):
            raise DataError(f"{path} is encrypted ({error}): write it without") from error
        with named_as(path, "Parquet file"):
            raise


def _index(columns: Columns, asking: Asking, turns: Turns, file: Opened) -> Indexed:
    """Return how large the samples of a file are, by decoding them, and their labels."""
    pa = import_pyarrow(file.path, "a Parquet file")
    wanted = [each for each in (columns.sample, columns.label, *columns.labels) if each]
    places, sizes, labels, rows = list[Ints](), list[Ints](), list[Any](), 0
    with _parquet(file.path, file.descriptor, pa, None, file.remote) as parquet:
        columns.check_names(file.path, parquet.schema_arrow)
        for group in range(parquet.num_row_groups):
            place, chunks = 0, _chunks_of(parquet.metadata.row_group(group), wanted)
            with turns.of(sum(each.total_uncompressed_size for each in chunks)):
                if file.remote is not None:
                    file.remote.bring(_places_of(chunks))
                for batch in parquet.iter_batches(_ROWS_AT_ONCE, [group], wanted, use_threads=False):
                    _, size = _values(file.path, column_of(file.path, batch, columns.sample, rows), pa)
                    places.append((group << _PLACE_BITS) + place + np.cumsum(size) - size)
                    sizes.append(size)
                    place += int(size.sum())
                    labels.append(columns.labels_in(file.path, batch, rows))
                    rows += batch.num_rows
                    asking.found(file.path, batch.num_rows)
    if not rows:
        raise DataError(f"{file.path} has no rows: take it out")
    return Indexed(
        file,
        [b"row %d" % number for number in range(rows)],
        np.concatenate(places),
        np.concatenate(sizes),
        columns.joined(file.path, labels),
    )


def _chunks_of(group: Any, wanted: list[str]) -> list[Any]:
    """Return what the metadata of a row group says of some columns."""
    names = {each.partition(".")[0] for each in wanted}
    columns = map(group.column, range(group.num_columns))
    return [each for each in columns if each.path_in_schema.partition(".")[0] in names]


def _places_of(chunks: list[Any]) -> list[tuple[int, int]]:
    """Return where columns of a row group lie in their file: begin and end of each."""
    begins = [
        min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in chunks
    ]
    return [(begin, begin + each.total_compressed_size) for begin, each in zip(begins, chunks, strict=True)]


def _values(path: str, array: Any, pa: Any) -> tuple[Bytes, Ints]:
    """Return the bytes of all values of an array, and the size of each."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    offsets, values = places_of(path, array, pa)
    if values is None:
        return np.empty(0, np.uint8), np.diff(offsets)
    return np.frombuffer(values, np.uint8)[offsets[0] : offsets[-1]], np.diff(offsets)
