"""What a change would bring a recorded run: its own plan, replayed on a virtual clock with something changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.measure.explain import Explanation, Reason
from penstock.measure.from_trace import learn
from penstock.measure.recorded import Part, Run
from penstock.measure.replay import (
    AS_DECODED,
    NO_CHANGE,
    Change,
    Replay,
    lacks_decoding,
    refuse_enough,
    replay_of,
)
from penstock.trace import Spans, Trace, batch_waits
from penstock.units import format_bytes, format_count, format_names

#: A replay of the run as it was is believed if its stall is as near to the measured one.
_NEAR_SHARE, _NEAR_SECONDS = 0.2, 0.5
#: Changes are only tried unasked for runs of so many reads: each takes a second or two then.
_MOST_UNASKED_READS = 400_000


@dataclass(frozen=True, slots=True)
class Prospect:
    """A change and the stall that the run would have had with it."""

    what: str
    change: Change
    stall_seconds: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What changes would bring. measured_seconds: the stall as it was; replayed_seconds: as a replay has it.

    learned: whether the costs were learned from the run itself, since those of its machine did not fit, or it had none.
    """

    measured_seconds: float
    replayed_seconds: float
    learned: bool
    prospects: tuple[Prospect, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_near(self) -> bool:
        """Whether the replay of the run as it was comes near enough to what was measured to believe the others."""
        return _is_near(self.replayed_seconds, self.measured_seconds)


def look_ahead(
    run: Trace | Run, changes: Iterable[tuple[str, Change]] | None, explained: Explanation
) -> Outlook:
    """Predict a run with each of some changes, made to each of its loaders: each is replayed by itself.

    The stalls of a rank's loaders are added; of several ranks, that which waits longest counts. A loader that cannot be
    replayed counts as it was.
    changes: (name, change); None tries those that its reasons suggest, of a run of moderate length. What helps one
        loader leaves another as it was that would lose by it, or cannot have it.
    Raises: ConfigError if no loader can be replayed: of a data set, without a plan, or too long; or for a change that
        one of them cannot have.
    """
    ranks = (run if isinstance(run, Run) else Run.of(run)).of_ranks()
    loaders = [part for of_rank in ranks for part in of_rank]
    if len(loaders) == 1:
        run_alone = replay_of(loaders[0].recorded())
        if changes is None and run_alone.plan.reads(run_alone.rank) > _MOST_UNASKED_READS:
            changes = ()
        return _outlook(
            _fitted(run_alone, fits=changes != ()), changes, explained, are_asked=changes is not None
        )
    each_alone = _each_alone(loaders, changes, explained)
    if each_alone is None:
        waited = max(sum(map(_waited, of_rank)) for of_rank in ranks)
        return Outlook(waited, waited, False, ())
    found, refused, asked, notes = each_alone
    if not found:
        raise ConfigError(f"{next(iter(refused))} (so it is of each of its {len(loaders)} loaders)")
    of_ranks = [
        _of_rank([found.get(part.name) or _as_it_was(part, asked) for part in each]) for each in ranks
    ]
    notes += [note for each in found.values() for note in each.notes]
    notes += [
        f"{format_names(names)} is not replayed and counts as it was: {why}" for why, names in refused.items()
    ]
    if len(loaders) > len(ranks):
        to_whom = "each" if changes is not None else "each but those that had more"
        notes.append(
            f"each of {len(loaders)} loaders was replayed by itself and a change made to {to_whom}, so that memory= is "
            "what each may take; the stalls are added"
        )
    if len(ranks) > 1:
        notes.append(
            f"each of the {len(ranks)} ranks was replayed by itself, and these are the stalls of the one that waits "
            "longest; what ranks wait for each other is in their steps"
        )
    return Outlook(
        max(each.measured_seconds for each in of_ranks),
        max(each.replayed_seconds for each in of_ranks),
        any(each.learned for each in of_ranks),
        tuple(
            max(of_change, key=lambda each: each.stall_seconds)
            for of_change in zip(*(each.prospects for each in of_ranks), strict=True)
        ),
        tuple(dict.fromkeys(notes)),
    )


class _LacksReads(ConfigError):
    """A loader read too little to learn its costs from, and there are none of another yet."""


class _EachAlone(NamedTuple):
    """Loaders that were replayed, by name; why others were not, and their names; what was tried, and notes."""

    found: dict[str, Outlook]
    refused: dict[str, list[str]]
    asked: tuple[tuple[str, Change], ...]
    notes: list[str]


def _each_alone(
    loaders: Sequence[Part], changes: Iterable[tuple[str, Change]] | None, explained: Explanation
) -> _EachAlone | None:
    """Replay loaders, each by itself; return None where that takes too long for what nobody asked for."""
    found: dict[str, Outlook] = {}
    refused: dict[str, list[str]] = {}
    asked = None if changes is None else tuple(changes)
    reads: dict[int, int] = {}
    learned: Machine | None = None
    notes: list[str] = []
    # What is tried unasked is what may help the loader that waited longest.
    waiting, put_aside = deque(sorted(loaders, key=_waited, reverse=True)), set[str]()
    while waiting:
        part = waiting.popleft()
        try:
            refuse_enough(reads, part.rank)
            replay = replay_of(part.recorded())
            rank_reads = reads.get(part.rank, 0) + replay.plan.reads(replay.rank)
            if changes is None and rank_reads > _MOST_UNASKED_READS:
                return None
            fitted = _fitted(replay, learned, fits=asked != ())
        except ConfigError as error:
            if isinstance(error, _LacksReads) and part.name not in put_aside:
                put_aside.add(part.name)
                waiting.append(part)  # until the others' costs are known
            else:
                refused.setdefault(str(error), []).append(part.name)
            continue
        reads[part.rank] = rank_reads
        if fitted.is_by_others:
            notes.append(
                f"{part.name} read too little to learn its costs from: those of another loader stand for them"
            )
        learned = learned or fitted.learned
        try:
            found[part.name] = each = _outlook(fitted, asked, explained, are_asked=changes is not None)
        except ConfigError as error:
            raise ConfigError(f"{part.name}: {error}; or give penstock explain another .trace") from error
        asked = tuple((prospect.what, prospect.change) for prospect in each.prospects)
    return _EachAlone(found, refused, asked or (), notes)


def _of_rank(loaders: Sequence[Outlook]) -> Outlook:
    """Return the sums of a rank's loaders, of which all have the same changes."""
    return Outlook(
        sum(each.measured_seconds for each in loaders),
        sum(each.replayed_seconds for each in loaders),
        any(each.learned for each in loaders),
        tuple(
            replace(of_change[0], stall_seconds=sum(each.stall_seconds for each in of_change))
            for of_change in zip(*(each.prospects for each in loaders), strict=True)
        ),
    )


def _as_it_was(part: Part, changes: Sequence[tuple[str, Change]]) -> Outlook:
    waited = _waited(part)
    return Outlook(waited, waited, False, tuple(Prospect(name, change, waited) for name, change in changes))


def _waited(part: Part) -> float:
    """Return the seconds that a loader's batches were waited for."""
    return sum(_waited_in(spans) for spans in part.spans())


def _waited_in(spans: Spans) -> float:
    waits = batch_waits(spans)
    return float((waits["end"] - waits["start"]).sum())


class _Fitted(NamedTuple):
    """A run at the costs by which its replay comes nearest.

    measured_seconds, replayed_seconds: its stall. learned: the machine that was learned, of this run or another.
    """

    run: Replay
    measured_seconds: float
    replayed_seconds: float
    learned: Machine | None = None
    is_by_others: bool = False


def _outlook(
    fitted: _Fitted, changes: Iterable[tuple[str, Change]] | None, explained: Explanation, *, are_asked: bool
) -> Outlook:
    """Predict a loader's run with each of some changes; None for those that its reasons suggest.

    are_asked: False for those that were suggested for another loader, too.
    """
    run, learned = fitted.run, fitted.learned is not None
    changes = list(_suggested(run, explained, learned) if changes is None else changes)
    notes = []
    if learned and any(change.readers and change.machine is None for _, change in changes):
        notes.append(
            f"the record does not show how its store answers more than {run.limits.readers} reads at once; --machine "
            "FILE of penstock calibrate does"
        )
    cpus = _cpus_of(run.trace)
    if cpus is not None and any((change.decoders or 0) > cpus for _, change in changes):
        notes.append(
            f"the run had {format_count(cpus, 'processor')}, and a replay takes each thread that decodes for one"
        )
    if any(change.machine is not None and lacks_decoding(change.machine) for _, change in changes):
        notes.append(AS_DECODED)
    prospects = []
    for name, change in changes:
        try:
            stall = fitted.replayed_seconds
            if are_asked or not _takes_from(run, change):
                stall = _stall_seconds(run, change)
        except ConfigError:  # a loader that cannot have what nobody asked for stays as it was
            if are_asked:
                raise
        prospects.append(Prospect(name, change, stall))
    return Outlook(fitted.measured_seconds, fitted.replayed_seconds, learned, tuple(prospects), tuple(notes))


def _takes_from(run: Replay, change: Change) -> bool:
    """Return whether a loader had more than a change would give it."""
    return (
        (change.memory_bytes is not None and change.memory_bytes < run.budget.limit_bytes)
        or (change.readers is not None and change.readers < run.limits.readers)
        or (change.decoders is not None and change.decoders < run.limits.decoders)
    )


def _cpus_of(trace: Trace) -> int | None:
    """Return how many threads could compute at once where a run was; None where its header does not say."""
    cpus = trace.meta.get("cpus")
    return cpus if isinstance(cpus, int) else None


def _is_near(replayed: float, measured: float) -> bool:
    return abs(replayed - measured) <= max(_NEAR_SHARE * measured, _NEAR_SECONDS)


def _fitted(run: Replay, stand_in: Machine | None = None, *, fits: bool) -> _Fitted:
    """Return a run at the costs of its machine or at what can be learned from it, whichever is nearer.

    stand_in: what was learned from another loader, for one of which nothing can be. fits: False leaves it as it is.
    Raises: ConfigError if nothing is known of its costs.
    """
    measured = _waited_in(run.trace.spans)
    if not fits:
        return _Fitted(run, measured, measured)
    known = None if run.costs is None else _stall_seconds(run, NO_CHANGE)
    as_known = _Fitted(run, measured, 0.0 if known is None else known)
    if known is not None and _is_near(known, measured):
        return as_known
    is_by_others = False
    try:
        learned = learn(run.trace).machine
    except ConfigError as error:
        if known is not None:
            return as_known
        if stand_in is None:
            raise _LacksReads(str(error)) from error
        learned, is_by_others = stand_in, True
    other = run.on(learned)
    replayed = _stall_seconds(other, NO_CHANGE)
    if known is not None and abs(known - measured) <= abs(replayed - measured):
        return as_known
    return _Fitted(other, measured, replayed, learned, is_by_others)


def _stall_seconds(run: Replay, change: Change) -> float:
    return sum(each.stall_seconds for each in run.predict(change).epochs())


def _suggested(run: Replay, explained: Explanation, learned: bool) -> list[tuple[str, Change]]:
    """Return what may help against the notable reasons.

    learned: whether costs are learned from the run, which does not show what more reads at once would do.
    """
    reasons = set(explained.notable)
    budget, limits = run.budget, run.limits
    found = []
    reading = {Reason.SOURCE_READ, Reason.TIER_READ, Reason.SLOW_READS, Reason.COLD_TIER, Reason.SNAPSHOT}
    if reasons & {*reading, Reason.NO_FREE_SLOT}:
        # What holds the data set and the other parts, or else twice as much.
        holds_all = 2 * (budget.limit_bytes - budget.tier_bytes) + run.total_bytes
        doubled = 2 * budget.limit_bytes
        for size in sorted({min(holds_all, doubled), holds_all} if run.plan.epochs > 1 else {doubled}):
            if size > budget.limit_bytes and budget.tier_bytes < run.total_bytes:
                found.append((f"memory {format_bytes(size)}", Change(memory_bytes=size)))
    if reasons & reading and limits.readers and not learned:
        found.append((format_count(2 * limits.readers, "reader"), Change(readers=2 * limits.readers)))
    if Reason.DECODE in reasons and 2 * limits.decoders <= (_cpus_of(run.trace) or 0):
        found.append((format_count(2 * limits.decoders, "decoder"), Change(decoders=2 * limits.decoders)))
    return found
