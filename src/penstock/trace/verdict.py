"""What limited an epoch, in one line for people."""

from __future__ import annotations

from penstock.trace.causes import Cause
from penstock.trace.metrics import EpochMetrics, stall_share
from penstock.trace.schema import Kind
from penstock.units import format_count, format_ratio, format_seconds

#: What the reader of a trace must know whose `is_complete` is False.
NOT_COMPLETE = "the trace is not complete: its file is cut off, or the run was too fast to record all of it"

#: What a person would have to change, by cause.
_LIMIT_OF = {
    Cause.SOURCE_READ: "storage",
    Cause.TIER_READ: "storage",
    Cause.DECODE: "decode",
    Cause.NO_FREE_SLOT: "the staging buffer",
    Cause.START: "the start of worker processes",
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
#: Time of a step below which a loop that hardly does anything but wait has no training in it either: a program next to
#: it makes an empty step that long. It may also be a step that a GPU is asked for and does by itself.
_LITTLE_TRAINING_SECONDS = 1e-3
_LITTLE_TRAINING_SHARE = 0.05
#: Times as fast from which on the step's own time says more than their number.
_MOST_TIMES = 100.0


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
