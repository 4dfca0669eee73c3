"""Which files of a series of snapshots make one, and so must be kept.

Every so many snapshots (snap_dis) one is stored completely, the baseline (B); those that follow may be stored as
differences (d), each to an earlier one. Snapshots are counted from 0:

    snap_dis 3         0   1   2   3   4     differences are to
    complete           B   B   B   B   B
    progressive        B < d < d   B < d     the snapshot before
    chain              B < d       B < d     the baseline
                       B <---- d

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019.
"""

from __future__ import annotations

from typing import Literal, get_args

from penstock.errors import ConfigError

#: "complete": each snapshot alone; "progressive": each as the difference to the one before; "chain": each as the
#: difference to the latest baseline.
Scheme = Literal["complete", "progressive", "chain"]


def baseline_of(snapshot: int, snap_dis: int) -> int:
    """Return the baseline that a snapshot belongs to, itself if it is one.

    snap_dis: snapshots from one baseline to the next, at least 1.
    """
    if snap_dis < 1:
        raise ConfigError(f"snap_dis is {snap_dis}; the first of at least 1 snapshots is a baseline")
    return snapshot - snapshot % snap_dis


def reference_of(scheme: Scheme, snapshot: int, snap_dis: int) -> int | None:
    """Return the snapshot to which this one is stored as a difference; None for a baseline."""
    _check_scheme(scheme)
    first = baseline_of(snapshot, snap_dis)
    if scheme == "complete" or snapshot == first:
        return None
    return reference_within(scheme, first, snapshot)


def reference_within(scheme: Scheme, baseline: int, snapshot: int) -> int:
    """Return the snapshot to which one behind a baseline is stored as a difference, where it is."""
    return baseline if scheme == "chain" else snapshot - 1


def needed_to_restore(scheme: Scheme, snapshot: int, snap_dis: int) -> list[int]:
    """Return the snapshots whose files make this one, in their order, itself the last.

    While it is the newest, they are what has to be kept; others may go once its file is written, never before.
    Source: Algorithm 2, lines 23 to 29.

    >>> needed_to_restore("progressive", 4, snap_dis=3), needed_to_restore("chain", 2, snap_dis=3)
    ([3, 4], [0, 2])
    """
    needed = [snapshot]
    while (reference := reference_of(scheme, needed[0], snap_dis)) is not None:
        needed.insert(0, reference)
    return needed


def needed_to_save(scheme: Scheme, snapshot: int, snap_dis: int) -> list[int]:
    """Return the snapshots whose files are read to make this one's difference; none for a baseline.

    Source: Algorithm 2, lines 13 to 18, but for the chain's previous delta, which line 18 loads and the times of the
    paper's Table 9 leave out.
    """
    reference = reference_of(scheme, snapshot, snap_dis)
    return [] if reference is None else needed_to_restore(scheme, reference, snap_dis)


def _check_scheme(scheme: str) -> None:
    if scheme not in get_args(Scheme):
        raise ConfigError(f"scheme is {scheme!r}; the known ones are {', '.join(get_args(Scheme))}")
