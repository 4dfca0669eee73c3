"""Which job this process is part of, and by whom messages travel between its ranks."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.ranks.transport import TIMEOUT_SECONDS, NoTransport, RankTransport

#: Of srun. Not SLURM_NTASKS, which one process that the script of a job for several tasks runs has, too.
_SRUN = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "call torch.distributed.init_process_group or jax.distributed.initialize, or import mpi4py.MPI",
)
#: Of mpiexec, and of srun --mpi=pmi2.
_PMI = ("PMI_RANK", "PMI_SIZE", "import mpi4py.MPI")

#: What launchers of several processes call a process's number and how many there are, and what makes the processes know
#: each other.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "call torch.distributed.init_process_group"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "import mpi4py.MPI"),
    _PMI,
    _SRUN,
)


class Job(NamedTuple):
    """The job of this process, as far as it can be seen.

    kind: "torch", "jax", "mpi", or empty where no messages can be exchanged.
    evidence: what shows that it has several processes, such as "WORLD_SIZE is 4"; empty where it is alone.
    remedy: what makes the processes know each other; empty where they do.
    carrier: what messages travel by: the store of torch.distributed, the client of JAX's coordination service, MPI's
        communicator of all ranks, or None.
    """

    kind: Literal["", "torch", "jax", "mpi"] = ""
    evidence: str = ""
    remedy: str = ""
    carrier: Any = None


def job_of_this_process() -> Job:
    """Return the job of torch.distributed where it is initialised, else of jax.distributed, else of MPI where mpi4py is
    imported and there are several ranks, else what the variables of a launcher show.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if (size := distributed.get_world_size()) == 1:
            return Job()
        store = distributed.distributed_c10d._get_default_store()
        return Job("torch", f"torch.distributed has {size} ranks", carrier=store)
    # Public functions tell the processes only once devices are looked for, and nothing public carries messages.
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is not None and state.client is not None:
        if state.num_processes == 1:
            return Job()
        return Job("jax", f"JAX has {state.num_processes} processes", carrier=state.client)
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    # One alone may be another launcher's: its variable says so.
    if mpi is not None and is_mpi and (size := mpi.COMM_WORLD.Get_size()) > 1:
        return Job("mpi", f"MPI has {size} ranks", carrier=mpi.COMM_WORLD)
    if (launcher := launcher_of_several()) is None:
        return Job()
    _, variable, remedy = launcher
    return Job(evidence=f"{variable} is {os.environ[variable]}", remedy=remedy)


def rank_of_this_process() -> int:
    """Return this process's rank in its job, else its number among those that a launcher started; 0 where none says."""
    job = job_of_this_process()
    if job.kind == "torch":
        return int(sys.modules["torch"].distributed.get_rank())
    if job.kind == "jax":
        return int(sys.modules["jax._src.distributed"].global_state.process_id)
    if job.kind == "mpi":
        return int(job.carrier.Get_rank())
    launcher = launcher_of_several()
    written = "" if launcher is None else os.environ.get(launcher[0], "")
    return int(written) if written.isdecimal() else 0


def launcher_of_several() -> tuple[str, str, str] | None:
    """Return that of `LAUNCHERS` which started this process as one of several; None where none did."""
    given = [launcher for launcher in LAUNCHERS if os.environ.get(launcher[1])]
    # srun sets PMI's variables for programs of torch and JAX, too. Those of mpiexec differ: its step has a task a host.
    if all(
        os.environ.get(pmi) == os.environ.get(srun) for pmi, srun in zip(_PMI[:2], _SRUN[:2], strict=True)
    ):
        given = [launcher for launcher in given if launcher is not _PMI]
    for launcher in given:
        # A task of srun may be a launcher of its own, even if of one process: torchrun on each host.
        if os.environ[launcher[1]] not in ("0", "1") and (launcher is not _SRUN or given == [_SRUN]):
            return launcher
    return None


def transport_of_this_job(*, timeout_seconds: float = TIMEOUT_SECONDS) -> RankTransport:
    """Return a new transport between the ranks of this process's job; every rank calls this, in the same order.

    Raises: ConfigError if the process was started as one of several, but they do not know each other yet.
    """
    job = job_of_this_process()
    if job.remedy:
        raise ConfigError(
            f"{job.evidence}, so this process is one of several, but it does not know the others: {job.remedy} first; "
            "or give ranks=alone, where each process works for itself"
        )
    if not job.kind:
        return NoTransport()
    if job.kind == "mpi":
        from penstock.ranks.transport_mpi import mpi_transport

        return mpi_transport(timeout_seconds=timeout_seconds)
    if job.kind == "jax":
        from penstock.ranks.transport_jax import jax_transport

        return jax_transport(job.carrier, timeout_seconds=timeout_seconds)
    from penstock.ranks.transport_torch import torch_transport

    return torch_transport(timeout_seconds=timeout_seconds)
