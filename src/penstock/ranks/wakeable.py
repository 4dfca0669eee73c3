"""How any thread ends the wait of the one that receives a carrier's messages."""

from __future__ import annotations

import contextlib
import os


class Wakeable:
    """The base of a carrier: has a descriptor that is readable from `wake` until `_sleep_again`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Have `receive` return."""
        with contextlib.suppress(BlockingIOError):  # it is to return already
            os.eventfd_write(self._wake, 1)

    @property
    def wakes_by(self) -> int:
        """The descriptor of an eventfd that does what `wake` does."""
        return self._wake

    def _sleep_again(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
