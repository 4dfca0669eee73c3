"""Files that are replaced atomically, and folders that outlive a loss of power."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds all of it, or what was there before. A loss of power may undo it."""
    # Hosts that share the folder may have processes of the same number.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.write_bytes(data)
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
