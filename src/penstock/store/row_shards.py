"""Shards of rows: a table of where each sample begins, and samples whose columns lie one behind the other.

    count (uint32) | begins[count + 1] (uint32 each), the last one the end | anything | samples
    a sample: the size of each column without a fixed one (uint32 each) | the columns

MosaicML's Streaming and LitData write their data so, beside an index in JSON.
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
from penstock.store.columns import AUTO_LABEL
from penstock.store.object_store import joined
from penstock.store.packed_listing import Indexed, Opened
from penstock.store.patterns import is_of_several
from penstock.store.remote import Objects, RemoteFile
from penstock.units import is_integer

INDEX_NAME = "index.json"

#: Encodings of labels: integers as NumPy names them, and text.
_INTEGERS = {"int": "<i8"} | {
    f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_TEXTS = ("str", "str_int")
#: Encodings that a label may have.
LABEL_ENCODINGS = (*_INTEGERS, *_TEXTS)
_MOST_INDEX_BYTES = 1 << 30
_FRONT_BYTES = 1 << 16
#: Places in a shard have 32 bits.
_MOST_BYTES = 2**32 - 1


class RowColumns(NamedTuple):
    """What is taken of a sample: the number of a column each, -1 for no label. encoding: of the label."""

    sample: int
    label: int
    encoding: str


def choose_columns(
    place: str, kinds: dict[str, str], sample: str, label: str | None, usual: Sequence[str], calls: Calls
) -> RowColumns:
    """Return which columns are taken. kinds: how each column is stored, by name. usual: names of labels.

    A line says so where no column is called as labels are, and one has integers.
    Raises: ConfigError if the label is no column, or neither integers nor text.
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
    if label is not None and kinds.get(label) not in LABEL_ENCODINGS:
        raise ConfigError(
            f"{place}: label is {label!r}; its columns are {has}: give one of integers or text, or None"
        )
    return RowColumns(names.index(sample), names.index(label) if label else -1, kinds[label] if label else "")


def check_beside(name: object) -> None:
    """Raise ValueError unless a shard that an index names is a file beside it."""
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"a shard called {name!r}, which is not beside it")


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
    labels = None
    if columns.label >= 0:
        places = np.column_stack((ends[:, columns.label] - sizes[:, columns.label], sizes[:, columns.label]))
        texts = [read_at(file, kind, begin, size) for begin, size in places.tolist()]
        labels = _labels(file, kind, texts, columns.encoding)
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


def _labels(file: Opened, kind: str, values: list[bytes], encoding: str) -> Sequence[str | int]:
    if encoding in _INTEGERS:
        numbers: NDArray[Any] = np.frombuffer(b"".join(values), _INTEGERS[encoding])
        return list(numbers.tolist())
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise _damaged(file, kind, f"a label is no text in UTF-8 ({error})") from error


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
