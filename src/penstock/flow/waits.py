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
import sys
import threading
import weakref
from typing import Protocol

from penstock.errors import ConfigError, DataError

_ANSWER_SECONDS = 5.0


class Waiter(Protocol):
    """Something that can say what it is waiting for."""

    def waits(self) -> list[str]:
        """Return one line for each wait: who, for what, since when, on what."""
        ...


class _Board:
    """The waiters of this process, and the thread that answers for them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._registered = 0
        self._server: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def register(self, waiter: Waiter) -> None:
        with self._lock:
            if self._pid != os.getpid():  # a forked child has the parent's record but not its thread
                self._pid, self._registered, self._thread = os.getpid(), 0, None
                self._waiters = weakref.WeakSet()
                if self._server is not None:
                    self._server.close()
            self._waiters.add(waiter)
            self._registered += 1
            if self._thread is None:
                self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._server.bind(_address(os.getpid()))
                self._server.listen()
                self._thread = threading.Thread(
                    target=_serve, args=(self._server, self), name="penstock-waits", daemon=True
                )
                self._thread.start()

    def unregister(self, waiter: Waiter) -> None:
        with self._lock:
            if self._pid != os.getpid() or waiter not in self._waiters:
                return
            self._waiters.discard(waiter)
            self._registered -= 1
            if self._registered or self._thread is None or self._server is None:
                return
            thread, server = self._thread, self._server
            self._thread = self._server = None
            server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()

    def report(self) -> str:
        lines = [line for waiter in list(self._waiters) for line in waiter.waits()]
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
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            _, uid, _ = struct.unpack("3i", credentials)
            if uid in (0, os.getuid()):
                connection.settimeout(_ANSWER_SECONDS)
                try:
                    connection.sendall(board.report().encode())
                except OSError:
                    continue  # the asker has left


_board = _Board()
register = _board.register
unregister = _board.unregister


def all_waits() -> str:
    """Return what everything in this process waits for, as text."""
    return _board.report()


def report_waits_on(signum: signal.Signals = signal.SIGUSR1) -> None:
    """Print all waits to standard error whenever this process gets the signal. Call it from the main thread.

    The report comes as soon as the main thread runs Python code again or sits in a wait of Penstock's;
    `penstock ps PID` answers in any case.
    """
    signal.signal(signum, lambda *_: print(all_waits(), end="", file=sys.stderr, flush=True))


def ask_waits(pid: int) -> str:
    """Return what another process of the same user waits for.

    Raises: ConfigError if there is no such process or nothing of Penstock's runs in it;
        DataError if it does not answer within 5 s.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(_address(pid))
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionRefusedError as error:
            raise ConfigError(
                f"no loader runs in process {pid}: give the id of the training process (a rank of the job)"
            ) from error
        except TimeoutError as error:
            raise DataError(f"process {pid} did not answer within {_ANSWER_SECONDS:.0f} s") from error
    return b"".join(parts).decode()
