"""What all pictures share: ink, series, panels, and how they are saved.

All need matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf")


class Colour:
    """The palette of Okabe and Ito, which colour-blind readers can tell apart; a brown, and greys."""

    BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
    YELLOW, BROWN = "#F0E442", "#7A4B26"
    INK, DARK, FAINT, PALE = "#222222", "#4A4A4A", "#8A8F96", "#C9CDD2"
    GRID = "#E6E8EB"


#: Dashes by which lines that lie on each other stay visible through each other's gaps.
DASHED, DOTTED, DASH_DOTTED = (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A line, points, or both: y over x, float64[points] each.

    label: in the legend; "" leaves it out. dashes: of the line, as matplotlib has them; "" draws none. marker: of the
    points; "" draws none. is_open: points are rings. width: of the line, in points.
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    colour: str
    dashes: Any = "-"
    marker: str = ""
    is_open: bool = False
    width: float = 1.6
    size: float = 4.5

    def draw(self, axes: Axes) -> None:
        """Draw it over what is there."""
        axes.plot(
            self.x,
            self.y,
            color=self.colour,
            ls=self.dashes,
            lw=self.width,
            marker=self.marker,
            ms=self.size,
            mfc="white" if self.is_open else self.colour,
            label=self.label or None,
            solid_capstyle="butt",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Series that share their axes. below: under the title, in smaller letters."""

    title: str
    series: Sequence[Series]
    below: str = ""


def draw_panels(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    size: tuple[float, float] | None = None,
    is_shared: bool = True,
    legend: Literal["inside", "below"] = "inside",
) -> Figure:
    """Return panels side by side.

    size: width and height in inches; by the number of panels unless given. is_shared: both axes have one scale.
    legend: one in each panel, or one below all, of what is in any.
    Raises: ConfigError if there is no panel, or one without a series.
    """
    if not panels or not all(panel.series for panel in panels):
        raise ConfigError(f"{len(panels)} panels were given to draw; each needs a series")
    figure = new_figure(*size or (1.4 + 4.2 * len(panels), 4.4))
    row = figure.subplots(1, len(panels), squeeze=False, sharex=is_shared, sharey=is_shared)[0]
    for axes, panel in zip(row, panels, strict=True):
        name_axes(axes, panel.title, panel.below, x=x_label)
        for series in panel.series:
            series.draw(axes)
        if legend == "inside" and any(series.label for series in panel.series):
            axes.legend(loc="best", frameon=False, fontsize=9, handlelength=2.6)
    row[0].set_ylabel(y_label)
    if legend == "below":
        add_legend_below(figure)
    return figure


def add_legend_below(
    figure: Figure,
    of: Sequence[Axes] | None = None,
    columns: int = 6,
    *,
    order: Sequence[str] = (),
    place: Literal["outside lower center", "outside lower right"] = "outside lower center",
    **looks: Any,
) -> None:
    """Name below all axes what is in any of them, or in some, each once; of two alike the later one.

    columns: at most; fewer where the names are too long. order: of the names, of which others are left out; as they
        come unless given.
    """
    drawn = {
        label: handle
        for axes in (figure.axes if of is None else of)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [label for label in order or drawn if label in drawn]
    # A letter is 0.07 inches wide, and a line before the name with its gaps 0.6.
    fitting = int(figure.get_figwidth() / (0.07 * max(map(len, labels), default=0) + 0.6))
    looks = {"ncols": max(1, min(len(labels), columns, fitting)), "frameon": False, "fontsize": 9} | looks
    figure.legend([drawn[label] for label in labels], labels, loc=place, **looks)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, laid out so that nothing overlaps; needs no display."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def style_axes(axes: Axes, *, grid: Literal["x", "y"] = "y") -> None:
    """Draw axes thin and behind. grid: lines across which axis, for bars that lie "x"."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(Colour.FAINT)
    axes.tick_params(colors=Colour.INK, labelsize=9, color=Colour.FAINT)
    axes.grid(axis=grid, color=Colour.GRID, lw=0.8)
    axes.set_axisbelow(True)


def name_axes(
    axes: Axes, title: str = "", below: str = "", *, x: str = "", y: str = "", grid: Literal["x", "y"] = "y"
) -> None:
    """Style axes, and name them at their left; `below` stands under the title in smaller letters, x and y along them.

    grid: as of `style_axes`.
    """
    style_axes(axes, grid=grid)
    axes.set_title(
        title,
        fontsize=11.5 if below else 11,
        fontweight="bold",
        color=Colour.INK,
        loc="left",
        pad=20.0 if below else None,
    )
    if below:
        write(axes, below, (0.0, 1.0), (0, 6), xycoords="axes fraction", fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def write(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **looks: Any
) -> None:
    """Write so many points next to a place of the axes. looks: as matplotlib has them."""
    axes.annotate(text, place, offset, textcoords="offset points", **({"color": Colour.INK} | looks))


def stack_bars(
    axes: Axes,
    places: ArrayLike,
    parts: Iterable[tuple[str, NDArray[np.float64], str]],
    width: float,
    start: NDArray[np.float64] | float = 0.0,
    *,
    lie: bool = False,
    **looks: Any,
) -> NDArray[np.float64]:
    """Draw bars on each other, or, where they lie, behind each other; return where they end: float64[places].

    parts: label, size of each bar and colour; what is zero in all bars is left out. looks: as matplotlib has them.
    """
    ends = np.zeros(np.size(places)) + start
    for label, sizes, colour in parts:
        if not np.any(sizes):
            continue
        if lie:
            axes.barh(places, sizes, width, left=ends, color=colour, label=label, **looks)
        else:
            axes.bar(places, sizes, width, bottom=ends, color=colour, label=label, **looks)
        ends = ends + sizes
    return ends


def mark_starts(axes: Axes, places: Iterable[float]) -> None:
    """Draw a thin line behind all where each epoch begins."""
    for place in places:
        axes.axvline(place, color=Colour.FAINT, lw=0.8, ls=(0, (2, 2)), zorder=0)


def count_in_wholes(axis: Axis) -> None:
    """Mark an axis that counts things at integers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True))


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a name that no picture can have, before anything is computed for it.

    Raises: ConfigError for another ending than .png, .svg or .pdf, a folder, or a missing one; ImportError without
        matplotlib.
    """
    import matplotlib.figure  # noqa: F401  (reported now, not when everything is computed)

    picture = Path(path)
    if picture.is_dir():
        raise ConfigError(f"{picture} is a folder: name a file in it that ends in .png, .svg or .pdf")
    if not picture.suffix:
        raise ConfigError(f"{picture} has no ending, which says the format: use .png, .svg or .pdf")
    if picture.suffix.lower() not in _ENDINGS:
        raise ConfigError(
            f"{picture} ends in {picture.suffix!r}, which is no picture: use .png, .svg or .pdf"
        )
    if not picture.absolute().parent.is_dir():
        raise ConfigError(f"{picture}: there is no folder {picture.parent}: make it first")


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure into a file; its ending decides the format (png, svg, pdf).

    A dollar sign in a name is drawn as one: nothing in our pictures is a formula, but what matplotlib writes at the
    ticks of an axis, and that only as it draws.
    Raises: as `check_picture`.
    """
    from matplotlib.text import Text

    check_picture(path)
    for text in figure.findobj(Text):
        if isinstance(text, Text) and "$" in text.get_text():
            text.set_parse_math(False)
    figure.savefig(path, dpi=150)
