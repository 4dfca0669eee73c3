"""Whether a file's bytes are in this host's memory already, and how to get them out of it."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def drop_cached(path: str) -> None:
    """Ask the kernel to forget its copy of a file; it keeps pages that are dirty or mapped, and all of a
    tmpfs.

    Raises: OSError if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(path: str) -> float:
    """Return the share of a file's pages that are in memory, without reading any.

    The kernel answers 1 for files that this user could not write to.
    Returns: in [0, 1]; 0 for an empty file.
    Raises: OSError if the file cannot be mapped.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return 0.0
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        content = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(content.ctypes.data)
        if _libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        del content  # a mapping that is still looked at cannot be closed
        return float((pages & 1).mean())
