"""Starts jobs of several ranks, of torch.distributed and of MPI, which run a script and report in JSON.

Starting processes takes longer than what the ranks do: a job does many checks, and the ranks of torch.distributed are
forked, see tests/forking.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forked, Job
from tests.patience import patient

#: Each has an `mpiexec` of its own; that of Open MPI takes over a second to start.
MPI_LIBRARIES = ("mpich", pytest.param("openmpi", marks=pytest.mark.slow))


def torch_job(*arguments: str, size: int, address: str) -> Job:
    """Return a job whose ranks also get the address, their rank and the number of ranks."""
    return [[*arguments, "torch", address, str(rank), str(size)] for rank in range(size)]


def torchrun_job(*arguments: str, size: int) -> Job:
    """Return a job whose ranks have what torchrun tells them, without the interpreters that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    rows = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [[*(f"{name}={value}" for name, value in row.items()), *arguments] for row in rows]


def mpi_command(size: int, library: str = "mpich") -> list[str]:
    """Return what a command starts with that runs Python as so many ranks of MPI. library: of `MPI_LIBRARIES`."""
    if library == "mpich":
        return [str(Path(sys.executable).with_name("mpiexec")), "-n", str(size), sys.executable]
    # Its mpiexec would replace that of MPICH. It refuses to run as root, and more ranks than processors.
    folder = Path(sys.prefix, "openmpi")
    assert folder.exists(), f"{folder} is missing, which has Open MPI: make setup installs it"
    variables = [
        f"MPI4PY_LIBMPI={folder / 'lib'}",
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ]
    mpiexec = [str(folder / "bin" / "mpiexec"), "--oversubscribe", "--bind-to", "none"]
    return ["env", *variables, *mpiexec, "-n", str(size), sys.executable]


def start_mpi_jobs(
    script: Path, jobs: list[tuple[int, list[str]]], library: str = "mpich"
) -> subprocess.Popen[str]:
    """Start jobs, one after the other. jobs: of each, the number of ranks and the arguments of all."""
    commands = [[*mpi_command(size, library), str(script), *arguments, "mpi"] for size, arguments in jobs]
    run = "import json, subprocess, sys\nfor job in json.loads(sys.argv[1]): subprocess.run(job, check=True)"
    return start_process(sys.executable, "-c", run, json.dumps(commands))


def start_process(*command: str) -> subprocess.Popen[str]:
    """Start a process in a session of its own, which `end` ends with all that it starts."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process of `start_process` that has not been waited for, and what it started: mpiexec and its ranks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def outputs_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a process of `start_process` writes, which has to end well; it ends with this, whatever happens."""
    try:
        told = process.communicate(timeout=patient(60))
    finally:
        end(process)
    assert process.returncode == 0, told
    return told


def wait_for(torch_jobs: Forked, *mpi_jobs: subprocess.Popen[str], killed: int = 0) -> None:
    """Wait for jobs. Raises: AssertionError if a rank fails, but for so many of torch.distributed that are killed."""
    try:
        with torch_jobs:
            told, ended = torch_jobs.wait()
        outputs = [job.communicate(timeout=patient(100)) for job in mpi_jobs]
    finally:
        for job in mpi_jobs:
            end(job)
    assert sorted(ended.values()) == [-signal.SIGKILL] * killed + [0] * (len(ended) - killed), told
    assert [job.returncode for job in mpi_jobs] == [0] * len(mpi_jobs), outputs


def reports_in(folder: Path, duty: str, size: int) -> list[dict[str, Any]]:
    """Return what the ranks of a job reported."""
    return [json.loads((folder / f"report-{duty}-{rank}.json").read_text()) for rank in range(size)]
