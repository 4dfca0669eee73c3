"""Samples that ranks of other hosts keep: read by message, from who proves to be of the job, and never believed."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from tests.patience import patient, wait_until
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import ConfigError, DataError
from penstock.ranks import carrier_zmq
from penstock.ranks.carrier_zmq import ZmqCarrier, address_of_this_host
from penstock.ranks.peer_messages import (
    ANSWER,
    ASK,
    FOLLOW,
    MOST_HEAD_BYTES,
    MOST_IDS,
    NEWS,
    Message,
    answered,
    packed,
    unpacked,
)
from penstock.ranks.remote_peers import FarRank, RemotePeers

Ids = NDArray[np.int64]

SIZES = np.array([4, 0, 6, 8, 5])
NO_IDS = np.empty(0, np.int64)


def content(sample: int) -> bytes:
    return bytes(range(sample, sample + int(SIZES[sample])))


def checksum_of(data: NDArray[np.uint8]) -> int:
    return zlib.crc32(data.data)


class Shelf:
    """Keeps some samples. spoilt: of which of them the bytes are others than the checksum says."""

    def __init__(self, generation: int, kept: Sequence[int], spoilt: Sequence[int] = ()) -> None:
        self.generation, self._spoilt = generation, spoilt
        self._kept = self._news = np.array(kept, np.int64)
        self.is_closed = False

    def take_news(self) -> Ids:
        news, self._news = self._news, NO_IDS
        return news

    def look_up(self, ids: Ids, sizes: Ids) -> list[tuple[NDArray[np.uint8], int] | None]:
        return [self._one(sample) if sample in self._kept else None for sample in ids.tolist()]

    def _one(self, sample: int) -> tuple[NDArray[np.uint8], int]:
        data = np.frombuffer(content(sample), np.uint8)
        return (data[::-1].copy() if sample in self._spoilt else data), checksum_of(data)

    def close(self) -> None:
        self.is_closed = True


class Pair:
    """Rank 0 reads from rank 1, which keeps samples 0, 2 and 3, and has spoilt 3."""

    def __init__(self) -> None:
        self.carriers = [ZmqCarrier("127.0.0.1", int(SIZES.max())) for _ in range(2)]
        self.shelves = [Shelf(100, []), Shelf(101, [0, 2, 3], spoilt=[3])]
        self.peers = []
        for rank, carrier in enumerate(self.carriers):
            other = 1 - rank
            carrier.connect({other: self.carriers[other].offer})
            far = FarRank(100 + other, 3 if other == 1 else 0)
            self.peers.append(
                RemotePeers(carrier, self.shelves[rank], {other: far}, SIZES, checksum_of, math.inf)
            )

    def read(self, *samples: int) -> list[bytes | None]:
        found = self.peers[0].read(1, np.array(samples, np.int64))
        return [None if isinstance(each, DataError) else each.tobytes() for each in found]

    @contextlib.contextmanager
    def dealer(self, secret: tuple[bytes, bytes] | None) -> Iterator[tuple[zmq.Socket[bytes], Any]]:
        """A socket that connects to rank 1, with keys of its own, or none; and what tells what becomes of that."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            monitor = asking.get_monitor_socket()  # before it is refused
            asking.linger = 0
            if secret is not None:
                asking.curve_publickey, asking.curve_secretkey = secret
                asking.curve_serverkey = self.carriers[1].offer["key"].encode()
            asking.connect(self.carriers[1].offer["address"])
            try:
                yield asking, monitor
            finally:
                asking.disable_monitor()
                monitor.close()

    def keys_of_rank_0(self) -> tuple[bytes, bytes]:
        return self.carriers[0]._public, self.carriers[0]._secret


@pytest.fixture
def patient_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", patient(20))
    monkeypatch.setattr("penstock.policy.peer_patience.MOST_SECONDS", patient(20))


@pytest.fixture
def pair(patient_peers: None) -> Iterator[Pair]:
    made = Pair()
    yield made
    for each in made.peers:
        each.close()
        each.close()
    assert [shelf.is_closed for shelf in made.shelves] == [True, True]


def test_samples_come_as_they_are_kept_and_what_is_not_is_a_miss(pair: Pair) -> None:
    assert pair.read(2, 0, 2) == [content(2), content(0), content(2)]

    assert pair.read(0, 4, 3) == [content(0), None, None]
    assert pair.read(1) == [None]
    peers = pair.peers[0]
    assert (peers.absent, peers.wrong, peers.late, peers.misses) == (2, 1, 0, 3)


def test_news_say_what_is_kept_and_that_a_rank_has_left(pair: Pair) -> None:
    reader, other = pair.peers

    wait_until(lambda: reader.has_news)
    ((rank, ids),) = reader.take_news()
    assert rank == 1
    assert ids is not None
    assert ids.tolist() == [0, 2, 3]
    pair.shelves[1]._news = np.array([-2])  # its second tier gets no more
    pair.carriers[1].wake()
    wait_until(lambda: reader.has_news)
    assert [(rank, ids.tolist()) for rank, ids in reader.take_news() if ids is not None] == [(1, [-2])]
    other.close()
    assert pair.read(0) == [None]
    assert reader.take_news() == [(1, None)]


@pytest.mark.parametrize("has_keys", [True, False])
def test_who_is_not_of_the_job_is_not_answered(pair: Pair, has_keys: bool) -> None:
    with pair.dealer(zmq.curve_keypair() if has_keys else None) as (stranger, monitor):
        with contextlib.suppress(zmq.Again):  # where it is refused already
            stranger.send(packed(Message(ASK, 1, 101, np.array([0]))), zmq.DONTWAIT)
        refused = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_DISCONNECTED,
        )
        events: list[int] = []
        while not events or events[-1] not in refused:
            assert monitor.poll(int(1e3 * patient(20))), "nobody refused it"
            events.append(recv_monitor_message(monitor)["event"])
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    assert pair.read(0) == [content(0)]


def test_a_length_of_4_gib_from_who_has_no_key_ends_the_connection(pair: Pair) -> None:
    host, port = pair.carriers[1].offer["address"].removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((host, int(port)), timeout=patient(20)) as raw:
        raw.sendall(greeting + b"\x06" + struct.pack(">Q", 4 << 30))
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert pair.read(0) == [content(0)]


def test_what_a_rank_sends_that_is_malformed_or_oversized_is_passed_by(pair: Pair) -> None:
    good = packed(Message(ASK, 7, 101, np.array([2])))
    ids_of_nobody = np.array([-1, 5, 1 << 40, np.iinfo(np.int64).min])
    with pair.dealer(pair.keys_of_rank_0()) as (rank_0, _):
        for malformed in (
            b"",
            b"PNST",
            good[:-1],
            good + b"\0",
            b"XXXX" + good[4:],
            good[:4] + b"\xff" + good[5:],
            good[:6] + b"\xff" + good[7:],
            packed(Message(ASK, 7, 999, np.array([2]))),
            packed(Message(ASK, 7, 101, np.full(MOST_IDS + 1, 2))),
            packed(Message(FOLLOW, 1 << 63, 101, NO_IDS)),
            packed(Message(ANSWER, 7, 101, np.array([0, 4, 0]))),
        ):
            rank_0.send(malformed)
        rank_0.send_multipart([good, b"more", b""])
        rank_0.send(packed(Message(ASK, 8, 101, ids_of_nobody)))

        for number, sizes in ((7, [6]), (8, [-1] * 4)):
            answer = None
            while answer is None or answer.kind == NEWS:  # which it follows, whenever there are some
                assert rank_0.poll(int(1e3 * patient(20)))
                head, *parts = rank_0.recv_multipart()
                answer = unpacked(head)
                assert answer is not None
            assert (answer.kind, answer.number) == (ANSWER, number)
            assert answer.numbers[1::3].tolist() == sizes
            assert parts == ([content(2)] if number == 7 else [b""] * 4)

        monitor = rank_0.get_monitor_socket()
        rank_0.send(bytes(2 * MOST_HEAD_BYTES))
        events: list[int] = []
        while zmq.EVENT_DISCONNECTED not in events:
            assert monitor.poll(int(1e3 * patient(20))), "it was received"
            events.append(recv_monitor_message(monitor)["event"])
        rank_0.disable_monitor()
        monitor.close()
    assert pair.read(0) == [content(0)]


#: Two samples of equal sizes, and bytes that are of neither of them.
TWO, FORGED = np.array([0, 1]), np.frombuffer(b"forged", np.uint8)
EQUAL = np.full(5, FORGED.size)


def forged(number: int, generation: int = 101, ids: Ids = TWO, data: NDArray[np.uint8] = FORGED) -> list[Any]:
    """Return an answer whose checksums are right."""
    return answered(number, generation, ids, [(data, checksum_of(data))] * ids.size)


class Forger:
    """A carrier by which each request of rank 0 gets the messages that a test says, by their senders."""

    def __init__(self, answers: Callable[[int], list[tuple[int, list[Any]]]]) -> None:
        self._answers = answers
        self._messages: SimpleQueue[tuple[int, Any, list[Any]] | None] = SimpleQueue()

    def ask(self, rank: int, parts: Sequence[Any]) -> bool:
        message = unpacked(parts[0])
        assert message is not None
        if message.kind == ASK:
            for sender, answer in self._answers(message.number):
                self._messages.put((sender, None, answer))
        return True

    def answer(self, who: Any, parts: Sequence[Any]) -> bool:
        return True

    def receive(self, seconds: float | None) -> list[tuple[int, Any, list[Any]]]:
        with contextlib.suppress(Empty):
            message = self._messages.get(timeout=seconds)
            return [] if message is None else [message]
        return []

    def wake(self) -> None:
        self._messages.put(None)

    def close(self) -> None:
        pass


def read_from(
    answers: Callable[[int], list[tuple[int, list[Any]]]],
) -> tuple[list[bytes | None], int, list[Any]]:
    """Read two samples of rank 1, beside which there is rank 2; return them, how many were wrong, and the news."""
    ranks = {1: FarRank(101, 0), 2: FarRank(102, 0)}
    peers = RemotePeers(Forger(answers), Shelf(100, []), ranks, EQUAL, checksum_of, math.inf)
    try:
        found = peers.read(1, TWO)
        news = [(rank, ids if ids is None else ids.tolist()) for rank, ids in peers.take_news()]
    finally:
        peers.close()
    return [None if isinstance(each, DataError) else each.tobytes() for each in found], peers.wrong, news


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda number: forged(number, ids=TWO[::-1]), id="the other sample"),
        pytest.param(lambda number: forged(number, ids=TWO[:1]), id="too few"),
        pytest.param(lambda number: forged(number, data=FORGED[:-1]), id="another size"),
        pytest.param(lambda number: forged(number)[:-1], id="too few parts"),
    ],
)
def test_samples_of_other_ids_or_sizes_than_were_asked_for_are_misses(
    lie: Callable[[int], list[Any]], patient_peers: None
) -> None:
    assert read_from(lambda number: [(1, lie(number))]) == ([None, None], 2, [])


@pytest.mark.parametrize(
    "passed_by",
    [
        pytest.param(lambda number: (2, forged(number, 102)), id="of another rank"),
        pytest.param(lambda number: (3, forged(number, 103)), id="of no rank"),
        pytest.param(lambda number: (1, forged(number, 999)), id="of another generation"),
        pytest.param(
            lambda number: (1, [packed(Message(ANSWER, number, 101, np.arange(4)))]), id="no columns"
        ),
        pytest.param(
            lambda number: (1, [packed(Message(ANSWER, number, 101, np.zeros(3 * MOST_IDS + 3, np.int64)))]),
            id="oversized",
        ),
        pytest.param(
            lambda number: (1, [packed(Message(NEWS, 0, 101, np.array([5, 1 << 40])))]), id="no samples"
        ),
    ],
)
def test_an_answer_that_is_not_of_who_was_asked_or_malformed_is_passed_by_until_the_right_one_comes(
    passed_by: Callable[[int], tuple[int, list[Any]]], patient_peers: None
) -> None:
    good = np.frombuffer(b"really", np.uint8)

    found, wrong, news = read_from(lambda number: [passed_by(number), (1, forged(number, data=good))])

    assert (found, wrong) == ([good.tobytes()] * 2, 0)
    assert [ids for _, ids in news if ids] == []


def test_the_address_of_a_host_is_asked_for_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(**environment: Any) -> str:
        for name in (carrier_zmq.INTERFACE, "MASTER_ADDR"):
            monkeypatch.setenv(name, environment.get(name, ""))
        return address_of_this_host()

    assert address(PENSTOCK_INTERFACE="203.0.113.7", MASTER_ADDR="127.0.0.1") == "203.0.113.7"
    assert address(PENSTOCK_INTERFACE="lo") == "127.0.0.1"
    assert address(MASTER_ADDR="127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no network interface"):
        address(PENSTOCK_INTERFACE="no-such-0")
    with pytest.raises(ConfigError, match="PENSTOCK_INTERFACE"):
        ZmqCarrier("203.0.113.7", 1)
