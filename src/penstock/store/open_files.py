"""Files that stay open, and are compared with what they were; those on local disks can be mapped, too."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from penstock.errors import DataError
from penstock.store.files import unreadable
from penstock.store.group import Ids
from penstock.store.mapped import Mapping, map_file

_LEAST_OPEN, _MOST_OPEN = 16, 1024


class OpenFile:
    """A file that is open. users: how many borrow it now. is_asked: whether it was mapped, where that can be."""

    __slots__ = ("_mapping", "descriptor", "is_asked", "unit", "users")

    def __init__(self, unit: int, descriptor: int) -> None:
        self.unit, self.descriptor, self.users = unit, descriptor, 1
        self._mapping: Mapping | None = None
        self.is_asked = False

    @property
    def mapped(self) -> tuple[int, int]:
        """Where its bytes are in memory, and how many; (0, 0) where they have to be read."""
        mapping = self._mapping
        return (mapping.address, mapping.nbytes) if mapping is not None and mapping.is_intact else (0, 0)

    def map(self, nbytes: int) -> None:
        """Map it, where that can be. One thread at a time may ask."""
        if not self.is_asked:
            self.is_asked = True
            self._mapping = map_file(self.descriptor, nbytes)

    def close(self) -> None:
        os.close(self.descriptor)
        if self._mapping is not None:
            self._mapping.close()


class OpenFiles:
    """Files that stay open, those used least recently closed where there are many.

    Any thread may borrow any of them at any time. files, file_bytes, file_times: see `PackedFiles`.
    """

    def __init__(self, files: tuple[str, ...], file_bytes: Ids, file_times: Ids) -> None:
        self._known = files, file_bytes, file_times
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_OPEN if soft < 0 else min(max(_LEAST_OPEN, soft // 4), _MOST_OPEN)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        #: Protects `_open`, and what is in it: by number, the file used last at the end.
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        weakref.finalize(self, _close_all, self._open).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, self._known

    @contextlib.contextmanager
    def lent(self, unit: int) -> Iterator[int]:
        """Lend the descriptor of a file while the context is open. Raises: as `borrow`."""
        file = self.borrow(unit)
        try:
            yield file.descriptor
        finally:
            self.give_back([file])

    def borrow(self, unit: int, *, is_mapped: bool = False) -> OpenFile:
        """Return a file, open until it is given back. is_mapped: map it, where that can be.

        Raises: DataError if the file cannot be opened, or is not as it was.
        """
        if self._process != os.getpid():  # after a fork, another thread may have held the lock
            self._begin()
        with self._lock:
            file = self._open.get(unit)
            if file is not None:
                file.users += 1
                self._open.move_to_end(unit)
        if file is None:
            file = self._opened(unit)
        # One that is mapped is compared once its samples are copied, and that finds both.
        if not (is_mapped and file.mapped[0]) and (error := self.change_of(file)) is not None:
            with self._lock:  # whoever opens it again may find what was listed
                is_last = self._open.get(unit) is file and file.users == 1
                if is_last:
                    del self._open[unit]
                file.users -= 1
            if is_last:
                file.close()
            raise error
        if is_mapped and not file.is_asked:
            with self._lock:
                file.map(int(self._known[1][unit]))
        return file

    def give_back(self, files: list[OpenFile]) -> None:
        """Borrow some files no longer."""
        with self._lock:
            for file in files:
                file.users -= 1

    def close(self) -> None:
        """Close those that nobody has borrowed."""
        with self._lock:
            idle = [self._open.pop(unit) for unit, file in list(self._open.items()) if not file.users]
        for file in idle:
            file.close()

    def change_of(self, file: OpenFile) -> DataError | None:
        """Return what is wrong with a file that is not as it was."""
        files, file_bytes, file_times = self._known
        unit, found = file.unit, os.fstat(file.descriptor)
        if found.st_size == file_bytes[unit] and found.st_mtime_ns == file_times[unit]:
            return None
        if stat.S_ISDIR(found.st_mode):
            return unreadable(files[unit], OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
        return changed(files[unit], int(file_bytes[unit]), found.st_size)

    def _opened(self, unit: int) -> OpenFile:
        """Open a file and return it, borrowed once."""
        path = self._known[0][unit]
        try:
            # A pipe without a writer is not waited for.
            opened = OpenFile(unit, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            raise unreadable(path, error) from error
        idle = []
        with self._lock:
            file = self._open.setdefault(unit, opened)
            if file is not opened:  # another thread was faster
                file.users += 1
                idle.append(opened)
            excess = len(self._open) - self._most
            if excess > 0:
                unused = [key for key, each in self._open.items() if not each.users]
                idle += [self._open.pop(key) for key in unused[:excess]]
        for each in idle:
            each.close()
        return file


def _close_all(files: OrderedDict[int, OpenFile]) -> None:
    while files:
        files.popitem()[1].close()


def changed(path: str, size: int, found: int) -> DataError:
    """Return what to raise for a file that is another than when its samples were found."""
    how = f"has {'grown' if found > size else 'shrunk'} from {size:,} to {found:,} bytes"
    return DataError(
        f"{path} {'was written again' if found == size else how} since its samples were listed: open the data set "
        "again, once the file is complete"
    )
