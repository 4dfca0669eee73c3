"""When samples that lie near each other are read together."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.loader.fetching import Near
from penstock.policy import Extents

TEN = np.arange(10)


def rows(hole_bytes: int) -> Extents:
    """Rows of 100 bytes in one file."""
    return Extents(np.zeros(10, np.int64), (100 + hole_bytes) * TEN, np.full(10, 100))


def near(hole_bytes: int) -> Near:
    """A request takes a millisecond and a byte 10 ns, as the machine has it."""
    return Near(rows(hole_bytes), lambda requests, nbytes: 1e-3 * requests + 1e-8 * nbytes, 1e8)


def test_the_machine_says_what_pays_until_reads_have_been_seen() -> None:
    merged = near(hole_bytes=50_000).merged(TEN)

    assert merged is not None
    assert [read.which.tolist() for read in merged] == [TEN.tolist()]
    assert near(hole_bytes=200_000).merged(TEN) is None


def test_reads_that_take_less_than_the_machine_says_are_merged_over_smaller_holes() -> None:
    found = near(hole_bytes=50_000)
    found.observe(10, 10 * 100e-6)
    closer = near(hole_bytes=5_000)
    closer.observe(10, 10 * 100e-6)

    assert found.merged(TEN) is None
    assert closer.merged(TEN) is not None


def test_nothing_is_merged_where_a_request_takes_next_to_nothing() -> None:
    found = near(hole_bytes=0)
    found.observe(1000, 1e-3)

    assert found.merged(TEN) is None


@pytest.mark.parametrize("seconds", [1e-3, 5e-3])
def test_a_store_that_gets_slower_is_found_out(seconds: float) -> None:
    found = near(hole_bytes=50_000)
    found.observe(10, 10 * 2e-6)
    assert found.merged(TEN) is None

    for _ in range(70):
        found.observe(10, 10 * seconds)

    assert found.merged(TEN) is not None
