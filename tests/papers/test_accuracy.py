"""Figure 9 of the bundle paper: the picture shows the trainings that are kept."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.papers.accuracy import draw_accuracy, figure_9
from penstock.papers.convergence import SCATTERED, read_study


def test_the_results_are_those_of_the_kept_trainings() -> None:
    of_name = {each.of: each for each in figure_9().results}

    assert len(of_name) == 2 * (8 + 7)
    full = of_name["ids scattered, bundle_ratio 1"]
    assert (full.computed, full.published) == (read_study().final(SCATTERED, 1.0).mean(), None)
    assert "ids scattered, bundle_ratio 0.01, less full shuffle (within noise)" in of_name
    assert "ids by class, bundle_ratio 0.5, less full shuffle (beyond noise)" in of_name


@pytest.mark.usefixtures("fonts")
def test_accuracies_are_drawn_by_ratio_and_by_epoch() -> None:
    study = read_study()

    error, by_class, scattered = draw_accuracy(study).axes

    means = [100 * (1 - study.final(SCATTERED, ratio).mean()) for ratio in study.ratios]
    drawn = [np.asarray(line.get_ydata(), np.float64) for line in error.lines]
    assert any(each.size == len(means) and np.allclose(each, means) for each in drawn)
    (full,) = (line for line in scattered.lines if line.get_label() == "bundle_ratio 1 (full shuffle)")
    expected = 100 * study.by_epoch(SCATTERED, 1.0).mean(axis=0)
    np.testing.assert_allclose(np.asarray(full.get_ydata(), np.float64), expected)
    assert len(by_class.lines) == len(scattered.lines) == 5
