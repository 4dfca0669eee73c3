"""How short letters travel between the ranks of a job: the seam between what ranks agree on and who carries it."""

from __future__ import annotations

import os
import sys
from typing import Protocol

from penstock.errors import ConfigError

#: How long a rank may give no sign of life before it is named.
TIMEOUT_SECONDS = 60.0

#: Between two looks for a letter: an eighth of the time waited so far, within these bounds. A wait is prolonged by
#: an eighth at most, and thousands of waiting ranks do not flood the one that holds their letters.
LEAST_PAUSE_SECONDS = 0.0002
MOST_PAUSE_SECONDS = 0.05


class Mail(Protocol):
    """Carries letters from each rank to each other, in order. Used by one thread at a time, any thread."""

    @property
    def rank(self) -> int:
        """Return this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        ...

    def send(self, to: int, letter: bytes) -> None:
        """Send a letter; it arrives without another call on this side.

        Raises: RankError if it cannot be sent; WaitTimeout if whoever must take it does not.
        """
        ...

    def receive(self, sender: int) -> bytes | None:
        """Return the next letter from a rank; None, at once, if there is none yet. Raises: RankError, WaitTimeout."""
        ...


class NoMail:
    """The mail of a rank that is alone."""

    rank = 0
    size = 1

    def send(self, to: int, letter: bytes) -> None:
        raise AssertionError("a rank alone has nobody to write to")

    def receive(self, sender: int) -> bytes | None:
        raise AssertionError("a rank alone hears of nobody")


def mail_of_this_job(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Mail:
    """Return new mail between the ranks of this process's job; every rank calls this, in the same order.

    They are those of torch.distributed where that is initialised, else those of MPI where mpi4py is imported and
    there are several, else this process alone.

    Raises: ConfigError if the process was started as one of several, but neither is ready.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() == 1:
            return NoMail()
        from penstock.checkpoint.mail_torch import torch_mail

        return torch_mail(timeout_seconds=timeout_seconds)
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    # One alone may be another launcher's: its variable says so.
    if mpi is not None and is_mpi and mpi.COMM_WORLD.Get_size() > 1:
        from penstock.checkpoint.mail_mpi import mpi_mail

        return mpi_mail(timeout_seconds=timeout_seconds)
    for variable, remedy in _LAUNCHERS.items():
        if os.environ.get(variable, "1") not in ("", "0", "1"):
            raise ConfigError(
                f"{variable} is {os.environ[variable]}, so this process is one of several, but it does not know the "
                f"others: {remedy} first; or give ranks=alone, where each process works for itself"
            )
    return NoMail()


#: What launchers of several processes set to their number, and what makes the processes know each other.
_LAUNCHERS = {
    "WORLD_SIZE": "call torch.distributed.init_process_group",
    "OMPI_COMM_WORLD_SIZE": "import mpi4py.MPI",
    "PMI_SIZE": "import mpi4py.MPI",
}


def pause_seconds(waited_seconds: float) -> float:
    """Return how long to sleep before the next look for a letter."""
    return min(max(LEAST_PAUSE_SECONDS, waited_seconds / 8), MOST_PAUSE_SECONDS)
