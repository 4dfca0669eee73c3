"""Nothing waits in silence: every wait of this process, on request.

Whatever may wait (a running loader) registers here. `penstock ps PID` asks through an abstract Unix socket, which
leaves no file behind and is served by a thread, so that it answers while the main thread is stuck; a signal
chosen with `report_waits_on` prints the same to standard error.

Anybody may bind an abstract name. So the name ends in random digits, which nobody can bind first, the asker finds it
in the kernel's list of sockets, and it is the kernel, not the name, that says whose process answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

from penstock.errors import ConfigError, DataError, printable
from penstock.local_sockets import peer_of

_ANSWER_SECONDS = 5.0
_ANSWER_BYTES = 1 << 20
#: What `accept` fails with for a while only: too many open files, no memory, an asker that has left.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PASSING_SECONDS = 0.1
_STANDARD_ERROR = 2


class Waiter(Protocol):
    """What can describe its waits."""

    def waits(self) -> list[str]:
        """Return one line for each wait: who, for what, since when, on what; before them, how far the run is."""
        ...


class _Board:
    """The waiters of this process, and the thread that answers for them while there are any."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked child: nobody waits here yet, and the socket is the parent's."""
        if self._server is not None:
            self._server.close()
        #: guards the coming and going of the server, its thread's end included
        self._server_lock = threading.Lock()
        #: By identity. A report may run during any change, a signal handler's in the midst of one: it copies this.
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
            server.bind(f"\0penstock-waits-{os.getpid()}-{os.urandom(8).hex()}")
            server.listen()
        except OSError:  # a sandbox without sockets: a signal still prints
            server.close()
            return
        self._server = server
        self._thread = threading.Thread(
            target=_serve, args=(server, self), name="penstock-waits", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the limit of threads: likewise
            self._thread = self._server = None
            server.close()

    def report(self) -> str:
        waiters = [reference() for reference in self._waiters.copy().values()]
        lines = [printable(line) for waiter in waiters if waiter is not None for line in _waits_of(waiter)]
        return "\n".join([f"penstock: process {os.getpid()}", *(lines or ["nothing waits"])]) + "\n"


def _waits_of(waiter: Waiter) -> list[str]:
    try:
        return waiter.waits()
    # A source's own `describe` may raise anything; the report still has to name the other waits.
    except Exception as error:
        return [f"what waits here cannot be described: {type(error).__name__}"]


def _serve(server: socket.socket, board: _Board) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError as error:
            if error.errno not in _PASSING:  # shut down by unregister
                return
            time.sleep(_PASSING_SECONDS)
            continue
        with connection:
            if peer_of(connection).uid in (0, os.getuid()):
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
    signal.signal(signum, lambda *_: _write_all(_STANDARD_ERROR, all_waits().encode()))


def _write_all(descriptor: int, data: bytes) -> None:
    """Write as much as the descriptor takes. Where that fails, nobody reads it any more, and the training continues."""
    # Not print: a signal may come while the main thread is inside one, and a stream cannot be entered twice.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def ask_waits(pid: int) -> str:
    """Return what another process of the same user waits for, as printable lines.

    Raises: ConfigError if there is no such process, it is another user's, or nothing of Penstock's runs in it;
        DataError if it does not answer within 5 s.
    """
    other_user = None
    for address in _addresses(pid):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            try:
                connection.connect(address)
                owner = peer_of(connection)
                if (
                    owner.pid != pid
                ):  # of another container, which numbers its processes apart, or an impostor
                    continue
                if answer := _receive(connection):
                    lines = answer.decode(errors="replace").splitlines()
                    return "".join(f"{printable(line)}\n" for line in lines)
                other_user = owner.uid
            except TimeoutError as error:
                raise DataError(f"process {pid} did not answer within {_ANSWER_SECONDS:.0f} s") from error
            except OSError:  # gone by now
                continue
    if other_user is not None:
        raise ConfigError(
            f"process {pid} is of user {other_user} and answers only that user and root: ask as that user"
        )
    advice = "give the id of the training process (a rank of the job), in the container where it runs"
    if not os.path.exists(f"/proc/{pid}"):
        advice = f"there is no such process here; {advice}"
    raise ConfigError(f"no loader runs in process {pid}: {advice}")


def _addresses(pid: int) -> list[str]:
    """Return the sockets that are named as one which answers for a process, whoever made them."""
    sockets = Path("/proc/net/unix").read_bytes()
    found = re.findall(rb"@(penstock-waits-%d-[0-9a-f]{16})$" % pid, sockets, re.MULTILINE)
    return [f"\0{name.decode()}" for name in sorted(set(found))]


def _receive(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < _ANSWER_BYTES and (part := connection.recv(65536)):
        answer += part
    return answer
