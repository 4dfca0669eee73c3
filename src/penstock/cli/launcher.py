"""The ranks of the job that a launcher (torchrun, mpirun) started a command in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.output import needing

if TYPE_CHECKING:
    from penstock.ranks import Ranks


@contextlib.contextmanager
def ranks_of_launcher(command: str, patience_seconds: float = 0.0) -> Iterator[Ranks]:
    """Yield the ranks of the job that a launcher started this process in; alone where none did.

    command: what a missing package is needed for. patience_seconds: how long a rank may give no sign of life; a minute
        at least.
    """
    from penstock.ranks import alone, ranks_of_this_job
    from penstock.ranks.transport import TIMEOUT_SECONDS
    from penstock.ranks.transport_of_job import launcher_of_several

    timeout_seconds = max(TIMEOUT_SECONDS, patience_seconds)
    launcher = launcher_of_several()
    if launcher is None:
        yield alone()
    elif launcher[0] == "RANK":
        with needing(f"{command} under torchrun", "torch"):
            import torch.distributed as distributed
        distributed.init_process_group("gloo")
        try:
            yield ranks_of_this_job(timeout_seconds=timeout_seconds)
        finally:
            distributed.destroy_process_group()
    else:
        with needing(f"{command} under an MPI launcher", "mpi"):
            import mpi4py.MPI  # noqa: F401  (the processes know each other from then on)
        yield ranks_of_this_job(timeout_seconds=timeout_seconds)
