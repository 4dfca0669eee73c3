"""A cap on writing: the rate it keeps, in virtual time, and how its waits end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.tiers.remote import RemoteTier
from penstock.checkpoint.tiers.throttle import Cap, CappedWriter, Pacer
from penstock.errors import ConfigError, DataError


class VirtualTime:
    """A clock that its waits move, and a stop that is never set."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.seconds

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        self.seconds += timeout
        return False


# -- The pacer -----------------------------------------------------------------------------------------


def test_bytes_wait_for_as_long_as_they_take_at_the_rate() -> None:
    pacer = Pacer(100.0, burst_seconds=0)

    assert pacer.take(50, now_seconds=10.0) == pytest.approx(0.5)
    assert pacer.take(50, now_seconds=10.0) == pytest.approx(1.0)
    assert pacer.take(50, now_seconds=11.25) == pytest.approx(0.5)


def test_time_that_was_not_used_is_caught_up_to_the_burst_alone() -> None:
    pacer = Pacer(100.0, burst_seconds=2.0)
    pacer.take(0, now_seconds=0.0)

    assert pacer.take(200, now_seconds=1_000.0) == 0
    assert pacer.take(100, now_seconds=1_000.0) == pytest.approx(1.0)


def test_a_rate_without_end_never_waits() -> None:
    pacer = Pacer(math.inf)

    assert [pacer.take(10**15, 0.0) for _ in range(3)] == [0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 10)), min_size=1, max_size=50),
    st.floats(1e3, 1e8),
    st.floats(0, 5),
)
def test_in_no_span_of_time_do_more_bytes_pass_than_the_rate_and_one_burst_allow(
    asked: list[tuple[int, float]], rate: float, burst_seconds: float
) -> None:
    """The bound of a token bucket, over every pair of moments at which bytes were sent."""
    pacer, now = Pacer(rate, burst_seconds), 0.0
    sent: list[tuple[float, int]] = []
    for nbytes, idle_seconds in asked:
        now += idle_seconds
        now += pacer.take(nbytes, now)
        sent.append((now, nbytes))

    assert all(before <= after for (before, _), (after, _) in pairwise(sent))
    for first, (begin, _) in enumerate(sent):
        passed = 0
        for end, nbytes in sent[first + 1 :]:
            passed += nbytes
            assert passed <= rate * (end - begin + burst_seconds) * (1 + 1e-9) + 1e-3


@pytest.mark.parametrize("bad", [{"bytes_per_second": 0}, {"bytes_per_second": math.nan}])
def test_a_rate_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="bytes_per_second"):
        Pacer(**bad)


@pytest.mark.parametrize("burst_seconds", [-1, math.nan, math.inf])
def test_a_burst_that_is_none_is_refused(burst_seconds: float) -> None:
    with pytest.raises(ConfigError, match="burst_seconds"):
        Pacer(1.0, burst_seconds)


# -- The cap -------------------------------------------------------------------------------------------


def test_a_megabyte_at_a_megabyte_a_second_takes_a_second_in_even_steps() -> None:
    time = VirtualTime()
    cap = Cap("even", 1e6, stop=time, clock=time)
    writer = CappedWriter(RemoteTier("memory://even").begin("step-1", "a1").create("part"), cap)

    writer.write(np.zeros(2_000_000, np.uint8))
    writer.write(np.zeros(1_000_000, np.uint8))
    writer.finish()

    assert time.seconds == pytest.approx(3.0, abs=0.1)
    assert max(time.waits) <= 0.1


def test_all_files_share_the_cap() -> None:
    time = VirtualTime()
    cap = Cap("share", 1e6, stop=time, clock=time)
    draft = RemoteTier("memory://share").begin("step-1", "a1")

    for file in ("part-0", "part-1"):
        CappedWriter(draft.create(file), cap).write(np.zeros(1_000_000, np.uint8))

    assert time.seconds == pytest.approx(2.0, abs=0.1)


def test_a_stop_ends_a_wait_at_once_and_what_was_written_can_be_aborted() -> None:
    """Closing a store must not sit out the hours that a slow drain still has to go."""
    stop, waits = threading.Event(), threading.Event()
    tier = RemoteTier("memory://stopped")
    draft = tier.begin("step-1", "a1")
    writer = CappedWriter(draft.create("part"), Cap(tier.name, 1.0, stop=Announced(stop, waits.set)))
    failures: list[Exception] = []

    def write() -> None:
        try:
            writer.write(np.zeros(10**9, np.uint8))
        except DataError as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert waits.wait(60)
    stop.set()
    thread.join(60)

    assert "memory://stopped was stopped" in str(failures[0])
    with pytest.raises(DataError, match="stopped"):
        writer.write(np.zeros(1, np.uint8))
    draft.abort()
    assert tier.sweep() == []


class Announced:
    """An event that says when somebody waits for it."""

    def __init__(self, event: threading.Event, announce: Callable[[], None]) -> None:
        self._event = event
        self._announce = announce

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        self._announce()
        return self._event.wait(timeout)


def test_a_cap_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_second"):
        Cap("none", 0.0)
