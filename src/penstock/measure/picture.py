"""What all pictures share: ink, axes, and how they are saved. Importing it imports no matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf")


class Colour:
    """The palette of Okabe and Ito, which colour-blind readers can tell apart; and greys."""

    BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
    YELLOW = "#F0E442"
    INK, DARK, FAINT, PALE = "#222222", "#4A4A4A", "#8A8F96", "#C9CDD2"
    GRID = "#E6E8EB"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, laid out so that nothing overlaps; needs no display."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def style_axes(axes: Axes) -> None:
    """Draw axes thin and behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(Colour.FAINT)
    axes.tick_params(colors=Colour.INK, labelsize=9, color=Colour.FAINT)
    axes.grid(axis="y", color=Colour.GRID, lw=0.8)
    axes.set_axisbelow(True)


def title_axes(axes: Axes, title: str, below: str = "") -> None:
    """Name axes at their left; `below` stands under the title in smaller letters."""
    if not below:
        axes.set_title(title, fontsize=11, fontweight="bold", color=Colour.INK, loc="left")
        return
    axes.set_title(title, fontsize=11.5, fontweight="bold", color=Colour.INK, loc="left", pad=20.0)
    axes.annotate(
        below,
        (0.0, 1.0),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color=Colour.INK,
    )


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a name that no picture can have, before anything is computed for it.

    Raises: ConfigError for another ending than .png, .svg or .pdf, a folder, or a missing one; ImportError without
        matplotlib.
    """
    import matplotlib.figure  # noqa: F401  (told now, not when everything is computed)

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
