"""Loading policies in a picture: how far each is after each batch, how it waits, and what its run time is made of.

In the manner of the thesis' Figures 5.4 to 5.7. Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.measure.picture import (
    DASH_DOTTED,
    DASHED,
    DOTTED,
    Colour,
    Panel,
    Series,
    add_legend_below,
    draw_panels,
    name_axes,
    new_figure,
    stack_bars,
    style_axes,
    write,
)
from penstock.measure.policies import PolicyRuns
from penstock.simulate.scheduled import LoadingResult
from penstock.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Columns into which a long series is gathered: more cannot be distinguished.
_COLUMNS = 240
#: Policies that would otherwise look alike differ in colour or dash; one's own take what is left.
_LOOKS: dict[str, tuple[str, Any]] = {
    "lower-bound": (Colour.INK, DOTTED),
    "naive": (Colour.FAINT, "-"),
    "staging": (Colour.ORANGE, "-"),
    "deepio": (Colour.RED, "-"),
    "deepio-opportunistic": (Colour.RED, DASHED),
    "parallel-staging": (Colour.PURPLE, "-"),
    "lbann-dynamic": (Colour.SKY, "-"),
    "lbann-preloading": (Colour.SKY, DASHED),
    "locality-aware": (Colour.PURPLE, DASHED),
    "frequency": (Colour.BLUE, "-"),
    "frequency-unordered": (Colour.BLUE, DOTTED),
    "frequency-cleanup": (Colour.BLUE, DASHED),
    "frequency-alone": (Colour.BLUE, DASH_DOTTED),
    "hash-home": (Colour.DARK, DASH_DOTTED),
    "cover": (Colour.GREEN, "-"),
    "cover+local": (Colour.GREEN, DASHED),
    "push": (Colour.GREEN, DOTTED),
}
_OWN_LOOKS: list[tuple[str, Any]] = [(Colour.DARK, "-"), (Colour.DARK, DASHED), (Colour.DARK, DOTTED)]

_NOTHING_TO_DRAW = "no policy could run, so that there is nothing to draw: see the reasons in the table"


def draw_policies(scenario: str, runs: Sequence[PolicyRuns]) -> Figure:
    """Return the progress of policies on one number of ranks, their waits, and what their run times are made of.

    Raises: ConfigError where no policy could run.
    """
    drawn = [(row, row.result) for row in runs if row.result is not None]
    if not drawn:
        raise ConfigError(_NOTHING_TO_DRAW)
    figure = new_figure(11.5, max(5.2, 1.6 + 0.34 * len(drawn)))
    grid = figure.add_gridspec(2, 2, width_ratios=[1.15, 1.0], height_ratios=[1.7, 1.0])
    progress, stalls = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    bars = figure.add_subplot(grid[:, 1])
    for place, (row, result) in enumerate(drawn):
        colour, dash = _LOOKS.get(row.policy, _OWN_LOOKS[place % len(_OWN_LOOKS)])
        end, stall = _series(result)
        progress.plot(np.arange(1, end.size + 1), end, color=colour, ls=dash, lw=1.4, label=row.policy)
        edges, means = _columns(stall)
        stalls.stairs(means, edges, baseline=None, color=colour, ls=dash, lw=1.1)
    for axes in (progress, stalls):
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    progress.yaxis.set_major_formatter("{x:,.6g}")
    title = f"{scenario}: {format_count(drawn[0][0].ranks, 'rank')}"
    name_axes(progress, title, "how far each policy is after each batch", y="time since the start (s)")
    name_axes(stalls, x="batch", y="waiting per batch (s)")
    # A few batches at the start wait far longer than the rest: a line that may curve shows both.
    stalls.set_yscale("symlog", linthresh=_smallest_shown([_series(result)[1] for _, result in drawn]))
    _draw_bars(bars, drawn)
    add_legend_below(figure, [progress], columns=8)
    return figure


def draw_scaling(scenario: str, runs: Sequence[PolicyRuns]) -> Figure:
    """Return run time against number of ranks, strong scaling. Raises: as `draw_policies`."""
    from matplotlib.ticker import LogLocator

    series = []
    for place, name in enumerate(dict.fromkeys(row.policy for row in runs if row.run_seconds)):
        colour, dash = _LOOKS.get(name, _OWN_LOOKS[place % len(_OWN_LOOKS)])
        of_name = [row for row in runs if row.policy == name and row.mean_seconds]
        ranks, seconds = [row.ranks for row in of_name], [row.mean_seconds or 0.0 for row in of_name]
        series.append(Series(name, ranks, seconds, colour, dash, "o", width=1.4, size=3.5))
    if not series:
        raise ConfigError(_NOTHING_TO_DRAW)
    below = "the same data set and global batch on more ranks"
    figure = draw_panels(
        [Panel(f"{scenario}: strong scaling", series, below)],
        x_label="ranks",
        y_label="run time (s)",
        size=(7.6, 5.2),
        legend="below",
    )
    (axes,) = figure.axes
    all_ranks = sorted({row.ranks for row in runs})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.set_xticks(all_ranks, [str(count) for count in all_ranks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.6g}")
    return figure


def _series(result: LoadingResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return result.step_end_seconds, result.step_stall_seconds.mean(axis=1, dtype=np.float64)


def _columns(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return edges and means of at most _COLUMNS columns, so that areas remain times."""
    per_column = max(1, -(-values.size // _COLUMNS))
    starts = np.arange(0, values.size, per_column)
    counts = np.diff(np.append(starts, values.size))
    means = np.add.reduceat(values, starts) / counts
    return np.append(starts, values.size).astype(np.float64), means


def _smallest_shown(series: Sequence[NDArray[np.float64]]) -> float:
    positive = [means[means > 0] for _, means in map(_columns, series)]
    values = np.concatenate(positive) if positive else np.empty(0)
    return float(np.quantile(values, 0.2)) if values.size else 1.0


def _draw_bars(axes: Axes, drawn: Sequence[tuple[PolicyRuns, LoadingResult]]) -> None:
    """One bar a policy: the mean rank's computing, waiting for samples and for slower ranks, and loading before."""
    style_axes(axes)
    axes.grid(visible=False)
    places = np.arange(len(drawn))[::-1]
    busy = np.array([result.step_busy_seconds.sum(dtype=float) / row.ranks for row, result in drawn])
    before = np.array([result.initial_stall_seconds for _, result in drawn])
    waits = np.array([result.step_stall_seconds.sum(dtype=float) / row.ranks for row, result in drawn])
    total = np.array([result.run_seconds for _, result in drawn])
    parts = [
        ("computes", busy, Colour.PALE),
        ("waits for slower ranks", total - busy - before - waits, Colour.FAINT),
        ("loads before training", before, Colour.SKY),
        ("waits for samples", waits, Colour.RED),
    ]
    stack_bars(axes, places, parts, 0.7, lie=True)
    # Where one policy takes many times as long as the others, its bar is cut, and says so.
    limit = 1.18 * min(float(total.max()), 4.0 * float(np.median(total)))
    axes.set_xlim(0.0, limit)
    for place, seconds in zip(places, total, strict=True):
        is_cut = seconds > limit
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8 if is_cut else 0.0}
        looks = {"ha": "right" if is_cut else "left", "va": "center", "fontsize": 8.5, "bbox": box}
        text, at = _time_label(seconds) + (" →" if is_cut else ""), (min(seconds, 0.995 * limit), place)
        write(axes, text, at, (-3 if is_cut else 3, 0), **looks)
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.set_yticks(places, [row.policy for row, _ in drawn])
    axes.set_xlabel("run time (s), of the mean rank")
    axes.legend(loc="upper center", bbox_to_anchor=(0.42, 1.13), ncols=2, frameon=False, fontsize=8.5)


def _time_label(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.4g} s"
