"""The loop that calls MPI: what ends it, and when it sleeps. MPI and the system's calls are the test's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from penstock.ranks.mpi_calls import (
    CALL_MPI,
    CREDIT,
    EVENT_NS,
    LEAST_PAUSE_NS,
    MOST_COPYING_PAUSE_NS,
    NOTHING,
    PAUSE,
    SHORTEST,
    SOMETHING,
    STALLED_NS,
    WOKEN,
    new_pace,
    next_pause_ns,
)

_GET_STATUS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p)
_IPROBE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
)
_CLOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
_PPOLL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,
)
SOURCE, TAG, COMMUNICATOR, WAKE = -2, 7, -(1 << 40), 5
_CALL_NS = 1_000


class World:
    """MPI, whose calls take a microsecond, a clock, and sleeps, which are as long as they are asked for."""

    def __init__(self) -> None:
        self.now = 10**12
        #: What calls that copy take longer, by turns; how long sleeps were; handles and communicators that were named.
        self.copies: Callable[[int], int] = lambda now: 0
        self.sleeps: list[int] = []
        self.asked: list[int] = []
        self.ended: set[int] = set()
        self.failing: set[int] = set()
        self.arrives_at = self.wakes_at = float("inf")
        self._functions = [
            _GET_STATUS(self._get_status), _IPROBE(self._iprobe), _CLOCK(self._clock), _PPOLL(self._ppoll)
        ]  # fmt: skip
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self._functions]
        self.facts = np.array([*addresses, SOURCE, TAG, COMMUNICATOR, WAKE], np.int64)
        self.pace = new_pace()

    def _get_status(self, request: int, flag: ctypes.Array[ctypes.c_int], status: int) -> int:
        self.asked.append(request)
        self.now += _CALL_NS + self.copies(self.now)
        flag[0] = request in self.ended
        return 15 if request in self.failing else 0

    def _iprobe(self, source: int, tag: int, at: int, flag: ctypes.Array[ctypes.c_int], status: int) -> int:
        assert (source, tag, at) == (SOURCE, TAG, COMMUNICATOR)
        self.now += _CALL_NS
        flag[0] = self.now >= self.arrives_at
        return 0

    def _clock(self, which: int, words: ctypes.Array[ctypes.c_int64]) -> int:
        assert which == 1
        words[0], words[1] = divmod(self.now, 10**9)
        return 0

    def _ppoll(
        self,
        polled: ctypes.Array[ctypes.c_int],
        count: int,
        words: ctypes.Array[ctypes.c_int64],
        mask: int | None,
    ) -> int:
        assert (polled[0], polled[1], count, mask) == (WAKE, 1, 1, None)
        seconds = 10**9 * words[0] + words[1]
        if seconds:
            self.sleeps.append(seconds)
        self.now = min(self.now + seconds, max(self.now, self.wakes_at))  # type: ignore[assignment]
        return int(self.now >= self.wakes_at)

    def run(self, *requests: int, event_ns: int | None = None, most_ns: int = 5_000_000) -> int:
        began, handles = self.now, np.array(requests, np.int64)
        event = began if event_ns is None else event_ns
        found: int = CALL_MPI.wait()(self.facts, self.pace, handles, event, began + most_ns)
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_that_ends_or_fails_and_a_message_end_the_calls(world: World) -> None:
    world.ended = {-3}
    assert world.run(1, 2, -3) == SOMETHING
    assert world.asked == [1, 2, -3]

    world.ended, world.failing = set(), {2}
    assert world.run(1, 2) == SOMETHING

    world.failing, world.arrives_at = set(), world.now + 50_000
    assert world.run(1) == SOMETHING
    assert world.now < world.arrives_at + 5_000
    world.arrives_at = world.now + 50_000
    assert world.run() == SOMETHING
    assert world.sleeps == []


def test_who_wakes_it_is_heard_while_it_calls_and_while_it_sleeps(world: World) -> None:
    world.wakes_at = world.now + 50_000
    assert world.run(1) == WOKEN
    assert world.now < world.wakes_at + 30_000
    assert world.sleeps == []

    world.pace[PAUSE], world.wakes_at = 900_000, world.now + 400_000
    assert world.run(event_ns=0) == WOKEN
    assert world.now == world.wakes_at


def test_pauses_begin_some_time_after_the_last_event_and_grow_while_nothing_is_copied(world: World) -> None:
    event = world.now
    assert world.run(1, event_ns=event, most_ns=EVENT_NS - 30_000) == NOTHING
    assert world.sleeps == []

    assert world.run(1, event_ns=event) == NOTHING
    *sleeps, _ = world.sleeps
    assert sleeps[0] < 2 * LEAST_PAUSE_NS
    assert sleeps == sorted(sleeps)
    assert sleeps[-1] > 20 * LEAST_PAUSE_NS
    assert sum(world.sleeps) > 0.8 * 5_000_000


@pytest.mark.parametrize("is_fast", [False, True])
def test_pauses_stay_short_where_much_is_copied_and_within_what_buffers_hold_where_little_is(
    world: World, is_fast: bool
) -> None:
    """A call copies what has come since the last one, for half of the time since then, or 5 % of it."""
    copied_to, event = world.now, world.now - EVENT_NS

    def copies(now: int) -> int:
        nonlocal copied_to
        nanoseconds, copied_to = int((0.5 if is_fast else 0.05) * (now - copied_to)), now
        return nanoseconds

    world.copies = copies
    for _ in range(4):
        assert world.run(1, event_ns=event) == NOTHING

    if is_fast:
        assert max(world.sleeps[1:]) < 2 * LEAST_PAUSE_NS
    else:
        assert 200_000 < max(world.sleeps) < 400_000
        assert sum(world.sleeps) > 0.9 * 4 * 5_000_000


def test_what_was_copied_is_followed_by_calls_for_half_as_long(world: World) -> None:
    copied = [60_000]
    world.copies = lambda now: copied.pop(0) if copied else 0
    world.pace[SHORTEST], event = 2 * _CALL_NS, world.now - EVENT_NS

    assert world.run(1, event_ns=event, most_ns=80_000) == NOTHING
    assert world.sleeps == []
    assert world.pace[CREDIT] > 0
    assert world.run(1, event_ns=event, most_ns=80_000) == NOTHING
    assert len(world.sleeps) > 0


def test_a_request_that_never_ends_is_called_between_sleeps_though_its_calls_take_longer_than_those_without(
    world: World,
) -> None:
    """As where the other rank has stopped: what a call takes longer with a request looks like copying."""
    assert world.run() == NOTHING
    world.copies, event = lambda now: 700, world.now
    world.sleeps.clear()
    world.pace[PAUSE] = LEAST_PAUSE_NS
    assert world.run(1, event_ns=event) == NOTHING
    assert world.sleeps == []

    world.now = event + STALLED_NS
    for _ in range(4):
        assert world.run(1, event_ns=event) == NOTHING

    assert world.sleeps[0] < 2 * LEAST_PAUSE_NS
    assert max(world.sleeps) == MOST_COPYING_PAUSE_NS
    assert sum(world.sleeps) > 0.8 * 4 * 5_000_000


def test_pauses_are_short_again_once_a_stalled_message_goes_on(world: World) -> None:
    assert world.run(1, event_ns=0, most_ns=0) == NOTHING
    world.pace[PAUSE], world.copies = 20_000_000, lambda now: 3_000_000

    assert world.run(1, event_ns=0, most_ns=0) == NOTHING

    assert world.pace[PAUSE] <= MOST_COPYING_PAUSE_NS


def test_an_idle_rank_looks_40_times_a_second_in_the_end() -> None:
    pause, elapsed = LEAST_PAUSE_NS, 0
    for _ in range(100):
        elapsed, pause = elapsed + pause, next_pause_ns(pause, 0, False)
        assert pause <= elapsed / 8 + LEAST_PAUSE_NS
    assert pause == 25_000_000
