"""Compiling a loop."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import kernel as kernel_module
from penstock.errors import ConfigError


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


def test_a_kernel_needs_no_scipy_and_other_compiled_functions_find_it() -> None:
    """Where SciPy is installed, numba imports scipy.linalg for a kernel that has nothing to do with it: 0.25 s."""
    program = """
import sys
import numpy as np
from numba import njit
from penstock.kernel import kernel
assert kernel(lambda value: value + 1)(1) == 2
print(any(name.startswith("scipy.linalg") for name in sys.modules))
print(njit(lambda values: np.dot(values, values))(2 * np.eye(2)).tolist())
"""

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines() == ["False", "[[4.0, 0.0], [0.0, 4.0]]"]


def test_a_kernel_where_numba_is_switched_off_is_refused_so_that_the_plain_form_serves() -> None:
    """Its loops use what only machine code has, and would be no faster than the plain form."""
    with pytest.raises(ConfigError, match="unset NUMBA_DISABLE_JIT"):
        kernel_module.compile_for(abs)
