"""Samples that lie in a few files, many to a file: shards, arrays, records.

A file is a *unit* of `penstock.store.RangedSource`. Its descriptor stays open, so that a sample costs a network file
system one request. Before each read the file is compared with what it was when its samples were found.

Decided in docs/decisions/0023-samples-that-share-files.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.compiling import Part
from penstock.errors import DataError
from penstock.machine_code import Signature
from penstock.store.catalog import Catalog
from penstock.store.files import unreadable
from penstock.store.group import Bytes, Failed, Ids, check_group, front_of, read_one_by_one
from penstock.store.labels import Labels
from penstock.store.object_store import Facts, Piece
from penstock.store.pack_file import named_classes
from penstock.store.remote import Objects
from penstock.store.selection import Selectable

SIGNATURE = Signature(
    ("int64[:]", "int64[:]", "int64[:]", "uint8[:]", "int64[:]", "int64[:]"), results=("int64",)
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
_LEAST_OPEN, _MOST_OPEN = 16, 1024


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

    @property
    def file_times(self) -> Ids:
        """int64[files], when each was changed last (ns), of an object its stamp."""
        return self._file_times

    @abstractmethod
    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        """Return file, offset and length of each sample; see `RangedSource`. ids: samples that exist."""

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
        check_group(self, ids, into, begins)
        units, offsets, sizes = self.extents(ids)
        numbers = np.unique(units)
        wrong: list[int] = []
        for first in range(0, numbers.size, _FILES_AT_ONCE):
            those = numbers[first : first + _FILES_AT_ONCE]
            if those.size == numbers.size:
                which = np.arange(ids.size)
            else:
                which = np.flatnonzero((those[0] <= units) & (units <= those[-1]))
            failed = np.empty(which.size, np.int64)
            with contextlib.ExitStack() as stack:
                descriptors = np.array([self._lent_or_none(stack, unit) for unit in those.tolist()], np.int64)
                count = loop(
                    descriptors[np.searchsorted(those, units[which])],
                    offsets[which],
                    sizes[which],
                    into,
                    begins[which],
                    failed,
                )
            wrong += which[failed[:count]].tolist()
        # Read again by Python: errors are described in one place.
        return read_one_by_one(self, ids, into, begins, sorted(wrong)) if wrong else []

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

    def _lent_or_none(self, stack: contextlib.ExitStack, unit: int) -> int:
        """Return a descriptor; -1 where there is none, which fails to be read from."""
        try:
            return stack.enter_context(self._open.lent(unit))
        except DataError:
            return -1

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


class OpenFiles:
    """Descriptors of files that stay open, those used least recently closed where there are many.

    Any thread may borrow any of them at any time. files, file_bytes, file_times: see `PackedFiles`.
    """

    def __init__(self, files: tuple[str, ...], file_bytes: Ids, file_times: Ids) -> None:
        self._known = files, file_bytes, file_times
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_OPEN if soft < 0 else min(max(_LEAST_OPEN, soft // 4), _MOST_OPEN)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        #: Protects `_open`: by file its descriptor and how many borrow it, the one used last at the end.
        self._lock = threading.Lock()
        self._open: OrderedDict[int, list[int]] = OrderedDict()
        weakref.finalize(self, _close_all, self._open).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, self._known

    @contextlib.contextmanager
    def lent(self, unit: int) -> Iterator[int]:
        """Lend the descriptor of a file while the context is open.

        Raises: DataError if the file cannot be opened, or is not as it was.
        """
        if self._process != os.getpid():  # after a fork, another thread may have held the lock
            self._begin()
        with self._lock:
            entry = self._open.get(unit)
            if entry is not None:
                entry[1] += 1
                self._open.move_to_end(unit)
        if entry is None:
            entry = self._opened(unit)
        try:
            self._check(unit, entry[0])
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def close(self) -> None:
        """Close those that nobody has borrowed."""
        with self._lock:
            idle = [unit for unit, (_, users) in self._open.items() if not users]
            descriptors = [self._open.pop(unit)[0] for unit in idle]
        for each in descriptors:
            os.close(each)

    def _opened(self, unit: int) -> list[int]:
        """Open a file and return its entry, borrowed once."""
        path = self._known[0][unit]
        try:
            # A pipe without a writer is not waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(path, error) from error
        idle = []
        with self._lock:
            entry = self._open.get(unit)
            if entry is None:
                entry = self._open[unit] = [descriptor, 1]
            else:  # another thread was faster
                entry[1] += 1
                idle.append(descriptor)
            excess = len(self._open) - self._most
            if excess > 0:
                for other in [key for key, (_, users) in self._open.items() if not users][:excess]:
                    idle.append(self._open.pop(other)[0])
        for each in idle:
            os.close(each)
        return entry

    def _check(self, unit: int, descriptor: int) -> None:
        files, file_bytes, file_times = self._known
        found = os.fstat(descriptor)
        if found.st_size == file_bytes[unit] and found.st_mtime_ns == file_times[unit]:
            return
        with self._lock:  # whoever opens it again may find what was listed
            if (entry := self._open.get(unit)) is not None and entry[0] == descriptor and entry[1] == 1:
                del self._open[unit]
                os.close(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise unreadable(files[unit], OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
        raise changed(files[unit], int(file_bytes[unit]), found.st_size)


def _close_all(entries: OrderedDict[int, list[int]]) -> None:
    while entries:
        os.close(entries.popitem()[1][0])


def changed(path: str, size: int, found: int) -> DataError:
    """Return what to raise for a file that is another than when its samples were found."""
    how = f"has {'grown' if found > size else 'shrunk'} from {size:,} to {found:,} bytes"
    return DataError(
        f"{path} {'was written again' if found == size else how} since its samples were listed: open the data set "
        "again, once the file is complete"
    )


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
