"""Memory of batch slots and tiers: one mapping, private to this process or shared with others of the host.

Decided in docs/decisions/0018-bytes-by-the-group.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.closing import Closeable
from penstock.errors import ClosedError, ConfigError

_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_mmap: Any = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
#: No process may change the size of a shared arena: others would be killed when they touch what is gone.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena(Closeable):
    """A mapping of zeros, whose pages the kernel supplies as they are first written.

    A private one is anonymous: a forked process has a copy of it. A shared one is a file without a name (memfd), with a
    descriptor by which other processes map the same memory (`attach`): inherited, or sent over a local socket. Nothing
    is left of either when the last process that maps it has ended, however it ends.

    nbytes: at least 1.
    huge_pages: ask the kernel for pages of 2 MB, for memory that is written over and over. A first write may wait until
        it has gathered one.
    Raises: ConfigError if there are no such bytes in the address space, or no more files may be open.
    """

    #: None once closed.
    _mapping: mmap.mmap | None

    def __init__(self, nbytes: int, *, is_shared: bool = False, huge_pages: bool = False) -> None:
        if nbytes < 1:
            raise ConfigError(f"nbytes is {nbytes}; an arena has at least one byte")
        descriptor = -1
        try:
            if is_shared:
                descriptor = os.memfd_create("penstock-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, nbytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._begin(_mapped(descriptor, nbytes), descriptor)
            if huge_pages:
                with contextlib.suppress(
                    OSError
                ):  # they only save page faults; a kernel without them is fine
                    self.mapping.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, OverflowError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise ConfigError(
                f"an arena of {nbytes:,} bytes is more than can be mapped: {error}; give less memory"
            ) from error

    @classmethod
    def attach(cls, descriptor: int, *, is_read_only: bool = False) -> Self:
        """Return a shared arena of another process.

        descriptor: of that arena, in this process; closed by `close`, or here if this fails.
        is_read_only: what is mapped cannot be written, and its array says so; the descriptor need not allow it either.
        Raises: ConfigError if it is not that of a shared arena.
        """
        arena = cls.__new__(cls)
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("its size can change")
            arena._begin(
                _mapped(descriptor, 0, is_read_only=is_read_only), descriptor, is_read_only=is_read_only
            )
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise ConfigError(f"descriptor {descriptor} is not that of a shared arena: {error}") from error
        return arena

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8[nbytes]. Its views keep the memory, also after `close`. Raises: ClosedError after `close`."""
        array = np.frombuffer(self.mapping, np.uint8)
        array.flags.writeable = not self._is_read_only
        return array

    @property
    def mapping(self) -> mmap.mmap:
        """The memory as a buffer. An array over it, unlike one over `array`, is what its own views refer to.

        Raises: ClosedError after `close`.
        """
        if self._mapping is None:
            raise ClosedError("this arena is closed; make a new one")
        return self._mapping

    @property
    def nbytes(self) -> int:
        return len(self.mapping)

    @property
    def is_shared(self) -> bool:
        return self._close_descriptor is not None

    @property
    def descriptor(self) -> int:
        """By which another process attaches it. Raises: ConfigError for a private arena; ClosedError after `close`."""
        if self._close_descriptor is None:
            raise ConfigError("a private arena has no descriptor: make it with is_shared=True")
        if not self._close_descriptor.alive:
            raise ClosedError("this arena is closed; make a new one")
        return self._descriptor

    def give_back(self, begin: int, end: int) -> None:
        """Give back the pages that lie within bytes [begin, end): they are zeros when they are next read.

        Those of a shared arena are gone in all processes.
        """
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self.mapping.madvise(
                mmap.MADV_REMOVE if self.is_shared else mmap.MADV_DONTNEED, first, last - first
            )

    def close(self) -> None:
        """Close the descriptor and let the memory go, which does once nothing views it. Twice is harmless."""
        self._mapping = None
        if self._close_descriptor is not None:
            self._close_descriptor()

    def _begin(self, mapping: mmap.mmap, descriptor: int, *, is_read_only: bool = False) -> None:
        self._mapping, self._is_read_only = mapping, is_read_only
        self._descriptor = descriptor
        #: None for a private arena.
        self._close_descriptor = weakref.finalize(self, os.close, descriptor) if descriptor >= 0 else None


def _mapped(descriptor: int, nbytes: int, *, is_read_only: bool = False) -> mmap.mmap:
    """Return a mapping: of the descriptor, or a private one for -1. nbytes: 0 for as many as the descriptor has.

    It keeps no descriptor: Python's own, before 3.13, would keep a copy of it as long as anything views the memory. So
    the file takes the place of a private mapping that Python has made, which unmaps either in the end.
    """
    nbytes = nbytes or os.fstat(descriptor).st_size
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if descriptor >= 0:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        access = mmap.PROT_READ if is_read_only else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _mmap(address, nbytes, access, flags, descriptor, 0) == _MAP_FAILED:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return mapping
