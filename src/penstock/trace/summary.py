"""What stays of a run that was too long to keep every span: its sums, joined as they come, and its slowest spans."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.trace.causes import Cause
from penstock.trace.metrics import EpochMetrics, Meanwhile, epoch_metrics, is_of_snapshots
from penstock.trace.schema import SPAN, Kind, Spans, choose_spans, join_spans
from penstock.trace.stages import EDGES, Durations, Stage

K = TypeVar("K", bound=Hashable)
#: Epochs that are summed up apart. Beyond, the older half of them is joined in pairs: a run of a million epochs is
#: known by its last ones, and by ever longer stretches of the earlier ones.
_MOST_EPOCHS = 512
#: Spans of snapshots that wait for a batch to be summed up with, at most: where nobody asks for batches, none comes.
_MOST_BESIDE = 1 << 14
#: Spans that are looked through together for slow ones, about: those of many short epochs.
_MOST_UNSEEN = 1 << 13
#: How many of the slowest spans of each kind are kept.
SLOWEST = 64
# As plain numbers, see `penstock.trace.metrics`.
_WAIT, _STEP, _DECODE = Kind.WAIT.value, Kind.STEP.value, Kind.DECODE.value
#: The sums of an epoch that are numbers, and of one of its stages.
_COUNTS = ("seconds", "samples", "steps")
_SECONDS = ("stall_seconds", "own_seconds", "save_seconds")
_OF_STAGE = ("calls", "samples", "bytes", "seconds", "slowest_seconds")
#: More than the sums of so many epochs take, unpacked: a file that says otherwise is not believed.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """The spans that a trace has only the sums of."""

    #: How many they were.
    spans: int = 0
    #: Ascending.
    epochs: tuple[EpochMetrics, ...] = ()
    #: SPAN[n], the slowest of each kind among them.
    slowest: Spans = field(default_factory=lambda: np.empty(0, SPAN))

    def to_bytes(self) -> bytes:
        """Return all but the slowest spans, as zlib's packing of JSON."""
        epochs = [_written(each) for each in self.epochs]
        return zlib.compress(json.dumps({"spans": self.spans, "epochs": epochs}).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes, slowest: Spans) -> Self:
        """Return what `to_bytes` was made from.

        Raises: ValueError if it was made by something else.
        """
        unpacker = zlib.decompressobj()
        try:
            text = unpacker.decompress(data, _MOST_BYTES)
            if not unpacker.eof:
                raise ValueError("it is cut, or unpacks to too much")
            said = json.loads(text, parse_constant=_refuse)
            return cls(int(said["spans"]), tuple(_read(each) for each in said["epochs"]), slowest)
        except (zlib.error, KeyError, TypeError, AttributeError, RecursionError) as reason:
            raise ValueError(f"it is no summary ({reason!r})") from reason


def joined_epochs(epochs: Iterable[EpochMetrics], more: Iterable[EpochMetrics]) -> list[EpochMetrics]:
    """Add sums of later spans to those of earlier ones.

    epochs: ascending. more: ascending; an entry that falls into one of several epochs is added to it.
    Returns: ascending.
    """
    found = list(epochs)
    for each in more:
        # From the end: what comes later is of the last epochs.
        place = len(found)
        while place and found[place - 1].epoch > each.epoch:
            place -= 1
        if place and each.epoch < found[place - 1].epoch + found[place - 1].epochs:
            found[place - 1] = _joined(found[place - 1], each, found[place - 1].epochs)
        else:
            found.insert(place, each)
    return found


class RunningMetrics:
    """Epoch metrics from spans that come bit by bit.

    Spans of batches that were consumed are summed up and dropped; those of batches still ahead wait, so that
    memory is bounded by what is staged. A snapshot's span, a piece of a second, does not count in what was
    waited before it was recorded.
    """

    def __init__(self, sum_up: Callable[[Spans, Spans], list[EpochMetrics]] = epoch_metrics) -> None:
        """sum_up: `epoch_metrics`, or what finds the same."""
        self._sum_up = sum_up
        self._ahead: Spans = np.empty(0, SPAN)
        #: Of snapshots, those that batches yet to be summed up may have run beside.
        self._beside: Spans = np.empty(0, SPAN)
        #: `DECODE` of several steps of which some were consumed: summed up, and what later waits are judged by.
        self._joint: Spans = np.empty(0, SPAN)
        self._epochs: list[EpochMetrics] = []
        self._spans = 0
        self._slowest = _Slowest()

    def add(self, spans: Spans, epoch: int, step: int) -> Spans:
        """Add new spans; all batches up to and including (epoch, step) were consumed.

        Returns: the spans that are now summed up.
        """
        if self._ahead.size:
            spans = join_spans([self._ahead, spans])
        beside = is_of_snapshots(spans)
        if beside.any():
            self._beside = join_spans([self._beside, choose_spans(spans, beside)])
            spans = choose_spans(spans, ~beside)
        consumed = (spans["epoch"] < epoch) | ((spans["epoch"] == epoch) & (spans["step"] <= step))
        self._ahead, done = choose_spans(spans, ~consumed), choose_spans(spans, consumed)
        more = self._sum_up(join_spans([done, self._beside]) if self._beside.size else done, self._joint)
        self._epochs = _bounded(joined_epochs(self._epochs, more))
        decodes = choose_spans(done, done["kind"] == _DECODE)
        joint = choose_spans(decodes, decodes["bytes"] > 0)
        if joint.size or self._joint.size:
            joint = join_spans([self._joint, joint])
            self._joint = choose_spans(
                joint, (joint["epoch"] == epoch) & (joint["step"] + joint["bytes"] > step)
            )
        if self._beside.size:
            # The training does one thing after the other: its later waits and steps begin after these.
            ends = done["end"][(done["kind"] == _WAIT) | (done["kind"] == _STEP)]
            is_over = self._beside["end"] <= ends.max(initial=-np.inf)
            is_over[: max(0, is_over.size - _MOST_BESIDE)] = True
            done = join_spans([done, self._beside[is_over]])
            self._beside = self._beside[~is_over]
        self._spans += done.size
        self._slowest.add(done)
        return done

    def with_spans(self, spans: Spans, epoch: int, step: int) -> Self:
        """Return what `add` would make of this, which stays as it is; without the slowest spans."""
        found = copy(self)
        found._slowest = _Slowest()
        found.add(spans, epoch, step)
        return found

    @property
    def waiting(self) -> Spans:
        """The spans that came and are not summed up, or not with all that ran meanwhile."""
        return join_spans([self._ahead, self._beside])

    @property
    def slowest(self) -> Spans:
        """The slowest spans of each kind so far, at least `SLOWEST` where there were as many."""
        return self._slowest.spans

    def summary(self) -> Summary:
        """Return what the sums are, as a value."""
        return Summary(self._spans, tuple(self._epochs), slowest_of(self._slowest.spans))

    def epoch(self, epoch: int) -> EpochMetrics | None:
        """Return the sums of one epoch so far, or of the epochs that it was joined with."""
        return next((each for each in self._epochs if each.epoch <= epoch < each.epoch + each.epochs), None)

    def epochs(self) -> list[EpochMetrics]:
        """Return the sums so far, by epoch."""
        return list(self._epochs)


class _Slowest:
    """The slowest spans of each kind that were added, and some others."""

    def __init__(self) -> None:
        self._spans: Spans = np.empty(0, SPAN)
        #: Not looked through yet, and how many they are.
        self._more: list[Spans] = []
        self._count = 0
        #: By kind: what is quicker is not among the slowest.
        self._least_seconds = np.full(256, -np.inf)

    def add(self, spans: Spans) -> None:
        self._more.append(spans)
        self._count += spans.size
        if self._count > _MOST_UNSEEN:
            self._look_through()

    @property
    def spans(self) -> Spans:
        if self._count:
            self._look_through()
        return self._spans

    def _look_through(self) -> None:
        spans, self._more, self._count = join_spans(self._more), [], 0
        seconds = spans["end"] - spans["start"]
        slow = choose_spans(spans, seconds > self._least_seconds[spans["kind"]])
        if not slow.size:
            return
        self._spans = join_spans([self._spans, slow])
        if np.bincount(self._spans["kind"]).max() > 2 * SLOWEST:
            self._spans = slowest_of(self._spans, SLOWEST)
            kinds, counts = np.unique(self._spans["kind"], return_counts=True)
            for kind in kinds[counts == SLOWEST]:
                of_kind = self._spans[self._spans["kind"] == kind]
                self._least_seconds[kind] = (of_kind["end"] - of_kind["start"]).min()


def slowest_of(spans: Spans, most: int = SLOWEST) -> Spans:
    """Return the slowest spans of each kind, at most so many of each: by kind, the slowest first."""
    seconds = spans["end"] - spans["start"]
    order: NDArray[np.intp] = np.lexsort((-seconds, spans["kind"]))
    kinds = spans["kind"][order]
    place_in_kind = np.arange(kinds.size) - np.searchsorted(kinds, kinds, "left")
    chosen: Spans = spans.take(order[place_in_kind < most])
    return chosen


def _bounded(epochs: list[EpochMetrics]) -> list[EpochMetrics]:
    if len(epochs) <= _MOST_EPOCHS:
        return epochs
    older = len(epochs) // 4 * 2
    pairs = [
        _joined(first, then, then.epoch + then.epochs - first.epoch)
        for first, then in zip(epochs[:older:2], epochs[1:older:2], strict=True)
    ]
    return pairs + epochs[older:]


def _joined(first: EpochMetrics, then: EpochMetrics, epochs: int) -> EpochMetrics:
    """The sums of two parts of a run that follow each other without a gap."""
    return replace(
        first,
        epochs=epochs,
        stall_by_cause=_added(first.stall_by_cause, then.stall_by_cause),
        stages=_added(first.stages, then.stages),
        meanwhile=_added(first.meanwhile, then.meanwhile),
        **{name: getattr(first, name) + getattr(then, name) for name in (*_COUNTS, *_SECONDS)},
    )


class _Addable(Protocol):
    def __add__(self, other: Any, /) -> Any: ...


V = TypeVar("V", bound=_Addable)


def _added(first: Mapping[K, V], then: Mapping[K, V]) -> dict[K, V]:
    total = dict(first)
    for key, value in then.items():
        total[key] = total[key] + value if key in total else value
    return total


def _written(metrics: EpochMetrics) -> dict[str, Any]:
    return {
        **{name: getattr(metrics, name) for name in ("epoch", "epochs", *_COUNTS)},
        "stall_by_cause": {str(cause): seconds for cause, seconds in metrics.stall_by_cause.items()},
        **{name: getattr(metrics, name) for name in _SECONDS},
        "meanwhile": {
            kind.name: [then.stall_seconds, then.own_seconds] for kind, then in metrics.meanwhile.items()
        },
        "stages": [
            {
                "kind": stage.kind.name,
                "place": stage.place,
                "of_peers": stage.of_peers,
                **{name: getattr(durations, name) for name in _OF_STAGE},
                "counts": sorted(durations.counts.items()),
            }
            for stage, durations in metrics.stages.items()
        ],
    }


def _read(said: Mapping[str, Any]) -> EpochMetrics:
    stages = {
        Stage(Kind[each["kind"]], int(each["place"]), bool(each["of_peers"])): Durations(
            int(each["calls"]),
            int(each["samples"]),
            int(each["bytes"]),
            float(each["seconds"]),
            float(each["slowest_seconds"]),
            {int(bucket): int(calls) for bucket, calls in each["counts"]},
        )
        for each in said["stages"]
    }
    if not all(0 <= bucket <= EDGES.size for each in stages.values() for bucket in each.counts):
        raise ValueError(f"a histogram has other buckets than 0 to {EDGES.size}")
    causes = {Cause(cause): float(seconds) for cause, seconds in said["stall_by_cause"].items()}
    causes.setdefault(Cause.START, 0.0)  # which earlier versions counted as decoding
    if set(causes) != set(Cause):
        raise ValueError(f"it sums up stalls by {sorted(causes)}")
    numbers: dict[str, Any] = {name: int(said[name]) for name in ("epoch", "epochs", "samples", "steps")}
    numbers |= {name: float(said[name]) for name in ("seconds", *_SECONDS)}
    return EpochMetrics(
        **numbers,
        stall_by_cause={cause: causes[cause] for cause in Cause},
        stages=stages,
        meanwhile={
            Kind[kind]: Meanwhile(float(stalled), float(own))
            for kind, (stalled, own) in said["meanwhile"].items()
        },
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no sum")
