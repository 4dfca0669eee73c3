"""Which snapshots of a store may be forgotten, and in which order, so that whatever stays can be restored.

    Keep(last=2, every_steps=1000), scheme progressive, snap_dis 3; step 1,400 was just committed:

    step         900   1,000   1,100   1,200   1,300   1,400
    stored as     B  <   d   <   d       B   <   d   <   d        < is stored as a difference to
    wanted             every                   last    last
    stays      pinned    x            pinned     x       x
    goes                         x

A rule wants a snapshot, or none does; what is wanted pins the snapshots that it is stored as a difference to, and
theirs. The names of rules are those people know: `last` is TensorFlow's `max_to_keep` (five, too), Lightning's
`save_top_k` without a metric, Hugging Face's `save_total_limit`; `every_steps` is orbax's `keep_period`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from penstock.errors import ConfigError
from penstock.units import is_integer, parse_bytes
from penstock.validate import check_above_zero


@dataclass(frozen=True, slots=True)
class Keep:
    """How many snapshots are kept, by rules that want one and limits that let old ones go.

    A snapshot is wanted that `last` or `every_steps` wants. Of these, the limits `max_age_seconds` and `max_bytes`
    give up the oldest, whichever rule wanted them. Nothing ever gives up the newest snapshot that can be restored.

    last: so many of the newest; None wants all. A damaged one does not count, and stays while an intact one in its
        place would: what could not be read may have been a fault of the network.
    every_steps: the first at or after each multiple of so many steps, for good: 1,000, 2,000, 3,000 where there are
        such; and the one of step 0.
    max_age_seconds: no older than this.
    max_bytes: of all that stay, pinned ones included, in bytes or as "50 GB", which is read. If the newest alone needs
        more, it alone stays.

    Raises: ConfigError naming the field.
    """

    last: int | None = 5
    every_steps: int | None = None
    max_age_seconds: float | None = None
    max_bytes: int | str | None = None

    def __post_init__(self) -> None:
        """Check it, and read `max_bytes`."""
        values = {
            name: getattr(self, name) for name in ("last", "every_steps", "max_bytes", "max_age_seconds")
        }
        if isinstance(values["max_bytes"], str):
            values["max_bytes"] = parse_bytes(values["max_bytes"])
            object.__setattr__(self, "max_bytes", values["max_bytes"])
        age_seconds = values.pop("max_age_seconds")
        if age_seconds is not None:
            check_above_zero("max_age_seconds", age_seconds)
        for name, value in values.items():
            if value is not None and not is_integer(value):
                text = ', or text such as "50 GB"' if name == "max_bytes" else ""
                raise ConfigError(f"{name} is {value!r}; it must be an integer{text}, or None")
        if self.last is not None and self.last < 1:
            raise ConfigError(
                f"last is {self.last}; the newest snapshot is always kept: give 1 or more, or None for all of them"
            )
        if self.every_steps is not None:
            if self.every_steps < 1:
                raise ConfigError(f"every_steps is {self.every_steps}; multiples of at least 1 can be kept")
            if self.last is None:
                raise ConfigError(
                    f"last is None, which keeps every snapshot, so every_steps {self.every_steps} would do nothing: "
                    "give last=1 to keep the newest and those"
                )
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(
                f"max_bytes is {self.max_bytes}; it must be at least one byte: None sets no limit"
            )

    @property
    def limit_bytes(self) -> int | None:
        """Return `max_bytes` as the number that it was read as."""
        assert not isinstance(self.max_bytes, str), "text is read when the object is made"
        return self.max_bytes


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A committed snapshot, as retention sees it.

    step: of the training; names the snapshot.
    created_seconds: when it was committed, on the clock that `now_seconds` is read from; after all before it.
    stored_bytes: of its own files, those it refers to not included.
    reference_step: of the snapshot that it is stored as a difference to; None for a baseline.
    is_intact: False where its own files are known to be damaged.
    clock_seconds: what the clock said then, where it said less because it had been set back; None: as created.
    """

    step: int
    created_seconds: float
    stored_bytes: int
    reference_step: int | None = None
    is_intact: bool = True
    clock_seconds: float | None = None


def to_forget(
    snapshots: Sequence[StoredSnapshot], keep: Keep, now_seconds: float, *, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps of those that may be deleted, in an order in which they may be: children before parents.

    Ask once a new snapshot is committed, with it in the list: what it replaces is deleted then, never before.

    snapshots: all there are, in the order of their commits, the newest last. (Not of their steps: a training that
        was set back to an earlier step writes new snapshots with smaller steps than old ones have.)
    in_use: steps that must stay, whatever the rules say, with all they need: the reference of a save that is under
        way, what is being restored.
    Returns: nothing at all while no snapshot can be restored.
    Raises: ConfigError for two snapshots of one step.

    Where it differs from Algorithm 2 of the paper (`penstock.policy.delta_schemes`): with `Keep(last=1)` what stays is
    what its `delete` leaves, but `delete` comes before the new baseline is saved there.
    """
    parents, can_restore = _linked(snapshots)
    if not any(can_restore):
        return []
    limit_bytes = keep.limit_bytes
    if keep.max_age_seconds is None and limit_bytes is None and len(snapshots) <= (keep.last or math.inf):
        return []
    newest = len(can_restore) - 1 - can_restore[::-1].index(True)
    wanted = _wanted(snapshots, can_restore, keep)
    if keep.max_age_seconds is not None:
        oldest_seconds = now_seconds - keep.max_age_seconds
        made_seconds = _made_seconds(snapshots, now_seconds)
        wanted = [place for place in wanted if made_seconds[place] >= oldest_seconds]
    used = {place for place, snapshot in enumerate(snapshots) if snapshot.step in in_use}
    kept = _Kept(snapshots, parents, {*wanted, newest, *used})
    if limit_bytes is not None:
        # Damaged ones are deleted before intact ones, which never refer to damaged ones.
        given_up = (place for fine in (False, True) for place in wanted if can_restore[place] is fine)
        for place in given_up:
            if kept.nbytes <= limit_bytes:
                break
            if place != newest and place not in used:
                kept.release(place)
    return [snapshots[place].step for place in reversed(range(len(snapshots))) if not kept.reasons[place]]


def lineage(snapshots: Sequence[StoredSnapshot], step: int) -> list[int]:
    """Return the steps of all that make a snapshot, in their order, itself the last.

    Raises: ConfigError if it or one of them is not there, or they go in circles.
    """
    by_step = {snapshot.step: snapshot for snapshot in snapshots}
    found: list[int] = []
    next_step: int | None = step
    while next_step is not None:
        if next_step not in by_step:
            needed = f", which that of step {found[0]} needs" if found else ""
            raise ConfigError(f"there is no snapshot of step {next_step}{needed}")
        if len(found) == len(snapshots):
            raise ConfigError(
                f"the snapshot of step {step} refers to itself in the end: its files are damaged"
            )
        found.insert(0, next_step)
        next_step = by_step[next_step].reference_step
    return found


def pinned(snapshots: Sequence[StoredSnapshot], steps: Iterable[int]) -> list[int]:
    """Return the steps of those that these snapshots need besides themselves, in the order of `snapshots`."""
    wanted = set(steps)
    needed = {needed for step in wanted for needed in lineage(snapshots, step)} - wanted
    return [snapshot.step for snapshot in snapshots if snapshot.step in needed]


def dependents(snapshots: Sequence[StoredSnapshot], step: int) -> list[int]:
    """Return the steps of those that cannot be restored without this one, in the order to delete them before it."""
    found = {step}
    for snapshot in snapshots:
        if snapshot.reference_step in found:
            found.add(snapshot.step)
    return [snapshot.step for snapshot in reversed(snapshots) if snapshot.step in found - {step}]


def restorable(snapshots: Sequence[StoredSnapshot]) -> list[int]:
    """Return the steps of those that are intact, as is all that they need, in the order of `snapshots`."""
    return list(compress(map(attrgetter("step"), snapshots), _linked(snapshots)[1]))


def possible_references(stored: Sequence[StoredSnapshot], created_seconds: float) -> list[int]:
    """Return the steps of the snapshots that a new one may be a difference to, in the order of `stored`.

    They can be restored and were saved before it: a snapshot that is drained late finds some that were saved after it.

    stored: the snapshots of the tier it is written to. created_seconds: when the new one was saved.
    """
    steps = []
    for one, is_restorable in zip(stored, _linked(stored)[1], strict=True):
        if is_restorable and one.created_seconds <= created_seconds:
            steps.append(one.step)
    return steps


class _Kept:
    """Which places stay, by counting for each why: it is wanted itself, or kept children are stored as differences."""

    def __init__(
        self, snapshots: Sequence[StoredSnapshot], parents: Sequence[int | None], wanted: Iterable[int]
    ) -> None:
        self._snapshots, self._parents = snapshots, parents
        self.reasons = [0] * len(snapshots)
        self.nbytes = 0
        for place in wanted:
            self._hold(place)

    def _hold(self, place: int | None) -> None:
        while place is not None:
            self.reasons[place] += 1
            if self.reasons[place] > 1:
                return
            self.nbytes += self._snapshots[place].stored_bytes
            place = self._parents[place]

    def release(self, place: int | None) -> None:
        """Take one reason back, and unpin what no reason is left for."""
        while place is not None:
            self.reasons[place] -= 1
            if self.reasons[place]:
                return
            self.nbytes -= self._snapshots[place].stored_bytes
            place = self._parents[place]


def _wanted(snapshots: Sequence[StoredSnapshot], can_restore: Sequence[bool], keep: Keep) -> list[int]:
    marks = _marks(snapshots, can_restore, keep.every_steps)
    newer, wanted = 0, []
    for place in reversed(range(len(snapshots))):
        if keep.last is None or newer < keep.last or place in marks:
            wanted.append(place)
        newer += can_restore[place]
    return wanted[::-1]


def _made_seconds(snapshots: Sequence[StoredSnapshot], now_seconds: float) -> list[float]:
    """Return when each was made at the latest, though the clock may have been ahead.

        created         100   200   999   1000   1001   now 500
        clock said      100   200   999    310    400
        made            100   200   310    310    400

    What is dated before now is believed. Not also taken to be as old as what came later: a clock that was behind once
    would make all before it look old, and go.
    """
    found = []
    later_seconds = now_seconds
    for snapshot in reversed(snapshots):
        seconds, clock_seconds = snapshot.created_seconds, snapshot.clock_seconds
        if seconds > now_seconds:
            seconds = min(later_seconds, seconds if clock_seconds is None else clock_seconds)
        later_seconds = min(later_seconds, seconds)
        found.append(seconds)
    return found[::-1]


def _marks(
    snapshots: Sequence[StoredSnapshot], can_restore: Sequence[bool], every_steps: int | None
) -> set[int]:
    """Return the places of the first at or after each multiple.

    Not only those at a multiple: a schedule by minutes hits none, and a save that failed left a gap.
    """
    if every_steps is None:
        return set()
    first: dict[int, int] = {}
    for place, snapshot in enumerate(snapshots):
        multiple = snapshot.step // every_steps
        if not can_restore[place] or (multiple == 0 and snapshot.step != 0):
            continue
        if multiple not in first or snapshot.step < snapshots[first[multiple]].step:
            first[multiple] = place
    return set(first.values())


def _linked(snapshots: Sequence[StoredSnapshot]) -> tuple[list[int | None], list[bool]]:
    """Return of each the place of its reference, and whether it can be restored.

    A reference has an earlier place, so that nothing here can go in circles; None: it has none, or none that counts.
    Raises: ConfigError for two snapshots of one step.
    """
    place_of: dict[int | None, int] = {}
    parents: list[int | None] = []
    can_restore: list[bool] = []
    for place, snapshot in enumerate(snapshots):
        if snapshot.step in place_of:
            raise ConfigError(f"two snapshots are of step {snapshot.step}; a step has one: delete either")
        parent = place_of.get(snapshot.reference_step)
        place_of[snapshot.step] = place
        parents.append(parent)
        has_reference = snapshot.reference_step is None or (parent is not None and can_restore[parent])
        can_restore.append(snapshot.is_intact and has_reference)
    return parents, can_restore
