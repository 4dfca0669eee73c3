"""Messages between this process and another: any value that can be pickled, its large buffers in shared memory.

    sender     pickle ── arrays of 16 KiB and more ──> an arena of its own ─┐
                  └───── all else, and which arena ──> socket               │ mapped once by the receiver
    receiver   values over the arena's memory <─────────────────────────────┘
                  └───── its number, once nothing refers to it any more ──> with the next message back

An arena is a file without a name (`penstock.arena`), so that neither /dev/shm nor a folder is needed and nothing is
left when both processes have ended. Its descriptor is sent over the socket with the first message that uses it and is
closed: batches that somebody keeps keep memory, and no open files.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import pickle
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena

#: Smaller buffers go through the socket: two copies of so few bytes take less than finding them a place.
_LEAST_BUFFER_BYTES = 16 << 10
_LEAST_ARENA_BYTES = 64 << 10
_ALIGNMENT = 64
#: Of envelope and body.
_HEADER = struct.Struct("<QQ")
_AT_ONCE_BYTES = 64 << 10
#: Linux sends no more descriptors at once.
_MOST_DESCRIPTORS = 253
#: With more arenas in use than this, what arrives is copied: a process has a limited number of mappings.
_MOST_ARENAS = 256

#: What a type is pickled by, where that is not its own `__reduce__`; as `pickle.Pickler.dispatch_table`.
Reducers = Mapping[type, Callable[[Any], Any]]


class _Envelope(NamedTuple):
    """What a message is besides its body.

    arena: the number of the sender's arena that the buffers are in, -1 for none. extents: where, as slices.
    returned: numbers of the receiver's arenas that the sender has no more use for.
    is_new: whether the arena's descriptor comes with this message, before those that the caller sends.
    descriptors: how many the caller sends.
    """

    arena: int
    extents: list[slice]
    returned: list[int]
    is_new: bool
    descriptors: int


class _Use(weakref.ref["NDArray[Any]"]):
    """Tells when the last value over an arena's memory is gone."""

    __slots__ = ("number",)

    number: int


class Channel:
    """One end of a pair of connected processes. One thread at a time sends, and one at a time receives.

    connection: a stream socket of the local kind; closed by `close`.
    reducers: what some types are pickled by. Buffers that they hand out (`pickle.PickleBuffer`, arrays) are not copied
        more than once.
    """

    def __init__(self, connection: socket.socket, reducers: Reducers | None = None) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._reducers = {**copyreg.dispatch_table, **(reducers or {})}
        #: What was read of the messages that come next, and the descriptors that came with it.
        self._read = bytearray()
        self._descriptors: list[int] = []
        #: The memory of own arenas by number, and which of them the other process has returned.
        self._own: list[NDArray[np.uint8]] = []
        self._free: list[int] = []
        #: The other process's arenas, and what is called when they are not used here any more.
        self._others: list[mmap.mmap] = []
        self._uses: dict[int, _Use] = {}
        self._unused: deque[_Use] = deque()

    def use(self, reducers: Reducers) -> None:
        """Pickle some types by these from here on."""
        self._reducers.update(reducers)

    def send(self, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a value. descriptors: of files to open in the other process.

        Raises: what pickling it raises, and then nothing is sent; OSError if the other process has gone.
        """
        buffers: list[memoryview] = []

        def goes_with_body(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LEAST_BUFFER_BYTES:
                return True
            buffers.append(raw)
            return False

        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=goes_with_body)
        pickler.dispatch_table = self._reducers
        pickler.dump(value)
        body = file.getbuffer()
        arena, number, extents = self._placed(buffers)
        try:
            returned = []
            while self._unused:
                use = self._unused.popleft()
                del self._uses[use.number]
                returned.append(use.number)
            envelope = pickle.dumps(_Envelope(number, extents, returned, arena is not None, len(descriptors)))
            header = _HEADER.pack(len(envelope), body.nbytes)
            sent_along = [*([] if arena is None else [arena.descriptor]), *descriptors]
            parts: list[Any] = [header, envelope, body]
            sent = socket.send_fds(self._socket, parts, sent_along)
            if sent < sum(map(len, parts)):
                self._socket.sendall(b"".join(parts)[sent:])
        finally:
            if arena is not None:
                arena.close()

    def receive(self, seconds: float | None = None) -> tuple[Any, list[int]]:
        """Return the next value, and the descriptors that came with it, which are the caller's to close.

        seconds: to wait for its beginning at most.
        Raises: TimeoutError; EOFError or OSError if the other process has gone.
        """
        if not self._read and seconds is not None and not self._poll.poll(1000 * seconds):
            raise TimeoutError
        self._read_up_to(_HEADER.size)
        envelope_bytes, body_bytes = _HEADER.unpack_from(self._read)
        begin = _HEADER.size + envelope_bytes
        end = begin + body_bytes
        self._read_up_to(end)
        message = memoryview(self._read)[:end]
        self._read = self._read[end:]
        envelope: _Envelope = pickle.loads(message[_HEADER.size : begin])
        self._free += envelope.returned
        if envelope.is_new:
            with Arena.attach(self._descriptors.pop(0)) as arena:
                self._others.append(arena.mapping)
        descriptors = [self._descriptors.pop(0) for _ in range(envelope.descriptors)]
        return pickle.loads(message[begin:], buffers=self._found(envelope)), descriptors

    def close(self) -> None:
        """Have the other process see the end. Values that were received stay."""
        self._socket.close()

    def _read_up_to(self, nbytes: int) -> None:
        """Read until there are so many bytes, and what else has arrived. Raises: EOFError."""
        while (missing := nbytes - len(self._read)) > 0:
            part, found, _, _ = socket.recv_fds(self._socket, max(missing, _AT_ONCE_BYTES), _MOST_DESCRIPTORS)
            self._descriptors += found
            if not part:
                raise EOFError("the other process has gone")
            self._read += part

    def _placed(self, buffers: list[memoryview]) -> tuple[Arena | None, int, list[slice]]:
        """Copy buffers into one arena; return that if it is new, its number, and where they are in it."""
        if not buffers:
            return None, -1, []
        extents, end = [], 0
        for buffer in buffers:
            extents.append(slice(end, end + buffer.nbytes))
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        arena = None
        fitting = [number for number in self._free if self._own[number].size >= end]
        if fitting:
            number = min(fitting, key=lambda each: self._own[each].size)
            self._free.remove(number)
        else:
            number = len(self._own)
            # A power of two: batches of unequal size fit each other's.
            arena = Arena(1 << (max(end, _LEAST_ARENA_BYTES) - 1).bit_length(), is_shared=True)
            self._own.append(arena.array)
        for extent, buffer in zip(extents, buffers, strict=True):
            self._own[number][extent] = buffer
        return arena, number, extents

    def _found(self, envelope: _Envelope) -> list[NDArray[np.uint8]]:
        """Return the buffers of a message, over the arena that it names."""
        if envelope.arena < 0:
            return []
        mapping = self._others[envelope.arena]
        # An array over the mapping itself is what its views refer to: see `Arena.mapping`.
        memory: NDArray[np.uint8] = np.ndarray((len(mapping),), np.uint8, buffer=mapping)
        found = [memory[extent] for extent in envelope.extents]
        if len(self._uses) >= _MOST_ARENAS:
            found = [each.copy() for each in found]
        use = _Use(memory, self._unused.append)
        use.number = envelope.arena
        self._uses[use.number] = use
        return found
