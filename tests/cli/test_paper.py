"""`penstock paper`: the list, a table next to its published numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.papers import catalog
from penstock.papers.catalog import PAPERS, Paper, Repeated, Result


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out
    assert main(["paper", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]

    assert [each["name"] for each in results] == [paper.name for paper in PAPERS]
    for paper in PAPERS:
        assert paper.name in listed
        assert paper.source in listed


def test_help_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["paper", "--help"])

    shown = capsys.readouterr().out
    for paper in PAPERS:
        assert f"  {paper.name} " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bundles-table-7"], "the known ones are "),
        (["--plot", "a.png"], "--plot draws one table or figure: name it"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *arguments]) == 1
    assert message in capsys.readouterr().err


def _repeat() -> Repeated:
    results = [
        Result("hits", 0.4, 0.37, "share"),
        Result("time", 11.0, 10.0, "seconds"),
        Result("blocks", 8_880, None, "count"),
        Result("too large", None, None, "seconds"),
    ]

    def draw() -> None:
        raise AssertionError("nobody asked for a picture")

    return Repeated(results, "They differ because.", draw)  # type: ignore[arg-type]


def test_each_number_stands_next_to_the_published_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalog, "_repeat_a_table", _repeat, raising=False)
    monkeypatch.setattr(
        catalog, "PAPERS", (Paper("a-table", "a title", "a source", "catalog:_repeat_a_table"),)
    )

    assert main(["paper", "a-table"]) == 0
    rows = {
        line.split("  ")[1]: line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "  "
    }
    assert main(["paper", "a-table", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    assert rows["hits"][1:] == ["37.00", "%", "40.00", "%", "+3.00", "points"]
    assert rows["time"][1:] == ["10.000", "s", "11.000", "s", "+10.00", "%"]
    assert rows["blocks"][1:] == ["N/A", "8,880"]
    assert data["why"] == "They differ because."
    assert data["results"][0] == pytest.approx(
        {"of": "hits", "computed": 0.4, "published": 0.37, "unit": "share", "difference": 0.03}
    )
    assert data["results"][3]["computed"] is None


def test_the_function_of_every_name_is_there() -> None:
    """Without computing what takes seconds."""
    for paper in PAPERS:
        module, _, function = paper.function.partition(":")
        source = Path(catalog.__file__).with_name(f"{module}.py").read_text("utf-8")
        assert f"\ndef {function}() -> Repeated:" in source


@pytest.mark.usefixtures("fonts")
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "bundles-figure-9", "--plot", str(tmp_path / "figure.png")]) == 0
    assert "The picture: " in capsys.readouterr().out
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
