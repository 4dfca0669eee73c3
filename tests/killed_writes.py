"""kill -9 in the middle of a write, for processes that tests start."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any


def killed_at(point: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a write, such as `os.pwrite`, one that ends this process at the point-th call of any of them.

    By the point, nothing of that is written, its first half, or all of it.
    """
    count = itertools.count()

    def killed(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, content: Any, *where: Any) -> Any:
            if next(count) == point:
                write(file, content[: len(content) * (point % 3) // 2], *where)
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, content, *where)

        return call

    return killed
