"""Data sets in Arrow files, such as those that Hugging Face's datasets keeps, read at random where they lie.

A column of bytes or text is, in each record batch of a file, one piece with all values and a list of where each begins.
pyarrow maps the file and says where that piece lies in it; then samples are read like those of any other shard.
Source: the Arrow columnar format, "Variable-size Binary Layout" and "IPC File Format".
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog, CatalogKey, Ints
from penstock.store.listing import Asking, Refresh
from penstock.store.packed_listing import CataloguedFiles, Indexed, Opened, index_files, opened
from penstock.store.patterns import Paths, files_of, place_of_paths

#: How the names of Arrow files usually end.
ARROW_ENDINGS = (".arrow", ".feather")

_AUTO = "auto"
_USUAL_SAMPLES = ("image", "img", "bytes", "picture", "jpg", "png")
_USUAL_LABELS = ("label", "labels", "class", "cls", "target")


class ArrowFiles(CataloguedFiles):
    """The rows of Arrow files, of which one column has the samples as bytes. It takes pyarrow to open them.

    Samples are numbered as their rows are, file by file.

    paths: a path, a pattern such as "data-*-of-00004.arrow", or a list of these: files or streams of Arrow's IPC
        format. Of a `datasets.Dataset`: [each["filename"] for each in dataset.cache_files]; what `select` or `shuffle`
        chose is not in them before `flatten_indices`.
    sample: the column that is the sample, of bytes or text, or of pictures as datasets keeps them, with a field of
        bytes. Unless given, the first that there is of image, img, bytes, picture, jpg and png, or the only one.
    label: the column that is the label, integers or text; "auto" is the first that there is of label, labels, class,
        cls and target, or no label; None takes none. Names are numbered in sorted order.
    refresh, calls, catalog: as in `open_source`.

    Raises: DataError naming the file if it is missing, no Arrow file, cut off, compressed, of other columns than the
        first, or has a row without a sample or label; ConfigError if the columns do not tell which is the sample.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        sample: str | None = None,
        label: str | None = _AUTO,
        refresh: Refresh = "auto",
        calls: Calls | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        place = place_of_paths(paths)
        list_anew = partial(list_arrow, place, sample, label)
        super().__init__(place, list_anew, refresh, calls, catalog, sample=sample, label=label)


def are_arrow(place: str) -> bool:
    """Return whether a place, of `place_of_paths`, is of Arrow files by its name."""
    return place.lower().endswith(ARROW_ENDINGS)


def list_arrow(
    place: str, sample: str | None, label: str | None, key: CatalogKey, old: Catalog | None, asking: Asking
) -> Catalog:
    """Index Arrow files; see `ArrowFiles`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(place, lambda: files_of(place))
    columns = asking.calls.one(files[0], partial(_columns, files[0], sample, label))

    def index(file: Opened) -> Indexed:
        found = _index(file, columns)
        asking.progress.found.append(len(found.names))
        return found

    return index_files(key, old, asking, files, index, kind="ArrowFiles", label=columns.label)


class _Columns(NamedTuple):
    """The columns that are taken, each with a field of it behind a dot; label: empty for none."""

    sample: str
    label: str


def _pyarrow(path: str) -> Any:
    try:
        importlib.import_module("pyarrow.ipc")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{path} is an Arrow file, which needs pyarrow: pip install 'penstock[arrow]'"
        ) from error


class _Mapped(NamedTuple):
    """An Arrow file, mapped into memory at an address, and its record batches over that memory."""

    address: int
    schema: Any
    batches: Iterator[Any]


def _mapped(path: str, pa: Any) -> _Mapped:
    """Map a file. Raises: DataError."""
    try:
        mapped = pa.memory_map(path)
        address = mapped.read_buffer(1).address
        try:
            reader = pa.ipc.open_file(mapped)
            batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            mapped.seek(0)
            reader = pa.ipc.open_stream(mapped)
            batches = iter(reader)
        return _Mapped(address, reader.schema, batches)
    except (pa.ArrowException, OSError) as error:
        raise _no_arrow(path, error) from error


def _no_arrow(path: str, error: Exception) -> DataError:
    return DataError(f"{path} is no complete Arrow file ({error}): write it again, or take it out")


def _is_of_bytes(kind: Any, pa: Any) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string)
    )


def _columns(path: str, sample: str | None, label: str | None) -> _Columns:
    """Return which columns are meant, by the schema of a file."""
    pa = _pyarrow(path)
    with opened(path):  # a pipe is refused, where pyarrow would wait for it
        kinds = {field.name: field.type for field in _mapped(path, pa).schema}
    fields = {
        name: name if _is_of_bytes(kind, pa) else f"{name}.bytes"
        for name, kind in kinds.items()
        if _is_of_bytes(kind, pa)
        or (pa.types.is_struct(kind) and any(f.name == "bytes" and _is_of_bytes(f.type, pa) for f in kind))
    }
    has = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if sample is None:
        alone = [name for name in fields if name not in _USUAL_LABELS]
        usual = [name for name in _USUAL_SAMPLES if name in fields] or (alone if len(alone) == 1 else [])
        sample = usual[0] if usual else None
    if sample not in fields:
        raise ConfigError(
            f"{path}: sample is {sample!r}; its columns are {has}: give sample= to penstock.store.ArrowFiles, "
            "the name of one of bytes or text"
        )
    if label == _AUTO:
        label = next((name for name in _USUAL_LABELS if name in kinds and name != sample), None)
    if label is not None:
        kind = kinds.get(label)
        is_text = kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        if kind is None or not (is_text or pa.types.is_integer(kind)):
            raise ConfigError(
                f"{path}: label is {label!r}; its columns are {has}: give one of integers or text, or None"
            )
    return _Columns(fields[sample], label or "")


def _index(file: Opened, columns: _Columns) -> Indexed:
    """Return where the samples of a file lie, and their labels."""
    pa = _pyarrow(file.path)
    mapped = _mapped(file.path, pa)
    begins, sizes, labels, rows = list[Ints](), list[Ints](), list[str](), 0
    try:
        for batch in mapped.batches:
            array = _column(file, batch, columns.sample, rows)
            begin, size = _extents(file, array, mapped.address, pa)
            begins.append(begin)
            sizes.append(size)
            if columns.label:
                labels += map(str, _column(file, batch, columns.label, rows).to_pylist())
            rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise _no_arrow(file.path, error) from error
    if not rows:
        raise DataError(f"{file.path} has no rows: take it out")
    return Indexed(
        file,
        [b"row %d" % number for number in range(rows)],
        np.concatenate(begins),
        np.concatenate(sizes),
        labels if columns.label else None,
    )


def _column(file: Opened, batch: Any, name: str, first_row: int) -> Any:
    """Return a column of a record batch, or a field of one behind a dot, all of whose values are there."""
    column, _, field = name.partition(".")
    number = batch.schema.get_field_index(column)
    array = outer = batch.column(number) if number >= 0 else None
    if outer is not None and field:
        array = outer.field(field) if outer.type.get_field_index(field) >= 0 else None
    if array is None or outer is None:
        raise DataError(f"{file.path} has no column {name!r}, unlike the first file: give files of one kind")
    if outer.null_count:  # its fields may have bytes there, which no reader shows
        array, field = outer, ""
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        what = "has no bytes in it, but the path of a file" if field else "has no value"
        raise DataError(f"{file.path}: row {row:,} of {name!r} {what}: fill it, or leave the row out")
    return array


def _extents(file: Opened, array: Any, address: int, pa: Any) -> tuple[Ints, Ints]:
    """Return where the values of an array of bytes lie in its file. address: of the mapped file."""
    if not _is_of_bytes(array.type, pa):
        raise DataError(
            f"{file.path} has {array.type} where the first file has bytes: give files of one kind"
        )
    _, places, values = array.buffers()
    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    narrow = np.frombuffer(places, np.int64 if wide else np.int32)[
        array.offset : array.offset + len(array) + 1
    ]
    offsets: Ints = narrow.astype(np.int64)
    sizes: Ints = np.diff(offsets)
    begin = address if values is None else values.address
    begin -= address
    is_inside = begin >= 0 and begin + int(offsets[-1]) <= file.file_bytes
    if values is not None and not is_inside:
        raise DataError(
            f"{file.path} is compressed, so that no sample can be read without those round it: write it with "
            "compression=None; pictures are compressed themselves"
        )
    if (sizes < 0).any() or offsets[0] < 0:
        raise DataError(
            f"{file.path} is damaged: a value of {array.type} ends before it begins: write it again"
        )
    return begin + offsets[:-1], sizes
