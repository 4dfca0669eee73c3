"""What all pictures share: a name that can be one, known before anything is computed, and a style."""

from pathlib import Path

import pytest
from PIL import Image
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.measure.picture import check_picture, name_axes, new_figure, save_picture, style_axes

pytestmark = pytest.mark.usefixtures("fonts")


@pytest.mark.parametrize("name", ["a.png", "a.SVG", "a.pdf"])
def test_a_name_that_a_picture_can_have_is_accepted(tmp_path: Path, name: str) -> None:
    check_picture(tmp_path / name)


@for_each(
    ("name", "message"),
    [
        ("a.txt", r"a\.txt ends in '\.txt', which is no picture: use \.png"),
        ("a.xyz", r"a\.xyz ends in '\.xyz', which is no picture"),
        ("a.jpg", r"a\.jpg ends in '\.jpg', which is no picture"),
        ("a", "a has no ending, which says the format"),
        ("nowhere/a.png", "there is no folder .*nowhere: make it first"),
    ],
)
def test_a_name_that_no_picture_can_have_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_picture(tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        save_picture(new_figure(2.0, 1.0), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_picture_has_the_size_in_inches_at_150_dots(tmp_path: Path) -> None:
    save_picture(new_figure(4.0, 2.0), tmp_path / "a.png")

    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (600, 300)


@pytest.mark.parametrize("name", ["$x^2$", "$\\nosuch$"])
def test_a_dollar_sign_in_a_name_is_drawn_as_one(tmp_path: Path, name: str) -> None:
    figure = new_figure(4.0, 2.0)
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.plot([1, 2], [10, 1000], label=name)
    axes.set_xticks([1], labels=[name])
    name_axes(axes, name, name)
    figure.legend()

    save_picture(figure, tmp_path / "a.svg")

    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count(f"<!-- {name} -->") == 4
    assert "<!-- $\\mathdefault{10^{2}}$ -->" in drawn  # matplotlib's own, at the ticks of the other axis


def test_what_stands_below_a_title_does_not_lie_on_it() -> None:
    figure = new_figure(4.0, 2.0)
    axes = figure.subplots()
    style_axes(axes)

    name_axes(axes, "A title", "and what it means")

    figure.draw_without_rendering()
    (below,) = axes.texts
    assert below.get_text() == "and what it means"
    title = axes._left_title  # type: ignore[attr-defined]
    assert title.get_text() == "A title"
    assert below.get_window_extent().y1 <= title.get_window_extent().y0
