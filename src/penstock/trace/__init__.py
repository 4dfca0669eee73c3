"""What happened in a run, or would happen: spans, the sums over them, and the file that keeps them."""

from penstock.trace.schema import BACKGROUND, NO_SAMPLE, NO_TIER, SOURCE, SPAN, STAGING, Kind, Spans

__all__ = [
    "BACKGROUND",
    "NO_SAMPLE",
    "NO_TIER",
    "SOURCE",
    "SPAN",
    "STAGING",
    "Kind",
    "Spans",
]
