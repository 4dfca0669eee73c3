"""Compiling loops that hand tuples of arrays to each other. Loads numba, as `penstock.kernel` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba.core.dispatcher import Dispatcher

from penstock import kernel as counted

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as `penstock.kernel.kernel` does a function that makes no array, and so need not count who holds one.

    Counting takes most of the time where a call hands on tuples of arrays: three to ten times that of the rest.
    """
    compiled = counted.kernel(function)
    if isinstance(compiled, Dispatcher):  # numba may be switched off
        compiled.targetoptions |= {"_nrt": False, "forceinline": True}
    return compiled
