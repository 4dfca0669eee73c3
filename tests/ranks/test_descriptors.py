"""Descriptors reach the ranks of a host, and nobody else's are taken."""

from __future__ import annotations

import os
import socket

import pytest

from penstock.local_sockets import Peer
from penstock.ranks.descriptors import DescriptorExchange, host_id


def test_ranks_of_a_host_get_each_others_descriptors_for_reading_alone() -> None:
    with DescriptorExchange() as zero, DescriptorExchange() as one:
        assert zero.offer["host"] == one.offer["host"] == host_id()
        mine = os.memfd_create("given", os.MFD_CLOEXEC)
        os.write(mine, b"bytes")
        zero.send(one.offer, 0, [mine, mine])
        os.close(mine)

        received = one.receive(2, 2)
        assert list(received) == [0]
        first, second = received[0]
        assert os.pread(first, 10, 0) == os.pread(second, 10, 0) == b"bytes"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(first, b"x")
        for each in received[0]:
            os.close(each)
        assert one.receive(2, 2) == {}


def test_strangers_malformed_messages_and_wrong_numbers_are_left_out() -> None:
    with DescriptorExchange() as mine, DescriptorExchange() as other:
        descriptor = os.memfd_create("given", os.MFD_CLOEXEC)
        wrong = mine.offer | {"secret": "00" * 16}
        other.send(wrong, 1, [descriptor, descriptor])
        other.send(mine.offer, 2, [descriptor])
        other.send(mine.offer, 3, [descriptor] * 3)
        other.send(mine.offer | {"address": "penstock-nobody"}, 4, [descriptor])
        connections = []
        for message in (b"", b"x", b"x" * 100_000):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections.append(connection)
            connection.connect("\0" + mine.offer["address"])
            if message:
                connection.send(message)
        other.send(mine.offer, 5, [descriptor, descriptor])
        os.close(descriptor)

        received = mine.receive(6, 2)

        assert list(received) == [5]
        for each in received[5]:
            os.close(each)
        for connection in connections:
            connection.close()


def test_another_user_is_a_stranger_even_if_it_knows_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with DescriptorExchange() as mine, DescriptorExchange() as other:
        descriptor = os.memfd_create("given", os.MFD_CLOEXEC)
        other.send(mine.offer, 1, [descriptor])
        os.close(descriptor)
        stranger = Peer(os.getpid(), os.geteuid() + 1, os.getegid())
        monkeypatch.setattr("penstock.ranks.descriptors.peer_of", lambda connection: stranger)

        assert mine.receive(2, 1) == {}
