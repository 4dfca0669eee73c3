"""A file of the kernel's counters, read again and again while it stays open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MOST_BYTES = 1 << 16


class KernelFile:
    """One file below /proc or /sys. Close it; twice is harmless."""

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, -1
        self.reopen()

    def reopen(self) -> None:
        """Open what is now at its path, such as a device that was put back."""
        self.close()
        with suppress(OSError):  # another user's process, a kernel without it
            self._number = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """Return what it says now; nothing where it is missing or its device or process went."""
        if self._number < 0:
            return b""
        try:
            return os.pread(self._number, _MOST_BYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
            self._number = -1
