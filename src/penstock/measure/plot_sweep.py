"""A heat map of a sweep: RAM across, SSD up, a panel per size of the staging buffer, coloured by run time.

After Figure 5.8 of the thesis (R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020).
Several numbers of ranks or policies make a row of panels each. Needs matplotlib, no display.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.measure.picture import Colour, check_picture, new_figure
from penstock.measure.sweep import Sweep
from penstock.measure.sweep_answer import Answer, Row, price_decimals
from penstock.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure, SubFigure

#: More panels, or cells in one of them, cannot be read.
_MOST_PANELS, _MOST_CELLS = 24, 144
#: From nothing to wait for to the colour that `penstock.measure.plot` gives waiting for the store.
_COLOURS = ("#FFF9EF", "#FBDFB4", "#F2AE6B", "#D55E00", "#8A2F00")


def check_panels(path: Path, sweep: Sweep) -> None:
    """Refuse, before anything is computed, what could not be drawn afterwards.

    Raises: ConfigError for an ending that is no picture, a missing folder, or too many panels or cells to be read;
    ModuleNotFoundError without matplotlib.
    """
    check_picture(path)
    points = sweep.points
    rows = len({point.ranks for point in points}) * len(sweep.policies)
    columns = len({point.staging_bytes for point in points})
    cells = len({point.memory_bytes for point in points}) * len({point.local_disk_bytes for point in points})
    if rows * columns > _MOST_PANELS or cells > _MOST_CELLS:
        raise ConfigError(
            f"--plot would draw {rows * columns} panels of {cells} cells; {_MOST_PANELS} panels of {_MOST_CELLS} "
            "can be read: plot fewer ranks, policies or sizes"
        )


def draw_sweep(answer: Answer) -> Figure:
    """Return a heat map for each number of ranks, policy and size of the staging buffer.

    Each row has its own colours, from the lower bound to the longest run of as many ranks. Cells that meet the
    tolerance are in bold; what is chosen has a frame.
    """
    if not answer.rows:
        raise ConfigError("the sweep has no rows, so there is nothing to draw")
    from matplotlib.colors import LinearSegmentedColormap

    groups = sorted({(row.point.ranks, row.policy) for row in answer.rows})
    staging = sorted({row.point.staging_bytes for row in answer.rows})
    ram = sorted({row.point.memory_bytes for row in answer.rows})
    ssd = sorted({row.point.local_disk_bytes for row in answer.rows})
    priced = any(row.price is not None for row in answer.rows)
    decimals = price_decimals(answer.rows, 0)
    panel = (max(1.6, 0.86 * len(ram)), max(1.0, (0.62 if priced else 0.5) * len(ssd)))
    group_height, legend_height = panel[1] + 1.1, 0.45
    width = max(5.8, 1.9 + len(staging) * (panel[0] + 0.15))
    figure = new_figure(width, len(groups) * group_height + legend_height)
    subfigures = figure.subfigures(
        len(groups) + 1, 1, squeeze=False, height_ratios=[group_height] * len(groups) + [legend_height]
    )
    *parts, below = subfigures[:, 0]
    colours = LinearSegmentedColormap.from_list("waiting", _COLOURS)
    for (ranks, policy), part in zip(groups, parts, strict=True):
        norm = _norm(answer, ranks)
        axes = part.subplots(1, len(staging), squeeze=False, sharex=True, sharey=True)[0]
        for staging_bytes, each in zip(staging, axes, strict=True):
            shown = [
                row
                for row in answer.rows
                if (row.point.ranks, row.policy, row.point.staging_bytes) == (ranks, policy, staging_bytes)
            ]
            _draw_panel(each, shown, answer, (ram, ssd), colours, norm, decimals)
            each.set_title(f"staging {format_bytes(staging_bytes)}", fontsize=10, color=Colour.INK)
            each.set_xlabel("RAM per rank", color=Colour.INK)
        axes[0].set_ylabel("SSD per rank", color=Colour.INK)
        looks = {"ha": "left", "fontsize": 11, "fontweight": "bold", "color": Colour.INK}
        part.suptitle(_title(ranks, policy, answer), x=0.015, **looks)
        _bar(part, list(axes), colours, norm)
    below.text(0.015, 0.5, _legend(answer, priced), fontsize=8.5, color=Colour.INK, va="center")
    return figure


def _norm(answer: Answer, ranks: int) -> Normalize:
    from matplotlib.colors import Normalize

    of_ranks = [row for row in answer.rows if row.point.ranks == ranks]
    seconds = [row.outcome.run_seconds for row in of_ranks if row.outcome.run_seconds is not None]
    least = of_ranks[0].lower_bound_seconds or min(seconds, default=0.0)
    # Differences of less than a tenth of the run are no reason for a strong colour.
    return Normalize(least, max(max(seconds, default=1.0), 1.1 * least))


def _draw_panel(
    axes: Axes,
    rows: list[Row],
    answer: Answer,
    sizes: tuple[list[int], list[int]],
    colours: Colormap,
    norm: Normalize,
    decimals: int,
) -> None:
    from matplotlib.patches import Rectangle

    ram, ssd = sizes
    seconds = np.full((len(ssd), len(ram)), np.nan)
    chosen = {answer.cheapest} if answer.cheapest is not None else set(answer.least)
    sufficient = set(answer.sufficient)
    axes.set_facecolor(Colour.PALE)
    for row in rows:
        place = ram.index(row.point.memory_bytes), ssd.index(row.point.local_disk_bytes)
        run = row.outcome.run_seconds
        if run is not None:
            seconds[place[1], place[0]] = run
        red, green, blue, _ = colours(0.0 if run is None else float(norm(run)))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.52
        axes.text(
            *place,
            _row_label(row, decimals),
            ha="center",
            va="center",
            fontsize=8,
            linespacing=1.25,
            color="white" if is_dark else Colour.INK,
            fontweight="bold" if row in sufficient else "normal",
            zorder=3,
        )
        if row in chosen:
            frame = Rectangle(
                (place[0] - 0.47, place[1] - 0.47), 0.94, 0.94, fill=False, ec=Colour.BLUE, lw=2.4
            )
            axes.add_patch(frame).set_zorder(4)
    axes.imshow(seconds, origin="lower", aspect="auto", cmap=colours, norm=norm)
    axes.set_xticks(range(len(ram)), [_size(each) for each in ram])
    axes.set_yticks(range(len(ssd)), [_size(each) for each in ssd])
    axes.set_xticks(np.arange(len(ram) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(ssd) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0, labelsize=9, colors=Colour.INK)
    axes.spines[:].set_visible(False)


def _row_label(row: Row, decimals: int) -> str:
    run = row.outcome.run_seconds
    if run is None:
        return "N/A" if row.outcome.status == "not supported" else "failed"
    price = "" if row.price is None else f"\n{row.price:,.{decimals}f}"
    return f"{_seconds(run)}{price}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "none"


def _title(ranks: int, policy: str, answer: Answer) -> str:
    bound = next(row.lower_bound_seconds for row in answer.rows if row.point.ranks == ranks)
    label = "unknown" if bound is None else _seconds(bound)
    return f"{policy}, {ranks} rank{'' if ranks == 1 else 's'}: lower bound {label}"


def _bar(figure: SubFigure, axes: list[Any], colours: Colormap, norm: Normalize) -> None:
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, aspect=16, pad=0.015)
    bar.set_label("run time (s)", fontsize=9, color=Colour.INK)
    bar.ax.yaxis.set_major_formatter("{x:,g}")
    bar.ax.tick_params(labelsize=8, colors=Colour.INK, color=Colour.FAINT)
    bar.outline.set_visible(False)


def _legend(answer: Answer, priced: bool) -> str:
    label = f"within {100 * answer.within:g} % of the lower bound"
    if answer.deadline_seconds != float("inf"):
        label += " and the deadline"
    tolerance = f"bold: {label}" if answer.sufficient else f"none is {label}"
    if answer.cheapest is not None:
        tolerance += "; framed: the cheapest of these"
    elif answer.least:
        tolerance += "; framed: nothing can be taken away"
    return f"{tolerance}\nbelow the time: the price of all ranks" if priced else tolerance
