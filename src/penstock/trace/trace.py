"""A whole trace: what a run recorded or a prediction computed, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.errors import ConfigError
from penstock.trace.metrics import EpochMetrics, epoch_metrics
from penstock.trace.schema import SPAN, Spans

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The spans of a run.

    >>> import numpy as np
    >>> Trace(np.empty(0, SPAN)).epochs()
    []
    """

    #: SPAN[n], in any order.
    spans: Spans
    #: What the run was: loader, data set, versions. Free-form.
    meta: Mapping[str, JSON] = field(default_factory=dict)
    #: False where spans are missing: the file it was read from breaks off, or rings overflowed.
    is_complete: bool = True

    def __post_init__(self) -> None:
        if self.spans.dtype != SPAN or self.spans.ndim != 1:
            raise ConfigError(
                f"spans are {self.spans.dtype} of {self.spans.ndim} dimensions; a trace holds a row of "
                f"penstock.trace.SPAN: make them with np.array(rows, penstock.trace.SPAN)"
            )

    def epochs(self) -> list[EpochMetrics]:
        """Sum the trace up, epoch by epoch."""
        return epoch_metrics(self.spans)
