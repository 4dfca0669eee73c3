"""A picture of hit rates by cache size, with the bound behind them.

Needs matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.measure.picture import Colour, new_figure, save_picture, style_axes, title_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Hit ratios by relative cache size: float64[sizes] both."""

    label: str
    cache_share: NDArray[np.float64]
    hit_ratio: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Lines that share their axes. bound: drawn behind them; None where nothing is known."""

    title: str
    lines: Sequence[Line]
    bound: Line | None = None


def plot_caches(panels: Sequence[Panel], path: str | os.PathLike[str], *, of_what: str = "samples") -> None:
    """Draw panels side by side into a file.

    path: of the picture; its ending decides the format (png, svg, pdf). of_what: the sizes are relative to.
    Raises: ConfigError when there is no panel or line, or the ending is none of a picture; ImportError without
        matplotlib.
    """
    save_picture(draw(panels, of_what), path)


def draw(panels: Sequence[Panel], of_what: str) -> Figure:
    """Return the picture of `plot_caches` as a figure. All panels share their axes' scales."""
    if not panels or not all(panel.lines for panel in panels):
        raise ConfigError(f"{len(panels)} panels were given to draw; each needs a line")

    figure = new_figure(1.4 + 4.2 * len(panels), 4.4)
    row = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, panel in zip(row, panels, strict=True):
        style_axes(axes)
        _draw_panel(axes, panel)
        axes.set_xlabel(f"cache size (% of {of_what})")
    row[0].set_ylabel("hit rate (% of requests)")
    row[0].set_xlim(0.0, 100.0 * max(line.cache_share.max() for panel in panels for line in panel.lines))
    row[0].set_ylim(bottom=0.0)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    title_axes(axes, panel.title)
    if panel.bound is not None:
        axes.plot(
            100.0 * panel.bound.cache_share,
            100.0 * panel.bound.hit_ratio,
            color=Colour.PALE,
            lw=6.0,
            solid_capstyle="butt",
            label=panel.bound.label,
            zorder=1,
        )
    free = [
        colour
        for colour in _COLOURS
        if colour not in map(_COLOUR_OF.get, (each.label for each in panel.lines))
    ]
    for index, line in enumerate(panel.lines):
        axes.plot(
            100.0 * line.cache_share,
            100.0 * line.hit_ratio,
            color=_COLOUR_OF.get(line.label) or free.pop(0),
            lw=1.8,
            ls=_DASHES[index % len(_DASHES)],
            label=line.label,
            zorder=2 + index,
        )
    axes.legend(loc="upper left", frameon=False, fontsize=9, handlelength=2.6)
