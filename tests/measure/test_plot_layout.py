"""The picture of layouts: the bars' lengths and the lines' ends are the comparison's seconds."""

import numpy as np
import pytest
from matplotlib.container import BarContainer

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.plot_layout import draw_layout
from penstock.plan import AccessPlan, FullShuffle
from penstock.simulate.layout import LayoutComparison, compare_layouts
from penstock.simulate.layout_verdict import TITLES

MB = 10**6


def comparison(epochs: int) -> LayoutComparison:
    store = SharedStore(Curve.flat(50e6), sequential=Curve.flat(100e6), random_bytes=MB)
    machine = Machine(store, (StorageClass("staging", 50 * MB, 1, Curve.flat(1e10)),), ranks=2)
    return compare_layouts(AccessPlan(FullShuffle(500), 10, epochs, 2), machine, np.full(500, MB))


def test_bars_and_lines_end_where_the_runs_do() -> None:
    found = comparison(epochs=4)

    bars, lines = draw_layout(found).axes

    names = [label.get_text() for label in bars.get_yticklabels()]
    rewriting, reading = (each for each in bars.containers if isinstance(each, BarContainer))
    ends = [a.get_width() + b.get_width() for a, b in zip(rewriting, reading, strict=True)]
    drawn = {str(line.get_label()): line for line in lines.get_lines() if line.get_label() in TITLES.values()}
    for option in found.options:
        title = TITLES[option.name]
        assert ends[names.index(title)] == pytest.approx(option.run_seconds)
        x, y = np.asarray(drawn[title].get_xdata()), np.asarray(drawn[title].get_ydata())
        assert y[x == 4] == pytest.approx(option.run_seconds)
        assert y[0] == pytest.approx(option.seconds_after(1))


def test_a_run_of_one_epoch_is_drawn_too() -> None:
    assert len(draw_layout(comparison(epochs=1)).axes) == 2
