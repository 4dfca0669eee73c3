"""Where samples are decoded: each line takes equally long, and nothing is sent that costs more than it spares."""

from __future__ import annotations

import heapq

import pytest

from penstock.policy.decode_split import HERE, TRIED_EVERY, DecodeSplit, Given

GROUP, GROUPS, IN_FLIGHT = 4, 1000, 32


def rate_of(here_seconds: float, server_seconds: list[float], latency_seconds: float = 0.0) -> float:
    """Return samples a second in a model: each place decodes its line in order, with 32 groups given out at a time."""
    split, now = DecodeSplit(len(server_seconds), 0.0), 0.0
    seconds, free_at = [here_seconds, *server_seconds], [0.0] * (len(server_seconds) + 1)
    under_way: list[tuple[float, int, Given]] = []
    for number in range(GROUPS):
        if len(under_way) == IN_FLIGHT:
            now, _, done = heapq.heappop(under_way)
            split.done(done, now)
        given = split.give(GROUP, now, ())
        place = given.place
        free_at[place] = max(now, free_at[place]) + GROUP * seconds[place]
        heapq.heappush(under_way, (free_at[place] + latency_seconds * (place != HERE), number, given))
    return GROUP * GROUPS / max(free_at)


@pytest.mark.parametrize(
    ("here", "servers"),
    [
        (2e-3, [2e-3]),
        (2e-3, [2e-3, 2e-3]),
        (2e-3, [8e-3]),
        (2e-3, [5e-4, 4e-3]),
        (2e-3, [40e-3]),
        (0.1e-3, [3e-3]),
    ],
)
@pytest.mark.parametrize("latency", [0.0, 5e-3])
def test_all_places_are_busy_whatever_their_speeds(here: float, servers: list[float], latency: float) -> None:
    ideal = 1 / here + sum(1 / each for each in servers)

    rate = rate_of(here, servers, latency)

    assert 0.9 * ideal < rate < 1.01 * ideal


def test_a_server_that_is_away_is_given_nothing_and_one_that_is_unknown_is_tried_first() -> None:
    split = DecodeSplit(2, 0.0)

    places = [split.give(8, 0.0, away).place for away in ([1, 2], [2], [], [1, 2], [], [])]

    assert places == [HERE, 1, 2, HERE, 1, 2]  # nothing has shown how long it takes


def test_nothing_is_sent_where_receiving_costs_more_than_decoding_but_for_a_trial_now_and_then() -> None:
    split = DecodeSplit(1, receive_seconds=0.4e-3)
    for place in (HERE, 1):
        given = split.give(1, 0.0, ())
        assert given.place == place
        split.done(given, 1e-3)
        split.computed(1, 0.5e-3 if place == HERE else 0.2e-3, is_here=place == HERE)
    assert not split.is_worth_sending

    places = []
    for _ in range(2 * TRIED_EVERY):
        given = split.give(1, 0.0, ())
        split.done(given, 1e-3)
        places.append(given.place)

    assert places.count(1) in (1, 2)
    split.computed(100, 0.0, is_here=False)
    for _ in range(30):
        split.computed(1, 3e-3, is_here=True)
    assert split.is_worth_sending


def test_what_is_not_had_leaves_the_line_and_teaches_nothing() -> None:
    split = DecodeSplit(1, 0.0)
    split.give(2, 0.0, ())
    lost = split.give(6, 0.0, ())
    assert lost.place == 1

    split.missed(lost)

    assert (split.places[1].line, split.places[1].seconds) == (0, 0.0)
