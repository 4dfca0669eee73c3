"""A recorded run as what can be predicted again: its plan, sizes, limits and steps, also with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.budget import MemoryBudget, share_memory
from penstock.loader.prediction import prepare_clock
from penstock.loader.setup import with_memory
from penstock.machine import Machine
from penstock.measure.from_trace import as_stored, decoding_as_in
from penstock.measure.header import field_of, form_in, made_of
from penstock.plan import AccessPlan
from penstock.plan.recorded import with_planned_ids
from penstock.plan.serialise import read_plan
from penstock.policy import StagingLimits
from penstock.policy.decisions import OWN_BYTES
from penstock.policy.forms import CropForm
from penstock.policy.loading import Job
from penstock.simulate import predict
from penstock.simulate.policies import POLICY_NAMES
from penstock.simulate.scheduled import MOST_READS
from penstock.trace import NO_STEP, Kind, Spans, Trace, batch_waits
from penstock.trace.metrics import is_of_snapshots
from penstock.trace.schema import GroupIds
from penstock.units import format_bytes

#: Of so many reads of a rank loaders are predicted, one after the other.
MOST_READS_OF_RANK = MOST_READS
#: The running number of each (epoch, step) in which a rank reads anything.
_Numbers = dict[tuple[int, int], int]
#: Why another loader is left as it was, once as many reads of a rank were predicted as of a single loader at most.
_ENOUGH_READS = (
    f"{MOST_READS:,} reads of its rank's loaders are predicted and no more: give penstock explain its .trace"
)
#: What a machine that was calibrated without transforms leaves open.
AS_DECODED = "the machine does not say how fast samples are decoded: that is as it was in this run"


@dataclass(frozen=True, slots=True)
class Change:
    """What a replay does otherwise than the run did; None leaves it.

    memory_bytes: the loader's memory=. readers: threads that read. decoders: threads that decode.
    machine: with measured costs.
    """

    memory_bytes: int | None = None
    readers: int | None = None
    decoders: int | None = None
    machine: Machine | None = None


NO_CHANGE = Change()


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The rank's steps in the plan's order. Seconds of steps that were not consumed are the others' median.

    number: of each (epoch, step). was_consumed: bool[steps].
    own: float64[steps], from having the batch to asking for more.
    until_next: float64[steps], from having the batch to asking for the next one, pauses between epochs included.
    """

    number: _Numbers
    was_consumed: NDArray[np.bool_]
    own: NDArray[np.float64]
    until_next: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A recorded run of one rank, to be predicted again. Made by `replay_of`.

    sizes_bytes: int64[samples]. unknown, together: of how many the mean of all, or of a group, stands for the size.
    first: (epoch, step) of the first batch. first_ask_seconds: when the training asked for it.
    costs: the machine that the loader was made with, its memory and disks included; None where it was not measured.
    """

    trace: Trace
    plan: AccessPlan
    rank: int
    first: tuple[int, int]
    policy: str
    limits: StagingLimits
    form: CropForm | None
    sizes_bytes: NDArray[np.int64]
    unknown: int
    together: int
    recorded: _Steps
    first_ask_seconds: float
    costs: Machine | None

    @property
    def budget(self) -> MemoryBudget:
        """How the run's memory was shared out. Raises: ConfigError if the header does not say."""
        return made_of(MemoryBudget, self.trace.meta, "memory")

    @property
    def total_bytes(self) -> int:
        """What all samples take in the form in which the run kept them."""
        if self.form is not None:
            return self.form.bytes_for(self.sizes_bytes.size)
        return int(self.sizes_bytes.sum())

    def on(self, costs: Machine) -> Replay:
        """Return the same run at other costs, with its own memory and disks."""
        if self.costs is None:
            costs = with_memory(costs, self.budget, self.limits.decoders, self.plan.ranks)
        return replace(self, costs=costs)

    def predict(self, change: Change = NO_CHANGE, step_seconds: float | None = None) -> Trace:
        """Return the trace of the consumed steps, predicted.

        A machine that does not say how fast samples are decoded decodes them as fast as this run did.
        step_seconds: of every step; what was recorded unless given.
        Raises: ConfigError if no machine is known, or for memory that does not hold three batches.
        """
        limits, on = self.limits, change.machine or self.costs
        if on is None:
            raise ConfigError(
                "the loader was made without a machine, so what a read should cost is not known: give --machine FILE, "
                "which penstock calibrate writes"
            )
        if change != NO_CHANGE:
            budget, limits = self._changed(change)
            disks = [each for each in on.storage[1:] if each.backend != "memory" and change.machine is None]
            on = with_memory(on, budget, limits.decoders, self.plan.ranks, disks)
        if change.machine is not None and lacks_decoding(change.machine):
            on = decoding_as_in(self.trace, on)
        prepare_clock(self.plan.reads(self.rank))
        until_next = self.recorded.until_next
        seconds = until_next if step_seconds is None else np.full(until_next.size, step_seconds)
        sharing = cast("list[int] | None", self.trace.meta.get("sharing"))
        tiers_bytes = cast("list[list[int]] | None", self.trace.meta.get("tiers_bytes"))
        if change.memory_bytes is not None:  # of all ranks
            tiers_bytes = None
        whole = predict(
            Job(
                self.plan,
                self.sizes_bytes,
                on,
                rank=self.rank,
                form=self.form,
                sharing=sharing,
                first=self.first,
                tiers_bytes={
                    rank: of_rank[: len(on.storage) - 1]
                    for rank, of_rank in zip(sharing or (), tiers_bytes or (), strict=False)
                },
            ),
            limits=limits,
            policy=self.policy,
            step_seconds=seconds.tolist(),
            first_ask_seconds=self.first_ask_seconds,
        )
        was_consumed = self.recorded.was_consumed
        spans = _only(whole.spans, self.recorded.number, was_consumed)
        if step_seconds is None:
            steps = np.flatnonzero(spans["kind"] == Kind.STEP)
            # What passed between a step's end and the next wait, an evaluation say, is nobody's own time in the record.
            spans["end"][steps] = spans["start"][steps] + self.recorded.own[was_consumed]
        return Trace(spans, {**whole.meta, "loader": "predicted"})

    def _changed(self, change: Change) -> tuple[MemoryBudget, StagingLimits]:
        """Return how memory is shared out, and the limits."""
        was, limits = self.budget, self.limits
        if change.readers is not None:
            limits = replace(limits, readers=change.readers, most_readers=0)
        if change.decoders is not None:
            limits = replace(limits, decoders=change.decoders, most_decoders=0)
        if change.memory_bytes is None and change.readers is None:
            return was, self._with_reads(limits, was)
        limit_bytes = was.limit_bytes if change.memory_bytes is None else change.memory_bytes
        taken_bytes = was.decoding_bytes + was.queued_bytes
        if limit_bytes <= taken_bytes:
            waits = ", and what waits for disks," if was.queued_bytes else ""
            raise ConfigError(
                f"memory is {format_bytes(limit_bytes)}, and what decodes pictures{waits} took "
                f"{format_bytes(taken_bytes)} in this run: give more"
            )
        budget = share_memory(
            limit_bytes - taken_bytes,
            slot_bytes=was.slot_bytes,
            local_batch=self.plan.max_local_batch(self.rank),
            readers=limits.readers,
            largest_sample_bytes=int(self.sizes_bytes.max(initial=0)),
            keep_bytes=0 if self.policy == "staging" else self.total_bytes,
            decoders=limits.decoders,
            most_slots=was.most_slots,
        )
        budget = replace(
            budget,
            limit_bytes=limit_bytes,
            decoding_bytes=budget.decoding_bytes + was.decoding_bytes,
            queued_bytes=was.queued_bytes,
        )
        return budget, self._with_reads(replace(limits, slots=budget.slots), budget)

    def _with_reads(self, limits: StagingLimits, budget: MemoryBudget) -> StagingLimits:
        """Return the limits with what a budget has for reads, of which bytes are as much larger here as in the run."""
        in_place = self.limits.own_bytes > OWN_BYTES  # as only bytes that take no memory beside their slot
        readers_bytes, own_bytes = budget.read_bytes(_most_decoders(limits), in_place=in_place)
        of_run, _ = self.budget.read_bytes(_most_decoders(self.limits), in_place=in_place)
        stored_bytes = max(1, readers_bytes * self.limits.undecoded_bytes // max(1, of_run))
        return replace(limits, undecoded_bytes=stored_bytes, own_bytes=own_bytes)


def _most_decoders(limits: StagingLimits) -> int:
    return max(limits.decoders, limits.most_decoders)


def refuse_enough(reads: Mapping[int, int], rank: int) -> None:
    """Raise ConfigError if enough is predicted for a rank. reads: of the loaders that were, by rank."""
    if reads.get(rank, 0) >= MOST_READS_OF_RANK:
        raise ConfigError(_ENOUGH_READS)


def lacks_decoding(machine: Machine) -> bool:
    """Return whether a machine does not say how fast samples are decoded, as one calibrated without transforms."""
    return not machine.knows_decoding


def replay_of(trace: Trace) -> Replay:
    """Return a recorded run as what can be predicted again.

    Raises: ConfigError naming what is missing in the record, or for one of several ranks.
    """
    meta = trace.meta
    if np.unique(trace.spans["rank"]).size > 1:
        raise ConfigError("a run of several ranks is replayed rank by rank: give the trace of one of them")
    if trace.is_watched:
        raise ConfigError(
            "it is another loader, in penstock.watch: penstock explain --source says what Penstock's would make of it"
        )
    waits = batch_waits(trace.spans)
    if not waits.size:
        raise ConfigError("no batch was consumed in the recorded run, so there is nothing to predict")
    if meta.get("reads") == "data set":
        raise ConfigError(
            "what a sample of a data set costs is known to its own code alone, so that nothing can be predicted: "
            "record a run over a folder or a source"
        )
    if meta.get("loads") == "when asked":
        raise ConfigError(
            "it loaded nothing ahead (decoders=0), and a prediction is of what does: record another run"
        )
    if "plan" not in meta:
        raise ConfigError(
            "its header does not say what was run: give a trace that a loader of this version wrote with trace="
        )
    rank = int(field_of(meta, "rank", int))
    written = field_of(meta, "plan", dict)
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
    limits = made_of(StagingLimits, meta, "limits")
    form = form_in(meta)
    sized = _sized(as_stored(trace.spans, form))
    # A run that found all of them in the form reads and decodes none: their sizes do not matter.
    sized = sized if sized.size else _sized(trace.spans)
    sizes_bytes, unknown, together = _sizes_bytes(sized, with_planned_ids(trace).ids, plan.samples)
    number = _numbers(plan, rank, first)
    recorded = _steps_of(number, waits, trace.spans)
    # Of a run that keeps only its last steps, nobody knows how it began.
    begin = float(waits["start"].min())
    if not trace.left_out.spans:
        begin = float(trace.spans["start"][~is_of_snapshots(trace.spans)].min())
    policy = field_of(meta, "policy", str)
    if policy not in POLICY_NAMES:
        raise ConfigError(
            f"its header says policy = {policy!r}, a class of somebody's own: predict such a run by loader.predict()"
        )
    return Replay(
        trace,
        plan,
        rank,
        first,
        policy,
        limits,
        form,
        sizes_bytes,
        unknown,
        together,
        recorded,
        float(waits["start"].min()) - begin,
        None if meta.get("machine") is None else Machine.from_toml(str(meta["machine"])),
    )


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
    return _Steps(number, was_consumed, own, until_next)


def _first_of(meta: Mapping[str, Any]) -> tuple[int, int]:
    """Return (epoch, step) of the batch that the run began with."""
    match field_of(meta, "first_step", list):
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


def _sized(spans: Spans) -> Spans:
    sized: Spans = spans[np.isin(spans["kind"], (Kind.READ, Kind.HIT)) & (spans["sample"] >= 0)]
    return sized


def _sizes_bytes(sized: Spans, ids: GroupIds, samples: int) -> tuple[NDArray[np.int64], int, int]:
    """Return int64[samples], how many have no size in the trace, and of how many only a mean.

    Of a group, the sum is known: each of its samples gets its part. What is not known gets the mean of all reads.
    """
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


def _only(spans: Spans, number: _Numbers, was_consumed: NDArray[np.bool_]) -> Spans:
    """Return the prediction without the waits, steps and work for batches that the record did not come to."""
    kept = np.array([step == NO_STEP or was_consumed[number[epoch, step]] for epoch, step in _keys(spans)])
    last_epoch = max(epoch for (epoch, _), place in number.items() if was_consumed[place])
    chosen: Spans = spans[kept & (spans["epoch"] <= last_epoch)]
    return chosen[np.argsort(chosen["start"], kind="stable")]
