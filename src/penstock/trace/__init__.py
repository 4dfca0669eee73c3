"""What happened in a run, or would happen: spans, the sums over them, and the file that keeps them."""

from penstock.trace.causes import Cause, stall_causes
from penstock.trace.file import TraceWriter, read_trace
from penstock.trace.metrics import EpochMetrics, Meanwhile, epoch_metrics, stall_share
from penstock.trace.schema import (
    NO_EPOCH,
    NO_FLOW,
    NO_PEER,
    NO_PLACE,
    NO_SAMPLE,
    NO_STEP,
    SOURCE,
    SPAN,
    STAGING,
    Kind,
    Spans,
    batch_waits,
)
from penstock.trace.stages import Durations, Stage
from penstock.trace.summary import Summary
from penstock.trace.trace import JSON, Trace
from penstock.trace.verdict import NOTHING_TO_GAIN, limiting

__all__ = [
    "JSON",
    "NOTHING_TO_GAIN",
    "NO_EPOCH",
    "NO_FLOW",
    "NO_PEER",
    "NO_PLACE",
    "NO_SAMPLE",
    "NO_STEP",
    "SOURCE",
    "SPAN",
    "STAGING",
    "Cause",
    "Durations",
    "EpochMetrics",
    "Kind",
    "Meanwhile",
    "Spans",
    "Stage",
    "Summary",
    "Trace",
    "TraceWriter",
    "batch_waits",
    "epoch_metrics",
    "limiting",
    "read_trace",
    "stall_causes",
    "stall_share",
]
