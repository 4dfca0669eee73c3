"""Messages between the ranks of an MPI job, over a communicator of their own."""

from __future__ import annotations

import time
from typing import Any

from penstock.errors import ConfigError, WaitTimeout
from penstock.ranks.transport import MOST_PAUSE_SECONDS, TIMEOUT_SECONDS


def mpi_transport(communicator: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> MpiTransport:
    """Return a new transport between the ranks of an MPI communicator; every rank of it calls this, in the same order.

    communicator: of mpi4py; it is duplicated, so that nothing else is sent over the copy. None: all ranks of the job.

    Raises: ConfigError unless MPI was initialised for calls from several threads at once, because snapshots are
        written by a thread beside the training.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialised for fewer threads than Penstock needs: set "
            'mpi4py.rc.thread_level = "multiple" before the first import of mpi4py.MPI, or ask for '
            "MPI_THREAD_MULTIPLE where you initialise MPI yourself; not every MPI library has it"
        )
    return MpiTransport((communicator or MPI.COMM_WORLD).Dup(), timeout_seconds=timeout_seconds)


class MpiTransport:
    """Messages of one communicator, all of one tag: MPI keeps those between two ranks in order.

    timeout_seconds: after which a message that is too long to be sent ahead, and is not fetched, is given up.
    """

    def __init__(self, communicator: Any, *, timeout_seconds: float) -> None:
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self._communicator = communicator
        self._timeout_seconds = timeout_seconds
        self._unfetched: list[
            tuple[Any, bytes]
        ] = []  # requests that were given up, and the bytes they still need

    def send(self, to: int, message: bytes) -> None:
        # Isend, since Send would wait for ever for a rank that is gone. Short messages are off at once.
        request = self._communicator.Isend([message, len(message), _byte()], to)
        began = time.monotonic()
        while not request.Test():
            waited_seconds = time.monotonic() - began
            if waited_seconds > self._timeout_seconds:
                self._unfetched.append((request, message))
                raise WaitTimeout(
                    f"rank {to} of {self.size} did not fetch a message of {len(message):,} bytes within "
                    f"{self._timeout_seconds:g} s; the log there may say whether it ended or what it waits for"
                )
            time.sleep(min(waited_seconds / 8, MOST_PAUSE_SECONDS))

    def receive(self, sender: int) -> bytes | None:
        from mpi4py import MPI

        status = MPI.Status()
        found = self._communicator.Improbe(sender, status=status)
        if found is None:
            return None
        message = bytearray(status.Get_count(_byte()))
        found.Recv([message, len(message), _byte()])
        return bytes(message)


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
