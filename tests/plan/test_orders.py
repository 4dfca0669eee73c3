"""Full, bundle and sequential orders: what holds of every order, and what is particular to each."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, FullShuffle, Order, RepeatingOrder, Sequential

GOLDEN = Path(__file__).parent.parent / "golden" / "orders.json"

RATIOS = st.one_of(st.just(1.0), st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.5, 1e-6]), st.floats(1e-3, 1))
ORDERS = st.one_of(
    st.builds(Sequential, st.integers(1, 2000)),
    st.builds(FullShuffle, st.integers(1, 2000), st.integers(0, 2**64 - 1)),
    st.builds(BundleShuffle, st.integers(1, 2000), st.integers(0, 2**64 - 1), RATIOS, st.booleans()),
)


@given(order=ORDERS, epoch=st.integers(0, 2**32 - 1))
def test_every_epoch_reads_each_sample_once_and_knows_where(order: Order, epoch: int) -> None:
    positions = np.arange(order.samples)

    ids = order.at(epoch, positions)

    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(order.samples))
    np.testing.assert_array_equal(order.position_of(epoch, ids), positions)
    assert order.length(epoch) == order.samples
    assert not isinstance(order, RepeatingOrder)


def bundles_of(samples: int, ratio: float) -> list[range]:
    """Bundles as the bundle paper cuts them: consecutive, the last one short."""
    bundle = math.ceil(round(ratio * samples, 6))
    return [range(begin, min(begin + bundle, samples)) for begin in range(0, samples, bundle)]


@for_each(
    ("samples", "ratio"), [(10, 0.2), (9, 1 / 9), (1797, 0.1), (1797, 0.3), (200_000, 0.4), (200_001, 0.5)]
)
def test_bundles_follow_in_sequence_and_turn_round_every_second_epoch(samples: int, ratio: float) -> None:
    bundles = bundles_of(samples, ratio)
    order = BundleShuffle(samples, seed=3, bundle_ratio=ratio)

    for epoch in range(2):
        ids = order.at(epoch, np.arange(samples)).tolist()

        begin = 0
        for bundle in bundles if epoch % 2 == 0 else bundles[::-1]:
            assert sorted(ids[begin : begin + len(bundle)]) == list(bundle)
            begin += len(bundle)


def test_bundles_do_not_turn_round_without_alternation() -> None:
    straight = BundleShuffle(100, seed=3, alternate=False)

    for epoch in range(4):
        assert (straight.at(epoch, np.arange(100)) // 10).tolist() == sorted(np.arange(100) // 10)


def test_the_inside_of_a_bundle_is_shuffled_anew_each_epoch() -> None:
    order = BundleShuffle(1000, seed=0)

    first_bundles = {tuple(order.at(epoch, np.arange(100)).tolist()) for epoch in range(0, 20, 2)}

    assert len(first_bundles) == 10


@for_each("samples", [1, 2, 1797, 65_535, 65_536, 10**12])
def test_a_bundle_of_everything_is_the_full_shuffle_bit_for_bit(samples: int) -> None:
    positions = np.arange(min(samples, 70_000))

    for epoch in range(3):
        full = FullShuffle(samples, seed=11).at(epoch, positions)
        np.testing.assert_array_equal(BundleShuffle(samples, 11, bundle_ratio=1).at(epoch, positions), full)


@for_each(
    ("samples", "ratio", "bundle"),
    [(10**12, 0.1, 10**11), (10, 0.3, 3), (1797, 0.1, 180), (100, 1e-9, 1), (10, 0.11, 2), (100, 0.07, 7)],
)
def test_a_bundle_is_the_ratio_as_written_rounded_up(samples: int, ratio: float, bundle: int) -> None:
    assert BundleShuffle(samples, bundle_ratio=ratio).bundle == bundle


def test_questions_about_bundles_anywhere_agree_with_questions_in_sequence() -> None:
    """Shuffled questions go through another path than those that come bundle by bundle."""
    order = BundleShuffle(700_000, seed=2, bundle_ratio=0.1)
    positions = np.arange(700_000)
    shuffled = np.random.default_rng(0).permutation(positions)

    for epoch in (0, 1):
        in_sequence = order.at(epoch, positions)
        np.testing.assert_array_equal(order.at(epoch, shuffled), in_sequence[shuffled])
        np.testing.assert_array_equal(order.position_of(epoch, in_sequence[shuffled]), shuffled)


def test_other_seeds_and_other_epochs_give_other_orders() -> None:
    for samples in (1000, 100_000):
        orders = {
            FullShuffle(samples, seed).at(epoch, np.arange(20)).tobytes()
            for seed in (0, 1, 2**64 - 1)
            for epoch in (0, 1, 2**32 - 1)
        }
        assert len(orders) == 9


def test_orders_are_values() -> None:
    order = BundleShuffle(1000, seed=5, bundle_ratio=0.25)
    order.at(0, 1)

    copy = pickle.loads(pickle.dumps(order))

    assert copy == order == BundleShuffle(1000, 5, 0.25)
    assert repr(copy) == "BundleShuffle(samples=1000, seed=5, bundle_ratio=0.25, alternate=True)"
    assert copy.at(1, 7) == order.at(1, 7)
    assert FullShuffle(10, 1) != FullShuffle(10, 2)


def test_the_bits_of_an_order_never_change_silently() -> None:
    """A run resumed, or repeated with a later version, reads the same: a change here breaks that promise."""
    makers = {"FullShuffle": FullShuffle, "BundleShuffle": BundleShuffle}
    golden = json.loads(GOLDEN.read_text("utf-8"))

    assert len(golden) >= 6
    for case in golden:
        order = makers[case["order"]](**case["arguments"])
        assert order.at(case["epoch"], case["positions"]).tolist() == case["samples"], case


def test_small_data_sets_never_load_numba() -> None:
    program = (
        "import sys, penstock.plan as plan\n"
        "orders = [plan.FullShuffle(65_535), plan.BundleShuffle(65_535), plan.Sequential(10**9),\n"
        "          plan.TorchDistributed(65_535, 2), plan.Explicit(range(100), 65_535)]\n"
        "for order in orders:\n"
        "    p = plan.AccessPlan(order, 32, epochs=2, ranks=2)\n"
        "    p.reader_of(1, p.local_batch(1, 0, 0))\n"
        "assert not {'numba', 'torch'} & set(sys.modules), 'loaded'\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


@for_each("samples", [0, -1, 2**62 + 1, 1.5, True, None])
def test_an_order_of_no_possible_size_is_refused(samples: object) -> None:
    for make in (Sequential, FullShuffle, BundleShuffle):
        with pytest.raises(ConfigError, match=f"samples is {samples}; .*is the data set empty"):
            make(samples)  # type: ignore[arg-type]


@for_each("seed", [-1, 2**64, 0.5, "1"])
def test_a_seed_that_is_no_64_bit_number_is_refused(seed: object) -> None:
    for make in (FullShuffle, BundleShuffle):
        with pytest.raises(ConfigError, match=f"seed is {seed!r}; .*choose another"):
            make(10, seed)  # type: ignore[arg-type]


@for_each("ratio", [0, -0.1, 1.0001, float("nan"), float("inf"), "half", True, None])
def test_a_bundle_ratio_outside_0_to_1_is_refused(ratio: object) -> None:
    with pytest.raises(ConfigError, match=f"bundle_ratio is {ratio!r}; .*0.1 makes ten bundles"):
        BundleShuffle(10, bundle_ratio=ratio)  # type: ignore[arg-type]


@for_each("order", [Sequential(10), FullShuffle(10), BundleShuffle(10), FullShuffle(10**6)])
def test_questions_outside_the_order_are_refused(order: Order) -> None:
    for wrong in (-1, order.samples, [0, order.samples + 5]):
        with pytest.raises(ConfigError, match=r"positions contain -?\d+, which is outside"):
            order.at(0, wrong)
        with pytest.raises(ConfigError, match=r"samples contain -?\d+, which is outside"):
            order.position_of(0, wrong)
    with pytest.raises(ConfigError, match="positions have dtype float64; they are integers"):
        order.at(0, [0.5])
    for epoch in (-1, 2**32, 0.0):
        with pytest.raises(ConfigError, match=f"epoch is {epoch}; epochs count from 0"):
            order.at(epoch, 0)  # type: ignore[arg-type]
