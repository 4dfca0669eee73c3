"""Messages about samples between hosts of an MPI job, over a communicator of Penstock's own.

Whatever its parts, a message is one of MPI: a head, which says how long they are, and they. MPI copies only while it is
called, and has no wait that sleeps: `mpi_calls` has when `receive` calls it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import struct
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from penstock.compiling import Lease
from penstock.machine_code import Loop
from penstock.ranks.mpi_calls import (
    CALL_MPI,
    LEAST_PAUSE_NS,
    NOTHING,
    PAUSE,
    STALLED_NS,
    WOKEN,
    facts_of,
    handle_of,
    new_pace,
    next_pause_ns,
)
from penstock.ranks.peer_messages import MOST_HEAD_BYTES
from penstock.ranks.wakeable import Wakeable

#: A message may have so many bytes, or one sample. A longer one is neither sent nor received.
MOST_BYTES = 1 << 30
#: Memory of so many long messages is used again: new pages cost as much as copying does.
_SPARE_BUFFERS, _LEAST_SPARE_BYTES, _MOST_SPARE_BYTES = 8, 128 << 10, 8 << 20
#: References to memory that nobody has: of the list, and the one that is counted.
_REFERENCES = 2
#: One call of the loop lasts so long at most, so that no exit of the process waits for it. Longer pauses are Python's.
_CALL_NS, _LONG_PAUSE_NS = 5_000_000, 1_000_000
#: Calls, and seconds, before anything else is looked at. Each may wait for the interpreter's lock, and copy
#: as little as 8 kB.
_MOST_CALLS, _CALLING_SECONDS = 48, 1e-3
#: Between two looks whether the loop is compiled by now.
_GLANCE_NS = 1_000_000_000
#: Messages to one process that it has not begun to receive; more are not sent.
_MOST_WAITING = 1000
#: How long the last messages may take at the end.
_LINGER_SECONDS = 0.2
#: How long the end of the process waits for a call of the loop, which takes 5 ms unless MPI hangs.
_LOOP_ENDS_SECONDS = 1.0
#: First number of a head: whether it asks or answers. Then the number of parts, and the bytes of each.
_ASKS, _ANSWERS = 0, 1


class _UnderWay(NamedTuple):
    """A message that MPI has not sent, or received, to its end. data: that MPI reads or writes meanwhile."""

    request: Any
    handle: int
    process: int
    data: NDArray[np.uint8]
    is_sent: bool


class MpiCarrier(Wakeable):
    """One rank's end. Made by one thread, then used by another; `wake` alone by any.

    communicator: of mpi4py, with THREAD_MULTIPLE. tag: of all messages, which nothing else sends there.
    most_part_bytes: of a part of a message.
    """

    def __init__(self, communicator: Any, tag: int, most_part_bytes: int) -> None:
        self._communicator, self._tag = communicator, tag
        self._most_bytes = max(MOST_BYTES, most_part_bytes + 2 * MOST_HEAD_BYTES)
        super().__init__()
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        #: By rank, its process in the communicator, and the other way round.
        self._process_of: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        #: Oldest first.
        self._under_way: list[_UnderWay] = []
        self._waiting: Counter[int] = Counter()
        #: Memory of messages; free once nothing else refers to it.
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=_SPARE_BUFFERS)
        #: When a message began or ended last; of the monotonic clock.
        self._event_ns = time.monotonic_ns()
        #: What calls MPI once it is compiled, what that begins with (nothing: Python calls), and when to ask for it.
        self._loop: Loop | None = None
        self._facts, self._pace = facts_of(MPI, communicator, tag, self._wake), new_pace()
        self._lease, self._glance_ns = Lease(None), 0
        #: Held while the loop is called; whether it is not any more.
        self._calling, self._is_ending = threading.Lock(), False
        self._compiled()  # loading takes as long as a rank waits for an answer
        self.offer = {"process": communicator.Get_rank()}
        _carriers.add(self)

    def connect(self, offers: Mapping[int, Mapping[str, int]]) -> None:
        """Exchange messages with other ranks. offers: of each, the `offer` of its carrier."""
        for rank, offer in offers.items():
            self._process_of[rank], self._rank_of[offer["process"]] = offer["process"], rank

    def ask(self, rank: int, parts: Sequence[Any]) -> bool:
        """Send a message to a rank; return False where too many wait already."""
        return self._send(self._process_of[rank], _ASKS, parts)

    def answer(self, who: Any, parts: Sequence[Any]) -> bool:
        """Send a message back to who sent one, as `receive` names it."""
        return self._send(who, _ANSWERS, parts)

    def receive(self, seconds: float | None) -> list[tuple[int, Any, list[Any]]]:
        """Wait for messages, so long at most, or until `wake`. Returns: rank, whom to answer (None: nobody), parts."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not (found := self._arrived()):
            left = until - time.monotonic()
            if left < 0 or self._wait(int(1e9 * min(left, 1.0))):
                return []
        return found

    def close(self) -> None:
        """Give what is under way a moment to end. Once, when no thread uses it."""
        until = time.monotonic() + _LINGER_SECONDS
        while self._under_way and (left := until - time.monotonic()) > 0:
            self._wait(int(1e9 * left))
            self._arrived()
        self._lease.close()
        _given_up.extend(self._under_way)
        os.close(self._wake)

    def leave_loop(self) -> None:
        """Have Python alone call MPI from here on, once the loop has returned. Any thread may."""
        self._is_ending = True
        if self._calling.acquire(timeout=_LOOP_ENDS_SECONDS):
            self._calling.release()

    def _send(self, process: int, kind: int, parts: Sequence[Any]) -> bool:
        lengths = [len(part) for part in parts]
        head = struct.pack(f"<{2 + len(parts)}Q", kind, len(parts), *lengths)
        nbytes = len(head) + sum(lengths)
        if nbytes > self._most_bytes or self._waiting[process] >= _MOST_WAITING:
            return False
        data = self._memory_for(nbytes)
        arrays = [np.frombuffer(part, np.uint8) for part in (head, *parts) if len(part)]
        np.concatenate(arrays, out=data[:nbytes])
        request = self._communicator.Isend([data, nbytes, MPI.BYTE], process, self._tag)
        self._begin(request, process, data, is_sent=True)
        self._waiting[process] += 1
        return True

    def _begin(self, request: Any, process: int, data: NDArray[np.uint8], *, is_sent: bool) -> None:
        self._note_event()
        self._under_way.append(_UnderWay(request, handle_of(MPI, request), process, data, is_sent))

    def _memory_for(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory for a message, of so many bytes at least: that of an earlier one which nobody has any more."""
        for number in range(len(self._spare)):
            if self._spare[number].size >= nbytes and sys.getrefcount(self._spare[number]) == _REFERENCES:
                return self._spare[number]
        if not _LEAST_SPARE_BYTES <= nbytes <= _MOST_SPARE_BYTES:
            return np.empty(nbytes, np.uint8)
        made = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        self._spare.append(made)
        return made

    def _arrived(self) -> list[tuple[int, Any, list[Any]]]:
        """Return messages that have come; begin to receive those that are coming."""
        status = MPI.Status()
        while (found := self._communicator.Improbe(tag=self._tag, status=status)) is not None:
            if (nbytes := status.Get_count(MPI.BYTE)) > self._most_bytes:
                continue  # never received: into too little memory, Open MPI 5.0 writes past its end
            data = self._memory_for(nbytes)[:nbytes]
            request = found.Irecv([data, nbytes, MPI.BYTE])
            self._begin(request, status.Get_source(), data, is_sent=False)
        messages = []
        for each in self._take_ended():
            process = each.process
            if each.is_sent:
                self._waiting[process] -= 1
                continue
            rank, opened = self._rank_of.get(process), _opened(each.data)
            if rank is not None and opened is not None:
                kind, parts = opened
                messages.append((rank, process if kind == _ASKS else None, parts))
        return messages

    def _take_ended(self) -> list[_UnderWay]:
        """Take what MPI has ended out of what is under way, without what failed."""
        ended: list[_UnderWay] = []
        rest: list[_UnderWay] = []
        for each in self._under_way:
            try:
                (ended if each.request.Test() else rest).append(each)
            except MPI.Exception:  # too long, or its process has ended: as if it had not been sent
                ended.append(each._replace(data=np.empty(0, np.uint8)))
        if ended:
            self._under_way = rest
            self._note_event()
        return ended

    def _wait(self, most_ns: int) -> bool:
        """Call MPI, and sleep, until something may have come or ended, or for so long; return whether until `wake`."""
        pause, loop = int(self._pace[PAUSE]), self._compiled()
        is_long = pause >= _LONG_PAUSE_NS
        if (is_long or loop is None) and self._is_woken(min(pause, most_ns)):
            return True
        if loop is None or (is_long and not self._under_way):
            # Python cannot tell whether a call copies.
            is_copying = bool(self._under_way) and time.monotonic_ns() - self._event_ns < STALLED_NS
            self._pace[PAUSE] = LEAST_PAUSE_NS if is_copying else next_pause_ns(pause, 0, False)
            self._call_plainly()
            return False
        handles = np.array([each.handle for each in self._under_way], np.int64)
        until_ns = time.monotonic_ns() + (0 if is_long else min(most_ns, _CALL_NS))
        with self._calling:
            found = (
                NOTHING
                if self._is_ending
                else loop(self._facts, self._pace, handles, self._event_ns, until_ns)
            )
        is_woken: bool = found == WOKEN
        if is_woken:
            self._take_wake()
        return is_woken

    def _compiled(self) -> Loop | None:
        """Return the loop that calls MPI; None until it is compiled, and at the end of the process."""
        if self._loop is None and self._facts.size and (now := time.monotonic_ns()) >= self._glance_ns:
            self._loop, self._glance_ns = CALL_MPI.glance(), now + _GLANCE_NS
        return None if self._is_ending else self._loop

    def _call_plainly(self) -> None:
        """Call MPI in Python, until the oldest request has ended, or failed."""
        until = time.monotonic() + _CALLING_SECONDS
        with contextlib.suppress(MPI.Exception):
            for _ in range(_MOST_CALLS if self._under_way else 0):
                if self._under_way[0].request.Get_status() or time.monotonic() > until:
                    break

    def _is_woken(self, nanoseconds: int) -> bool:
        """Sleep; return whether `wake` was called."""
        if nanoseconds < 1_000_000:  # less than `poll` can
            time.sleep(nanoseconds / 1e9)
        if not self._poll.poll(nanoseconds // 1_000_000):
            return False
        self._take_wake()
        return True

    def _take_wake(self) -> None:
        self._sleep_again()
        self._pace[PAUSE] = LEAST_PAUSE_NS  # not called without a pause: whatever this rank keeps wakes it

    def _note_event(self) -> None:
        """A message began or ended."""
        self._event_ns, self._pace[PAUSE] = time.monotonic_ns(), LEAST_PAUSE_NS


#: Messages to and from ranks that have stopped: MPI may still read or write what they have.
_given_up: list[_UnderWay] = []
#: Those that exist.
_carriers: weakref.WeakSet[MpiCarrier] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """End the calls of carriers that nobody closed: mpi4py finalises MPI next, and who calls it then ends the job."""
    for each in list(_carriers):
        each.leave_loop()


def _opened(data: NDArray[np.uint8]) -> tuple[int, list[memoryview]] | None:
    """Return the kind and the parts of a message; None for one that is malformed."""
    numbers = data[: data.size // 8 * 8].view("<u8")
    if numbers.size < 2 or numbers[0] > _ANSWERS or numbers[1] > numbers.size - 2:
        return None
    kind, count = numbers[:2].tolist()
    begin, parts = 8 * (2 + count), []
    for nbytes in numbers[2 : 2 + count].tolist():
        parts.append(data[begin : begin + nbytes].data)
        begin += nbytes
    return (kind, parts) if begin == data.size else None
