"""The limits of a host, from files as kernels, containers and batch systems leave them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.flow.cpus import (
    available_cpus,
    cpu_limit,
    default_readers,
    give_way,
    memory_limit_bytes,
    ranks_on_this_host,
)


@pytest.fixture(autouse=True)
def _a_host_of_eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_without_limits_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, {}) == 8


@for_each(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "9900000 100000"}, 8),
        # The tightest of a group and those above it.
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/cpu.max": "200000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "600000 100000",
            },
            2,
        ),
        # A container whose own path only the host can see.
        ({"proc/self/cgroup": "0::/docker/abc", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    ],
)
def test_a_quota_of_cgroup_version_2_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_cpus(host(tmp_path, files), {}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 3), ("400000", 4)])
def test_a_quota_of_cgroup_version_1_counts(tmp_path: Path, quota: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
    }

    assert available_cpus(host(tmp_path, files), {}) == expected


def test_slurms_share_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, {"SLURM_CPUS_PER_TASK": "3"}) == 3
    assert available_cpus(tmp_path, {"SLURM_CPUS_PER_TASK": "99"}) == 8
    assert available_cpus(tmp_path, {"SLURM_CPUS_PER_TASK": ""}) == 8


@for_each(
    "name",
    [
        "SLURM_CPUS_PER_TASK",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ],
)
@for_each("share", ["0", "-2", "many", "1.5"])
def test_a_share_that_is_no_number_is_named(tmp_path: Path, name: str, share: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{share}'"):
        available_cpus(tmp_path, {name: share})


def test_ranks_that_torchrun_started_on_this_host_share_its_processors(tmp_path: Path) -> None:
    quota = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "600000 100000"}

    assert cpu_limit(tmp_path, {"LOCAL_WORLD_SIZE": "2"}) == (4, "all of this host, shared by 2 ranks")
    assert cpu_limit(tmp_path, {"LOCAL_WORLD_SIZE": "16"}).cpus == 1
    assert cpu_limit(host(tmp_path, quota), {"LOCAL_WORLD_SIZE": "2"}) == (
        3,
        "cgroup limit, shared by 2 ranks",
    )
    assert cpu_limit(tmp_path, {"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_PER_TASK": "2"}).cpus == 2


@for_each(
    ("variables", "ranks"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2(x12),1", "SLURM_NODEID": "12"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2(x12),1", "SLURM_NODEID": "13"}, 1),
        # What the script of a job has, which srun did not start; torchrun as the only task of a host; mpirun in a job.
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_NTASKS": "8"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ],
)
def test_so_do_those_of_other_launchers(tmp_path: Path, variables: dict[str, str], ranks: int) -> None:
    assert cpu_limit(tmp_path, variables).cpus == 8 // ranks
    assert ranks_on_this_host(variables) == ranks


def test_what_limits_the_threads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_limit(tmp_path, {}) == (8, "all of this host")
    assert cpu_limit(tmp_path, {"SLURM_CPUS_PER_TASK": "3"}) == (3, "SLURM_CPUS_PER_TASK")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cpu_limit(tmp_path, {}) == (8, "affinity mask")


def test_a_mask_is_shared_by_the_ranks_that_have_it_from_who_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    two_ranks = {"LOCAL_WORLD_SIZE": "2"}
    masks = {0: set(range(8)), os.getppid(): set(range(8))}

    def mask_of(pid: int) -> set[int]:
        if pid not in masks:
            raise ProcessLookupError
        return masks[pid]

    monkeypatch.setattr(os, "sched_getaffinity", mask_of)
    assert cpu_limit(tmp_path, two_ranks) == (4, "affinity mask, shared by 2 ranks")
    masks[os.getppid()] = set(range(16))
    assert cpu_limit(tmp_path, two_ranks) == (8, "affinity mask")
    del masks[os.getppid()]
    assert cpu_limit(tmp_path, two_ranks) == (4, "affinity mask, shared by 2 ranks")


@for_each(
    ("count", "number"), [("LOCAL_WORLD_SIZE", "LOCAL_RANK"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID")]
)
def test_a_mask_that_a_shell_between_launcher_and_rank_has_too_is_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str, number: str
) -> None:
    """As with `numactl --cpunodebind=$LOCAL_RANK bash run.sh` for each rank."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getppid", lambda: 70)
    masks = {0: 8, 70: 8, 60: 8, 50: 16}  # the rank, two shells, torchrun
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(masks[pid])))
    host(tmp_path, {"proc/70/stat": "70 (a (b) c) S 60 70", "proc/60/stat": "60 (bash) S 50 60"})
    for pid, environment in ((70, f"{number}=0\0HOME=/"), (60, f"HOME=/\0{number}=0"), (50, "HOME=/")):
        host(tmp_path, {f"proc/{pid}/environ": environment})
    two_ranks = {count: "2"}

    assert cpu_limit(tmp_path, two_ranks) == (8, "affinity mask")
    masks[50] = 8
    assert cpu_limit(tmp_path, two_ranks) == (4, "affinity mask, shared by 2 ranks")


def test_readers_outnumber_processors_within_bounds() -> None:
    assert [default_readers(cpus) for cpus in (1, 2, 24, 128)] == [32, 32, 48, 64]


def test_without_limits_all_memory_counts(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": "104857600"}, 104857600),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/memory.max": "1000000",
                "sys/fs/cgroup/job/step/memory.max": "max",
            },
            1000000,
        ),
        (
            {"proc/self/cgroup": "4:memory:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000"},
            5000,
        ),
    ],
)
def test_a_memory_limit_of_a_cgroup_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_limit_bytes(host(tmp_path, files)) == expected


def test_a_cgroup_without_a_memory_limit_leaves_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory.max": "max",
    }

    assert memory_limit_bytes(host(tmp_path, files)) == psutil.virtual_memory().total


def test_the_real_host_can_be_asked() -> None:
    assert 1 <= available_cpus() <= 8
    assert 0 < memory_limit_bytes() <= psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness is the process's elsewhere")
def test_a_thread_that_gives_way_does_so_with_those_that_it_starts_and_nobody_else() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    found: list[int] = []

    def work() -> None:
        give_way()
        found.append(niceness())
        started = threading.Thread(target=lambda: found.append(niceness()))
        started.start()
        started.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19, 19]
    assert niceness() == before
