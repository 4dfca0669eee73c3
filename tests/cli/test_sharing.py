"""`penstock simulate sharing`: what it prints, writes and refuses."""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli.typed import run_command

from penstock.cli import sharing
from penstock.errors import ConfigError

_run = partial(run_command, sharing, "sharing")


pytestmark = pytest.mark.usefixtures("fonts")


_SMALL = ("--samples", "600", "--epochs", "6", "--batch-size", "20")


def test_one_size_of_cache_is_one_table_of_all_schemes(capsys: pytest.CaptureFixture[str]) -> None:
    _run(*_SMALL, "--memory", "1")

    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["no", "scheme", "below", "16.7"] in rows
    starts = ("hash ", "frequency ", "MIN per rank ", "cover ", "push ", "cover + local ")
    cells = [line.split()[-6:] for line in map(str.strip, shown.splitlines()) if line.startswith(starts)]
    assert len(cells) == 6
    assert cells[0][-1] == "16.7"
    for local, moved, store, _, ahead, in_all in (map(float, row) for row in cells):
        assert local + moved + store == pytest.approx(100, abs=0.16)
        assert store + ahead == pytest.approx(in_all, abs=0.11)
    assert "BatchNorm" in shown  # said, never silent


def test_json_counts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    _run(*_SMALL, "--memory", "0.5,1", "--json")

    data = json.loads(capsys.readouterr().out)
    assert [point["samples_held"] for point in data["results"]] == [300, 600]
    for point in data["results"]:
        assert set(point["policies"]) == set(data["policies"])
        for counts in point["policies"].values():
            assert counts["local"] + counts["moved"] + counts["store"] == counts["reads"] == 3_600
            assert counts["store_reads_share"] >= point["least_store_reads_share"]
            assert sum(counts["store_reads_by_epoch"]) == counts["store"] + counts["filled"]


def test_several_sizes_are_drawn_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(*_SMALL, "--memory", "1,0.2", "--plot", str(tmp_path / "sharing.png"))

    assert capsys.readouterr().out.count("N C / F") == 3
    assert (tmp_path / "sharing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--memory", "nan"), "--memory is nan"),
        (("--memory", "-1"), "--memory is -1"),
        (("--batch-size", "3"), "--batch-size is 3"),
        (("--ranks", "0"), "--ranks is 0"),
        (("--samples", "0"), "samples is 0"),
        (("--epochs", "0"), "epochs is 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _run(*arguments)


@pytest.mark.parametrize("share", ["5", "1e30", "1e308"])
def test_more_than_all_of_it_on_every_rank_is_all_of_it(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(*_SMALL, "--memory", share, "--json")

    (point,) = json.loads(capsys.readouterr().out)["results"]
    assert point["samples_held"] == 4 * 600
    assert point["policies"]["cover"]["store"] == 600


def test_more_samples_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="which takes at least 16 TB of memory; this machine has"):
        _run("--samples", "1000000000000")
