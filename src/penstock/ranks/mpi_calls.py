"""When MPI is called, which copies messages only while it is: all the time while it has much to copy, then less often.

MPI has no wait that sleeps. A compiled loop calls it, without the interpreter's lock; `MpiCarrier` does so in Python
until that is compiled, and where MPI's functions are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Part
from penstock.machine_code import Signature

#: A shorter sleep takes as long: some 60 us.
LEAST_PAUSE_NS = 10_000
#: At most, while a message is copied: what comes meanwhile has to fit into the kernel's buffers.
MOST_COPYING_PAUSE_NS = 250_000
#: And else. An idle rank so uses less than 1 % of a core, on a busy machine, too.
_MOST_PAUSE_NS = 25_000_000
#: After a message began or ended, MPI is called for so long without a pause: the other side answers soon.
EVENT_NS = 100_000
#: And after it copied, for half as long, and so long at most. Without end Open MPI was up to 1.2 times as fast, and
#: MPICH, of whose two sides one always waits, took 1.3 times the time of processors (2026-11-29, a busy machine).
MOST_CREDIT_NS = 100_000
#: Until so long after the last event. Then the other rank may have stopped, and calls may always take longer with a
#: request than without one, as if they copied: a pause follows each round of calls from then on.
STALLED_NS = 1_000_000_000

SIGNATURE = Signature(("int64[:]", "int64[:]", "int64[:]", "int64", "int64"), results=("int64",))
CALL_MPI = Part(
    "penstock.ranks._mpi_kernels",
    "call_mpi",
    SIGNATURE,
    "the calls of MPI",
    "Python makes them, more slowly,",
)
#: What the loop returns: nothing came, ended or failed by then; something did; it was woken.
NOTHING, SOMETHING, WOKEN = range(3)
#: Of the loop's `pace`: the next pause, for how long it calls MPI before that, and the shortest call; nanoseconds.
PAUSE, CREDIT, SHORTEST = range(3)


def next_pause_ns(pause_ns: int, copied_ns: int, is_copying: bool) -> int:
    """Return how long to sleep the next time, after a pause of so long.

    copied_ns: for which MPI copied after it. is_copying: whether some of a message may come at any time.
    """
    if 8 * copied_ns >= pause_ns:
        return LEAST_PAUSE_NS
    return min(9 * pause_ns // 8, MOST_COPYING_PAUSE_NS if is_copying else _MOST_PAUSE_NS)


def new_pace() -> NDArray[np.int64]:
    """Return what the loop knows of how much there is to copy."""
    return np.array([LEAST_PAUSE_NS, 0, 1_000_000_000])


def facts_of(mpi: Any, communicator: Any, tag: int, wake: int) -> NDArray[np.int64]:
    """Return what the loop begins with; nothing where MPI's functions are not found. mpi: the module mpi4py.MPI."""
    addresses: list[int | None] = []
    with contextlib.suppress(OSError, AttributeError):
        for library, names in (
            (ctypes.CDLL(mpi.__file__), ("MPI_Request_get_status", "MPI_Iprobe")),
            (ctypes.CDLL(None), ("clock_gettime", "ppoll")),
        ):
            addresses += [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        return np.array([*addresses, mpi.ANY_SOURCE, tag, handle_of(mpi, communicator), wake], np.int64)
    return np.empty(0, np.int64)


def handle_of(mpi: Any, owner: Any) -> int:
    """Return MPI's own handle, of a request or a communicator: an int, or an address. mpi: the module mpi4py.MPI."""
    return ctypes.c_int64(mpi._handleof(owner)).value
