"""Files that are replaced atomically, and folders that outlive a loss of power."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import DataError


def read_text(path: Path) -> str:
    """Return what a text file has. Raises: DataError naming it where that is not UTF-8; OSError."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds all of it, or what was there before. A loss of power may undo it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which takes the place of `path` in the end, unless the block raises."""
    # Hosts that share the folder may have processes of the same number.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Return once the names in a folder would outlive a loss of power. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
