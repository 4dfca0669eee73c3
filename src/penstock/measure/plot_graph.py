"""A picture of a graph's run: what its workers did, and what its steps waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.measure.graph_steps import Doing, explain_graph, steps_of
from penstock.measure.picture import Colour, add_legend_below, name_axes, new_figure, stack_bars, style_axes
from penstock.measure.plot import columns_of, draw_strip
from penstock.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR_OF = {
    Doing.COMPUTING: Colour.GREEN,
    Doing.SENDING: Colour.BLUE,
    Doing.BETWEEN: Colour.PALE,
    Doing.RECEIVING: Colour.RED,
    Doing.WAITING: Colour.ORANGE,
}


def draw_graph(trace: Trace) -> Figure:
    """Return a figure: above, a bar for each worker; below, what each step's end followed from.

    Raises: ConfigError if no step has ended.
    """
    found = explain_graph(trace)
    if not found.steps:
        raise ConfigError("no step of the graph has ended, so there is nothing to draw")
    figure = new_figure(7.4, 3.4 + 0.4 * len(found.workers))
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": [0.6 + 0.4 * len(found.workers), 2.0]})
    style_axes(below)
    places = np.arange(len(found.workers))[::-1]
    parts = [
        (str(doing), np.array([each.doing.get(doing, 0.0) for each in found.workers]), colour)
        for doing, colour in _COLOUR_OF.items()
    ]
    stack_bars(above, places, parts, 0.72, lie=True)
    above.set_yticks(places, [each.task for each in found.workers])
    name_axes(above, "What workers did", x="in all steps (s)")
    edges, column = columns_of(found.steps + found.first_steps)
    held = {doing: np.zeros(edges.size - 1) for doing in _COLOUR_OF}
    for at, step in zip(column.tolist(), steps_of(trace), strict=True):
        for tile in step.path:
            held[tile.doing][at] += tile.seconds
    strip = [(str(doing), held[doing] / np.diff(edges), colour) for doing, colour in _COLOUR_OF.items()]
    draw_strip(below, "the run", strip, edges)
    below.set_ylabel("time per step (s)")
    below.set_ylim(bottom=0.0)
    add_legend_below(figure, columns=3, handlelength=1.2)
    return figure
