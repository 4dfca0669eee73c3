"""A picture of where reads are served from, by how much of the data set the ranks hold.

Needs matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.measure.picture import Colour, new_figure, save_picture, style_axes
from penstock.simulate.sharing import COVER, FREQUENCY, HASH, LOCAL, MIN, PUSH, ReadCounts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Lines that may lie on each other are told apart by dashes and markers.
_LOOK: dict[str, tuple[str, Any, str]] = {
    HASH: (Colour.DARK, (0, (1, 1.2)), "x"),
    FREQUENCY: (Colour.RED, "-", "o"),
    MIN: (Colour.ORANGE, (0, (6, 2, 1, 2)), "v"),
    COVER: (Colour.BLUE, "-", "s"),
    PUSH: (Colour.PURPLE, (0, (5, 2)), "D"),
    LOCAL: (Colour.GREEN, "-", "^"),
}
_PANELS = (
    ("local when read", "local"),
    ("sent between ranks, for a read or ahead", "peer_reads"),
    ("read from the shared store", "store_reads"),
)


def plot_sharing(
    cache_shares: Sequence[float],
    counted: Sequence[Mapping[str, ReadCounts]],
    bounds: Sequence[float],
    path: str | os.PathLike[str],
) -> None:
    """Draw local, moved and shared-store reads against N C / F into a file.

    cache_shares: N C / F. counted: for each, the counts by scheme. bounds: for each, the least share of store reads.
    path: of the picture; its ending decides the format (png, svg, pdf).
    Raises: ConfigError when there is nothing to draw or the ending is none of a picture; ImportError without
        matplotlib.
    """
    save_picture(draw(cache_shares, counted, bounds), path)


def draw(
    cache_shares: Sequence[float], counted: Sequence[Mapping[str, ReadCounts]], bounds: Sequence[float]
) -> Figure:
    """Return the picture of `plot_sharing` as a figure: three panels that share both axes."""
    if not counted:
        raise ConfigError("no cache size was given to draw: give at least one")

    order = np.argsort(cache_shares)
    held = np.asarray(cache_shares, np.float64)[order]
    figure = new_figure(11.0, 4.6)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, (title, what) in zip(panels, _PANELS, strict=True):
        style_axes(axes)
        axes.set_title(title, fontsize=11, color=Colour.INK, loc="left")
        axes.set_xlabel("held by all ranks, N C / F")
        if what == "store_reads":
            least = 100.0 * np.asarray(bounds)[order]
            axes.fill_between(held, least, color=Colour.PALE, lw=0, label="no scheme reads less")
        for name, look in _LOOK.items():
            if name in counted[0]:
                shares = [
                    100.0 * by_scheme[name].share(getattr(by_scheme[name], what)) for by_scheme in counted
                ]
                _draw_line(axes, held, np.asarray(shares)[order], name, look)
    panels[0].set_ylabel("% of all reads")
    panels[0].set_ylim(-2.0, 102.0)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _draw_line(
    axes: Axes,
    held: NDArray[np.float64],
    percent: NDArray[np.float64],
    name: str,
    look: tuple[str, Any, str],
) -> None:
    colour, dashes, marker = look
    axes.plot(held, percent, color=colour, ls=dashes, marker=marker, ms=4.5, mfc="white", lw=1.8, label=name)
