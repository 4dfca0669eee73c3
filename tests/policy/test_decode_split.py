"""Where samples are decoded: each line takes equally long, and nothing is sent that costs more than it spares."""

from __future__ import annotations

import heapq

import pytest

from penstock.policy.decode_split import HERE, TRIED_EVERY, DecodeSplit, Given

GROUP, SAMPLES, IN_FLIGHT = 4, 4000, 32


def rate_of(
    here_seconds: float,
    server_seconds: list[float],
    latency_seconds: float = 0.0,
    *,
    group: int = GROUP,
    read_seconds: float = 0.0,
    first_seconds: float = 0.0,
) -> float:
    """Return samples a second in a model: each place decodes its line in order, with 128 samples given out at a time.

    read_seconds: from when a group is given until a place can decode it. first_seconds: more, for each sample of a
    server's first three groups.
    """
    split, now = DecodeSplit(len(server_seconds), 0.0), 0.0
    seconds, free_at = [here_seconds, *server_seconds], [0.0] * (len(server_seconds) + 1)
    under_way: list[tuple[float, int, Given]] = []
    given_out, groups, samples = 0, [0] * len(seconds), SAMPLES * group // GROUP
    while given_out < samples:
        if len(under_way) == IN_FLIGHT * GROUP // group:
            now, _, done = heapq.heappop(under_way)
            split.done(done, now)
        given = split.give(group, now, ())
        place = given.place
        groups[place] += 1
        each = seconds[place] + (first_seconds if place != HERE and groups[place] <= 3 else 0.0)
        free_at[place] = max(now + read_seconds, free_at[place]) + given.samples * each
        heapq.heappush(under_way, (free_at[place] + latency_seconds * (place != HERE), given_out, given))
        given_out += given.samples
    return given_out / max(free_at)


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


def test_a_server_whose_first_groups_were_slow_is_used_again_though_a_read_takes_long() -> None:
    """The two samples that it is tried with take as long as the read, which says nothing about sixteen."""
    rate = rate_of(2e-3, [2e-3], group=16, read_seconds=30e-3, first_seconds=0.1)

    assert rate > 0.8 * (2 / 2e-3)


@pytest.mark.parametrize(("samples", "came", "next_samples"), [(8, 8, 16), (8, 7, 2), (1, 1, 4)])
def test_a_trial_is_followed_by_twice_as_many_if_all_came_and_a_small_one_by_no_fewer_than_before(
    samples: int, came: int, next_samples: int
) -> None:
    split = DecodeSplit(1, 0.0)
    here, server = split.places
    here.line, here.seconds = 100, 1e-3
    server.seconds, server.passed_over, server.tried_with = 1.0, TRIED_EVERY, max(4, samples)
    trial = split.give(samples, 0.0, ())
    assert (trial.place, trial.samples) == (1, samples)

    split.done(trial, 0.05, came)

    server.passed_over = TRIED_EVERY
    assert split.give(64, 0.1, ()).samples == next_samples


def test_one_late_group_says_little_and_a_fast_one_after_slow_ones_much() -> None:
    """A server that loads what it decodes with, or was stopped for a moment, is not out of use for long."""
    split = DecodeSplit(1, 0.0)
    server = split.places[1]

    def had(each_seconds: float) -> float:
        server.line += 16
        split.done(Given(1, 16, 16.0, 0.0), 16 * each_seconds)
        return server.seconds

    assert had(2e-3) == pytest.approx(2e-3)
    assert had(1.0) < 3e-3
    for _ in range(30):
        had(40e-3)
    for _ in range(5):
        had(2e-3)
    assert server.seconds < 4e-3


def test_a_server_that_has_not_answered_yet_is_given_more_while_this_process_has_a_long_line() -> None:
    split = DecodeSplit(1, 0.0)
    first = split.give(16, 0.0, ())
    split.give(16, 0.0, ())
    split.done(first, 16 * 2e-3)

    places = [split.give(16, 0.1, ()).place for _ in range(12)]

    assert places.count(1) == 3  # with the first one, 64 samples
    assert places[:2] == [HERE, HERE]  # it may be slower


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

    tried = list[int]()
    for _ in range(2 * TRIED_EVERY // GROUP):
        given = split.give(GROUP, 0.0, ())
        split.done(given, 1e-3)
        if given.place == 1:
            tried.append(given.samples)

    assert len(tried) in (1, 2)
    assert max(tried) < GROUP  # a slow one holds up a batch
    worth = list[bool]()
    for times, seconds, is_here in ((1, 0.05e-3, False), (30, 0.2e-3, False), (30, 3e-3, True)):
        for _ in range(times):
            split.computed(1, seconds, is_here=is_here)
        worth.append(split.is_worth_sending)
    assert worth == [
        True,
        False,
        True,
    ]  # what finishes crops is compiled by now; samples take longer to decode


def test_what_is_not_had_leaves_the_line_and_teaches_nothing() -> None:
    split = DecodeSplit(1, 0.0)
    split.give(2, 0.0, ())
    lost = split.give(6, 0.0, ())
    assert lost.place == 1

    split.missed(lost)

    assert (split.places[1].line, split.places[1].seconds) == (0, 0.0)


def test_crops_that_did_not_come_are_not_waited_for() -> None:
    split = DecodeSplit(1, 1e-3)
    split.computed(1, 2e-3, is_here=True)
    split.computed(1, 1e-3, is_here=False)
    for _ in range(10):
        given = Given(1, 16, 16.0, 0.0)
        split.places[1].line += 16
        split.done(given, 0.1, 15)
        split.computed(15, 15e-3, is_here=False)

    assert split.give(1, 0.2, [1]).line == 1.0
