"""Reading a window of an open file, as plain Python does it and as compiled code does."""

from __future__ import annotations

import os
from typing import Any


def fill(window: Any, descriptor: int, offset: int) -> int:
    """Read what a file has at an offset, as much as fits; return how many bytes, 0 where none can be read.

    window: uint8[...], written in front.
    """
    try:
        return os.preadv(descriptor, [window], offset)
    except OSError:
        return 0
