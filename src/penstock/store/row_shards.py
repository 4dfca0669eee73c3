"""Shards of rows: a table of where each sample begins, and samples whose columns lie one behind the other.

    count (uint32) | begins[count + 1] (uint32 each), the last one the end | anything | samples
    a sample: the size of each column without a fixed one (uint32 each) | the columns

MosaicML's Streaming and LitData write their data so, next to an index in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.catalog import Ints
from penstock.store.columns import AUTO_LABEL, ColumnLabel
from penstock.store.object_store import joined
from penstock.store.packed_listing import FoundLabels, Indexed, Opened
from penstock.store.patterns import is_of_several
from penstock.store.remote import Objects, RemoteFile
from penstock.units import is_integer

INDEX_NAME = "index.json"

#: Encodings of labels: integers as NumPy names them, other numbers, arrays, and text.
_INTEGERS = {"int": "<i8"} | {
    f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_FLOATS = {"float": "<f8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "bool": "?"}
_NUMBERS = _INTEGERS | _FLOATS
_TEXTS = ("str", "str_int")
#: Types that LitData gives numbers, of an array of NumPy's and of a tensor. Source: litdata 0.2.76, `constants.py`.
_LITDATA_TYPES = {
    "no_header_numpy": tuple(enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))),
    "no_header_tensor": (
        *(
            (0, "f4"),
            (1, "f4"),
            (2, "f8"),
            (3, "f8"),
            (8, "f2"),
            (9, "f2"),
            (11, "u1"),
            (12, "i1"),
            (13, "i2"),
        ),
        *((14, "i2"), (15, "i4"), (16, "i4"), (17, "i8"), (18, "i8"), (19, "?"), (20, "u2")),
    ),
}
_MOST_INDEX_BYTES = 1 << 30
_FRONT_BYTES = 1 << 16
#: Places in a shard have 32 bits.
_MOST_BYTES = 2**32 - 1


class RowLabel(NamedTuple):
    """A column that is a label. name: "" for the only one that there is."""

    name: str
    column: int
    encoding: str

    @property
    def is_class(self) -> bool:
        return not self.name and (self.encoding in _INTEGERS or self.encoding in _TEXTS)


class RowColumns(NamedTuple):
    """What is taken of a sample: the number of the column that it is, and its labels."""

    sample: int
    labels: tuple[RowLabel, ...]


def choose_columns(
    place: str, kinds: dict[str, str], sample: str, label: ColumnLabel, usual: Sequence[str], calls: Calls
) -> RowColumns:
    """Return which columns are taken. kinds: how each column is stored, by name. usual: names of labels.

    A line says so where no column is called as labels are, and one has integers.
    Raises: ConfigError if a label is no column, or neither numbers, arrays of them, nor text.
    """
    has, names = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()), list(kinds)
    if label == AUTO_LABEL:
        label = next((name for name in usual if name in kinds and name != sample), None)
        integers = [name for name, kind in kinds.items() if kind in _INTEGERS and name != sample]
        if label is None and integers:
            calls.report(
                f"{place}: no column is called {', '.join(usual)}: no labels are taken; its columns are {has}: give "
                f"label={integers[0]!r} if that is it, or label=None"
            )
    given = [label] if isinstance(label, str) else label or []
    for name in given:
        if name not in kinds or (kinds[name] not in _TEXTS and _type_of(kinds[name]) is None):
            raise ConfigError(
                f"{place}: label is {label!r}; its columns are {has}: give one of numbers, arrays of them, or text, "
                "several, or None"
            )
    is_one = isinstance(label, str)
    labels = (RowLabel("" if is_one else name, names.index(name), kinds[name]) for name in given)
    return RowColumns(names.index(sample), tuple(labels))


def _type_of(encoding: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return type and shape of a label of numbers, -1 for a length that follows from its bytes; None for no numbers."""
    kind, _, how = encoding.partition(":")
    if encoding in _NUMBERS:
        return np.dtype(_NUMBERS[encoding]), ()
    if kind == "ndarray":  # of MDS, with type and shape: others have a head before their numbers
        name, _, shape = how.partition(":")
        sizes = shape.split(",")
        is_known = name in _NUMBERS and all(size.isdecimal() for size in sizes)
        return (np.dtype(_NUMBERS[name]), tuple(map(int, sizes))) if is_known else None
    types = {str(number): name for number, name in _LITDATA_TYPES.get(kind, ())}
    return (np.dtype(types[how]).newbyteorder("<"), (-1,)) if how in types else None


def check_beside(name: object) -> None:
    """Raise ValueError unless a shard that an index names is a file next to it."""
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"a shard called {name!r}, which is not next to it")


def check_size(nbytes: object) -> None:
    """Raise ValueError unless a shard, or a column in it, can have so many bytes."""
    if not is_integer(nbytes) or not 0 <= nbytes <= _MOST_BYTES:
        raise ValueError(f"something of {nbytes!r:.80} bytes")


def front_of_index(place: str, objects: Objects | None = None) -> bytes:
    """Return how the index of a folder of shards begins, nothing where there is none. objects: what reads addresses.

    It asks the file system, or the store.
    """
    if is_of_several(place):
        return b""
    path = joined(place, INDEX_NAME)
    if objects is not None:
        facts = objects.find(path)
        return b"" if facts is None else RemoteFile(objects, facts).pread(_FRONT_BYTES, 0)
    with contextlib.suppress(OSError):
        if os.path.isfile(path):  # a pipe would be waited for
            with open(path, "rb") as file:
                return file.read(_FRONT_BYTES)
    return b""


def read_json(path: str, kind: str, objects: Objects | None = None) -> Any:
    """Return what an index of shards has. kind: of shards, for errors. objects: what reads an address.

    Raises: DataError.
    """
    if objects is None and os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise DataError(f"{path} is not a regular file: write it again")
    try:
        if objects is not None:
            facts = objects.facts([path])[0]
            return json.loads(RemoteFile(objects, facts).pread(_MOST_INDEX_BYTES, 0))
        with open(path, "rb") as file:
            return json.loads(file.read(_MOST_INDEX_BYTES))
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; give the folder with it and the shards"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no index of {kind}s ({error!r:.200}): write it again") from error


def index_rows(
    file: Opened, fixed: Sequence[int | None], columns: RowColumns, said: Any, kind: str
) -> Indexed:
    """Return where the samples of a shard lie, and their labels.

    fixed: size of each column; None where it stands before each sample. said: how many samples the index says, or None.
    kind: of shard, for errors. Raises: DataError if the shard is cut off, damaged or of another kind.
    """
    variable = [number for number, size in enumerate(fixed) if size is None]
    begins = _begins(file, kind)
    count = begins.size - 1
    if said is not None and said != count:
        raise _damaged(file, kind, f"it has {count:,} samples, and {INDEX_NAME} says {said}")
    heads = b"".join(
        read_at(file, kind, begin, 4 * len(variable)) for begin in begins[:-1].tolist() if variable
    )
    sizes = np.empty((count, len(fixed)), np.int64)
    sizes[:] = [0 if size is None else size for size in fixed]
    sizes[:, variable] = np.frombuffer(heads, "<u4").reshape(count, len(variable))
    ends = begins[:-1, None] + 4 * len(variable) + np.cumsum(sizes, axis=1)
    if (wrong := ends[:, -1] != begins[1:]).any():
        raise _damaged(file, kind, f"sample {int(wrong.argmax())} is not as long as its columns")
    by_name = dict[str, Any]()
    for label in columns.labels:
        size = sizes[:, label.column]
        places = np.column_stack((ends[:, label.column] - size, size))
        texts = [read_at(file, kind, begin, size) for begin, size in places.tolist()]
        by_name[label.name] = _labels(file, kind, texts, label)
    labels: FoundLabels = by_name or None
    if any(label.is_class for label in columns.labels):
        labels = list(by_name[""])
    return Indexed(
        file,
        [b"sample %d" % number for number in range(count)],
        ends[:, columns.sample] - sizes[:, columns.sample],
        sizes[:, columns.sample].copy(),
        labels,
    )


def _begins(file: Opened, kind: str) -> Ints:
    """Return where each sample of a shard begins, and where the last one ends."""
    (count,) = np.frombuffer(read_at(file, kind, 0, 4), "<u4").tolist()
    if not count or 4 * (count + 2) > file.nbytes:
        raise _damaged(file, kind, f"it has {count:,} samples in {file.nbytes:,} bytes")
    begins = np.frombuffer(read_at(file, kind, 4, 4 * (count + 1)), "<u4").astype(np.int64)
    if begins[0] < 4 * (count + 2) or (np.diff(begins) < 0).any() or begins[-1] != file.nbytes:
        raise _damaged(file, kind, f"its samples end at byte {begins[-1]:,}, and it has {file.nbytes:,}")
    return begins


def _labels(file: Opened, kind: str, values: list[bytes], label: RowLabel) -> NDArray[Any] | list[Any]:
    """Return what the samples of a shard have as a label. values: its bytes, of each sample."""
    if label.encoding in _TEXTS:
        try:
            return [value.decode("utf-8") for value in values]
        except UnicodeDecodeError as error:
            raise _damaged(file, kind, f"a label is no text in UTF-8 ({error})") from error
    known = _type_of(label.encoding)
    assert known is not None, "it was looked at when columns were chosen"
    dtype, shape = known
    if len(set(map(len, values))) > 1:
        raise _damaged(file, kind, f"labels {label.name or 'of samples'!r} differ in length")
    try:
        found = np.frombuffer(b"".join(values), dtype).reshape(len(values), *shape)
    except ValueError as error:
        raise _damaged(file, kind, f"labels have {len(values[0]):,} bytes, no {label.encoding}") from error
    return found.tolist() if label.is_class else found.astype(dtype.newbyteorder("="))


def read_at(file: Opened, kind: str, begin: int, size: int) -> bytes:
    try:
        content = file.pread(size, begin)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}") from error
    if len(content) != size:
        raise _damaged(file, kind, f"it ends at byte {file.nbytes:,}, before {begin + size:,}")
    return content


def _damaged(file: Opened, kind: str, why: str) -> DataError:
    return DataError(f"{file.path} is cut off, damaged or no {kind}: {why}; copy or write it again")
