"""A picture of hit ratios by cache size, with the bound behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from penstock.measure.picture import Colour, Panel, Series, draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: By what a line shows, so that a policy looks alike in every picture.
_COLOUR_OF = {
    "LRU": Colour.RED,
    "LFU": Colour.BLUE,
    "MRU": Colour.GREEN,
    "CLOCK": Colour.ORANGE,
    "FIFO": Colour.PURPLE,
    "PERFECT-LFU": Colour.SKY,
    "MIN": Colour.INK,
    "full shuffle": Colour.RED,
    "sequential": Colour.PURPLE,
}
_COLOURS = (Colour.BLUE, Colour.GREEN, Colour.ORANGE, Colour.SKY, Colour.PURPLE, Colour.INK, Colour.RED)
#: Lines that may lie on each other stay visible through each other's gaps.
_DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 3)))


def cache_panel(
    title: str,
    cache_shares: Sequence[float],
    hit_shares: Mapping[str, ArrayLike],
    bound: tuple[str, ArrayLike] | None = None,
) -> Panel:
    """Return a line for each label, over its bound: float64[sizes] each, as shares."""
    sizes = 100.0 * np.array(cache_shares)
    series = []
    if bound is not None:
        series.append(Series(bound[0], sizes, 100.0 * np.asarray(bound[1]), Colour.PALE, width=6.0))
    known = [_COLOUR_OF[label] for label in hit_shares if label in _COLOUR_OF]
    free = cycle([colour for colour in _COLOURS if colour not in known])
    for (label, ratios), dashes in zip(hit_shares.items(), cycle(_DASHES), strict=False):
        colour = _COLOUR_OF.get(label) or next(free)
        series.append(Series(label, sizes, 100.0 * np.asarray(ratios), colour, dashes, width=1.8))
    return Panel(title, series)


def draw_caches(panels: Sequence[Panel], of_what: str = "samples") -> Figure:
    """Return panels of `cache_panel` side by side. of_what: the sizes are relative to."""
    figure = draw_panels(panels, x_label=f"cache size (% of {of_what})", y_label="hit ratio (% of requests)")
    sizes = [np.max(series.x) for panel in panels for series in panel.series]
    figure.axes[0].set_xlim(0.0, float(max(sizes)))
    figure.axes[0].set_ylim(bottom=0.0)
    return figure
