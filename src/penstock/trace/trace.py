"""A complete trace: what a run recorded or a prediction computed, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from penstock.errors import ConfigError
from penstock.trace.metrics import EpochMetrics, epoch_metrics
from penstock.trace.schema import NO_SAMPLE, SPAN, GroupIds, Spans, join_spans
from penstock.trace.summary import SLOWEST, Summary, joined_epochs, slowest_of

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
    #: False where what happened is not known: the file it was read from breaks off, or rings overflowed.
    is_complete: bool = True
    #: Of earlier spans, which a long run keeps only the sums of; `epochs` and `slowest` count them.
    left_out: Summary = field(default_factory=Summary)
    #: int64[samples] of groups, by (rank, flow): which samples they are, in the order that they were asked for.
    #: `penstock.read_trace` adds those that the plan tells; `penstock.trace.read_trace` has those of the file alone.
    ids: GroupIds = field(default_factory=dict)
    #: Of samples that the slowest spans name: a path, or what else the source calls them.
    names: Mapping[int, str] = field(default_factory=dict)
    #: The host of each rank that is known.
    hosts: Mapping[int, str] = field(default_factory=dict)
    #: What ranks chose by measurement while they ran, in a line for each.
    choices: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.spans.dtype != SPAN or self.spans.ndim != 1:
            raise ConfigError(
                f"spans are {self.spans.dtype} of {self.spans.ndim} dimensions; a trace holds a row of "
                f"penstock.trace.SPAN: make them with np.array(rows, penstock.trace.SPAN)"
            )

    def epochs(self) -> list[EpochMetrics]:
        """Sum the trace up, epoch by epoch."""
        return joined_epochs(self.left_out.epochs, epoch_metrics(self.spans))

    @property
    def begun(self) -> float | None:
        """When the run began, in seconds since 1970; None where its meta does not say."""
        try:
            return datetime.fromisoformat(str(self.meta.get("started"))).timestamp()
        except ValueError:
            return None

    @property
    def is_watched(self) -> bool:
        """Whether it is of a loader that is not Penstock's, but another one in `penstock.watch`."""
        return "watched" in self.meta

    @property
    def tasks(self) -> Mapping[int, str]:
        """The task of each rank where the ranks are the workers of a graph, such as "/job:worker/task:0"; else none."""
        return self.hosts if self.meta.get("graph") and "ranks" in self.meta else {}

    @property
    def workers(self) -> Mapping[int, str]:
        """What ran a graph's steps, by rank: its `tasks`, or processes that had a session each; none of a loader."""
        if self.tasks or not self.meta.get("graph"):
            return self.tasks
        rank = self.meta.get("rank")
        hosts = self.hosts or {rank if isinstance(rank, int) else 0: str(self.meta.get("host", ""))}
        return {rank: f"rank {rank}{host and f' on {host}'}" for rank, host in hosts.items()}

    def name_of(self, sample: int) -> str:
        """Return what a sample is called, by its number where it has no name; "" for `NO_SAMPLE`."""
        return "" if sample == NO_SAMPLE else self.names.get(sample, f"sample {sample}")

    def slowest(self, most: int = SLOWEST) -> Spans:
        """Return the slowest spans of each kind, at most so many of each: by kind, the slowest first.

        Of a run that keeps only sums of its earlier spans, 64 of a kind are known from these.
        """
        return slowest_of(join_spans([self.left_out.slowest, self.spans]), most)
