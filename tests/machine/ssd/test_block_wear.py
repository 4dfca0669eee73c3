"""Wear is counted block by block, and tells how long the drive will last."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine.ssd import Wear, lifetime


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 60))
def test_every_block_is_in_the_bin_that_says_so(erases: list[int], most_bins: int) -> None:
    wear = Wear(np.array(erases, np.int32))

    bins = wear.histogram(most_bins)

    assert len(bins) <= most_bins
    assert [blocks for *_, blocks in bins] == [
        sum(fewest <= count <= most for count in erases) for fewest, most, _ in bins
    ]
    assert sum(blocks for *_, blocks in bins) == len(erases)


def test_mean_deviation_and_extremes_are_over_all_blocks() -> None:
    wear = Wear(np.array([0, 4, 2, 2], np.int32))

    assert (wear.least, wear.most, wear.mean) == (0, 4, 2.0)
    assert wear.deviation == pytest.approx(math.sqrt(2.0))


def test_a_drive_lasts_until_its_blocks_were_erased_as_often_as_they_are_rated() -> None:
    """A thousand bytes cost 2 erases of each block on average, 4 of the worst; each is good for 100."""
    life = lifetime(Wear(np.array([0, 4, 2, 2], np.int32)), 1_000, rated_cycles=100, bytes_per_day=500.0)

    assert (life.even_bytes, life.first_block_bytes) == (50_000.0, 25_000.0)
    assert (life.even_years, life.first_block_years) == pytest.approx((100 / 365.25, 50 / 365.25))


def test_a_drive_that_was_never_erased_lasts_for_ever_and_without_a_rate_no_time_is_said() -> None:
    life = lifetime(Wear(np.zeros(3, np.int32)), 1_000, rated_cycles=100)

    assert life.even_bytes == life.first_block_bytes == math.inf
    assert life.even_years is life.first_block_years is None


@for_each(
    ("rated_cycles", "bytes_per_day", "message"),
    [
        (0, None, "rated_cycles is 0"),
        (float("nan"), None, "rated_cycles is nan; it must be an integer"),
        (1.5, None, r"rated_cycles is 1\.5; it must be an integer"),
        (1, 0.0, "bytes_per_day is 0.0"),
        (1, float("nan"), "bytes_per_day is nan"),
    ],
)
def test_a_life_without_cycles_or_writes_is_refused(
    rated_cycles: float, bytes_per_day: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lifetime(Wear(np.ones(3, np.int32)), 1_000, cast(int, rated_cycles), bytes_per_day)


@pytest.mark.parametrize("written", [-1, float("nan")])
def test_what_was_written_is_no_less_than_nothing(written: int) -> None:
    with pytest.raises(ConfigError, match="written_bytes is"):
        lifetime(Wear(np.ones(3, np.int32)), written, rated_cycles=1)


@pytest.mark.parametrize("bins", [0, -1, 1.5])
def test_a_histogram_has_a_bin_at_least(bins: int) -> None:
    with pytest.raises(ConfigError, match="most_bins is"):
        Wear(np.array([1, 2], np.int32)).histogram(bins)
