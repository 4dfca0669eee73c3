"""How much space the snapshots of a run will take, known before its first step from its schedule and retention.

The saves are gone through one by one and retention is asked after each, as the store does: no second copy of its rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import ConfigError
from penstock.policy.delta_schemes import Scheme
from penstock.policy.retention import Keep, StoredSnapshot, to_forget
from penstock.policy.snap_distance import AutoDistance, SnapDistance, with_next
from penstock.units import format_bytes

#: What the blocks of a snapshot take at most, of its state: a promise of the codecs.
MOST_SHARE = 1.001
#: Snapshots looked at in all before the rest of a run is taken to continue as before: about a second of work.
_MOST_LOOKS = 300_000
_AGE_NOT_COUNTED = (
    ". It may be less: that snapshots grow older than max_age_seconds is not counted, for how long saves are apart is "
    'not known; a schedule by time, such as "30 min", says it'
)


@dataclass(frozen=True, slots=True)
class SpaceNeeded:
    """What a tier has to hold.

    peak_bytes: at the worst moment: a new snapshot is written, and what it replaces is not gone yet.
    kept_bytes: at most between two saves.
    largest_bytes: of one snapshot's own files.
    """

    peak_bytes: int
    kept_bytes: int
    largest_bytes: int

    def fast_bytes(self, *, drains_keep_up: bool) -> int:
        """Return what a fast tier before this one has to hold that no save falls through.

        drains_keep_up: whether a drain ends before the next save begins. Then one is drained while the next is written;
            else all that retention wants may wait there, and one more is being drained.
        """
        return 2 * self.largest_bytes if drains_keep_up else self.peak_bytes + self.largest_bytes


def space_needed(
    state_bytes: int,
    steps: Sequence[int],
    keep: Keep,
    scheme: Scheme,
    snap_dis: SnapDistance,
    *,
    baseline_share: float = MOST_SHARE,
    delta_share: float = MOST_SHARE,
    seconds_between_saves: float | None = None,
    stored: Sequence[StoredSnapshot] = (),
    now_seconds: float = 0.0,
) -> SpaceNeeded:
    """Return what the snapshots of a run need at most.

    state_bytes: of what is saved, as it is in memory.
    steps: after which it is saved, ascending, as `SaveSchedule.steps` gives them.
    baseline_share, delta_share: what is stored of a state; without a measurement the most that can be.
    seconds_between_saves: at least, for `max_age_seconds`. Where it is not given nothing grows old, and what that says
        is a bound: more than the run needs if it takes longer than that age.
    stored: what lies in the store already, oldest first; the run continues from there at `now_seconds`.
    Returns: exact for these sizes where it takes less than a second to find out; beyond, extrapolated from the growth
        so far. An automatic distance is taken as it is with these sizes, and at its longest, whichever needs more;
        under `max_bytes` the space is taken to be used.

    >>> space_needed(1_000_000, range(100, 10_100, 100), Keep(last=5), "complete", 1, baseline_share=1.0).peak_bytes
    6000000
    """
    if state_bytes < 0:
        raise ConfigError(f"state_bytes is {state_bytes}; it must be zero or more")
    for field, share in (("baseline_share", baseline_share), ("delta_share", delta_share)):
        if not 0.0 <= share <= 2.0:
            raise ConfigError(
                f"{field} is {share}; a share of the state's bytes is between 0 and {MOST_SHARE}"
            )
    baseline_bytes, delta_bytes = (-int(-state_bytes * share // 1) for share in (baseline_share, delta_share))
    # Neither needs more than the other in every run: what is kept of every so many steps may be a baseline or not.
    distances: list[SnapDistance] = [snap_dis]
    if isinstance(snap_dis, AutoDistance):
        distances.append(snap_dis.longest(scheme, baseline_bytes, delta_bytes))
    runs = [
        _Run(
            steps,
            scheme,
            distance,
            baseline_bytes,
            delta_bytes,
            seconds_between_saves or 0.0,
            tuple(stored),
            now_seconds,
        )
        for distance in distances
    ]
    unlimited = _most(run.needed(replace(keep, max_bytes=None)) for run in runs)
    if keep.limit_bytes is None:
        return unlimited
    least = _most(run.needed(replace(keep, max_bytes=1)) for run in runs)
    # Not a run under this limit: with other sizes another number of snapshots would come closer to it.
    return SpaceNeeded(
        max(least.peak_bytes, min(unlimited.peak_bytes, keep.limit_bytes + unlimited.largest_bytes)),
        max(least.kept_bytes, min(unlimited.kept_bytes, keep.limit_bytes)),
        unlimited.largest_bytes,
    )


def steps_until_pruned(keep: Keep, snap_dis: SnapDistance, least_seconds: float) -> range:
    """Return steps 1, 2, ... of as many saves as it takes until the space that snapshots take grows no more.

    least_seconds: between two saves; 0 where it is not known.
    """
    longest = snap_dis.most if isinstance(snap_dis, AutoDistance) else snap_dis
    stay, age_seconds = keep.last or 5, keep.max_age_seconds
    if keep.last is None and age_seconds is not None and least_seconds > 0.0:
        stay = math.ceil(age_seconds / least_seconds) + 1
    return range(1, 2 * (stay + longest) + 1)


def check_space(
    needed: SpaceNeeded, held_bytes: int, free_bytes: int | None, where: str, *, counts_age: bool = True
) -> None:
    """Raise ConfigError where a tier will not be able to hold what is needed; say nothing where nobody knows.

    held_bytes: of what `needed` counts, what is there already. free_bytes: what could still be written.
    counts_age: False where `needed` had to leave out that snapshots grow too old.
    """
    if free_bytes is None or needed.peak_bytes - held_bytes <= free_bytes:
        return
    raise ConfigError(
        f"{where} has {format_bytes(free_bytes)} free, and snapshots will need "
        f"{format_bytes(needed.peak_bytes - held_bytes)}: {format_bytes(needed.kept_bytes)} stay, and a new one of "
        f"{format_bytes(needed.largest_bytes)} is written before old ones go"
        f"{f' ({format_bytes(held_bytes)} is there already)' if held_bytes else ''}; keep fewer, set max_bytes, "
        "take a smaller snap_dis, or make space"
        f"{'' if counts_age else _AGE_NOT_COUNTED}"
    )


def _most(needed: Iterable[SpaceNeeded]) -> SpaceNeeded:
    found = list(needed)
    return SpaceNeeded(
        max(each.peak_bytes for each in found),
        max(each.kept_bytes for each in found),
        max(each.largest_bytes for each in found),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    steps: Sequence[int]
    scheme: Scheme
    snap_dis: SnapDistance
    baseline_bytes: int
    delta_bytes: int
    seconds_between_saves: float
    stored: tuple[StoredSnapshot, ...]
    now_seconds: float

    def needed(self, keep: Keep) -> SpaceNeeded:
        largest = max(self.baseline_bytes, self.delta_bytes if self.snap_dis != 1 else 0) if self.steps else 0
        there, since = list(self.stored), tuple[StoredSnapshot, ...]()
        begin_seconds = max(self.now_seconds, *(snapshot.created_seconds for snapshot in there), 0.0)
        kept, peak, looks = sum(each.stored_bytes for each in there), [0], 0
        most_kept = kept
        for number, step in enumerate(self.steps, start=1):
            if looks > _MOST_LOOKS:
                return self._extrapolated(peak, most_kept, largest)
            now_seconds = begin_seconds + number * self.seconds_between_saves
            sizes = self.baseline_bytes, self.delta_bytes
            since = with_next(since, self.scheme, self.snap_dis, step, now_seconds, *sizes)
            there = [*(each for each in there if each.step != step), since[-1]]
            peak.append(max(peak[-1], kept + since[-1].stored_bytes))
            gone = set(to_forget(there, keep, now_seconds))
            there = [each for each in there if each.step not in gone]
            kept = sum(each.stored_bytes for each in there)
            most_kept = max(most_kept, kept)
            looks += len(there)
        return SpaceNeeded(max(peak[-1], most_kept), most_kept, largest)

    def _extrapolated(self, peak: Sequence[int], most_kept: int, largest: int) -> SpaceNeeded:
        done = len(peak) - 1
        growth = (peak[-1] - peak[done // 2]) / (done - done // 2)
        grown = int(growth * (len(self.steps) - done)) + 1 if growth else 0
        return SpaceNeeded(peak[-1] + grown, most_kept + grown, largest)
