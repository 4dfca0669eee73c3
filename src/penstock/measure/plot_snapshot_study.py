"""A picture of what a study of snapshots found: the delta-snapshot paper's Table 1, Figures 8 to 10, and its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.measure.picture import Colour, add_legend_below, count_in_wholes, name_axes, new_figure
from penstock.measure.plot_wear import COLOUR_OF, draw_erases, draw_written
from penstock.measure.snapshot_study import SnapshotStudy, stored_as
from penstock.policy.snap_distance import useful_bytes
from penstock.simulate.snapshots import METHODS, OWN_METHOD, TIMED_SNAP_DIS, StoredRun
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SAME_BITS = (4, 6, 8, 9, 10, 11, 12)
_TIMED = (*METHODS[-2:], OWN_METHOD)
#: Codecs whose time is drawn, and the method whose colour they have.
_CODECS = {"dynrle": "dynrle-progressive", "rle4": "rle4", "gzip-delta": "gzip-delta"}
_MOST_TICKS = 8


def draw_study(study: SnapshotStudy, runs: Sequence[StoredRun]) -> Figure:
    """Return six small pictures.

    runs: of the study's sizes, by `penstock.simulate.snapshots.compare_methods`.
    """
    figure = new_figure(16.0, 9.4)
    grid = figure.subplots(2, 3)
    _draw_likeness(grid[0, 0], study)
    _draw_exponents(grid[1, 0], study)
    draw_written(grid[0, 1], runs)
    most = max(run.stored_bytes or 0 for run in runs)
    unit = format_bytes(most).split()[1]
    per_gb = 1e9 / parse_bytes(f"1 {unit}")
    grid[0, 1].yaxis.set_major_formatter(lambda gigabytes, _: f"{gigabytes * per_gb:,.4g}")
    below = "snapshots from one baseline to the next (snap_dis)"
    title = f"Written by {len(study.names)} snapshots of {format_bytes(study.nbytes)}"
    name_axes(grid[0, 1], title, f"in {unit}, by codec and scheme", x=below)
    draw_erases(grid[1, 1], runs)
    drive = f"of a drive as the paper's, {runs[0].sizes.count} snapshots"
    name_axes(grid[1, 1], "Blocks erased", drive, x=below)
    _draw_storage(grid[0, 2], study)
    _draw_seconds(grid[1, 2], study)
    methods = dict.fromkeys(run.method for run in runs)
    for method in methods:
        grid[0, 1].bar([0], [0], color=COLOUR_OF[method.name], label=stored_as(method))
    add_legend_below(figure, [grid[0, 1]], columns=len(methods))
    return figure


def _draw_likeness(axes: Axes, study: SnapshotStudy) -> None:
    import matplotlib

    places = range(1, len(study.names))
    colours = matplotlib.colormaps["viridis"](np.linspace(0.9, 0.05, len(_SAME_BITS)))
    lowest = 100.0
    for bits, colour in zip(_SAME_BITS, colours, strict=True):
        shares = [100 * likeness.share(bits) for likeness in study.likenesses]
        axes.plot(places, shares, color=colour, lw=1.6, marker="o", ms=3, label=f"{bits} bits")
        lowest = min(lowest, *shares)
    space = max(100.0 - lowest, 1e-6)
    axes.set_ylim(lowest - 0.16 * space, 100.0 + 0.03 * space)  # below is the legend
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.legend(
        loc="lower center",
        frameon=False,
        fontsize=8,
        ncols=len(_SAME_BITS),
        columnspacing=0.9,
        handlelength=1.0,
    )
    _name_snapshots(axes, study)
    name_axes(axes, "Like the snapshot before", "parameters of which so many first bits are the same")


def _name_snapshots(axes: Axes, study: SnapshotStudy) -> None:
    count = len(study.names)
    apart = -(-count // _MOST_TICKS)
    shown = [*(place for place in range(0, count, apart) if place + apart < count), count - 1]
    axes.set_xticks(shown, [study.names[place] for place in shown], rotation=30, ha="right", fontsize=8)
    axes.set_xlim(-0.5, count - 0.5)


def _draw_exponents(axes: Axes, study: SnapshotStudy) -> None:
    if not study.exponents:
        name_axes(axes, "Exponents", "these tensors have none")
        return
    name, counts = max(study.exponents.items(), key=lambda item: item[1].sum())
    shares = 100 * counts / counts.sum()
    shown = np.flatnonzero(shares > 0.05)
    first, last = int(shown[0]), int(shown[-1])
    axes.bar(range(first, last + 1), shares[first : last + 1], 0.9, color=COLOUR_OF["dynrle-progressive"])
    axes.yaxis.set_major_formatter("{x:.0f} %")
    count_in_wholes(axes.xaxis)
    used = counts[counts > 0] / counts.sum()
    entropy = -float(used @ np.log2(used))
    below = f"{name}: {entropy:.2f} of {counts.size.bit_length() - 1} bits"
    name_axes(axes, f"Exponents of {study.names[-1]}", below, x="exponent, as it is stored")


def _draw_storage(axes: Axes, study: SnapshotStudy) -> None:
    places = range(len(study.names))
    for method in _TIMED:
        stored = study.sizes.stored_bytes(method, TIMED_SNAP_DIS)
        assert stored is not None, "a study has these sizes"
        useful = [size / study.nbytes for size in useful_bytes(method.scheme, stored, TIMED_SNAP_DIS)]
        axes.plot(places, useful, color=COLOUR_OF[method.name], lw=1.6, marker="o", ms=3)
    axes.axhline(1.0, color=Colour.FAINT, lw=1.0, ls="--")
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter("{x:.1f}×")
    _name_snapshots(axes, study)
    below = f"in sizes of a complete one; a baseline every {TIMED_SNAP_DIS}"
    name_axes(axes, "Storage that the newest snapshot needs", below)


def _draw_seconds(axes: Axes, study: SnapshotStudy) -> None:
    from penstock.checkpoint.codecs import DEFAULT

    for codec, method in {**_CODECS, DEFAULT: OWN_METHOD.name}.items():
        parameters, seconds = study.tensor_seconds[codec].T
        axes.plot(parameters, 1e3 * seconds, ls="none", marker="o", ms=4, alpha=0.7, color=COLOUR_OF[method])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="x", color=Colour.GRID, lw=0.8)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    below = "ms of one processor, mean of all snapshots"
    name_axes(axes, "To encode a tensor's delta", below, x="parameters of a tensor")
