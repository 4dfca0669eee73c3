"""`examples` compiled: one function, so that a compiler runs once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from penstock.kernel import c_function, compiled_copy, entry, machine_code, stack_zeros
from penstock.machine_code import MachineCode
from penstock.store import examples

_known: Any = types
_preadv = c_function("preadv", _known.int64, _known.int32, _known.intp, _known.int32, _known.int64)


@entry
def fill(window: Any, descriptor: Any, offset: Any) -> Any:
    """`windows.fill` of the same arguments."""
    vector = stack_zeros(np.int64, 2)  # a `struct iovec`
    vector[0], vector[1] = window.ctypes.data, window.size
    return max(0, _preadv(descriptor, vector.ctypes.data, 1, offset))


_index_examples = compiled_copy(examples, {"fill": fill})["index_examples"]


@entry
def index_examples(
    descriptor: Any, end: Any, sample_name: Any, label_name: Any, window: Any, rows: Any, at: Any
) -> Any:
    """`examples.index_examples` of the same arguments."""
    return _index_examples(descriptor, end, sample_name, label_name, window, rows, at)


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "index_examples"."""
    return machine_code(globals()[name], examples.SIGNATURE)
