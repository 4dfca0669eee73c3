"""A picture of where reads are served from, by how much of the data set the ranks hold.

Needs matplotlib (`pip install penstock[plot]`), which is imported when something is drawn, and no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.simulate.sharing import COVER, FREQUENCY, HASH, LOCAL, MIN, PUSH, ReadCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lines that may lie on each other are told apart by dashes and markers.
_LOOK: dict[str, tuple[str, Any, str]] = {
    HASH: (Colour.DARK, (0, (1, 1.2)), "x"),
    FREQUENCY: (Colour.RED, "-", "o"),
    MIN: (Colour.ORANGE, (0, (6, 2, 1, 2)), "v"),
    COVER: (Colour.BLUE, "-", "s"),
    PUSH: (Colour.PURPLE, (0, (5, 2)), "D"),
    LOCAL: (Colour.GREEN, "-", "^"),
}
_PANELS = (
    ("local when read", "local"),
    ("sent between ranks, for a read or ahead", "peer_reads"),
    ("read from the shared store", "store_reads"),
)


def draw_sharing(
    cache_shares: Sequence[float], counted: Sequence[Mapping[str, ReadCounts]], bounds: Sequence[float]
) -> Figure:
    """Return local, moved and shared-store reads against N C / F, a panel each.

    cache_shares: N C / F. counted: for each, the counts by scheme. bounds: for each, the least share of store reads.
    Raises: ConfigError when there is nothing to draw.
    """
    if not counted:
        raise ConfigError("no cache size was given to draw: give at least one")
    order = np.argsort(cache_shares)
    held = np.asarray(cache_shares, np.float64)[order]
    panels = []
    for title, what in _PANELS:
        series = []
        if what == "store_reads":
            least = 100.0 * np.asarray(bounds)[order]
            series.append(Series("no scheme reads less", held, least, Colour.PALE, width=6.0))
        for name, (colour, dashes, marker) in _LOOK.items():
            if name in counted[0]:
                shares = [
                    100.0 * by_scheme[name].share(getattr(by_scheme[name], what)) for by_scheme in counted
                ]
                percent = np.asarray(shares)[order]
                series.append(Series(name, held, percent, colour, dashes, marker, is_open=True, width=1.8))
        panels.append(Panel(title, series))
    figure = draw_panels(
        panels,
        x_label="held by all ranks, N C / F",
        y_label="% of all reads",
        size=(11.0, 4.6),
        legend="below",
    )
    figure.axes[0].set_ylim(-2.0, 102.0)
    return figure
