"""Which columns of a table are samples and labels, and what their values are: what Arrow and Parquet files share."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.labels import check_names
from penstock.store.packed_listing import FoundLabels

#: The label that is taken where there is one of the usual names.
AUTO_LABEL = "auto"
#: A column that is the label, or several of numbers.
ColumnLabel = str | Sequence[str] | None
_USUAL_SAMPLES = ("image", "img", "bytes", "picture", "jpg", "png")
_USUAL_LABELS = ("label", "labels", "class", "cls", "target")


class Columns(NamedTuple):
    """The columns that are taken, each with a field of it behind a dot; label: empty for none. path: of the first file.

    classes: names of the labels 0, 1 ..., () where the table has none; None for labels that are text.
    labels: the columns of numbers that are labels, in place of one, and what these are called; see `Indexed`.
    is_text: whether samples are text.
    """

    sample: str
    label: str
    classes: tuple[str, ...] | None
    labels: Mapping[str, str] = MappingProxyType({})
    path: str = ""
    is_text: bool = False

    def check_names(self, path: str, schema: Any) -> None:
        """Raise DataError if a file's names of the classes are others than those of the first, or of its own."""
        names = _class_names(schema, self.label)
        if names and self.classes is not None and names != self.classes:
            first = f"{list(self.classes)!r:.200}" if self.classes else "no names for it"
            raise DataError(
                f"{path} has {list(names)!r:.200} as the classes of {self.label!r}, and {self.path} has {first}: "
                "cast one to the features of the other, so that a number is one class in all files"
            )

    def labels_in(self, path: str, batch: Any, first_row: int) -> list[str | int] | dict[str, NDArray[Any]]:
        """Return the labels of a record batch: of one column as they are, of several as numbers by name."""
        if self.labels:
            return {
                name: _numbers_of(path, column, column_of(path, batch, column, first_row), first_row)
                for column, name in self.labels.items()
            }
        if self.label:
            column = column_of(path, batch, self.label, first_row)
            column.validate(full=True)  # where a text ends is believed
            found: list[str | int] = column.to_pylist()
            if found and (isinstance(found[0], bool) or not isinstance(found[0], str | int)):
                raise DataError(f"{path} has {self.label!r} of {column.type}; labels are integers or text")
            return found
        return []

    def joined(self, path: str, parts: Sequence[list[str | int] | dict[str, NDArray[Any]]]) -> FoundLabels:
        """Return the labels of the record batches of a file, as `Indexed` has them. Raises: DataError."""
        if self.labels:
            named: Any = [part for part in parts if len(next(iter(part.values())))] or parts[:1]  # type: ignore[union-attr]
            for column, name in self.labels.items():
                if len(lengths := {part[name].shape[1:] for part in named}) > 1:
                    raise DataError(f"{path} has {column!r} of {sorted(lengths)}: give lists of one length")
            return {name: np.concatenate([part[name] for part in named]) for name in self.labels.values()}
        return [label for part in parts for label in part] if self.label else None


def import_pyarrow(path: str, kind: str) -> Any:
    """Return pyarrow. kind: of file that a path is. Raises: ConfigError where it is not installed."""
    try:
        importlib.import_module("pyarrow.ipc")
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(f"{path} is {kind}, which needs pyarrow: pip install 'penstock[arrow]'") from error


def choose_columns(
    path: str, schema: Any, sample: str | None, label: ColumnLabel, *, pa: Any, opener: str
) -> Columns:
    """Return which columns of a file are meant, by its schema.

    sample, label: as the user gave them. opener: name of the source's class, for errors.
    Raises: ConfigError if the columns do not tell which is the sample, or one does not do.
    """
    check_names(sample=sample)
    check_label(label)
    kinds = {field.name: _values_of(field.type, pa) for field in schema}
    fields = {
        name: name if is_of_bytes(kind, pa) else f"{name}.bytes"
        for name, kind in kinds.items()
        if is_of_bytes(kind, pa)
        or (pa.types.is_struct(kind) and any(f.name == "bytes" and is_of_bytes(f.type, pa) for f in kind))
    }
    has = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if sample is None:
        alone = [name for name in fields if name not in _USUAL_LABELS]
        usual = [name for name in _USUAL_SAMPLES if name in fields] or (alone if len(alone) == 1 else [])
        sample = usual[0] if usual else None
    if sample not in fields:
        raise ConfigError(
            f"{path}: sample is {sample!r}; its columns are {has}: give sample= to penstock.store.{opener}, "
            "the name of one of bytes or text"
        )
    chosen = Columns(fields[sample], "", None, path=path, is_text=_is_text(kinds[sample], pa))
    if label is not None and not isinstance(label, str):
        for name in label:
            if name not in kinds or not _is_of_numbers(kinds[name], pa):
                raise ConfigError(
                    f"{path}: label is {list(label)}; its columns are {has}: several are columns of numbers, or of "
                    "lists of them, all of one length"
                )
        return chosen._replace(labels={name: name for name in label})
    if label == AUTO_LABEL:
        label = next((name for name in _USUAL_LABELS if name in kinds and name != sample), None)
    if label is not None:
        kind = kinds.get(label)
        is_text = kind is not None and _is_text(kind, pa)
        if kind is None or not (is_text or _is_of_numbers(kind, pa)):
            raise ConfigError(
                f"{path}: label is {label!r}; its columns are {has}: give one of numbers, of lists or text, or None"
            )
        if pa.types.is_integer(kind):
            return chosen._replace(label=label, classes=_class_names(schema, label))
        if not is_text:
            return chosen._replace(labels={label: ""})
    return chosen._replace(label=label or "")


def check_label(label: Any) -> None:
    """Raise ConfigError for what is no `ColumnLabel`."""
    if label is not None and (not isinstance(label, str | list | tuple) or not label):
        raise ConfigError(f"label is {label!r:.80}; it is the name of a column, a list of names, or None")
    for each in label if isinstance(label, list | tuple) else ():
        check_names(label=each or "")


def _values_of(kind: Any, pa: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_of_bytes(kind: Any, pa: Any) -> bool:
    """Return whether values are bytes or text of any length."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind)) or _is_text(kind, pa)


def _is_text(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the names of the classes of a column, as Hugging Face's datasets keeps them in a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[label]
        names = feature["names"] if feature["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def column_of(path: str, batch: Any, name: str, first_row: int) -> Any:
    """Return a column of a record batch, or a field of one behind a dot, all of whose values are there.

    first_row: of the batch in its file. Raises: DataError naming the row without a value.
    """
    column, _, field = name.partition(".")
    number = batch.schema.get_field_index(column)
    array = outer = batch.column(number) if number >= 0 else None
    if outer is not None and field:
        array = outer.field(field) if outer.type.get_field_index(field) >= 0 else None
    if array is None or outer is None:
        if batch.schema.names.count(column) > 1:
            raise DataError(f"{path} has the column {column!r} more than once: rename or drop one")
        raise DataError(f"{path} has no column {name!r}, unlike the first file: give files of one kind")
    outer.validate()  # where its buffers end
    if outer.null_count:  # its fields may have bytes there, which no reader shows
        array, field = outer, ""
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        what = "has no value: fill it, or leave the row out"
        if field:
            what = (
                "has no bytes in it, but the path of a file: give what `dataset.save_to_disk` writes, which has the "
                "files in it, or the folder of the files"
            )
        raise DataError(f"{path}: row {row:,} of {name!r} {what}")
    return array


def _is_of_numbers(kind: Any, pa: Any) -> bool:
    if any(test(kind) for test in (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)):
        kind = kind.value_type
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _numbers_of(path: str, name: str, array: Any, first_row: int) -> NDArray[Any]:
    """Return the values of a column of numbers, or of lists of one length: [rows], or [rows, length].

    Raises: DataError naming the row whose list has another length than the first of its record batch.
    """
    values = array.flatten() if array.type.num_fields else array
    if values.null_count:
        raise DataError(f"{path} has {name!r} with a number missing: fill it, or leave the row out")
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if values is array:
        return found
    lengths = (
        np.diff(array.offsets.to_numpy())
        if hasattr(array, "offsets")
        else np.full(len(array), array.type.list_size)
    )
    if not len(array):
        return found.reshape(0, 0)
    if (other := np.flatnonzero(lengths != lengths[0])).size:
        raise DataError(
            f"{path}: row {first_row + other[0]:,} of {name!r} has {lengths[other[0]]:,} numbers, and row "
            f"{first_row:,} {lengths[0]:,}: give lists of one length"
        )
    return found.reshape(len(array), -1)


def places_of(path: str, array: Any, pa: Any) -> tuple[Any, Any]:
    """Return where the values of an array of bytes lie: int64[n + 1] of the buffer that comes with it.

    The buffer is None where nothing is in it. Raises: DataError for another kind of array, or a damaged one.
    """
    if pa.types.is_dictionary(array.type):
        raise DataError(
            f"{path} has its samples as a dictionary, {array.type}: write it with table.cast to {array.type.value_type}"
        )
    if not is_of_bytes(array.type, pa):
        raise DataError(f"{path} has {array.type} where the first file has bytes: give files of one kind")
    if not len(array):  # its buffers may be none
        return np.zeros(1, np.int64), None
    _, places, values = array.buffers()
    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    narrow = np.frombuffer(places, np.int64 if wide else np.int32)
    offsets = narrow[array.offset : array.offset + len(array) + 1].astype(np.int64)
    end = 0 if values is None else values.size
    if (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > end:
        raise DataError(
            f"{path} is damaged: a value of {array.type} ends before it begins, or beyond its file: write it again"
        )
    return offsets, values
