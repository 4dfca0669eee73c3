"""Spans for tests, written row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.trace import Trace
from penstock.trace.schema import NO_FLOW, NO_PEER, NO_PLACE, NO_SAMPLE, NO_STEP, SOURCE, SPAN, Kind, Spans


def spans_of(rows: Iterable[tuple[Any, ...]]) -> Spans:
    """Return the spans of rows (start, end, sample, bytes, epoch, step, kind, place, worker, rank).

    A row may go on: samples, which are 1 unless it names none, peer and flow.
    """
    spans = []
    for row in rows:
        start, end, sample, nbytes, epoch, step, kind, place, worker, rank = row[:10]
        unless_given = (int(sample != NO_SAMPLE), NO_PEER, NO_FLOW)
        samples, peer, flow = row[10:] + unless_given[len(row) - 10 :]
        spans.append(
            (start, end, sample, nbytes, flow, epoch, step, samples, peer, kind, place, worker, rank)
        )
    return np.array(spans, SPAN)


def a_run(stalls: list[list[float]], decode: float = 0.0, stop: float = 0.0) -> Trace:
    """Return a run that waits so long for each step of each epoch: for its read, and `decode` for decoding.

    Every step takes a second of its own; at the end of an epoch it waits `stop` for nothing.
    """
    rows: list[tuple[float, float, int, int, int, int, int, int, int, int]] = []
    now = 0.0
    for epoch, waits in enumerate(stalls):
        for step, wait in enumerate(waits):
            ready = now + wait
            rows += [
                (now, ready - decode, step, 10, epoch, step, Kind.READ, SOURCE, 1, 0),
                (ready - decode, ready, step, 0, epoch, step, Kind.DECODE, NO_PLACE, 1, 0),
                (now, ready, -1, 0, epoch, step, Kind.WAIT, NO_PLACE, 0, 0),
                (ready, ready + 1.0, -1, 0, epoch, step, Kind.STEP, NO_PLACE, 0, 0),
            ]
            now = ready + 1.0
        rows.append((now, now + stop, -1, 0, epoch, NO_STEP, Kind.WAIT, NO_PLACE, 0, 0))
        now += stop
    return Trace(spans_of(rows))
