"""A picture of ways to lay a data set out and to read it: where the run's time is spent, and when a rewrite pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.measure.picture import (
    Colour,
    Series,
    count_in_wholes,
    mark_starts,
    name_axes,
    new_figure,
    write,
)
from penstock.simulate.layout import LayoutComparison, LayoutOption, Name
from penstock.simulate.layout_verdict import TITLES
from penstock.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_OF: dict[Name, str] = {
    "samples": Colour.DARK,
    "ranges": Colour.SKY,
    "sieving": Colour.BLUE,
    "collective": Colour.GREEN,
    "packed": Colour.PURPLE,
    "rewritten": Colour.ORANGE,
}
_DASHES = {"rewritten": (0, (2, 1.5)), "ranges": (0, (6, 2, 1, 2))}
#: A break-even further out than so many times the run's epochs is not worth an axis.
_FURTHEST = 4


def draw_layout(comparison: LayoutComparison) -> Figure:
    """Return bars of the run's time, and that time by number of epochs."""
    figure = new_figure(10.4, 4.2)
    bars, lines = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.0, 1.0]})
    _draw_bars(bars, comparison)
    _draw_lines(lines, comparison)
    return figure


def _draw_bars(axes: Axes, comparison: LayoutComparison) -> None:
    options = comparison.options[::-1]
    places = np.arange(len(options))
    rewriting = np.array([option.once_seconds for option in options])
    reading = np.array([option.run_seconds for option in options]) - rewriting
    colours = [_COLOUR_OF[option.name] for option in options]
    axes.barh(places, rewriting, 0.66, color="white", edgecolor=colours, hatch="////", lw=0.8)
    axes.barh(places, reading, 0.66, left=rewriting, color=colours)
    for place, option in zip(places, options, strict=True):
        at = option.run_seconds, float(place)
        write(axes, format_seconds(option.run_seconds), at, (4, 0), va="center", fontsize=9)
    axes.set_yticks(places, [TITLES[option.name] for option in options])
    axes.set_xlim(0.0, 1.2 * max(option.run_seconds for option in options) or 1.0)
    title = f"{comparison.epochs} epochs on the store's wire"
    name_axes(axes, title, x="time (s); hatched: writing the data set anew", grid="x")


def _draw_lines(axes: Axes, comparison: LayoutComparison) -> None:
    epochs = np.arange(1, _last_epoch(comparison) + 1)
    for option in comparison.options:
        seconds = [option.seconds_after(int(count)) for count in epochs]
        colour, dashes = _COLOUR_OF[option.name], _DASHES.get(option.name, "-")
        marker = "o" if epochs.size == 1 else ""
        Series(TITLES[option.name], epochs, seconds, colour, dashes, marker, width=1.8, size=6.0).draw(axes)
    count_in_wholes(axes.xaxis)
    if epochs.size > 1:
        mark_starts(axes, [comparison.epochs])
        axes.set_xlim(1, int(epochs[-1]))
    axes.set_ylim(bottom=0.0)
    name_axes(axes, "by number of epochs", x="epochs of the run", y="time (s)")
    axes.legend(loc="upper left", frameon=False, fontsize=9, handlelength=2.6)


def _last_epoch(comparison: LayoutComparison) -> int:
    """As far as the break-evens that are near enough to be of interest."""
    furthest = _FURTHEST * comparison.epochs

    def shown(option: LayoutOption) -> int:
        even = option.break_even_epochs
        return 0 if even is None or even > furthest else 2 * even

    return max(comparison.epochs, *map(shown, comparison.options))
