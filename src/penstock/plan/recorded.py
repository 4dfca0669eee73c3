"""Which samples the groups of a trace are: those that its file names, and those that its plan gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import trace as traces
from penstock.errors import ConfigError
from penstock.plan.access import AccessPlan
from penstock.plan.serialise import told_plan
from penstock.trace.schema import AS_PLANNED, NO_EPOCH, GroupIds, Spans, choose_spans
from penstock.trace.trace import Trace

#: Samples that a plan is asked for at once.
_AT_ONCE = 1 << 14


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, one that breaks off included: its spans up to the last intact chunk.

    `ids` of the trace are those of the file, and those that the plan gives, which are computed when they are asked for.

    Memory: what the trace takes, and twice a chunk of at most 4 MiB.
    Raises: FormatError, naming file and offset, when it is no trace, breaks off within its header,
    is of another version, or is damaged; OSError when it cannot be read.
    """
    return with_planned_ids(traces.read_trace(path))


def with_planned_ids(trace: Trace) -> Trace:
    """Return a trace of one rank whose `ids` also have the groups that its plan gives."""
    spans = trace.spans
    planned = RecordedPlan(trace.meta, lambda: int(spans["epoch"].max(initial=NO_EPOCH))).ids(spans)
    return replace(trace, ids=join_ids([planned, trace.ids])) if planned else trace


def join_ids(pieces: Iterable[GroupIds]) -> GroupIds:
    """Return the groups of several pieces, of which the last that has a group counts."""
    return _Joined({key: piece for piece in pieces for key in piece})


class RecordedPlan:
    """The plan of a trace, which gives the samples of groups. One for all pieces of a trace: its epochs may be tables.

    meta: of the trace of a loader, with its plan. last_epoch: returns the last one in it, for a plan without end.
    """

    def __init__(self, meta: Mapping[str, Any], last_epoch: Callable[[], int]) -> None:
        self._meta, self._last_epoch = meta, last_epoch

    def ids(self, spans: Spans) -> GroupIds:
        """Return which samples groups are that the plan gives, by (rank, flow); each is computed when asked for.

        spans: of the trace, or of a piece of it. Groups of another plan are left out.
        """
        groups = choose_spans(spans, (spans["flow"] & np.uint64(AS_PLANNED)) != 0)
        stretches = self._stretches if groups.size else None
        if stretches is None:
            return {}
        _, first = np.unique(groups["flow"], return_index=True)
        groups = groups.take(first)
        is_told = (groups["epoch"] >= 0) & (groups["epoch"] < stretches.epochs)
        return _Planned(stretches, choose_spans(groups, is_told))

    @cached_property
    def _stretches(self) -> _Stretches | None:
        written, rank = self._meta.get("plan"), self._meta.get("rank")
        if not isinstance(written, dict) or not isinstance(rank, int):
            return None
        try:
            plan = told_plan(written, self._last_epoch())
        except ConfigError:  # of a newer Penstock: the first sample of each group is known
            return None
        return None if plan is None or rank >= plan.ranks else _Stretches(plan, rank)


class _Stretches:
    """Samples of a plan from a step on. The stretch that was asked for last is kept for the next."""

    def __init__(self, plan: AccessPlan, rank: int) -> None:
        self._plan, self._rank, self.epochs = plan, rank, plan.epochs
        #: Epoch and step that it begins with; its samples.
        self._stretch = -1, -1, np.empty(0, np.int64)

    def samples(self, epoch: int, step: int, count: int) -> NDArray[np.int64]:
        """Return the next samples from the start of a step on, fewer where the run ends before."""
        of_epoch, since, samples = self._stretch
        # All steps of an epoch are of one size but the last, as of any plan that is a function of a few numbers.
        begin = (step - since) * self._plan.local_batch_size(self._rank, epoch, 0)
        if epoch != of_epoch or begin < 0 or begin + count > samples.size:
            samples, begin = self._plan.stream(self._rank, epoch, step, max(count, _AT_ONCE)), 0
            self._stretch = epoch, step, samples
        return samples[begin : begin + count]


class _Planned(Mapping[tuple[int, int], NDArray[np.int64]]):
    """Groups of a rank, one span of each, by flow."""

    def __init__(self, stretches: _Stretches, groups: Spans) -> None:
        self._stretches, self._groups = stretches, groups

    def __getitem__(self, key: tuple[int, int]) -> NDArray[np.int64]:
        groups = self._groups
        at = int(np.searchsorted(groups["flow"], np.uint64(key[1])))
        if at == len(self) or (int(groups["rank"][at]), int(groups["flow"][at])) != key:
            raise KeyError(key)
        epoch, step, first, count = (int(groups[name][at]) for name in ("epoch", "step", "sample", "samples"))
        size = count
        while True:
            # Of a part of a batch, or of steps that were loaded together, the place is not known beforehand.
            samples = self._stretches.samples(epoch, step, size)
            places = np.flatnonzero(samples == first)
            if places.size and samples.size - places[0] >= count:
                return samples[places[0] : places[0] + count].copy()
            if samples.size < size:
                return np.array([first])  # of another plan
            size *= 2

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._groups["rank"].tolist(), self._groups["flow"].tolist(), strict=True)

    def __len__(self) -> int:
        return int(self._groups.size)


@dataclass(frozen=True, slots=True, eq=False)
class _Joined(Mapping[tuple[int, int], NDArray[np.int64]]):
    """piece_of: where each group is found."""

    piece_of: Mapping[tuple[int, int], GroupIds]

    def __getitem__(self, key: tuple[int, int]) -> NDArray[np.int64]:
        return self.piece_of[key][key]

    def __contains__(self, key: object) -> bool:
        return key in self.piece_of

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.piece_of)

    def __len__(self) -> int:
        return len(self.piece_of)
