"""Messages in a store of torch.distributed, within one process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.for_each import for_each
from tests.forking import Forks
from tests.ranks.jobs import torchrun_job, wait_for
from torch._C._distributed_c10d import TCPStore

from penstock.errors import RankError, WaitTimeout
from penstock.ranks import transport_store
from penstock.ranks.transport_store import PIECE_BYTES, StoreTransport, name_of_life
from penstock.ranks.transport_torch import torch_transport


def open_store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module", autouse=True)
def _event_loop() -> None:
    """Let PyTorch open the pipes of its event loop, which live as long as the process."""
    open_store()


@for_each("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 9_500_000])
def test_messages_of_any_length_arrive_in_order_and_leave_nothing_in_the_store(nbytes: int) -> None:
    """A TCPStore breaks the connection on a value above 8 MiB."""
    store = open_store()
    keys = store.num_keys()
    sender, receiver = StoreTransport(store, 1, 3), StoreTransport(store, 2, 3)
    message = (b"0123456789abcdef" * (nbytes // 16 + 1))[:nbytes]

    sender.send(2, message)
    sender.send(2, b"second")

    assert sender.untaken() == [2]
    assert receiver.receive(0) is None
    assert receiver.receive(1) == message
    assert receiver.receive(1) == b"second"
    assert receiver.receive(1) is None
    assert sender.untaken() == []
    assert store.num_keys() == keys


def test_a_long_message_to_many_ranks_is_stored_once_until_the_last_has_it() -> None:
    """The listing of a million files, for 64 ranks: the store's process must not hold it 63 times."""
    store = open_store()
    keys = store.num_keys()
    sender, *receivers = [StoreTransport(store, rank, 4) for rank in range(4)]
    message = b"0123456789abcdef" * (PIECE_BYTES // 8)
    sent: list[int] = []

    for rank in (1, 2, 3):
        sender.send(3, b"I am alive")
        sender.send(rank, message)
        sent.append(store.num_keys() - keys)
    received = [receiver.receive(0) for receiver in receivers[:2]]

    assert sent == [4, 6, 8]  # two pieces, and two messages each time
    assert received == [message] * 2
    sender.send(1, b"another")  # no more will get the long one; the third is still to take it
    assert message in [receivers[2].receive(0) for _ in range(4)]
    for receiver in receivers:
        while receiver.receive(0) is not None:
            pass
    assert store.num_keys() == keys


def test_a_store_that_is_gone_is_told_in_words_of_ours() -> None:
    """Rank 0, whose process keeps it, was killed."""
    server = open_store()
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    transport = StoreTransport(client, 1, 2)
    transport.send(0, b"while it is there")
    del server

    # In this order: the first message to a closed connection is lost without a word, and missed by who waits for it.
    for use in (lambda: transport.receive(0), lambda: transport.send(0, b"x"), transport.untaken):
        with pytest.raises(RankError, match=r"who keeps the store cannot be reached"):
            use()


class FrozenStore:
    """A store in a process that hangs, such as one on a host whose network was cut."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.thawed.wait(30)
        return False

    def clone(self) -> FrozenStore:
        self.thawed.wait(30)
        return self


def test_a_store_that_hangs_is_given_up_and_used_again_when_it_answers() -> None:
    store = FrozenStore()
    transport = StoreTransport(store, 1, 2, timeout_seconds=0.05)

    for _ in range(2):  # the second time at once: it is still at the first
        with pytest.raises(WaitTimeout, match=r"who keeps the store did not answer within 0\.05 s"):
            transport.receive(0)
    store.thawed.set()
    assert transport._clerk._idle.wait(30)
    transport._clerk._timeout_seconds = 30  # of a busy machine, too, the answer comes

    assert transport.receive(0) is None


def test_a_store_that_hangs_while_ranks_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits for half an hour until a store answers another connection."""
    store = FrozenStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)

    with pytest.raises(
        WaitTimeout, match=r"keeps the store of torch\.distributed, did not answer within 0\.05 s"
    ):
        torch_transport(timeout_seconds=0.05)
    store.thawed.set()


def test_ranks_of_each_life_of_a_job_meet_under_a_name_of_their_own_whatever_earlier_ones_left() -> None:
    """As under torchrun, which keeps a store for all that it starts, also where the number of ranks changes."""
    store = open_store()
    with pytest.raises(WaitTimeout, match=r"^rank 0 of 2 did not come within 0\.05 s"):
        name_of_life(store, 1, 2, keeper="the store", timeout_seconds=0.05)

    def life(size: int) -> set[str]:
        with ThreadPoolExecutor(size) as pool:
            return set(
                pool.map(lambda rank: name_of_life(store, rank, size, keeper="the store"), range(size))
            )

    lives = [life(size) for size in (2, 3, 2)]

    assert [len(names) for names in lives] == [1, 1, 1]
    assert len(set.union(*lives)) == 3
    with pytest.raises(WaitTimeout, match=r"^ranks 1, 2 of 3 did not come"):
        name_of_life(store, 0, 3, keeper="the store", timeout_seconds=0.05)


#: A rank that says what it hears of all.
JOINED = """
import os, sys
from pathlib import Path

import torch.distributed as distributed

from penstock.ranks import ranks_of_this_job

distributed.init_process_group("gloo")
ranks = ranks_of_this_job(timeout_seconds=20)
Path(sys.argv[1], f"heard-{ranks.rank}").write_text(str(ranks.all_gather("who is there", ranks.rank)))
ranks.all_gather("the end", None)
"""


@pytest.mark.slow
def test_ranks_whose_agents_have_restarted_them_unequally_often_hear_of_each_other(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a host joins a job of torchrun that has been restarted before."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (script := tmp_path / "rank.py").write_text(JOINED)
    job = torchrun_job(str(tmp_path), size=2)
    restarts = [f"TORCHELASTIC_RESTART_COUNT={2 * rank}" for rank in range(2)]

    wait_for(forks.start(script, [[[[count, *each] for count, each in zip(restarts, job, strict=True)]]]))

    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == ["[0, 1]", "[0, 1]"]


def test_the_last_messages_of_rank_0_are_kept_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 raises what all ranks should raise, and its process ends: the store, and the answer, must not yet."""
    store = open_store()
    first, second = StoreTransport(store, 0, 2), StoreTransport(store, 1, 2)
    first.send(1, b"the commit failed")
    looks = []

    def read_at_the_third_look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            assert second.receive(0) == b"the commit failed"

    monkeypatch.setattr(time, "sleep", read_at_the_third_look)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    transport_store._wait_until_taken(first, store)

    assert len(looks) == 3


def test_messages_to_a_rank_that_is_gone_do_not_keep_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    first = StoreTransport(store, 0, 2)
    first.send(1, b"the commit failed")
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", pass_time)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    transport_store._wait_until_taken(first, store)

    assert now[0] == pytest.approx(transport_store.LINGER_SECONDS, abs=0.06)
