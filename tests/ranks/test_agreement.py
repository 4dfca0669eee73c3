"""After which step ranks stop, whatever order signals, steps and messages come in."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ranks.agreement import Messages, StopAgreement


class Job:
    """All ranks, and the messages between them, each pair's in order."""

    def __init__(self, size: int) -> None:
        self.ranks = [StopAgreement(rank, size) for rank in range(size)]
        self.post: dict[tuple[int, int], deque[dict[str, Any]]] = {}
        self.stopped: dict[int, int] = {}  # rank: the call at which it was told to stop

    def send(self, sender: int, messages: Messages) -> None:
        for to, message in messages:
            self.post.setdefault((sender, to), deque()).append(message)

    def call(self, rank: int) -> None:
        if rank not in self.stopped and not self.ranks[rank].is_held and self.ranks[rank].pass_call():
            self.stopped[rank] = self.ranks[rank].calls

    def deliver(self, which: int) -> None:
        full = [pair for pair, messages in self.post.items() if messages]
        if full:
            sender, to = full[which % len(full)]
            self.send(to, self.ranks[to].receive(sender, self.post[sender, to].popleft()))

    def settle(self) -> None:
        while any(self.post.values()):
            self.deliver(0)


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["call", "call", "deliver", "deliver", "tell"]), st.integers(0, 99)),
        max_size=120,
    ),
    st.integers(0, 4),
)
def test_all_ranks_stop_at_the_same_call_however_far_apart_they_are(
    size: int, events: list[tuple[str, int]], told: int
) -> None:
    """Nothing holds the ranks together here but the agreement: one may be a hundred steps ahead of another."""
    job = Job(size)
    for event, number in events:
        if event == "call":
            job.call(number % size)
        elif event == "tell":
            job.send(number % size, job.ranks[number % size].tell(15))
        else:
            job.deliver(number)
    job.send(told % size, job.ranks[told % size].tell(15))

    job.settle()
    before = [rank.calls for rank in job.ranks if rank.rank not in job.stopped]
    for rank in range(size):
        for _ in range(200):
            job.call(rank)

    assert len(set(job.stopped.values())) == 1
    assert len(job.stopped) == size
    assert all(calls < job.stopped[0] for calls in before)
    assert {rank.signal for rank in job.ranks} == {15}
    assert not any(rank.awaits_others for rank in job.ranks)


def test_training_is_not_held_before_anybody_is_told() -> None:
    job = Job(3)

    for rank in range(3):
        for _ in range(5):
            assert not job.ranks[rank].pass_call()

    assert not any(job.post.values())
    assert not any(rank.is_held for rank in job.ranks)


def test_a_rank_stops_at_the_call_after_the_latest_that_any_has_passed() -> None:
    job = Job(2)
    for _ in range(7):
        job.call(1)
    job.call(0)

    job.send(0, job.ranks[0].tell(15))
    assert job.ranks[0].is_held
    assert not job.ranks[1].is_held  # it does not know yet
    job.call(1)
    job.settle()

    assert [rank.stop_call for rank in job.ranks] == [9, 9]


def test_one_rank_stops_at_its_next_call() -> None:
    alone = StopAgreement(0, 1)
    alone.pass_call()

    assert alone.tell(15) == []
    assert alone.pass_call()


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_loop_that_ended_is_not_waited_for_and_no_stop_is_agreed_on(leaver: int) -> None:
    """The signal comes while the first rank is through and the others are in their last step."""
    job = Job(3)
    job.send(leaver, job.ranks[leaver].leave())
    other = (leaver + 1) % 3
    job.send(other, job.ranks[other].tell(15))

    job.settle()

    for rank in job.ranks:
        assert not rank.is_held
        assert not rank.awaits_others
        assert rank.failure is None
        if rank.rank != leaver:
            assert not rank.pass_call()


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_failed_is_told_to_all(leaver: int) -> None:
    job = Job(3)
    job.send(leaver, job.ranks[leaver].leave("rank left the loop: ValueError"))

    job.settle()

    assert all(rank.failure == "rank left the loop: ValueError" for rank in job.ranks if rank.rank != leaver)


def test_a_rank_that_does_not_answer_is_missing_on_rank_0_and_given_up_by_all() -> None:
    job = Job(3)
    job.send(1, job.ranks[1].tell(15))
    while any(job.post.values()):
        for (sender, to), messages in list(job.post.items()):
            while messages:
                message = messages.popleft()
                if to != 2:
                    job.send(to, job.ranks[to].receive(sender, message))

    assert job.ranks[0].missing == [2]
    assert job.ranks[1].missing == [0]  # it cannot know more
    job.send(0, job.ranks[0].give_up("rank 2 of 3 did not answer"))
    job.settle()

    assert [rank.failure for rank in job.ranks] == ["rank 2 of 3 did not answer"] * 3


def test_rank_0_that_does_not_answer_is_given_up_by_the_others() -> None:
    job = Job(2)
    job.ranks[1].tell(15)

    assert job.ranks[1].missing == [0]
    job.send(1, job.ranks[1].give_up("rank 0 of 2 did not answer"))
    assert not job.ranks[1].awaits_others
    job.settle()

    assert job.ranks[0].failure == "rank 0 of 2 did not answer"
