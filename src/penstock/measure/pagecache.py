"""Whether a file's bytes are in this host's memory already, and how to get them out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


# SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER of <fcntl.h>.
_WRITE_AND_WAIT = 7
_OPENS_AT_ONCE = 16


def drop_cached(descriptor: int) -> None:
    """Ask the kernel to forget its copy of an open file; it keeps pages that are mapped, and all of a tmpfs.

    A file that was just written is written back first, as dirty pages stay; that costs nothing where none are.
    Raises: OSError if the file is of a kind that has no pages.
    """
    everything = ctypes.c_int64(0)
    _libc.sync_file_range(descriptor, everything, everything, _WRITE_AND_WAIT)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_files(paths: Iterable[str], probed: int = 32) -> list[float | None]:
    """Drop files from the page cache, many at once: each open waits as long as the store's latency.

    probed: how many of them are looked at afterwards. Files that cannot be opened are left to who reads them.
    Returns: of the files that were looked at, the share that stayed in memory; None where it is not known.
    """

    def drop(numbered: tuple[int, str]) -> list[float | None]:
        number, path = numbered
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                drop_cached(descriptor)
                return [cached_share(descriptor)] if number < probed else []
            finally:
                os.close(descriptor)
        return []

    with ThreadPoolExecutor(_OPENS_AT_ONCE) as pool:
        return [share for shares in pool.map(drop, enumerate(paths)) for share in shares]


def cached_share(descriptor: int) -> float | None:
    """Return the share of an open file's pages that are in memory, without reading any.

    Returns: in [0, 1]; 0 for an empty file. None if it is not known: since Linux 5.2 the kernel answers 1 for files
        that neither are this user's nor may be written to (mincore(2)).
    Raises: OSError if the file cannot be mapped.
    """
    share = _mincore_share(descriptor)
    if share < 1.0 or os.fstat(descriptor).st_uid == os.geteuid():
        return share
    return share if os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True) else None


def _mincore_share(descriptor: int) -> float:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0.0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        content = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(content.ctypes.data)
        if _libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        del content  # a mapping that is still looked at cannot be closed
        return float((pages & 1).mean())
