"""A recorded run laid over its prediction: the same plan, sizes, limits and steps, in virtual time.

What the loader decided and the machine costs is predicted; what the training itself did (how long each step took, when
it asked first) is taken from the record, so that what differs is the loading.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.setup import read_machine
from penstock.machine import Machine
from penstock.measure.from_trace import learn
from penstock.measure.replay import AS_DECODED, Change, Replay, lacks_decoding, replay_of
from penstock.store.calls import Calls
from penstock.trace import NO_STEP, Cause, EpochMetrics, Kind, Summary, Trace, read_trace
from penstock.trace.verdict import NOT_COMPLETE


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
    """A recorded run and its prediction.

    predicted, measured: of the steps that were consumed alone.
    notes: what a reader must know before trusting the figures, a sentence each. reads: of its plan.
    """

    predicted: Trace
    measured: Trace
    notes: tuple[str, ...]
    reads: int = 0

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
    """Predict a recorded run from its file alone, and compare the two.

    path: of a trace that a loader of this Penstock wrote.
    machine: with measured costs, or its file; the one that the loader was made with unless given, and without one the
        costs that can be learned from the run.
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
    run = replay_of(trace)
    given = read_machine(machine, Calls())
    notes = _notes(run)
    if given is None and run.costs is None:
        run = run.on(learn(trace).machine)
        notes += ("The costs were learned from this run.",)
    predicted = run.predict(Change(machine=given), step_seconds)
    if given is not None and lacks_decoding(given):
        notes += (f"{AS_DECODED.capitalize()}.",)
    in_vain = (trace.spans["kind"] == Kind.WAIT) & (trace.spans["step"] == NO_STEP)
    measured = replace(trace, spans=trace.spans[~in_vain], left_out=Summary())
    return RunComparison(predicted, measured, notes, run.plan.reads(run.rank))


def _notes(run: Replay) -> tuple[str, ...]:
    trace, plan, was_consumed = run.trace, run.plan, run.recorded.was_consumed
    unknown, together = run.unknown, run.together
    notes = []
    if not trace.is_complete:
        notes.append(f"{NOT_COMPLETE.capitalize()}.")
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
