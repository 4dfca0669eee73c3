"""`_sums.sum_spans` compiled."""

from __future__ import annotations

from penstock.flow import _sums
from penstock.flow.sums import SIGNATURE
from penstock.kernel import compiled_copy, machine_code
from penstock.machine_code import MachineCode

sum_spans = compiled_copy(_sums)["sum_spans"]


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "sum_spans"."""
    return machine_code(globals()[name], SIGNATURE)
