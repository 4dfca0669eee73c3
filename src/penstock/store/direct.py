"""Reads of a file past the page cache, for files that it would hold little of.

A kernel that caches what is read takes pages, copies, and evicts others for it. A direct read begins and ends at whole
blocks and needs aligned memory: each thread has some of its own, from which the bytes that were asked for are copied.
Large samples stay where their blocks were read to, if it does not matter where they begin.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.compiling import Part
from penstock.machine_code import Signature
from penstock.store.group import Bytes, Ids

SIGNATURE = Signature(
    ("int64", "int64[:]", "int32[:]", "int64[:, :]", "uint8[:]", "int64[:]", "int64", "uint8[:]", "int64[:]"),
    results=("int64",),
)
READ_SAMPLES = Part(
    "penstock.store._tier_kernels",
    "read_samples",
    SIGNATURE,
    "how samples on local disks are read",
    "Python reads them, more slowly,",
)

#: A multiple of the blocks of all common disks and file systems.
BLOCK_BYTES = 4096
#: Of each thread that reads. Larger samples are read by so many bytes.
_BUFFER_BYTES = 1 << 20
#: The page cache holds what was used last, and each epoch reads in another order. Of a tier of which it could hold the
#: share x, that finds 1 - a + a ln(a) there, a = 1 - x: half for x = 0.8. A cold read past the cache takes half as long
#: as one through it, four at once, as a loader reads: 0.47 on a virtual disk (2026-11-28; 0.92 one at a time). Taking
#: what is found as free, reads past the cache pay below this share.
_CACHED_SHARE = 0.8
#: From here on new memory is a mapping of its own. The C library would keep the memory of larger ones for each thread
#: after it is freed: twice the largest file, times 32 readers.
LEAST_MAPPED_BYTES = 128 << 10
#: Of the larger pages of most processors.
HUGE_BYTES = 2 << 20
#: madvise(2), MADV_WIPEONFORK, which the module mmap does not name.
_WIPE_ON_FORK = 18
#: Smaller samples are copied: blocks that they have only a part of would take more than an eighth of the memory.
_LEAST_LOOSE_BYTES = 64 << 10


def pays(file_bytes: int, page_cache_bytes: float) -> bool:
    """Return whether a file is read faster past a page cache of so many bytes, in another random order each epoch.

    Measured: `make bench NAME=loader/tiers` prints, of any disk, how much less time such a read takes, and below which
    share it pays; docs/benchmarks.md, "Data three times the memory, the rest on a disk".
    """
    return page_cache_bytes < _CACHED_SHARE * file_bytes


def in_blocks(nbytes: Any) -> Any:
    """Return a number of bytes, or an array of such, rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def new_memory(nbytes: int) -> Bytes:
    """Return uint8[nbytes]; from `LEAST_MAPPED_BYTES` on a mapping, which begins at a block and forked processes share.

    Direct reads need one: beside a fork, a read into memory that is copied on write may end in the other process's
    copy of a page (open(2), O_DIRECT).
    """
    if nbytes < LEAST_MAPPED_BYTES:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def new_buffer(nbytes: int) -> Bytes:
    """Return uint8[>= nbytes], for one thread of this process to read to again and again; in forked ones it is zero.

    It has pages of 2 MB where the kernel has them: a direct read to these is one piece for the disk, not one a block.
    Measured: direct reads of 98 kB of a virtual disk, 68 us each at best; to pages of 4 KiB 158 us (2026-11-28).
    """
    if nbytes < HUGE_BYTES // 2:
        return new_memory(nbytes)
    size = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    memory, first = new_large_pages(size)
    return np.frombuffer(memory, np.uint8)[first : first + size]


def new_large_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping for `new_buffer`, and where so many of its bytes begin: multiples of 2 MB."""
    # One more, of which nothing is touched: not all kernels begin a mapping at a multiple of its pages.
    memory = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        # See `new_memory`. With MADV_DONTFORK a forked process that frees the array would unmap what it has there.
        memory.madvise(_WIPE_ON_FORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without the one or the other
        return mmap.mmap(-1, nbytes), 0
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_BYTES


def lay_out(sizes: Ids, memory_for: Callable[[int], Bytes]) -> tuple[Bytes, Ids] | None:
    """Return memory for samples with all of their blocks, and int64[n + 1]: where the first block of each begins.

    sizes: int64[n], bytes of each. memory_for: returns uint8 of so many bytes at least, from `new_memory`.
    None: they are better copied.
    """
    # Behind a wait for a disk arrays take long, of which there are few items, and so does asking for an address.
    each = sizes.tolist()
    if sum(each) < len(each) * _LEAST_LOOSE_BYTES:
        return None
    end, begins = 0, [0]
    for size in each:
        end += (size + 2 * BLOCK_BYTES - 2) // BLOCK_BYTES * BLOCK_BYTES
        begins.append(end)
    return memory_for(max(end, LEAST_MAPPED_BYTES)), np.array(begins)


class DirectFile:
    """A file that is open for direct reads. Any thread may call anything.

    file: its descriptor, -1 once it is closed.
    path: of a file on a file system that may refuse them.
    Raises: OSError; EINVAL where the file system has no direct reads, such as tmpfs before Linux 6.6.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._threads = threading.local()

    def read_pieces(self, places: Sequence[Sequence[int]], into: Bytes, begins: Sequence[int]) -> list[int]:
        """Read pieces of the file; return the indices of those that do not lie in it.

        places: of each piece where it begins and ends. begins: where it goes to in `into`.
        Raises: OSError where the disk fails; EINVAL where it wants other blocks.
        """
        buffer = self.buffer()
        return [
            index
            for index in sorted(range(len(places)), key=lambda index: places[index][0])
            if not self._was_read(places[index], into, begins[index], buffer)
        ]

    def close(self) -> None:
        """Twice is harmless."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def _was_read(self, place: Sequence[int], into: Bytes, at: int, buffer: Bytes) -> bool:
        begin, end = place
        if begin < 0:
            return False
        while begin < end:
            first = begin % BLOCK_BYTES
            wanted = min(in_blocks(first + end - begin), _BUFFER_BYTES)
            found = os.preadv(self.file, [buffer[:wanted].data], begin - first)
            count = min(found - first, end - begin)
            if count <= 0:
                return False
            into[at : at + count] = buffer[first : first + count]
            begin, at = begin + count, at + count
        return True

    def buffer(self) -> Bytes:
        """Return aligned memory of this thread's own."""
        found: Bytes | None = getattr(self._threads, "buffer", None)
        if found is None:
            found = self._threads.buffer = new_memory(_BUFFER_BYTES)
        return found
