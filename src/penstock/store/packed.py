"""Samples that lie in a few files, many to a file: shards, arrays, records.

A file is a *unit* of `penstock.store.RangedSource`. Its descriptor stays open, so that a sample costs a network file
system one request. Before each read the file is compared with what it was when its samples were found. Files of small
samples are mapped on local disks (`penstock.store.mapped`), and then compared after it as well.

Decided in docs/decisions/0023-samples-that-share-files.md and 0026-mapped-files.md.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.compiling import Part
from penstock.errors import DataError
from penstock.machine_code import Loop, Signature
from penstock.store.catalog import Catalog
from penstock.store.files import unreadable
from penstock.store.group import (
    Bytes,
    Failed,
    Ids,
    check_group,
    check_kinds,
    front_of,
    note_mapped,
    read_one_by_one,
)
from penstock.store.labels import Labels
from penstock.store.mapped import is_guarded
from penstock.store.object_store import Facts, Piece
from penstock.store.open_files import OpenFile, OpenFiles, changed
from penstock.store.pack_file import named_classes
from penstock.store.remote import Objects
from penstock.store.selection import Selectable

SIGNATURE = Signature(
    ("int64[:, :]", *["int64[:]"] * 3, "int64", *["int64[:]"] * 3, "uint8[:]", "int64[:]", "int64[:]"),
    results=("int64",),
)
READ_PIECES = Part(
    "penstock.store._packed_kernels",
    "read_pieces",
    SIGNATURE,
    "how samples of shards and arrays are read",
    "Python reads them, more slowly,",
)

#: A group that lies in more files is read in parts: as many descriptors of one thread cannot be closed.
_FILES_AT_ONCE = 16
#: Samples up to this size are copied from mapped files; a call takes little compared with reading larger ones.
_MAPPED_SAMPLE_BYTES = 32 << 10
#: Files that take a larger share of this machine's memory are not mapped: most of their pages are on the disk.
_MAPPED_SHARE = 0.5
_NONE = np.empty(0, np.int64)


class Layout(NamedTuple):
    """Where samples lie, of which those of each file follow those of the file before.

    ends: int64[files], of each the sample behind its last one.
    sizes_bytes: int64[samples], or int64[1] where all have one size.
    offsets: int64[samples], where in its file each begins; or empty, where sample k begins at origins[file] + k * step.
    origins: int64[files], may be below 0. step_bytes: from one sample to the next.
    """

    ends: Ids
    sizes_bytes: Ids
    offsets: Ids = _NONE
    origins: Ids = _NONE
    step_bytes: int = 0

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        """Return file, offset and length of each sample: int64[n] each. ids: samples that exist."""
        units = np.searchsorted(self.ends, ids, side="right").astype(np.int64, copy=False)
        offsets = self.offsets[ids] if self.offsets.size else self.origins[units] + ids * self.step_bytes
        sizes = self.sizes_bytes
        return units, offsets, sizes[ids] if sizes.size > 1 else np.full(ids.size, sizes[0])


class PackedFiles(Selectable, ABC):
    """Samples that are pieces of files; made to be used by what knows where they lie, such as `TarShards`.

    files: absolute paths, or addresses. file_bytes, file_times: int64[files], size and time of the last change (ns
        since 1970; of an object its stamp) of each when its samples were found. A file that is another since then is
        not read.
    place: what was opened, for people. sizes_bytes, labels, classes: as in `Source`.
    objects: what reads addresses.

    It keeps at most 1,024 descriptors open, and a quarter of what `ulimit -n` allows, until it is closed or nothing
    refers to it.
    """

    #: What there is, where that had to be listed.
    catalog: Catalog | None = None
    #: What tells which part of the files the samples are, where sizes and offsets do not: a column, where rows begin.
    facts: str = ""
    #: Where samples lie; None where `extents` is overridden, and alone says so.
    _layout: Layout | None = None

    def __init__(
        self,
        files: Sequence[str],
        file_bytes: Ids,
        file_times: Ids,
        *,
        place: str,
        sizes_bytes: Ids,
        labels: Labels,
        classes: tuple[str, ...] = (),
        objects: Objects | None = None,
    ) -> None:
        self.files, self.place = tuple(files), place
        self.sizes_bytes, self.labels = sizes_bytes, labels
        self.classes = named_classes(self.files, classes)
        self._file_bytes, self._file_times = file_bytes, file_times
        self.objects = objects
        self._open = OpenFiles(self.files, file_bytes, file_times)
        self._maps = (
            sizes_bytes.size > 0
            and float(sizes_bytes.mean()) <= _MAPPED_SAMPLE_BYTES
            and int(file_bytes.sum())
            <= _MAPPED_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )

    @property
    def file_times(self) -> Ids:
        """int64[files], when each was changed last (ns), of an object its stamp."""
        return self._file_times

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        """Return file, offset and length of each sample; see `RangedSource`. ids: samples that exist."""
        assert self._layout is not None, "else this is overridden"
        return self._layout.extents(ids)

    @abstractmethod
    def describe(self, sample: int) -> str:
        """Return the file and what in it the sample is."""

    def __len__(self) -> int:
        return self.sizes_bytes.size

    def file_names(self) -> list[str]:
        """Return the names of the files below the folder that all of them are in."""
        if self.objects is not None:
            paths = ["/" + path.partition("://")[2] for path in self.files]
            folder = os.path.commonpath([os.path.dirname(path) for path in paths])
            return [path[len(folder) :].lstrip("/") for path in paths]
        folder = os.path.commonpath([os.path.dirname(path) for path in self.files])
        return [os.path.relpath(path, folder) for path in self.files]

    def read(self, sample: int) -> bytes:
        content = bytearray(self._size_of(sample))
        self.read_into(sample, memoryview(content))
        return bytes(content)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        size = self._size_of(sample)
        target = front_of(buffer, size, self.describe(sample))
        if size == 0:
            raise DataError(f"{self.describe(sample)} is empty (0 bytes): take it out, or write it again")
        units, offsets, _ = self.extents(np.array([sample]))
        if self.objects is not None:
            for _, error in self.read_pieces(units, offsets, [target[:size]]):
                raise error
            return size
        with self._open.lent(int(units[0])) as descriptor:
            self._fill(int(units[0]), descriptor, int(offsets[0]), target[:size])
        return size

    def close(self) -> None:
        """Close the files that nobody reads. They are opened again by the next read."""
        self._open.close()
        if self.objects is not None:
            self.objects.close()

    def prepare_group(self) -> None:
        if self.objects is None:
            READ_PIECES.ask()

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples without the interpreter's lock; see `penstock.store.read_group`."""
        if self.objects is not None:
            return self._read_objects(ids, into, begins)
        loop = READ_PIECES.ask()
        if loop is None:
            return read_one_by_one(self, ids, into, begins)
        layout = self._layout
        if layout is not None and len(self.files) <= min(_FILES_AT_ONCE, ids.size):
            check_kinds(ids, into, begins)
            steps = layout.ends, layout.origins, layout.step_bytes
            pieces = (ids, *steps, _NONE, layout.offsets, layout.sizes_bytes)
            found, are_mapped = self._read_some(loop, range(len(self.files)), pieces, into, begins)
            if found is None:
                check_group(self, ids, into, begins)
            assert found is not None, "the loop and Python check the same"
        else:
            check_group(self, ids, into, begins)
            found, are_mapped = self._read_places(loop, self.extents(ids), into, begins[:-1])
        if are_mapped and not found:
            note_mapped()
        # Read again by Python: errors are described in one place.
        return read_one_by_one(self, ids, into, begins, sorted(found)) if found else []

    def _read_places(
        self, loop: Loop, extents: tuple[Ids, Ids, Ids], into: Bytes, begins: Ids
    ) -> tuple[list[int], bool]:
        """As `_read_some`, a few of the files at a time. extents: of the samples. begins: int64[n]."""
        units, offsets, sizes = extents
        numbers = np.unique(units)
        wrong: list[int] = []
        are_mapped = True
        for first in range(0, numbers.size, _FILES_AT_ONCE):
            some = numbers[first : first + _FILES_AT_ONCE]
            which = np.flatnonzero((some[0] <= units) & (units <= some[-1]))
            places = np.searchsorted(some, units[which]).astype(np.int64, copy=False)
            pieces = (*[_NONE] * 3, 0, places, offsets[which], sizes[which])
            found, is_mapped = self._read_some(loop, some.tolist(), pieces, into, begins[which])
            assert found is not None, "who calls this has checked that all fit"
            wrong += which[found].tolist()
            are_mapped = are_mapped and is_mapped
        return wrong, are_mapped

    def _read_some(
        self, loop: Loop, numbers: Sequence[int], pieces: tuple[Any, ...], into: Bytes, begins: Ids
    ) -> tuple[list[int] | None, bool]:
        """Read samples of some files; return the indices of those that were not read, and if all files are mapped.

        numbers: of the files. pieces, begins: as the loop takes them. None: there is no such sample, or no space.
        """
        files: list[OpenFile | None] = []
        try:
            for unit in numbers:
                try:
                    files.append(self._open.borrow(unit, is_mapped=self._maps))
                except DataError:
                    files.append(None)
            maps = self._maps and is_guarded()
            rows = [
                (-1, 0, 0) if file is None else (file.descriptor, *(file.mapped if maps else (0, 0)))
                for file in files
            ]
            failed = np.empty(begins.size, np.int64)
            count = loop(np.array(rows, np.int64), *pieces, into, begins, failed)
            wrong: list[int] | None = None if count < 0 else failed[:count].tolist()
            for place, file in enumerate(files):
                if wrong is not None and file is not None and rows[place][1] and not self._was_intact(file):
                    of_pieces = pieces[4] if pieces[4].size else self.extents(pieces[0])[0]
                    wrong = sorted({*wrong, *np.flatnonzero(of_pieces == place).tolist()})
        finally:
            self._open.give_back([file for file in files if file is not None])
        return wrong, all(address for _, address, _ in rows)

    def _was_intact(self, file: OpenFile) -> bool:
        """Return whether what was copied from a mapped file was there, and that of the file that was listed."""
        return file.mapped != (0, 0) and self._open.change_of(file) is None

    def unit_bytes(self, units: Ids) -> Ids:
        is_there = (units >= 0) & (units < len(self.files))
        return np.where(is_there, self._file_bytes[np.where(is_there, units, 0)], -1)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        if self.objects is not None:
            for _, error in self.read_pieces(np.full(len(ranges), unit), ranges[:, 0], into):
                raise error
            return
        with self._open.lent(unit) as descriptor:
            for begin, buffer in zip(ranges[:, 0].tolist(), into, strict=True):
                self._fill(unit, descriptor, begin, buffer.cast("B"))

    def facts_of(self, unit: int) -> Facts:
        """Return what the store said of an object when it was listed."""
        return Facts(self.files[unit], int(self._file_bytes[unit]), int(self._file_times[unit]))

    def read_pieces(self, units: Ids, offsets: Ids, into: Sequence[memoryview]) -> Failed:
        """Read ranges of objects, all at once; return those that failed: index and error, ascending.

        units, offsets: int64[n]. into: n writable buffers of the ranges' sizes.
        """
        assert self.objects is not None, "asked of addresses alone"
        return self.objects.read(
            [
                Piece(
                    self.files[unit],
                    offset,
                    buffer.cast("B"),
                    int(self._file_bytes[unit]),
                    int(self._file_times[unit]),
                )
                for unit, offset, buffer in zip(units.tolist(), offsets.tolist(), into, strict=True)
            ]
        )

    def _read_objects(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        check_group(self, ids, into, begins)
        units, offsets, sizes = self.extents(ids)
        buffer, failed = into.data, Failed()
        is_empty = sizes == 0
        for index in np.flatnonzero(is_empty).tolist():
            error = f"{self.describe(int(ids[index]))} is empty (0 bytes): take it out, or write it again"
            failed.append((index, DataError(error)))
        which = np.flatnonzero(~is_empty)
        places = [
            buffer[begin : begin + size]
            for begin, size in zip(begins[which].tolist(), sizes[which].tolist(), strict=True)
        ]
        found = self.read_pieces(units[which], offsets[which], places)
        return sorted(
            failed + [(int(which[index]), error) for index, error in found], key=lambda each: each[0]
        )

    def _size_of(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        return int(self.sizes_bytes[sample])

    def _fill(self, unit: int, descriptor: int, offset: int, target: memoryview) -> None:
        count, path = 0, self.files[unit]
        try:
            while count < len(target):
                got = os.preadv(descriptor, [target[count:]], offset + count)
                if not got:
                    raise changed(path, int(self._file_bytes[unit]), os.fstat(descriptor).st_size)
                count += got
        except DataError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error


def copy_pieces(
    arrays: Mapping[int, Bytes], which: Ids, offsets: Ids, sizes: Ids, into: Bytes, begins: Ids
) -> None:
    """Copy pieces of arrays, without the interpreter's lock once the loop for it is compiled.

    which, offsets, sizes: int64[n], of each piece the number of its array, where it begins there, its bytes. Pieces of
        arrays that are not given, and empty ones, are left out; the others lie in their arrays.
    begins: int64[n], where in `into` each piece goes, which has space for it.
    """
    numbers = np.array(sorted(arrays), np.int64)
    if not numbers.size:
        return
    places = np.minimum(np.searchsorted(numbers, which), numbers.size - 1).astype(np.int64, copy=False)
    some = np.flatnonzero((numbers[places] == which) & (sizes > 0))
    places, offsets, sizes, begins = places[some], offsets[some], sizes[some], begins[some]
    contents = [arrays[number] for number in numbers.tolist()]
    loop = READ_PIECES.ask()
    if loop is None:
        for piece in zip(*(each.tolist() for each in (places, offsets, sizes, begins)), strict=True):
            place, offset, size, begin = piece
            into[begin : begin + size] = contents[place][offset : offset + size]
        return
    # As of files that are mapped, and could not be read.
    files = np.array([(-1, each.ctypes.data, each.size) for each in contents], np.int64)
    failed = np.empty(some.size, np.int64)
    count = loop(files, *[_NONE] * 3, 0, places, offsets, sizes, into, begins, failed)
    if count:
        raise ValueError("a piece lies outside of its array")


def stats_of(files: Sequence[str], objects: Objects | None = None) -> tuple[Ids, Ids]:
    """Return size and time of the last change (ns; of an object its stamp) of each file: int64[files] each.

    objects: what reads addresses.
    Raises: DataError naming the first that is missing or no regular file.
    """
    if objects is not None:
        facts = objects.facts(files)
        return np.array([each.nbytes for each in facts]), np.array([each.stamp for each in facts])
    stats = []
    for path in files:
        try:
            stats.append(os.stat(path))
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error.strerror}; check the path") from error
        if not stat.S_ISREG(stats[-1].st_mode):
            raise DataError(f"{path} is not a regular file: give files")
    sizes, times = ([each.st_size for each in stats], [each.st_mtime_ns for each in stats])
    return np.array(sizes, np.int64), np.array(times, np.int64)
