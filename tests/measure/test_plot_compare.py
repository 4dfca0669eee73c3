"""The picture of a run over its prediction shows both sides' numbers."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.container import BarContainer
from tests.spans import a_run

from penstock.measure.compare import RunComparison
from penstock.measure.plot_compare import draw_comparison

pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def comparison() -> RunComparison:
    return RunComparison(a_run([[2.0, 1.0], [1.0, 0.5]], 0.0), a_run([[2.0, 2.0], [1.0, 1.0]], 0.25), ())


def test_bars_stand_side_by_side_and_lines_grow_to_the_totals(comparison: RunComparison) -> None:
    epochs, steps = draw_comparison(comparison).axes

    bars = [
        [(round(bar.get_x() + bar.get_width() / 2), bar.get_height()) for bar in container]
        for container in epochs.containers
        if isinstance(container, BarContainer)
    ]
    assert bars[:2] == [[(0, 3.0), (1, 1.5)], [(0, 3.5), (1, 1.5)]]  # source reads: predicted, measured
    assert bars[2] == [(0, 0.5), (1, 0.5)]  # decoding, which was not predicted to be waited for
    grown = {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in steps.lines[:2]}
    assert grown == {"predicted": [0.0, 2.0, 3.0, 4.0, 4.5], "measured": [0.0, 2.0, 4.0, 5.0, 6.0]}
    assert epochs.get_title(loc="left") == "stall predicted 4.5 s, measured 6 s: -15.00 % of the run"
