"""How many samples a Load takes, where a formula says how long each takes."""

from __future__ import annotations

import pytest

from penstock.policy.load_size import LoadSize


def settled(call_seconds: float, sample_seconds: float, most: int = 64) -> int:
    """Return the size after 100 Loads that cost so much for the call and for each sample, of `most` samples at most."""
    size = LoadSize()
    for _ in range(100):
        samples = min(size.samples, most)
        size.load_done(samples, call_seconds + samples * sample_seconds)
    return min(size.samples, most)


@pytest.mark.parametrize("call_seconds", [0.1e-3, 0.5e-3, 0.6e-3, 1.5e-3, 4e-3, 100e-3])
def test_a_call_that_costs_much_is_made_for_many_samples(call_seconds: float) -> None:
    """As of a database. One sample a call would take as long as the whole batch does."""
    assert settled(call_seconds, 1e-6) == 64


@pytest.mark.parametrize(("sample_seconds", "samples"), [(20e-3, 1), (1.2e-3, 1), (0.3e-3, 3), (20e-6, 50)])
def test_where_samples_cost_a_load_is_a_millisecond(sample_seconds: float, samples: int) -> None:
    assert settled(0.0, sample_seconds) == samples


def test_a_call_is_made_for_as_many_as_make_it_cheap_and_no_more() -> None:
    """8 samples a call take 0.75 of the time that 4 take each, 16 take 0.83 of that: from there on it is no gain."""
    assert settled(8e-3, 2e-3) == 8
