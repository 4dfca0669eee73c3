"""The table of operations, filled: whoever looks one up imports this."""

from __future__ import annotations

from penstock.graph.ops import (  # noqa: F401
    arrays,
    aten,
    calls,
    control,
    elementwise,
    exchange,
    images,
    matrix,
    net,
    random,
    stacks,
    state,
    summaries,
    vjp,
    waiting,
)
from penstock.graph.ops.registry import Operation, checked_attributes, operation, operations

__all__ = ["Operation", "checked_attributes", "operation", "operations"]
