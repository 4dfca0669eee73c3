"""Drawn sizes against SciPy's own distributions and Python's own quantiles, and what cannot be a distribution."""

import statistics
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.simulate.sizes import SizeDistribution, SizesOfFolder, _normal_quantile


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
def test_normal_quantiles_are_those_of_the_standard_library(uniform: float) -> None:
    expected = statistics.NormalDist().inv_cdf(uniform)

    assert _normal_quantile(np.array([uniform]))[0] == pytest.approx(expected, rel=1e-12, abs=1e-15)


@for_each(
    ("name", "parameters", "law"),
    [
        ("normal", {"loc": 1e6, "scale": 1e5}, lambda stats: stats.norm(1e6, 1e5)),
        ("norm", {"loc": 1e6, "scale": 1e5}, lambda stats: stats.norm(1e6, 1e5)),
        ("uniform", {"loc": 1e5, "scale": 3e5}, lambda stats: stats.uniform(1e5, 3e5)),
        ("lognorm", {"s": 0.5, "scale": 1e5}, lambda stats: stats.lognorm(0.5, scale=1e5)),
        ("gamma", {"a": 2.0, "loc": 5e4, "scale": 1e5}, lambda stats: stats.gamma(2, 5e4, 1e5)),
        ("pareto", {"b": 2.5, "scale": 1e6}, lambda stats: stats.pareto(2.5, scale=1e6)),
        ("poisson", {"mu": 1e6}, lambda stats: stats.poisson(1e6)),
    ],
)
def test_drawn_sizes_follow_the_distribution(name: str, parameters: dict[str, float], law: Any) -> None:
    """Kolmogorov and Smirnov's test; the seed is fixed, so it passes always or never."""
    from scipy import stats

    sizes = SizeDistribution(name, 20_000, parameters).sizes_bytes(seed=1)

    assert sizes.dtype == np.int64
    assert stats.kstest(sizes, law(stats).cdf).pvalue > 0.01


def test_sizes_outside_of_the_bounds_are_drawn_again_alone() -> None:
    from scipy import stats

    free = SizeDistribution("normal", 5_000, {"loc": 1000, "scale": 500}, min_bytes=0, max_bytes=10**6)
    bound = SizeDistribution("normal", 5_000, {"loc": 1000, "scale": 500}, min_bytes=800, max_bytes=1500)

    before, after = free.sizes_bytes(3), bound.sizes_bytes(3)

    inside = (before >= 800) & (before <= 1500)
    np.testing.assert_array_equal(after[inside], before[inside])
    assert after.min() >= 800
    assert after.max() <= 1500
    # What was drawn again follows the distribution between its bounds, 3/5 of a deviation below to one above.
    truncated = stats.truncnorm(-0.401, 1.001, 1000, 500)
    assert stats.kstest(after[~inside], truncated.cdf).pvalue > 0.01


def test_a_size_depends_on_the_seed_and_its_sample_alone() -> None:
    few = SizeDistribution("normal", 1_000, {"loc": 1e8, "scale": 1e7}).sizes_bytes(7)
    many = SizeDistribution("normal", 200_000, {"loc": 1e8, "scale": 1e7}).sizes_bytes(7)
    other = SizeDistribution("normal", 1_000, {"loc": 1e8, "scale": 1e7}).sizes_bytes(8)

    np.testing.assert_array_equal(many[:1_000], few)
    assert not np.array_equal(few, other)
    # Streams are of 65,536 samples each; the second does not repeat the first.
    assert not np.isin(many[65_536:131_072], many[:65_536]).all()
    assert np.count_nonzero(many[65_536:131_072] == many[:65_536]) < 100


def test_constant_sizes_are_all_the_same() -> None:
    np.testing.assert_array_equal(SizeDistribution("constant", 3, {"loc": 42}).sizes_bytes(0), [42, 42, 42])


def test_sizes_are_rounded_to_the_nearest_byte() -> None:
    np.testing.assert_array_equal(SizeDistribution("constant", 1, {"loc": 2.7}).sizes_bytes(0), [3])


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_without_deviation_all_samples_are_as_large(name: str) -> None:
    assert SizeDistribution(name, 3, {"loc": 27_000, "scale": 0}).sizes_bytes(0).tolist() == [27_000] * 3


@for_each(
    ("arguments", "message"),
    [
        (("normal", 0, {"loc": 1, "scale": 1}), "samples is 0"),
        (("normal", 2.5, {"loc": 1, "scale": 1}), "samples is 2.5"),
        (("normal", 5, {"loc": 1}), "scale is missing: the distribution normal needs it"),
        (("normal", 5, {"scale": 1}), "loc is missing"),
        (("normal", 5, {"loc": 1, "scale": -1}), "scale is -1; it must be zero or more"),
        (
            ("normal", 5, {"loc": 1, "scale": float("nan")}),
            "scale is nan; a distribution's parameters are finite",
        ),
        (("lognorm", 5, {"s": 1, "scale": 0}), "scale is 0; it must be above zero"),
        (
            ("normal", 5, {"loc": float("nan"), "scale": 1}),
            "loc is nan; a distribution's parameters are finite",
        ),
        (("normal", 5, {"loc": 1, "scale": float("inf")}), "scale is inf"),
        (("normal", 5, {"loc": "1", "scale": 1}), "loc is '1'"),
        (
            ("normal", 5, {"loc": 1, "scale": 1, "s": 2}),
            "s is no parameter of the distribution normal; it has loc",
        ),
        (("constant", 5, {"loc": 1, "scale": 1}), "scale is no parameter of the distribution constant"),
        (("lognorm", 5, {"scale": 1}), "s is missing: the distribution lognorm needs it"),
        (("lognorm", 5, {"s": -1, "scale": 3}), "lognorm has no values for s = -1, scale = 3"),
        (("poisson", 5, {"mu": 3, "scale": 3}), "scale is no parameter of the distribution poisson"),
        (
            ("lognrm", 5, {}),
            "distribution 'lognrm' is not known; did you mean lognorm? The known ones are alpha",
        ),
        (("kstest", 5, {}), "distribution 'kstest' is not known"),
        ((3, 5, {}), "distribution 3 is not known"),
        (("constant", 5, {"loc": 1}, -1), "min_bytes is -1"),
        (("constant", 5, {"loc": 1}, 1.5), "min_bytes is 1.5; it must be an integer"),
        (("constant", 5, {"loc": 1}, 10, 9), "max_bytes is 9, below min_bytes, which is 10"),
    ],
)
def test_what_is_no_distribution_of_sizes_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SizeDistribution(*arguments)

    assert message in str(caught.value)


def test_bounds_that_leave_hardly_a_value_are_an_error_and_no_endless_loop() -> None:
    impossible = SizeDistribution("constant", 5, {"loc": 10}, min_bytes=11)

    with pytest.raises(ConfigError, match="constant has hardly a value from 11 to"):
        impossible.sizes_bytes(0)


def test_without_scipy_the_plain_distributions_work_and_the_others_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)

    for name in ("normal", "uniform"):
        assert SizeDistribution(name, 3, {"loc": 1e5, "scale": 1e3}).sizes_bytes(0).size == 3
    with pytest.raises(ConfigError, match=r"'lognorm' needs SciPy.*pip install 'penstock\[study\]'"):
        SizeDistribution("lognorm", 3, {"s": 1, "scale": 1})


def test_the_sizes_of_a_folder_are_kept_as_they_were() -> None:
    given = np.array([3, 1, 2])
    folder = SizesOfFolder("/data", given)
    given[0] = 99

    assert folder.samples == 3
    np.testing.assert_array_equal(folder.sizes_bytes(seed=5), [3, 1, 2])
    assert folder == SizesOfFolder("/data", np.array([3, 1, 2]))
    assert folder != SizesOfFolder("/data", np.array([3, 1, 4]))
    with pytest.raises(ValueError):
        folder.sizes[0] = 1


@for_each(
    ("sizes", "message"),
    [
        (np.array([], np.int64), "at least one"),
        (np.array([[1]]), "one per sample"),
        (np.array([1.5]), "integers, in bytes"),
        (np.array([1, -2]), r"sizes\[1\] is -2; a size is not negative"),
    ],
)
def test_what_are_no_sizes_is_refused(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SizesOfFolder("/data", sizes)


def test_more_sizes_than_can_be_drawn_are_refused_at_once() -> None:
    assert SizeDistribution("constant", 4 * 10**9, {"loc": 1}).samples == 4 * 10**9

    with pytest.raises(ConfigError, match=r"samples is 4,000,000,001; at most 4,000,000,000 .* 32 GB"):
        SizeDistribution("constant", 4 * 10**9 + 1, {"loc": 1})
