"""Figure 3.1 of the thesis: the formula is exact, the count as the formula expects."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from penstock.papers.thesis_frequency import draw_histogram, expected_histogram, figure_3_1


def test_the_example_of_the_thesis_expects_323_samples_and_counts_about_329() -> None:
    repeated = figure_3_1()

    expected, *counted = (row.computed for row in repeated.results)

    exactly = 10_000 * Fraction(sum(comb(1_000, k) * 3 ** (1_000 - k) for k in range(276, 1_001)), 4**1_000)
    assert expected == pytest.approx(float(exactly), rel=1e-9)
    assert round(float(exactly)) == 323
    assert counted == [328, 332, 358, 313]  # with this seed; 329 in the thesis
    assert abs(np.mean([count or 0 for count in counted]) - 323) < 3 * 323**0.5 / 2
    assert "378" in repeated.why


def test_a_histogram_is_of_all_samples() -> None:
    assert expected_histogram(10_000, epochs=1_000, ranks=4).sum() == pytest.approx(10_000, rel=1e-9)


@pytest.mark.usefixtures("fonts")
def test_bars_above_the_limit_are_counted_in_the_legend() -> None:
    counted = np.zeros(1_001, np.int64)
    counted[[250, 275, 276, 300]] = [7, 5, 3, 1]

    (axes,) = draw_histogram(expected_histogram(16, 1_000, 4), counted).axes

    _, labels = axes.get_legend_handles_labels()
    assert "read more than 275 times: 4 samples" in labels
