"""Which ranks the job of this process has, and by whom messages travel between them."""

from __future__ import annotations

import os
import sys

from penstock.errors import ConfigError
from penstock.ranks.transport import TIMEOUT_SECONDS, NoTransport, RankTransport


def transport_of_this_job(*, timeout_seconds: float = TIMEOUT_SECONDS) -> RankTransport:
    """Return a new transport between the ranks of this process's job; every rank calls this, in the same order.

    They are those of torch.distributed where that is initialised, else those of MPI where mpi4py is imported and
    there are several, else this process alone.

    Raises: ConfigError if the process was started as one of several, but neither is ready.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() == 1:
            return NoTransport()
        from penstock.ranks.transport_torch import torch_transport

        return torch_transport(timeout_seconds=timeout_seconds)
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    # One alone may be another launcher's: its variable says so.
    if mpi is not None and is_mpi and mpi.COMM_WORLD.Get_size() > 1:
        from penstock.ranks.transport_mpi import mpi_transport

        return mpi_transport(timeout_seconds=timeout_seconds)
    for _, variable, remedy in LAUNCHERS:
        if os.environ.get(variable, "1") not in ("", "0", "1"):
            raise ConfigError(
                f"{variable} is {os.environ[variable]}, so this process is one of several, but it does not know the "
                f"others: {remedy} first; or give ranks=alone, where each process works for itself"
            )
    return NoTransport()


#: What launchers of several processes call a process's number and how many there are, and what makes the processes know
#: each other.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "call torch.distributed.init_process_group"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "import mpi4py.MPI"),
    ("PMI_RANK", "PMI_SIZE", "import mpi4py.MPI"),
)
