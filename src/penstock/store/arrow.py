"""Data sets in Arrow files, such as those that Hugging Face's datasets keeps, read at random where they lie.

A column of bytes or text is, in each record batch of a file, one piece with all values and a list of where each begins.
pyarrow maps the file and says where that piece lies in it; then samples are read like those of any other shard.
Source: the Arrow columnar format, "Variable-size Binary Layout" and "IPC File Format".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Unpack

import numpy as np

from penstock.errors import DataError
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
from penstock.store.decoded import DECODED_MEMORY, Turns
from penstock.store.files import named_as
from penstock.store.listing import Asking, ListingArguments
from penstock.store.packed_listing import (
    CataloguedFiles,
    Indexed,
    Opened,
    all_files_below,
    index_files,
    opened,
)
from penstock.store.patterns import Paths, place_of_paths
from penstock.store.remote import Objects, RemoteFile
from penstock.units import parse_bytes

#: How the names of Arrow files usually end.
ARROW_ENDINGS = (".arrow", ".feather")


class ArrowFiles(CataloguedFiles):
    """The rows of Arrow files, of which one column has the samples as bytes. It takes pyarrow to open them.

    Samples are numbered as their rows are, file by file.

    paths: a path, a pattern such as "data-*-of-00004.arrow", a folder as `save_to_disk` of datasets writes it, or a
        list of paths: files or streams of Arrow's IPC format. Of a `datasets.Dataset`: [each["filename"] for each in
        dataset.cache_files]; what `select` or `shuffle` chose is not in them before `flatten_indices`.
    sample: the column that is the sample, of bytes or text, or of pictures as datasets keeps them, with a field of
        bytes. Unless given, the first that there is of image, img, bytes, picture, jpg and png, or the only one.
    label: the column that is the label, of numbers, lists of one length, or text; "auto" is the first that there is of
        label, labels, class, cls and target, or no label; None takes none. Names are numbered in sorted order; integers
        keep their numbers, and get the names that datasets keeps in the schema. A list of columns of numbers gives
        several, by name.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError naming the file if it is missing, no Arrow file, cut off, compressed, of other columns than the
        first, or has a row without a sample or label; ConfigError if the columns do not tell which is the sample.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        sample: str | None = None,
        label: ColumnLabel = AUTO_LABEL,
        classes: Sequence[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(paths)
        list_anew = partial(list_arrow, place, sample, label)
        super().__init__(place, list_anew, listing, sample=sample, label=label, classes=classes)
        self._sample = sample

    @cached_property
    def is_text(self) -> bool:
        """Whether the samples are text. The first file is asked when it is wanted first."""
        return _columns(self.files[0], self._sample, None, self.objects).is_text


def list_arrow(place: str, sample: str | None, label: ColumnLabel, asking: Asking) -> Catalog:
    """Index Arrow files; see `ArrowFiles`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(
        place, lambda: all_files_below(place, [ARROW_ENDINGS], "Arrow files", asking.objects)
    )
    columns = asking.calls.one(files[0], partial(_columns, files[0], sample, label, asking.objects))
    turns = Turns(parse_bytes(DECODED_MEMORY))

    def index(file: Opened) -> Indexed:
        found = index_arrow(file, columns, turns)
        asking.progress.found.append(len(found.names))
        return found

    return index_files(asking, files, index, kind="ArrowFiles", label=columns.label, classes=columns.classes)


class _Mapped(NamedTuple):
    """An Arrow file, in memory at an address, and its record batches over that memory."""

    address: int
    schema: Any
    batches: Iterator[Any]


def _mapped(
    path: str, pa: Any, span: tuple[int, int] | None = None, content: bytes | bytearray | None = None
) -> _Mapped:
    """Map a file, or what it has where that is in memory: Arrow's from a byte to another, or as a whole.

    Raises: DataError.
    """
    with named_as(path, "Arrow file"):
        mapped = pa.memory_map(path) if content is None else pa.BufferReader(content)
        address = mapped.read_buffer(1).address
        mapped.seek(0)
        if span is not None:
            begin, end = span
            mapped.seek(begin)
            mapped = pa.BufferReader(mapped.read_buffer(end - begin))
        try:
            reader = pa.ipc.open_file(mapped)
            batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            mapped.seek(0)
            reader = pa.ipc.open_stream(mapped)
            batches = iter(reader)
        return _Mapped(address, reader.schema, batches)


def _columns(path: str, sample: str | None, label: ColumnLabel, objects: Objects | None) -> Columns:
    """Return which columns are meant, by the schema of a file."""
    pa = import_pyarrow(path, "an Arrow file")
    with opened(path, objects) as file, named_as(path, "Arrow file"):  # which refuses a pipe
        schema = _mapped(path, pa).schema if file.remote is None else _schema_of(file.remote, pa)
        return choose_columns(path, schema, sample, label, pa=pa, opener="ArrowFiles")


def _schema_of(remote: RemoteFile, pa: Any) -> Any:
    try:
        return pa.ipc.open_file(pa.PythonFile(remote, "r")).schema
    except pa.ArrowInvalid:
        remote.seek(0)
        return pa.ipc.open_stream(pa.PythonFile(remote, "r")).schema


def index_arrow(file: Opened, columns: Columns, turns: Turns, span: tuple[int, int] | None = None) -> Indexed:
    """Return where the samples of a file lie, and their labels.

    turns: of objects, which are read as a whole for this. span: see `_mapped`. Raises: DataError.
    """
    is_in_memory = file.remote is None or file.content is not None
    with contextlib.nullcontext() if is_in_memory else turns.of(file.file_bytes):
        return _index(file, columns, span)


def _index(file: Opened, columns: Columns, span: tuple[int, int] | None) -> Indexed:
    pa = import_pyarrow(file.path, "an Arrow file")
    content = file.content if file.content is not None or file.remote is None else file.remote.whole()
    mapped = _mapped(file.path, pa, span, content)
    begins, sizes, labels, rows = list[Ints](), list[Ints](), list[Any](), 0
    with named_as(file.path, "Arrow file"):
        columns.check_names(file.path, mapped.schema)
        for batch in mapped.batches:
            array = column_of(file.path, batch, columns.sample, rows)
            begin, size = _extents(file, array, mapped.address, pa)
            begins.append(begin)
            sizes.append(size)
            labels.append(columns.labels_in(file.path, batch, rows))
            rows += batch.num_rows
    if not rows:
        raise DataError(f"{file.path} has no rows: take it out")
    return Indexed(
        file,
        [b"row %d" % number for number in range(rows)],
        np.concatenate(begins),
        np.concatenate(sizes),
        columns.joined(file.path, labels),
    )


def _extents(file: Opened, array: Any, address: int, pa: Any) -> tuple[Ints, Ints]:
    """Return where the values of an array of bytes lie in its file. address: of the mapped file."""
    offsets, values = places_of(file.path, array, pa)
    begin = address if values is None else values.address
    begin -= address
    is_inside = begin >= 0 and begin + int(offsets[-1]) <= file.nbytes
    if values is not None and not is_inside:
        raise DataError(
            f"{file.path} is compressed, so that no sample can be read without those round it: write it with "
            "compression=None; pictures are compressed themselves"
        )
    return begin + offsets[:-1], np.diff(offsets)
