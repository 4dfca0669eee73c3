"""The picture shows the numbers of the traces it was given, to anybody who can look at a PNG."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.patches import StepPatch
from PIL import Image
from tests.spans import a_run, spans_of

from penstock.errors import ConfigError
from penstock.measure.charts import COLOUR_OF_CAUSE, STYLE
from penstock.measure.picture import Colour
from penstock.measure.plot import COLOUR_OF, OWN_COLOUR, SAVE_COLOURS, draw, plot_trace
from penstock.measure.watch import watch
from penstock.trace import NO_EPOCH, SOURCE, SPAN, Cause, Kind, Summary, Trace

pytestmark = pytest.mark.usefixtures("fonts")


def bars_of(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Bottom and height of each epoch's bar, by label."""
    return {
        str(container.get_label()): [(bar.get_y(), bar.get_height()) for bar in container]
        for container in axes.containers
        if isinstance(container, BarContainer)
    }


def strip_of(axes: Axes) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Edges of the columns, bottoms and tops of each layer, by label."""
    layers = {}
    for patch in axes.patches:
        assert isinstance(patch, StepPatch)
        tops, edges, bottoms = patch.get_data()
        layers[str(patch.get_label())] = (list(edges), list(np.atleast_1d(bottoms)), list(tops))
    return layers


def test_bars_stack_the_stall_by_cause_on_the_time_of_ones_own() -> None:
    figure = draw([("measured", a_run([[3.0, 1.0], [1.0, 0.5]], decode=0.25))])

    assert bars_of(figure.axes[0]) == {
        "the training's own time": [(0.0, 2.0), (0.0, 2.0)],
        "stall: source read": [(2.0, 3.5), (2.0, 1.0)],
        "stall: decode": [(5.5, 0.5), (3.0, 0.5)],
    }
    assert figure.axes[0].get_ylabel() == "time per epoch (s)"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1"]
    annotations = [text.get_text() for text in figure.axes[0].texts]
    assert annotations == ["waited 5.5 s of 9.5 s (57.9 %)", "4 s\nstall", "1.5 s\nstall"]


def test_the_strip_below_shows_each_steps_stall_and_where_epochs_begin() -> None:
    figure = draw([("", a_run([[3.0, 1.0], [1.0, 0.5]], decode=0.25, stop=0.125))])

    edges = [0, 1, 2, 3, 4]
    reads = [2.75, 0.75, 0.75, 0.25]
    decoded = [3.0, 1.0, 1.0, 0.5]
    stopped = [3.0, 1.125, 1.0, 0.625]
    assert strip_of(figure.axes[1]) == {
        "stall: source read": (edges, [0.0] * 4, reads),
        "stall: decode": (edges, reads, decoded),
        "stall: got no batch": (edges, decoded, stopped),
    }
    assert [line.get_xdata()[0] for line in figure.axes[1].lines] == [2]  # type: ignore[index]
    assert figure.axes[1].get_ylabel() == "stall per step (s)"
    assert figure.axes[1].get_xlabel() == "step of the run"


def test_a_long_run_is_drawn_as_means_so_that_areas_remain_times() -> None:
    stalls = np.random.default_rng(1).random(1_001)
    figure = draw([("", a_run([list(stalls)]))])

    ((edges, _, tops),) = strip_of(figure.axes[1]).values()
    assert len(tops) == 334
    assert edges[-2:] == [999, 1_001]
    assert tops[0] == pytest.approx(stalls[:3].mean())
    assert tops[-1] == pytest.approx(stalls[999:].mean())
    assert np.sum(np.diff(edges) * tops) == pytest.approx(stalls.sum())
    assert figure.axes[1].get_xlabel() == "step of the run (means of 3)"


def test_runs_stand_side_by_side_on_one_scale_with_their_names() -> None:
    runs = [("PyTorch", a_run([[9.0]])), ("Penstock", a_run([[1.0]])), ("predicted", a_run([[1.1]]))]
    figure = draw(runs)

    upper, lower = figure.axes[:3], figure.axes[3:]
    assert [axes.get_title(loc="left") for axes in upper] == ["PyTorch", "Penstock", "predicted"]
    assert len({axes.get_ylim() for axes in upper}) == 1
    assert len({axes.get_ylim() for axes in lower}) == 1
    assert upper[0].get_ylim()[1] >= 10.0
    assert lower[0].get_ylim()[1] >= 9.0


def test_the_legend_names_what_is_drawn_and_nothing_else_in_the_colours_it_is_drawn_in() -> None:
    watched = watch([1, 2], quiet=True)
    for _ in watched:
        pass
    figure = draw([("a", watched.trace()), ("b", a_run([[1.0]], decode=0.5))])

    (legend,) = figure.legends
    colours = {
        text.get_text(): to_hex(handle.get_facecolor()).upper()
        for text, handle in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    assert colours == {
        "the training's own time": OWN_COLOUR,
        "stall: source read": COLOUR_OF[Cause.SOURCE_READ],
        "stall: decode": COLOUR_OF[Cause.DECODE],
        "stall: got no batch": COLOUR_OF[Cause.NO_BATCH],
        "stall: cause unseen": COLOUR_OF[Cause.UNSEEN],
    }


def test_every_cause_has_a_colour_of_its_own() -> None:
    assert set(COLOUR_OF) == set(Cause)
    assert len({*COLOUR_OF.values(), OWN_COLOUR}) == len(Cause) + 1


def test_a_cause_has_one_colour_on_a_page_and_in_a_picture() -> None:
    light = dict(re.findall(r"--c(\d+):(#\w+)", STYLE[: STYLE.index("@media")]))
    on_page = {cause: to_hex(light[str(int(colour))]).upper() for cause, colour in COLOUR_OF_CAUSE.items()}

    assert on_page | {Cause.NO_BATCH: Colour.YELLOW} == COLOUR_OF  # lines of a page need a darker yellow


def with_saves(trace: Trace, *saves: tuple[Kind, float, float]) -> Trace:
    rows = [(begin, end, -1, 9, NO_EPOCH, 1000, kind, 0, 9, 0) for kind, begin, end in saves]
    return Trace(np.concatenate([trace.spans, spans_of(rows)]))


def test_saves_are_a_part_of_the_bars_and_lanes_over_the_strip() -> None:
    """Two steps of 1 s after waits of 1 s and 3 s; the drain goes on into the wait for the second."""
    saves = (Kind.SAVE, 1.0, 1.5), (Kind.WRITE, 1.5, 2.0), (Kind.DRAIN, 2.0, 4.0), (Kind.DRAIN, 90.0, 99.0)
    figure = draw([("", with_saves(a_run([[1.0, 3.0]]), *saves))])

    assert bars_of(figure.axes[0])["saves hold the training"] == [(1.5, 0.5)]
    lanes = {
        str(lane.get_label()): [
            (np.asarray(path.vertices)[:, 0].min(), np.asarray(path.vertices)[:, 0].max())
            for path in lane.get_paths()
        ]
        for lane in figure.axes[1].collections
    }
    assert lanes == {
        "saves hold the training": [(0.5, 0.75)],
        "a snapshot is written": [(0.75, 1.0)],
        "a snapshot is drained": [(1.0, 1.5)],
    }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:4] == ["the training's own time", *lanes]
    tops = [top for _, _, layer in strip_of(figure.axes[1]).values() for top in layer]
    assert max(tops) < 0.8 * figure.axes[1].get_ylim()[1]


def test_every_colour_of_a_snapshot_is_its_own_too() -> None:
    assert not {*SAVE_COLOURS.values()} & {*COLOUR_OF.values(), OWN_COLOUR}
    assert len({*SAVE_COLOURS.values()}) == 3


def test_an_epoch_that_was_only_read_ahead_for_is_not_drawn() -> None:
    ahead = spans_of([(0.0, 1.0, 5, 10, 1, 0, Kind.READ, SOURCE, 1, 0)])
    trace = a_run([[1.0]])

    figure = draw([("", Trace(np.concatenate([trace.spans, ahead])))])

    assert len(bars_of(figure.axes[0])["the training's own time"]) == 1


def test_of_a_run_too_long_for_its_file_all_epochs_are_drawn_and_the_steps_that_are_kept() -> None:
    trace = a_run([[1.0, 3.0], [0.5]])
    is_last = trace.spans["epoch"] == 1
    long = replace(trace, spans=trace.spans[is_last], left_out=Summary(1, (trace.epochs()[0],)))

    figure = draw([("", long)])

    assert bars_of(figure.axes[0])["the training's own time"] == [(0.0, 2.0), (0.0, 1.0)]
    assert figure.axes[1].get_xlabel() == "step of the last, which are kept"
    assert figure.axes[1].get_xlim() == (0.0, 1.0)
    with pytest.raises(ConfigError, match="0 of them with a WAIT span"):
        draw([("", replace(long, spans=trace.spans[:0]))])


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [3, 40])
def test_the_file_is_a_picture_with_something_on_it(tmp_path: Path, epochs: int) -> None:
    trace = a_run([[0.5, 0.25]] * epochs)

    plot_trace([("one", trace), ("other", trace)], tmp_path / "runs.png")
    plot_trace(trace, tmp_path / "run.png")

    for name in ("runs.png", "run.png"):
        with Image.open(tmp_path / name) as picture:
            picture.load()
            assert picture.format == "PNG"
            assert min(picture.size) >= 800
            counted = picture.convert("RGB").getcolors(maxcolors=1 << 24)
        colours = {"#{:02X}{:02X}{:02X}".format(*pixel) for _, pixel in counted}  # type: ignore[union-attr, misc]
        assert {OWN_COLOUR, COLOUR_OF[Cause.SOURCE_READ], "#FFFFFF"} <= colours


def test_nothing_to_draw_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    empty = Trace(np.empty(0, SPAN))

    with pytest.raises(ConfigError, match="2 runs were given to draw, 1 of them with a WAIT span"):
        plot_trace([("a", a_run([[1.0]])), ("b", empty)], tmp_path / "runs.png")
    with pytest.raises(ConfigError, match="0 runs were given"):
        plot_trace([], tmp_path / "runs.png")
    assert list(tmp_path.iterdir()) == []
