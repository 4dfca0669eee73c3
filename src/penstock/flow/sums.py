"""What `epoch_metrics` makes of spans, by a compiled loop: for epochs of a fraction of a second."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.compiling import Part
from penstock.flow._sums import COLUMNS, KEYS, STAGES
from penstock.machine_code import Loop, Signature
from penstock.trace import EpochMetrics
from penstock.trace.causes import Cause
from penstock.trace.metrics import epoch_metrics
from penstock.trace.schema import Spans, join_spans
from penstock.trace.stages import EDGES, Durations, Stage

#: spans as integers and as numbers; how many of them were summed up before; EDGES; the table, the links; then what is
#: found: of stages and of epochs, integers and numbers, histograms, and which row an epoch's stage has.
SIGNATURE = Signature(
    (
        *("int64[:]", "float64[:]", "int64", "float64[:]", "int64[:]", "int64[:]"),
        *("int64[:, :]", "float64[:, :]", "int64[:, :]", "int64[:, :]", "float64[:, :]", "int64[:]"),
    ),
    ("int64", "int64", "int64"),
)
SUMS = Part(
    "penstock.flow._sums_kernels", "sum_spans", SIGNATURE, "how a trace is summed up", "NumPy does it"
)
#: Spans after which the loop is worth compiling, which takes some seconds: NumPy takes about 1 us for each.
_WORTH_COMPILING_SPANS = 1_000_000


class Sums:
    """Sums spans up as `epoch_metrics` does, quickly once the loop is compiled."""

    def __init__(self, epochs: int = 16, stages: int = 128) -> None:
        """Take no memory yet. epochs, stages: of one call, at most; with more, NumPy does it."""
        self._shape = epochs, stages
        self._spans = 0
        self._loop: Loop | None = None
        self._memory: tuple[Any, Any, Any] | None = None

    def __call__(self, spans: Spans, loaded: Spans) -> list[EpochMetrics]:
        """Arguments and result are those of `epoch_metrics`."""
        self._spans += spans.size
        if self._loop is None and (self._spans >= _WORTH_COMPILING_SPANS or SUMS.is_cached):
            self._loop = SUMS.glance()
        found = None if self._loop is None else self.found_by(self._loop, spans, loaded)
        return epoch_metrics(spans, loaded) if found is None else found

    def found_by(self, loop: Any, spans: Spans, loaded: Spans) -> list[EpochMetrics] | None:
        """Return what a loop, `sum_spans` or it compiled, finds; None where NumPy has to do it."""
        if not spans.size:
            return []
        known = join_spans([loaded, spans]) if loaded.size else np.ascontiguousarray(spans)
        if self._memory is None:
            epochs, stages = self._shape
            of_stages = (
                np.empty((stages, 5), np.int64),
                np.empty((stages, 2)),
                np.empty((stages, EDGES.size + 1), np.int64),
            )
            of_epochs = np.empty((epochs, 3), np.int64), np.empty((epochs, COLUMNS))
            self._memory = of_stages, of_epochs, np.empty(epochs * STAGES, np.int64)
        of_stages, of_epochs, row_of = self._memory
        words = known.view(np.int64)
        table = np.empty(4 << known.size.bit_length(), np.int64)
        links = np.empty(KEYS * known.size + 1, np.int64)
        first, width, rows = loop(
            *(words, words.view(np.float64), loaded.size, EDGES, table, links),
            *(*of_stages, *of_epochs, row_of),
        )
        if not width:
            return None
        return _metrics(first, *(each[:rows] for each in of_stages), *(each[:width] for each in of_epochs))


def _metrics(
    first: int, stages: Any, stage_numbers: Any, buckets: Any, epochs: Any, epoch_numbers: Any
) -> list[EpochMetrics]:
    found: dict[int, dict[Stage, Durations]] = {}
    counts: list[dict[int, int]] = [{} for _ in stages]
    at, bucket = np.nonzero(buckets)
    for row, place, calls in zip(at.tolist(), bucket.tolist(), buckets[at, bucket].tolist(), strict=True):
        counts[row][place] = calls
    all_rows = zip(stages.tolist(), stage_numbers.tolist(), counts, strict=True)
    for (row, each, calls, samples, size), (seconds, slowest), histogram in sorted(all_rows, key=_row_of):
        found.setdefault(row, {})[Stage.of_number(each)] = Durations(
            calls, samples, size, seconds, slowest, histogram
        )
    return [
        EpochMetrics(
            epoch=first + row,
            seconds=max(last - begin, 0.0),
            samples=samples,
            steps=steps,
            stall_seconds=stall,
            stall_by_cause=dict(zip(Cause, parts, strict=True)),
            own_seconds=own,
            stages=found.get(row, {}),
        )
        for row, ((samples, steps, is_there), (begin, last, stall, own, *parts)) in enumerate(
            zip(epochs.tolist(), epoch_numbers.tolist(), strict=True)
        )
        if is_there
    ]


def _row_of(row: tuple[list[int], list[float], dict[int, int]]) -> list[int]:
    return row[0][:2]
