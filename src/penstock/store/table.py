"""Rows of an Arrow table in this process's memory, or mapped into it, such as a `datasets.Dataset` has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.catalog import Ints
from penstock.store.columns import (
    AUTO_LABEL,
    ColumnLabel,
    Columns,
    choose_columns,
    column_of,
    import_pyarrow,
    places_of,
)
from penstock.store.group import Bytes, Failed, Ids, check_group, front_of
from penstock.store.labels import Labels, check_names, in_classes
from penstock.store.listing import NO_LABEL, number_labels
from penstock.store.packed import READ_PIECES, copy_pieces
from penstock.store.selection import Selectable
from penstock.store.source import Numbers
from penstock.units import format_count


class ArrowTable(Selectable):
    """The rows of a pyarrow.Table, or of a datasets.Dataset as `select` and `shuffle` left it.

    A column of bytes, text or pictures (as datasets keeps them, with a field of bytes) is the sample; or one of lists
    of numbers, all of one length, which need no transforms, and no label. The values stay where they are; what the data
    set is formatted as (`with_format`) makes no difference.

    table: of either kind; it should not be changed.
    sample, label, classes: as in `ArrowFiles`.

    Raises: ConfigError if the columns do not tell which is the sample; DataError naming the row without a value.
    """

    #: Whether the samples are text.
    is_text = False

    def __init__(
        self,
        table: Any,
        *,
        sample: str | None = None,
        label: ColumnLabel = AUTO_LABEL,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._given = table, sample, label, classes
        rows = table.data.table if is_dataset(table) else table
        self.place = type(table).__name__
        pa = import_pyarrow(self.place, "a table of Arrow")
        if not isinstance(rows, pa.Table):
            raise ConfigError(f"{table!r:.200} is no pyarrow.Table and no datasets.Dataset: give one")
        chosen = getattr(table, "_indices", None)
        #: Of each sample its row; None where they are the same.
        self._rows: Ints | None = None if chosen is None else chosen.column(0).to_numpy().astype(np.int64)
        if not rows.num_rows or (self._rows is not None and not self._rows.size):
            raise DataError(f"{self.place} has no rows: give one that has some")
        columns = self._find_columns(rows, sample, label, pa)
        self.is_text = columns.is_text
        self._find_values(rows, columns.sample, pa)
        found, self.classes = self._find_labels(rows, columns)
        of_samples: Any = slice(None) if self._rows is None else self._rows
        self.sizes_bytes = self._sizes[of_samples]
        by_name = {name: each[of_samples] for name, each in found.items()}
        for array in (self.sizes_bytes, *by_name.values()):
            array.flags.writeable = False
        has_none = not columns.label and not columns.labels and hasattr(self, "numbers")
        self.labels: Labels = {} if has_none else by_name.get("", by_name)
        self.labels, self.classes = in_classes(classes, self.labels, self.classes, self.describe)
        #: What tells the samples from those of other columns, and of other rows; as `PackedFiles.facts`.
        digest = "" if self._rows is None else xxhash.xxh3_128_hexdigest(self._rows.tobytes())
        self.facts = f"{digest} {columns.sample}"

    def _find_columns(self, rows: Any, sample: str | None, label: ColumnLabel, pa: Any) -> Columns:
        check_names(sample=sample)
        kinds = {field.name: field.type for field in rows.schema}
        if sample in kinds and pa.types.is_fixed_size_list(kinds[sample]):
            element = kinds[sample].value_type
            if not (pa.types.is_integer(element) or pa.types.is_floating(element)):
                raise ConfigError(
                    f"{self.place}: {sample} has lists of {element}; samples are bytes, text or numbers"
                )
            dtype = np.dtype(element.to_pandas_dtype())
            self.numbers = Numbers(dtype.str, (kinds[sample].list_size,), dtype.name)
            # Any column serves as the sample here: only the label is looked for.
            others = pa.schema(
                [field for field in rows.schema if field.name != sample], metadata=rows.schema.metadata
            ).append(pa.field(sample, pa.binary()))
            found = choose_columns(self.place, others, sample, label, pa=pa, opener=type(self).__name__)
        else:
            found = choose_columns(self.place, rows.schema, sample, label, pa=pa, opener=type(self).__name__)
        return found

    def _find_values(self, rows: Any, column: str, pa: Any) -> None:
        """Find out where the values of a column are: of each piece the bytes, of each row its piece, place and size."""
        self._pieces, pieces, places, sizes, row = list[Bytes](), list[Ints](), list[Ints](), list[Ints](), 0
        for batch in rows.select([column.partition(".")[0]]).to_batches():
            array = column_of(self.place, batch, column, row)
            if pa.types.is_fixed_size_list(array.type):
                values = array.flatten()
                if values.null_count:
                    raise DataError(f"{self.place}: {column} has lists with a number missing: fill them")
                content = np.frombuffer(values.buffers()[1], np.uint8)[
                    values.offset * values.type.bit_width // 8 :
                ]
                nbytes = array.type.list_size * values.type.bit_width // 8
                offsets = nbytes * np.arange(len(array) + 1)
            else:
                if pa.types.is_dictionary(array.type):
                    array = array.dictionary_decode()
                offsets, buffer = places_of(self.place, array, pa)
                content = np.frombuffer(b"" if buffer is None else buffer, np.uint8)
            pieces.append(np.full(len(array), len(self._pieces), np.int64))
            places.append(offsets[:-1])
            sizes.append(np.diff(offsets))
            self._pieces.append(content)
            row += len(array)
        self._piece_of, self._places = np.concatenate(pieces), np.concatenate(places)
        self._sizes: Ints = np.concatenate(sizes)

    def _find_labels(self, rows: Any, columns: Columns) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
        """Return labels by name, "" for one; and the names of that."""
        parts, row = list[Any](), 0
        for batch in rows.select([each for each in (columns.label, *columns.labels) if each]).to_batches():
            parts.append(columns.labels_in(self.place, batch, row))
            row += batch.num_rows
        found = columns.joined(self.place, parts)
        if isinstance(found, dict):
            return found, ()
        if found is None:
            return {"": np.full(rows.num_rows, NO_LABEL, np.int64)}, ()
        labels, classes = number_labels(list(map(str, found)), lambda row: f"{self.place}: row {row:,}")
        names = columns.classes or ()
        return {"": labels}, names if len(names) >= len(classes) else classes

    def __len__(self) -> int:
        return len(self._sizes if self._rows is None else self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place}): {format_count(len(self), 'sample')}, {len(self.classes)} classes"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, self._given

    def describe(self, sample: int) -> str:
        return f"{self.place}: row {self._row_of(sample):,}"

    def read(self, sample: int) -> bytes:
        return self._value_of(sample).tobytes()

    def read_into(self, sample: int, buffer: memoryview) -> int:
        value = self._value_of(sample)
        front_of(buffer, value.size, self.describe(sample))[:] = value.data
        return value.size

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Copy samples; see `penstock.store.read_group`."""
        check_group(self, ids, into, begins)
        rows = ids if self._rows is None else self._rows[ids]
        pieces, sizes = self._piece_of[rows], self._sizes[rows]
        arrays = {number: self._pieces[number] for number in np.unique(pieces).tolist()}
        copy_pieces(arrays, pieces, self._places[rows], sizes, into, begins[:-1])
        return [(index, self._empty(int(ids[index]))) for index in np.flatnonzero(sizes == 0).tolist()]

    def prepare_group(self) -> None:
        READ_PIECES.ask()

    def _row_of(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        return sample if self._rows is None else int(self._rows[sample])

    def _value_of(self, sample: int) -> NDArray[np.uint8]:
        row = self._row_of(sample)
        place, size = int(self._places[row]), int(self._sizes[row])
        if not size:
            raise self._empty(sample)
        return self._pieces[int(self._piece_of[row])][place : place + size]

    def _empty(self, sample: int) -> DataError:
        return DataError(f"{self.describe(sample)} is empty (0 bytes): take it out")


def _made_again(
    table: Any, sample: str | None, label: ColumnLabel, classes: Sequence[str] | None
) -> ArrowTable:
    return ArrowTable(table, sample=sample, label=label, classes=classes)


def is_dataset(source: object) -> bool:
    """Return whether it is a datasets.Dataset whose samples no function of the user makes."""
    has_all = all(hasattr(source, name) for name in ("features", "format", "_indices"))
    if not has_all or not hasattr(getattr(source, "data", None), "table"):
        return False
    return bool(source.format["type"] != "custom")  # type: ignore[attr-defined]
