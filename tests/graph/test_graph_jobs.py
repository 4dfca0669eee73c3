"""The ranks of a job are the workers of a graph."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patience import patient
from tests.ranks.jobs import MPI_LIBRARIES, end, mpi_command, start_process

from penstock.errors import RankError
from penstock.graph.workers import job as job_module
from penstock.graph.workers import session_of_job

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


#: Trains inside of saving(); a rank is lost in step 3, once.
LOSING = """
import os, re, signal, sys
from pathlib import Path

kind, how, folder = sys.argv[1:]
if kind == "torch":
    import torch
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as it sees that a rank is lost
else:
    import mpi4py
    mpi4py.rc.thread_level = "multiple"
    import mpi4py.MPI
    rank = mpi4py.MPI.COMM_WORLD.Get_rank()
from penstock.graph import Graph
from penstock.graph.workers import session_of_job
from tests.patience import patient

Path(folder, f"pid-{os.getpid()}").touch()
for name in set(re.findall(r"/dev/shm/(mpich_\\w+)", Path("/proc/self/maps").read_text())):
    Path(folder, f"left-{name}").touch()

def strike(step):
    if step == 3 and not Path(folder, "struck").exists():
        Path(folder, "struck").touch()
        os.kill(os.getpid(), getattr(signal, how))
    return step

graph = Graph()
step = graph.placeholder("float32", [], name="step")
with graph.on_device("/job:worker/task:0"):
    w = graph.variable("float32", [], initial=1.0, name="w")
with graph.on_device("/job:worker/task:1"):
    struck = graph.add("Call", step, function="strike", outputs=[["float32", []]], name="struck")
    change = struck * graph.add("RandomUniform", shape=[])
loss = graph.add("AssignAdd", w, change, name="loss")
init = graph.initialize_all()
with session_of_job(graph, functions={"strike": strike}, report=None) as session:
    if session is not None:
        with session.saving(folder + "/saves", "2 steps") as saves:
            if not saves.step:
                session.run(init)
            for number in range(saves.step, 6):
                found = session.run(loss, {step: float(number)}, timeout_seconds=patient(5))
                print("step", number, found.tobytes().hex(), flush=True)
                saves.after(number + 1)
if kind == "torch":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("torchrun", "SIGKILL"),
        *((library, how) for library in ("mpich", "openmpi") for how in ("SIGKILL", "SIGSTOP")),
    ],
)
def test_a_job_that_loses_a_rank_ends_and_goes_on_from_the_save_when_it_is_started_again(
    launcher: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts it again itself. Where a rank is killed, mpiexec ends the others before they can say anything."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = tmp_path / "program.py"
    script.write_text(LOSING)
    if launcher == "torchrun":
        kind, command = "torch", [*TORCHRUN, "--max-restarts", "1"]
        # Else the second attempt's ranks may find addresses of the first one's in the launcher's store.
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    else:
        kind, command = "mpi", [*mpi_command(2, launcher), "-m", "mpi4py"]
    lost = r"node '\w+' .*/job:worker/task:1 \(process \d+, .*; the step waits for .*'struck'"
    outputs, codes = [], []
    for _ in range(1 if kind == "torch" else 2):
        job = start_process(*command, str(script), kind, how, str(tmp_path))
        try:
            outputs.append("".join(job.communicate(timeout=patient(120))))
        finally:
            end(job)
        codes.append(job.returncode)
    for path in tmp_path.glob("left-*"):  # MPICH leaves its memory where a rank is killed
        Path("/dev/shm", path.name[5:]).unlink(missing_ok=True)

    found = re.findall(r"step (\d) (\w+)", outputs[0])
    again = re.findall(r"step (\d) (\w+)", outputs[-1]) if kind == "mpi" else found[3:]
    assert [int(number) for number, _ in found[:3] + again] == [0, 1, 2, 2, 3, 4, 5]
    assert dict(again)["2"] == dict(found[:3])["2"]
    assert codes == ([0] if kind == "torch" else [codes[0], 0])
    assert codes[0] or kind == "torch"
    if (kind, how) != ("mpi", "SIGKILL"):
        assert re.search(lost, outputs[0])
    pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_rank_whose_client_is_gone_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the launcher does not end the others: it waited for ever."""

    class Rank:
        rank, size, transport = 1, 2, None

        def __init__(self, transport: Any) -> None:
            pass

        def on_rank_zero(self, what: str, function: Any) -> Any:
            return function()

        def all_gather(self, what: str, value: Any) -> Any:
            return [["/job:worker/task:0", "tcp://127.0.0.1:1", 0], value]

    monkeypatch.setattr(job_module, "Ranks", Rank)
    monkeypatch.setattr(job_module, "address_of_this_host", lambda: "127.0.0.1")
    monkeypatch.setattr(job_module, "FORGOTTEN_SECONDS", 0.1)
    with (
        pytest.raises(RankError, match=r"^rank 0, the client of .* says nothing for 0\.1 s"),
        session_of_job(None),
    ):
        pass
