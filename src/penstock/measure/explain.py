"""Why a run waited: each stalled batch by what its last missing sample waited for, and the worst moments one by one.

`penstock.trace.causes` finds the critical item of every wait. Here it is asked what held that item up: a few reads far
slower than the others, a tier that was not filled yet, a snapshot that was drained meanwhile, the interpreter's lock,
another rank. Where ranks of a job step together, a step costs the job the longest wait of any of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.flow.lock_use import HELD_SECONDS, KEPT_SECONDS, KEPT_SHARE
from penstock.measure.recorded import ASKED_BEFORE_SECONDS, Run, batch_keys, batch_of, windows
from penstock.trace import JSON, NO_EPOCH, NO_PEER, NO_STEP, SOURCE, Cause, Kind, Spans, Trace, batch_waits
from penstock.trace.causes import Critical, critical_items, latest_of
from penstock.trace.metrics import is_of_snapshots, overlap_seconds
from penstock.trace.schema import CONSUMER, JOBS_MEMORY, NO_SAMPLE, GroupIds, choose_spans, join_spans
from penstock.trace.stages import describe_place
from penstock.trace.verdict import NOT_COMPLETE
from penstock.units import format_count, format_seconds

Seconds = NDArray[np.float64]

#: A read is slow that takes so many times the median, if no more of them do than this share of the samples.
_SLOW_TIMES, _FEW = 10.0, 0.05
#: Work is slower during a snapshot if by this share at least.
_SLOWER_SHARE = 0.2
#: Fewer requests for the interpreter's lock do not show whether workers are kept from it.
_LEAST_ASKED = 3
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
    JOBS_READ = "memory shared with other jobs"
    DECODE = "decode and transforms"
    DATA_SET = "the data set's own code"
    LOCK = "the interpreter's lock"
    NO_FREE_SLOT = "no free slot"
    SNAPSHOT = "a snapshot written or drained meanwhile"
    SAVE = "a save that blocked the training"
    FULL_BUFFER = "a save behind a full burst buffer"
    SLOW_RANK = "one slow rank"
    START = "start: the pipeline fills"
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
    Reason.JOBS_READ: "another job reads the same samples just then: see what that one waits for",
    Reason.DECODE: "more cores, smaller pictures, decode once (keep=), cheaper transforms",
    Reason.DATA_SET: "profile its __getitem__; worker processes (workers=) if it computes in Python",
    Reason.LOCK: "Python code holds the lock: worker processes, or native transforms; find the thread that computes",
    Reason.NO_FREE_SLOT: "drop batches after use, or raise memory=",
    Reason.SNAPSHOT: "drain to another device, or cap the drain's rate",
    Reason.SAVE: "fewer or smaller saves, or a burst buffer",
    Reason.FULL_BUFFER: "a larger burst buffer, a faster drain, or fewer saves",
    Reason.SLOW_RANK: "look at that rank's host: its store, disk and processors",
    Reason.START: "once a run: start() the loader before the model is built; a longer run pays it once, too",
    Reason.HAND_OVER: "something else holds the interpreter's lock: look for threads of your own",
    Reason.NO_BATCH: "an error or an interrupt ended these waits: see the messages of the run",
    Reason.UNSEEN: "the trace has no spans of these batches: record with a Penstock loader",
}
_OF_CAUSE = {
    Cause.SOURCE_READ: Reason.SOURCE_READ,
    Cause.TIER_READ: Reason.TIER_READ,
    Cause.DECODE: Reason.DECODE,
    Cause.NO_FREE_SLOT: Reason.NO_FREE_SLOT,
    Cause.START: Reason.START,
    Cause.HAND_OVER: Reason.HAND_OVER,
    Cause.NO_BATCH: Reason.NO_BATCH,
    Cause.UNSEEN: Reason.UNSEEN,
}
#: What is the code of a data set of the user's own, where that was read.
_OF_DATA_SET = (Reason.SOURCE_READ, Reason.DECODE)
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

    run_seconds: waiting and steps, of the rank that took longest; of saves alone, since the store was opened.
    stall_seconds: of the job, the longest wait of any rank at each step. blocked_seconds: by saves, of the rank that
        they blocked longest.
    by_reason: the largest first; together stall_seconds and blocked_seconds. batches: that waited mostly for it.
    slow_rank: the rank behind `Reason.SLOW_RANK`. ranks: how many waited for batches.
    """

    run_seconds: float
    stall_seconds: float
    blocked_seconds: float
    by_reason: Mapping[Reason, float]
    batches: Mapping[Reason, int]
    moments: tuple[Moment, ...]
    slow_rank: int | None
    ranks: int
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


class _Job(NamedTuple):
    """Who waited longest at each step that ranks of a job take together.

    keys: int64[steps], sorted, see `batch_keys`. worst: the rank. share: how much of its wait was beyond the second
    longest, where it is the slow rank's. slow: a rank that most of the lost time is due to.
    """

    keys: NDArray[np.int64]
    worst: NDArray[np.int64]
    share: Seconds
    slow: int | None

    @classmethod
    def of(cls, run: Run) -> _Job:
        """Judge all waits of a run."""
        waits: list[tuple[NDArray[np.uint32], NDArray[np.int64], Seconds]] = []
        for spans in run.spans():
            some = choose_spans(spans, spans["kind"] == Kind.WAIT)
            waits.append((some["rank"].copy(), batch_keys(some), some["end"] - some["start"]))
        of_ranks, of_batches, seconds = (np.concatenate(parts) for parts in zip(*waits, strict=True))
        ranks, row = np.unique(of_ranks, return_inverse=True)
        keys, column = np.unique(of_batches, return_inverse=True)
        stall = np.zeros((ranks.size, keys.size))
        np.add.at(stall, (row, column), seconds)
        worst = stall.argmax(axis=0)
        longest = stall.max(axis=0)
        excess = longest - np.partition(stall, -2, axis=0)[-2]
        by_rank = np.bincount(worst, excess, ranks.size)
        slow = int(by_rank.argmax())
        is_one = by_rank[slow] > 0.5 * longest.sum()
        share = np.where(is_one & (worst == slow), excess / np.maximum(longest, 1e-12), 0.0)
        return cls(keys, ranks[worst].astype(np.int64), share, int(ranks[slow]) if is_one else None)

    def hand_over(self, waits: Spans, parts: _Parts) -> Seconds:
        """Return the weight of each wait, 1 where its rank waited longest at that step and else 0.

        What the slow rank waited longer than the others is handed to `Reason.SLOW_RANK` in `parts`.
        """
        column = np.searchsorted(self.keys, batch_keys(waits))
        is_worst = waits["rank"] == self.worst[column]
        share = np.where(is_worst, self.share[column], 0.0)
        moved = sum(part * share for part in parts.values())
        for reason in parts:
            parts[reason] = parts[reason] * (1.0 - share)
        parts[Reason.SLOW_RANK] = parts[Reason.SLOW_RANK] + moved
        weights: Seconds = is_worst.astype(np.float64)
        return weights


class _Facts(NamedTuple):
    """What has to be known of a run as a whole before its waits are judged, some at a time.

    slow_seconds: a read of the source is slow that takes longer by the sample; inf where no few do.
    slower_share: by how much reads during snapshots were slower than the others. kept: samples that were read from the
    source and at some time taken from a tier. snapshots: spans of what was done for these. run_seconds: see
    `Explanation`. first_seconds: when each rank first waited for a batch; of a run whose beginning is left out, none.
    last_seconds, last_batch: where the record ends, the latter as a key of `batch_keys`, -1 without a batch.
    missed: how many samples a tier was to have and had not.
    """

    slow_seconds: float
    slower_share: float
    kept: NDArray[np.int64]
    snapshots: Spans
    job: _Job | None
    run_seconds: float
    first_seconds: Mapping[int, float]
    last_seconds: float
    last_batch: int
    missed: int

    @property
    def ranks(self) -> int:
        """How many waited for batches."""
        return len(self.first_seconds)


class _Candidate(NamedTuple):
    """A wait or save that may be among the worst moments.

    read: the span that it hung on, if any. outline: of what recorded it.
    """

    seconds: float
    span: Any
    reason: Reason
    read: Any
    outline: Trace


def explain(
    trace: Trace | Run, describe: Callable[[int], str] | None = None, moments: int = 5
) -> Explanation:
    """Attribute every wait of a run, of an opened one some at a time: memory is a chunk of its file, a few times.

    describe: names a sample, where the trace does not. moments: how many of the worst to return.
    Raises: ConfigError if nobody waited for a batch in it, nor for a save.
    """
    run = Run.of(trace) if isinstance(trace, Trace) else trace
    facts, reasons = _facts_of(run), list(Reason)
    total = dict.fromkeys(reasons, 0.0)
    batches = np.zeros(len(reasons), np.int64)
    worst: list[_Candidate] = []
    pieces = ((part.outline, *piece) for part in run.parts for piece in windows(part))
    for recorded, spans, waits in pieces:
        critical, are_slow = _behind_slow_reads(
            spans, waits, critical_items(spans, waits), facts.slow_seconds
        )
        outline = replace(run.outline, meta=recorded.meta)
        parts = _refined(outline, facts, spans, waits, critical, are_slow)
        weights = np.ones(waits.size) if facts.job is None else facts.job.hand_over(waits, parts)
        for reason in reasons:
            total[reason] += float((weights * parts[reason]).sum())
        mostly = np.argmax([parts[reason] for reason in reasons], axis=0)
        lost = weights * (waits["end"] - waits["start"])
        batches += np.bincount(mostly[lost > 0], minlength=len(reasons))
        for place in np.argsort(-lost, kind="stable")[:moments].tolist():
            if lost[place] > 0:
                read = _hung_on(critical, place)
                reason = reasons[mostly[place]]
                worst.append(_Candidate(lost[place], waits[place].copy(), reason, read, recorded))
        worst = sorted(worst, key=lambda each: -each.seconds)[:moments]
    saves = facts.snapshots[facts.snapshots["kind"] == Kind.SAVE]
    saved = _saves(facts.snapshots, saves)
    is_of_longest = saves["rank"] == _longest_blocked(saves)
    for reason, seconds in saved.items():
        total[reason] += float(seconds[is_of_longest].sum())
    # Of what was left out, only the sums of all ranks are known: the job lost what a rank lost on average.
    for epoch in run.outline.left_out.epochs:
        for cause, more in epoch.stall_by_cause.items():
            reason = _OF_CAUSE[cause]
            if _is_of_data_set(run.outline) and reason in _OF_DATA_SET:
                reason = Reason.DATA_SET
            total[reason] += more / max(1, facts.ranks)
        total[Reason.SAVE] += epoch.save_seconds / max(1, facts.ranks)
    for place in np.argsort(saves["start"] - saves["end"], kind="stable")[:moments].tolist():
        reason = max(saved, key=lambda each: float(saved[each][place]))
        worst.append(
            _Candidate(
                float(saves["end"][place] - saves["start"][place]), saves[place], reason, None, run.outline
            )
        )
    blocked = sum(total[reason] for reason in saved)
    return Explanation(
        run_seconds=facts.run_seconds,
        stall_seconds=sum(total.values()) - blocked,
        blocked_seconds=blocked,
        by_reason=dict(sorted(total.items(), key=lambda each: -each[1])),
        batches=dict(zip(reasons, batches.tolist(), strict=True)),
        moments=_moments(run, sorted(worst, key=lambda each: -each.seconds)[:moments], describe),
        slow_rank=None if facts.job is None else facts.job.slow,
        ranks=facts.ranks,
        notes=(*_notes(run.outline, facts), *run.notes),
    )


def moment_rows(found: Explanation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns of a table of the worst moments, for people, and its rows; ranks where there are several."""
    ranks = ("rank",) if found.ranks > 1 else ()
    rows = [
        (
            each.when,
            *(str(each.rank) for _ in ranks),
            format_seconds(each.start_seconds),
            format_seconds(each.seconds),
            str(each.reason),
            each.samples_text,
            each.place,
            format_seconds(each.read_seconds) if each.read_seconds else "",
        )
        for each in found.moments
    ]
    return ("when", *ranks, "at", "lost", "reason", "last sample", "from", "its read"), rows


def _facts_of(run: Run) -> _Facts:
    """Go through a run for what its waits are judged by. Raises: as `explain`."""
    of_snapshots: list[Spans] = []
    first: dict[int, float] = {}
    reads: list[tuple[NDArray[np.int64], Seconds]] = []
    taken: list[tuple[NDArray[np.int64], NDArray[np.uint64]]] = []
    spent: defaultdict[int, float] = defaultdict(float)
    samples, last, last_batch, missed = 0, 0.0, -1, 0
    for spans in run.spans():
        kind, seconds = spans["kind"], spans["end"] - spans["start"]
        last = max(last, float(spans["end"].max(initial=0.0)))
        of_snapshots.append(choose_spans(spans, is_of_snapshots(spans)))
        is_wait, is_step = kind == Kind.WAIT, kind == Kind.STEP
        for rank in np.unique(spans["rank"][is_wait]).tolist():
            begin = float(spans["start"][is_wait & (spans["rank"] == rank)].min())
            first[rank] = min(first.get(rank, math.inf), begin)
        got = batch_waits(spans)
        last_batch = max(last_batch, int(batch_keys(got).max(initial=-1)))
        for rank in np.unique(spans["rank"][is_wait | is_step]).tolist():
            spent[rank] += float(seconds[(is_wait | is_step) & (spans["rank"] == rank)].sum())
        of_source = choose_spans(spans, (kind == Kind.READ) & (spans["place"] == SOURCE))
        reads.append((of_source["sample"].copy(), _seconds_a_sample(of_source)))
        samples += int(of_source["samples"].sum())
        missed += int(spans["samples"][kind == Kind.RETRY].sum())
        is_taken = ((kind == Kind.READ) | (kind == Kind.HIT)) & (spans["place"] > 0)
        taken.append((spans["sample"][is_taken], _group_keys(spans["rank"], spans["flow"])[is_taken]))
    for rank, twice in _counted_twice(run).items():
        spent[rank] -= twice
    snapshots = join_spans(of_snapshots)
    if not first and not (snapshots["kind"] == Kind.SAVE).any():
        cut = "" if run.outline.is_complete else f"; {NOT_COMPLETE}"
        raise ConfigError(
            f"nobody asked for a batch in the recorded run, so there is no wait to explain{cut}"
        )
    read, took = (np.concatenate(parts) for parts in zip(*reads, strict=True))
    firsts, groups = (np.concatenate(parts) for parts in zip(*taken, strict=True))
    limit = _SLOW_TIMES * float(np.median(took)) if took.size else math.inf
    are_few = 0 < (took > limit).sum() <= _FEW * samples
    return _Facts(
        slow_seconds=limit if are_few else math.inf,
        slower_share=_slower_share(run, snapshots),
        kept=_kept_later(run, read, firsts, groups),
        snapshots=snapshots,
        job=_Job.of(run) if len(first) > 1 else None,
        run_seconds=_run_seconds(run.outline, spent, max(1, len(first))) if spent else last,
        first_seconds=first,
        last_seconds=last,
        last_batch=last_batch,
        missed=missed + _missed_earlier(run.outline),
    )


def _missed_earlier(outline: Trace) -> int:
    stages = [stage for epoch in outline.left_out.epochs for stage in epoch.stages.items()]
    return sum(durations.samples for stage, durations in stages if stage.kind == Kind.RETRY)


def _counted_twice(run: Run) -> dict[int, float]:
    """Return how much of each rank's waits and steps ran in others, as a validation does in a step of the training."""
    if run.loaders == 1:
        return {}
    pieces = []
    for spans in run.spans():
        own = choose_spans(spans, (spans["kind"] == Kind.WAIT) | (spans["kind"] == Kind.STEP))
        pieces.append((own["rank"].copy(), own["start"].copy(), own["end"].copy()))
    ranks, starts, ends = (np.concatenate(fields) for fields in zip(*pieces, strict=True))
    found = {}
    for rank in np.unique(ranks).tolist():
        order = np.flatnonzero(ranks == rank)
        order = order[np.argsort(starts[order], kind="stable")]
        start, end = starts[order], ends[order]
        before = np.concatenate([[-math.inf], np.maximum.accumulate(end)[:-1]])
        found[rank] = float((end - start).sum() - np.maximum(0.0, end - np.maximum(start, before)).sum())
    return found


def _run_seconds(outline: Trace, spent: Mapping[int, float], ranks: int) -> float:
    """Return waits and steps of the rank that took longest. spent: of each rank, without what was left out."""
    earlier = sum(each.stall_seconds + each.own_seconds for each in outline.left_out.epochs)
    return max(spent.values()) + earlier / ranks


def _group_keys(ranks: NDArray[Any], flows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a number for each group. A flow is a running number: no rank comes to 2**40 of them."""
    keys: NDArray[np.uint64] = (ranks.astype(np.uint64) << np.uint64(40)) ^ flows
    return keys


def _kept_later(
    run: Run, read: NDArray[np.int64], firsts: NDArray[np.int64], groups: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return which of the samples that were read from the source were taken from a tier at some time.

    firsts, groups: of what was taken from tiers, the first samples and the keys of the groups.
    """
    read, groups = np.unique(read), np.unique(groups)
    is_kept = np.isin(read, firsts)
    for ids in run.ids() if groups.size else ():
        keys = np.array(list(ids), np.uint64).reshape(-1, 2)
        members = np.isin(_group_keys(keys[:, 0], keys[:, 1]), groups)
        if members.any():
            taken = [ids[key] for key, is_member in zip(ids, members, strict=True) if is_member]
            is_kept |= np.isin(read, np.concatenate(taken))
    return read[is_kept]


def _refined(
    outline: Trace, facts: _Facts, spans: Spans, waits: Spans, critical: Critical, are_slow: NDArray[np.bool_]
) -> _Parts:
    """Return float64[waits] of each `Reason` but those of saves, which are no waits."""
    meta = outline.meta
    parts: _Parts = {reason: np.zeros(waits.size) for reason in Reason}
    for cause, seconds in critical.parts.items():
        parts[_OF_CAUSE[cause]] = seconds.copy()

    def hand(source: Reason, to: Reason, share: NDArray[Any]) -> None:
        moved = parts[source] * share
        parts[to] += moved
        parts[source] -= moved

    kept, lock_seconds = _kept_from_lock(spans, waits)
    for reason in (Reason.DECODE, Reason.HAND_OVER):
        hand(reason, Reason.LOCK, np.maximum(kept, _held(spans, waits, ASKED_BEFORE_SECONDS)))
    # A read takes the lock once before and once after each sample, at most: the rest was the store's. A data set of the
    # user's own is Python code all through.
    by_lock = lock_seconds * (1.0 + critical.read["samples"])
    took = np.maximum(critical.read["end"] - critical.read["start"], 1e-9)
    held = _held(spans, waits)
    of_read = np.maximum(held, np.where(kept & critical.was_read, np.minimum(1.0, by_lock / took), 0.0))
    is_data_set = _is_of_data_set(outline)
    hand(Reason.SOURCE_READ, Reason.LOCK, np.maximum(kept, held) if is_data_set else of_read)
    hand(Reason.TIER_READ, Reason.LOCK, of_read)
    if not outline.left_out.spans:
        begun = np.array([facts.first_seconds[rank] for rank in waits["rank"].tolist()])
        for reason in (Reason.DECODE, Reason.HAND_OVER):
            hand(reason, Reason.START, waits["start"] <= begun)
    hand(Reason.SOURCE_READ, Reason.SLOW_READS, are_slow)
    hand(Reason.SOURCE_READ, Reason.NO_FREE_SLOT, _begun_late(meta, spans, waits, critical))
    beside = _slowed_by_snapshots(facts, waits)
    for reason in (Reason.SOURCE_READ, Reason.TIER_READ):
        hand(reason, Reason.SNAPSHOT, beside)
    hand(Reason.SOURCE_READ, Reason.COLD_TIER, np.isin(critical.read["sample"], facts.kept))
    of_peers = (critical.was_read & (critical.read["peer"] != NO_PEER)) | (
        critical.was_hit & (critical.hit["peer"] != NO_PEER)
    )
    hand(Reason.TIER_READ, Reason.PEER_READ, of_peers)
    hand(Reason.TIER_READ, Reason.JOBS_READ, critical.was_hit & (critical.hit["place"] == JOBS_MEMORY))
    for reason in _OF_DATA_SET if is_data_set else ():
        hand(reason, Reason.DATA_SET, np.ones(waits.size))
    return parts


def _is_of_data_set(outline: Trace) -> bool:
    return outline.meta.get("reads") == "data set"


def _held(spans: Spans, waits: Spans, before_seconds: float = 0.0) -> Seconds:
    """Return which share of each wait a single call held the interpreter's lock, as one of compiled code may.

    before_seconds: where it did so that long before the wait, what it held up counts, too.
    """
    held = np.zeros(waits.size)
    long = spans[(spans["kind"] == Kind.LOCK) & (spans["end"] - spans["start"] >= HELD_SECONDS)]
    for rank in np.unique(long["rank"]):
        which = waits["rank"] == rank
        during = waits[which]
        seconds = np.maximum(during["end"] - during["start"], 1e-9)
        during["start"] -= before_seconds
        held[which] = np.minimum(1.0, overlap_seconds(during, long[long["rank"] == rank]) / seconds)
    return held


def _kept_from_lock(spans: Spans, waits: Spans) -> tuple[NDArray[np.bool_], Seconds]:
    """Return for each wait whether workers were kept from the interpreter's lock then, and for how long on average."""
    kept, mean = np.zeros(waits.size, np.bool_), np.zeros(waits.size)
    # The training's thread notes long waits for the lock alone.
    asks = spans[(spans["kind"] == Kind.LOCK) & (spans["worker"] != CONSUMER)]
    for rank in np.unique(asks["rank"]):
        own = asks[asks["rank"] == rank]
        own = own[np.argsort(own["end"], kind="stable")]
        seconds = own["end"] - own["start"]
        which = waits["rank"] == rank
        first = np.searchsorted(own["end"], waits["start"][which] - ASKED_BEFORE_SECONDS)
        last = np.searchsorted(own["end"], waits["end"][which], "right")
        asked = np.maximum(last - first, 1)
        sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (seconds >= KEPT_SECONDS, seconds)]
        share, mean[which] = ((each[last] - each[first]) / asked for each in sums)
        kept[which] = (asked >= _LEAST_ASKED) & (share >= KEPT_SHARE)
    return kept, mean


def _behind_slow_reads(
    spans: Spans, waits: Spans, critical: Critical, limit: float
) -> tuple[Critical, NDArray[np.bool_]]:
    """Return which waits hung on a read of the source that was slow as only a few were, and those reads as critical.

    A read that was quick itself may have waited for its thread, which was at a slow one: then it was that one.
    limit: seconds a sample.
    """
    reads = choose_spans(spans, (spans["kind"] == Kind.READ) & (spans["place"] == SOURCE))
    slow = choose_spans(reads, _seconds_a_sample(reads) > limit)
    if not slow.size:
        return critical, np.zeros(waits.size, np.bool_)
    own = critical.was_read & (critical.read["place"] == SOURCE) & (_seconds_a_sample(critical.read) > limit)
    has_before, before = latest_of(slow, ("rank", "worker"), critical.read, critical.read["start"])
    overlap = np.minimum(before["end"], waits["end"]) - np.maximum(before["start"], waits["start"])
    behind = critical.was_read & ~own & has_before & (overlap > 0.5 * (waits["end"] - waits["start"]))
    read = critical.read.copy()
    read[behind] = before[behind]
    return replace(critical, read=read), own | behind


def _begun_late(meta: Mapping[str, JSON], spans: Spans, waits: Spans, critical: Critical) -> Seconds:
    """Return which share of each wait there would not have been with a slot for the batch as soon as it wanted one.

    Its reads would have begun earlier by the time for which it wanted one, as far as readers were idle meanwhile.
    """
    limits, late = meta.get("limits"), np.zeros(waits.size)
    readers = limits.get("readers") if isinstance(limits, dict) else None
    if not isinstance(readers, int) or readers < 1:
        return late
    slot, reads = critical.slot, spans[spans["kind"] == Kind.READ]
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


def _slower_share(run: Run, snapshots: Spans) -> float:
    """Return by which share reads were slower during snapshots that were written or drained; 0 where by little."""
    working = _working(snapshots)
    if not working.size:
        return 0.0
    took: tuple[list[Seconds], list[Seconds]] = ([], [])
    for spans in run.spans():
        reads = choose_spans(
            spans, (spans["kind"] == Kind.READ) & (spans["bytes"] > 0) & (spans["end"] > spans["start"])
        )
        beside = overlap_seconds(reads, working) > 0.5 * (reads["end"] - reads["start"])
        for is_beside in (False, True):
            took[is_beside].append(_seconds_a_sample(reads)[beside == is_beside])
    apart, together = map(np.concatenate, took)
    if not apart.size or not together.size:
        return 0.0
    slower = 1.0 - float(np.median(apart)) / float(np.median(together))
    return slower if slower >= _SLOWER_SHARE else 0.0


def _working(snapshots: Spans) -> Spans:
    return snapshots[np.isin(snapshots["kind"], (Kind.WRITE, Kind.DRAIN))]


def _slowed_by_snapshots(facts: _Facts, waits: Spans) -> Seconds:
    """Return which share of each wait's reading is due to snapshots: how much slower reads were during them."""
    if not facts.slower_share:
        return np.zeros(waits.size)
    seconds = np.maximum(waits["end"] - waits["start"], 1e-9)
    share: Seconds = facts.slower_share * np.minimum(
        1.0, overlap_seconds(waits, _working(facts.snapshots)) / seconds
    )
    return share


def _saves(snapshots: Spans, saves: Spans) -> _Parts:
    """Return float64[saves]: how long each blocked the training, and how long of that behind a full burst buffer.

    A snapshot for which the fast tier has no space, as earlier ones are still drained from it, is saved straight to the
    slow tier; the next save waits until it is written there.
    """
    drains = snapshots[snapshots["kind"] == Kind.DRAIN]
    slow = snapshots[(snapshots["kind"] == Kind.WRITE) & (snapshots["place"] > 0)]
    slow = slow[overlap_seconds(slow, drains) > 0]
    waited = overlap_seconds(saves, slow)
    return {Reason.SAVE: saves["end"] - saves["start"] - waited, Reason.FULL_BUFFER: waited}


def _longest_blocked(saves: Spans) -> int:
    if not saves.size:
        return 0
    return int(np.bincount(saves["rank"], saves["end"] - saves["start"]).argmax())


def _hung_on(critical: Critical, place: int) -> Any:
    """Return the span that a wait hung on; None where none is known."""
    if not critical.seen[place]:
        return None
    read = critical.decode[place]
    for has, brought in ((critical.was_hit, critical.hit), (critical.was_read, critical.read)):
        if has[place]:
            read = brought[place]
    return read.copy()


def _moments(
    run: Run, worst: Sequence[_Candidate], describe: Callable[[int], str] | None
) -> tuple[Moment, ...]:
    """Return moments in the order of the candidates, their samples by number and name."""
    reads = [each.read for each in worst if each.read is not None]
    keys = {(int(read["rank"]), int(read["flow"])) for read in reads}
    ids = {key: some[key] for some in run.ids() for key in keys.intersection(some)} if keys else {}
    return tuple(
        _moment(replace(each.outline, names={**run.outline.names, **each.outline.names}), ids, each, describe)
        for each in worst
    )


def _moment(
    trace: Trace, ids_of: GroupIds, found: _Candidate, describe: Callable[[int], str] | None
) -> Moment:
    wait, read = found.span, found.read
    samples: tuple[int, ...] = ()
    group, place, read_seconds = 0, "", 0.0
    if read is not None and int(read["sample"]) != NO_SAMPLE:
        ids = ids_of.get((int(read["rank"]), int(read["flow"])), np.array([read["sample"]]))
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
        reason=found.reason,
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


def _where_it_ends(facts: _Facts) -> str:
    text = f"it ends {format_seconds(facts.last_seconds)} after the start"
    if facts.last_batch < 0:
        return text
    epoch, step = batch_of(facts.last_batch)
    return f"{text}, with epoch {epoch}, step {step}"


def _notes(trace: Trace, facts: _Facts) -> tuple[str, ...]:
    notes = []
    if not facts.ranks:
        notes.append(
            "no loader recorded, so that saves alone are known: wrap the training's loader in penstock.watch"
        )
    if not trace.is_complete:
        notes.append(f"{NOT_COMPLETE}; {_where_it_ends(facts)}")
    if trace.left_out.spans:
        notes.append(
            "the run was long: of its first part the sums alone are known, so these causes are coarser"
        )
    if facts.ranks > 1:
        notes.append("of several ranks, a step counts the longest wait of any rank")
    if facts.missed:
        notes.append(
            f"{format_count(facts.missed, 'sample')} could not be had from the tier that was to have them and were "
            "read from the store: retries in penstock trace --stages"
        )
    return tuple(notes)
