"""The picture of caches shows the curves that it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.errors import ConfigError
from penstock.measure.plot_caches import Line, Panel, draw, plot_caches

SHARES = np.array([0.0, 0.5, 1.0])
LRU = Line("LRU", SHARES, np.array([0.0, 0.1, 0.8]))
OTHER = Line("bundles of 10 %", SHARES, np.array([0.0, 0.4, 0.8]))
BOUND = Line("bound", SHARES, 0.8 * SHARES)


pytestmark = pytest.mark.usefixtures("fonts")


def test_lines_and_bound_stand_at_their_values_in_percent() -> None:
    figure = draw([Panel("one", [LRU, OTHER], BOUND), Panel("two", [OTHER])], "samples")

    first, second = figure.axes
    drawn = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in first.lines}
    assert drawn == {"bound": [0, 40, 80], "LRU": [0, 10, 80], "bundles of 10 %": [0, 40, 80]}
    assert np.asarray(first.lines[1].get_xdata()).tolist() == [0, 50, 100]
    assert [line.get_label() for line in second.lines] == ["bundles of 10 %"]
    assert first.get_xlabel() == "cache size (% of samples)"
    assert len({line.get_color() for line in first.lines}) == 3


def test_a_picture_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    plot_caches([Panel("one", [LRU], BOUND)], tmp_path / "a.png")
    plot_caches([Panel("one", [LRU], BOUND)], tmp_path / "a.svg")

    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] > 600
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.docx', which is no picture"):
        plot_caches([Panel("one", [LRU])], tmp_path / "a.docx")
    with pytest.raises(ConfigError, match="each needs a line"):
        draw([Panel("one", [])], "samples")
    with pytest.raises(ConfigError, match="0 panels"):
        draw([], "samples")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_plot_loads_no_matplotlib() -> None:
    code = "import sys, penstock.measure.plot_caches; sys.exit('matplotlib' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
