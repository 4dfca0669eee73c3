"""Figure 9 of Lee & Bahn 2023: the accuracy of a model by the size of bundles, from the trainings of `convergence`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.measure.picture import Colour, add_legend_below, count_in_wholes, name_axes, new_figure
from penstock.measure.plot_bundles import scale_by_ratio
from penstock.papers.catalog import Repeated, Result
from penstock.papers.convergence import BY_CLASS, SCATTERED, Study, compare, read_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_OF = {SCATTERED: Colour.BLUE, BY_CLASS: Colour.RED}
#: Of the ratios that are drawn epoch by epoch: dark for a full shuffle.
_SCALE = (Colour.INK, Colour.BLUE, Colour.SKY, Colour.GREEN, Colour.ORANGE)


def figure_9() -> Repeated:
    """Return the test accuracies of the kept trainings, and their difference to full shuffle."""
    study = read_study()
    results = []
    for row in compare(study):
        of = f"ids {row.numbering}, bundle_ratio {row.bundle_ratio:.3g}"
        results.append(Result(of, row.mean, None, "share"))
        if row.bundle_ratio < 1:
            verdict = "within noise" if row.is_within_noise else "beyond noise"
            results.append(Result(f"{of}, less full shuffle ({verdict})", row.difference, None, "share"))
    why = (
        "The paper draws accuracies of other models on other data; these are means over seeds after "
        f"{study.epochs} epochs on {_data(study)}, where bundles of scattered ids cost no accuracy."
    )
    return Repeated(results, why, lambda: draw_accuracy(study))


def draw_accuracy(study: Study) -> Figure:
    """Return the test error by bundle_ratio, and the accuracy by epoch for each numbering of the ids."""
    figure = new_figure(12.6, 4.6)
    widths = [1.6, *[1.0 for _ in study.numberings]]
    error, *epochs = figure.subplots(1, len(widths), gridspec_kw={"width_ratios": widths})
    _draw_error(error, study)
    for axes, numbering in zip(epochs, study.numberings, strict=True):
        _draw_epochs(axes, study, numbering)
    add_legend_below(figure, [epochs[0]], place="outside lower right", fontsize=8.5)
    return figure


def _draw_error(axes: Axes, study: Study) -> None:
    """Errors on a logarithmic scale, which shows both what is lost by a hair and what is lost altogether."""
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
    scale_by_ratio(axes, min(study.ratios))
    axes.set_yscale("log")
    axes.set_ylim(0.3, 150)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    below = f"{_data(study)}, {study.final(study.numberings[0], 1.0).size} seeds, mean ± sd"
    title = f"What a model learns in {study.epochs} epochs"
    name_axes(axes, title, below, x="bundle_ratio", y="test error (%)")
    axes.legend(frameon=False, fontsize=8.5, loc="center left")


def _draw_epochs(axes: Axes, study: Study, numbering: str) -> None:
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
        axes.plot(epochs, mean, color=colour, lw=1.3, label=f"bundle_ratio {name}")
    axes.set_ylim(0, 104)
    axes.set_xlim(1, max(study.epochs, 2))
    count_in_wholes(axes.xaxis)
    below = f"{_data(study)}; line: mean, band: ± sd"
    name_axes(axes, f"By epoch, ids {numbering}", below, x="epoch", y="test accuracy (%)")


def _data(study: Study) -> str:
    return study.data.split(",")[0]
