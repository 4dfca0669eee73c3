"""Pictures of where reads are served from."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.measure.plot_sharing import draw_sharing
from penstock.plan import AccessPlan, FullShuffle
from penstock.simulate.sharing import COVER, PUSH, compare_schemes

pytestmark = pytest.mark.usefixtures("fonts")


def test_local_moved_and_store_reads_share_their_axes() -> None:
    plan = AccessPlan(FullShuffle(200, 0), 20, 4, ranks=2)
    counted = [compare_schemes(plan, held, [COVER, PUSH]) for held in (200, 100)]

    figure = draw_sharing([1.0, 0.5], counted, [0.25, 0.625])

    panels = figure.axes
    assert len(panels) == 3
    assert len({axes.get_ylim() for axes in panels}) == len({axes.get_xlim() for axes in panels}) == 1
    for axes, what in zip(panels, ("local", "peer_reads", "store_reads"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) - {"no scheme reads less"} == {COVER, PUSH}
        shares = [counted[index][PUSH] for index in (1, 0)]  # smaller caches to the left
        expected = [100 * each.share(getattr(each, what)) for each in shares]
        assert np.asarray(lines[PUSH].get_ydata()).tolist() == pytest.approx(expected)


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        draw_sharing([], [], [])
