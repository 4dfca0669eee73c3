"""Descriptors that ranks of one host send each other, by which they map each other's memory.

    every rank   listens, and offers its address to all                      (an exchange of `Ranks`)
                 sends its descriptors to the others of its host             (an exchange: all have sent)
                 receives theirs

Nobody waits here: what is sent waits in the receiver's socket. A socket has an abstract address, without a file, which
all processes of this network namespace can connect to. So whoever connects must be of the same user, and know the
secret that was offered to the job's ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.closing import Closeable
from penstock.errors import ConfigError
from penstock.local_sockets import peer_of

_SECRET_BYTES = 16
#: Behind the secret: the sender's rank.
_RANK = struct.Struct("<I")
_SECONDS = 5.0
#: Whoever connects beyond the ranks of a host, and such a number, is left waiting.
_STRANGERS = 64


class DescriptorExchange(Closeable):
    """One rank's part. Twice closed is harmless; so is what was never received.

    Raises: ConfigError where no socket can be made.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._address = f"penstock-{secrets.token_hex(16)}"
        self._sockets: list[socket.socket] = []
        try:
            self._listening = self._new_socket()
            self._listening.bind(f"\0{self._address}")
            self._listening.listen(socket.SOMAXCONN)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"share= needs a local socket, which cannot be made here: {error}; leave share= out"
            ) from error
        self._listening.setblocking(False)

    @property
    def offer(self) -> dict[str, Any]:
        """What the other ranks need, as JSON."""
        return {"host": host_id(), "address": self._address, "secret": self._secret.hex()}

    def send(self, offer: dict[str, Any], rank: int, descriptors: Sequence[int]) -> None:
        """Send descriptors, opened anew for reading alone, to the rank of this host that made an offer.

        rank: this one. One that has ended meanwhile is passed by.
        """
        message = bytes.fromhex(offer["secret"]) + _RANK.pack(rank)
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
            copies = []
            for descriptor in descriptors:
                copies.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
                closing.callback(os.close, copies[-1])
            connection = self._new_socket()
            connection.connect(f"\0{offer['address']}")
            socket.send_fds(connection, [message], copies)

    def receive(self, ranks: int, descriptors: int) -> dict[int, list[int]]:
        """Return, by rank, the descriptors that others have sent, `descriptors` each; who gets them closes them.

        ranks: that may send some. Strangers, and what has another number of descriptors, are left out.
        """
        found: dict[int, list[int]] = {}
        for _ in range(ranks + _STRANGERS):
            try:
                connection, _ = self._listening.accept()
            except OSError:  # nobody else has connected
                break
            with connection:
                connection.setblocking(False)
                rank, received = self._received(connection, descriptors)
            if rank is None or rank in found or len(received) != descriptors:
                for descriptor in received:
                    os.close(descriptor)
            else:
                found[rank] = received
        return found

    def _received(self, connection: socket.socket, most: int) -> tuple[int | None, list[int]]:
        """Return who sends, None for a stranger, and its descriptors."""
        if peer_of(connection).uid != os.geteuid():
            return None, []
        try:
            size = _SECRET_BYTES + _RANK.size
            message, received, _, _ = socket.recv_fds(connection, size, most + 1)
        except OSError:  # it has sent nothing
            return None, []
        is_of_job = len(message) == size and hmac.compare_digest(message[:_SECRET_BYTES], self._secret)
        return _RANK.unpack(message[_SECRET_BYTES:])[0] if is_of_job else None, list(received)

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def _new_socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(_SECONDS)
        self._sockets.append(made)
        return made


def host_id() -> str:
    """Return what processes have in common that can map each other's memory: the boot, and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"
