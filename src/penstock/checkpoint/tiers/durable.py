"""A file that appears whole or not at all, and outlives a loss of power once it is there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import DataError
from penstock.files import sync_folder


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which takes the place of `path` at the end of the block, and is removed if that raises.

    Raises: DataError naming the file.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        try:
            with open(unfinished, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
