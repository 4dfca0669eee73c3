"""Spans for tests, written row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.trace.schema import NO_FLOW, NO_PEER, NO_SAMPLE, SPAN, Spans


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
