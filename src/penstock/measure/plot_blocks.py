"""Pictures of access sequences: the number of the block over logical time, coloured by phase.

As Figures 2 to 4 of Lee & Bahn, "Analyzing data reference characteristics of deep learning workloads for
improving buffer cache performance", Applied Sciences 2023. Needs matplotlib (`pip install penstock[plot]`), which is
imported when something is drawn, and no display.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.measure.picture import (
    Colour,
    add_legend_below,
    check_picture,
    count_in_wholes,
    name_axes,
    new_figure,
    save_picture,
)
from penstock.recordings.blocks import BLOCK_BYTES, BlockString, Phase, Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR_OF = {
    Phase.LIBRARY: Colour.ORANGE,
    Phase.DATA: Colour.BLUE,
    Phase.CHECKPOINT: Colour.RED,
    Phase.OTHER: Colour.FAINT,
}
_LABEL_OF = {
    Phase.LIBRARY: "reading libraries",
    Phase.DATA: "reading the data set",
    Phase.CHECKPOINT: "checkpointing",
    Phase.OTHER: "other files",
}
#: More points than this in one picture add time and no ink: every so many is left out, evenly.
_MOST_POINTS = 300_000


def plot_blocks(
    recordings: Recording | Sequence[tuple[str, Recording]],
    path: str | os.PathLike[str],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Draw recordings side by side into a file.

    recordings: one, or several with their names.
    path: of the picture; its ending decides the format (png, svg, pdf).
    block_bytes: see `Recording.string`.
    Raises: ConfigError when a recording has no reference, or the ending is none of a picture; ImportError without
        matplotlib.
    """
    named = [("", recordings)] if isinstance(recordings, Recording) else recordings
    check_picture(path)  # before strings are made: millions of references take a while
    strings = [(name, each.string(block_bytes=block_bytes)) for name, each in named]
    save_picture(draw_blocks(strings), path)


def draw_blocks(strings: Sequence[tuple[str, BlockString]]) -> Figure:
    """Return the picture of `plot_blocks` as a figure; all strings share both scales.

    A point stands for one reference. Of more than 300,000 in a string, every so many is drawn, and the axis says so.
    """
    if not strings or not all(string.numbers.size for _, string in strings):
        raise ConfigError("a recording has no reference to a block, so there is nothing to draw")
    from matplotlib.ticker import MaxNLocator

    width = max(6.4, 1.0 + 3.7 * len(strings))
    figure = new_figure(width, 4.4)
    all_axes = figure.subplots(1, len(strings), squeeze=False, sharey=True, sharex=True)[0]
    for axes, (name, string) in zip(all_axes, strings, strict=True):
        every = _draw_points(axes, string)
        name_axes(axes, name, x="logical time (references)" + (f", 1 of {every} drawn" if every > 1 else ""))
        # Both count things: marks between them would be rounded to wrong ones.
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        count_in_wholes(axes.yaxis)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
    all_axes[0].set_ylabel("block number, by first reference")
    all_axes[0].set_xlim(0, 1.02 * max(string.numbers.size for _, string in strings))
    all_axes[0].set_ylim(0, 1.04 * max(string.blocks for _, string in strings))
    for phase in Phase:
        if any((string.phases == phase).any() for _, string in strings):
            looks = {
                "ls": "",
                "marker": "o",
                "ms": 6,
                "mfc": COLOUR_OF[phase],
                "mec": Colour.FAINT,
                "mew": 0.3,
            }
            all_axes[0].plot([], [], label=_LABEL_OF[phase], **looks)
    add_legend_below(figure, handletextpad=0.3)
    return figure


def _draw_points(axes: Axes, string: BlockString) -> int:
    """Draw every so many of the references, and return how many one point stands for."""
    every = -(-string.numbers.size // _MOST_POINTS)
    times = np.arange(0, string.numbers.size, every)
    numbers, phases = string.numbers[::every], string.phases[::every]
    size = float(np.clip(1.5e5 / times.size, 0.3, 6.0))
    for phase, colour in COLOUR_OF.items():
        of = phases == phase
        if of.any():
            # Rasterized: a vector file of 100,000 points opens nowhere quickly.
            axes.scatter(times[of], numbers[of], s=size, c=colour, lw=0, rasterized=True)
    return every
