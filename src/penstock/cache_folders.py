"""Where Penstock keeps on disk what it can make again: kernels, catalogs.

The folder is Penstock's own: $PENSTOCK_CACHE, else `penstock` in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, else
(not writable, full, or no home) a folder of the user below the system's temporary one. What is in a folder that cannot
be written, as in a read-only image, is used where it is, except small kernels, which numba loads (`penstock.kernel`).
A stranger's folder is neither read nor written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


class Folders(NamedTuple):
    """Where one kind of thing is.

    read: looked for in these, the first one first. kept: written to this one; None if no folder can be written.
    note: why $PENSTOCK_CACHE is not the one that is written, or "".
    """

    read: tuple[Path, ...]
    kept: Path | None
    note: str


def find_folders(*names: str, least_bytes: int) -> Folders:
    """Return where things of a kind are; the folder that is written is made.

    names: of the folder and the one above it, below Penstock's own. least_bytes: a disk with less free space is full.
    """
    read: list[Path] = []
    kept: Path | None = None
    asked, note = os.environ.get("PENSTOCK_CACHE"), ""
    for parent in _parents():
        folder = parent.joinpath(*names)
        problem = "" if kept is not None else _why_not_written(parent, folder, least_bytes)
        with contextlib.suppress(OSError):  # a disk that fails
            # Machine code from a stranger's folder is not run.
            if _is_own(parent) and folder.is_dir():
                read.append(folder)
        if problem and asked and str(parent) == asked:
            note = f"PENSTOCK_CACHE is {asked!r}, which {problem}"
        if not problem and kept is None:
            kept = folder
    return Folders(tuple(read), kept, note)


def remove_unused(folder: Path, days: float) -> None:
    """Remove what is in a folder and was not touched for so long."""
    oldest = time.time() - days * 24 * 3600
    entries: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that may be written but not read
        entries = list(folder.iterdir())
    for entry in entries:
        with contextlib.suppress(OSError):  # another process removes it, too
            if entry.stat().st_mtime >= oldest:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _parents() -> list[Path]:
    """Return the folders to try, the preferred one first."""
    own = os.environ.get("PENSTOCK_CACHE")
    if not own:
        caches = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
        own = os.path.join(caches or os.path.expanduser("~/.cache"), "penstock")
    # Without $HOME, a user whom the system does not know has no home: the tilde stays.
    parents = [] if own.startswith("~") else [Path(own)]
    with contextlib.suppress(OSError):  # there is no temporary folder that can be written
        parents.append(Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}")
    return parents


def _why_not_written(parent: Path, folder: Path, least_bytes: int) -> str:
    """Return what keeps files from being written to a folder, or "" if nothing does; make the folder."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(parent):
            return "belongs to another user"
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        system = os.statvfs(folder)
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return "is full" if system.f_bavail * system.f_frsize < least_bytes else ""


def _is_own(parent: Path) -> bool:
    # The effective user, who makes the folder: a server may have put root's rights aside.
    with contextlib.suppress(OSError):
        return parent.stat().st_uid in (os.geteuid(), 0)
    return False
