"""Figure 3.1 of the thesis: how many samples a rank reads how often, in a shuffle and by equation 3.8.

Shuffled anew each epoch, a sample is read by each of N ranks in one epoch of N: X ~ B(E, 1/N) times in E epochs.
Source: R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020, section 3.2.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.measure.picture import Colour, name_axes, new_figure
from penstock.papers.catalog import Repeated, Result
from penstock.plan import AccessPlan, FullShuffle
from penstock.plan.frequency import readers_of_epoch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES, EPOCHS, RANKS = 10_000, 1_000, 4
#: A tenth more than the mean, E / N.
MORE_THAN = 275
#: Samples that a rank reads more often than that: "around 323" by the equation, 329 counted.
PUBLISHED_EXPECTED, PUBLISHED_COUNTED = 323, 329


def expected_histogram(samples: int, epochs: int, ranks: int) -> NDArray[np.float64]:
    """Return how many samples a rank is expected to read 0, 1, ..., E times: float64[E + 1], the sum is F.

    ranks: at least 2.
    """
    counts = np.arange(epochs + 1)
    factorials = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
    logarithms = factorials[-1] - factorials - factorials[::-1]
    logarithms += counts * -math.log(ranks) + (epochs - counts) * math.log1p(-1.0 / ranks)
    histogram: NDArray[np.float64] = samples * np.exp(logarithms)
    return histogram


def counted_histograms() -> NDArray[np.int64]:
    """Return how many samples each rank reads 0, 1, ..., E times in one run: int64[ranks, E + 1]."""
    plan = AccessPlan(FullShuffle(SAMPLES, 0), 100, EPOCHS, RANKS)
    counts = np.zeros((RANKS, SAMPLES), np.int64)
    for epoch in range(EPOCHS):
        samples, ranks = readers_of_epoch(plan, epoch)
        counts[ranks, samples] += 1
    return np.array([np.bincount(of_rank, minlength=EPOCHS + 1) for of_rank in counts])


def figure_3_1() -> Repeated:
    """Return how many samples are read more often than a tenth above the mean."""
    expected, counted = expected_histogram(SAMPLES, EPOCHS, RANKS), counted_histograms()
    of = f"samples read more than {MORE_THAN} times"
    above = expected[MORE_THAN + 1 :].sum()
    results = [Result(f"{of}, expected", float(above), PUBLISHED_EXPECTED, "count")]
    results += [
        Result(f"{of}, rank {rank}", int(count), None if rank else PUBLISHED_COUNTED, "count")
        for rank, count in enumerate(counted[:, MORE_THAN + 1 :].sum(axis=1))
    ]
    why = (
        f"One rank's count varies by {above**0.5:.0f} from seed to seed; the sum that the thesis prints begins at "
        f"{MORE_THAN} itself and would give {expected[MORE_THAN:].sum():.0f}, which its text and its result leave out."
    )
    return Repeated(results, why, lambda: draw_histogram(expected, counted[0]))


def draw_histogram(expected: NDArray[np.float64], counted: NDArray[np.int64]) -> Figure:
    """Return bars of the samples that a rank reads so often, below the line of what is expected."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    shown = np.flatnonzero((counted > 0) | (expected > 0.01))
    reads = np.arange(shown[0], shown[-1] + 1)
    counted, expected = counted[reads], expected[reads]
    many = reads > MORE_THAN
    label = f"read more than {MORE_THAN} times: {counted[many].sum():,} samples"
    axes.bar(reads[~many], counted[~many], 1.0, color="#9DB8CC")
    axes.bar(reads[many], counted[many], 1.0, color=Colour.RED, label=label)
    label = f"expected, B(E, 1/N): {expected[many].sum():,.0f} above"
    axes.plot(reads, expected, color=Colour.INK, lw=1.4, label=label)
    axes.set_xlim(reads[0] - 1.0, reads[-1] + 1.0)
    axes.set_ylim(0.0, 1.22 * max(float(counted.max()), float(expected.max())))
    name_axes(axes, x="times that the rank reads a sample during the training", y="samples")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure
