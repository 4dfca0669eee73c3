"""Linear interpolation, thesis equation 4.1, against NumPy's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve

THESIS_CLIENTS = (
    (1, 66e6),
    (2, 86e6),
    (4, 146e6),
    (8, 326e6),
    (16, 324e6),
    (32, 324e6),
    (64, 324e6),
    (128, 324e6),
)

positive = st.floats(min_value=1e-3, max_value=1e12)
points = st.dictionaries(positive, positive, min_size=1, max_size=8).map(
    lambda found: tuple(sorted(found.items()))
)


@given(points, st.floats(min_value=0, max_value=2e12))
def test_a_curve_agrees_with_numpy_everywhere(
    measured: tuple[tuple[float, float], ...], users: float
) -> None:
    xs, ys = zip(*measured, strict=True)

    assert Curve(measured).at(users) == pytest.approx(float(np.interp(users, xs, ys)), rel=1e-9)


def test_the_curve_of_the_thesis_is_interpolated_at_three_and_constant_outside() -> None:
    curve = Curve(THESIS_CLIENTS)

    assert curve.at(3) == pytest.approx(116e6)
    assert curve.at(6) == pytest.approx(236e6)
    assert curve.at(0.5) == 66e6
    assert curve.at(1000) == 324e6


def test_a_flat_curve_is_the_same_for_all() -> None:
    assert [Curve.flat(5e7).at(users) for users in (1, 2, 64)] == [5e7, 5e7, 5e7]


@for_each(
    ("measured", "message"),
    [
        ((), "no points"),
        (((1, 0.0),), "finite and above zero"),
        (((1, -3.0),), "finite and above zero"),
        (((1, math.nan),), "finite and above zero"),
        (((1, math.inf),), "finite and above zero"),
        (((0, 5.0),), "0 users"),
        (((math.nan, 5.0),), "nan users"),
        (((1, 5.0), (1, 6.0)), "1 users occur twice"),
        (((2, 5.0), (1, 6.0)), "sort the points"),
    ],
)
def test_a_curve_that_nobody_can_have_measured_is_refused(
    measured: tuple[tuple[float, float], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Curve(measured)
