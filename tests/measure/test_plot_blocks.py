"""The picture of an access sequence shows each reference where it is, in the colour of its phase."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from penstock.errors import ConfigError
from penstock.measure.plot_blocks import COLOUR_OF, draw_blocks, plot_blocks
from penstock.recordings.blocks import REFERENCE, Access, BlockString, Phase, Recording

RECORDING = Recording(
    np.array(
        [(0, 0, 4_096, 0, 1, Access.READ), (1, 0, 8_192, 1, 1, Access.READ), (2, 0, 9, 2, 1, Access.WRITE)],
        REFERENCE,
    ),
    ["/usr/lib/libc.so.6", "/data/1", "/saves/1"],
)


pytestmark = pytest.mark.usefixtures("fonts")


def test_every_reference_is_a_point_at_its_time_and_number() -> None:
    figure = draw_blocks([("full", RECORDING.string()), ("again", RECORDING.string())])

    axes, _ = figure.axes
    drawn = {
        to_hex(np.asarray(points.get_facecolor())[0]).upper(): np.asarray(points.get_offsets()).tolist()
        for points in axes.collections
    }
    assert drawn == {
        COLOUR_OF[Phase.LIBRARY]: [[0, 1]],
        COLOUR_OF[Phase.DATA]: [[1, 2], [2, 3]],
        COLOUR_OF[Phase.CHECKPOINT]: [[3, 4]],
    }
    assert axes.get_title(loc="left") == "full"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "reading libraries",
        "reading the data set",
        "checkpointing",
    ]


def test_strings_too_long_to_draw_are_thinned_and_say_so() -> None:
    length = 700_000
    string = BlockString(np.arange(1, length + 1), np.full(length, Phase.DATA, np.uint8), np.arange(length))

    (axes,) = draw_blocks([("", string)]).axes

    assert len(np.asarray(axes.collections[0].get_offsets())) == -(-length // 3)
    assert axes.get_xlabel() == "logical time (references), 1 of 3 drawn"


def test_the_ending_decides_the_format_and_has_to_be_a_pictures(tmp_path: Path) -> None:
    plot_blocks(RECORDING, tmp_path / "references.svg")
    assert (tmp_path / "references.svg").read_text().startswith("<?xml")

    with pytest.raises(ConfigError, match=r"ends in '\.txt', which is no picture"):
        plot_blocks(RECORDING, tmp_path / "references.txt")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_blocks(Recording(np.empty(0, REFERENCE), []), tmp_path / "references.png")
    assert not (tmp_path / "references.txt").exists()


def test_an_axis_of_few_blocks_is_marked_at_whole_numbers() -> None:
    figure = draw_blocks([("", RECORDING.string())])

    (axes,) = figure.axes
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert all(float(tick).is_integer() for tick in ticks)
