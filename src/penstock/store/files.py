"""Reading whole files whose size is known, with one system call for the bytes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Part
from penstock.errors import DataError, PenstockError
from penstock.machine_code import Signature
from penstock.store.catalog import Catalog
from penstock.store.group import check_group, front_of, read_one_by_one
from penstock.store.labels import in_classes
from penstock.store.object_store import Piece, is_address, joined, without_secrets
from penstock.store.remote import Objects
from penstock.store.selection import Selectable
from penstock.units import format_count

SIGNATURE = Signature(
    ("uint8[:]", "uint8[:]", "int64[:]", "int64[:]", "int64[:]", "uint8[:]", "int64[:]", "int64[:]"),
    results=("int64",),
)
READ_FILES = Part(
    "penstock.store._files_kernels",
    "read_files",
    SIGNATURE,
    "how files are read",
    "Python reads them, more slowly,",
)


class FileSource(Selectable):
    """Samples that are one file each; made to be used by what lists the files, such as `ImageFolder`.

    It takes 24 bytes per sample and the length of its name.

    root: absolute path or address of the folder that the catalog's names are relative to.
    catalog: what there is. objects: what reads it, where its samples are objects of a remote store.

    Attributes: root, catalog, and the catalog's sizes_bytes, labels, classes and names.
    """

    def __init__(self, root: str, catalog: Catalog, objects: Objects | None = None) -> None:
        self.root = root
        self._stamps = catalog.object_stamps
        #: None where files are read.
        self.objects = (objects or Objects()) if self._stamps is not None else None
        self.catalog = catalog
        self.sizes_bytes, self.labels, self.classes = catalog.sizes_bytes, catalog.labels, catalog.classes
        #: int64[samples] of `_starts`: where each name begins.
        self.names = catalog.names
        self._starts = catalog.starts()[:-1]
        #: Put before a name that is not absolute.
        self._prefix = joined(root, "")
        self._prefix_bytes = np.frombuffer(os.fsencode(self._prefix), np.uint8)

    def _take_classes(self, classes: Sequence[str] | None) -> None:
        """Number labels by the user's classes, where some are given."""
        self.labels, self.classes = in_classes(classes, self.labels, self.classes, self.describe)

    def __len__(self) -> int:
        return self._starts.size

    def __repr__(self) -> str:
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        return f"{type(self).__name__}({without_secrets(self.root)!r}): {format_count(len(self), 'sample')}, {classes}"

    def path_of(self, sample: int) -> str:
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        begin = int(self._starts[sample])
        end = int(self._starts[sample + 1]) if sample + 1 < len(self) else self.names.size
        name = os.fsdecode(self.names[begin : end - 1].tobytes())
        is_absolute = name.startswith("/") if self._stamps is None else is_address(name)
        return name if is_absolute else self._prefix + name

    def describe(self, sample: int) -> str:
        return without_secrets(self.path_of(sample)) if self._stamps is not None else self.path_of(sample)

    def close(self) -> None:
        """End what waits for a remote store."""
        if self.objects is not None:
            self.objects.close()

    def read(self, sample: int) -> bytes:
        if self.objects is not None:
            path, content = self.path_of(sample), bytearray(int(self.sizes_bytes[sample]))
            self._read_object(path, sample, memoryview(content))
            return bytes(content)
        return read_file(self.path_of(sample), int(self.sizes_bytes[sample]))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        path, size = self.path_of(sample), int(self.sizes_bytes[sample])
        if self.objects is None:
            read_file_into(path, size, buffer)
            return size
        self._read_object(path, sample, front_of(buffer, size, path))
        return size

    def prepare_group(self) -> None:
        if self.objects is None:
            READ_FILES.ask()

    def read_group(
        self, ids: NDArray[np.int64], into: NDArray[np.uint8], begins: NDArray[np.int64]
    ) -> list[tuple[int, Exception]]:
        """Read samples without the interpreter's lock; see `penstock.store.read_group`."""
        if self.objects is not None:
            check_group(self, ids, into, begins)
            firsts, sizes, buffer = begins[:-1].tolist(), self.sizes_bytes[ids].tolist(), into.data
            return self._read_objects(
                ids, [buffer[first : first + size] for first, size in zip(firsts, sizes, strict=True)]
            )
        loop = READ_FILES.ask()
        if loop is None:
            return read_one_by_one(self, ids, into, begins)
        failed = np.empty(ids.size, np.int64)
        files = self._prefix_bytes, self.names, self._starts, self.sizes_bytes
        count = loop(*files, ids, into, begins, failed)
        if not count:
            return []
        if count < 0:
            check_group(self, ids, into, begins)
            raise AssertionError("the compiled loop refuses a group that check_group accepts")
        # Read again by Python: errors are described in one place, and what the loop does not wait for is waited for: a
        # file on tape, or one that another process has a lease on.
        return read_one_by_one(self, ids, into, begins, failed[:count].tolist())

    def _read_object(self, path: str, sample: int, target: memoryview) -> None:
        for _, error in self._read_objects(np.array([sample]), [target]):
            raise error

    def _read_objects(self, ids: NDArray[np.int64], into: list[memoryview]) -> list[tuple[int, Exception]]:
        """Read objects, all at once; return those that failed: index and error, ascending."""
        assert self.objects is not None, "asked of a remote store alone"
        assert self._stamps is not None, "it lists objects"
        paths = [self.path_of(sample) for sample in ids.tolist()]
        failed: list[tuple[int, Exception]] = [
            (index, _changed(path, 0)) for index, path in enumerate(paths) if not len(into[index])
        ]
        stamps = self._stamps[ids].tolist()
        found = self.objects.read(
            [
                Piece(path, 0, buffer, len(buffer), stamp)
                for path, buffer, stamp in zip(paths, into, stamps, strict=True)
            ]
        )
        return sorted(failed + found, key=lambda each: each[0])


def read_file(path: str, size: int) -> bytes:
    """Return the content of a file of a known size.

    Raises: DataError as `read_file_into`.
    """
    descriptor = _open(path, size)
    try:
        data = os.pread(descriptor, size + 1, 0)
        # A read may return less than there is (a signal, a network file system's own limits) and is
        # continued.
        while 0 < len(data) < size:
            more = os.pread(descriptor, size + 1 - len(data), len(data))
            if not more:
                break
            data += more
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise _changed(path, size)
    return data


def read_file_into(
    path: str, size: int, buffer: memoryview, *, opened: Callable[[int], None] | None = None
) -> None:
    """Fill the front of a buffer with the content of a file of a known size.

    opened: called with the file's descriptor before its content is read.
    Raises: DataError if the file is missing, not allowed, empty, or of another size by now; ConfigError if
        the buffer is smaller than `size`.
    """
    target = front_of(buffer, size, path)
    descriptor = _open(path, size)
    # One byte more than the size is asked for: in the same call it shows that the file has grown.
    beyond = bytearray(1)
    try:
        if opened is not None:
            opened(descriptor)
        count = got = os.preadv(descriptor, [target[:size], beyond], 0)
        while got and count < size:
            got = os.preadv(descriptor, [target[count:size], beyond], count)
            count += got
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if count != size:
        raise _changed(path, size)


def _open(path: str, size: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if size == 0:
            os.close(descriptor)
            raise _changed(path, 0)
        return descriptor
    except DataError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def _changed(path: str, size: int) -> DataError:
    """Return what to raise for a file that is empty, or has not the size that it was listed with."""
    try:
        found = 0 if is_address(path) else os.stat(path).st_size
    except OSError as error:
        return unreadable(path, error)
    if size == found == 0:
        return DataError(
            f"{path} is empty (0 bytes when the data set was listed): remove it or write it again"
        )
    how = "grown" if found > size else "shrunk"
    return DataError(
        f"{path} has {how} from {size:,} to {found:,} bytes since the data set was listed: open the data set "
        'with refresh="full" once it is written, or remove its catalog by `penstock cache clear FOLDER`'
    )


@contextlib.contextmanager
def named_as(path: str, kind: str) -> Iterator[None]:
    """Raise DataError naming a file for whatever a library raises while it looks at the bytes.

    kind: of file that it should be. Of damaged bytes libraries raise errors of nearly every type.
    """
    try:
        yield
    except PenstockError:
        raise
    except PermissionError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        raise DataError(
            f"{path} is no complete {kind} ({error!s:.400}): write it again, or take it out"
        ) from error


def unreadable(path: str, error: OSError) -> DataError:
    """Return what to raise for a file that was listed and cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"{path} has vanished since the data set was listed: restore it, or open the data set again, "
            'with refresh="auto" or "full"'
        )
    if isinstance(error, PermissionError):
        return DataError(
            f"{path} may not be read by user {os.geteuid()}: give read permission to it and its folders"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DataError(f"{path}: too many open files: raise `ulimit -n` or use fewer readers")
    return DataError(f"{path} cannot be read: {error.strerror}; check the store that holds it")
