"""Messages about samples between hosts, over ZeroMQ: every connection is encrypted, and both ends prove who they are.

Each rank makes a pair of keys, whose public half the others get by the job's own exchange. A rank answers the keys of
its job alone, and knows by the key which rank asks (CURVE, and ZAP for who may: RFC 25 to 27 of ZeroMQ). Decode servers
and who asks them make their keys of a secret that both have in a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from penstock.errors import ConfigError
from penstock.ranks.peer_messages import MOST_HEAD_BYTES
from penstock.ranks.wakeable import Wakeable

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
#: And one by which only a key is tried.
_PROBE_AGAIN_MS = 20
#: How long the last messages may take at the end.
_LINGER_MS = 200
_SIOCGIFADDR = 0x8915


class KeyPair(NamedTuple):
    """A pair of keys of CURVE, in the letters of Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, secret: bytes, role: str) -> KeyPair:
        """Return the pair that everyone makes of a secret of 32 bytes for a role, such as "server"."""
        own = hashlib.blake2b(role.encode("ascii"), key=secret, digest_size=32).digest()
        made = z85.encode(own)
        return cls(zmq.curve_public(made), made)


def _cannot_listen(interface: str, port: int, error: zmq.ZMQError) -> str:
    at = f"this process cannot listen at {interface}" + (f", port {port}" if port else "")
    if error.errno == zmq.EADDRINUSE:
        return f"{at}: the port is in use; give another one, or end the process that has it"
    if port:
        return f"{at}: {error}; give an address of this host"
    return (
        f"{at}: {error}; name a network interface of this host, such as eth0, or its address: for ranks as "
        f'{INTERFACE}, or give share="host"'
    )


class ZmqCarrier(Wakeable):
    """One rank's sockets. Made by one thread, then used by another; `wake` alone by any.

    interface: address of this host that others connect to; None where nobody does.
    most_part_bytes: of a part of a message; who sends more is disconnected before it is received.
    keys: of this rank; new ones unless given. port: that it listens at; a free one unless given.
    Raises: ConfigError where the interface is not here, or ZeroMQ was built without CURVE.
    """

    def __init__(
        self, interface: str | None, most_part_bytes: int, *, keys: KeyPair | None = None, port: int = 0
    ) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "messages between hosts need ZeroMQ with CURVE, and this one has none: install the wheel of pyzmq"
            )
        self._most_bytes = max(most_part_bytes, MOST_HEAD_BYTES) + _ADDED_BYTES
        self._public, self._secret = keys or KeyPair(*zmq.curve_keypair())
        self._context = zmq.Context()
        super().__init__()
        #: Which rank has a key, as ZAP brings it.
        self._rank_of: dict[bytes, int] = {}
        self._asking: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        #: Whether who is unknown may become known: then it tries again instead of giving up.
        self.admits_later = False
        #: Whom a connection was cut to since `take_cut`.
        self._cut: set[int] = set()
        #: By monitor of a connection that is watched: its rank; and the monitors of those that are made now.
        self._watched: dict[Any, int] = {}
        self._made: set[Any] = set()
        #: Ranks to whom all watched connections are made: another set after each change.
        self.reached: frozenset[int] = frozenset()
        self._judging: zmq.Socket[bytes] | None = None
        self._serving: zmq.Socket[bytes] | None = None
        self._poller.register(self._wake, zmq.POLLIN)
        if interface is not None:
            try:
                self._listen(f"[{interface}]" if ":" in interface else interface, port)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(_cannot_listen(interface, port, error)) from error

    def _listen(self, host: str, port: int) -> None:
        """Raises: zmq.ZMQError."""
        self._judging = self._new_socket(zmq.REP)
        self._judging.bind("inproc://zeromq.zap.01")
        self._serving = serving = self._new_socket(zmq.ROUTER)
        for each in (self._judging, serving):
            self._poller.register(each, zmq.POLLIN)
        serving.curve_server = True
        serving.zap_domain = _DOMAIN
        serving.linger = _LINGER_MS
        serving.ipv6 = "[" in host
        if port:
            serving.bind(f"tcp://{host}:{port}")
        else:
            port = serving.bind_to_random_port(f"tcp://{host}")
        self.offer = {"address": f"tcp://{host}:{port}", "key": self._public.decode("ascii")}

    def admit(self, key: bytes, rank: int) -> None:
        """Let who has a public key connect, as a rank."""
        self._rank_of[z85.decode(key)] = rank

    def connect(self, offers: dict[int, dict[str, str]], *, cut_seconds: float | None = None) -> None:
        """Connect to other ranks, and let these connect. offers: of each, the `offer` of its carrier.

        cut_seconds: watch the connections: `take_cut` tells of one that was made and then cut, or whose rank is silent
        for so long, and `reached` of whom all are made to; None: do not.
        Raises: ConfigError where so many connections cannot be made.
        """
        self._context.set(zmq.MAX_SOCKETS, len(offers) + 64)
        try:
            for rank, offer in offers.items():
                self._asking[rank] = asking = self._new_asking(offer)
                if cut_seconds is not None:
                    self._watch(asking, rank, cut_seconds)
                    # Whatever Python's threads are busy with, ZeroMQ's own ask and answer.
                    asking.heartbeat_ivl = _ms(cut_seconds / 3)
                    asking.heartbeat_timeout = _ms(cut_seconds)
                asking.connect(offer["address"])
                self._poller.register(asking, zmq.POLLIN)
                self.admit(offer["key"].encode("ascii"), rank)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{len(offers):,} ranks of other hosts are more than this process can connect to: {error}; raise "
                '"ulimit -n", or give share="host"'
            ) from error

    def sender(self, rank: int, offer: dict[str, str], *, cut_seconds: float | None = None) -> ZmqSender:
        """Return another connection to a rank, by which any thread sends; `close` ends it, before the carrier is.

        cut_seconds: watch it, as `connect` does, but for a silent rank, which that of `connect` finds: large messages
        may keep this one from answering for long.
        """
        asking = self._new_asking(offer)
        if cut_seconds is not None:
            self._watch(asking, rank, cut_seconds)
        asking.connect(offer["address"])
        return ZmqSender(asking)

    def ask(self, rank: int, parts: Sequence[Any]) -> bool:
        """Send a message to a rank; return False where too many wait already."""
        return _sent(self._asking[rank], parts)

    def answer(self, who: Any, parts: Sequence[Any]) -> bool:
        """Send a message back to who sent one, as `receive` names it."""
        assert self._serving is not None, "only who listens is sent a message to answer"
        return _sent(self._serving, [who, *parts])

    def receive(self, seconds: float | None) -> list[tuple[int, Any, list[Any]]]:
        """Wait for messages, so long at most, or until `wake`. Returns: rank, whom to answer (None: nobody), parts."""
        found: list[tuple[int, Any, list[Any]]] = []
        ready = dict(self._poller.poll(None if seconds is None else max(0, int(1e3 * seconds) + 1)))
        if self._wake in ready:
            self._sleep_again()
        for monitor in self._watched:
            while monitor in ready and (event := _received(monitor)):
                self._note(monitor, parse_monitor_message([bytes(part) for part in event])["event"])
        judging, serving = self._judging, self._serving
        while judging is not None and judging in ready and (request := _received(judging)):
            judging.send_multipart(self._verdict([bytes(part) for part in request]))
        while serving is not None and serving in ready and (parts := _received(serving)):
            # The rank by its key: what the message says of itself counts for nothing.
            found.append((int(parts[1].get("User-Id")), bytes(parts[0]), [each.buffer for each in parts[1:]]))
        for rank, asking in self._asking.items():
            while asking in ready and (parts := _received(asking)):
                found.append((rank, None, [each.buffer for each in parts]))
        return found

    def take_cut(self) -> set[int]:
        """Return whom a connection was cut to since this was called last."""
        found, self._cut = self._cut, set()
        return found

    def _watch(self, asking: zmq.Socket[bytes], rank: int, seconds: float) -> None:
        """Notice when a connection is made or cut, and try again soon where it cannot be made. Before it connects."""
        # Who is not admitted yet gets no answer: it tries again before it is given up.
        asking.connect_timeout = asking.handshake_ivl = _ms(seconds / 2)
        asking.reconnect_ivl_max = min(max(_ms(seconds / 3), _RECONNECT_MS), _MOST_RECONNECT_MS)
        monitor = asking.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller.register(monitor, zmq.POLLIN)
        self._watched[monitor] = rank
        self.reached -= {rank}

    def _note(self, monitor: Any, event: int) -> None:
        """Act on a connection that was made or has ended: one that was never made, or was refused, is not cut."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._made.add(monitor)
        elif monitor in self._made:
            self._made.discard(monitor)
            self._cut.add(self._watched[monitor])
        missing = {rank for each, rank in self._watched.items() if each not in self._made}
        self.reached = frozenset(self._watched.values()) - missing

    def close(self) -> None:
        """End all connections. Once, when no thread uses it."""
        for each in self._asking.values():
            each.disable_monitor()
            each.close(0)
        self._context.destroy()
        os.close(self._wake)

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        """Return whether a key may connect, as ZAP says it."""
        version, number, domain, _, _, mechanism, *credentials = request
        rank = self._rank_of.get(credentials[0]) if credentials else None
        is_known = (domain, mechanism) == (_DOMAIN, b"CURVE") and rank is not None
        refusal = [b"300" if self.admits_later else b"400", b"not of this job", b""]
        verdict = [b"200", b"", str(rank).encode("ascii")] if is_known else refusal
        return [version, number, *verdict, b""]

    def _new_asking(self, offer: dict[str, str]) -> zmq.Socket[bytes]:
        """Return a socket that can connect to a rank. Raises: zmq.ZMQError."""
        made = self._new_socket(zmq.DEALER)
        made.curve_serverkey = offer["key"].encode("ascii")
        made.ipv6 = "[" in offer["address"]
        made.reconnect_ivl, made.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
        return made

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.curve_publickey, made.curve_secretkey = self._public, self._secret
        made.sndhwm = made.rcvhwm = _MOST_WAITING
        made.maxmsgsize = self._most_bytes
        made.linger = 0
        made.heartbeat_ivl, made.heartbeat_timeout = _HEARTBEAT_MS, _CUT_MS
        return made


class ZmqSender:
    """A connection by which any thread sends, and nothing comes back. Made by `ZmqCarrier.sender`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        #: Of the socket: a thread has it for as long as it sends.
        self._lock = threading.Lock()

    def send(self, parts: Sequence[Any]) -> bool:
        """Send a message; return False where too many wait already, or after `close`."""
        with self._lock:
            return not self._socket.closed and _sent(self._socket, parts)

    def close(self) -> None:
        """End the connection. Twice is harmless."""
        with self._lock:
            if not self._socket.closed:
                self._socket.disable_monitor()
                self._socket.close(0)


def has_key(address: str, key: bytes, own: KeyPair, seconds: float) -> bool | None:
    """Return whether who listens at an address proves that it has a key, and admits this one; None where none answers.

    address: "tcp://host:port". key: public. own: keys of who asks.
    """
    context = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.curve_serverkey, asking.curve_publickey, asking.curve_secretkey = key, *own
        asking.ipv6, asking.reconnect_ivl = "[" in address, _PROBE_AGAIN_MS
        monitor = asking.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        asking.connect(address)
        end, refused = time.monotonic() + seconds, 0
        # Refused twice: who is just ending cuts a connection, too.
        while refused < 2:
            if not monitor.poll(max(0, int(1e3 * (end - time.monotonic())))):
                return None
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            refused += 1
        return False
    finally:
        context.destroy(0)


def _ms(seconds: float) -> int:
    return int(1e3 * seconds) + 1


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
