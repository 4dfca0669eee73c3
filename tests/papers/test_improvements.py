"""Figures 5 and 10 of the bundle paper, on smaller data sets: relative sizes decide."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.papers import improvements
from penstock.papers.improvements import figure_5, figure_10


@pytest.fixture(autouse=True)
def _small_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improvements, "SAMPLES", {"ImageNet100": 2000, "Food101": 3000})


def test_improvement_has_four_readings() -> None:
    gains = improvements.improvements(full=[0.0, 0.1, 0.5], bundles=[0.0, 0.4, 0.5])

    found = [(gain.mean, gain.most) for gain in gains.values()]
    assert np.array(found) == pytest.approx(np.array([(0.375, 0.75), (1.5, 3.0), (0.1, 0.3), (1 / 9, 1 / 3)]))


@pytest.mark.usefixtures("fonts")
def test_figures_5_and_10_stand_next_to_the_papers_numbers() -> None:
    drawn = figure_5()
    five, ten = ({each.of: each for each in repeated.results} for repeated in (drawn, figure_10()))

    assert five["ImageNet100, LRU, mean by 1 - f/b"].published == 0.407
    assert five["Food101, LRU, most by 1 - f/b"].published == 0.596
    assert ten["Food101, LFU, mean by b - f"].published == 0.293
    assert ten["Food101, MRU, most by 1 - f/b"].published is None
    lru, lfu, mru = (ten[f"Food101, {policy}, mean by 1 - f/b"].computed for policy in ("LRU", "LFU", "MRU"))
    # 1 - f / b with f = c + (1 - c) ln(1 - c) and b = c, over c = 0.1, 0.2, ... 1.
    cache = np.arange(1, 10) / 10
    expected = np.append(-(1 - cache) * np.log(1 - cache) / cache, 0.0).mean()
    assert lru == pytest.approx(expected, abs=0.01)
    assert lfu is not None
    assert lfu < expected - 0.01
    assert mru == pytest.approx(0.0, abs=0.001)
    axes = drawn.draw().axes[1]
    assert [line.get_label() for line in axes.lines] == [
        "bound: 4/5 of the cache",
        "full shuffle",
        "bundles of 10 %",
    ]
