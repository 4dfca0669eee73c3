"""Messages between the ranks of an MPI job, over a communicator of their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, WaitTimeout
from penstock.ranks.transport import MOST_PAUSE_SECONDS, TIMEOUT_SECONDS, named_ranks

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier

#: Of messages by which ranks agree.
_TAG = 0
#: How long a rank that gave up waits for the others that came to say that they did.
ANSWER_SECONDS = 1.0


def mpi_transport(communicator: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> MpiTransport:
    """Return a new transport between the ranks of an MPI communicator; every rank of it calls this, in the same order.

    communicator: of mpi4py; it is duplicated, so that nothing else is sent over the copy. None: all ranks of the job.

    timeout_seconds: for the ranks to call this, and as for `MpiTransport`.

    Raises: WaitTimeout naming the ranks that do not call this; ConfigError unless MPI was initialised for calls from
        several threads at once, because snapshots are written by a thread beside the training.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialised for fewer threads than Penstock needs: set "
            'mpi4py.rc.thread_level = "multiple" before the first import of mpi4py.MPI, or ask for '
            "MPI_THREAD_MULTIPLE where you initialise MPI yourself; not every MPI library has it"
        )
    own = _duplicate(communicator or MPI.COMM_WORLD, timeout_seconds)
    return MpiTransport(own, timeout_seconds=timeout_seconds)


def _duplicate(communicator: Any, timeout_seconds: float) -> Any:
    """Return a copy of a communicator, which all of its ranks make together.

    Only where that fails, the ranks that came send each other a message over the one that is there, to find out who
    did not. Raises: WaitTimeout naming those.
    """
    from mpi4py import MPI

    # Of no use to others: the largest there is.
    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    own, request = communicator.Idup()
    began, waited_seconds = time.monotonic(), 0.0
    # Another that gave up will not use the copy, even if it can be made now.
    while waited_seconds <= timeout_seconds and not communicator.Iprobe(tag=tag):
        if request.Test():
            return own
        time.sleep(min(waited_seconds / 8, MOST_PAUSE_SECONDS))
        waited_seconds = time.monotonic() - began
    rank, size = communicator.Get_rank(), communicator.Get_size()
    missing = set(range(size)) - {rank}
    sent = [communicator.Isend([b"", 0, MPI.BYTE], other, tag) for other in missing]
    began = time.monotonic()
    while missing and time.monotonic() - began < ANSWER_SECONDS:
        status = MPI.Status()
        while communicator.Iprobe(tag=tag, status=status):
            communicator.Recv([bytearray(0), 0, MPI.BYTE], status.Get_source(), tag)
            missing.discard(status.Get_source())
        time.sleep(MOST_PAUSE_SECONDS)
    _given_up.append((own, request, sent))
    who = f"{named_ranks(sorted(missing))} of {size} did not come" if missing else "not all ranks came"
    raise WaitTimeout(
        f"{who} within {timeout_seconds:g} s to where all ranks of MPI prepare to exchange messages; the log there may "
        "say whether it ended or what it waits for; if one rank should work by itself, give ranks=alone"
    )


#: What MPI may still write to.
_given_up: list[Any] = []


class MpiTransport:
    """Messages of one communicator, all of one tag: MPI keeps those between two ranks in order.

    timeout_seconds: after which a message that is too long to be sent ahead, and is not fetched, is given up.
    communicator: a `carrier` sends messages on it with a tag from `free_tag` on, once all ranks know who takes which.
    """

    def __init__(self, communicator: Any, *, timeout_seconds: float) -> None:
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.communicator, self.free_tag = communicator, _TAG + 1
        self._timeout_seconds = timeout_seconds
        self._unfetched: list[
            tuple[Any, bytes]
        ] = []  # requests that were given up, and the bytes they still need

    def send(self, to: int, message: bytes) -> None:
        # Isend, since Send would wait for ever for a rank that is gone. Short messages are off at once.
        request = self.communicator.Isend([message, len(message), _byte()], to, _TAG)
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
        found = self.communicator.Improbe(sender, _TAG, status=status)
        if found is None:
            return None
        message = bytearray(status.Get_count(_byte()))
        found.Recv([message, len(message), _byte()])
        return bytes(message)

    def carrier(self, tag: int, most_part_bytes: int) -> MpiCarrier:
        """Return what sends messages to all ranks, and receives theirs. tag: that is free on all of them."""
        from penstock.ranks.carrier_mpi import MpiCarrier

        self.free_tag = tag + 1
        return MpiCarrier(self.communicator, tag, most_part_bytes)


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
