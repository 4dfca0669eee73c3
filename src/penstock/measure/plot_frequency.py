"""A picture of how often a rank reads the same sample: Figure 3.1 of the thesis, with its formula.

Needs matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.measure.picture import Colour, new_figure, save_picture, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MANY, _FEW = Colour.RED, "#9DB8CC"


def plot_frequency(
    expected: NDArray[np.float64],
    counted: NDArray[np.int64],
    more_than: float,
    path: str | os.PathLike[str],
) -> None:
    """Draw a histogram of reads per sample and the binomial distribution over it into a file.

    expected, counted: [E + 1], samples read 0, 1, ..., E times by a rank. more_than: the reads above which bars are
        marked. path: of the picture; its ending decides the format (png, svg, pdf).
    Raises: ConfigError when the ending is none of a picture; ImportError without matplotlib.
    """
    save_picture(draw(expected, counted, more_than), path)


def draw(expected: NDArray[np.float64], counted: NDArray[np.int64], more_than: float) -> Figure:
    """Return the picture of `plot_frequency` as a figure."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    style_axes(axes)
    reads = np.arange(counted.size)
    shown = np.flatnonzero((counted > 0) | (expected > 0.01))
    many = reads > more_than
    for part, colour, label in (
        (~many, _FEW, None),
        (many, _MANY, f"read more than {more_than:g} times: {counted[many].sum():,} samples"),
    ):
        axes.bar(reads[part], counted[part], 1.0, color=colour, label=label)
    axes.plot(
        reads,
        expected,
        color=Colour.INK,
        lw=1.4,
        label=f"expected, B(E, 1/N): {expected[many].sum():,.0f} above",
    )
    axes.axvline(more_than, color=Colour.FAINT, lw=1.0, ls=(0, (3, 2)))
    axes.set_xlim(shown[0] - 1.0, shown[-1] + 1.0)
    axes.set_ylim(0.0, 1.22 * max(float(counted.max()), float(expected.max())))
    axes.set_xlabel("times that the rank reads a sample during the training", color=Colour.INK)
    axes.set_ylabel("samples", color=Colour.INK)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure
