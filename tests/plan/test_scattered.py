"""Scattered ids: still every sample once, still the bundles' rhythm, no longer neighbours."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, Explicit, FullShuffle, Order, RepeatingOrder, Scattered, Sequential


@given(
    samples=st.integers(1, 2000),
    seed=st.integers(0, 2**64 - 1),
    ratio=st.floats(1e-3, 1),
    epoch=st.integers(0, 1000),
)
def test_every_epoch_reads_each_sample_once_and_knows_where(
    samples: int, seed: int, ratio: float, epoch: int
) -> None:
    order = Scattered(BundleShuffle(samples, seed, ratio), seed)
    positions = np.arange(samples)

    ids = order.at(epoch, positions)

    assert isinstance(order, Order)
    assert not isinstance(order, RepeatingOrder)
    assert sorted(ids.tolist()) == list(range(samples))
    np.testing.assert_array_equal(order.position_of(epoch, ids), positions)


def test_a_bundle_has_the_same_members_in_every_epoch_and_they_are_no_neighbours() -> None:
    order = Scattered(BundleShuffle(1000, seed=5), seed=5)

    first = {epoch: set(order.at(epoch, np.arange(100)).tolist()) for epoch in range(4)}
    last = {epoch: set(order.at(epoch, np.arange(900, 1000)).tolist()) for epoch in range(4)}

    assert first[0] == last[1] == first[2]
    assert first[0] != first[1]
    # A tenth of the samples, from everywhere: the mean of 100 of 0..999 is 500 give or take 27.
    assert abs(np.mean(list(first[0])) - 499.5) < 5 * 27.4


def test_the_permutation_is_not_that_of_any_epoch_of_the_same_seed() -> None:
    """Else a shuffle could undo it."""
    scattered = Scattered(Sequential(500), seed=9).at(0, np.arange(500))

    assert all((scattered != FullShuffle(500, seed=9).at(epoch, np.arange(500))).any() for epoch in range(20))


def test_epochs_beyond_the_first_use_the_same_permutation() -> None:
    order = Scattered(Sequential(500), seed=9)

    np.testing.assert_array_equal(order.at(0, np.arange(500)), order.at(7, np.arange(500)))


def test_it_can_be_sent_to_another_process() -> None:
    order = Scattered(BundleShuffle(100), seed=3)

    copy = pickle.loads(pickle.dumps(order))

    assert copy == order
    np.testing.assert_array_equal(copy.at(1, [0, 99]), order.at(1, [0, 99]))


def test_an_order_that_may_repeat_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most once"):
        Scattered(Explicit([1, 1, 0], samples=2))


@for_each("seed", [-1, 2**64, 0.5, True])
def test_a_seed_that_is_none_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed"):
        Scattered(BundleShuffle(10), seed=seed)


def test_ids_and_positions_outside_are_refused() -> None:
    order = Scattered(BundleShuffle(10))

    with pytest.raises(ConfigError):
        order.at(0, 10)
    with pytest.raises(ConfigError):
        order.position_of(0, -1)


def test_the_permutation_of_a_seed_never_changes() -> None:
    """Runs resume, and caches stay warm, across versions: a change here is one for the changelog."""
    short = Scattered(Sequential(12), seed=1).at(0, np.arange(12))
    bundles = Scattered(BundleShuffle(12, seed=0, bundle_ratio=0.25), seed=0).at(1, np.arange(12))
    long = Scattered(Sequential(10**12), seed=7).at(0, [0, 1, 10**12 - 1])

    assert short.tolist() == [4, 1, 5, 3, 10, 2, 9, 0, 6, 8, 11, 7]
    assert bundles.tolist() == [10, 5, 9, 11, 0, 6, 4, 3, 7, 1, 8, 2]
    assert long.tolist() == [628141632143, 104223854410, 566577586648]
