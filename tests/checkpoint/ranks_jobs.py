"""Starts jobs of several ranks, of torch.distributed and of MPI, which run a script and report in JSON.

Starting processes takes longer than what the ranks do: a job does many checks, and PyTorch is imported once for all
ranks that follow each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Runs rows of jobs beside each other, the jobs of a row one after the other; each rank is forked from one process.
FORKING = """
import json, os, runpy, sys, traceback
for module in sys.argv[3].split():
    __import__(module)

# What every rank would load for itself: one save, one difference, and a restore.
import tempfile
import numpy
from penstock.checkpoint.store import SnapshotStore
with tempfile.TemporaryDirectory() as folder, SnapshotStore(folder, report=None, threads=1) as store:
    for step in range(2):
        numbers = numpy.random.default_rng(1).normal(0, 1, 1 << 14).astype("f4") * (1 + 1e-6 * step)
        store.save(step, {"a": numbers, "b": numbers.astype("f8"), "c": numbers.view("u1"), "d": numbers.astype("i8")})
    store.restore()

def forked(function, *arguments):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # how a process group ends that has lost a rank is PyTorch's business

def run_rank(arguments):
    script, sys.argv = sys.argv[1], ["rank", *arguments]
    runpy.run_path(script, run_name="__main__")

def run_row(row):
    for job in row:
        for child in [forked(run_rank, arguments) for arguments in job]:
            os.waitpid(child, 0)

for child in [forked(run_row, row) for row in json.loads(sys.argv[2])]:
    os.waitpid(child, 0)
"""

#: What a rank of every job imports.
_MODULES = "numpy xxhash torch.distributed numba penstock.checkpoint.store penstock.checkpoint.codecs.ours"

Job = list[list[str]]


def start_torch_jobs(script: Path, rows: list[list[Job]], modules: str = "") -> subprocess.Popen[str]:
    """Start rows of jobs, those of a row one after the other. A job is the arguments of each of its ranks.

    modules: to import before, besides.
    """
    command = (FORKING, str(script), json.dumps(rows), f"{_MODULES} {modules}")
    return _start(sys.executable, "-W", "ignore", "-c", *command)


def torch_job(*arguments: str, size: int, address: str) -> Job:
    """Return a job whose ranks also get the address, their rank and the number of ranks."""
    return [[*arguments, "torch", address, str(rank), str(size)] for rank in range(size)]


def start_mpi_jobs(script: Path, jobs: list[tuple[int, list[str]]]) -> subprocess.Popen[str]:
    """Start jobs, one after the other. jobs: of each, the number of ranks and the arguments of all."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    commands = [
        [mpiexec, "-n", str(size), sys.executable, str(script), *arguments, "mpi"] for size, arguments in jobs
    ]
    run = "import json, subprocess, sys\nfor job in json.loads(sys.argv[1]): subprocess.run(job, check=True)"
    return _start(sys.executable, "-c", run, json.dumps(commands))


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(launchers: list[subprocess.Popen[str]], timeout_seconds: float = 100) -> str:
    """Return what they wrote to standard error. Raises: AssertionError if one fails."""
    try:
        outputs = [launcher.communicate(timeout=timeout_seconds) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    told = "\n".join(text for output in outputs for text in output)
    assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), told
    return told


def reports_in(folder: Path, duty: str, size: int) -> list[dict[str, Any]]:
    """Return what the ranks of a job reported."""
    return [json.loads((folder / f"report-{duty}-{rank}.json").read_text()) for rank in range(size)]
