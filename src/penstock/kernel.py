"""Compiling a loop with numba: without the interpreter's lock, kept on disk where a folder is writable.

Imported by modules of kernels only, which are themselves imported when first needed: it loads numba.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit
from numba.core.dispatcher import Dispatcher

from penstock.errors import ConfigError

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


def compile_for(function: Callable[..., Any], *types: Any, only: bool = False) -> None:
    """Compile a kernel for one signature, or load it from the cache.

    only: raise TypeError when the kernel is called with other types, instead of compiling it for them.
    Raises: ConfigError where numba is switched off.
    """
    if not isinstance(function, Dispatcher):
        raise ConfigError("numba is switched off: unset NUMBA_DISABLE_JIT")
    function.compile(types)
    if only:
        function.disable_compile()


def _import_without_scipy() -> None:
    """Import the module of numba that imports scipy.linalg only to learn whether there is BLAS.

    0.25 of the 1.0 s that it takes to import numba and load a kernel. numba looks again when BLAS is used.
    """
    if "numba.np.arraymath" in sys.modules or importlib.util.find_spec("scipy") is None:
        return
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas, linalg.ensure_blas = linalg.ensure_blas, lambda: None
    try:
        arraymath: Any = importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas
    arraymath.ensure_blas = ensure_blas


_import_without_scipy()
