"""What root may do, put aside by a thread for a while, or kept by a process that becomes another user.

Root reads every file, so a test of permissions that root runs must do without; and who becomes another user loses the
right to import from a checkout in a private folder. Linux calls these rights capabilities (man 7 capabilities).
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION_3 = 0x20080522
_PR_SET_KEEPCAPS = 8
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1 << 1, 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _header() -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: the calling thread


def _capabilities() -> ctypes.Array[ctypes.c_uint32]:
    """Return effective, permitted and inheritable capabilities, the lower 32 of each, then the upper."""
    capabilities = (ctypes.c_uint32 * 6)()
    _call("capget", _header(), capabilities)
    return capabilities


@contextmanager
def without_permission(place: Path) -> Iterator[None]:
    """Take a path's permissions away, and this thread's right to pass over that; threads that it starts inherit it.

    Its user remains the same, so that a private folder that it owns stays open to it.
    """
    mode, capabilities = stat.S_IMODE(place.stat().st_mode), _capabilities()
    lowered = (ctypes.c_uint32 * 6)(*capabilities)
    lowered[0] &= ~(_CAP_DAC_OVERRIDE | _CAP_DAC_READ_SEARCH)
    place.chmod(0)
    _call("capset", _header(), lowered)
    try:
        yield
    finally:
        _call("capset", _header(), capabilities)
        place.chmod(mode)


def become(user: int) -> None:
    """Make this process, of one thread, another user's for good; it may still read what root may read."""
    _call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setuid(user)
    kept = (ctypes.c_uint32 * 6)(_CAP_DAC_READ_SEARCH, _CAP_DAC_READ_SEARCH, 0, 0, 0, 0)
    _call("capset", _header(), kept)
