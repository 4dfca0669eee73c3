"""The burst buffer's decisions: what is copied to the slow tier next, what may leave the fast one, what fits there.

A snapshot is committed on the small fast tier where it fits, copied ("drained") to the large slow one, and stays on the
fast one, from where a restore is quicker, until its place is needed:

    save ── fits ──> fast tier ── drain ──> slow tier        fast: capacity; retention over what is on either
      └── does not: falls through ──────────────^            slow: retention over what is there

Nothing is remembered between the questions: after a crash, what lies on the two tiers says all there is to know, and
draining continues. Source: Chien et al., "Characterizing deep-learning I/O workloads in TensorFlow", PDSW-DISCS 2018,
sections III.C and V.C, whose burst buffer copies each checkpoint in the order it was written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.policy.retention import Keep, StoredSnapshot, lineage, restorable, to_forget


@dataclass(frozen=True, slots=True, eq=False)
class TwoTiers:
    """What lies on a fast and a slow tier.

    snapshots: on either or both, in the order of their commits. `is_intact` says that one good copy is there.
    fast_bytes: by step, of each copy on the fast tier (it may be stored otherwise there than on the slow one).
    on_slow: steps of which a good copy is on the slow tier.

    Raises: ConfigError for a step that is on neither, or on one and no snapshot.
    """

    snapshots: tuple[StoredSnapshot, ...]
    fast_bytes: Mapping[int, int]
    on_slow: frozenset[int]

    def __post_init__(self) -> None:
        steps = {snapshot.step for snapshot in self.snapshots}
        somewhere = self.fast_bytes.keys() | self.on_slow
        if odd := sorted(steps ^ somewhere):
            raise ConfigError(
                f"step {odd[0]} is on a tier and no snapshot, or a snapshot and on no tier: list both anew"
            )

    @property
    def drained(self) -> list[int]:
        """Return the steps that are on both tiers, oldest first."""
        return [
            each.step for each in self.snapshots if each.step in self.fast_bytes and each.step in self.on_slow
        ]


def to_drain(tiers: TwoTiers, keep: Keep, now_seconds: float) -> list[int]:
    """Return the steps to copy to the slow tier, in their order; ask again after each, for a newer may have come.

    The newest first, since a drain protects from losing the fast tier, and the newest is what that would cost most;
    where drains keep up there is one at most to choose from. Before each go those that it needs and that are not on
    the slow tier, the baseline first: there too, whatever is listed can be restored, at any time. What retention gives
    up meanwhile is not copied at all: where drains cannot keep up, that is how the queue stays short.
    """
    gone = set(to_forget(tiers.snapshots, keep, now_seconds))
    order: list[int] = []
    done = set(tiers.on_slow)
    for newest in reversed(restorable(tiers.snapshots)):
        if newest not in gone:
            missing = [step for step in lineage(tiers.snapshots, newest) if step not in done]
            order += missing
            done.update(missing)
    return order


def to_forget_fast(
    tiers: TwoTiers, keep: Keep, now_seconds: float, *, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps that the rules no more want on the fast tier, drained or not, children before parents.

    in_use: as in `to_forget`: what is being drained, restored or referred to.
    """
    gone = to_forget(tiers.snapshots, keep, now_seconds, in_use=in_use)
    return [step for step in gone if step in tiers.fast_bytes]


def to_forget_slow(
    tiers: TwoTiers, keep: Keep, now_seconds: float, *, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps that may leave the slow tier, children before parents; ask after each drain.

    The rules are applied to what is there: what is only on the fast tier may yet be lost with it, and replaces nothing.
    What stays on the fast tier alone keeps what it needs on the slow one.
    """
    there = [snapshot for snapshot in tiers.snapshots if snapshot.step in tiers.on_slow]
    gone = set(to_forget(tiers.snapshots, keep, now_seconds, in_use=in_use))
    waiting = [step for step in restorable(tiers.snapshots) if step not in tiers.on_slow and step not in gone]
    needed = {needed for step in waiting for needed in lineage(tiers.snapshots, step)}
    return to_forget(there, keep, now_seconds, in_use=needed.union(in_use))


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a new snapshot is written to the fast tier, and which drained copies leave it first, in their order."""

    to_fast: bool
    forget: tuple[int, ...] = ()


def admit(tiers: TwoTiers, capacity_bytes: int, new_bytes: int, *, in_use: Collection[int] = ()) -> Admission:
    """Return where a new snapshot is written, and what makes space for it.

    Space is made by copies that are on the slow tier too, the oldest first, but those that the newest snapshot needs
    last: they are what a restore and the next difference read. If that is not enough nothing is removed, and the new
    one falls through to the slow tier; no wait for a drain, which would block the training for as long.

    Asked again after a drain, for a snapshot like the newest, it makes space ahead of the next save.

    capacity_bytes: of the fast tier for snapshots. new_bytes: the most that the new one may take.
    in_use: steps whose copy must stay: what is being restored or referred to.
    """
    missing = sum(tiers.fast_bytes.values()) + new_bytes - capacity_bytes
    newest = restorable(tiers.snapshots)[-1:]
    useful = {needed for step in newest for needed in lineage(tiers.snapshots, step)}
    forget: list[int] = []
    for step in sorted(tiers.drained, key=lambda step: step in useful):
        if missing > 0 and step not in in_use:
            forget.append(step)
            missing -= tiers.fast_bytes[step]
    return Admission(True, tuple(forget)) if missing <= 0 else Admission(False)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured of saves so far.

    raw_bytes_per_second: at which the fast tier takes a state as it is, its sync included.
    encode_bytes_per_second: at which states are encoded. share: of a state that is left of it, as a baseline.
    """

    raw_bytes_per_second: float
    encode_bytes_per_second: float
    share: float


#: Encoding takes processors from the training, so it has to be worth more than a little.
_WORTH = 0.8


def encode_first(speeds: Speeds | None) -> bool:
    """Return whether a snapshot is encoded before the fast tier, rather than on its way to the slow one.

    It is where that makes it durable in less than four fifths of the time: encoding and writing go on side by side, so
    the slower of the two counts. None: nothing is known yet, and it is stored as it is.
    """
    if speeds is None:
        return False
    raw = 1 / speeds.raw_bytes_per_second
    encoded = max(1 / speeds.encode_bytes_per_second, speeds.share * raw)
    return encoded < _WORTH * raw
