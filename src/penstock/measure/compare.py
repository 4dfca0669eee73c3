"""A recorded run laid over its prediction: the same plan, sizes, limits and steps, in virtual time.

What the loader decided and the machine costs is predicted; what the training itself did (how long each step took, when
it asked first) is taken from the record, so that what differs is the loading.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.budget import MemoryBudget
from penstock.loader.prediction import prepare_clock
from penstock.loader.setup import read_machine, with_memory
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.plan.serialise import read_plan
from penstock.policy import StagingLimits
from penstock.policy.forms import CropForm
from penstock.simulate import predict
from penstock.simulate.policies import POLICY_NAMES
from penstock.simulate.scheduled import MOST_READS
from penstock.store.calls import Calls
from penstock.trace import NO_STEP, Cause, EpochMetrics, Kind, Spans, Summary, Trace, read_trace
from penstock.trace.metrics import is_of_snapshots
from penstock.trace.schema import GroupIds

Made = TypeVar("Made", StagingLimits, MemoryBudget, CropForm)

#: The running number of each (epoch, step) in which a rank reads anything.
_Numbers = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class EpochPair:
    """One epoch, predicted and measured, over the steps that were consumed."""

    predicted: EpochMetrics
    measured: EpochMetrics

    @property
    def epoch(self) -> int:
        return self.measured.epoch


@dataclass(frozen=True, slots=True, eq=False)
class RunComparison:
    """A recorded run beside its prediction.

    predicted, measured: of the steps that were consumed alone.
    notes: what a reader must know before trusting the figures, a sentence each.
    """

    predicted: Trace
    measured: Trace
    notes: tuple[str, ...]

    @property
    def epochs(self) -> list[EpochPair]:
        """The epochs of which a batch was consumed, ascending."""
        predicted = {each.epoch: each for each in self.predicted.epochs()}
        return [EpochPair(predicted[each.epoch], each) for each in self.measured.epochs() if each.steps]

    @property
    def run_seconds(self) -> tuple[float, float]:
        """Predicted and measured time of the run: waiting and steps."""
        return _sum(self.predicted, _run_seconds), _sum(self.measured, _run_seconds)

    @property
    def stall_seconds(self) -> tuple[float, float]:
        """Predicted and measured time that the training waited."""
        return _sum(self.predicted, _stall_seconds), _sum(self.measured, _stall_seconds)

    @property
    def causes(self) -> dict[Cause, tuple[float, float]]:
        """Predicted and measured waiting by cause, in the order of `Cause`."""
        return {
            cause: (
                _sum(self.predicted, lambda each, cause=cause: each.stall_by_cause[cause]),
                _sum(self.measured, lambda each, cause=cause: each.stall_by_cause[cause]),
            )
            for cause in Cause
        }


def compare(
    path: str | os.PathLike[str],
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    step_seconds: float | None = None,
) -> RunComparison:
    """Predict a recorded run from its file alone, and lay the two beside each other.

    path: of a trace that a loader of this Penstock wrote.
    machine: with measured costs, or its file; the one that the loader was made with unless given.
    step_seconds: of every step, as assumed beforehand; what was recorded unless given.

    Raises: ConfigError naming the file and what is missing in it; what `read_trace` raises.
    """
    trace = read_trace(path)
    try:
        return lay_over(trace, machine=machine, step_seconds=step_seconds)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error


def lay_over(
    trace: Trace,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    step_seconds: float | None = None,
) -> RunComparison:
    """Do what `compare` does for a trace that was read."""
    meta = trace.meta
    waits = trace.spans[(trace.spans["kind"] == Kind.WAIT) & (trace.spans["step"] != NO_STEP)]
    if not waits.size:
        raise ConfigError("no batch was consumed in the recorded run, so there is nothing to compare")
    if "plan" not in meta:
        raise ConfigError(
            "its header does not say what was run: give a trace that a loader of this version wrote with trace="
        )
    if meta.get("reads") == "data set":
        raise ConfigError(
            "what a sample of a data set costs is known to its own code alone, so that nothing can be predicted: "
            "compare a run over a folder or a source"
        )
    if meta.get("loads") == "when asked":
        raise ConfigError(
            "it loaded nothing ahead (decoders=0), and a prediction is of what does: record another run"
        )
    rank = int(_field(meta, "rank", int))
    written = _field(meta, "plan", dict)
    first = _first_of(meta)
    if None in (written.get("order"), written.get("split")) and (trace.left_out.spans or any(first)):
        raise ConfigError(
            "its plan can only be had from its spans, and those of its first steps are not in it, as the run was too "
            "long or began in the middle: record a shorter run from epoch 0 on"
        )
    plan, rank = read_plan(written, rank, trace.spans, trace.ids)
    if (reads := plan.reads(rank)) > MOST_READS:
        raise ConfigError(
            f"its plan has {reads:,} reads, and at most {MOST_READS:,} are predicted: record a shorter run"
        )
    prepare_clock(reads)
    limits = _made(StagingLimits, meta, "limits")
    on = _machine_of(meta, machine, limits, int(written["ranks"]))
    form = None if meta.get("keep") is None else _made(CropForm, meta, "keep")
    stored = trace.spans if form is None else trace.spans[trace.spans["place"] != form.TIER]
    sizes_bytes, unknown, together = _sizes_bytes(stored, trace.ids, plan.samples)
    number = _numbers(plan, rank, first)
    recorded = _steps_of(number, waits, trace.spans)
    # Of a run that keeps only its last steps, nobody knows how it began.
    begin = float(waits["start"].min())
    if not trace.left_out.spans:
        begin = float(trace.spans["start"][~is_of_snapshots(trace.spans)].min())
    seconds = recorded.until_next if step_seconds is None else np.full(recorded.until_next.size, step_seconds)
    policy = _field(meta, "policy", str)
    if policy not in POLICY_NAMES:
        raise ConfigError(
            f"its header says policy = {policy!r}, a class of somebody's own: predict such a run by loader.predict()"
        )
    whole = predict(
        plan,
        on,
        sizes_bytes,
        limits=limits,
        policy=policy,
        rank=rank,
        first=first,
        step_seconds=seconds.tolist(),
        first_ask_seconds=float(waits["start"].min()) - begin,
        form=form,
    )
    spans = _only(whole.spans, number, recorded.was_consumed)
    if step_seconds is None:
        steps = np.flatnonzero(spans["kind"] == Kind.STEP)
        # What passed between a step's end and the next wait, an evaluation say, is nobody's own time in the record.
        spans["end"][steps] = spans["start"][steps] + recorded.own[recorded.was_consumed]
    notes = _notes(trace, plan, recorded.was_consumed, unknown, together)
    in_vain = (trace.spans["kind"] == Kind.WAIT) & (trace.spans["step"] == NO_STEP)
    measured = replace(trace, spans=trace.spans[~in_vain], left_out=Summary())
    return RunComparison(Trace(spans, {**whole.meta, "loader": "predicted"}), measured, notes)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The rank's steps in the plan's order. Seconds of steps that were not consumed are the others' median.

    was_consumed: bool[steps]. own: float64[steps], from having the batch to asking for more. until_next:
        float64[steps], from having the batch to asking for the next one, pauses between epochs included.
    """

    was_consumed: NDArray[np.bool_]
    own: NDArray[np.float64]
    until_next: NDArray[np.float64]


def _steps_of(number: _Numbers, waits: Spans, spans: Spans) -> _Steps:
    steps = spans[spans["kind"] == Kind.STEP]
    waits = waits[np.argsort(waits["start"], kind="stable")]
    own, until_next = np.full(len(number), np.nan), np.full(len(number), np.nan)
    was_consumed = np.zeros(len(number), np.bool_)
    try:
        placed = np.array([number[key] for key in _keys(waits)])
        of_step = np.array([number[key] for key in _keys(steps)], np.intp)
    except KeyError as error:
        raise ConfigError(
            f"the run read a batch {error.args[0]} (epoch, step), which its plan has not: its header is of another run"
        ) from error
    was_consumed[placed] = True
    own[of_step] = steps["end"] - steps["start"]
    until_next[placed[:-1]] = waits["start"][1:] - waits["end"][:-1]
    until_next[np.isnan(until_next)] = own[np.isnan(until_next)]
    for seconds in (own, until_next):
        known = ~np.isnan(seconds)
        seconds[~known] = np.median(seconds[known]) if known.any() else 0.0
    return _Steps(was_consumed, own, until_next)


def _first_of(meta: Mapping[str, Any]) -> tuple[int, int]:
    """Return (epoch, step) of the batch that the run began with."""
    match _field(meta, "first_step", list):
        case [int() as epoch, int() as step]:
            return epoch, step
        case other:
            raise ConfigError(
                f"its header says first_step = {other!r}; that is an epoch and a step, such as [0, 0]"
            )


def _numbers(plan: AccessPlan, rank: int, first: tuple[int, int]) -> _Numbers:
    read = [
        (epoch, step)
        for epoch in range(plan.epochs)
        for step in range(plan.steps(epoch))
        if (epoch, step) >= first and plan.local_batch_size(rank, epoch, step)
    ]
    return {place: number for number, place in enumerate(read)}


def _keys(spans: Spans) -> list[tuple[int, int]]:
    return list(zip(spans["epoch"].tolist(), spans["step"].tolist(), strict=True))


def _only(spans: Spans, number: _Numbers, was_consumed: NDArray[np.bool_]) -> Spans:
    """Return the prediction without the waits, steps and work for batches that the record did not come to."""
    kept = np.array([step == NO_STEP or was_consumed[number[epoch, step]] for epoch, step in _keys(spans)])
    last_epoch = max(epoch for (epoch, _), place in number.items() if was_consumed[place])
    chosen: Spans = spans[kept & (spans["epoch"] <= last_epoch)]
    return chosen[np.argsort(chosen["start"], kind="stable")]


def _sizes_bytes(spans: Spans, ids: GroupIds, samples: int) -> tuple[NDArray[np.int64], int, int]:
    """Return int64[samples], how many have no size in the trace, and of how many only a mean.

    Of a group, the sum is known: each of its samples gets its part. What is not known gets the mean of all reads.
    """
    sized = spans[np.isin(spans["kind"], (Kind.READ, Kind.HIT)) & (spans["sample"] >= 0)]
    if not sized.size:
        raise ConfigError("the recorded run read no sample, so their sizes are not known")
    sizes, is_mean = np.full(samples, -1, np.int64), np.zeros(samples, np.bool_)
    for span in sized[sized["samples"] > 1]:
        group = ids.get((int(span["rank"]), int(span["flow"])))
        if group is not None and ((group >= 0) & (group < samples)).all():
            sizes[group], is_mean[group] = span["bytes"] // span["samples"], True
    alone = sized[sized["samples"] <= 1]
    sizes[alone["sample"]], is_mean[alone["sample"]] = alone["bytes"], False
    is_unknown = sizes < 0
    sizes[is_unknown] = int(sized["bytes"].sum() // max(1, int(sized["samples"].sum())))
    return sizes, int(is_unknown.sum()), int(is_mean.sum())


def _machine_of(
    meta: Mapping[str, Any],
    machine: Machine | str | os.PathLike[str] | None,
    limits: StagingLimits,
    ranks: int,
) -> Machine:
    given = read_machine(machine, Calls())
    if given is not None:
        return with_memory(given, _made(MemoryBudget, meta, "memory"), limits.decoders, ranks)
    written = meta.get("machine")
    if written is None:
        raise ConfigError(
            "the loader was made without a machine, so what a read should cost is not known: give --machine FILE, "
            "which penstock calibrate writes"
        )
    return Machine.from_toml(str(written))


def _field(meta: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = meta.get(name)
    if not isinstance(value, kind):
        raise ConfigError(
            f"its header says {name} = {value!r}: give a trace that a loader of this version wrote with trace="
        )
    return value


def _made(kind: type[Made], meta: Mapping[str, Any], name: str) -> Made:
    values = _field(meta, name, dict)
    try:
        if not all(type(value) is int and value >= 0 for value in values.values()):
            raise TypeError("not a count")
        return kind(**values)
    except TypeError as error:
        raise ConfigError(
            f"its header says {name} = {values!r}: give a trace that a loader of this version wrote with trace="
        ) from error


def _notes(
    trace: Trace, plan: AccessPlan, was_consumed: NDArray[np.bool_], unknown: int, together: int
) -> tuple[str, ...]:
    notes = []
    if not trace.is_complete:
        notes.append(
            "The trace is not complete: its file is cut off, or the run was too fast to record all of it."
        )
    if trace.left_out.spans:
        notes.append(
            "The run was too long to keep all of its spans: the last steps alone are compared, and how each of the "
            "earlier ones went is assumed to be like them."
        )
    elif not was_consumed.all():
        notes.append(
            f"{int(was_consumed.sum())} of the {was_consumed.size} planned steps were consumed; the others are left "
            "out of both sides."
        )
    if unknown:
        notes.append(
            f"The sizes of {unknown:,} of {plan.samples:,} samples are not in the record; the mean of the others "
            "stands for them."
        )
    if together:
        notes.append(
            f"The sizes of {together:,} of {plan.samples:,} samples are means over those that were read with them."
        )
    return tuple(notes)


def _run_seconds(metrics: EpochMetrics) -> float:
    return metrics.stall_seconds + metrics.own_seconds


def _stall_seconds(metrics: EpochMetrics) -> float:
    return metrics.stall_seconds


def _sum(trace: Trace, part: Any) -> float:
    return float(sum(part(each) for each in trace.epochs() if each.steps))
