"""Bundles: the formula beside a replay, and which bundle is recommended."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, FullShuffle, Scattered
from penstock.simulate.batch_noise import batch_noise, label_variance, scattered_variance
from penstock.simulate.bundle_choice import Choice, Setting, even_bundles, ratio_of, recommend
from penstock.simulate.bundles import best_hit_share, boundary_misses, expected_hit_share, replayed_hit_shares


def lru_hits(references: list[int], capacity: int) -> int:
    """The policy as a textbook has it."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for reference in references:
        if reference in kept:
            hits += 1
            kept.move_to_end(reference)
        elif capacity:
            if len(kept) == capacity:
                kept.popitem(last=False)
            kept[reference] = None
    return hits


@for_each("cache", range(6))
def test_the_expected_hits_of_a_full_shuffle_are_the_mean_over_all_permutations(cache: int) -> None:
    """Of two epochs of five samples; the first epoch's order may be any one."""
    hits = [lru_hits([*range(5), *second], cache) for second in permutations(range(5))]

    assert expected_hit_share(5, cache, 2, bundle=5) == pytest.approx(np.mean(hits) / 10, abs=1e-12)


@for_each("cache", range(8))
def test_the_expected_hits_of_bundles_are_the_mean_over_all_permutations(cache: int) -> None:
    """Seven samples in bundles of three, three and one, three epochs; the first in order of ids."""
    inside = list(permutations(range(3)))
    hits = [
        lru_hits([*range(7), *[6, *(3 + i for i in b), *a], *[*c, *(3 + i for i in d), 6]], cache)
        for a, b, c, d in product(inside, repeat=4)
    ]

    assert expected_hit_share(7, cache, 3, bundle=3) == pytest.approx(np.mean(hits) / 21, abs=1e-12)


@for_each("cache", range(6))
def test_without_alternation_a_cache_below_all_but_a_bundle_hits_nothing(cache: int) -> None:
    """Five samples in bundles of three and two, two epochs, the same sequence in both."""
    hits = [
        lru_hits([*range(5), *first, *second], cache)
        for first, second in product(permutations(range(3)), permutations((3, 4)))
    ]

    expected = expected_hit_share(5, cache, 2, bundle=3, alternate=False)

    assert expected == pytest.approx(np.mean(hits) / 10, abs=1e-12)
    assert (expected > 0) == (cache > 2)


@settings(max_examples=25)
@given(
    samples=st.integers(200, 3000),
    cache_share=st.floats(0, 1),
    ratio=st.floats(0.02, 1),
    epochs=st.integers(1, 6),
    alternate=st.booleans(),
)
def test_a_replay_hits_as_often_as_the_formula_expects(
    samples: int, cache_share: float, ratio: float, epochs: int, alternate: bool
) -> None:
    cache = round(cache_share * samples)
    orders = [BundleShuffle(samples, seed, ratio, alternate) for seed in range(4)]

    counted = [float(replayed_hit_shares(order, epochs, [cache])[0]) for order in orders]

    expected = expected_hit_share(samples, cache, epochs, orders[0].bundle, alternate=alternate)
    # A node of 6,798 samples deviates by 0.0012 (standard deviation over seeds, full shuffle, 5 epochs).
    assert np.mean(counted) == pytest.approx(expected, abs=6 * 0.0012 * math.sqrt(6798 / samples / 4))


def test_the_published_figures_of_45_per_cent_and_ten_bundles_come_out() -> None:
    """Of 20,000 samples in 5 epochs: 33.2 with bundles, 36.0 at best."""
    assert expected_hit_share(20_000, 9_000, 5, bundle=2_000) == pytest.approx(0.332, abs=5e-4)
    assert best_hit_share(20_000, 9_000, 5) == pytest.approx(0.36)
    counted = replayed_hit_shares(BundleShuffle(20_000, seed=1), 5, [9_000])
    assert float(counted[0]) == pytest.approx(0.332, abs=1e-3)


@for_each("share", [0.05, 0.3, 0.5, 0.9])
def test_the_formula_tends_to_the_closed_form_of_a_full_shuffle(share: float) -> None:
    """(E - 1) / E (c + (1 - c) ln(1 - c)), published for many samples."""
    closed = 4 / 5 * (share + (1 - share) * math.log(1 - share))

    assert expected_hit_share(10**9, int(share * 10**9), 5, bundle=10**9) == pytest.approx(closed, rel=1e-6)


@for_each("bundles", [1, 2, 5, 10, 100, 1000])
def test_a_whole_number_of_bundles_attains_the_bound_and_nothing_exceeds_it(bundles: int) -> None:
    samples, bundle = 1000, 1000 // bundles
    order = BundleShuffle(samples, seed=4, bundle_ratio=1 / bundles)
    caches = np.arange(0, samples + 1, 25)

    counted = replayed_hit_shares(order, 4, caches)

    bound = np.array([best_hit_share(samples, int(cache), 4) for cache in caches])
    whole = caches % bundle == 0
    np.testing.assert_allclose(counted[whole], bound[whole], rtol=0, atol=1e-12)
    assert (counted <= bound + 1e-12).all()
    if bundles <= 10:
        assert (counted[~whole] < bound[~whole]).all()


def test_a_cache_beyond_the_data_set_misses_its_first_epoch_alone() -> None:
    assert expected_hit_share(100, 1000, 4, bundle=30) == best_hit_share(100, 1000, 4) == 0.75
    assert expected_hit_share(100, 50, 1, bundle=10) == best_hit_share(100, 50, 1) == 0.0


def test_scattering_the_ids_changes_no_hit() -> None:
    order = BundleShuffle(2000, seed=7)
    caches = [100, 500, 950, 1700]

    np.testing.assert_array_equal(
        replayed_hit_shares(Scattered(order, 7), 4, caches), replayed_hit_shares(order, 4, caches)
    )


# The boundary bundle


@for_each("missing_share", [0.001, 0.01, 0.1, 0.5])
def test_what_does_not_fit_costs_about_m_times_one_plus_the_logarithm(missing_share: float) -> None:
    bundle = 10**7
    missing = int(missing_share * bundle)

    assert boundary_misses(missing, bundle) == pytest.approx(
        missing * (1 + math.log(bundle / missing)), rel=1e-3
    )


def test_harmonic_numbers_are_those_of_the_sum_on_both_sides_of_the_series() -> None:
    for bundle in (1, 2, 31, 32, 33, 5000):
        direct = sum(1 / n for n in range(2, bundle + 1))
        assert boundary_misses(1, bundle) == pytest.approx(1 + direct, rel=1e-13)


def test_nothing_missing_costs_nothing_and_all_missing_all() -> None:
    assert boundary_misses(0, 50) == 0
    assert boundary_misses(50, 50) == pytest.approx(50)
    with pytest.raises(ConfigError, match="missing"):
        boundary_misses(51, 50)


def test_the_formula_follows_the_replay_just_below_a_whole_number_of_bundles() -> None:
    samples = 54_377
    caches = [int(share * samples) for share in (0.45, 0.46, 0.47, 0.48, 0.49, 0.495, 0.5)]

    for ratio in (1.0, 0.1):
        order = BundleShuffle(samples, bundle_ratio=ratio)
        expected = [expected_hit_share(samples, cache, 5, order.bundle) for cache in caches]
        np.testing.assert_allclose(replayed_hit_shares(order, 5, caches), expected, atol=0.0015)


# Randomness


def simulated_noise(values: np.ndarray, bundle: int, batch: int, epochs: int) -> tuple[float, float]:
    """Frozen share and growth, from batches that were drawn: what is constant in a place over all epochs.

    By the analysis of variance: each place's mean over E epochs keeps an E-th of the part that is not frozen.
    """
    order = BundleShuffle(values.size, seed=3, bundle_ratio=bundle / values.size, alternate=False)
    means = np.array(
        [
            values[order.at(epoch, np.arange(values.size))].reshape(-1, batch).mean(axis=1)
            for epoch in range(epochs)
        ]
    )
    # Places of one bundle are alike: their mean tells the bundle's part.
    places = means.reshape(epochs, values.size // bundle, -1)
    fresh = places.var(axis=(0, 2)).mean()
    frozen = places.mean(axis=(0, 2)).var()
    full = values.var() / batch * (values.size - batch) / (values.size - 1)
    return frozen / (frozen + fresh), (frozen + fresh) / full


@pytest.mark.parametrize(
    ("bundle", "batch"),
    [(50, 10), pytest.param(100, 10, marks=pytest.mark.slow), pytest.param(500, 20, marks=pytest.mark.slow)],
)
def test_the_noise_of_batches_of_scattered_ids_is_what_drawn_batches_have(bundle: int, batch: int) -> None:
    noise = batch_noise(2000, bundle, batch)
    drawn = []
    for seed in range(30):
        values = np.random.default_rng(seed).permutation(2000).astype(np.float64)
        drawn.append(simulated_noise(values, bundle, batch, epochs=20))

    frozen, growth = np.mean(drawn, axis=0)
    assert frozen == pytest.approx(noise.frozen_share, rel=0.15)
    assert growth == pytest.approx(1.0, abs=0.02)
    assert noise.growth == pytest.approx(1.0)


@pytest.mark.parametrize(("bundle", "batch"), [(50, 10), (200, 10), (500, 25)])
def test_the_noise_of_batches_of_sorted_ids_is_what_drawn_batches_have(bundle: int, batch: int) -> None:
    # Two classes: one indicator says it all.
    labels = np.sort(np.random.default_rng(0).integers(0, 2, 2000))

    noise = batch_noise(2000, bundle, batch, label_variance(labels, bundle))

    frozen, growth = simulated_noise(labels.astype(np.float64), bundle, batch, epochs=20)
    assert noise.frozen_share == pytest.approx(frozen, rel=0.02)
    assert noise.growth == pytest.approx(growth, rel=0.02)


def test_the_frozen_share_of_scattered_ids_has_the_closed_form() -> None:
    for samples, bundle, batch in ((1000, 100, 10), (10_000, 2_500, 64), (108_754, 54_377, 64)):
        closed = batch * (samples - bundle) / (bundle * (samples - batch))
        assert batch_noise(samples, bundle, batch).frozen_share == pytest.approx(closed, rel=1e-9)


def test_a_full_shuffle_freezes_nothing_and_a_bundle_per_batch_everything() -> None:
    assert batch_noise(1000, 1000, 32) == batch_noise(1000, 1000, 32, 0.0)
    assert (batch_noise(1000, 1000, 32).frozen_share, batch_noise(1000, 1000, 32).growth) == (0.0, 1.0)
    for bundle in (1, 10, 25):
        noise = batch_noise(1000, bundle, 25)
        assert noise.frozen_share == pytest.approx(1.0)
        assert noise.growth == pytest.approx(1.0)
    assert batch_noise(1, 1, 1).frozen_share == 0.0


@given(labels=st.lists(st.integers(-3, 5), min_size=1, max_size=60), data=st.data())
def test_the_variance_between_bundles_is_that_of_class_indicators(
    labels: list[int], data: st.DataObject
) -> None:
    bundle = data.draw(st.integers(1, len(labels)))
    given_labels = np.array(labels)
    indicators = (given_labels[:, None] == np.unique(given_labels)).astype(np.float64)
    parts = np.split(indicators, range(bundle, len(labels), bundle))
    centre = indicators.mean(axis=0)
    total = ((indicators - centre) ** 2).sum()
    between = sum(len(part) * ((part.mean(axis=0) - centre) ** 2).sum() for part in parts)

    share = label_variance(given_labels, bundle)

    assert share == pytest.approx(between / total if total else 0.0, abs=1e-9)


def test_sorted_ids_have_all_variance_between_bundles_and_scattered_ids_what_chance_gives() -> None:
    labels = np.arange(10_000) // 1000
    shuffled = labels[FullShuffle(10_000, seed=1).at(0, np.arange(10_000))]

    assert label_variance(labels, 1000) == pytest.approx(1.0)
    assert label_variance(labels, 10_000) == pytest.approx(0.0, abs=1e-12)
    assert label_variance(shuffled, 100) == pytest.approx(scattered_variance(10_000, 100), rel=0.15)


# The recommendation


def test_the_recommended_bundle_is_the_best_of_all_within_the_tolerance_by_brute_force() -> None:
    setting = Setting(samples=3000, cache=1000, epochs=10, batch_size=10, spare_share=0.0)

    found = recommend(setting, tolerate=0.2).chosen

    allowed = [
        (bundle, expected_hit_share(3000, 1000, 10, bundle))
        for bundle in sorted({-(-3000 // n) for n in range(1, 3001)}, reverse=True)
        if bundle >= 10 and 10 * (3000 - bundle) / (bundle * (3000 - 10)) <= 0.2
    ]
    best = max(ratio for _, ratio in allowed)
    assert found.bundle == next(bundle for bundle, ratio in allowed if ratio >= 0.99 * best) == 1000
    assert found.hit_share == pytest.approx(setting.bound)


def test_a_cache_with_space_to_spare_holds_a_whole_number_of_recommended_bundles() -> None:
    found = recommend(Setting(108_754, 32_626, 20), tolerate=0.1).chosen

    assert found.setting.effective_cache % found.bundle > 0.95 * found.bundle
    assert found.hit_share > 0.97 * found.setting.bound
    assert found.randomness_lost < 0.1
    assert BundleShuffle(108_754, bundle_ratio=found.bundle_ratio).bundle == found.bundle


def test_no_tolerance_leaves_a_full_shuffle() -> None:
    found = recommend(Setting(1000, 300, 5, batch_size=10), tolerate=0.0)

    assert found.chosen.bundle == 1000
    assert found.chosen.bundle_ratio == 1.0
    assert "full shuffle" in found.reason


@pytest.mark.parametrize(("cache", "epochs"), [(0, 10), (2000, 10), (300, 1)])
def test_where_bundles_gain_nothing_a_full_shuffle_is_recommended(cache: int, epochs: int) -> None:
    """Nothing fits, all fits, or no epoch follows the first."""
    assert recommend(Setting(1000, cache, epochs, batch_size=10), tolerate=0.9).chosen.bundle == 1000


@for_each("reach", [0.0, 0.05, 0.15, 0.25])
def test_the_largest_bundle_that_reaches_a_hit_share_is_found(reach: float) -> None:
    setting = Setting(2000, 600, 10, batch_size=10)

    found = recommend(setting, reach=reach).chosen

    larger = [bundle for bundle in even_bundles(2000) if bundle > found.bundle]
    assert found.hit_share >= reach
    assert all(Choice(setting, bundle).hit_share < reach for bundle in larger)


def test_a_hit_share_out_of_reach_is_refused_with_what_can_be_had() -> None:
    with pytest.raises(ConfigError, match=r"no order more than 27\.00%"):
        recommend(Setting(2000, 600, 10, batch_size=10), reach=0.28)


def test_full_shuffle_and_the_papers_ratio_stand_beside_the_recommendation() -> None:
    found = recommend(Setting(10_000, 3_333, 10))

    assert found.chosen in found.beside
    assert {each.bundle for each in found.beside} >= {10_000, 1_000}
    assert [each.bundle for each in found.beside] == sorted(
        (each.bundle for each in found.beside), reverse=True
    )


@given(samples=st.integers(1, 20_000))
def test_even_bundles_go_from_all_samples_to_one_and_cut_evenly(samples: int) -> None:
    bundles = list(even_bundles(samples))

    assert bundles[0] == samples
    assert bundles[-1] == 1
    assert bundles == sorted(set(bundles), reverse=True)
    # The last of n bundles is short by fewer than n samples.
    assert all((-samples) % bundle < -(-samples // bundle) for bundle in bundles)


@given(samples=st.integers(1, 10**12), data=st.data())
def test_the_ratio_of_a_bundle_gives_back_the_bundle(samples: int, data: st.DataObject) -> None:
    bundle = data.draw(st.integers(1, samples))

    assert BundleShuffle(samples, bundle_ratio=ratio_of(bundle, samples)).bundle == bundle


# What is refused


@for_each(
    ("fields", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"cache": -1}, "cache is -1"),
        ({"cache": 1.5}, "cache is 1.5"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1001}, "batch_size is 1001"),
        ({"spare_share": 1.0}, "spare_share is 1.0"),
        ({"spare_share": math.nan}, "spare_share is nan"),
        ({"spare_share": -0.1}, "spare_share is -0.1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_field(fields: dict[str, float], message: str) -> None:
    good = {"samples": 1000, "cache": 300, "epochs": 5, "batch_size": 10, "spare_share": 0.02}

    with pytest.raises(ConfigError, match=message):
        Setting(**{**good, **fields})  # type: ignore[arg-type]


@for_each("wish", [{"tolerate": 1.5}, {"tolerate": math.nan}, {"reach": -0.1}, {"reach": True}])
def test_a_wish_that_is_no_share_is_refused(wish: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        recommend(Setting(1000, 300, 5), **wish)


def test_two_wishes_are_refused() -> None:
    with pytest.raises(ConfigError, match="both given"):
        recommend(Setting(1000, 300, 5), tolerate=0.1, reach=0.1)


def test_labels_and_bundles_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="labels"):
        label_variance([0.5, 1.0], 1)
    with pytest.raises(ConfigError, match="labels"):
        label_variance(np.zeros(0, np.int64), 1)
    with pytest.raises(ConfigError, match="bundle is 3"):
        label_variance([0, 1], 3)
    with pytest.raises(ConfigError, match="bundle is 0"):
        expected_hit_share(10, 5, 2, bundle=0)
    with pytest.raises(ConfigError, match="between"):
        batch_noise(100, 10, 5, between=1.1)
