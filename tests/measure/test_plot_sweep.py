"""The heat map shows the numbers of the answer, to anybody who can look at a PNG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from penstock.errors import ConfigError
from penstock.measure.picture import save_picture
from penstock.measure.plot_sweep import check_panels, draw_sweep
from penstock.measure.sweep import LOWER_BOUND, Outcome, Point, Sweep, Task
from penstock.measure.sweep_answer import Answer, judge
from penstock.measure.sweep_ranges import Prices
from penstock.simulate.scenario import scenario_named

pytestmark = pytest.mark.usefixtures("fonts")

GB = 10**9


def an_answer(
    staging: tuple[int, ...] = (1,),
    priced: bool = True,
    policies: tuple[str, ...] = ("frequency",),
    bound: float = 100.0,
) -> Answer:
    """Run time 100 s plus one for each GB that RAM and SSD have less than 30 in all; none with neither."""
    outcomes = {Task(Point(4, GB, 0, 0), LOWER_BOUND): Outcome("done", run_seconds=bound)}
    for policy in policies:
        for buffer in staging:
            for ram in (0, 10, 20):
                for ssd in (0, 10):
                    done = Outcome("done", run_seconds=float(100 + 30 - ram - ssd))
                    task = Task(Point(4, buffer * GB, ram * GB, ssd * GB), policy)
                    outcomes[task] = done if ram or ssd else Outcome("not supported", reason="nothing")
    prices = Prices(memory=3 / GB, local_disk=0.1 / GB) if priced else None
    return judge(outcomes, within=0.1, prices=prices)


def panels(answer: Answer) -> list[Axes]:
    figure = draw_sweep(answer)
    return [axes for axes in figure.axes if axes.get_title().startswith("staging")]


def cells(axes: Axes) -> dict[tuple[int, int], str]:
    return {
        (int(text.get_position()[0]), int(text.get_position()[1])): text.get_text() for text in axes.texts
    }


def test_each_cell_says_its_run_time_and_price() -> None:
    (axes,) = panels(an_answer())

    assert cells(axes) == {
        (0, 0): "N/A",
        (1, 0): "120 s\n132",
        (2, 0): "110 s\n252",
        (0, 1): "120 s\n16",
        (1, 1): "110 s\n136",
        (2, 1): "100 s\n256",
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "10 GB", "20 GB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "10 GB"]
    (image,) = axes.images
    array = image.get_array()
    assert array is not None
    assert array[1, 2] == 100.0


def test_the_cheapest_of_those_within_the_tolerance_is_framed_and_these_are_bold() -> None:
    (axes,) = panels(an_answer())

    bold = {text.get_position() for text in axes.texts if text.get_fontweight() == "bold"}
    frames = [patch for patch in axes.patches if isinstance(patch, Rectangle)]

    assert bold == {(2, 0), (1, 1), (2, 1)}
    assert [(frame.get_x() + 0.47, frame.get_y() + 0.47) for frame in frames] == [(1.0, 1.0)]


def test_bold_is_explained_only_where_something_is_bold() -> None:
    def legend(answer: Answer) -> str:
        return draw_sweep(answer).subfigs[-1].texts[0].get_text()

    assert legend(an_answer()).startswith("bold: within 10 % of the lower bound; framed")
    assert legend(an_answer(bound=10.0)).startswith("none is within 10 % of the lower bound\n")


def test_prices_that_differ_look_different() -> None:
    answer = an_answer(staging=(1, 2))
    rows = tuple(
        replace(row, price=price)
        for row, price in zip(answer.rows, (1964.29, 1964.31, *range(10)), strict=True)
    )

    label = cells(panels(replace(answer, rows=rows))[0])

    # The first place has no result and so no price; 1,964.31 is that of the second.
    assert label[0, 1] == "120 s\n1,964.31"


def test_there_is_a_panel_per_staging_size_and_the_bound_is_stated() -> None:
    figure = draw_sweep(an_answer(staging=(1, 2, 4), priced=False, policies=("cover", "frequency")))

    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["staging 1 GB", "staging 2 GB", "staging 4 GB"] * 2
    stated = [part.get_suptitle() for part in figure.subfigs[:2]]
    assert stated == ["cover, 4 ranks: lower bound 100 s", "frequency, 4 ranks: lower bound 100 s"]


@pytest.mark.parametrize(
    "ending", ["png", *(pytest.param(each, marks=pytest.mark.slow) for each in ("svg", "pdf"))]
)
def test_the_file_is_a_picture(tmp_path: Path, ending: str) -> None:
    save_picture(draw_sweep(an_answer(staging=(1, 2))), tmp_path / f"plan.{ending}")

    assert (tmp_path / f"plan.{ending}").stat().st_size > 5_000
    if ending == "png":
        with Image.open(tmp_path / "plan.png") as picture:
            assert picture.width > picture.height > 300


def test_a_picture_that_could_not_be_drawn_is_refused_beforehand(tmp_path: Path) -> None:
    scenario = scenario_named("scenario1")
    sweep = Sweep(scenario, ("frequency",))
    with pytest.raises(ConfigError, match=r"\.mp3'?, which is no picture"):
        check_panels(tmp_path / "plan.mp3", sweep)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_panels(tmp_path / "none" / "plan.png", sweep)
    with pytest.raises(ConfigError, match="25 panels of 1 cells"):
        check_panels(tmp_path / "plan.png", Sweep(scenario, ("frequency",), ranks=tuple(range(1, 26))))

    check_panels(tmp_path / "plan.png", sweep)


def test_a_sweep_without_rows_is_not_drawn() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_sweep(judge({}, within=0.1))
