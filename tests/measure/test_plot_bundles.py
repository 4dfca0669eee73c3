"""Pictures of bundles: they show the numbers they were given, with the bound beside them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image

from penstock.measure.convergence import SCATTERED, read_study
from penstock.measure.plot_bundles import (
    draw_curves,
    draw_effective_cache,
    draw_recommendation,
    draw_table_1,
)
from penstock.simulate.bundles import PAPER_TABLE_1, Setting, hit_curves, recommend, table_1

pytestmark = pytest.mark.usefixtures("fonts")


def x_of(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_xdata(), np.float64)


def y_of(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_ydata(), np.float64)


def lines_of(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.lines}


def test_the_recommendation_stands_on_its_curve_below_the_bound() -> None:
    found = recommend(Setting(5000, 1500, 10), tolerate=0.2)

    figure = draw_recommendation(found, [(found.chosen, 0.25)], read_study())

    lines = lines_of(figure.axes[0])
    star = lines[f"recommended: {found.chosen.bundle_ratio:g}"]
    curve = lines["expected, LRU"]
    assert (x_of(star).tolist(), y_of(star).tolist()) == (
        [found.chosen.bundle / 5000],
        [100 * found.chosen.hit_ratio],
    )
    assert np.max(y_of(curve)) <= 27.0
    np.testing.assert_allclose(y_of(lines["bound of every order and policy"]), 27.0)
    assert y_of(lines["counted by replay"]).tolist() == [25.0]


def test_accuracies_are_drawn_by_ratio_and_by_epoch() -> None:
    study = read_study()

    figure = draw_recommendation(recommend(Setting(5000, 1500, 10)), [], study)

    _, accuracy, scattered, by_class = figure.axes
    means = [100 * (1 - study.final(SCATTERED, ratio).mean()) for ratio in study.ratios]
    drawn = [line for line in accuracy.lines if len(x_of(line)) == len(means)]
    assert any(np.allclose(y_of(line), means) for line in drawn)
    full = lines_of(scattered)["1 (full shuffle)"]
    np.testing.assert_allclose(y_of(full), 100 * study.by_epoch(SCATTERED, 1.0).mean(axis=0))
    assert len(by_class.lines) == len(scattered.lines) == 5


def test_table_1_shows_every_node_of_the_paper_and_ours() -> None:
    rows = table_1(samples=2000, nodes=(2, 4))

    original, proposed = draw_table_1(rows, 5).axes

    for axes, column in ((original, 0), (proposed, 1)):
        crosses = np.concatenate([y_of(line) for line in axes.lines if line.get_marker() == "x"])
        assert crosses.tolist() == [row[column] for nodes in (2, 4) for row in PAPER_TABLE_1[nodes]]
        dots = np.concatenate([y_of(line) for line in axes.lines if line.get_marker() == "o"])
        np.testing.assert_allclose(dots, [100 * (row.original, row.proposed)[column] for row in rows])
    np.testing.assert_allclose(y_of(lines_of(proposed)["bound, cache of 50%"]), 40)


def test_the_effective_cache_is_drawn_with_the_papers_mean_and_the_bound() -> None:
    caches = [450, 490, 500]
    curves = hit_curves(1000, 5, [1.0, 0.1], caches)

    full, bundles = draw_effective_cache(curves, 5, 1000).axes

    for axes, curve, mean in ((full, curves[0], 11.97), (bundles, curves[1], 37.18)):
        lines = lines_of(axes)
        np.testing.assert_allclose(y_of(lines["counted by replay"]), 100 * np.array(curve.counted))
        np.testing.assert_allclose(y_of(lines["the paper's nodes: mean"]), mean, atol=0.005)
        computed, bound = (y_of(lines[name]) for name in ("computed", "bound of every policy"))
        assert (computed <= bound + 1e-9).all()


def test_curves_of_all_ratios_stay_below_the_bound() -> None:
    curves = hit_curves(1000, 5, [1.0, 0.5, 0.1], [100, 500])

    lines = lines_of(draw_curves(curves, 5, 1000).axes[0])

    bound = y_of(lines["bound of every order and policy"])
    for name in ("bundle_ratio 1 (full shuffle)", "bundle_ratio 0.5", "bundle_ratio 0.1"):
        assert (y_of(lines[name]) <= bound + 1e-9).all()


def test_a_picture_is_one_for_anybody() -> None:
    file = io.BytesIO()

    draw_curves(hit_curves(100, 3, [0.1], [10, 50]), 3, 100).savefig(file)

    assert Image.open(file).size[0] > 500
