"""Pictures of SSD wear: bytes written and blocks erased by method, and the blocks of a drive by their erases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.measure.picture import Colour, add_legend_below, count_in_wholes, name_axes, new_figure, write
from penstock.simulate.snapshots import METHODS, OWN_METHOD, StoredRun
from penstock.simulate.wear import WearResult
from penstock.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Greys for complete snapshots, colours for the deltas.
_COLOURS = (
    Colour.DARK,
    "#9AA0A6",
    Colour.PURPLE,
    Colour.ORANGE,
    Colour.RED,
    Colour.BLUE,
    Colour.GREEN,
    Colour.SKY,
)
COLOUR_OF = {method.name: colour for method, colour in zip((*METHODS, OWN_METHOD), _COLOURS, strict=True)}
_OVER_A_BAR: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.5}


def draw_methods(runs: Sequence[StoredRun]) -> Figure:
    """Return written bytes above erased blocks: a column a model, bars by method.

    runs: of `penstock.simulate.snapshots.compare_methods`. Over each bar: its change from complete snapshots.
    """
    names = list(dict.fromkeys(run.sizes.name for run in runs))
    figure = new_figure(max(7.0, 1.0 + 5.2 * len(names)), 7.2)
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        own = [run for run in runs if run.sizes.name == name]
        sizes = own[0].sizes
        written, erases = grid[0, column], grid[1, column]
        name_axes(written, f"{name}: {sizes.count} snapshots of {format_bytes(4 * sizes.parameters)}")
        name_axes(erases, x="snapshots from one baseline to the next (snap_dis)")
        draw_written(written, own)
        draw_erases(erases, own)
    grid[0, 0].set_ylabel("written to the drive (GB)")
    grid[1, 0].set_ylabel("blocks erased")
    drawn = dict.fromkeys(run.method for run in runs)
    for method in drawn:
        figure.axes[0].bar([0], [0], color=COLOUR_OF[method.name], label=method.label)
    add_legend_below(figure, columns=7)
    return figure


def draw_written(axes: Axes, runs: Sequence[StoredRun]) -> None:
    """Draw the bytes that each method writes as bars, grouped by distance."""
    sizes = [run.stored_bytes for run in runs]
    _draw_bars(axes, runs, [None if size is None else size / 1e9 for size in sizes])


def draw_erases(axes: Axes, runs: Sequence[StoredRun]) -> None:
    """Draw the blocks that each method erases as bars, grouped by distance."""
    _draw_bars(axes, runs, [None if run.result is None else run.result.work.erases for run in runs])
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_bars(axes: Axes, runs: Sequence[StoredRun], heights: Sequence[float | None]) -> None:
    distances = list(dict.fromkeys(run.snap_dis for run in runs))
    methods = list(dict.fromkeys(run.method for run in runs))
    width = 0.84 / len(methods)
    complete = {
        run.snap_dis: height
        for run, height in zip(runs, heights, strict=True)
        if run.method.name == "complete" and height is not None
    }
    missing: dict[int, list[float]] = {}
    for run, height in zip(runs, heights, strict=True):
        group = distances.index(run.snap_dis)
        place = group + (methods.index(run.method) - (len(methods) - 1) / 2) * width
        if height is None:
            missing.setdefault(group, []).append(place)
            continue
        axes.bar([place], [height], 0.92 * width, color=COLOUR_OF[run.method.name])
        whole = complete.get(run.snap_dis)
        if whole and run.method.name != "complete":
            change = f"{100 * (height / whole - 1):+.0f} %".replace("-", "\u2212")
            write(axes, change, (place, height), (0, 3), rotation=90, **_OVER_A_BAR)
    for places in missing.values():
        write(axes, "not given", (float(np.mean(places)), 0.0), (0, 3), **_OVER_A_BAR)
    axes.set_xticks(range(len(distances)), [str(distance) for distance in distances])
    axes.set_xlim(-0.5, len(distances) - 0.5)
    highest = max((height for height in heights if height is not None), default=0.0)
    axes.set_ylim(0.0, 1.12 * highest or 1.0)


def draw_blocks(result: WearResult, name: str) -> Figure:
    """Return how many blocks were erased how often."""
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    bins = result.wear.histogram()
    width = bins[0][1] - bins[0][0] + 1
    axes.bar(
        [(fewest + most) / 2 for fewest, most, _ in bins],
        [blocks for *_, blocks in bins],
        0.94 * width,
        color=COLOUR_OF["dynrle-progressive"],
    )
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(0.0, 3.0 * max(blocks for *_, blocks in bins))
    powers = [0, *(10**power for power in range(int(np.log10(result.ssd.blocks)) + 1))]
    axes.set_yticks(powers, [f"{power:,}" for power in powers])
    axes.minorticks_off()
    axes.axvline(
        result.wear.mean, color=COLOUR_OF["rle4-gzip"], ls="--", label=f"mean {result.wear.mean:.3g}"
    )
    count_in_wholes(axes.xaxis)
    title = f"{name}: {format_bytes(result.written_bytes)} written, {result.work.erases:,} erases"
    name_axes(axes, title, x="erases of a block", y="blocks")
    axes.legend(frameon=False, fontsize=9)
    return figure
