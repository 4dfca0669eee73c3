"""What each of two ranks of MPI does for tests/ranks/test_carrier_mpi.py: rank 0 reads samples that rank 1 keeps.

Argument: who calls MPI, "compiled" or "plain".
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from unittest.mock import patch

import numpy as np
from mpi4py import MPI
from tests.patience import brief, patient, wait_until
from tests.ranks.test_remote_peers import SIZES, Shelf, checksum_of, content

from penstock.errors import DataError
from penstock.ranks import carrier_mpi, ranks_of_this_job
from penstock.ranks.carrier_mpi import MpiCarrier
from penstock.ranks.mpi_calls import CALL_MPI, NOTHING
from penstock.ranks.remote_peers import FarRank, RemotePeers
from penstock.ranks.transport_mpi import MpiTransport

job = ranks_of_this_job()
rank, other = job.rank, 1 - job.rank
assert isinstance(job.transport, MpiTransport)
communicator, pid_of_1 = job.transport.communicator, job.all_gather("pids", os.getpid())[1]
# Loader ranks need not be numbered as MPI's processes are.
names = {0: 7, 1: 3}


is_compiled = sys.argv[1] == "compiled"
if is_compiled:
    CALL_MPI.wait()
else:
    patch.object(type(CALL_MPI), "glance", lambda part: None).start()


def carrier(tag: int) -> MpiCarrier:
    made = MpiCarrier(communicator, tag, int(SIZES.max()))
    assert (made._loop is not None) == is_compiled
    made.connect({names[other]: job.all_gather("offers", made.offer)[other]})
    return made


def both(what: str) -> None:
    job.all_gather(what, None)


# Messages come whole, in order, with who sent them; what is malformed or too long is dropped, and the rest comes.
with patch.object(carrier_mpi, "MOST_BYTES", 1 << 20), patch.object(carrier_mpi, "MOST_HEAD_BYTES", 1 << 10):
    one = carrier(1)
    parts = [b"", b"ab", np.arange(1000, dtype=np.uint8).data, b""]
    if rank == 0:
        for malformed in (
            b"",
            b"1234567",
            bytes(24)[:20],
            np.array([2, 0]),
            np.array([0, 1, 5]),
            np.array([0, 1 << 60]),
        ):
            communicator.Send([malformed, len(bytes(malformed)), MPI.BYTE], 1, 1)
        too_long = np.zeros(2 << 20, np.uint8)
        sending = communicator.Isend([too_long, too_long.size, MPI.BYTE], 1, 1)
        assert not one.ask(names[1], [too_long.data])
        assert one.ask(names[1], parts)
        (back,) = one.receive(None)
        assert (back[0], back[1], [bytes(each) for each in back[2]]) == (names[1], None, [b"answer"])
        assert not sending.Test()
    else:
        (found,) = one.receive(None)
        assert (found[0], [bytes(each) for each in found[2]]) == (names[0], [bytes(each) for each in parts])
        assert one.answer(found[1], [b"answer"])
        assert one.receive(0.0) == []
        waking = threading.Thread(target=one.wake)
        waking.start()
        assert one.receive(None) == []
        waking.join()
    one.close()
both("messages")

# A long message comes into memory of an earlier one, but not while anybody has a part of that.
two = carrier(2)
if rank == 0:
    for number in range(4):
        assert two.ask(names[1], [np.full(1 << 18, number, np.uint8).data])
        two.receive(None)
else:

    def next_long() -> np.ndarray:
        ((_, who, (part,)),) = two.receive(None)
        assert two.answer(who, [b"next"])
        return np.frombuffer(part, np.uint8)[1 << 10 :]

    first, second = next_long(), next_long()
    assert (first == 0).all()
    assert (second == 1).all()
    place = first.ctypes.data
    del first
    assert next_long().ctypes.data == place
    assert (next_long() == 3).all()
    assert (second == 1).all()
two.close()
both("memory")

# A long message that is under way when its sender is closed is sent to its end.
ending = carrier(3)
if rank == 0:
    assert ending.ask(names[1], [b"send"])
    ((_, _, (long,)),) = ending.receive(None)
    assert len(long) == 64 << 20
    ending.close()
else:
    ((_, who, asking),) = ending.receive(None)
    given_up = len(carrier_mpi._given_up)
    assert ending.answer(who, [bytes(64 << 20)])
    with patch.object(carrier_mpi, "_LINGER_SECONDS", patient(0.4)):
        ending.close()
    assert len(carrier_mpi._given_up) == given_up
both("a long message")

# At the end of the process Python alone calls MPI for a carrier that nobody closed, once the loop has returned.
unclosed, entered, leave = carrier(4), threading.Event(), threading.Event()


def loop(*_: object) -> int:
    entered.set()
    assert leave.wait(patient(60))
    return NOTHING


with patch.object(unclosed, "_loop", loop), patch.object(carrier_mpi, "_LOOP_ENDS_SECONDS", patient(60)):
    receiving = threading.Thread(target=unclosed.receive, args=[None], daemon=True)
    receiving.start()
    assert entered.wait(patient(60))
    exiting = threading.Thread(target=carrier_mpi._at_exit)
    exiting.start()
    exiting.join(brief(0.1))
    assert exiting.is_alive()
    entered.clear()
    leave.set()
    exiting.join()
    unclosed.wake()
    receiving.join()
    both("exiting")
    assert unclosed.ask(names[other], [b"last"])
    assert [bytes(part) for _, _, (part,) in unclosed.receive(None)] == [b"last"]
    assert not entered.is_set()
unclosed.close()
both("the last message")

# Samples are read, and a rank that is stopped, also with a long message under way, costs time and is used again.
with (
    patch("penstock.policy.peer_patience.LEAST_SECONDS", patient(3)),
    patch("penstock.policy.peer_patience.MOST_SECONDS", patient(20)),
):
    shelf = Shelf(100 + rank, [0, 2, 3] if rank else [])
    far = FarRank(100 + other, 3 if other else 0)
    peers = RemotePeers(carrier(5), shelf, {names[other]: far}, SIZES, checksum_of, math.inf)

    def read(*samples: int) -> list[bytes | None]:
        found = peers.read(names[1], np.array(samples, np.int64))
        return [None if isinstance(each, DataError) else each.tobytes() for each in found]

    both("connected")
    if rank == 0:
        wait_until(lambda: peers.has_news)
        ((of, ids),) = peers.take_news()
        assert (of, list(ids if ids is not None else [])) == (names[1], [0, 2, 3])
        assert read(2, 0, 4) == [content(2), content(0), None]
        os.kill(pid_of_1, signal.SIGSTOP)
        while read(0) != [None]:
            pass
        assert peers.is_away(names[1])
        os.kill(pid_of_1, signal.SIGCONT)
        wait_until(lambda: not peers.is_away(names[1]))
        assert read(3) == [content(3)]
        peers.close()  # while the other still serves
    both("one has left")
    peers.close()
both("both have left")
