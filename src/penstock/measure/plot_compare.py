"""A recorded run over its prediction, in one picture: stall per epoch by cause, and how it grew step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.measure.compare import RunComparison
from penstock.measure.picture import Colour, add_legend_below, mark_starts, name_axes, new_figure, stack_bars
from penstock.measure.plot import COLOUR_OF
from penstock.trace import NO_STEP, Kind, Trace
from penstock.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 0.38
_MOST_TICKS = 16


def draw_comparison(comparison: RunComparison) -> Figure:
    """Return stall per epoch by cause, predicted next to measured, and how it grew step by step."""
    figure = new_figure(max(6.4, min(12.0, 3.0 + 0.5 * len(comparison.epochs))), 6.0)
    epochs, steps = figure.subplots(2, 1, height_ratios=[1.6, 1.0])
    predicted, measured = comparison.stall_seconds
    run_seconds = comparison.run_seconds[1]
    title = f"stall predicted {format_seconds(predicted)}, measured {format_seconds(measured)}"
    if run_seconds:
        title += f": {100 * (predicted - measured) / run_seconds:+.2f} % of the run"
    name_axes(epochs, title, x="epoch: left, hatched, as predicted; right as measured", y="stall (s)")
    name_axes(steps, x="step of the run", y="stall so far (s)")
    _draw_epochs(epochs, comparison)
    _draw_growth(steps, comparison)
    add_legend_below(figure, [epochs], columns=5, order=[f"{cause}" for cause in COLOUR_OF])
    return figure


def _draw_epochs(axes: Axes, comparison: RunComparison) -> None:
    """Two bars an epoch: what was predicted on the left, hatched; what was measured on the right."""
    pairs = comparison.epochs
    places = np.arange(len(pairs), dtype=np.float64)
    highest = 0.0
    # What was measured comes last: its plain bar stands in the legend.
    for name, shift, hatch in (("predicted", -0.5, "////"), ("measured", 0.5, None)):
        parts = [
            (f"{cause}", np.array([getattr(pair, name).stall_by_cause[cause] for pair in pairs]), colour)
            for cause, colour in COLOUR_OF.items()
        ]
        at = places + shift * (_WIDTH + 0.02)
        tops = stack_bars(axes, at, parts, _WIDTH, edgecolor="white", lw=0.4, hatch=hatch)
        highest = max(highest, float(tops.max(initial=0.0)))
    axes.set_ylim(0.0, 1.08 * highest or 1.0)
    shown = np.arange(0, len(pairs), -(-len(pairs) // _MOST_TICKS))
    axes.set_xticks(shown, [str(pairs[place].epoch) for place in shown])
    axes.set_xlim(-0.7, max(len(pairs), 2) - 0.3)


def _draw_growth(axes: Axes, comparison: RunComparison) -> None:
    for name, trace, style in (
        ("predicted", comparison.predicted, (0, (4, 2))),
        ("measured", comparison.measured, "solid"),
    ):
        seconds, begins = _growth(trace)
        axes.plot(np.arange(seconds.size), seconds, color=Colour.DARK, lw=1.6, ls=style, label=name)
    mark_starts(axes, begins)
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(0.0, None)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _growth(trace: Trace) -> tuple[NDArray[np.float64], list[int]]:
    """Return the stall up to and including each step, and the first step of each later epoch."""
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    waits = waits[np.argsort(waits["start"], kind="stable")]
    is_step = waits["step"] != NO_STEP
    grown: NDArray[np.float64] = np.cumsum(waits["end"] - waits["start"])[is_step]
    begins = np.flatnonzero(np.diff(waits["epoch"][is_step])) + 1
    return np.concatenate([[0.0], grown]), begins.tolist()
