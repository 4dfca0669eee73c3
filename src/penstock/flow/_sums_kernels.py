"""`_sums.sum_spans` compiled."""

from __future__ import annotations

from typing import Any

from penstock.flow import _sums
from penstock.flow.sums import SIGNATURE
from penstock.kernel import compiled_copy, entry, machine_code
from penstock.machine_code import MachineCode

_sum_spans = compiled_copy(_sums)["sum_spans"]


@entry
def sum_spans(
    words: Any,
    times: Any,
    before: Any,
    edges: Any,
    table: Any,
    links: Any,
    stage_counts: Any,
    stage_numbers: Any,
    buckets: Any,
    epoch_counts: Any,
    epoch_numbers: Any,
    row_of: Any,
) -> Any:
    """`_sums.sum_spans` of the same arguments."""
    of_stages, of_epochs = (stage_counts, stage_numbers, buckets), (epoch_counts, epoch_numbers)
    return _sum_spans(words, times, before, edges, table, links, *of_stages, *of_epochs, row_of)


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "sum_spans"."""
    return machine_code(globals()[name], SIGNATURE)
