"""Pictures of where reads are served from and how often samples are read."""

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.measure import plot_frequency, plot_sharing
from penstock.plan import AccessPlan, FullShuffle
from penstock.simulate.sharing import COVER, PUSH, compare_schemes

pytestmark = pytest.mark.usefixtures("fonts")


def test_local_moved_and_store_reads_share_their_axes() -> None:
    plan = AccessPlan(FullShuffle(200, 0), 20, 4, ranks=2)
    counted = [compare_schemes(plan, held, [COVER, PUSH]) for held in (200, 100)]

    figure = plot_sharing.draw([1.0, 0.5], counted, [0.25, 0.625])

    panels = figure.axes
    assert len(panels) == 3
    assert len({axes.get_ylim() for axes in panels}) == len({axes.get_xlim() for axes in panels}) == 1
    for axes, what in zip(panels, ("local", "peer_reads", "store_reads"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) == {COVER, PUSH}
        shares = [counted[index][PUSH] for index in (1, 0)]  # smaller caches to the left
        expected = [100 * each.share(getattr(each, what)) for each in shares]
        assert np.asarray(lines[PUSH].get_ydata()).tolist() == pytest.approx(expected)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    plan = AccessPlan(FullShuffle(20, 0), 10, 2, ranks=2)

    with pytest.raises(ConfigError, match="no picture"):
        plot_sharing.plot_sharing([1.0], [compare_schemes(plan, 20)], [0.5], tmp_path / "sharing.txt")
    with pytest.raises(ConfigError, match="no picture"):
        plot_frequency.plot_frequency(np.ones(3), np.ones(3, np.int64), 1.5, tmp_path / "frequency.txt")


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        plot_sharing.draw([], [], [])
