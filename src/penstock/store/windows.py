"""Reading a window of an open file, as plain Python does it and as compiled code does."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

#: What reads files without a descriptor, by a number below zero in its place.
_readable: dict[int, Callable[[int, int], bytes]] = {}
_numbers = itertools.count(-2, -1)


def fill(window: Any, descriptor: int, offset: int) -> int:
    """Read what a file has at an offset, as much as fits; return how many bytes, 0 where none can be read.

    window: uint8[...], written in front. Raises: what one of `readable` does.
    """
    if descriptor in _readable:
        content = _readable[descriptor](len(window), offset)
        window[: len(content)] = memoryview(content)
        return len(content)
    try:
        return os.preadv(descriptor, [window], offset)
    except OSError:
        return 0


@contextlib.contextmanager
def readable(pread: Callable[[int, int], bytes] | None) -> Iterator[int | None]:
    """Have `fill` read by a function while the context is open, for the descriptor that it yields.

    pread: as `os.pread` of a file; None yields None.
    """
    if pread is None:
        yield None
        return
    number = next(_numbers)
    _readable[number] = pread
    try:
        yield number
    finally:
        del _readable[number]
