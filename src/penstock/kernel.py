"""Compiling a loop with numba: without the interpreter's lock, kept on disk where a folder is writable.

Imported by modules of kernels only, which are themselves imported when first needed: it loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function at its first call; later processes load what was compiled."""
    try:
        compiled: Callable[P, R] = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder is writable, neither the package's nor the user's cache
        compiled = njit(nogil=True)(function)
    return compiled


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a small function into each kernel that calls it, where a call with many arrays would cost more."""
    compiled: Callable[P, R] = njit(nogil=True, inline="always")(function)
    return compiled


def compile_for(function: Callable[..., Any], *types: Any) -> None:
    """Compile a kernel for one signature, or load it from the cache; do nothing where numba is switched off."""
    if hasattr(function, "compile"):
        function.compile(types)
