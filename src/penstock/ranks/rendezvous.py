"""A name at which processes of one host find what the first of them made, as long as one of them is there.

    each process   binds the name with the first number that is free, and answers there
                   asks at all other numbers: what one of them has, it gets
                   makes it where nobody has it, and nobody with a lower number is about to make it

Such a name is an abstract address, without a file: nothing is left of it when its process has ended, however it ends.
Whoever asks, and whoever answers, has to be of this user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import ConfigError
from penstock.local_sockets import peer_of

#: Processes that meet at a name.
_MOST = 64
#: Descriptors at most.
_DESCRIPTORS = 8
#: For an answer, which comes at once but from a process that is stopped; and for one who is about to make it.
_SECONDS, _MAKING_SECONDS, _POLL_SECONDS = 5.0, 10.0, 0.002


class Rendezvous:
    """One process's part, with a thread that answers. Close it; twice is harmless.

    Two of them may each make their own where one ends in the moment in which two others begin.

    name: of at most 60 letters. make: makes the descriptors; called where no other process has them. Received ones are
        open files of their own, whose locks are this process's. Who made them, or takes them from `descriptors`,
        closes them after this.
    Raises: ConfigError if there can be no such socket; what `make` raises.
    """

    def __init__(self, name: str, make: Callable[[], Sequence[int]]) -> None:
        self._name = name
        #: What all have, made here or received; none yet at first.
        self.descriptors: Sequence[int] = ()
        try:
            self._number, self._socket = self._bound()
        except OSError as error:
            raise ConfigError(
                f"share= needs a local socket, which cannot be had here: {error}; leave share= out"
            ) from error
        self._thread = threading.Thread(target=self._answer, name="penstock-rendezvous", daemon=True)
        self._thread.start()
        try:
            received = self._ask_all()
            self.is_first = not received
            self.descriptors = [_own_file(each) for each in received] or make()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _address(self, number: int) -> str:
        return f"\0penstock-{os.geteuid()}-{self._name}-{number}"

    def _bound(self) -> tuple[int, socket.socket]:
        """Bind the name with a number that nobody has, and listen. Raises: OSError."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for number in range(_MOST):
                try:
                    made.bind(self._address(number))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    made.listen(socket.SOMAXCONN)
                    return number, made
            raise OSError(f"{_MOST} processes have {self._address(0)[1:]} and the like")
        except BaseException:
            made.close()
            raise

    def _ask_all(self) -> list[int]:
        """Return what another process has; none where this one is to make it."""
        deadline = time.monotonic() + _MAKING_SECONDS
        while True:
            is_about_to = False
            for number in range(_MOST):
                answer = None if number == self._number else self._ask(number)
                if answer:
                    return answer
                is_about_to |= answer is not None and number < self._number
            if not is_about_to or time.monotonic() > deadline:
                return []
            time.sleep(_POLL_SECONDS)

    def _ask(self, number: int) -> list[int] | None:
        """Return what the process with a number has, nothing yet perhaps; None where there is none of this user."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            made.settimeout(_SECONDS)
            try:
                made.connect(self._address(number))
                if peer_of(made).uid != os.geteuid():
                    return None
                message, found, _, _ = socket.recv_fds(made, 1, _DESCRIPTORS)
            except ConnectionRefusedError:
                return [] if self._is_bound(number) else None
            except OSError:  # it has ended, or is stopped
                return None
        return list(found) if message else None

    def _is_bound(self, number: int) -> bool:
        """Return whether a process has a number, which does not listen there yet."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            try:
                made.bind(self._address(number))
            except OSError:
                return True
        return False

    def _answer(self) -> None:
        """Send what is here to whoever asks, until this is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SECONDS)
                if peer_of(connection).uid == os.geteuid():
                    socket.send_fds(connection, [b"\0"], self.descriptors)


def _own_file(descriptor: int) -> int:
    """Return an open file of this process's own over a received descriptor, which is closed. Raises: OSError."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
