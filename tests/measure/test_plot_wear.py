"""The pictures show what the runs counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from penstock.machine.ssd import Ssd, Wear
from penstock.measure.picture import save_picture
from penstock.measure.plot_wear import COLOUR_OF, draw_blocks, draw_methods
from penstock.papers.deltas import caffenet_sizes
from penstock.simulate.snapshots import METHODS, StoredRun, compare_methods, recorded_sizes
from penstock.simulate.wear import WearResult, warm_drive

pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture(scope="module")
def runs() -> list[StoredRun]:
    drive = warm_drive(replace(Ssd.paper(), blocks_per_chip=256))
    return compare_methods(drive, [recorded_sizes()[0], caffenet_sizes().scaled(100_000)], METHODS, [3, 5])


def bars_of(axes: Axes) -> list[Rectangle]:
    return [
        patch
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_height() > 0 and patch.get_width() > 0
    ]


def test_bars_are_what_was_written_and_erased_in_the_colour_of_their_method(runs: list[StoredRun]) -> None:
    written, beside, erased, _ = draw_methods(runs).axes
    own = runs[:14]

    assert [bar.get_height() for bar in bars_of(written)] == [
        pytest.approx(run.stored_bytes / 1e9) for run in own if run.stored_bytes
    ]
    assert [bar.get_height() for bar in bars_of(erased)] == [
        run.result.work.erases for run in own if run.result is not None
    ]
    for bar, run in zip(bars_of(erased), own, strict=True):
        assert to_hex(bar.get_facecolor()).upper() == COLOUR_OF[run.method.name].upper()
    assert len(bars_of(beside)) == 4  # complete twice, two schemes at snap_dis 5
    assert "not given" in [text.get_text() for text in beside.texts]


def test_changes_are_those_from_complete_snapshots(runs: list[StoredRun]) -> None:
    written = draw_methods(runs).axes[0]
    complete, gzip = (run.stored_bytes for run in runs[:2])
    assert complete is not None
    assert gzip is not None

    assert written.texts[0].get_text() == f"\u2212{100 - 100 * gzip / complete:.0f} %"


def test_blocks_are_drawn_by_their_erases() -> None:
    result = WearResult(Ssd.paper(), (), Wear(np.array([0, 0, 3, 1, 3, 3], np.int32)))

    (axes,) = draw_blocks(result, "a stream").axes

    centres = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars_of(axes)}
    assert centres == {0: 2, 1: 1, 3: 3}


def test_a_picture_is_a_file_that_can_be_opened(tmp_path: Path, runs: list[StoredRun]) -> None:
    save_picture(draw_methods(runs), tmp_path / "figure.png")

    with Image.open(tmp_path / "figure.png") as picture:
        assert min(picture.size) > 500
