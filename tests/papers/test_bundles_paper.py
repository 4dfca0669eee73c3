"""Table 1 of the bundle paper: what is cited is what it says, and what is counted explains it."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.papers.bundles import TABLE_1, count_hits, draw_table_1, implied_cache, published_hits
from penstock.simulate.bundles import expected_hit_share

pytestmark = pytest.mark.usefixtures("fonts")


def test_the_papers_table_has_the_means_and_ranges_that_are_cited() -> None:
    rows = 100 * published_hits()

    assert {nodes: len(of_nodes) for nodes, of_nodes in TABLE_1.items()} == {2: 2, 4: 4, 8: 8, 16: 16}
    np.testing.assert_allclose(rows.mean(axis=0), [11.97, 37.18], atol=0.005)
    np.testing.assert_allclose(rows.min(axis=0), [11.39, 36.14])
    np.testing.assert_allclose(rows.max(axis=0), [13.14, 37.75])


@pytest.mark.slow
def test_table_1_with_the_whole_cache_is_the_ideal_on_every_node() -> None:
    rows = count_hits(cache_shares=(0.5,))

    assert [(row.nodes, row.node) for row in rows] == [
        (n, node + 1) for n in (2, 4, 8, 16) for node in range(n)
    ]
    for nodes in TABLE_1:
        assert sum(row.samples for row in rows if row.nodes == nodes) == 108_754
    original, proposed = np.array([row.hit_share[0] for row in rows]).T
    np.testing.assert_allclose(original.mean(), 0.1227, atol=0.0005)
    np.testing.assert_allclose(proposed, 0.4, atol=0.0012)
    np.testing.assert_allclose(original, 0.1227, atol=0.006)


def test_table_1_with_a_fiftieth_of_the_cache_missing_is_the_papers() -> None:
    """One missing share explains both columns: the bundles' loss of 2.6 points and the full shuffle's of 0.5."""
    rows = count_hits(nodes=(2, 4), cache_shares=(0.49,))

    original, proposed = np.mean([row.hit_share[0] for row in rows], axis=0)
    paper_original, paper_proposed = published_hits().mean(axis=0)
    assert original == pytest.approx(paper_original, abs=0.0035)
    assert proposed == pytest.approx(paper_proposed, abs=0.0025)


def test_the_papers_means_imply_a_cache_of_49_per_cent() -> None:
    original, proposed = published_hits().mean(axis=0)

    assert implied_cache(original, 54_377, 5, 54_377) / 54_377 == pytest.approx(0.494, abs=0.001)
    assert implied_cache(proposed, 54_377, 5, 5_438) / 54_377 == pytest.approx(0.489, abs=0.001)


@for_each("bundle", [1, 7, 100, 1000])
def test_the_implied_cache_is_the_smallest_that_does(bundle: int) -> None:
    cache = implied_cache(0.3, 1000, 4, bundle)

    assert expected_hit_share(1000, cache, 4, bundle) >= 0.3 > expected_hit_share(1000, cache - 1, 4, bundle)
    assert implied_cache(0.75, 1000, 4, bundle) == 1000


def test_every_node_of_the_paper_and_ours_is_drawn() -> None:
    rows = count_hits(nodes=(2, 4))

    original, proposed = draw_table_1(rows).axes

    for axes, column in ((original, 0), (proposed, 1)):
        published = [row[column] for nodes in (2, 4) for row in TABLE_1[nodes]]
        np.testing.assert_allclose(_drawn(axes, "the paper"), published)
        for at, share in enumerate(("50%", "49%")):
            counted = [100 * row.hit_share[at, column] for row in rows]
            np.testing.assert_allclose(_drawn(axes, f"counted, cache of {share}"), counted)
    np.testing.assert_allclose(_drawn(proposed, "bound, cache of 50%"), 40)


def _drawn(axes: Axes, label: str) -> NDArray[np.float64]:
    (line,) = (line for line in axes.lines if line.get_label() == label)
    return np.asarray(line.get_ydata(), np.float64)
