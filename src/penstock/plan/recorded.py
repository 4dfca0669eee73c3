"""Which samples the groups of a trace are: those that its file names, and those that its plan tells."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import trace as traces
from penstock.errors import ConfigError
from penstock.plan.access import AccessPlan
from penstock.plan.serialise import told_plan
from penstock.trace.schema import AS_PLANNED, GroupIds, Spans, choose_spans
from penstock.trace.trace import Trace

#: Samples that a plan is asked for at once.
_AT_ONCE = 1 << 14


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, one that breaks off included: its spans up to the last intact chunk.

    `ids` of the trace are those of the file, and those that the plan tells, which are computed when they are asked for.

    Memory: what the trace takes, and twice a chunk of at most 4 MiB.
    Raises: FormatError, naming file and offset, when it is no trace, breaks off within its header,
    is of another version, or is damaged; OSError when it cannot be read.
    """
    return with_planned_ids(traces.read_trace(path))


def with_planned_ids(trace: Trace) -> Trace:
    """Return a trace of one rank whose `ids` also have the groups that its plan tells."""
    planned = planned_ids(trace.meta, trace.spans)
    return replace(trace, ids=join_ids([planned, trace.ids])) if planned else trace


def join_ids(pieces: Iterable[GroupIds]) -> GroupIds:
    """Return the groups of several pieces, of which the last that has a group counts."""
    return _Joined({key: piece for piece in pieces for key in piece})


def planned_ids(meta: Mapping[str, Any], spans: Spans) -> GroupIds:
    """Return which samples groups are that a plan tells, by (rank, flow); each is computed when it is asked for.

    meta: of the trace that the spans are of, and of a loader, with its plan; groups of another plan are left out.
    """
    groups = choose_spans(spans, (spans["flow"] & np.uint64(AS_PLANNED)) != 0)
    written, rank = meta.get("plan"), meta.get("rank")
    if not groups.size or not isinstance(written, dict) or not isinstance(rank, int):
        return {}
    try:
        plan = told_plan(written, int(groups["epoch"].max()))
    except ConfigError:  # of a newer Penstock: the first sample of each group is known
        return {}
    if plan is None or rank >= plan.ranks:
        return {}
    _, first = np.unique(groups["flow"], return_index=True)
    groups = groups.take(first)
    return _Planned(
        plan, rank, choose_spans(groups, (groups["epoch"] >= 0) & (groups["epoch"] < plan.epochs))
    )


class _Planned(Mapping[tuple[int, int], NDArray[np.int64]]):
    """Groups of a rank, one span of each, by flow. The stretch of the plan that has one is kept for the next."""

    def __init__(self, plan: AccessPlan, rank: int, groups: Spans) -> None:
        self._plan, self._rank, self._groups = plan, rank, groups
        #: Epoch and step that it begins with; its samples.
        self._stretch = -1, -1, np.empty(0, np.int64)

    def __getitem__(self, key: tuple[int, int]) -> NDArray[np.int64]:
        groups = self._groups
        at = int(np.searchsorted(groups["flow"], np.uint64(key[1])))
        if at == len(self) or (int(groups["rank"][at]), int(groups["flow"][at])) != key:
            raise KeyError(key)
        epoch, step, first, count = (int(groups[name][at]) for name in ("epoch", "step", "sample", "samples"))
        size = count
        while True:
            # Of a part of a batch, or of steps that were loaded together, the place is not known beforehand.
            samples = self._samples(epoch, step, size)
            places = np.flatnonzero(samples == first)
            if places.size and samples.size - places[0] >= count:
                return samples[places[0] : places[0] + count].copy()
            if samples.size < size:
                return np.array([first])  # of another plan
            size *= 2

    def _samples(self, epoch: int, step: int, count: int) -> NDArray[np.int64]:
        """Return the next samples from the start of a step on, fewer where the run ends before."""
        of_epoch, since, samples = self._stretch
        # All steps of an epoch are of one size but the last, as of any plan that is a function of a few numbers.
        begin = (step - since) * self._plan.local_batch_size(self._rank, epoch, 0)
        if epoch != of_epoch or begin < 0 or begin + count > samples.size:
            samples, begin = self._plan.stream(self._rank, epoch, step, max(count, _AT_ONCE)), 0
            self._stretch = epoch, step, samples
        return samples[begin : begin + count]

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
