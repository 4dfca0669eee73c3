"""Pictures of what was measured, in the manner of Figures 4 to 10 of Chien et al. 2018."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.bench.input_rates import InputRates
from penstock.bench.loaders import OWN, Work
from penstock.bench.saving import SavingResult, SavingResults
from penstock.bench.traffic import Flow
from penstock.bench.training import TrainingResult, TrainingResults
from penstock.measure.picture import Colour, count_in_wholes, name_axes, new_figure, stack_bars
from penstock.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_OF = {OWN: Colour.BLUE, "torch": Colour.ORANGE, "tensorflow": Colour.GREEN}
_TITLE_OF = {Work.READ: "read alone", Work.DECODE: "read, decode, resize"}
_MARKERS = "os^Dv"


def draw_input(found: InputRates) -> Figure:
    """Return a panel for each work: samples/s by threads, a line for each loader and batch size (Figures 4 and 5)."""
    works = [work for work in Work if any(each.work is work for each in found.results)]
    sizes = sorted({each.batch_size for each in found.results})
    figure = new_figure(1.4 + 4.4 * len(works), 4.4)
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        for loader, colour in _COLOUR_OF.items():
            for marker, size in zip(_MARKERS, sizes, strict=False):
                own = [
                    each
                    for each in found.results
                    if (each.work, each.loader, each.batch_size) == (work, loader, size)
                ]
                if not own:
                    continue
                spreads = [each.samples_per_second for each in own]
                axes.errorbar(
                    [each.threads for each in own],
                    [spread.median for spread in spreads],
                    yerr=(
                        [spread.median - spread.low for spread in spreads],
                        [spread.high - spread.median for spread in spreads],
                    ),
                    color=colour,
                    marker=marker,
                    lw=1.6,
                    ms=4,
                    capsize=2.5,
                    label=loader if len(sizes) == 1 else f"{loader}, batch of {size}",
                )
        top = 1.05 * axes.get_ylim()[1]
        axes.set_ylim(0, top)
        if (
            found.maximum is not None
            and (bound := found.maximum.read.median / found.bytes_per_sample) < 3 * top
        ):
            axes.axhline(bound, color=Colour.FAINT, ls="--", lw=1.2, label="device in sequence")
            axes.set_ylim(0, max(top, 1.08 * bound))
        name_axes(axes, _TITLE_OF[work], x="threads", y="samples/s")
        count_in_wholes(axes.xaxis)
        axes.legend(frameon=False, fontsize=8.5)
    return figure


def draw_training(found: TrainingResults) -> Figure:
    """Return run times with and without prefetch (Figures 6 and 7), and what was read over time (Figure 8)."""
    sizes = sorted({each.setting.batch_size for each in found.results})
    figure = new_figure(1.4 + 4.4 * len(sizes), 6.4)
    for column, size in zip(figure.subplots(2, len(sizes), squeeze=False).T, sizes, strict=True):
        own = [each for each in found.results if each.setting.batch_size == size]
        places = np.arange(len(own), dtype=np.float64)
        stall = np.array([each.stall_seconds for each in own])
        rest = np.array([each.run_seconds.median for each in own]) - stall
        parts = [("computing", rest, Colour.PALE), ("waiting for input", stall, Colour.RED)]
        stack_bars(column[0], places, parts, 0.6)
        names = [_prefetch(each) for each in own]
        column[0].set_xticks(places, names, fontsize=8.5)
        name_axes(column[0], f"batches of {size}", y="run (s)")
        column[0].legend(frameon=False, fontsize=8.5)
        pair = found.cost_of_io(size) or own[:1]
        for each, colour in zip(pair, (Colour.FAINT, Colour.BLUE), strict=False):
            _draw_flow(column[1], each.flow, colour, _prefetch(each))
        _begin_at_zero(column[1])
        name_axes(column[1], x="seconds", y=f"read by {own[-1].flow.place} (MB/s)")
        column[1].legend(frameon=False, fontsize=8.5)
    return figure


def _prefetch(result: TrainingResult) -> str:
    setting = result.setting
    ahead = "" if setting.prefetch is None else f", {setting.prefetch} ahead"
    return format_count(setting.threads, "thread") + ahead if setting.has_prefetch else "no prefetch"


def _draw_flow(axes: Axes, flow: Flow, colour: str, label: str) -> None:
    seconds = np.concatenate([[0.0], flow.seconds])
    axes.step(
        seconds, np.append(flow.rates[:1], flow.rates) / 1e6, where="pre", color=colour, lw=1.2, label=label
    )


def _begin_at_zero(axes: Axes) -> None:
    """Set the lower limits, which also sets the upper ones: of what has been drawn by now."""
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


_PLACES = {"slow": "slow", "fast": "fast", "burst": "burst buffer"}


def draw_saving(found: SavingResults) -> Figure:
    """Return run times by way of saving (Figure 9), and what was written over time, during and after (Figure 10)."""
    figure = new_figure(8.0, 7.0)
    top, bottom = figure.subplots(2, 1)
    saving = [each for each in found.results if each.way.saver]
    none = next(each for each in found.results if not each.way.saver).run_seconds.median
    places = np.arange(len(saving), dtype=np.float64)
    lost = np.array([max(0.0, each.run_seconds.median - none) for each in saving])
    parts = [("without saves", np.full(len(saving), none), Colour.PALE), ("for saves", lost, Colour.RED)]
    stack_bars(top, places, parts, 0.6)
    top.set_xticks(places, [f"{each.way.saver}\n{_PLACES[each.way.place]}" for each in saving], fontsize=8.5)
    name_axes(top, f"{format_count(found.saves, 'save')} in {found.steps} steps", y="run (s)")
    top.legend(frameon=False, fontsize=8.5)
    for colour, each in zip((Colour.FAINT, Colour.ORANGE, Colour.BLUE), _over_time(found), strict=False):
        _draw_flow(bottom, each.flow, colour, f"{each.way.saver}, {_PLACES[each.way.place]}")
        bottom.axvline(each.last_run_seconds, color=colour, ls=":", lw=1.2)
    _begin_at_zero(bottom)
    name_axes(bottom, x="seconds (dotted: the run has ended)", y=f"written by {saving[-1].flow.place} (MB/s)")
    bottom.legend(frameon=False, fontsize=8.5)
    return figure


def _over_time(found: SavingResults) -> list[SavingResult]:
    """Return what is straight to the slow storage by the first saver, and Penstock's to the fast one and through it."""
    slow = [each for each in found.results if each.way.place == "slow"][:1]
    return slow + [each for each in found.results if each.way in ((OWN, "fast"), (OWN, "burst"))]
