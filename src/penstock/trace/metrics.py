"""What a trace amounts to: per epoch, how long the consumer waited, and for what.

Every number is a sum over spans; `penstock.trace.causes` judges what each wait was for.

Snapshots that are written and drained during the training take bandwidth and processors from reading and decoding. How
much of the waiting fell into such times is listed next to the causes: it is no cause of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.trace.causes import Cause, stall_causes
from penstock.trace.schema import NO_STEP, Kind, Spans, choose_spans, join_spans
from penstock.trace.stages import Durations, Stage, distinct, stage_durations

# As plain numbers: NumPy looks for its protocols on an enumeration's members, which runs Python code, and swallows a
# Ctrl-C that comes there.
_WAIT, _STEP, _DECODE = Kind.WAIT.value, Kind.STEP.value, Kind.DECODE.value
_SAVE, _WRITE, _DRAIN, _LOAD = Kind.SAVE.value, Kind.WRITE.value, Kind.DRAIN.value, Kind.LOAD.value


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What consumers did while something else ran."""

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


def epoch_metrics(spans: Spans, loaded: Spans | None = None) -> list[EpochMetrics]:
    """Sum a trace up, epoch by epoch.

    spans: SPAN[n], in any order. loaded: SPAN[m], of batches that waits among them got, and summed up before.
    Returns: one entry per epoch that any span names, ascending; a save names none. O(n log n).
    """
    beside = is_of_snapshots(spans)
    of_snapshots = choose_spans(spans, beside)
    if of_snapshots.size:
        spans = choose_spans(spans, ~beside)
    epochs, group, _ = distinct(spans["epoch"].astype(np.int64))
    kind = np.ascontiguousarray(spans["kind"])
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
    known = spans if loaded is None or not loaded.size else join_spans([loaded, spans])
    stall = total(wait_group, waits["end"] - waits["start"])
    own = total(step_group, steps["end"] - steps["start"])
    causes = {cause: total(wait_group, part) for cause, part in stall_causes(known, waits).items()}
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
    # The kinds are neighbours; what is below them wraps around.
    beside: NDArray[np.bool_] = np.ascontiguousarray(spans["kind"]) - np.uint8(_SAVE) <= _LOAD - _SAVE
    return beside


def stall_share(stall_seconds: float, own_seconds: float) -> float:
    """Return the part of a consumer's time that it waited, in [0, 1]; 0 where no time passed."""
    seconds = stall_seconds + own_seconds
    return stall_seconds / seconds if seconds else 0.0


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
    held = np.zeros(steps.size)
    if not of_snapshots.size:
        return held
    saves = of_snapshots[of_snapshots["kind"] == _SAVE]
    for rank in np.unique(saves["rank"]):
        of_rank = steps["rank"] == rank
        held[of_rank] = overlap_seconds(steps[of_rank], saves[saves["rank"] == rank])
    return held


def _by_place(stages: Mapping[Stage, Durations], kind: Kind) -> dict[int, int]:
    found: dict[int, int] = {}
    for stage, durations in stages.items():
        if stage.kind == kind:
            found[stage.place] = found.get(stage.place, 0) + durations.samples
    return found
