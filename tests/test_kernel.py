"""Compiling a loop."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import kernel as kernel_module


def test_kernels_are_compiled_anew_where_no_folder_can_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without a writable home numba refuses to cache, and says so when a function is decorated."""

    def njit(**options: bool) -> Callable[[Callable[[int], int]], Callable[[int], int]]:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: lambda value: function(value) + 100

    monkeypatch.setattr(kernel_module, "njit", njit)

    assert kernel_module.kernel(abs)(-3) == 103


def test_a_function_is_compiled_into_the_kernel_that_calls_it() -> None:
    @kernel_module.inlined
    def doubled(value: int) -> int:
        return 2 * value

    @kernel_module.kernel
    def summed(values: NDArray[np.int64]) -> int:
        total = 0
        for value in values:
            total += doubled(value)
        return total

    assert summed(np.arange(4)) == 12
