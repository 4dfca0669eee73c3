"""What a decode server answers, and whom: the messages, without pictures."""

from __future__ import annotations

import contextlib
import math
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from tests.patience import patient, wait_until

from penstock.errors import ConfigError, DataError
from penstock.policy.peer_patience import PeerPatience
from penstock.ranks.carrier_zmq import KeyPair, ZmqCarrier
from penstock.ranks.decode_access import KEY, SERVER, TRAINING, address_of
from penstock.ranks.decode_server import DecodeServer, digest_of
from penstock.ranks.peer_messages import ASK, GREET, MOST_HEAD_BYTES, NO_IDS, Ids, Message, packed
from penstock.ranks.remote_peers import FarRank, RemotePeers

SECRET = bytes(range(32))
EACH_BYTES = 6


def checksum_of(data: NDArray[np.uint8]) -> int:
    return zlib.crc32(data.data)


class Maker:
    """Makes three numbers of each id below 100, of two axes."""

    each_bytes = EACH_BYTES

    def make(self, ids: Ids) -> list[NDArray[np.uint8] | None]:
        return [np.full((2, 3), each, np.uint8) if 0 <= each < 100 else None for each in ids.tolist()]


class Nothing:
    generation = 0

    def take_news(self) -> Ids:
        return NO_IDS

    def look_up(self, ids: Ids, sizes: Ids) -> list[None]:
        return [None] * ids.size

    def close(self) -> None:
        pass


def accept(description: bytes) -> Maker:
    if description != b"numbers":
        raise ConfigError("it makes numbers alone")
    return Maker()


@contextlib.contextmanager
def running(port: int = 0) -> Iterator[tuple[DecodeServer, ZmqCarrier]]:
    carrier = ZmqCarrier("127.0.0.1", MOST_HEAD_BYTES, keys=KeyPair.of(SECRET, SERVER), port=port)
    carrier.admit(KeyPair.of(SECRET, TRAINING).public, 0)
    server = DecodeServer(carrier, accept, checksum_of, threads=2)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server, carrier
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def asking(
    offer: dict[str, str], description: bytes = b"numbers", secret: bytes = SECRET
) -> Iterator[RemotePeers]:
    carrier = ZmqCarrier(None, EACH_BYTES, keys=KeyPair.of(secret, TRAINING))
    carrier.connect({1: offer})
    generation = digest_of(description)
    greeting = [packed(Message(GREET, 0, generation, NO_IDS)), description]
    sizes = np.broadcast_to(np.int64(EACH_BYTES), (1 << 40,))
    peers = RemotePeers(
        carrier, Nothing(), {1: FarRank(generation, 0, greeting)}, sizes, checksum_of, math.inf
    )
    try:
        yield peers
    finally:
        peers.close()


@pytest.fixture
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", patient(20))
    monkeypatch.setattr("penstock.policy.peer_patience.MOST_SECONDS", patient(20))


def read(peers: RemotePeers, *ids: int) -> list[list[int] | None]:
    found = peers.read(1, np.array(ids, np.int64))
    return [None if isinstance(each, DataError) else each.tolist() for each in found]


@pytest.mark.usefixtures("nobody_is_late")
def test_what_is_described_is_made_and_what_cannot_be_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the greeting reads at once: the server has been heard of by then."""
    is_there, heard = threading.Event(), PeerPatience.heard
    was_greeted: list[bool] = []

    def note(patience: PeerPatience) -> bool:
        assert is_there.wait(patient(20))
        was_greeted.append(peers.greeted.is_set())
        return heard(patience)

    monkeypatch.setattr(PeerPatience, "heard", note)
    with running() as (_, carrier), asking(carrier.offer) as peers:
        is_there.set()
        assert peers.greeted.wait(patient(20))
        assert was_greeted[0] is False
        assert read(peers, 7, 500, 0, 1 << 39) == [[7] * 6, None, [0] * 6, None]
        assert (peers.absent, peers.wrong, peers.late) == (2, 0, 0)


def test_a_server_that_refuses_says_why_and_is_asked_nothing() -> None:
    with running() as (server, carrier), asking(carrier.offer, b"letters") as peers:
        assert peers.greeted.wait(patient(20))
        assert peers.refused == {1: "it makes numbers alone"}
        assert read(peers, 1) == [None]
        assert peers.is_away(1)
        assert server.made == 0


def test_who_has_another_key_hears_nothing() -> None:
    with running() as (server, carrier), asking(carrier.offer, secret=bytes(32)) as stranger:
        with asking(carrier.offer) as peers:
            assert peers.greeted.wait(patient(20))
        assert not stranger.greeted.is_set()
        assert read(stranger, 1) == [None]
        assert server.made == 0


@pytest.mark.usefixtures("nobody_is_late")
def test_malformed_oversized_and_undescribed_messages_are_passed_by() -> None:
    generation = digest_of(b"numbers")
    keys = KeyPair.of(SECRET, TRAINING)
    with running() as (server, carrier), zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.curve_publickey, raw.curve_secretkey = keys
        raw.curve_serverkey = carrier.offer["key"].encode()
        raw.connect(carrier.offer["address"])
        for parts in (
            [b""],
            [b"PNST"],
            [packed(Message(ASK, 3, generation + 2, np.array([1])))],  # that nobody described
            [packed(Message(GREET, 0, generation + 1, NO_IDS)), b"numbers"],  # of another digest
            [packed(Message(GREET, 0, generation, NO_IDS))],
            [bytes(2 * MOST_HEAD_BYTES)],  # ends the connection
        ):
            raw.send_multipart(parts)
        with asking(carrier.offer) as peers:
            assert peers.greeted.wait(patient(20))
            assert read(peers, 5) == [[5] * 6]
        assert not raw.poll(0)
        assert server.made == 1


def test_a_server_that_was_started_anew_is_described_to_again_and_used_again() -> None:
    with running() as (_, first):
        address = first.offer["address"]
        with asking(first.offer) as peers:
            assert peers.greeted.wait(patient(20))
            wait_until(lambda: read(peers, 3) == [[3] * 6])
            first_away = peers.is_away(1)
            assert not first_away
    # Its context has ended with it, so that the port is free.
    with running(int(address.rsplit(":", 1)[1])) as (again, carrier), asking(carrier.offer) as peers:
        assert peers.greeted.wait(patient(20))
        again._known.clear()  # as another process begins
        wait_until(lambda: read(peers, 4) == [[4] * 6])
        assert again.made >= 1


def test_a_secret_is_made_once_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "config" / "key"

    assert KEY.make(path)
    first = KEY.read(path)
    assert not KEY.make(path)

    assert KEY.read(path) == first
    assert len(first) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read or write it"):
        KEY.read(path)
    path.chmod(0o600)
    path.write_text("letters")
    with pytest.raises(ConfigError, match="has no key of decode servers"):
        KEY.read(path)
    with pytest.raises(ConfigError, match="is not there"):
        KEY.read(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node7", "node7:7447"),
        ("10.0.0.7:80", "10.0.0.7:80"),
        ("[fe80::1%eth0]:9", "[fe80::1%eth0]:9"),
        ("[::1]", "[::1]:7447"),
    ],
)
def test_addresses_are_read_as_they_are_written(text: str, said: str) -> None:
    assert str(address_of(text)) == said


@pytest.mark.parametrize("text", ["", "::1", "node7:", "node7:0", "node7:99999", "a b", "tcp://node7:1", 7])
def test_what_is_no_address_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="no address of a decode server"):
        address_of(text)
