"""Nothing waits in silence: every wait of this process, on request.

Whatever may wait (a running loader) registers here. `penstock ps PID` asks through an abstract Unix socket, which
leaves no file behind and is served by a thread, so that it answers while the main thread is stuck; a signal
chosen with `report_waits_on` prints the same to standard error.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import weakref
from typing import NamedTuple, Protocol

from penstock.errors import ConfigError, DataError

_ANSWER_SECONDS = 5.0
_STANDARD_ERROR = 2


class _Peer(NamedTuple):
    """Who is at the other end of a socket."""

    pid: int
    uid: int
    gid: int


def _peer(connection: socket.socket) -> _Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return _Peer(*struct.unpack("3i", credentials))


class Waiter(Protocol):
    """Something that can say what it is waiting for."""

    def waits(self) -> list[str]:
        """Return one line for each wait: who, for what, since when, on what."""
        ...


class _Board:
    """The waiters of this process, and the thread that answers for them while there are any.

    Where the socket's name is taken (containers may share a network and number their processes apart), nobody
    answers; a signal still prints.
    """

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked child: nobody waits here yet, and the socket is the parent's."""
        if self._server is not None:
            self._server.close()
        #: guards the coming and going of the server, its thread's end included
        self._server_lock = threading.Lock()
        #: By identity. A report may run beside any change, a signal handler's in the midst of one: it copies this.
        self._waiters: dict[int, weakref.ref[Waiter]] = {}
        self._server = None
        self._thread: threading.Thread | None = None

    def register(self, waiter: Waiter) -> None:
        with self._server_lock:
            self._waiters[id(waiter)] = weakref.ref(waiter)
            if self._server is None:
                self._begin_to_answer()

    def unregister(self, waiter: Waiter) -> None:
        with self._server_lock:
            self._waiters.pop(id(waiter), None)
            if any(other() is not None for other in self._waiters.values()) or self._server is None:
                return
            self._server.shutdown(socket.SHUT_RDWR)
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            self._server.close()
            self._thread = self._server = None

    def _begin_to_answer(self) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_address(os.getpid()))
        except OSError:
            server.close()
            return
        server.listen()
        self._server = server
        self._thread = threading.Thread(
            target=_serve, args=(server, self), name="penstock-waits", daemon=True
        )
        self._thread.start()

    def report(self) -> str:
        waiters = [reference() for reference in self._waiters.copy().values()]
        lines = [line for waiter in waiters if waiter is not None for line in waiter.waits()]
        return "\n".join([f"penstock: process {os.getpid()}", *(lines or ["nothing waits"])]) + "\n"


def _address(pid: int) -> str:
    return f"\0penstock-waits-{pid}"


def _serve(server: socket.socket, board: _Board) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # shut down by unregister
            return
        with connection:
            if _peer(connection).uid in (0, os.getuid()):
                connection.settimeout(_ANSWER_SECONDS)
                try:
                    connection.sendall(board.report().encode())
                except OSError:
                    continue  # the asker has left


_board = _Board()
register = _board.register
unregister = _board.unregister
os.register_at_fork(after_in_child=_board.begin_anew)


def all_waits() -> str:
    """Return what everything in this process waits for, as text."""
    return _board.report()


def report_waits_on(signum: signal.Signals = signal.SIGUSR1) -> None:
    """Print all waits to standard error whenever this process gets the signal. Call it from the main thread.

    The report comes as soon as the main thread runs Python code again or sits in a wait of Penstock's;
    `penstock ps PID` answers in any case.
    """
    # Not print: a signal may come while the main thread is inside one, and a stream cannot be entered twice.
    signal.signal(signum, lambda *_: _write_all(_STANDARD_ERROR, all_waits().encode()))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def ask_waits(pid: int) -> str:
    """Return what another process of the same user waits for.

    Raises: ConfigError if there is no such process, it is another user's, or nothing of Penstock's runs in it;
        DataError if it does not answer within 5 s.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(_address(pid))
            owner = _peer(connection)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except (ConnectionRefusedError, ConnectionResetError) as error:
            advice = "give the id of the training process (a rank of the job)"
            if not os.path.exists(f"/proc/{pid}"):
                advice = f"there is no such process here; {advice}"
            raise ConfigError(f"no loader runs in process {pid}: {advice}") from error
        except TimeoutError as error:
            raise DataError(f"process {pid} did not answer within {_ANSWER_SECONDS:.0f} s") from error
    if owner.pid != pid:  # the name belongs to a process that another container calls by this number
        raise ConfigError(f"no loader runs in process {pid} of this container: ask where the training runs")
    if not parts:
        raise ConfigError(
            f"process {pid} is of user {owner.uid} and tells nobody else but root what it waits for: ask as that user"
        )
    return b"".join(parts).decode()
