"""Why a run waited: each stalled batch by what its last missing sample waited for, and the worst moments one by one.

`penstock.trace.causes` finds the critical item of every wait. Here it is asked what held that item up: a few reads far
slower than the others, a tier that was not filled yet, a snapshot that was drained meanwhile, the interpreter's lock,
another rank. Where ranks of a job step together, a step costs the job the longest wait of any of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.flow.lock_use import KEPT_SECONDS, KEPT_SHARE
from penstock.trace import NO_EPOCH, NO_PEER, NO_STEP, SOURCE, Cause, Kind, Spans, Trace, read_trace
from penstock.trace.causes import Critical, critical_items, latest_of
from penstock.trace.metrics import overlap_seconds
from penstock.trace.schema import NO_SAMPLE, join_spans
from penstock.trace.stages import describe_place
from penstock.trace.summary import Summary, joined_epochs
from penstock.trace.verdict import NOT_COMPLETE
from penstock.units import format_seconds

Seconds = NDArray[np.float64]

#: A read is slow that takes so many times the median, if no more of them do than this share of the samples.
_SLOW_TIMES, _FEW = 10.0, 0.05
#: Work is slower beside a snapshot if by this share at least.
_SLOWER_SHARE = 0.2
#: Whether workers are kept from the interpreter's lock is told if they asked so many times at least, from so long
#: before the wait on.
_LEAST_ASKED, _ASKED_BEFORE_SECONDS = 3, 0.5
#: A reason is notable that took more than this share of the lost time.
_NOTABLE_SHARE = 0.1
#: Samples of a group that a moment names.
_MOST_NAMED = 4


class Reason(StrEnum):
    """What a stalled batch waited for, finer than `penstock.trace.Cause`."""

    SLOW_READS = "a few slow reads"
    SOURCE_READ = "source read"
    COLD_TIER = "source read, tier not filled yet"
    TIER_READ = "tier read"
    PEER_READ = "read from another rank"
    DECODE = "decode and transforms"
    LOCK = "the interpreter's lock"
    NO_FREE_SLOT = "no free slot"
    SNAPSHOT = "a snapshot written or drained meanwhile"
    SAVE = "a save that blocked the training"
    FULL_BUFFER = "a save behind a full burst buffer"
    SLOW_RANK = "one slow rank"
    HAND_OVER = "hand-over"
    NO_BATCH = "no batch"
    UNSEEN = "unseen"


#: What a person can change, by reason: the decision table of docs/howto/why-is-it-slow.md.
ADVICE: Mapping[Reason, str] = {
    Reason.SLOW_READS: "look at these files and their server; more staging memory hides single slow reads",
    Reason.SOURCE_READ: "more memory or a local disk keeps samples; more readers if the store is slow to answer",
    Reason.COLD_TIER: "only the first epoch: keep the tier on a local disk, which the next run finds filled",
    Reason.TIER_READ: "the tier's disk does not keep up: a faster one, or more memory",
    Reason.PEER_READ: "the other rank's memory or the link is slow: more memory on this rank",
    Reason.DECODE: "more cores, smaller pictures, decode once (keep=), cheaper transforms",
    Reason.LOCK: "Python code holds the lock: worker processes, or native transforms; find the thread that computes",
    Reason.NO_FREE_SLOT: "drop batches after use, or raise memory=",
    Reason.SNAPSHOT: "drain to another device, or cap the drain's rate",
    Reason.SAVE: "fewer or smaller saves, or a burst buffer",
    Reason.FULL_BUFFER: "a larger burst buffer, a faster drain, or fewer saves",
    Reason.SLOW_RANK: "look at that rank's host: its store, disk and processors",
    Reason.HAND_OVER: "something else holds the interpreter's lock: look for threads of your own",
    Reason.NO_BATCH: "an error or an interrupt ended these waits: see the messages of the run",
    Reason.UNSEEN: "the trace has no spans of these batches: record with a Penstock loader",
}
_OF_CAUSE = {
    Cause.SOURCE_READ: Reason.SOURCE_READ,
    Cause.TIER_READ: Reason.TIER_READ,
    Cause.DECODE: Reason.DECODE,
    Cause.NO_FREE_SLOT: Reason.NO_FREE_SLOT,
    Cause.HAND_OVER: Reason.HAND_OVER,
    Cause.NO_BATCH: Reason.NO_BATCH,
    Cause.UNSEEN: Reason.UNSEEN,
}
_Parts = dict[Reason, Seconds]


@dataclass(frozen=True, slots=True)
class Moment:
    """One wait, down to what it hung on.

    start_seconds: since the trace's origin. seconds: that the training lost. samples: the first of the group that came
        last, empty where none is known; group: how many they are. place: where they were read from, in words.
    read_seconds: that their read took, 0 where it is not known.
    """

    rank: int
    epoch: int
    step: int
    start_seconds: float
    seconds: float
    reason: Reason
    samples: tuple[int, ...]
    group: int
    names: tuple[str, ...]
    place: str
    read_seconds: float

    @property
    def when(self) -> str:
        """Where in the run it was, in words."""
        if self.epoch == NO_EPOCH:
            return f"save at step {self.step}"
        return f"epoch {self.epoch}, " + ("no batch" if self.step == NO_STEP else f"step {self.step}")

    @property
    def samples_text(self) -> str:
        """What it hung on, in words: names, and how many came with them."""
        named, more = ", ".join(self.names), self.group - len(self.names)
        return f"{named} and {more} more" if named and more > 0 else named


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run lost its time to.

    run_seconds: waiting and steps, of the rank that took longest. stall_seconds: of the job, the longest wait of any
        rank at each step. blocked_seconds: by saves, of the rank that they blocked longest.
    by_reason: the largest first; together stall_seconds and blocked_seconds. batches: that waited mostly for it.
    slow_rank: the rank behind `Reason.SLOW_RANK`.
    """

    run_seconds: float
    stall_seconds: float
    blocked_seconds: float
    by_reason: Mapping[Reason, float]
    batches: Mapping[Reason, int]
    moments: tuple[Moment, ...]
    slow_rank: int | None
    notes: tuple[str, ...]

    @property
    def lost_seconds(self) -> float:
        """What the training would have been shorter by without waits and saves."""
        return self.stall_seconds + self.blocked_seconds

    @property
    def first(self) -> Reason | None:
        """The reason of most of the lost time; None where none was lost."""
        return next((reason for reason, seconds in self.by_reason.items() if seconds > 0), None)

    @property
    def notable(self) -> list[Reason]:
        """The reasons that are worth to do something about, the first first."""
        least = _NOTABLE_SHARE * self.lost_seconds
        return [reason for reason, seconds in self.by_reason.items() if seconds > least]

    @property
    def verdict(self) -> str:
        """The sentence that comes first."""
        total, lost = format_seconds(self.run_seconds), format_seconds(self.lost_seconds)
        if self.first is None:
            return f"Nothing was lost in {total}."
        saves = f", {format_seconds(self.blocked_seconds)} of it in saves" if self.blocked_seconds else ""
        share = f" ({100 * self.lost_seconds / self.run_seconds:.1f} %)" if self.run_seconds else ""
        which = f" (rank {self.slow_rank})" if self.first == Reason.SLOW_RANK else ""
        most = format_seconds(self.by_reason[self.first])
        return f"Lost {lost} of {total}{share}{saves}, {most} of it to: {self.first}{which}."


def read_run(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, or a folder with the traces of a job's ranks (*.trace), as one.

    Of several traces of one rank, as of a loader for training and one for validation, the largest counts.
    Raises: ConfigError if the folder has no trace; what `read_trace` raises.
    """
    if not Path(path).is_dir():
        return read_trace(path)
    files = sorted(Path(path).glob("*.trace"), key=lambda file: file.stat().st_size)
    if not files:
        raise ConfigError(
            f"{os.fspath(path)} has no *.trace in it: give a trace, or the folder that ranks wrote to"
        )
    by_rank = {_rank_of(trace): trace for trace in map(read_trace, files)}
    ranks = sorted(by_rank)
    return by_rank[ranks[0]] if len(ranks) == 1 else _joined([by_rank[rank] for rank in ranks], ranks)


def _rank_of(trace: Trace) -> int:
    rank = trace.meta.get("rank")
    return rank if isinstance(rank, int) else int(trace.spans["rank"][0]) if trace.spans.size else 0


def _joined(traces: list[Trace], ranks: list[int]) -> Trace:
    """Return the traces of several ranks, ascending, on the clock of the one that began first."""
    begun = [trace.begun for trace in traces]
    origin = min((seconds for seconds in begun if seconds is not None), default=0.0)
    parts = []
    for trace, seconds in zip(traces, begun, strict=True):
        spans = trace.spans.copy()
        for field in ("start", "end"):
            spans[field] += 0.0 if seconds is None else seconds - origin
        parts.append(spans)
    left_out = Summary()
    for trace in traces:
        slowest = join_spans([left_out.slowest, trace.left_out.slowest])
        epochs = joined_epochs(left_out.epochs, trace.left_out.epochs)
        left_out = Summary(left_out.spans + trace.left_out.spans, tuple(epochs), slowest)
    return Trace(
        join_spans(parts),
        traces[0].meta,
        all(trace.is_complete for trace in traces),
        left_out,
        {key: ids for trace in traces for key, ids in trace.ids.items()},
        {sample: name for trace in traces for sample, name in trace.names.items()},
        {
            rank: str(trace.hosts.get(rank, trace.meta.get("host", "")))
            for rank, trace in zip(ranks, traces, strict=True)
        },
        {rank: line for trace in traces for rank, line in trace.choices.items()},
    )


def explain(trace: Trace, describe: Callable[[int], str] | None = None, moments: int = 5) -> Explanation:
    """Attribute every wait of a run.

    describe: names a sample, where the trace does not. moments: how many of the worst to return.
    Raises: ConfigError if nobody waited for a batch in it.
    """
    spans = trace.spans
    waits = spans[spans["kind"] == Kind.WAIT]
    if not waits.size:
        raise ConfigError("nobody asked for a batch in the recorded run, so there is no wait to explain")
    critical, are_slow = _behind_slow_reads(spans, waits, critical_items(spans, waits))
    parts = _refined(trace, waits, critical, are_slow)
    weights, slow_rank = _of_job(waits, parts)
    saves = spans[spans["kind"] == Kind.SAVE]
    saved = _saves(spans, saves)
    is_of_longest = saves["rank"] == _longest_blocked(saves)
    total = {reason: float((weights * parts[reason]).sum()) for reason in Reason}
    for reason, seconds in saved.items():
        total[reason] += float(seconds[is_of_longest].sum())
    # Of what was left out, only the sums of all ranks are known: the job lost what a rank lost on average.
    ranks = np.unique(waits["rank"]).size
    for epoch in trace.left_out.epochs:
        for cause, more in epoch.stall_by_cause.items():
            total[_OF_CAUSE[cause]] += more / ranks
        total[Reason.SAVE] += epoch.save_seconds / ranks
    reasons = list(Reason)
    mostly = np.argmax([parts[reason] for reason in reasons], axis=0)
    lost = weights * (waits["end"] - waits["start"])
    batches = np.bincount(mostly[lost > 0], minlength=len(reasons)).tolist()
    mains = [reasons[each] for each in mostly.tolist()]
    blocked = sum(total[reason] for reason in saved)
    return Explanation(
        run_seconds=_run_seconds(trace, ranks),
        stall_seconds=sum(total.values()) - blocked,
        blocked_seconds=blocked,
        by_reason=dict(sorted(total.items(), key=lambda each: -each[1])),
        batches=dict(zip(reasons, batches, strict=True)),
        moments=_moments(trace, waits, critical, mains, lost, (saves, saved), describe, moments),
        slow_rank=slow_rank,
        notes=_notes(trace, ranks),
    )


def _refined(trace: Trace, waits: Spans, critical: Critical, are_slow: NDArray[np.bool_]) -> _Parts:
    """Return float64[waits] of each `Reason` but those of saves, which are no waits."""
    spans = trace.spans
    parts: _Parts = {reason: np.zeros(waits.size) for reason in Reason}
    for cause, seconds in critical.parts.items():
        parts[_OF_CAUSE[cause]] = seconds.copy()

    def hand(source: Reason, to: Reason, share: NDArray[Any]) -> None:
        moved = parts[source] * share
        parts[to] += moved
        parts[source] -= moved

    kept, lock_seconds = _kept_from_lock(spans, waits)
    for reason in (Reason.DECODE, Reason.HAND_OVER):
        hand(reason, Reason.LOCK, kept)
    # A read takes the lock once before and once after each sample, at most: the rest was the store's.
    by_lock = lock_seconds * (1.0 + critical.read["samples"])
    took = np.maximum(critical.read["end"] - critical.read["start"], 1e-9)
    for reason in (Reason.SOURCE_READ, Reason.TIER_READ):
        hand(reason, Reason.LOCK, np.where(kept & critical.was_read, np.minimum(1.0, by_lock / took), 0.0))
    hand(Reason.SOURCE_READ, Reason.SLOW_READS, are_slow)
    hand(Reason.SOURCE_READ, Reason.NO_FREE_SLOT, _begun_late(trace, waits, critical))
    beside = _slowed_by_snapshots(spans, waits)
    for reason in (Reason.SOURCE_READ, Reason.TIER_READ):
        hand(reason, Reason.SNAPSHOT, beside)
    hand(Reason.SOURCE_READ, Reason.COLD_TIER, np.isin(critical.read["sample"], _kept_later(trace)))
    of_peers = (critical.was_read & (critical.read["peer"] != NO_PEER)) | (
        critical.was_hit & (critical.hit["peer"] != NO_PEER)
    )
    hand(Reason.TIER_READ, Reason.PEER_READ, of_peers)
    return parts


def _kept_from_lock(spans: Spans, waits: Spans) -> tuple[NDArray[np.bool_], Seconds]:
    """Return for each wait whether workers were kept from the interpreter's lock then, and for how long on average."""
    kept, mean = np.zeros(waits.size, np.bool_), np.zeros(waits.size)
    asks = spans[spans["kind"] == Kind.LOCK]
    for rank in np.unique(asks["rank"]):
        own = asks[asks["rank"] == rank]
        own = own[np.argsort(own["end"], kind="stable")]
        seconds = own["end"] - own["start"]
        which = waits["rank"] == rank
        first = np.searchsorted(own["end"], waits["start"][which] - _ASKED_BEFORE_SECONDS)
        last = np.searchsorted(own["end"], waits["end"][which], "right")
        asked = np.maximum(last - first, 1)
        sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (seconds >= KEPT_SECONDS, seconds)]
        share, mean[which] = ((each[last] - each[first]) / asked for each in sums)
        kept[which] = (asked >= _LEAST_ASKED) & (share >= KEPT_SHARE)
    return kept, mean


def _behind_slow_reads(spans: Spans, waits: Spans, critical: Critical) -> tuple[Critical, NDArray[np.bool_]]:
    """Return which waits hung on a read of the source that was slow as only a few were, and those reads as critical.

    A read that was quick itself may have waited for its thread, which was at a slow one: then it was that one.
    """
    reads = spans[(spans["kind"] == Kind.READ) & (spans["place"] == SOURCE)]
    nothing = np.zeros(waits.size, np.bool_)
    if not reads.size:
        return critical, nothing
    limit = _SLOW_TIMES * float(np.median(_seconds_a_sample(reads)))
    slow = reads[_seconds_a_sample(reads) > limit]
    if not slow.size or slow.size > _FEW * reads["samples"].sum():
        return critical, nothing
    own = critical.was_read & (critical.read["place"] == SOURCE) & (_seconds_a_sample(critical.read) > limit)
    has_before, before = latest_of(slow, ("rank", "worker"), critical.read, critical.read["start"])
    overlap = np.minimum(before["end"], waits["end"]) - np.maximum(before["start"], waits["start"])
    behind = critical.was_read & ~own & has_before & (overlap > 0.5 * (waits["end"] - waits["start"]))
    read = critical.read.copy()
    read[behind] = before[behind]
    return replace(critical, read=read), own | behind


def _begun_late(trace: Trace, waits: Spans, critical: Critical) -> Seconds:
    """Return which share of each wait there would not have been with a slot for the batch as soon as it wanted one.

    Its reads would have begun earlier by the time for which it wanted one, as far as readers were idle meanwhile.
    """
    limits, late = trace.meta.get("limits"), np.zeros(waits.size)
    readers = limits.get("readers") if isinstance(limits, dict) else None
    if not isinstance(readers, int) or readers < 1:
        return late
    spans = trace.spans
    slots, reads = (spans[spans["kind"] == kind] for kind in (Kind.SLOT, Kind.READ))
    _, slot = latest_of(slots, ("rank", "epoch", "step"), waits, critical.decode["end"])
    wanted = np.maximum(slot["end"] - slot["start"], 0.0)
    for rank in np.unique(waits["rank"]):
        which = np.flatnonzero((waits["rank"] == rank) & (wanted > 0))
        own = reads[reads["rank"] == rank]
        busy = _running_seconds(own, slot["end"][which]) - _running_seconds(own, slot["start"][which])
        late[which] = np.maximum(0.0, wanted[which] - busy / readers)
    share: Seconds = np.minimum(1.0, late / np.maximum(waits["end"] - waits["start"], 1e-9))
    return share


def _running_seconds(spans: Spans, moments: Seconds) -> Seconds:
    """Return for how long all spans together have run until each moment."""

    def since(ends: Seconds) -> Seconds:
        ends = np.sort(ends)
        passed = np.searchsorted(ends, moments)
        sums: Seconds = passed * moments - np.concatenate([[0.0], np.cumsum(ends)])[passed]
        return sums

    return since(spans["start"]) - since(spans["end"])


def _seconds_a_sample(reads: Spans) -> Seconds:
    seconds: Seconds = (reads["end"] - reads["start"]) / np.maximum(reads["samples"], 1)
    return seconds


def _slowed_by_snapshots(spans: Spans, waits: Spans) -> Seconds:
    """Return which share of each wait's reading is due to snapshots: how much slower reads were beside them."""
    snapshots = spans[np.isin(spans["kind"], (Kind.WRITE, Kind.DRAIN))]
    reads = spans[(spans["kind"] == Kind.READ) & (spans["bytes"] > 0) & (spans["end"] > spans["start"])]
    if not snapshots.size or not reads.size:
        return np.zeros(waits.size)
    took = _seconds_a_sample(reads)
    beside = overlap_seconds(reads, snapshots) > 0.5 * (reads["end"] - reads["start"])
    if not beside.any() or beside.all():
        return np.zeros(waits.size)
    slower = 1.0 - float(np.median(took[~beside])) / float(np.median(took[beside]))
    if slower < _SLOWER_SHARE:
        return np.zeros(waits.size)
    seconds = np.maximum(waits["end"] - waits["start"], 1e-9)
    share: Seconds = slower * np.minimum(1.0, overlap_seconds(waits, snapshots) / seconds)
    return share


def _kept_later(trace: Trace) -> NDArray[np.int64]:
    """Return the samples that were taken from a tier at some time."""
    spans = trace.spans
    taken = spans[np.isin(spans["kind"], (Kind.READ, Kind.HIT)) & (spans["place"] > 0)]
    keys = zip(taken["rank"].tolist(), taken["flow"].tolist(), strict=True)
    groups = [trace.ids[key] for key in set(keys) if key in trace.ids]
    return np.unique(np.concatenate([taken["sample"], *groups]))


def _of_job(waits: Spans, parts: _Parts) -> tuple[Seconds, int | None]:
    """Return the weight of each wait, 1 where its rank waited longest at that step and else 0; and a rank that is slow.

    What that rank waited longer than the others is handed to `Reason.SLOW_RANK` in `parts`.
    """
    ranks, row = np.unique(waits["rank"], return_inverse=True)
    if ranks.size == 1:
        return np.ones(waits.size), None
    key = waits["epoch"].astype(np.int64) << 32 | (waits["step"].astype(np.int64) & 0xFFFFFFFF)
    _, column = np.unique(key, return_inverse=True)
    stall = np.zeros((ranks.size, column.max() + 1))
    np.add.at(stall, (row, column), waits["end"] - waits["start"])
    worst = stall.argmax(axis=0)
    longest = stall.max(axis=0)
    excess = longest - np.partition(stall, -2, axis=0)[-2]
    by_rank = np.bincount(worst, excess, ranks.size)
    weights = (row == worst[column]).astype(np.float64)
    slow = int(by_rank.argmax())
    if by_rank[slow] <= 0.5 * longest.sum():
        return weights, None
    share = np.where(
        (row == slow) & (worst[column] == slow), excess[column] / np.maximum(longest[column], 1e-12), 0.0
    )
    moved = sum(part * share for part in parts.values())
    for reason in parts:
        parts[reason] = parts[reason] * (1.0 - share)
    parts[Reason.SLOW_RANK] = parts[Reason.SLOW_RANK] + moved
    return weights, int(ranks[slow])


def _saves(spans: Spans, saves: Spans) -> _Parts:
    """Return float64[saves]: how long each blocked the training, and how long of that behind a full burst buffer.

    A snapshot for which the fast tier has no space, as earlier ones are still drained from it, goes straight to the
    slow tier; the next save waits until it is written there.
    """
    drains = spans[spans["kind"] == Kind.DRAIN]
    slow = spans[(spans["kind"] == Kind.WRITE) & (spans["place"] > 0)]
    slow = slow[overlap_seconds(slow, drains) > 0]
    waited = overlap_seconds(saves, slow)
    return {Reason.SAVE: saves["end"] - saves["start"] - waited, Reason.FULL_BUFFER: waited}


def _longest_blocked(saves: Spans) -> int:
    if not saves.size:
        return 0
    return int(np.bincount(saves["rank"], saves["end"] - saves["start"]).argmax())


def _run_seconds(trace: Trace, ranks: int) -> float:
    spans = trace.spans[np.isin(trace.spans["kind"], (Kind.WAIT, Kind.STEP))]
    of_ranks = np.bincount(spans["rank"], spans["end"] - spans["start"])
    earlier = sum(each.stall_seconds + each.own_seconds for each in trace.left_out.epochs)
    return float(of_ranks.max() + earlier / ranks)


def _moments(
    trace: Trace,
    waits: Spans,
    critical: Critical,
    reasons: Sequence[Reason],
    lost: Seconds,
    saves: tuple[Spans, _Parts],
    describe: Callable[[int], str] | None,
    most: int,
) -> tuple[Moment, ...]:
    """Return the worst of the waits and saves. reasons, lost: of each wait."""
    found = []
    for place in np.argsort(-lost, kind="stable")[:most].tolist():
        if lost[place] <= 0:
            break
        read = None
        if critical.seen[place]:
            read = critical.decode[place]
            for has, brought in ((critical.was_hit, critical.hit), (critical.was_read, critical.read)):
                if has[place]:
                    read = brought[place]
        found.append(_moment(trace, waits[place], reasons[place], read, describe))
    blocked, by_reason = saves
    for place in np.argsort(blocked["start"] - blocked["end"], kind="stable")[:most].tolist():
        reason = max(by_reason, key=lambda each: float(by_reason[each][place]))
        found.append(_moment(trace, blocked[place], reason, None, describe))
    return tuple(sorted(found, key=lambda each: -each.seconds)[:most])


def _moment(
    trace: Trace, wait: Any, reason: Reason, read: Any, describe: Callable[[int], str] | None
) -> Moment:
    samples: tuple[int, ...] = ()
    group, place, read_seconds = 0, "", 0.0
    if read is not None and int(read["sample"]) != NO_SAMPLE:
        ids = trace.ids.get((int(read["rank"]), int(read["flow"])), np.array([read["sample"]]))
        samples, group = tuple(ids[:_MOST_NAMED].tolist()), int(read["samples"])
        if read["kind"] != Kind.DECODE:
            place, read_seconds = place_name(trace, int(read["place"])), float(read["end"] - read["start"])
            if read["peer"] != NO_PEER:
                place += f" of rank {int(read['peer'])}"
    return Moment(
        rank=int(wait["rank"]),
        epoch=int(wait["epoch"]),
        step=int(wait["step"]),
        start_seconds=float(wait["start"]),
        seconds=float(wait["end"] - wait["start"]),
        reason=reason,
        samples=samples,
        group=group,
        names=tuple(
            trace.name_of(sample) if describe is None or sample in trace.names else describe(sample)
            for sample in samples
        ),
        place=place,
        read_seconds=read_seconds,
    )


def place_name(trace: Trace, place: int) -> str:
    """Return what a place of the trace is called, a tier by the run's machine."""
    from penstock.machine import Machine

    written = trace.meta.get("machine")
    if written and place >= 0:
        storage = Machine.from_toml(str(written)).storage
        if place < len(storage):
            return storage[place].name
    return describe_place(place)


def _notes(trace: Trace, ranks: int) -> tuple[str, ...]:
    notes = []
    if not trace.is_complete:
        notes.append(NOT_COMPLETE)
    if trace.left_out.spans:
        notes.append(
            "the run was long: of its first part the sums alone are known, so these causes are coarser"
        )
    if ranks > 1:
        notes.append("of several ranks, a step counts the longest wait of any rank")
    return tuple(notes)
