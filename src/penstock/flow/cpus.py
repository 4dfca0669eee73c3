"""How much of this host the process may use, as the kernel and the batch system say."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError

_ROOT = Path("/")
#: Niceness of who takes what others leave: a seventieth of a processor where all are wanted.
_LAST = 19
#: What a process that compiles takes: 371 MB and some.
_COMPILER_BYTES = 1 << 29
_OF_SRUN = "SLURM_STEP_TASKS_PER_NODE"
#: What launchers call the number of ranks on a host, and that of each among them. The first that is there started this
#: rank: torchrun may itself be a task of srun.
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray Train
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # MPICH
    (_OF_SRUN, "SLURM_LOCALID"),
)


class CpuLimit(NamedTuple):
    """How many threads can compute at once, and what limits them.

    reason: in words, for people.
    """

    cpus: int
    reason: str


def available_cpus(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads can compute at once; see `cpu_limit`."""
    return cpu_limit(root, environment).cpus


def cpu_limit(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> CpuLimit:
    """Return how many threads can compute at once: the least of affinity, cgroup quota and SLURM's share.

    A quota of a fraction counts as the next whole number: threads that share 1.5 processors get more done by
    two than by one. The ranks that a launcher starts on a host share its processors, their cgroup's quota, and the
    affinity mask that the launcher has; one that is set for a rank is its own.

    root: where /proc and /sys are; for tests.
    Returns: at least 1.
    Raises: ConfigError if SLURM_CPUS_PER_TASK is not a number of at least 1; as `ranks_on_this_host`.
    """
    affinity, host = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    ranks, name = _launched(environment)
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    mask = "affinity mask" if affinity < host else "all of this host"
    limits: list[tuple[float, str]] = [
        (affinity, mask) if _has_own_mask(root, name) else (affinity / ranks, mask + shared),
        (_cgroup_cpus(root) / ranks, f"cgroup limit{shared}"),
    ]
    if (share := _count(environment, "SLURM_CPUS_PER_TASK")) is not None:
        limits.append((share, "SLURM_CPUS_PER_TASK"))
    count, reason = min(limits, key=itemgetter(0))
    return CpuLimit(max(1, math.ceil(count)), reason)


def _has_own_mask(root: Path, name: str) -> bool:
    """Whether the affinity mask is this rank's alone: narrower than that of the process which started all ranks.

    name: of the variable that the launcher gives to ranks, and has not itself.
    There may be shells between the two, as of `numactl bash run.sh`, with the rank's mask and environment.
    """
    mask, pid = os.sched_getaffinity(0), os.getppid()
    try:
        while not mask < os.sched_getaffinity(pid):
            if f"\0{name}=".encode() not in b"\0" + (root / f"proc/{pid}/environ").read_bytes():
                return False
            # Behind the name, which may hold anything: the state, and who started it.
            pid = int(_text(root / f"proc/{pid}/stat").rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended, or is of another container or user
        return False
    return True


def ranks_on_this_host(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks torchrun, mpirun, `srun` or Ray Train started on this host; 1 without them.

    Raises: ConfigError if what the launcher says is not a number of at least 1.
    """
    return _launched(environment)[0]


def _launched(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks were started on this host, and what the variable is called that numbers them."""
    for name, number in _LAUNCHERS:
        text = environment.get(name, "")
        if name == _OF_SRUN:
            # "2(x3),1": two tasks on each of the first three hosts, one on the fourth.
            counts = re.sub(r"(\d+)\(x(\d+)\)", lambda each: ",".join([each[1]] * int(each[2])), text).split(
                ","
            )
            host = environment.get("SLURM_NODEID", "")
            text = counts[int(host)] if host.isdecimal() and int(host) < len(counts) else counts[0]
        if (count := _count({name: text}, name)) is not None:
            return count, number
    return 1, _LAUNCHERS[0][1]


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}; it must be an integer of at least 1")
    return int(text)


def default_readers(cpus: int) -> int:
    """Return how many reads to keep in flight where nobody measured the store.

    A reader mostly waits, so there are more of them than processors: 32 fill a wire of 50 MB/s behind 10 ms
    of latency with reads of 16 KB and more.
    """
    return min(64, max(32, 2 * cpus))


def default_coders() -> int:
    """Return how many threads to encode or decode snapshots with: 4 outrun most disks, and training needs some too."""
    return min(4, available_cpus())


def most_compilers() -> int:
    """Return how many processes may compile at once: one for each processor and for each 512 MB of memory."""
    return max(1, min(available_cpus(), memory_limit_bytes() // _COMPILER_BYTES))


def give_way() -> None:
    """Have the calling thread leave processors to all that want them, for as long as it lives: its work can wait.

    So do the threads that it starts. Only on Linux, where a niceness is a thread's own.
    """
    if sys.platform == "linux":
        with suppress(
            PermissionError
        ):  # a sandbox may forbid even that: the thread works beside the others then
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return how much memory this process may use at most: the least of the host's and its cgroups' limits.

    root: where /proc and /sys are; for tests.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    v2 = (_number(group / "memory.max") for group in _groups_v2(root))
    v1 = (_number(group / "memory.limit_in_bytes") for group in _groups_v1(root, "memory"))
    return int(min([physical, *v2, *v1]))


def _cgroup_cpus(root: Path) -> float:
    """Return the processors' worth of time that the tightest cgroup grants; inf without a quota."""
    granted = [math.inf]
    for group in _groups_v2(root):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            granted.append(int(quota) / int(period))
    for group in _groups_v1(root, "cpu"):
        # -1 means no quota.
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            granted.append(int(quota) / int(period))
    return min(granted)


def _groups_v2(root: Path) -> Iterator[Path]:
    for controllers, path in _memberships(root):
        if not controllers:
            yield from _upwards(root / "sys/fs/cgroup", path)
            yield from _upwards(root / "sys/fs/cgroup/unified", path)


def _groups_v1(root: Path, controller: str) -> Iterator[Path]:
    for controllers, path in _memberships(root):
        if controller in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup" / controller, path)


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controllers, path) of each cgroup of this process; version 2 names no controllers."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers, path


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield a cgroup's folder and all above it: each may limit those below.

    In a container the path may be one that only the host can see; the mount itself is then the container's
    own.
    """
    below = mount / path.lstrip("/")
    yield below
    while below != mount:
        below = below.parent
        yield below


def _number(file: Path) -> float:
    text = _text(file)
    return int(text) if text.isdecimal() else math.inf


def _text(file: Path) -> str:
    """Return a file's content, or nothing where this kernel or container has no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
