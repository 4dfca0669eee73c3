"""How long another rank is waited for, and when it is asked again."""

from __future__ import annotations

import math
from itertools import pairwise

from penstock.policy.peer_patience import (
    FIRST_PROBE_SECONDS,
    LATE_FACTOR,
    LEAST_SECONDS,
    MOST_PROBE_SECONDS,
    MOST_SECONDS,
    PeerPatience,
)


def test_an_answer_is_late_after_a_multiple_of_what_it_should_take_by_the_answers_so_far() -> None:
    patience = PeerPatience(bytes_per_second=1e6)

    # A megabyte takes a second here, and two that are asked for together take two.
    assert math.isclose(patience.ask(1_000_000), LATE_FACTOR * 1.001)
    assert patience.ask(1_000_000) == MOST_SECONDS
    patience.was_late(1_000_000, 0.0)
    patience.answered(1_000_000, 0.1)
    for _ in range(200):
        patience.ask(1_000_000)
        patience.answered(1_000_000, 0.1)

    assert math.isclose(patience.ask(1_000_000), LATE_FACTOR * 0.1, rel_tol=0.01)
    patience.answered(1_000_000, 0.1)
    assert patience.ask(0) == LEAST_SECONDS


def test_a_rank_that_is_away_is_probed_less_and_less_often_and_asked_again_once_heard_of() -> None:
    patience = PeerPatience(math.inf)
    patience.ask(100)

    assert patience.was_late(100, now=10.0)
    assert not patience.was_late(0, now=10.1), "it is no news"
    assert patience.is_away

    gaps, at = [], 10.0
    for _ in range(12):
        assert patience.probe_at is not None
        gaps.append(patience.probe_at - at)
        at = patience.probe_at
        patience.probed(at)
    assert math.isclose(gaps[0], FIRST_PROBE_SECONDS)
    assert all(later >= earlier for earlier, later in pairwise(gaps))
    assert math.isclose(gaps[-1], MOST_PROBE_SECONDS)

    assert patience.heard()
    assert not patience.heard()
    assert patience.left(now=99.0)
    assert patience.probe_at == 99.0 + FIRST_PROBE_SECONDS
