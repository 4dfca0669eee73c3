"""Where snapshots' files are kept: the seam between the snapshot store and a file system or an object store."""

from __future__ import annotations

from typing import Protocol

from penstock.checkpoint.state.tensors import Bytes

#: The file that makes a folder a snapshot: it is written last.
MANIFEST = "manifest.json"


class Reader(Protocol):
    """An open file of a snapshot. Used by several threads at once."""

    @property
    def nbytes(self) -> int:
        """Return the file's size."""
        ...

    @property
    def reads_at_once(self) -> int:
        """Return how many reads to have under way so that they take the least time together."""
        ...

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises: DataError if they cannot be read or the file ends before; it names the file.
        """
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Writer(Protocol):
    """A new file of a snapshot that is being written, from its beginning to its end."""

    def write(self, *pieces: Bytes) -> None:
        """Append bytes; the pieces may be reused once this returns. Raises: DataError naming the file."""
        ...

    def finish(self) -> None:
        """Return once the file's bytes would outlive a loss of power. Raises: DataError naming the file."""
        ...

    def abandon(self) -> None:
        """Let go of the file, unfinished; harmless after `finish`."""
        ...


class Draft(Protocol):
    """A snapshot that is being written: nobody sees it before it is committed."""

    def create(self, file: str) -> Writer:
        """Begin a file."""
        ...

    def commit(self, manifest: bytes) -> None:
        """Write the manifest and make the snapshot visible; durable when this returns.

        Raises: DataError; the snapshot is then either not visible or whole.
        """
        ...

    def abort(self) -> None:
        """Remove what was written; never raises for what is gone already."""
        ...


class Tier(Protocol):
    """A place for snapshots, each a folder of a few files."""

    @property
    def name(self) -> str:
        """Return what messages call it: its path or address."""
        ...

    def where(self, folder: str) -> str:
        """Return what messages call a snapshot's folder: where somebody finds it. Nothing is asked of the tier."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the committed snapshots' folders, sorted. Raises: DataError."""
        ...

    def read(self, folder: str, file: str) -> bytes:
        """Return a small file. Raises: FileNotFoundError, DataError naming it."""
        ...

    def open(self, folder: str, file: str) -> Reader:
        """Open a file for reading. Raises: FileNotFoundError, DataError naming it."""
        ...

    def begin(self, folder: str, uid: str, *, join: bool = False) -> Draft:
        """Begin a snapshot.

        uid: of this attempt, letters and digits; ranks that write one snapshot together name the same.
        join: whether another rank began it.
        Raises: DataError if the tier refuses.
        """
        ...

    def delete(self, folder: str) -> None:
        """Remove a snapshot: after a crash on the way it is whole or gone. Raises: FileNotFoundError, DataError."""
        ...

    def free_bytes(self) -> int | None:
        """Return how many bytes could be written; None where nobody can say."""
        ...

    def sweep(self) -> list[str]:
        """Remove what unfinished saves and deletes left, and return its names. Raises: DataError."""
        ...
