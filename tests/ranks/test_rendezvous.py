"""A name at which processes find what the first of them made, whoever of them ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import ConfigError
from penstock.local_sockets import Peer
from penstock.ranks import rendezvous
from penstock.ranks.rendezvous import Rendezvous


def identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


def maker(made: list[int]) -> Callable[[], list[int]]:
    def make() -> list[int]:
        made.append(os.memfd_create("test"))
        return made[-1:]

    return make


def test_who_comes_later_gets_what_the_first_made_as_long_as_one_of_them_is_there() -> None:
    name, made = secrets.token_hex(16), list[int]()
    first = Rendezvous(name, maker(made))
    second = Rendezvous(name, maker(made))
    first.close()
    first.close()
    third = Rendezvous(name, maker(made))
    second.close()
    fourth = Rendezvous(name, maker(made))
    those = [first, second, third, fourth]
    assert [each.is_first for each in those] == [True, False, False, False]
    assert {identity(each.descriptors[0]) for each in those} == {identity(made[0])}
    third.close()
    fourth.close()

    # Nobody is left: the next one begins anew.
    fifth = Rendezvous(name, maker(made))
    assert fifth.is_first
    fifth.close()
    for each in [*those[1:], fifth]:
        os.close(each.descriptors[0])
    os.close(made[0])


def test_processes_that_begin_at_once_agree_on_what_one_of_them_makes() -> None:
    for _ in range(10):
        name, made = secrets.token_hex(16), list[int]()
        with ThreadPoolExecutor(8) as pool:
            those = list(pool.map(lambda _, name=name, made=made: Rendezvous(name, maker(made)), range(8)))
        assert [each.is_first for each in those].count(True) == len(made) == 1
        assert {identity(each.descriptors[0]) for each in those} == {identity(made[0])}
        for each in those:
            each.close()
            os.close(each.descriptors[0])


def test_another_users_process_is_none_and_what_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, made = secrets.token_hex(16), list[int]()
    first = Rendezvous(name, maker(made))
    monkeypatch.setattr(rendezvous, "peer_of", lambda connected: Peer(pid=1, uid=-1, gid=-1))
    second = Rendezvous(name, maker(made))
    assert second.is_first
    monkeypatch.setattr(rendezvous, "_MOST", 2)
    with pytest.raises(ConfigError, match="2 processes have penstock-"):
        Rendezvous(name, maker(made))
    for each in (first, second):
        each.close()
        os.close(each.descriptors[0])

    with pytest.raises(ConfigError, match="no memory"):
        Rendezvous(name, raises(ConfigError("no memory")))


def raises(error: Exception) -> Callable[[], list[int]]:
    def make() -> list[int]:
        raise error

    return make
