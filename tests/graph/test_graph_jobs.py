"""The ranks of a job are the workers of a graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.ranks.jobs import MPI_LIBRARIES, mpi_command

PROGRAM = """
import sys
if sys.argv[1] == "mpi":
    import mpi4py
    mpi4py.rc.thread_level = "multiple"
    import mpi4py.MPI
else:
    import torch
    torch.distributed.init_process_group("gloo")
from penstock.graph import Graph
from penstock.graph.workers import session_of_job

sent = []
if sys.argv[1] == "mpi":
    from penstock.ranks.carrier_mpi import MpiCarrier

    ask = MpiCarrier.ask
    MpiCarrier.ask = lambda self, rank, parts: sent.append(rank) or ask(self, rank, parts)
graph = Graph()
with graph.on_device("/job:worker/task:0"):
    x = graph.constant(20.0)
with graph.on_device("/job:worker/task:1"):
    y = graph.add("Neg", x) * -2.1
with session_of_job(graph, shares_memory=False) as session:
    if session is not None:
        print("answer", session.run(y), len(set(session.processes.values())), flush=True)
print("sent by MPI to", sent, flush=True)
if sys.argv[1] != "mpi":
    torch.distributed.destroy_process_group()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", *MPI_LIBRARIES])
def test_a_launcher_starts_the_workers_and_they_end_with_rank_zero(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    kind, command = ("torch", TORCHRUN) if launcher == "torchrun" else ("mpi", mpi_command(2, launcher))

    done = subprocess.run([*command, str(script), kind], text=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "answer 42.0 2" in done.stdout
    assert ("sent by MPI to [1]" in done.stdout) == (kind == "mpi")
