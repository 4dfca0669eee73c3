"""A file that is replaced whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either whole or the one that was there before, unless power is lost."""
    # Hosts that share the folder may have processes of the same number.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
