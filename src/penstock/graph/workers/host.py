"""What workers of one host send each other: by a socket without a file, and by memory that both map.

    sender     copies a large part into a block that the receiver maps, too, and small ones into the message; a kernel
               may have written its value into such a block, which is then handed over as it is
    receiver   uses the block as it lies there, and clears its first byte once nothing refers to it any more

The thread of a step sends. Of the steps that wait, one receives, for all: a tensor that it waits for itself changes no
thread, and one that comes soon finds it awake. Where none waits, a thread of the worker receives, but not as long as
steps come back to receive and no other depends on them. Nothing is encrypted: the kernel says that both ends are of
one user. A socket's address is made of the cluster's secret and of that by which the others know the worker, so who is
on another host, or behind a proxy, finds none and is sent to over ZeroMQ.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any, TypeVar

import numpy as np

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.graph.errors import CorruptError
from penstock.local_sockets import Peer, peer_of
from penstock.queues import WakingQueue, get_within

T = TypeVar("T")

#: Larger parts go by blocks.
_SMALL_BYTES = 16 << 10
#: A step that received so lately receives what comes next, too: who is sent to may answer before the step waits.
_SOON_SECONDS = 2e-3
#: For so long a step looks for a message before its thread sleeps: about as long as who is woken takes to answer.
_LOOK_SECONDS = 4e-4
#: Waits in a row that begin without a look after looks in vain.
_MOST_SKIPPED = 255
#: Processes whose connections were refused or cut off, and are reported.
_MOST_REPORTED = 100
#: Of a message without its blocks: a socket's buffer holds several.
_MOST_MESSAGE_BYTES = 64 << 10
#: Of the blocks of a connection.
MOST_BLOCK_BYTES = 1 << 30
#: In front of a block's data; the first byte says whether the receiver has it.
_MARK_BYTES = 64
#: Of each part: its bytes, and its block + 1, or 0 where they follow.
_PART = struct.Struct("<QQ")
_ALIGNMENT = 16
_DESCRIPTOR = struct.Struct("i")
#: In one message: more Linux does not take.
_MOST_DESCRIPTORS = 253
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.size)


class HostLink:
    """A worker's connections to those of its host.

    address: by which the others know this worker. on_parts: called with the parts of messages, in a thread of its own
    or one that is in `get_within`. report: of connections that were refused or cut off, once for each process.
    """

    def __init__(
        self,
        secret: bytes,
        address: str,
        on_parts: Callable[[list[Any]], None],
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._secret, self._on_parts = secret, on_parts
        self._report, self._reported = report, set[Peer]()
        self._out: dict[str, _Out] = {}
        self._lock = threading.Lock()
        self._listening: socket.socket | None = _new_socket()
        try:
            self._listening.bind(self._name(address))
            self._listening.listen(socket.SOMAXCONN)
            self._listening.setblocking(False)
        except OSError:  # another worker has this address, so nobody can mean this one
            self._listening.close()
            self._listening = None
        #: By descriptor.
        self._in: dict[int, _In] = {}
        #: Written to when the link ends, for who waits at `_first`, and for who waits at `_rare`.
        self._over, self._stir, self._call = (
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)
        )
        #: Who waits at `_first` hears of a message; if nobody does, the own thread, unless it waits at `_rare`.
        self._first, self._last, self._rare = select.epoll(), select.epoll(), select.epoll()
        self._first.register(self._stir, select.EPOLLIN)
        self._rare.register(self._call, select.EPOLLIN)
        for epoll in (self._last, self._rare):
            epoll.register(self._over, select.EPOLLIN)
            if self._listening is not None:
                epoll.register(self._listening, select.EPOLLIN)
        #: Held by the thread that waits at `_first`; how often one began to, and had when the own thread looked last.
        self._turn, self._turns, self._turns_seen = threading.Lock(), 0, 0
        #: How many threads wait for what others receive; whether the own thread leaves that to steps.
        self._others, self._leaves = 0, False
        #: Of waits: how many begin without a look still, and did after the last look in vain.
        self._skips = self._skipped = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="penstock-graph-host", daemon=True)
        self._thread.start()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to those of some workers that are on this host, also anew to those that were started again."""
        for address in addresses:
            with self._lock:
                if (known := self._out.get(address)) is not None and known.is_there():
                    continue
                if known is not None:
                    known.close()
                    del self._out[address]
                connection = _new_socket()
                try:
                    connection.connect(self._name(address))
                    if peer_of(connection).uid != os.geteuid():
                        raise PermissionError("the socket is another user's")
                except OSError:
                    connection.close()
                else:
                    connection.setblocking(False)
                    self._out[address] = _Out(connection)

    def has(self, address: str) -> bool:
        """Return whether a worker is connected to."""
        out = self._out.get(address)
        return out is not None and out.is_there()

    def send(self, address: str, parts: Sequence[Any]) -> bool:
        """Send a message; return False where the worker is on another host, or cannot take it now."""
        out = self._out.get(address)
        return out is not None and out.send(parts)

    def lend(self, address: str, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Return memory in which a worker has what is sent to it from there, for the caller alone until it is sent.

        It is free again as soon as nothing refers to it. None where small parts go by no block, the worker is on
        another host, or there is no more memory.
        """
        out = self._out.get(address) if nbytes > _SMALL_BYTES else None
        return None if out is None else out.lend(nbytes)

    def get_within(self, queue: WakingQueue[T], seconds: float | None) -> T:
        """Return the next item of a queue, as `penstock.queues.get_within`; receive what comes meanwhile."""
        if not queue.empty():
            return queue.get_nowait()
        if not self._turn.acquire(blocking=False):
            return self._get_from_others(queue, seconds)
        self._turns += 1
        until = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                has_slept = False
                queue.wake = self._wake
                if not queue.empty():
                    ready = self._first.poll(0)
                else:
                    left = None if until is None else max(until - time.monotonic(), 0.0)
                    ready = self._look(left)
                    if not ready:
                        has_slept, ready = True, self._first.poll(left)
                queue.wake = None
                for descriptor, _ in ready:
                    # Before Linux 5.7 nobody else hears of what came between the wake of this thread and its run.
                    while self._receive(descriptor) and has_slept:
                        pass
                if not queue.empty():
                    return queue.get_nowait()
                if until is not None and time.monotonic() >= until:
                    raise Empty
        finally:
            queue.wake = None
            self._turn.release()

    def _look(self, seconds: float | None) -> list[tuple[int, int]]:
        """Return what comes soon, without sleeping; where nothing did, look ever more seldom.

        To be woken takes a processor about as long as to look: its caches have what ran meanwhile.
        """
        if self._skips:
            self._skips -= 1
            return []
        until = time.monotonic() + (_LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS))
        while not (ready := self._first.poll(0)):
            if time.monotonic() >= until:
                self._skips = self._skipped = min(2 * self._skipped + 1, _MOST_SKIPPED)
                return []
        self._skipped = 0
        return ready

    def _get_from_others(self, queue: WakingQueue[T], seconds: float | None) -> T:
        with self._lock:
            self._others += 1
        if self._leaves:
            os.eventfd_write(self._call, 1)
        try:
            return get_within(queue, seconds)
        finally:
            with self._lock:
                self._others -= 1

    def _wake(self) -> None:
        os.eventfd_write(self._stir, 1)

    def close(self) -> None:
        """End all connections. Once, when nobody is in `get_within`."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        epolls = (self._first, self._last, self._rare)
        for each in (*self._out.values(), *self._in.values(), *epolls, self._listening):
            if each is not None:
                each.close()
        for descriptor in (self._over, self._stir, self._call):
            os.close(descriptor)

    def _name(self, address: str) -> str:
        named = hashlib.blake2b(address.encode("utf-8"), key=self._secret, digest_size=16)
        return f"\0penstock-graph-{named.hexdigest()}"

    def _run(self) -> None:
        while not self._is_over:
            for descriptor, _ in self._last.poll():
                if descriptor in self._in:
                    self._leave_to_steps()
                self._take(descriptor)

    def _leave_to_steps(self) -> None:
        """Return once none has come to receive for a while, or another thread waits for what is received."""
        self._leaves = True
        while self._turns != self._turns_seen and not self._others and not self._is_over:
            self._turns_seen = self._turns
            for descriptor, _ in self._rare.poll(_SOON_SECONDS):
                self._take(descriptor)
        self._leaves = False

    def _take(self, descriptor: int) -> None:
        """Act on what the own thread waits for."""
        if descriptor == self._over:
            self._is_over = True
        elif self._listening is not None and descriptor == self._listening.fileno():
            self._accept(self._listening)
        else:
            self._receive(descriptor)

    def _receive(self, descriptor: int) -> bool:
        """Receive a message, and return whether there was one. What else came is there for who waits next."""
        connection = self._in.get(descriptor)
        if connection is None:
            if descriptor in (self._stir, self._call):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            return False
        try:
            if (parts := connection.receive()) is None:
                return False
            self._on_parts(parts)
        except Exception as error:
            # It has ended, or sent what no worker sends: that must not end the others' connections.
            with self._lock:
                if self._in.get(descriptor) is connection:
                    del self._in[descriptor]
            connection.close()
            if not isinstance(error, EOFError):
                self._complain(connection.peer, f"was cut off: {type(error).__name__}: {error}")
            return False
        return True

    def _accept(self, listening: socket.socket) -> None:
        # Who connected was taken while this thread left what else it had heard of to steps, or has left by now; a step
        # that listens may have closed the connection.
        with contextlib.suppress(OSError, ValueError):
            connection, _ = listening.accept()
            peer = peer_of(connection)
            if peer.uid != os.geteuid():
                connection.close()
                self._complain(peer, "was refused: workers of one host are of one user")
                return
            with self._lock:
                self._in[connection.fileno()] = _In(connection, peer)
            # EPOLLEXCLUSIVE wakes the first of these in which a thread waits, and no other; who begins to wait at
            # either hears of all that is there.
            for epoll in (self._first, self._last):
                epoll.register(connection, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def _complain(self, peer: Peer, why: str) -> None:
        with self._lock:
            if peer in self._reported or len(self._reported) >= _MOST_REPORTED:
                return
            self._reported.add(peer)
        if self._report is not None:
            # What goes wrong there, such as a terminal that is gone, must not end this thread: it is for all.
            with contextlib.suppress(Exception):
                self._report(f"process {peer.pid} of user {peer.uid}, at this worker's local socket, {why}")


class _Out:
    """A connection to a worker, by which any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        #: Of the blocks, and of the order in which the receiver learns of them.
        self._lock = threading.Lock()
        self._blocks: list[Arena] = []
        self._views: list[np.ndarray[Any, Any]] = []
        #: How many blocks the receiver knows.
        self._known = 0
        #: Of memory that is lent and not sent, by address: its block, its bytes, and what frees it once it is gone.
        self._lent: dict[int, tuple[int, int, weakref.finalize[..., Any]]] = {}

    def is_there(self) -> bool:
        """Return whether the worker has not ended."""
        try:
            return bool(self._connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, parts: Sequence[Any]) -> bool:
        frame = _frame(tuple(map(len, parts)))
        if frame is not None:
            pieces: list[Any] = frame.copy()
            pieces[1::2] = parts
            message = b"".join(pieces)
            with self._lock:
                try:
                    self._connection.send(message)
                except OSError:  # it is full, or the worker has ended
                    return False
            return True
        views = [memoryview(part).cast("B") for part in parts]
        with self._lock:
            taken: list[int] = []
            handed_over: dict[int, Any] = {}
            head = bytearray()
            small: list[Any] = []
            for view in views:
                if view.nbytes <= _SMALL_BYTES:
                    head += _PART.pack(view.nbytes, 0)
                    small += [view, bytes(-view.nbytes % _ALIGNMENT)]
                elif (lent := self._lent.get(address := _address(view))) and lent[1] == view.nbytes:
                    handed_over[address] = lent
                    head += _PART.pack(view.nbytes, lent[0] + 1)
                elif (block := self._free_block(view.nbytes)) is not None:
                    self._views[block][0] = 1
                    self._views[block][_MARK_BYTES : _MARK_BYTES + view.nbytes] = view
                    head += _PART.pack(view.nbytes, block + 1)
                    taken.append(block)
                else:
                    break
            has_all = len(head) == _PART.size * len(views)
            is_sent = has_all and len(head) + sum(map(len, small)) <= _MOST_MESSAGE_BYTES
            if is_sent:
                new = [each.descriptor for each in self._blocks[self._known :]]
                buffers = [_PART.pack(len(views), len(new)), head, *small]
                try:
                    socket.send_fds(self._connection, buffers, new)
                except OSError:  # it is full, or the worker has ended
                    is_sent = False
            if is_sent:
                self._known = len(self._blocks)
                for address, (_, _, free) in handed_over.items():
                    del self._lent[address]
                    free.detach()
            else:
                for block in taken:
                    self._views[block][0] = 0
                # But not those in front of a block that is lent.
                while len(self._blocks) > self._known and not self._views[-1][0]:
                    self._forget(len(self._blocks) - 1)
            return is_sent

    def lend(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Return memory of a block that nobody uses; None where there may be no more."""
        with self._lock:
            if (block := self._free_block(nbytes)) is None:
                return None
            self._views[block][0] = 1
            mapping = self._blocks[block].mapping
            array = np.frombuffer(mapping, np.uint8, nbytes, _MARK_BYTES)
            address = array.ctypes.data
            free = weakref.finalize(array, self._free, address, memoryview(mapping))
            free.atexit = False
            self._lent[address] = (block, nbytes, free)
            return array

    def _free(self, address: int, mapping: memoryview) -> None:
        # Without the lock: it may run anywhere. Before it is free, nobody else has this address.
        del self._lent[address]
        mapping[0] = 0

    def _free_block(self, nbytes: int) -> int | None:
        """Return the number of a block that nobody uses, a new one if need be; None where there may be no more."""
        for number, view in enumerate(self._views):
            if not view[0] and nbytes <= len(view) - _MARK_BYTES <= 2 * nbytes:
                return number
        if nbytes + sum(map(len, self._views)) > MOST_BLOCK_BYTES:
            return None
        if len(self._blocks) - self._known >= _MOST_DESCRIPTORS:
            return None
        try:
            block = Arena(nbytes + _MARK_BYTES, is_shared=True)
        except ConfigError:  # no more descriptors, or no more memory
            return None
        self._blocks.append(block)
        self._views.append(block.array)
        return len(self._blocks) - 1

    def _forget(self, first: int) -> None:
        """Forget a block and those after it."""
        self._views[first:] = []
        for block in self._blocks[first:]:
            block.close()
        self._blocks[first:] = []

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            self._forget(0)


class _In:
    """A connection from a worker of this host, from which any thread receives."""

    def __init__(self, connection: socket.socket, peer: Peer) -> None:
        self._connection, self.peer = connection, peer
        connection.setblocking(False)
        #: Of what follows, and of the order in which blocks are learned of.
        self._lock = threading.Lock()
        self._buffer = bytearray(2 * _MOST_MESSAGE_BYTES)
        self._blocks: list[Arena] = []

    def receive(self) -> list[Any] | None:
        """Return the parts of a message, views of its blocks among them; None where none is there.

        Raises: EOFError when there will be no more; CorruptError for what no worker sends.
        """
        with self._lock:
            try:
                size, ancillary, _, _ = self._connection.recvmsg_into(
                    [self._buffer], _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError("it has ended") from error
            if not size and not ancillary:
                raise EOFError("it has ended")
            try:
                for descriptor in _descriptors(ancillary) if ancillary else ():
                    self._blocks.append(Arena.attach(descriptor))
                message = memoryview(bytearray(memoryview(self._buffer)[:size]))
                count, _ = _PART.unpack_from(message)
                places, blocks = _places(bytes(message[: _PART.size * (count + 1)]))
                parts: list[Any]
                *parts, _ = places(message)
                for number, block, nbytes in blocks:
                    parts[number] = _lent(self._blocks[block], nbytes)
                return parts
            except (OSError, struct.error, ValueError, IndexError, ConfigError) as error:
                raise CorruptError(f"what it sent is no message of a worker: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            for block in self._blocks:
                block.close()
            self._blocks.clear()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _lent(block: Arena, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the data of a block, which is marked as free when nothing refers to it any more."""
    array = np.frombuffer(block.mapping, np.uint8, nbytes, _MARK_BYTES)
    weakref.finalize(array, memoryview(block.mapping).__setitem__, 0, 0).atexit = False
    return array


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a message."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += [each for (each,) in _DESCRIPTOR.iter_unpack(data[: len(data) // 4 * 4])]
    return found


@functools.lru_cache(256)
def _places(head: bytes) -> tuple[Callable[[memoryview], tuple[Any, ...]], list[tuple[int, int, int]]]:
    """Return what takes the parts from a message with this head; and of each that is elsewhere: which, block, bytes.

    Raises: ValueError, struct.error for the head of no message.
    """
    (count, _), *numbers = _PART.iter_unpack(head)
    if len(numbers) != count:
        raise ValueError(f"{count} parts are announced, and {len(numbers)} are there")
    begin, places, blocks = len(head), list[slice](), list[tuple[int, int, int]]()
    for number, (nbytes, block) in enumerate(numbers):
        here = 0 if block else nbytes
        places.append(slice(begin, begin + here))
        begin += here + -here % _ALIGNMENT
        if block:
            blocks.append((number, block - 1, nbytes))
    # With an empty one at the end: of one place alone it would not be a tuple.
    return operator.itemgetter(*places, slice(0)), blocks


@functools.lru_cache(256)
def _frame(sizes: tuple[int, ...]) -> list[bytes] | None:
    """Return what a message of small parts of these sizes is, but for these; None where it is sent in blocks."""
    if max(sizes) > _SMALL_BYTES or sum(sizes) > _MOST_MESSAGE_BYTES // 2:
        return None
    numbers = [(len(sizes), 0), *((nbytes, 0) for nbytes in sizes)]
    frame = [b"".join(_PART.pack(*pair) for pair in numbers)]
    for nbytes in sizes:
        frame += (b"", bytes(-nbytes % _ALIGNMENT))
    return frame


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
