"""A picture of one or several runs: where the time of every epoch went, and when the loop waited."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.measure.charts import COLOUR_OF_CAUSE
from penstock.measure.picture import (
    Colour,
    add_legend_below,
    mark_starts,
    name_axes,
    new_figure,
    save_picture,
    stack_bars,
    style_axes,
    write,
)
from penstock.trace import NO_STEP, Cause, EpochMetrics, Kind, Trace, batch_waits, stall_causes, stall_share
from penstock.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: As on a page of a run.
COLOUR_OF: dict[Cause, str] = {
    cause: getattr(Colour, colour.name) for cause, colour in COLOUR_OF_CAUSE.items()
}
OWN_COLOUR = Colour.PALE
#: What is of snapshots: saves as a part of the bars, all three as lanes along the top of the strip.
SAVE_COLOURS = {Kind.SAVE: Colour.SKY, Kind.WRITE: Colour.FAINT, Kind.DRAIN: Colour.DARK}
_LABEL_OF = {cause: f"stall: {cause}" for cause in Cause} | {
    Cause.NO_BATCH: "stall: got no batch",
    Cause.UNSEEN: "stall: cause unseen",
}
_OWN_LABEL = "the training's own time"
_SAVE_LABELS = {
    Kind.SAVE: "saves hold the training",
    Kind.WRITE: "a snapshot is written",
    Kind.DRAIN: "a snapshot is drained",
}
_LANE_HEIGHT = 0.05
#: More columns than this cannot be distinguished in a strip.
_MOST_COLUMNS = 400
_MOST_BAR_LABELS = 8


def plot_trace(runs: Trace | Sequence[tuple[str, Trace]], path: str | os.PathLike[str]) -> None:
    """Draw runs side by side into a file.

    runs: one trace, or several with their names, in the order to be drawn, for example PyTorch, Penstock and
        the prediction.
    path: of the picture; its ending decides the format (png, svg, pdf).

    Raises: ConfigError when there is no run, or one in which nobody waited for a batch, or the ending is none of
        a picture; ImportError without matplotlib.
    """
    save_picture(draw([("", runs)] if isinstance(runs, Trace) else runs), path)


def draw(runs: Sequence[tuple[str, Trace]]) -> Figure:
    """Return the picture of `plot_trace` as a figure: bars per epoch above, stall per step below.

    All runs share the scale of each row. The stall that ends an epoch is drawn at its last step. Runs of very
    many steps are drawn as means over neighbouring steps, so that areas remain times. Where snapshots were saved, lanes
    along the top of the strip show at which steps.
    """
    epochs = [
        [each for each in trace.epochs() if each.steps]
        if (trace.spans["kind"] == Kind.WAIT.value).any()
        else []
        for _, trace in runs
    ]
    if not epochs or not all(epochs):
        raise ConfigError(
            f"{len(runs)} runs were given to draw, {sum(map(bool, epochs))} of them with a WAIT span; "
            "each needs one: record the loop, or watch it with penstock.watch"
        )

    figure = new_figure(max(6.4, 1.2 + 3.4 * len(runs)), 5.6)
    axes = figure.subplots(
        2, len(runs), squeeze=False, sharey="row", gridspec_kw={"height_ratios": [2.4, 1.0]}
    )
    strips = [_stall_by_column(trace) for _, trace in runs]
    for (name, trace), metrics, strip, bars_axes, strip_axes in zip(runs, epochs, strips, *axes, strict=True):
        style_axes(strip_axes)
        name_axes(bars_axes, name, _waited(metrics), x="epoch")
        _draw_epochs(bars_axes, metrics)
        which = "the run" if not trace.left_out.spans else "the last, which are kept"
        means, edges, begins = strip
        parts = [(_LABEL_OF[cause], means[cause], colour) for cause, colour in COLOUR_OF.items()]
        draw_strip(strip_axes, which, parts, edges)
        mark_starts(strip_axes, begins)
    lanes = [_draw_lanes(each, trace) for each, (_, trace) in zip(axes[1], runs, strict=True)]
    axes[0, 0].set_ylabel("time per epoch (s)")
    axes[1, 0].set_ylabel("stall per step (s)")
    longest = max(each.own_seconds + each.stall_seconds for metrics in epochs for each in metrics)
    # Space above the longest bar for its label.
    axes[0, 0].set_ylim(0.0, 1.2 * longest or 1.0)
    axes[1, 0].set_ylim(bottom=0.0)
    if any(lanes):  # space above the stall
        axes[1, 0].set_ylim(top=axes[1, 0].get_ylim()[1] / (1.0 - 1.5 * _LANE_HEIGHT * len(_SAVE_LABELS)))
    # The upper ones come last: what is in both is named by its bar.
    order = (_OWN_LABEL, *_SAVE_LABELS.values(), *_LABEL_OF.values())
    add_legend_below(figure, [*axes[1], *axes[0]], 2 + len(runs), order=order, handlelength=1.2)
    return figure


def _draw_epochs(axes: Axes, metrics: list[EpochMetrics]) -> None:
    places = np.arange(len(metrics))
    top = np.array([each.own_seconds for each in metrics])
    axes.bar(places, top, 0.72, color=OWN_COLOUR, label=_OWN_LABEL)
    saving = np.array([each.save_seconds for each in metrics])
    if saving.any():
        label = _SAVE_LABELS[Kind.SAVE]
        axes.bar(places, saving, 0.72, bottom=top - saving, color=SAVE_COLOURS[Kind.SAVE], label=label)
    stalls = [
        (_LABEL_OF[cause], np.array([each.stall_by_cause[cause] for each in metrics]), colour)
        for cause, colour in COLOUR_OF.items()
    ]
    top = stack_bars(axes, places, stalls, 0.72, top, edgecolor="white", lw=0.5)
    if len(metrics) <= _MOST_BAR_LABELS:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        looks = {"ha": "center", "va": "bottom", "fontsize": 8, "linespacing": 1.0, "bbox": box}
        for place, height, each in zip(places.tolist(), top.tolist(), metrics, strict=True):
            write(axes, f"{format_seconds(each.stall_seconds)}\nstall", (place, height), (0, 3), **looks)
    shown = places[:: -(-len(metrics) // _MOST_BAR_LABELS)]
    axes.set_xticks(shown, [str(metrics[place].epoch) for place in shown])
    axes.set_xlim(-0.6, max(len(metrics), 2) - 0.4)


def _stall_by_column(trace: Trace) -> tuple[dict[Cause, NDArray[np.float64]], NDArray[np.float64], list[int]]:
    """Return a strip's mean stall per step by cause and column, its columns' edges, epochs' first steps."""
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    waits = waits[np.lexsort((waits["start"], waits["rank"]))]
    has_batch = waits["step"] != NO_STEP
    steps = int(has_batch.sum())
    step = np.maximum(np.cumsum(has_batch) - 1, 0)
    edges, column = columns_of(steps)
    means = {
        cause: np.bincount(column[step], seconds, edges.size - 1) / np.diff(edges)
        for cause, seconds in stall_causes(trace.spans, waits).items()
    }
    begins = np.flatnonzero(np.diff(waits["epoch"][has_batch])) + 1
    return means, edges, begins.tolist()


def columns_of(steps: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the edges of a strip's columns, in steps, and in which column each step is."""
    per_column = -(-steps // _MOST_COLUMNS)
    edges = np.minimum(np.arange(-(-steps // per_column) + 1) * per_column, steps).astype(np.float64)
    return edges, np.arange(steps) // per_column


def draw_strip(
    axes: Axes, which: str, parts: Sequence[tuple[str, NDArray[np.float64], str]], edges: NDArray[np.float64]
) -> None:
    """Draw parts of steps on each other, step after step. which: whose. parts: label, mean per column, colour."""
    top = np.zeros(edges.size - 1)
    for label, means, colour in parts:
        if means.any():
            axes.stairs(top + means, edges, baseline=top, fill=True, color=colour, lw=0, label=label)
            top = top + means
    axes.set_xlim(0.0, float(edges[-1]))
    per_column = edges[1] - edges[0]
    axes.set_xlabel(
        f"step of {which}" if per_column <= 1.0 else f"step of {which} (means of {per_column:.0f})"
    )


def _draw_lanes(axes: Axes, trace: Trace) -> bool:
    """Draw when snapshots were saved, written and drained along the top of a strip; return whether any was."""
    width = axes.get_xlim()[1]
    any_drawn = False
    for lane, (kind, label) in enumerate(_SAVE_LABELS.items()):
        ran = _steps_at(trace, kind)
        if not ran:
            continue
        any_drawn = True
        # Shown even where it took a small part of one step.
        bars = [(begin, max(end - begin, 0.004 * width)) for begin, end in ran]
        bottom = 1.0 - 1.5 * _LANE_HEIGHT * (lane + 1)
        axes.broken_barh(
            bars,
            (bottom, _LANE_HEIGHT),
            transform=axes.get_xaxis_transform(),
            color=SAVE_COLOURS[kind],
            lw=0,
            label=label,
        )
    return any_drawn


def _steps_at(trace: Trace, kind: Kind) -> list[tuple[float, float]]:
    """Return from which to which step of the run each span of a kind ran, those outside of it left out.

    Steps are numbered as in the strip: rank after rank. Within a step, time passes evenly.
    """
    found: list[tuple[float, float]] = []
    waits = batch_waits(trace.spans)
    waits = waits[np.lexsort((waits["start"], waits["rank"]))]
    for rank in np.unique(waits["rank"]):
        places = np.flatnonzero(waits["rank"] == rank)
        of_rank = trace.spans[trace.spans["rank"] == rank]
        last = max(float(of_rank["end"][np.isin(of_rank["kind"], (Kind.WAIT, Kind.STEP))].max()), 0.0)
        times = np.append(waits["start"][places], last)
        numbers = np.append(places, places[-1] + 1).astype(np.float64)
        ran = of_rank[(of_rank["kind"] == kind) & (of_rank["end"] >= times[0]) & (of_rank["start"] <= last)]
        begins, ends = (np.interp(ran[field], times, numbers) for field in ("start", "end"))
        found += list(zip(begins.tolist(), ends.tolist(), strict=True))
    return found


def _waited(metrics: list[EpochMetrics]) -> str:
    stall, own = (sum(getattr(each, part) for each in metrics) for part in ("stall_seconds", "own_seconds"))
    share = 100.0 * stall_share(stall, own)
    return f"waited {format_seconds(stall)} of {format_seconds(stall + own)} ({share:.1f} %)"
