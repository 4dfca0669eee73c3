"""The picture of bundles shows the numbers that it was given, with the bound next to them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.measure.plot_bundles import draw_recommendation
from penstock.simulate.bundle_choice import Setting, recommend


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("is_counted", [True, False])
def test_the_recommendation_stands_on_its_curve_below_the_bound(is_counted: bool) -> None:
    found = recommend(Setting(5000, 1500, 10), tolerate=0.2)

    (axes,) = draw_recommendation(found, {found.chosen.bundle: 0.25} if is_counted else {}).axes

    drawn = {str(line.get_label()): np.asarray(line.get_xydata(), np.float64) for line in axes.lines}
    star = drawn[f"recommended: {found.chosen.bundle_ratio:g}"]
    assert star.tolist() == [[found.chosen.bundle / 5000, 100 * found.chosen.hit_share]]
    assert np.max(drawn["expected, LRU"][:, 1]) <= 27.0
    np.testing.assert_allclose(drawn["bound of every order and policy"][:, 1], 27.0)
    assert ("counted by replay" in drawn) == is_counted
    if is_counted:
        assert drawn["counted by replay"].tolist() == [[found.chosen.bundle / 5000, 25.0]]
