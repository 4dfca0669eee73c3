"""What a trace amounts to: per epoch, how long the consumer waited, and for what.

Every number is a sum over spans. The one judgement is the cause of a wait, by the critical item's life:

    batch wants     slot        the sample's       timed hit    decode       consumer
    a slot          granted     read ends          ends         ends         has the batch
      |--no free slot--|--source or tier read--|--tier read--|--decode--|--hand-over--|
                 |<------------------- the consumer's wait, anywhere on it ---------->|

The critical item of a batch is the group whose decoding ended last; a group is one sample or many, which one call
moved or loaded. What brought its bytes is the read or hit of its flow. Where there is none, it is that of its sample;
for a group, whose bytes then came by several, the last one for its batch that ended before it was decoded.
Each phase counts as far as it overlaps the wait. Waiting for a read to begin counts as the read; waiting for a thread
that decodes counts as decode, also where that thread reads by itself. A wait that ended without a batch has no such
item and is a cause of its own.

Snapshots that are written and drained during the training take bandwidth and processors from reading and decoding. How
much of the waiting fell into such times is listed next to the causes: it is no cause of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.trace.schema import NO_FLOW, NO_STEP, SOURCE, Kind, Spans, choose_spans
from penstock.trace.stages import Durations, Stage, stage_durations
from penstock.units import format_count, format_ratio, format_seconds

_BATCH = ("rank", "epoch", "step")
_FLOW = ("rank", "flow")
_SAMPLE = ("rank", "sample")
# As plain numbers: NumPy looks for its protocols on an enumeration's members, which runs Python code, and swallows a
# Ctrl-C that comes there.
_WAIT, _STEP, _READ, _HIT, _DECODE, _SLOT, _SAVE, _WRITE, _DRAIN, _LOAD, _RETRY = (
    kind.value for kind in Kind
)


class Cause(StrEnum):
    """What a consumer waited for."""

    SOURCE_READ = "source read"
    TIER_READ = "tier read"
    DECODE = "decode"
    NO_FREE_SLOT = "no free slot"
    HAND_OVER = "hand-over"
    #: No batch came: an error or an interrupt ended the wait, or the epoch was over.
    NO_BATCH = "no batch"
    #: The trace holds no `DECODE` span of the batch: a foreign loader, or spans that were dropped.
    UNSEEN = "unseen"


#: What a person would have to change, by cause.
_LIMIT_OF = {
    Cause.SOURCE_READ: "storage",
    Cause.TIER_READ: "storage",
    Cause.DECODE: "decode",
    Cause.NO_FREE_SLOT: "the staging buffer",
    Cause.HAND_OVER: "hand-over",
    Cause.UNSEEN: "the loader",
}

#: Share of waiting below which a better loader has nothing to offer.
NOTHING_TO_GAIN = 0.01
#: Share of waiting below which it is the training that limits.
_HARDLY_WAITED = 0.05
#: Time of an epoch below which it shows how a loader starts, not how it goes: its first batches were not read ahead.
TOO_SHORT_SECONDS = 0.1
#: Time of a step below which nothing is trained in it: an empty loop takes a few microseconds.
NO_TRAINING_SECONDS = 100e-6
#: Time of a step below which a loop that hardly does anything but wait has no training in it either: a program beside
#: it makes an empty step that long. It may also be a step that a GPU is asked for and does by itself.
_LITTLE_TRAINING_SECONDS = 1e-3
_LITTLE_TRAINING_SHARE = 0.05
#: Times as fast from which on the step's own time says more than their number.
_MOST_TIMES = 100.0


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What consumers did while something else ran beside them."""

    stall_seconds: float
    own_seconds: float

    def __add__(self, other: Meanwhile) -> Meanwhile:
        return Meanwhile(self.stall_seconds + other.stall_seconds, self.own_seconds + other.own_seconds)


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """The sums of one epoch. Where a trace holds several ranks, they are sums over the ranks too."""

    epoch: int
    #: From the start of the first wait to the end of the last wait or step.
    seconds: float
    #: Samples decoded for a batch.
    samples: int
    #: Batches handed to a consumer.
    steps: int
    #: Time that consumers waited.
    stall_seconds: float
    #: All of `Cause`, in that order; sums to `stall_seconds`.
    stall_by_cause: Mapping[Cause, float]
    #: Time that consumers spent between receiving a batch and asking for the next.
    own_seconds: float
    #: What each kind of span took, by the place that its bytes came from: calls, samples, bytes, and a histogram.
    stages: Mapping[Stage, Durations] = field(default_factory=dict)
    #: The part of `own_seconds` for which saves held the training.
    save_seconds: float = 0.0
    #: By `Kind.WRITE` and `Kind.DRAIN`, what happened while some snapshot was written or drained, on whichever rank;
    #: only where one was. Parts of `stall_seconds` and `own_seconds`.
    meanwhile: Mapping[Kind, Meanwhile] = field(default_factory=dict)
    #: How many epochs these are the sums of, the first of which is `epoch`: more than one where a run of very many has
    #: joined old ones.
    epochs: int = 1

    @property
    def reads_by_place(self) -> dict[int, int]:
        """Samples read from each place, background fills included."""
        return _by_place(self.stages, Kind.READ)

    @property
    def hits_by_place(self) -> dict[int, int]:
        """Samples taken from each memory tier."""
        return _by_place(self.stages, Kind.HIT)

    @property
    def bytes_by_place(self) -> dict[int, int]:
        """Bytes taken from each place, by reads and by hits."""
        taken: dict[int, int] = {}
        for stage, durations in self.stages.items():
            if stage.kind in (Kind.READ, Kind.HIT):
                taken[stage.place] = taken.get(stage.place, 0) + durations.bytes
        return taken

    @property
    def name(self) -> str:
        """ "epoch 3", or "epochs 0 to 7"."""
        return (
            f"epoch {self.epoch}"
            if self.epochs == 1
            else f"epochs {self.epoch} to {self.epoch + self.epochs - 1}"
        )

    @property
    def samples_per_second(self) -> float:
        """Samples over the epoch's seconds; 0 for an epoch that took no time."""
        return self.samples / self.seconds if self.seconds else 0.0


def epoch_metrics(spans: Spans) -> list[EpochMetrics]:
    """Sum a trace up, epoch by epoch.

    spans: SPAN[n], in any order.
    Returns: one entry per epoch that any span names, ascending; a save names none. O(n log n).
    """
    beside = is_of_snapshots(spans)
    of_snapshots = choose_spans(spans, beside)
    if of_snapshots.size:
        spans = choose_spans(spans, ~beside)
    epochs, group = np.unique(spans["epoch"], return_inverse=True)
    kind = spans["kind"]
    waits, steps = choose_spans(spans, kind == _WAIT), choose_spans(spans, kind == _STEP)
    wait_group, step_group = group[kind == _WAIT], group[kind == _STEP]
    consumed = (kind == _WAIT) | (kind == _STEP)
    first, last = np.full(epochs.size, np.inf), np.full(epochs.size, -np.inf)
    np.minimum.at(first, group[consumed], spans["start"][consumed])
    np.maximum.at(last, group[consumed], spans["end"][consumed])
    seconds = np.maximum(last - first, 0.0)

    def total(groups: NDArray[np.intp], weights: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(groups, weights, epochs.size).astype(np.float64)

    held = total(step_group, _held_by_saves(steps, of_snapshots))
    meanwhile = {
        Kind(run): (
            total(wait_group, overlap_seconds(waits, others)),
            total(step_group, overlap_seconds(steps, others)),
        )
        for run in (_WRITE, _DRAIN)
        if (others := of_snapshots[of_snapshots["kind"] == run]).size
    }
    stall = total(wait_group, waits["end"] - waits["start"])
    own = total(step_group, steps["end"] - steps["start"])
    causes = {cause: total(wait_group, part) for cause, part in stall_causes(spans, waits).items()}
    samples = total(group[kind == _DECODE], spans["samples"][kind == _DECODE])
    batches = np.bincount(wait_group[waits["step"] != NO_STEP], minlength=epochs.size)
    stages = stage_durations(spans)
    return [
        EpochMetrics(
            epoch=int(epoch),
            seconds=float(seconds[row]),
            samples=int(samples[row]),
            steps=int(batches[row]),
            stall_seconds=float(stall[row]),
            stall_by_cause={cause: float(parts[row]) for cause, parts in causes.items()},
            own_seconds=float(own[row]),
            stages=stages.get(int(epoch), {}),
            save_seconds=float(held[row]),
            meanwhile={
                run: Meanwhile(float(waited[row]), float(worked[row]))
                for run, (waited, worked) in meanwhile.items()
                if waited[row] or worked[row]
            },
        )
        for row, epoch in enumerate(epochs)
    ]


def is_of_snapshots(spans: Spans) -> NDArray[np.bool_]:
    """Return which spans are of saves and restores, not of batches: bool[n]."""
    beside: NDArray[np.bool_] = (spans["kind"] >= _SAVE) & (spans["kind"] <= _LOAD)
    return beside


def limiting(
    metrics: EpochMetrics, source: str = "storage", decode: str = "decode", *, is_cut: bool = False
) -> str:
    """Say in one line what limited an epoch, and by how much.

    source, decode: what to name where reads of the source, or decoding, limited it; one name where that is not known
        them apart, as inside a data set.
    is_cut: the trace may break off within the epoch; the line then speaks of what was recorded alone.

    Below one part in twenty of waiting, the training itself is named: no loader could make it much faster. Saves that
    blocked the training, and waits while snapshots were written or drained, are named where they matter: from one
    part in a hundred on, and where more was waited then than at other times. Waits that got no batch come first, and
    do not count in the judgement. Less than a tenth of a second is not judged; no gain is named where nothing trained.

    >>> limiting(EpochMetrics(2, 10.0, 640, 10, 4.0, {Cause.DECODE: 4.0}, 6.0))
    'epoch 2: decode limits it: waited 40.0 % of 10 s (4 s decode); without, 1.67 x as fast'
    """
    in_vain = metrics.stall_by_cause.get(Cause.NO_BATCH, 0.0)
    if is_cut and not metrics.steps:
        return f"{metrics.name}: the trace breaks off before a batch is consumed"
    if not metrics.steps:
        waited = f" in {format_seconds(in_vain)} of waiting" if in_vain else ""
        return f"{metrics.name}: no batch was consumed{waited}"
    stall_seconds = metrics.stall_seconds - in_vain
    seconds = stall_seconds + metrics.own_seconds
    line = f"{metrics.name}{', as far as it was recorded' if is_cut else ''}: "
    if in_vain > NOTHING_TO_GAIN * (seconds + in_vain):
        line += f"waited {format_seconds(in_vain)} and got no batch; otherwise "
    by_cause = {cause: part for cause, part in metrics.stall_by_cause.items() if cause != Cause.NO_BATCH}
    by_limit: dict[str, float] = {}
    by_name: dict[str, float] = {}
    for cause, part in by_cause.items():
        limit = {Cause.SOURCE_READ: source, Cause.DECODE: decode}.get(cause) or _LIMIT_OF[cause]
        by_limit[limit] = by_limit.get(limit, 0.0) + part
        name = f"in {limit}" if limit == source == decode else str(cause)
        by_name[name] = by_name.get(name, 0.0) + part
    listed = ", ".join(
        f"{format_seconds(part)} {name}"
        for name, part in sorted(by_name.items(), key=lambda each: -each[1])
        if part > 0.0
    )
    causes = f" ({listed})" if listed else ""
    share = stall_share(stall_seconds, metrics.own_seconds)
    waited = f"waited {100.0 * share:.1f} % of {format_seconds(seconds)}{causes}"
    saves = _describe_saves(metrics)
    if seconds < TOO_SHORT_SECONDS:
        return f"{line}too short to judge: {waited}{saves}"
    if share < _HARDLY_WAITED:
        return f"{line}the training itself limits it: {waited}{saves}"
    limit = max(by_limit, key=by_limit.__getitem__)
    if is_without_training(stall_seconds, metrics.own_seconds, metrics.steps):
        batches = "1 batch" if metrics.steps == 1 else f"{metrics.steps:,} batches"
        loaded = format_count(metrics.samples, "sample") if metrics.samples else batches
        loaded += f" in {format_seconds(seconds)}"
        return f"{line}{describe_idle(metrics.own_seconds, metrics.steps)}; {limit} limits it: {loaded}{causes}{saves}"
    without = describe_gain(
        seconds / metrics.own_seconds, "without, {} as fast", metrics.own_seconds / metrics.steps
    )
    return f"{line}{limit} limits it: {waited}; {without}{saves}"


def is_without_training(stall_seconds: float, own_seconds: float, steps: int) -> bool:
    """Whether a loop trains nothing between its batches, or may not: it says what a loader delivers, and no gain."""
    if own_seconds < NO_TRAINING_SECONDS * steps:
        return True
    is_little = 1.0 - stall_share(stall_seconds, own_seconds) < _LITTLE_TRAINING_SHARE
    return is_little and own_seconds < _LITTLE_TRAINING_SECONDS * steps


def describe_idle(own_seconds: float, steps: int) -> str:
    """Return what a loop `is_without_training` does between its batches: nothing, or hardly anything."""
    if own_seconds < NO_TRAINING_SECONDS * steps:
        return "no training between batches"
    return f"hardly any time between batches ({format_seconds(own_seconds / steps)} a step)"


def describe_gain(ratio: float, sentence: str, step_seconds: float) -> str:
    """Return how many times as fast a loop could be, put into a sentence; beyond a hundred, what a step takes."""
    if ratio > _MOST_TIMES:
        return f"a step itself takes {format_seconds(step_seconds)}"
    return sentence.format(format_ratio(ratio))


def _describe_saves(metrics: EpochMetrics) -> str:
    seconds = metrics.stall_seconds + metrics.own_seconds
    clauses = ""
    if metrics.save_seconds > NOTHING_TO_GAIN * seconds:
        clauses += f"; saves held the training for {format_seconds(metrics.save_seconds)} of {format_seconds(seconds)}"
    for run, verb in ((Kind.WRITE, "written"), (Kind.DRAIN, "drained")):
        then = metrics.meanwhile.get(run)
        if then is None or then.stall_seconds <= NOTHING_TO_GAIN * seconds:
            continue
        if then.stall_seconds + then.own_seconds >= (1.0 - NOTHING_TO_GAIN) * seconds:
            clauses += f"; a snapshot was {verb} nearly all the time"
            continue
        share = stall_share(then.stall_seconds, then.own_seconds)
        otherwise = stall_share(
            metrics.stall_seconds - then.stall_seconds, metrics.own_seconds - then.own_seconds
        )
        if share > otherwise:
            clauses += (
                f"; {format_seconds(then.stall_seconds)} of the waiting while a snapshot was {verb}: "
                f"{100.0 * share:.1f} % of that time, {100.0 * otherwise:.1f} % of the other"
            )
    return clauses


def stall_share(stall_seconds: float, own_seconds: float) -> float:
    """Return the part of a consumer's time that it waited, in [0, 1]; 0 where no time passed."""
    seconds = stall_seconds + own_seconds
    return stall_seconds / seconds if seconds else 0.0


def stall_causes(spans: Spans, waits: Spans) -> dict[Cause, NDArray[np.float64]]:
    """Split waits into their causes.

    spans: SPAN[n], the trace, in any order.
    waits: SPAN[m], of kind `WAIT`.
    Returns: float64[m] seconds for each of `Cause`, in that order; together each wait's duration.
    """
    kind = spans["kind"]
    decodes, slots = choose_spans(spans, kind == _DECODE), choose_spans(spans, kind == _SLOT)
    begin, end = waits["start"], waits["end"]
    has_batch = waits["step"] != NO_STEP
    seen, critical = _latest(decodes, _BATCH, waits, end)
    seen &= has_batch
    decoded = np.where(seen, critical["end"], -np.inf)
    has_slot, slot = _latest(slots, _BATCH, waits, decoded)

    moving = (kind == _READ) | (kind == _HIT)
    if not (critical["samples"] > 1).any():
        moving &= np.isin(spans["sample"], critical["sample"][seen]) | np.isin(
            spans["flow"], critical["flow"][seen & (critical["flow"] != NO_FLOW)]
        )
    of_critical, moving_kind = choose_spans(spans, moving), kind[moving]
    was_read, read = _latest_move(choose_spans(of_critical, moving_kind == _READ), critical, decoded)
    # A hit without duration was not queued for: until then the sample waited for a thread to decode it.
    timed_hits = (moving_kind == _HIT) & (of_critical["end"] > of_critical["start"])
    was_hit, hit = _latest_move(choose_spans(of_critical, timed_hits), critical, decoded)

    wanted = np.where(has_slot, slot["start"], -np.inf)
    granted = np.where(has_slot, slot["end"], -np.inf)
    read_end = np.maximum(granted, np.where(was_read, read["end"], -np.inf))
    hit_end = np.maximum(read_end, np.where(was_hit, hit["end"], -np.inf))

    def overlap(phase_begin: NDArray[np.float64], phase_end: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(
            seen, np.maximum(np.minimum(phase_end, end) - np.maximum(phase_begin, begin), 0.0), 0.0
        )

    # A thread that reads what it decodes was not waited for by a read, but by its decoding.
    own_read = was_read & (read["worker"] == critical["worker"])
    read_begin = np.where(own_read, np.clip(read["start"], granted, read_end), granted)
    own_hit = was_hit & (hit["worker"] == critical["worker"])
    hit_begin = np.where(own_hit, np.clip(hit["start"], read_end, hit_end), read_end)

    reading = overlap(read_begin, read_end)
    from_source = was_read & (read["place"] == SOURCE)
    parts = {
        Cause.SOURCE_READ: np.where(from_source, reading, 0.0),
        Cause.TIER_READ: np.where(from_source, 0.0, reading) + overlap(hit_begin, hit_end),
        Cause.DECODE: overlap(granted, read_begin) + overlap(read_end, hit_begin) + overlap(hit_end, decoded),
        Cause.NO_FREE_SLOT: overlap(wanted, granted),
    }
    explained = np.sum(list(parts.values()), axis=0)
    parts[Cause.HAND_OVER] = np.where(seen, end - begin - explained, 0.0)
    parts[Cause.NO_BATCH] = np.where(has_batch, 0.0, end - begin)
    parts[Cause.UNSEEN] = np.where(seen | ~has_batch, 0.0, end - begin)
    return parts


def overlap_seconds(spans: Spans, others: Spans) -> NDArray[np.float64]:
    """Return for how long of each span at least one of the others ran.

    spans: SPAN[n]. others: SPAN[m], in any order; they may overlap each other.
    Returns: float64[n]. O((n + m) log m).
    """
    if not others.size:
        return np.zeros(spans.size)
    others = others[np.argsort(others["start"], kind="stable")]
    until = np.maximum.accumulate(np.maximum(others["start"], others["end"]))
    begins_anew = np.concatenate([[True], others["start"][1:] > until[:-1]])
    start = others["start"][begins_anew]
    end = until[np.concatenate([np.flatnonzero(begins_anew)[1:] - 1, [others.size - 1]])]
    before = np.concatenate([[0.0], np.cumsum(end - start)])

    def covered(moment: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of all others together up to a moment."""
        run = np.searchsorted(start, moment, side="right") - 1
        inside = np.minimum(moment, end[np.maximum(run, 0)]) - start[np.maximum(run, 0)]
        reached: NDArray[np.float64] = np.where(run < 0, 0.0, before[np.maximum(run, 0)] + inside)
        return reached

    return covered(spans["end"]) - covered(spans["start"])


def _held_by_saves(steps: Spans, of_snapshots: Spans) -> NDArray[np.float64]:
    """Return for how long of each step a save of its own rank held the training."""
    saves = of_snapshots[of_snapshots["kind"] == _SAVE]
    held = np.zeros(steps.size)
    for rank in np.unique(saves["rank"]):
        of_rank = steps["rank"] == rank
        held[of_rank] = overlap_seconds(steps[of_rank], saves[saves["rank"] == rank])
    return held


def _latest(
    spans: Spans, fields: tuple[str, ...], askers: Spans, deadlines: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], Spans]:
    """Find for each asker the span that equals it in `fields` and ends last at or before its deadline.

    Of spans that end together, the last in `spans` is taken.
    Returns: found bool[askers]; SPAN[askers], zero where not found.
    """
    answers: Spans = np.zeros(askers.size, askers.dtype)
    if not spans.size:
        return np.zeros(askers.size, np.bool_), answers
    keys = [np.concatenate([spans[field], askers[field]]) for field in fields]
    asks = np.arange(spans.size + askers.size) >= spans.size
    order = np.lexsort((asks, np.concatenate([spans["end"], deadlines]), *keys))
    places = np.arange(order.size)
    latest_place = np.maximum.accumulate(np.where(asks[order], -1, places))
    latest = order[np.maximum(latest_place, 0)]
    matches = latest_place >= 0
    for key in keys:
        matches &= key[latest] == key[order]
    is_asker = asks[order]
    asker = order[is_asker] - spans.size
    found = np.zeros(askers.size, np.bool_)
    found[asker] = matches[is_asker]
    answers[asker[matches[is_asker]]] = spans[latest[is_asker & matches]]
    return found, answers


def _latest_move(
    moves: Spans, critical: Spans, deadlines: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], Spans]:
    """Find what brought the bytes of each critical item, as the module's first lines have it."""
    found, answers = _latest(moves, _SAMPLE, critical, deadlines)
    is_group = critical["samples"] > 1
    if is_group.any():
        by_batch, moved = _latest(moves, _BATCH, critical, critical["start"])
        answers[is_group], found[is_group] = moved[is_group], by_batch[is_group]
    has_flow = critical["flow"] != NO_FLOW
    if has_flow.any():
        by_flow, moved = _latest(moves, _FLOW, critical, deadlines)
        by_flow &= has_flow
        answers[by_flow] = moved[by_flow]
        found |= by_flow
    return found, answers


def _by_place(stages: Mapping[Stage, Durations], kind: Kind) -> dict[int, int]:
    found: dict[int, int] = {}
    for stage, durations in stages.items():
        if stage.kind == kind:
            found[stage.place] = found.get(stage.place, 0) + durations.samples
    return found
