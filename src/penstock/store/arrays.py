"""Samples that are numbers at even distances in files: rows of arrays, records of one length, windows of tokens."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.files import named_as
from penstock.store.group import Ids
from penstock.store.labels import Labels
from penstock.store.object_store import Facts, is_address
from penstock.store.packed import Layout, stats_of
from penstock.store.patterns import Paths, brief, files_of, place_of_paths
from penstock.store.remote import Objects, RemoteFile, objects_of
from penstock.store.rows import RowFiles, check_alike, copied_labels
from penstock.store.source import Numbers
from penstock.units import is_integer
from penstock.validate import check_count

#: How the names of NumPy's files end.
ARRAY_ENDING = ".npy"
#: Bytes of records that are read at a time for a label in each.
_LABELS_AT_ONCE_BYTES = 16 << 20
#: No header of a .npy file is longer.
_MOST_HEADER_BYTES = 1 << 16
_KIND = ".npy file of numbers"

#: Labels of rows: the name of a field, a .npy file, an array, or several arrays by name.
RowLabels = str | os.PathLike[str] | NDArray[Any] | dict[str, NDArray[Any]] | None


class _Rows(NamedTuple):
    """The rows of a file, so many. begin: of the first, in bytes. dtype: of an element. shape: of a row."""

    begin: int
    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _EvenFiles(RowFiles):
    """Samples of one size at even distances in files.

    begins, counts: of each file, where its first sample begins, in bytes, and how many it has.
    step_bytes: from one sample to the next. The others are as in `RowFiles`.
    """

    def __init__(
        self,
        place: str,
        files: tuple[str, ...],
        begins: Sequence[int] | Ids,
        counts: Sequence[int],
        step_bytes: int,
        numbers: Numbers,
        labels: Labels,
        objects: Objects | None = None,
    ) -> None:
        begins = np.array(begins, np.int64)
        facts = repr((step_bytes, begins.tolist(), counts))
        super().__init__(place, files, counts, numbers, labels, facts=facts, objects=objects)
        origins, size = begins - self._firsts * step_bytes, np.array([self.sample_bytes])
        self._layout = Layout(self._ends, size, origins=origins, step_bytes=step_bytes)


class Records(_EvenFiles):
    """Records of one length in binary files, one behind the other; several files follow each other.

    paths: a path, a pattern such as "part-{0..9}.bin", or a list of these.
    dtype, shape: of a record, as NumPy names them: "<f4" and (16, 16). A dtype with fields is a record by itself.
    header_bytes: before the first record of each file.
    field: which field of the records is the sample.
    labels: the name of another field, a .npy file, an array with a row for each record, or a dict of such arrays.
        Without any, a batch is the numbers alone. A field is read from all records when they are opened.

    Raises: DataError naming the file if it is missing, or no whole number of records behind the header;
        ConfigError for a dtype that is not of real numbers, and for labels of another length.

    CIFAR-10, whose records are a label and 3,072 pixels: Records("data_batch_{1..5}.bin",
    [("label", "u1"), ("image", "u1", (3, 32, 32))], field="image", labels="label").
    """

    def __init__(
        self,
        paths: Paths,
        dtype: DTypeLike,
        shape: tuple[int, ...] | int = (),
        *,
        header_bytes: int = 0,
        field: str | None = None,
        labels: RowLabels = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_count("header_bytes", header_bytes, 0)
        sizes = (shape,) if is_integer(shape) else shape
        if not isinstance(sizes, tuple) or not all(is_integer(size) and size > 0 for size in sizes):
            raise ConfigError(f"shape is {shape!r}; it is a tuple of positive sizes")
        kind = _dtype_of(dtype)
        record_bytes = kind.itemsize * math.prod(sizes)
        place = place_of_paths(paths)
        objects = objects_of(place, storage_options)
        files, rows = files_of(place, objects), []
        for path, nbytes in zip(files, stats_of(files, objects)[0].tolist(), strict=True):
            content = nbytes - header_bytes
            if content < 0 or content % record_bytes:
                raise DataError(
                    f"{path} has {nbytes:,} bytes, which are no whole number of records of {record_bytes:,} behind a "
                    f"header of {header_bytes:,}: correct dtype, shape or header_bytes, or write the file again"
                )
            rows.append(_Rows(int(header_bytes), content // record_bytes, kind, sizes))
        super().__init__(place, files, *_parts(files, rows, field, labels, objects), objects)


class Arrays(_EvenFiles):
    """The rows of NumPy's files (.npy); several files follow each other.

    paths: a path, a pattern such as "part-*.npy", or a list of these; all of one dtype and shape of a row.
    field, labels: as of `Records`, for arrays whose dtype has fields.

    Raises: DataError naming the file if it is missing, cut off or no .npy file, or has rows of another kind than the
        first; ConfigError as `Records`, and for an array in Fortran's order, whose rows do not lie together.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        field: str | None = None,
        labels: RowLabels = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        place = place_of_paths(paths)
        objects = objects_of(place, storage_options)
        files = files_of(place, objects)
        rows = [_rows_of(path, objects) for path in files]
        super().__init__(place, files, *_parts(files, rows, field, labels, objects), objects)


class Tokens(_EvenFiles):
    """Windows over files of tokens, for language models: `length` tokens, and the ones behind them as targets.

        tokens of a file    t0 t1 t2 t3 t4 t5 t6 t7 t8
        length=3            [t0 t1 t2 t3]                      inputs batch[:, :-1], targets batch[:, 1:]
                                     [t3 t4 t5 t6]

    paths: a path, a pattern, or a list of these: .npy files of one axis, or files of nothing but tokens.
    length: tokens of an input. dtype: of the tokens as stored, such as "uint16"; .npy files name theirs.
    stride: from one window to the next, in tokens; `length` unless given, so that each token is a target once.
    ahead: tokens behind the input that a sample has too; 0 for models that predict none.

    No window goes beyond its file's end; what is left there is not used. Batches are int64, as embeddings take them;
    the loader's dtype= says another, such as "int32" for half the memory, if it holds all of the stored type.

    Raises: ConfigError naming the argument; DataError naming the file if it is missing, no whole number of tokens, or,
        where there is no other, shorter than a window.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        length: int,
        dtype: DTypeLike | None = None,
        stride: int | None = None,
        ahead: int = 1,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        stride = length if stride is None else stride
        for name, number, least in (("length", length, 1), ("stride", stride, 1), ("ahead", ahead, 0)):
            check_count(name, number, least)
        place, kind = place_of_paths(paths), None if dtype is None else _dtype_of(dtype)
        self._stride, self._window = int(stride), int(length + ahead)
        objects = objects_of(place, storage_options)
        files = files_of(place, objects)
        rows = [_tokens_of(path, kind, objects) for path in files]
        check_alike(files, rows)
        kind = rows[0].dtype
        if kind.kind not in "iu":
            raise ConfigError(
                f"{files[0]} has {kind.name}, and tokens are integers: open it with Arrays or Records"
            )
        counts = [max(0, (each.number - self._window) // self._stride + 1) for each in rows]
        if not sum(counts):
            tokens = max(each.number for each in rows)
            raise DataError(
                f"{brief(place)} has {tokens:,} tokens, fewer than a window of {self._window:,}: give a smaller length"
            )
        numbers = Numbers(kind.str, (self._window,), "int64")
        begins = [each.begin for each in rows]
        super().__init__(place, files, begins, counts, self._stride * kind.itemsize, numbers, {}, objects)

    def _named(self, index: int) -> str:
        return f"tokens from {index * self._stride:,} on"


def are_arrays(place: str) -> bool:
    """Return whether a place, of `place_of_paths`, is of .npy files by its name."""
    return place.endswith(ARRAY_ENDING)


def _dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(
            f"dtype is {dtype!r}; it is a type of numbers as NumPy names it, such as '<u2'"
        ) from error
    if not found.itemsize:
        raise ConfigError(f"dtype is {dtype!r}, which takes no bytes: name a type of numbers, such as '<u2'")
    return found


def _rows_of(path: str, objects: Objects | None = None) -> _Rows:
    """Return what the header of a .npy file says. Raises: DataError; ConfigError for Fortran's order."""
    if objects is not None:
        return _rows_of_object(objects.facts([path])[0], objects)
    stats_of([path])
    with named_as(path, _KIND):
        array = np.lib.format.open_memmap(path, mode="r")
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return _checked_rows(path, int(array.offset), array.shape, array.dtype, is_fortran=is_fortran)


def _rows_of_object(facts: Facts, objects: Objects) -> _Rows:
    front = io.BytesIO(RemoteFile(objects, facts).pread(_MOST_HEADER_BYTES, 0))
    with named_as(facts.address, _KIND):
        version = np.lib.format.read_magic(front)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
            version
        ]
        shape, is_fortran, dtype = read(front)
        wanted = front.tell() + dtype.itemsize * math.prod(shape)
        if dtype.hasobject or min(shape, default=0) < 0 or wanted > facts.nbytes:
            raise ValueError(f"it has {facts.nbytes:,} bytes, and by its header {wanted:,}")
    is_fortran = is_fortran and sum(size > 1 for size in shape) > 1
    return _checked_rows(facts.address, front.tell(), shape, dtype, is_fortran=is_fortran)


def _checked_rows(
    path: str, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, is_fortran: bool
) -> _Rows:
    if not shape:
        raise ConfigError(f"{path} is a single number: give an array, whose rows are samples")
    if is_fortran:
        raise ConfigError(
            f"{path} is in Fortran's order, so that no row lies together: write numpy.ascontiguousarray(array)"
        )
    return _Rows(begin, shape[0], dtype, shape[1:])


def _tokens_of(path: str, kind: np.dtype[Any] | None, objects: Objects | None) -> _Rows:
    if path.endswith(ARRAY_ENDING):
        found = _rows_of(path, objects)
        if found.shape:
            raise ConfigError(
                f"{path} has more than one axis; tokens are one behind the other: open it with Arrays"
            )
        if kind is not None and found.dtype != kind:
            raise ConfigError(f"{path} has {found.dtype.name}, and dtype is {kind.name}: leave dtype out")
        return found
    if kind is None:
        raise ConfigError(
            f"dtype is missing: {path} does not say of which type its tokens are, such as dtype='uint16'"
        )
    nbytes = int(stats_of([path], objects)[0][0])
    if nbytes % kind.itemsize:
        raise DataError(
            f"{path} has {nbytes:,} bytes, no whole number of {kind.name}: correct dtype or the file"
        )
    return _Rows(0, nbytes // kind.itemsize, kind, ())


def _parts(
    files: tuple[str, ...],
    rows: Sequence[_Rows],
    field: str | None,
    labels: RowLabels,
    objects: Objects | None,
) -> tuple[list[int], list[int], int, Numbers, Labels]:
    """Return what `_EvenFiles` takes behind its files."""
    check_alike(files, rows)
    first = rows[0]
    dtype, shape, inner = first.dtype, first.shape, 0
    row_bytes = dtype.itemsize * math.prod(shape)
    if dtype.names is not None:
        if shape:
            raise ConfigError(f"{files[0]} has records in more than one axis: reshape it to one")
        if field not in dtype.names:
            raise ConfigError(
                f"field is {field!r}; the records of {files[0]} have {', '.join(dtype.names)}: name the sample's"
            )
        dtype, inner = _field_of(dtype, field)
        dtype, shape = dtype.base, dtype.shape
    elif field is not None:
        raise ConfigError(f"field is {field!r}, and the numbers of {files[0]} have no fields: leave it out")
    if dtype.kind not in "biuf" or not math.prod(shape):
        raise ConfigError(
            f"{files[0]} has samples of {dtype}{list(shape)}; they are real numbers, one at least"
        )
    begins, counts = [each.begin + inner for each in rows], [each.number for each in rows]
    if not sum(counts):
        raise DataError(f"{files[0]} has no rows: give a file that has some")
    numbers = Numbers(dtype.str, shape, dtype.name)
    return begins, counts, row_bytes, numbers, _labels_of(files, rows, labels, objects)


def _field_of(dtype: np.dtype[Any], field: str) -> tuple[np.dtype[Any], int]:
    """Return the type of a field, and where it begins in a record."""
    assert dtype.fields is not None
    kind, begin = dtype.fields[field][:2]
    return kind, begin


def _labels_of(
    files: tuple[str, ...], rows: Sequence[_Rows], labels: RowLabels, objects: Objects | None
) -> Labels:
    if labels is None:
        return {}
    if not isinstance(labels, (str, os.PathLike)):
        return copied_labels(labels)
    dtype = rows[0].dtype
    if dtype.names is None or labels not in dtype.names:
        path = place_of_paths(labels)
        if is_address(path):
            there = objects or Objects()
            _rows_of(path, there)
            return _loaded(there.content(there.facts([path])[0]))
        _rows_of(path)  # says what is wrong
        return _loaded(path)
    parts = []
    facts = {} if objects is None else {each.address: each for each in objects.facts(files)}
    at_once = max(1, _LABELS_AT_ONCE_BYTES // dtype.itemsize)
    for path, each in zip(files, rows, strict=True):
        for first in range(0, each.number, at_once):
            count = min(at_once, each.number - first)
            offset = each.begin + first * dtype.itemsize
            if objects is None:
                read = np.fromfile(path, dtype, count, offset=offset)
            else:
                content = RemoteFile(objects, facts[path]).pread(count * dtype.itemsize, offset)
                read = np.frombuffer(content, dtype)
            if len(read) != count:
                raise DataError(f"{path} has shrunk while its labels were read: open it again")
            parts.append(read[str(labels)].copy())
    return np.concatenate(parts)


def _loaded(file: str | bytes) -> NDArray[Any]:
    found: NDArray[Any] = np.load(io.BytesIO(file) if isinstance(file, bytes) else file)
    return found
