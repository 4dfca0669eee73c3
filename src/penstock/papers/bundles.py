"""Table 1 of Lee & Bahn 2023: buffer cache hits of nodes that each shuffle their own samples, in full or in bundles.

Source: J. Lee and H. Bahn, "Analyzing data reference characteristics of deep learning workloads for improving buffer
cache performance", Applied Sciences 2023: "the paper" below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.measure.picture import DASHED, Colour, Panel, Series, draw_panels
from penstock.papers.catalog import Repeated, Result
from penstock.plan import BundleShuffle, FullShuffle
from penstock.plan.subsets import own_subset
from penstock.simulate.bundles import best_hit_share, expected_hit_share, replayed_hit_shares
from penstock.simulate.caches import share_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUN397_SAMPLES = 108_754
EPOCHS = 5
#: Of each node's samples: what the paper says, and a fiftieth less.
CACHE_SHARES = (0.5, 0.49)
#: The columns of the table.
COLUMNS = ("full shuffle", "bundles")

#: Hit ratios in per cent by nodes, then node: original shuffle, proposed shuffle. The mean is 11.97 and 37.18.
#: Source: the paper, Table 1. Its section 4.2 says 12.70 where the table has 13.14.
TABLE_1: dict[int, tuple[tuple[float, float], ...]] = {
    2: ((11.63, 36.99), (11.64, 37.52)),
    4: ((11.87, 37.02), (11.90, 37.33), (11.60, 36.93), (11.59, 36.98)),
    8: (
        *((11.95, 37.58), (12.35, 36.27), (11.43, 36.81), (11.82, 37.55)),
        *((12.01, 36.35), (11.82, 37.55), (11.70, 36.14), (11.87, 37.26)),
    ),
    16: (
        *((13.14, 37.04), (11.62, 37.60), (12.70, 37.53), (12.17, 37.75)),
        *((12.21, 36.46), (12.59, 37.51), (12.34, 37.40), (11.57, 37.45)),
        *((12.49, 37.52), (11.49, 37.11), (11.39, 37.57), (11.80, 36.78)),
        *((11.66, 37.49), (12.05, 37.48), (12.20, 36.96), (12.38, 37.39)),
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class NodeHits:
    """Hit ratios of one node that shuffles its own samples, counted.

    nodes, node: how many there are, and which it is, from 1 as the paper counts. hit_share: float64[cache shares, 2],
    under a full shuffle and under bundles.
    """

    nodes: int
    node: int
    samples: int
    hit_share: NDArray[np.float64]


def count_hits(
    nodes: Sequence[int] = tuple(TABLE_1), cache_shares: Sequence[float] = CACHE_SHARES
) -> list[NodeHits]:
    """Return the rows of Table 1, counted.

    cache_shares: of each node's own samples; the paper says "of the full data set", with which every read after the
        first epoch would hit.
    """
    rows = []
    for count in nodes:
        for node in range(count):
            own = own_subset(SUN397_SAMPLES, 0, node, count)
            caches = [share_of(own.samples, share) for share in cache_shares]
            orders = FullShuffle(own.samples, own.seed), BundleShuffle(own.samples, own.seed)
            hits = [replayed_hit_shares(order, EPOCHS, caches) for order in orders]
            rows.append(NodeHits(count, node + 1, own.samples, np.array(hits).T))
    return rows


def published_hits() -> NDArray[np.float64]:
    """Return the paper's hit ratios: float64[nodes, 2], of all 30 nodes, under a full shuffle and under bundles."""
    return np.array([row for rows in TABLE_1.values() for row in rows]) / 100


def implied_cache(hit_share: float, samples: int, epochs: int, bundle: int) -> int:
    """Return the smallest cache, in samples, with which at least that ratio is expected: the effective cache."""
    return bisect_left(
        range(samples), hit_share, key=lambda cache: expected_hit_share(samples, cache, epochs, bundle)
    )


def table_1() -> Repeated:
    """Return Table 1 with the cache that it says and with one smaller by a fiftieth, and what its means imply."""
    rows, published = count_hits(), published_hits()
    counted = np.array([row.hit_share for row in rows])
    results = [
        Result(
            f"{row.nodes} nodes, node {row.node}, {name}", row.hit_share[0, column], paper[column], "share"
        )
        for row, paper in zip(rows, published, strict=True)
        for column, name in enumerate(COLUMNS)
    ]
    samples = SUN397_SAMPLES // 2
    for column, (name, bundle) in enumerate(
        zip(COLUMNS, (samples, BundleShuffle(samples).bundle), strict=True)
    ):
        mean = float(published[:, column].mean())
        ours = [float(each) for each in counted[:, :, column].mean(axis=0)]
        expected = expected_hit_share(samples, samples // 2, EPOCHS, bundle)
        implied = implied_cache(mean, samples, EPOCHS, bundle) / samples
        results += [
            Result(f"mean, {name}", ours[0], mean, "share"),
            Result(f"mean, {name}, by formula", expected, mean, "share"),
            Result(f"mean, {name}, cache of 49 %", ours[1], mean, "share"),
            Result(f"cache that the mean implies, {name}", implied, CACHE_SHARES[0], "share"),
        ]
    why = (
        "A cache of 50 % holds exactly five of ten bundles, where the curve is steepest; the paper's means are those "
        "of caches of 49 %, and libraries and checkpoints may have taken that fiftieth of the same cache."
    )
    return Repeated(results, why, lambda: draw_table_1(rows))


def draw_table_1(rows: Sequence[NodeHits]) -> Figure:
    """Return each node's hit ratio, the paper's and ours by cache, node after node."""
    bound = 100 * best_hit_share(100, 50, EPOCHS)
    ticks: list[tuple[float, str]] = []
    places: list[int] = []
    for count in dict.fromkeys(row.nodes for row in rows):
        begin = places[-1] + 3 if places else 0
        places += range(begin, begin + count)
        ticks.append((begin + (count - 1) / 2, str(count)))
    panels = []
    for column, title in enumerate(("Original: full shuffle", "Proposed: bundles of a tenth")):
        paper = [TABLE_1[row.nodes][row.node - 1][column] for row in rows]
        series = [Series("the paper", places, paper, Colour.INK, "", "x", size=6.0)]
        for at, (share, colour) in enumerate(zip(CACHE_SHARES, (Colour.BLUE, Colour.RED), strict=True)):
            ours = [100 * row.hit_share[at, column] for row in rows]
            series.append(Series(f"counted, cache of {share:.0%}", places, ours, colour, "", "o", size=4.0))
        if column:
            line = [bound, bound]
            series.append(Series("bound, cache of 50%", [0, places[-1]], line, Colour.INK, DASHED, width=1.2))
        above = "" if column else f"; the bound, {bound:g} %, is far above"
        panels.append(Panel(title, series, f"SUN397, {EPOCHS} epochs{above}"))
    figure = draw_panels(
        panels,
        x_label="nodes; a point for each",
        y_label="reads that hit the cache (%)",
        size=(9.4, 5.2),
        is_shared=False,
        legend="below",
    )
    for axes in figure.axes:
        axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
    return figure
