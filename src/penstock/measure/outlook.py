"""What a change would bring a recorded run: its own plan, replayed on a virtual clock with something changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.measure.explain import Explanation, Reason
from penstock.measure.from_trace import learn
from penstock.measure.recorded import Run
from penstock.measure.replay import AS_DECODED, NO_CHANGE, Change, Replay, lacks_decoding, replay_of
from penstock.trace import NO_STEP, Kind, Trace
from penstock.units import format_bytes, format_count

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
    """Predict a run with each of some changes; of several ranks, each by itself: the one that waits longest counts.

    changes: (name, change); None tries those that its reasons suggest, of a run of moderate length.
    Raises: ConfigError if the run cannot be predicted: of a data set, without a plan, or too long.
    """
    first, *others = (run if isinstance(run, Run) else Run.of(run)).of_ranks()
    found = _look_ahead(first, changes, explained)
    if not others:
        return found
    asked = tuple((each.what, each.change) for each in found.prospects)  # of none, nothing is replayed
    ranks = [found, *(_look_ahead(trace, asked, explained) for trace in others)]
    notes = dict.fromkeys(note for each in ranks for note in each.notes)
    alone = (
        f"each of the {len(ranks)} ranks was replayed by itself, and these are the stalls of the one that waits "
        "longest; what ranks wait for each other is in their steps"
    )
    return Outlook(
        max(each.measured_seconds for each in ranks),
        max(each.replayed_seconds for each in ranks),
        any(each.learned for each in ranks),
        tuple(
            max(of_change, key=lambda each: each.stall_seconds)
            for of_change in zip(*(each.prospects for each in ranks), strict=True)
        ),
        (*notes, alone),
    )


def _look_ahead(
    trace: Trace, changes: Iterable[tuple[str, Change]] | None, explained: Explanation
) -> Outlook:
    run = replay_of(trace)
    waits = trace.spans[(trace.spans["kind"] == Kind.WAIT) & (trace.spans["step"] != NO_STEP)]
    measured = float((waits["end"] - waits["start"]).sum())
    if changes is None and run.plan.reads(run.rank) > _MOST_UNASKED_READS:
        changes = ()
    run, replayed, learned = (run, measured, False) if changes == () else _fitted(run, measured)
    changes = list(_suggested(run, explained, learned) if changes is None else changes)
    notes = []
    if learned and any(change.readers and change.machine is None for _, change in changes):
        notes.append(
            f"the record does not show how its store answers more than {run.limits.readers} reads at once; --machine "
            "FILE of penstock calibrate does"
        )
    cpus = _cpus_of(trace)
    if cpus is not None and any((change.decoders or 0) > cpus for _, change in changes):
        notes.append(
            f"the run had {format_count(cpus, 'processor')}, and a replay takes each thread that decodes for one"
        )
    if any(change.machine is not None and lacks_decoding(change.machine) for _, change in changes):
        notes.append(AS_DECODED)
    prospects = tuple(Prospect(name, change, _stall_seconds(run, change)) for name, change in changes)
    return Outlook(measured, replayed, learned, prospects, tuple(notes))


def _cpus_of(trace: Trace) -> int | None:
    """Return how many threads could compute at once where a run was; None where its header does not say."""
    cpus = trace.meta.get("cpus")
    return cpus if isinstance(cpus, int) else None


def _is_near(replayed: float, measured: float) -> bool:
    return abs(replayed - measured) <= max(_NEAR_SHARE * measured, _NEAR_SECONDS)


def _fitted(run: Replay, measured: float) -> tuple[Replay, float, bool]:
    """Return the run at the costs by which its replay comes nearest, its stall, and whether they were learned."""
    known = None if run.costs is None else _stall_seconds(run, NO_CHANGE)
    if known is not None and _is_near(known, measured):
        return run, known, False
    try:
        other = run.on(learn(run.trace).machine)
    except ConfigError:
        if known is None:
            raise
        return run, known, False
    replayed = _stall_seconds(other, NO_CHANGE)
    if known is not None and abs(known - measured) <= abs(replayed - measured):
        return run, known, False
    return other, replayed, True


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
        # What holds the data set beside the other parts, or else twice as much.
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
