"""How many requests are under way, and when one is made again: against stores in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.requests import FIRST_LIMIT, RequestLimit, Retrying

SIZE = 100_000


@dataclass
class Store:
    """A store behind a link, whose answers wait for each other on the link alone.

    latency_seconds: before an answer is on the link, spread: by so many times that more, at random.
    failing: share of requests that are refused. outage: from when until when all are.
    most_a_second: that it answers; others are refused. wanted: requests that there are at once.
    """

    bytes_per_second: float
    latency_seconds: float
    spread: float = 0.0
    failing: float = 0.0
    outage: tuple[float, float] = (0.0, 0.0)
    most_a_second: float = float("inf")
    wanted: int = 10_000

    def run(self, limit: RequestLimit, seconds: float) -> tuple[float, list[tuple[float, int]]]:
        """Return the share of the link that was used, and the limit at each time."""
        draws, now, link_free, done = random.Random(1), 0.0, 0.0, 0
        under_way: list[tuple[float, int, str]] = []
        limits: list[tuple[float, int]] = []
        number, recent = 0, list[float]()
        while now < seconds:
            while limit.has_space and limit.in_flight < self.wanted:
                limit.began()
                recent = [each for each in recent if each > now - 1]
                is_refused = (
                    draws.random() < self.failing
                    or self.outage[0] <= now < self.outage[1]
                    or len(recent) >= self.most_a_second
                )
                if not is_refused and self.most_a_second < float("inf"):
                    recent.append(now)
                after = self.latency_seconds * (1 + self.spread * draws.expovariate(1))
                number += 1
                heapq.heappush(under_way, (now + after, number, "refused" if is_refused else "sent"))
            now, _, what = heapq.heappop(under_way)
            if what == "sent":
                link_free = max(link_free, now) + SIZE / self.bytes_per_second
                number += 1
                heapq.heappush(under_way, (link_free, number, "arrived"))
                continue
            if what == "refused":
                limit.refused(now)
            else:
                limit.ended(SIZE, now)
                done += SIZE
            limits.append((now, limit.limit))
        return done / seconds / self.bytes_per_second, limits

    @property
    def product(self) -> float:
        """Requests that fill the link."""
        return self.bytes_per_second * self.latency_seconds / SIZE


def settled(limits: list[tuple[float, int]], after: float) -> list[int]:
    return [limit for now, limit in limits if now >= after]


@pytest.mark.parametrize(
    "store",
    [
        Store(125e6, 0.02),
        Store(12.5e6, 0.1),
        pytest.param(Store(1250e6, 0.03), marks=pytest.mark.slow),
        Store(125e6, 0.01, spread=3.0),
        Store(125e6, 0.02, failing=0.02),
    ],
    ids=["1 Gbit/s", "far away", "10 Gbit/s", "uneven", "2 % errors"],
)
def test_requests_grow_until_the_link_is_full_and_hardly_further(store: Store) -> None:
    share, limits = store.run(RequestLimit(), 30.0)

    assert share > 0.95
    enough = (1 + store.spread) * store.product
    assert all(enough / 2 < limit < 6 * enough for limit in settled(limits, 10.0))


def test_a_store_that_asks_for_less_gets_less_and_gets_more_again_as_it_can() -> None:
    store = Store(125e6, 0.02, outage=(10.0, 15.0))

    share, limits = store.run(RequestLimit(), 30.0)

    assert min(settled([each for each in limits if each[0] < 15], 10.0)) == 1
    assert all(limit >= store.product for limit in settled(limits, 16.0))
    assert share > 0.8


def test_a_store_that_answers_so_many_a_second_is_used_to_that() -> None:
    store = Store(125e6, 0.02, most_a_second=500)

    share, _ = store.run(RequestLimit(), 30.0)

    assert share > 0.9 * 500 * SIZE / 125e6


def test_who_wants_little_does_not_raise_the_limit() -> None:
    _, limits = Store(125e6, 0.02, wanted=5).run(RequestLimit(), 10.0)

    assert {limit for _, limit in limits} == {FIRST_LIMIT}


def test_the_limit_is_never_above_the_most_that_was_given() -> None:
    _, limits = Store(1250e6, 0.1).run(RequestLimit(most=20), 10.0)

    assert max(limit for _, limit in limits) == 20


@given(st.lists(st.sampled_from(["began", "ended", "refused"]), max_size=300))
def test_there_is_always_space_for_one(events: list[str]) -> None:
    limit, now = RequestLimit(), 0.0
    for event in events:
        now += 0.01
        if event == "began":
            limit.began()
        elif limit.in_flight and event == "ended":
            limit.ended(SIZE, now)
        elif limit.in_flight:
            limit.refused(now)
        assert limit.limit >= 1
        assert limit.in_flight >= 0


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 60))
def test_pauses_grow_up_to_a_limit_and_end_with_the_budget(draw: float, failures: int) -> None:
    retrying, now = Retrying(900.0, 0.0), 0.0

    for number in range(failures):
        pause = retrying.pause_seconds(now, draw)
        if pause is None:
            assert now >= 900.0
            return
        assert 0 <= pause <= min(10.0, 0.1 * 2**number, 900.0 - now)
        now += pause
    assert retrying.count == failures


def test_the_last_attempt_is_at_the_end_of_the_budget() -> None:
    retrying = Retrying(1.0, began=5.0)

    assert retrying.pause_seconds(5.99, 0.999) == pytest.approx(0.01)
    assert retrying.pause_seconds(6.0, 0.0) is None
