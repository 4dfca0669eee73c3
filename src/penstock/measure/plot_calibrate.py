"""Pictures of a thorough calibration: bytes a second by number of threads, as Figures 5.1 to 5.3 of the thesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.measure.file_rates import MeasuredCurve
from penstock.measure.picture import Colour, count_in_wholes, name_axes, new_figure
from penstock.measure.thorough import ThoroughCalibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (Colour.BLUE, Colour.SKY, Colour.GREEN, Colour.RED, Colour.ORANGE)


def draw_calibration(found: ThoroughCalibration) -> Figure:
    """Return a panel for each place that was measured: medians, with their intervals as bars."""
    panels = [(place, curves, "threads") for place, curves in found.places() if curves]
    if found.ranks is not None:
        panels.append(("shared by ranks", (found.ranks.clients, found.ranks.sequential), "ranks"))
    figure = new_figure(1.0 + 4.4 * len(panels), 4.6)
    for axes, (place, curves, users) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _draw(axes, curves)
        name_axes(axes, place, x=users, y="MB/s")
    return figure


def _draw(axes: Axes, curves: Sequence[MeasuredCurve]) -> None:
    for curve, colour in zip(curves, _COLOURS, strict=False):
        spreads = [spread for _, spread in curve.points]
        medians = [spread.median / 1e6 for spread in spreads]
        below = [(spread.median - spread.low) / 1e6 for spread in spreads]
        above = [(spread.high - spread.median) / 1e6 for spread in spreads]
        users = [count for count, _ in curve.points]
        axes.errorbar(
            users,
            medians,
            yerr=(below, above),
            color=colour,
            lw=1.6,
            marker="o",
            ms=4,
            capsize=2.5,
            label=curve.access.label,
        )
    axes.set_ylim(bottom=0)
    count_in_wholes(axes.xaxis)
    axes.legend(frameon=False, fontsize=8.5)
