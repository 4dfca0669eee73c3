"""A share of a processor for each of several processes, by cgroups: one host in place of several."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.flow.cpus import _groups_v1, _groups_v2

_ROOT = Path("/")
#: By so much processes of a group come before others of the host, which may be busy.
_WEIGHT = 50
#: How long processes that are killed at the end may take to be gone.
_GONE_SECONDS = 5.0


class GroupCounts(NamedTuple):
    """What a group has counted so far. seconds: of processors that its processes took. periods: of its quota.

    throttled: periods in which it got no more as its quota was used up.
    """

    seconds: float
    periods: int
    throttled: int


def enter(group: Path) -> None:
    """Move this process, with all its threads, to a group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def counts_of(group: Path) -> GroupCounts:
    """Return what a group has counted. Time of processes that have ended is not in it."""
    stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    ticks = 0
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            words = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return GroupCounts(ticks / os.sysconf("SC_CLK_TCK"), int(stat["nr_periods"]), int(stat["nr_throttled"]))


@contextlib.contextmanager
def cpu_groups(names: Sequence[str], share: float, period_seconds: float) -> Iterator[dict[str, Path]]:
    """Make a group for each name, whose processes take `share` of a processor at most together.

    In the end, however it comes, processes that are left in them are killed, and the groups removed.
    Raises: OSError where no group can be made.
    """
    period = round(1e6 * period_seconds)
    quota = round(share * period)
    base, is_v1 = _base()
    with contextlib.ExitStack() as removals:  # the others, too, where one cannot be removed
        made = dict[str, Path]()
        for name in names:
            group = base / f"penstock-{os.getpid()}-{name.replace(' ', '-')}"
            group.mkdir()
            removals.callback(_remove, group)
            made[name] = group
            if is_v1:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
                (group / "cpu.shares").write_text(str(1024 * _WEIGHT))
            else:
                (group / "cpu.max").write_text(f"{quota} {period}")
                (group / "cpu.weight").write_text(str(100 * _WEIGHT))
        yield made


def _base() -> tuple[Path, bool]:
    """Return the group below which new ones can be made that limit processors, and whether that is of version 1."""
    for group in _groups_v1(_ROOT, "cpu"):
        if (group / "cpu.cfs_quota_us").exists() or (group / "cpu.shares").exists():
            return group, True
    for group in _groups_v2(_ROOT):
        file = group / "cgroup.subtree_control"
        if file.exists() and "cpu" in file.read_text().split():
            return group, False
    raise FileNotFoundError("no cgroup here lets those below it limit processors")


def _remove(group: Path) -> None:
    end = time.monotonic() + _GONE_SECONDS
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
        except OSError:  # what is killed takes a moment to be gone
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
