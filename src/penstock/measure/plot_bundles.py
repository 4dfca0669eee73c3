"""A picture of what a buffer cache hits by the size of bundles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from penstock.measure.picture import DASHED, Colour, Panel, Series, draw_panels
from penstock.simulate.bundle_choice import Choice, Recommendation, even_bundles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_recommendation(recommendation: Recommendation, counted: Mapping[int, float]) -> Figure:
    """Return the expected hit ratio by bundle_ratio below its bound, with the recommended one marked.

    counted: by bundle, the hit ratio that a replay counted.
    """
    chosen = recommendation.chosen
    setting = chosen.setting
    bundles = [bundle for bundle in even_bundles(setting.samples) if bundle * 2000 >= setting.samples]
    ratios = np.array(bundles) / setting.samples
    expected = [100 * Choice(setting, bundle).hit_share for bundle in bundles]
    bound = np.full(ratios.size, 100 * setting.bound)
    series = [
        Series("bound of every order and policy", ratios, bound, Colour.INK, DASHED, width=1.2),
        Series("expected, LRU", ratios, expected, Colour.BLUE, width=1.2),
        Series(
            "counted by replay",
            [bundle / setting.samples for bundle in counted],
            [100 * ratio for ratio in counted.values()],
            Colour.BLUE,
            "",
            "o",
            is_open=True,
        ),
        Series(
            f"recommended: {chosen.bundle_ratio:g}",
            [chosen.bundle / setting.samples],
            [100 * chosen.hit_share],
            Colour.RED,
            "",
            "*",
            size=15.0,
        ),
    ]
    below = f"{setting.samples:,} samples, cache of {setting.cache / setting.samples:.0%}, {setting.epochs} epochs"
    figure = draw_panels(
        [Panel("What the cache hits", series if counted else [*series[:2], series[3]], below)],
        x_label="bundle_ratio",
        y_label="reads that hit the cache (%)",
        size=(7.0, 4.6),
    )
    (axes,) = figure.axes
    scale_by_ratio(axes, float(ratios.min()))
    axes.set_ylim(0, 118 * setting.bound or 1)
    return figure


def scale_by_ratio(axes: Axes, smallest: float) -> None:
    """Scale the horizontal axis for bundle ratios from the smallest to 1."""
    axes.set_xscale("log")
    axes.set_xlim(min(smallest, 0.005) / 1.4, 1.4)
    ticks = [tick for tick in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001) if tick >= smallest / 1.4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
