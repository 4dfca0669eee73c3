"""Python's garbage collector kept away from work that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Have no garbage looked for meanwhile, on any thread; also decorates a function.

    For work of milliseconds whose many objects go by themselves: after every few hundred of them the collector looks at
    the young ones, and then and again at all that the process has, which takes 0.15 s once PyTorch is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
