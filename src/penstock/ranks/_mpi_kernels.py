"""The loop that calls MPI, without the interpreter's lock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import entry, function_at, inlined, machine_code, stack_zeros
from penstock.machine_code import MachineCode
from penstock.ranks import mpi_calls
from penstock.ranks.mpi_calls import (
    CREDIT,
    EVENT_NS,
    MOST_CREDIT_NS,
    NOTHING,
    PAUSE,
    SHORTEST,
    SIGNATURE,
    SOMETHING,
    STALLED_NS,
    WOKEN,
)

Ints = NDArray[np.int64]

#: int MPI_Request_get_status(MPI_Request request, int *flag, MPI_Status *status): a handle is an int, or an address.
_get_status = function_at(64, 64, 64)
#: int MPI_Iprobe(int source, int tag, MPI_Comm communicator, int *flag, MPI_Status *status)
_iprobe = function_at(32, 32, 64, 64, 64)
#: int clock_gettime(clockid_t clock, struct timespec *now)
_clock_gettime = function_at(32, 64)
#: int ppoll(struct pollfd *descriptors, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
_ppoll = function_at(64, 64, 64, 64)
_MONOTONIC, _POLLIN = 1, 1
#: Between two looks whether it is woken, while it does not sleep.
_LOOK_NS = 20_000
#: Calls that copy take longer than twice the shortest call, by so much; the first after a sleep, with caches that other
#: threads have used, longer than this.
_COPYING_NS, _FIRST_CALL_NS = 500, 10_000

_next_pause_ns = inlined(mpi_calls.next_pause_ns)


@inlined
def _now(clock_gettime: int, words: Ints) -> int:
    _clock_gettime(clock_gettime, (_MONOTONIC, words.ctypes.data))
    now: int = words[0] * 1_000_000_000 + words[1]
    return now


@entry
def call_mpi(facts: Ints, pace: Ints, requests: Ints, event_ns: int, until_ns: int) -> int:
    """Call MPI until a message has come, or a request has ended or failed; return which, as `mpi_calls` names it.

    facts: int64[8]: addresses of MPI_Request_get_status, MPI_Iprobe, clock_gettime and ppoll; source, tag and handle of
        the communicator that messages come by; a descriptor that is readable when the wait is to end.
    pace: int64[3], written: of `mpi_calls.new_pace`.
    requests: int64[n], handles; all stay as they are.
    event_ns, until_ns: when a message began or ended last, and when to return at the latest; of the monotonic clock.

    Measured: benchmarks/scale/peers.py --link.
    """
    get_status, iprobe, clock_gettime, ppoll = facts[0], facts[1], facts[2], facts[3]
    source, tag, communicator = facts[4], facts[5], facts[6]
    # An MPI_Status has 24 bytes, or some more.
    flag, status, words = stack_zeros(np.int64, 1), stack_zeros(np.int64, 32), stack_zeros(np.int64, 2)
    polled = stack_zeros(np.int32, 2)
    polled[0], polled[1] = facts[7], _POLLIN
    now = looked = _now(clock_gettime, words)
    calls = copied = 0
    while True:
        began, failed, flag[0] = now, 0, 0
        if requests.size:  # one at a time: a call copies for all
            request = requests[calls % requests.size]
            failed = _get_status(get_status, (request, flag.ctypes.data, status.ctypes.data))
        if failed == 0 and flag[0] == 0:
            failed = _iprobe(iprobe, (source, tag, communicator, flag.ctypes.data, status.ctypes.data))
        if failed != 0 or flag[0] != 0:
            return SOMETHING
        now = _now(clock_gettime, words)
        took = now - began
        pace[SHORTEST] = min(pace[SHORTEST], took)
        idle_ns = 2 * pace[SHORTEST] + _COPYING_NS if calls else _FIRST_CALL_NS
        is_copying, calls = requests.size > 0 and took > idle_ns, calls + 1
        copied += took if is_copying else 0
        has_stalled = now - event_ns >= STALLED_NS
        if is_copying and not has_stalled:
            pace[CREDIT] = min(pace[CREDIT] + took // 2, MOST_CREDIT_NS)
        else:
            pace[CREDIT] = max(0, pace[CREDIT] - took)
        is_quiet = pace[CREDIT] == 0 and now - event_ns > EVENT_NS and calls > requests.size
        if is_quiet or now - looked >= _LOOK_NS:
            words[0], words[1] = 0, max(0, min(pace[PAUSE], until_ns - now)) if is_quiet else 0
            if _ppoll(ppoll, (polled.ctypes.data, 1, words.ctypes.data, 0)) > 0:
                return WOKEN
            if is_quiet or now >= until_ns:
                pace[PAUSE] = _next_pause_ns(pace[PAUSE], 0 if has_stalled else copied, copied > 0)
                calls = copied = 0
            if now >= until_ns:
                return NOTHING
            now = looked = _now(clock_gettime, words)


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "call_mpi"."""
    return machine_code(globals()[name], SIGNATURE)
