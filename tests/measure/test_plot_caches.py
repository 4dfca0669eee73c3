"""The picture of caches shows the curves that it was given."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.measure.plot_caches import cache_panel, draw_caches

SHARES = [0.0, 0.5, 1.0]
OTHER = {"bundles of 10 %": [0.0, 0.4, 0.8]}
BOUND = "bound", [0.0, 0.4, 0.8]


@pytest.mark.usefixtures("fonts")
def test_lines_and_bound_stand_at_their_values_in_percent() -> None:
    panels = [
        cache_panel("one", SHARES, {"LRU": [0.0, 0.1, 0.8]} | OTHER, BOUND),
        cache_panel("two", SHARES, OTHER),
    ]

    figure = draw_caches(panels)

    first, second = figure.axes
    drawn = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in first.lines}
    assert drawn == {"bound": [0, 40, 80], "LRU": [0, 10, 80], "bundles of 10 %": [0, 40, 80]}
    assert np.asarray(first.lines[1].get_xdata()).tolist() == [0, 50, 100]
    assert [line.get_label() for line in second.lines] == ["bundles of 10 %"]
    assert first.get_xlabel() == "cache size (% of samples)"
    assert len({line.get_color() for line in first.lines}) == 3


def test_there_are_looks_for_any_number_of_orders() -> None:
    lines = {f"bundles of {percent} %": [0.1, 0.2, 0.3] for percent in range(1, 20)}

    looks = [(each.colour, each.dashes) for each in cache_panel("many", SHARES, lines).series]

    assert len(set(looks)) == len(looks)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="each needs a series"):
        draw_caches([cache_panel("one", SHARES, {})])
    with pytest.raises(ConfigError, match="0 panels"):
        draw_caches([])


def test_importing_the_plot_loads_no_matplotlib() -> None:
    code = "import sys, penstock.measure.plot_caches; sys.exit('matplotlib' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
