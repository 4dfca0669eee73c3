"""Snapshots in a folder of a mounted file system: made visible by one rename, durable by fsync of files and folders."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path

from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.tier import MANIFEST
from penstock.errors import DataError
from penstock.files import sync_folder

_UNFINISHED = ".unfinished-"
_DELETED = ".deleted-"
#: One call of the system takes no more.
_MOST_PIECES = 1024
#: The device begins to write when so many bytes wait for it: 622 MB are synced in 0.16 s instead of 0.27 s.
_BEGIN_BYTES = 8 << 20


class LocalTier:
    """Snapshots below a folder: a `Tier`, whose drafts, writers and readers say no more than that does.

        FOLDER/step-000000000100/            a snapshot
        FOLDER/.unfinished-step-...-UID/     one that is being written, or was when the process died
        FOLDER/.deleted-step-...-UID/        one that is being removed

    Folders change their state by a rename, which a crash leaves done or not done.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use a folder, which is made when something is first written.

        Raises: DataError if it is a file, or on a file system such as /proc where nobody makes folders.

        path: followed from where the process is now, whatever its folder is later.
        """
        self._given = os.fspath(path)
        with named_errors(Path(path)):
            self.path = Path(path).absolute()
            nearest = next(above for above in (self.path, *self.path.parents) if above.exists())
            if not nearest.is_dir():
                raise DataError(f"{nearest} is a file: name a folder in which snapshots are to be kept")
            #: Whether it was there.
            self._was_there = nearest == self.path
            if not self._was_there and shutil.disk_usage(nearest).total == 0:
                _check_takes_folders(nearest)
        #: Whether its name would outlive a loss of power.
        self._is_made = False

    def make(self) -> None:
        """Make the folder if it is missing. Raises: DataError if it cannot be, or was there and is gone."""
        self._check_there()
        if self._is_made:
            return
        with named_errors(self.path):
            above = [self.path, *self.path.parents]
            deepest = next(place for place, folder in enumerate(above) if folder.exists())
            # One after the other, and the one that was there, too: a process may have made it and died before this.
            for folder in reversed(above[: deepest + 1]):
                folder.mkdir(exist_ok=True)
                with suppress(PermissionError):  # of a folder that may be entered and not listed
                    sync_folder(folder.parent)
        self._is_made = self._was_there = True

    def _check_there(self) -> bool:
        """Return whether the folder is there. Raises: DataError if it is not, and was."""
        with named_errors(self.path):
            is_there = self.path.exists()
        if self._was_there and not is_there:
            raise DataError(
                f"{self.path} is gone: the folder with the snapshots was moved or removed meanwhile"
            )
        self._was_there = is_there
        return is_there

    def is_gone(self) -> bool:
        """Return whether the folder was there and is not any more, such as a disk that was unmounted."""
        try:
            os.stat(self.path)
        except OSError as error:
            return self._was_there and isinstance(error, FileNotFoundError)
        return False

    @property
    def name(self) -> str:
        """Return the folder's path: as it was given, while that leads there."""
        try:
            leads_there = os.path.abspath(self._given) == os.path.abspath(self.path)
        except OSError:  # where the process is was removed
            leads_there = False
        return str(Path(self._given)) if leads_there else str(self.path)

    def where(self, folder: str) -> str:
        return os.path.join(self.name, folder)

    def folders(self) -> list[str]:
        if not self._check_there():
            return []
        with named_errors(self.path), os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())

    def read(self, folder: str, file: str) -> bytes:
        path = self.path / folder / file
        descriptor, _ = _open_plain(path)
        with named_errors(path), os.fdopen(descriptor, "rb") as opened:
            return opened.read()

    def open(self, folder: str, file: str) -> LocalReader:
        return LocalReader(self.path / folder / file)

    def begin(self, folder: str, uid: str, *, join: bool = False) -> LocalDraft:
        unfinished = self.path / f"{_UNFINISHED}{folder}-{uid}"
        if not join:
            if not self._is_made:
                self.make()
            try:
                unfinished.mkdir()
            except OSError as error:
                self._check_there()
                raise _named(error, unfinished) from error
        return LocalDraft(unfinished, self.path / folder, is_joined=join)

    def put(self, file: str, data: bytes) -> None:
        """Write a small file next to the snapshots: it appears complete or not at all. Raises: DataError."""
        unfinished = self.path / f"{_UNFINISHED}{file.removeprefix('.')}-{secrets.token_hex(4)}"
        _write_synced(unfinished, data)
        with named_errors(self.path / file):
            unfinished.rename(self.path / file)
            sync_folder(self.path)

    def delete(self, folder: str) -> None:
        doomed = self.path / f"{_DELETED}{folder}-{secrets.token_hex(4)}"
        with named_errors(self.path / folder):
            is_there = (self.path / folder).exists()
        if not is_there:
            raise FileNotFoundError(f"{self.path} holds no snapshot {folder}")
        with named_errors(self.path / folder):
            (self.path / folder).rename(doomed)
            # Else a loss of power could bring back the folder's name without the files that are unlinked next.
            sync_folder(self.path)
            _remove(doomed)

    def free_bytes(self) -> int | None:
        """Return how many bytes a user without privileges could write; None if that is unknown. Raises: DataError."""
        self._check_there()
        with named_errors(self.path):
            there = next(above for above in (self.path, *self.path.parents) if above.exists())
            usage = shutil.disk_usage(there)
            return usage.free if usage.total else None  # a file system that does not say how large it is

    def sweep(self) -> list[str]:
        if not self._check_there():
            return []
        with named_errors(self.path):
            # What a process named and died before it synced is durable from here on. Else a loss of power could bring
            # a name back without the files that are unlinked next, or keep a difference and lose what it refers to.
            sync_folder(self.path)
        with named_errors(self.path), os.scandir(self.path) as entries:
            left = sorted(entry.name for entry in entries if entry.name.startswith((_UNFINISHED, _DELETED)))
        for name in left:
            with named_errors(self.path / name):
                _remove(self.path / name)
        return left


@dataclass(eq=False)
class LocalDraft:
    """A snapshot that is being written into a folder that nobody looks at. is_joined: another rank began it."""

    unfinished: Path
    final: Path
    is_joined: bool

    def create(self, file: str) -> LocalWriter:
        """Begin a file. Raises: DataError naming it, or the folder where another rank began in another one."""
        if self.is_joined and not self.unfinished.is_dir():
            raise DataError(
                f"{self.final.parent} is another folder here than where rank 0 began {self.final.name}: all ranks "
                "must see the same one, on a file system that their hosts share"
            )
        return LocalWriter(self.unfinished / file)

    def open(self, file: str) -> LocalReader:
        """Open a finished file for reading. Raises: FileNotFoundError, DataError naming it."""
        return LocalReader(self.unfinished / file)

    def commit(self, manifest: bytes) -> None:
        _write_synced(self.unfinished / MANIFEST, manifest)
        try:
            # The entries of its files, those that other ranks made included.
            sync_folder(self.unfinished)
            self.unfinished.rename(self.final)
            sync_folder(self.final.parent)
        except OSError as error:
            raise _named(error, self.final) from error

    def abort(self) -> None:
        shutil.rmtree(self.unfinished, ignore_errors=True)


class OpenFile:
    """A descriptor, closed once."""

    _path: Path
    _descriptor: int

    def close(self) -> None:
        """Let go of the file; twice is harmless. Raises: DataError naming the file."""
        # Not again where it fails: by then the number may be another file's.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                raise _named(error, self._path) from error


class LocalWriter(OpenFile):
    """A new file, written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _named(error, path) from error
        #: Written so far, and of these those that the system was asked to move to the device.
        self._nbytes = self._begun_bytes = 0

    def write(self, *pieces: Bytes) -> None:
        left = deque(map(attrgetter("data"), pieces))
        try:
            while left:
                written = os.writev(self._descriptor, list(islice(left, _MOST_PIECES)))
                self._nbytes += written
                while left and written >= len(left[0]):
                    written -= len(left.popleft())
                if written:
                    left[0] = left[0][written:]
        except OSError as error:
            raise _named(error, self._path) from error
        if self._nbytes - self._begun_bytes >= _BEGIN_BYTES:
            self._begin_writing()

    def _begin_writing(self) -> None:
        """Have the system begin to move what was written to the device, so that `finish` waits for little.

        Pages that are still to be written stay in memory, whatever the name of the advice says.
        """
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system may know no advice; fsync reports what fails
                length = self._nbytes - self._begun_bytes
                os.posix_fadvise(self._descriptor, self._begun_bytes, length, os.POSIX_FADV_DONTNEED)
        self._begun_bytes = self._nbytes

    def finish(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _named(error, self._path) from error
        self.close()

    abandon = OpenFile.close


class LocalReader(OpenFile):
    """An open file."""

    #: One is copied from the page cache while the other waits for the disk.
    reads_at_once = 2

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor, self.nbytes = _open_plain(path)

    def read_into(self, offset: int, out: Bytes) -> None:
        left = out.data
        while left:
            try:
                got = os.preadv(self._descriptor, [left], offset)
            except OSError as error:
                raise _named(error, self._path) from error
            if not got:
                raise DataError(
                    f"{self._path} ends at {offset} bytes, {len(left)} before what was to be read"
                )
            offset += got
            left = left[got:]


def _open_plain(path: Path) -> tuple[int, int]:
    """Return the descriptor of a file opened for reading, and the file's size.

    Raises: DataError naming it, also if it is a pipe, a device or a folder; FileNotFoundError.
    """
    descriptor = -1
    try:
        # A pipe would have to be waited for, and a device may have no end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a plain file")
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, (FileNotFoundError, DataError)):
            raise
        raise _named(error, path) from error
    return descriptor, status.st_size


def _write_synced(path: Path, data: bytes) -> None:
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _named(error, path) from error


def _remove(path: Path) -> None:
    """Remove a folder and what is in it; of a link to one, which somebody put in its place, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _check_takes_folders(folder: Path) -> None:
    """Raise DataError if no folder can be made in this one."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    except OSError as error:
        raise DataError(f"{folder} takes no folders ({error.strerror}): keep snapshots on a disk") from error


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turn what the system refuses into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> DataError:
    """Return the DataError of what the system refused, which names the file."""
    # shutil.rmtree names what is in the folder without the folder.
    named = isinstance(error.filename, str) and os.path.isabs(error.filename)
    return DataError(f"{error.filename if named else path}: {error.strerror or error}")
