"""Messages about samples between hosts, over ZeroMQ: every connection is encrypted, and both ends prove who they are.

Each rank makes a pair of keys, whose public half the others get by the job's own exchange. A rank answers the keys of
its job alone, and knows by the key which rank asks (CURVE, and ZAP for who may: RFC 25 to 27 of ZeroMQ).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from penstock.errors import ConfigError
from penstock.ranks.peer_messages import MOST_HEAD_BYTES

#: Names the network interface, or its address, by which other hosts reach this one.
INTERFACE = "PENSTOCK_INTERFACE"

_DOMAIN = b"penstock"
#: Messages that wait in one direction; more are not sent.
_MOST_WAITING = 1000
#: What encryption adds to a part of a message, and more.
_ADDED_BYTES = 256
#: A connection that is cut without a sign is made anew after so long.
_HEARTBEAT_MS, _CUT_MS = 5_000, 15_000
_RECONNECT_MS, _MOST_RECONNECT_MS = 200, 5_000
#: How long the last messages may take at the end.
_LINGER_MS = 200
_SIOCGIFADDR = 0x8915


class ZmqCarrier:
    """One rank's sockets. Made by one thread, then used by another; `wake` alone by any.

    interface: address of this host that others connect to.
    most_part_bytes: of a part of a message; who sends more is disconnected before it is received.
    Raises: ConfigError where the interface is not here, or ZeroMQ was built without CURVE.
    """

    def __init__(self, interface: str, most_part_bytes: int) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                'share="hosts" needs ZeroMQ with CURVE, and this one has none: install the wheel of pyzmq'
            )
        self._most_bytes = max(most_part_bytes, MOST_HEAD_BYTES) + _ADDED_BYTES
        self._public, self._secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Which rank has a key, as ZAP brings it.
        self._rank_of: dict[bytes, int] = {}
        self._asking: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        try:
            self._judging = self._new_socket(zmq.REP)
            self._judging.bind("inproc://zeromq.zap.01")
            self._serving = self._new_socket(zmq.ROUTER)
            self._serving.curve_server = True
            self._serving.zap_domain = _DOMAIN
            self._serving.linger = _LINGER_MS
            host = f"[{interface}]" if ":" in interface else interface
            self._serving.ipv6 = ":" in interface
            port = self._serving.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"this rank cannot listen at {interface}: {error}; set {INTERFACE} to a network interface of this "
                'host, such as eth0, or to its address; or give share="host"'
            ) from error
        self._poller.register(self._wake, zmq.POLLIN)
        self.offer = {"address": f"tcp://{host}:{port}", "key": self._public.decode("ascii")}

    def connect(self, offers: dict[int, dict[str, str]]) -> None:
        """Connect to other ranks, and let these connect. offers: of each, the `offer` of its carrier.

        Raises: ConfigError where so many connections cannot be made.
        """
        self._context.set(zmq.MAX_SOCKETS, len(offers) + 64)
        try:
            for rank, offer in offers.items():
                asking = self._new_socket(zmq.DEALER)
                asking.curve_serverkey = offer["key"].encode("ascii")
                asking.ipv6 = "[" in offer["address"]
                asking.reconnect_ivl, asking.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
                asking.connect(offer["address"])
                self._asking[rank] = asking
                self._rank_of[z85.decode(offer["key"].encode("ascii"))] = rank
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{len(offers):,} ranks of other hosts are more than this process can connect to: {error}; raise "
                '"ulimit -n", or give share="host"'
            ) from error

    def ask(self, rank: int, parts: Sequence[Any]) -> bool:
        """Send a message to a rank; return False where too many wait already."""
        return _sent(self._asking[rank], parts)

    def answer(self, who: Any, parts: Sequence[Any]) -> bool:
        """Send a message back to who sent one, as `receive` names it."""
        return _sent(self._serving, [who, *parts])

    def receive(self, seconds: float | None) -> list[tuple[int, Any, list[Any]]]:
        """Wait for messages, so long at most, or until `wake`. Returns: rank, whom to answer (None: nobody), parts."""
        found: list[tuple[int, Any, list[Any]]] = []
        ready = dict(self._poller.poll(None if seconds is None else max(0, int(1e3 * seconds) + 1)))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        while self._judging in ready and (request := _received(self._judging)):
            self._judge([bytes(part) for part in request])
        while self._serving in ready and (parts := _received(self._serving)):
            # The rank by its key: what the message says of itself counts for nothing.
            found.append((int(parts[1].get("User-Id")), bytes(parts[0]), [each.buffer for each in parts[1:]]))
        for rank, asking in self._asking.items():
            while asking in ready and (parts := _received(asking)):
                found.append((rank, None, [each.buffer for each in parts]))
        return found

    def wake(self) -> None:
        """Have `receive` return."""
        with contextlib.suppress(BlockingIOError):  # it is to return already
            os.eventfd_write(self._wake, 1)

    @property
    def wakes_by(self) -> int:
        """The descriptor of an eventfd that does what `wake` does."""
        return self._wake

    def close(self) -> None:
        """End all connections. Once, when no thread uses it."""
        for each in self._asking.values():
            each.close(0)
        self._context.destroy()
        os.close(self._wake)

    def _judge(self, request: list[bytes]) -> None:
        """Say whether a key may connect."""
        version, number, domain, _, _, mechanism, *credentials = request
        rank = self._rank_of.get(credentials[0]) if credentials else None
        is_known = (domain, mechanism) == (_DOMAIN, b"CURVE") and rank is not None
        verdict = [b"200", b"", str(rank).encode("ascii")] if is_known else [b"400", b"not of this job", b""]
        self._judging.send_multipart([version, number, *verdict, b""])

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.curve_publickey, made.curve_secretkey = self._public, self._secret
        made.sndhwm = made.rcvhwm = _MOST_WAITING
        made.maxmsgsize = self._most_bytes
        made.linger = 0
        made.heartbeat_ivl, made.heartbeat_timeout = _HEARTBEAT_MS, _CUT_MS
        self._poller.register(made, zmq.POLLIN)
        return made


def _sent(through: zmq.Socket[bytes], parts: Sequence[Any]) -> bool:
    try:
        through.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _received(by: zmq.Socket[bytes]) -> Any:
    try:
        return by.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def address_of_this_host(towards: str | None = None) -> str:
    """Return the address by which other hosts of the job reach this one.

    That of $PENSTOCK_INTERFACE; else the one from which this host would connect to where the job's processes met, as
    torchrun gives it in $MASTER_ADDR, or to `towards`; else what the host's own name stands for.
    Raises: ConfigError where there is none.
    """
    asked = os.environ.get(INTERFACE)
    if asked:
        return _address_of_interface(asked)
    towards = towards or os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, _, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(place)
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ConfigError(
            f"the address of this host is not known: {towards} cannot be looked up or reached ({error}); set "
            f"{INTERFACE} to the network interface by which the ranks reach each other, or to its address"
        ) from error


def _address_of_interface(asked: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(asked))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", asked.encode()[:15]))
    except OSError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"{INTERFACE} is {asked!r}, which is no address, and no network interface with one ({error}): this host "
            f"has {there}"
        ) from error
    return socket.inet_ntoa(found[20:24])
