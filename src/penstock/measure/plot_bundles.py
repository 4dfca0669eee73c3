"""Pictures of bundles: what a cache hits beside what a model learns, the paper's table, the effective cache.

Needs matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.measure.convergence import BY_CLASS, SCATTERED, Study, compare
from penstock.measure.picture import Colour, new_figure, style_axes, title_axes
from penstock.simulate.bundles import (
    PAPER_TABLE_1,
    Choice,
    HitCurve,
    NodeHits,
    Recommendation,
    best_hit_ratio,
    even_bundles,
    expected_hit_ratio,
    paper_means,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_OF = {SCATTERED: Colour.BLUE, BY_CLASS: Colour.RED}
#: Light for little randomness left, dark for a full shuffle.
_SCALE = (
    Colour.INK,
    Colour.BLUE,
    Colour.SKY,
    Colour.GREEN,
    Colour.ORANGE,
    Colour.RED,
    Colour.PURPLE,
    Colour.FAINT,
)
_DASHED = (0, (4, 2))
_DOTTED = (0, (1, 1.5))


def draw_recommendation(
    recommendation: Recommendation, counted: Sequence[tuple[Choice, float]], study: Study
) -> Figure:
    """Return the hit ratio by bundle_ratio, and beside it the accuracy of a model trained so (the paper's Figure 9).

    counted: choices with the hit ratio that a replay counted for them.
    """
    figure = new_figure(10.4, 7.4)
    (hits, accuracy), (scattered, by_class) = figure.subplots(2, 2)
    _draw_hits(hits, recommendation, counted)
    _draw_accuracy(accuracy, study)
    accuracy.set_xlim(hits.get_xlim())
    for axes, numbering in ((scattered, SCATTERED), (by_class, BY_CLASS)):
        if numbering in study.numberings:
            _draw_epochs(axes, study, numbering)
        else:
            axes.set_axis_off()
    handles, labels = (scattered if SCATTERED in study.numberings else by_class).get_legend_handles_labels()
    figure.legend(
        handles,
        [f"bundle_ratio {label}" for label in labels],
        loc="outside lower right",
        ncols=len(labels),
        frameon=False,
        fontsize=8.5,
    )
    return figure


def _draw_hits(axes: Axes, recommendation: Recommendation, counted: Sequence[tuple[Choice, float]]) -> None:
    chosen = recommendation.chosen
    setting = chosen.setting
    style_axes(axes)
    bundles = [bundle for bundle in even_bundles(setting.samples) if bundle * 2000 >= setting.samples]
    choices = [Choice(setting, bundle) for bundle in bundles]
    ratios = np.array(bundles) / setting.samples
    axes.axhline(
        100 * setting.bound, color=Colour.INK, lw=1.2, ls=_DASHED, label="bound of every order and policy"
    )
    axes.plot(
        ratios, [100 * each.hit_ratio for each in choices], color=Colour.BLUE, lw=1.2, label="expected, LRU"
    )
    if counted:
        axes.plot(
            [each.bundle / setting.samples for each, _ in counted],
            [100 * ratio for _, ratio in counted],
            "o",
            ms=5,
            mfc="white",
            color=Colour.BLUE,
            label="counted by replay",
        )
    axes.plot(
        [chosen.bundle / setting.samples],
        [100 * chosen.hit_ratio],
        "*",
        ms=15,
        color=Colour.RED,
        label=f"recommended: {chosen.bundle_ratio:g}",
    )
    _log_ratios(axes, float(ratios.min()))
    axes.set_ylim(0, 118 * setting.bound or 1)
    axes.set_ylabel("reads that hit the cache (%)")
    title_axes(
        axes,
        "What the cache hits",
        f"{setting.samples:,} samples, cache of {setting.cache / setting.samples:.0%}, {setting.epochs} epochs",
    )
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def _draw_accuracy(axes: Axes, study: Study) -> None:
    """Errors on a logarithmic scale, which shows both what is lost by a hair and what is lost altogether."""
    style_axes(axes)
    rows = compare(study)
    for numbering in study.numberings:
        own = [row for row in rows if row.numbering == numbering]
        error = np.array([100 * (1 - row.mean) for row in own])
        spread = np.array([100 * row.spread for row in own])
        axes.errorbar(
            [row.bundle_ratio for row in own],
            error,
            [np.minimum(spread, 0.9 * error), spread],
            fmt="o-",
            ms=4.5,
            lw=1.2,
            capsize=3,
            color=_COLOUR_OF[numbering],
            label=f"ids {numbering}",
        )
    full = next(row for row in rows if row.bundle_ratio == 1.0 and row.numbering == study.numberings[-1])
    axes.axhspan(
        100 * (1 - full.mean - full.noise),
        100 * (1 - full.mean + full.noise),
        color=Colour.FAINT,
        alpha=0.35,
        lw=0,
        label="full shuffle, ± 1 standard deviation",
    )
    _log_ratios(axes, min(study.ratios))
    axes.set_yscale("log")
    axes.set_ylim(0.3, 150)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_ylabel("test error (%)")
    seeds = study.final(study.numberings[0], 1.0).size
    title_axes(
        axes, f"What a model learns in {study.epochs} epochs", f"{_data(study)}, {seeds} seeds, mean ± sd"
    )
    axes.legend(frameon=False, fontsize=8.5, loc="center left")


def _draw_epochs(axes: Axes, study: Study, numbering: str) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes)
    epochs = np.arange(1, study.epochs + 1)
    shown = [ratio for ratio in study.ratios if ratio in (1.0, 0.5, 0.1, 0.02)] or study.ratios[:4]
    shown = list(dict.fromkeys([*shown, study.ratios[-1]]))
    for colour, ratio in zip(_SCALE, shown, strict=False):
        accuracy = 100 * study.by_epoch(numbering, ratio)
        mean, spread = accuracy.mean(axis=0), accuracy.std(axis=0, ddof=1) if len(accuracy) > 1 else 0.0
        axes.fill_between(epochs, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
        name = {1.0: "1 (full shuffle)", 1 / study.training_samples: "one sample each"}.get(
            ratio, f"{ratio:g}"
        )
        axes.plot(epochs, mean, color=colour, lw=1.3, label=name)
    axes.set_ylim(0, 104)
    axes.set_xlim(1, max(study.epochs, 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy (%)")
    title_axes(axes, f"By epoch, ids {numbering}", f"{_data(study)}; line: mean, band: ± sd")


def draw_table_1(rows: Sequence[NodeHits], epochs: int) -> Figure:
    """Return the paper's Table 1: each node's hit ratio, the paper's beside ours, by caches of several shares."""
    figure = new_figure(9.4, 5.2)
    shares = sorted({row.cache_share for row in rows}, reverse=True)
    panels = figure.subplots(1, 2, sharex=True)
    bound = 100 * best_hit_ratio(100, 50, epochs)
    for axes, column, name, below in zip(
        panels,
        (0, 1),
        ("Original: full shuffle", "Proposed: bundles of a tenth"),
        (f"SUN397, {epochs} epochs; the bound, {bound:g} %, is far above", f"SUN397, {epochs} epochs"),
        strict=True,
    ):
        style_axes(axes)
        ticks = _draw_nodes(axes, rows, shares, column)
        axes.set_xticks([place for place, _ in ticks], [f"{count}" for _, count in ticks])
        axes.set_xlabel("nodes; a point for each")
        axes.set_ylabel("reads that hit the cache (%)")
        title_axes(axes, name, below)
    panels[1].axhline(bound, color=Colour.INK, lw=1.2, ls=_DASHED, label="bound, cache of 50%")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _draw_nodes(
    axes: Axes, rows: Sequence[NodeHits], shares: Sequence[float], column: int
) -> list[tuple[float, int]]:
    ticks, begin = [], 0.0
    for count in sorted({row.nodes for row in rows}):
        places = begin + np.arange(count)
        first = begin == 0.0
        if count in PAPER_TABLE_1:
            paper = [row[column] for row in PAPER_TABLE_1[count]]
            axes.plot(places, paper, "x", ms=6, color=Colour.INK, label="the paper" if first else None)
        for colour, share in zip(
            (Colour.BLUE, Colour.RED, Colour.GREEN, Colour.PURPLE), shares, strict=False
        ):
            own = [row for row in rows if row.nodes == count and row.cache_share == share]
            axes.plot(
                places,
                [100 * (row.proposed if column else row.original) for row in own],
                "o",
                ms=4,
                color=colour,
                label=f"counted, cache of {share:.0%}" if first else None,
            )
        ticks.append((begin + (count - 1) / 2, count))
        begin += count + 2
    return ticks


def draw_effective_cache(curves: Sequence[HitCurve], epochs: int, samples: int) -> Figure:
    """Return hit ratios close below a whole number of bundles: counted, computed, and where the paper's lie."""
    figure = new_figure(9.4, 4.8)
    panels = figure.subplots(1, 2)
    rows = np.array([row for of_nodes in PAPER_TABLE_1.values() for row in of_nodes])
    for axes, curve, mean, paper in zip(panels, curves, paper_means(), rows.T, strict=True):
        style_axes(axes)
        bundle = _bundle(curve, samples)
        caches = np.linspace(curve.caches[0], curve.caches[-1], 201).astype(int)
        expected = [100 * expected_hit_ratio(samples, int(cache), epochs, bundle) for cache in caches]
        axes.axhspan(
            paper.min(), paper.max(), color=Colour.FAINT, alpha=0.25, lw=0, label="the paper's nodes: range"
        )
        axes.axhline(100 * mean, color=Colour.INK, lw=1.0, label="the paper's nodes: mean")
        bound = [100 * best_hit_ratio(samples, int(cache), epochs) for cache in caches]
        axes.plot(
            100 * caches / samples, bound, color=Colour.INK, lw=1.2, ls=_DASHED, label="bound of every policy"
        )
        axes.plot(100 * caches / samples, expected, color=Colour.BLUE, lw=1.4, label="computed")
        axes.plot(
            100 * np.array(curve.caches) / samples,
            100 * np.array(curve.counted),
            "o",
            ms=5,
            mfc="white",
            color=Colour.BLUE,
            label="counted by replay",
        )
        full = curve.bundle_ratio == 1.0
        axes.axvline(49, color=Colour.RED, lw=1.0, ls=_DOTTED, label="cache of 49 %")
        margin = 1.2 if full else 0.5
        axes.set_ylim(min(expected[0], paper.min()) - margin, max(expected[-1], paper.max()) + margin)
        axes.set_xlabel("cache, of the node's samples (%)")
        axes.set_ylabel("reads that hit the cache (%)")
        title_axes(
            axes,
            "Full shuffle" if full else f"Bundles of {curve.bundle_ratio:.0%}",
            f"{samples:,} samples, {epochs} epochs"
            + ("; the bound, near 40 %, is far above" if full else ""),
        )
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_curves(curves: Sequence[HitCurve], epochs: int, samples: int) -> Figure:
    """Return hit ratio by size of the cache, a curve for each bundle ratio: counted points on computed lines."""
    figure = new_figure(7.6, 5.4)
    axes = figure.subplots()
    style_axes(axes)
    shares = np.linspace(0, 1, 401)
    axes.plot(
        100 * shares,
        [100 * best_hit_ratio(samples, int(share * samples), epochs) for share in shares],
        color=Colour.INK,
        lw=1.4,
        ls=_DASHED,
        label="bound of every order and policy",
    )
    for colour, curve in zip(_SCALE, curves, strict=False):
        bundle = _bundle(curve, samples)
        expected = [
            100 * expected_hit_ratio(samples, int(share * samples), epochs, bundle) for share in shares
        ]
        name = "1 (full shuffle)" if curve.bundle_ratio == 1.0 else f"{curve.bundle_ratio:g}"
        axes.plot(100 * shares, expected, color=colour, lw=1.2, label=f"bundle_ratio {name}")
        axes.plot(
            100 * np.array(curve.caches) / samples, 100 * np.array(curve.counted), "o", ms=3.5, color=colour
        )
    axes.set_xlim(0, 100)
    axes.set_ylim(0, None)
    axes.set_xlabel("cache, of the data set (%)")
    axes.set_ylabel("reads that hit the cache (%)")
    title_axes(
        axes,
        "A whole number of bundles reaches the bound",
        f"{samples:,} samples, {epochs} epochs, LRU; lines computed, points counted by replay",
    )
    axes.legend(frameon=False, fontsize=9)
    return figure


def _bundle(curve: HitCurve, samples: int) -> int:
    from penstock.plan import BundleShuffle

    return BundleShuffle(samples, bundle_ratio=curve.bundle_ratio).bundle


def _log_ratios(axes: Axes, smallest: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(min(smallest, 0.005) / 1.4, 1.4)
    ticks = [tick for tick in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001) if tick >= smallest / 1.4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bundle_ratio")


def _data(study: Study) -> str:
    return study.data.split(",")[0]
