"""`penstock simulate wear` as a user types it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.typed import run_command

from penstock.cli import wear
from penstock.errors import PenstockError
from penstock.machine.ssd import Ssd
from penstock.recordings.blocks import write_recording
from penstock.recordings.imports import import_recording

SMALL = replace(Ssd.paper(), blocks_per_chip=512)


pytestmark = pytest.mark.usefixtures("fonts")

run = partial(run_command, wear, "wear")


@pytest.fixture
def ssd(tmp_path: Path) -> str:
    (tmp_path / "ssd.toml").write_text(SMALL.to_toml())
    return str(tmp_path / "ssd.toml")


@pytest.fixture
def stream(tmp_path: Path) -> str:
    (tmp_path / "stream.csv").write_text(
        "phase,one\nwrite,a,20 MB\nphase,two\nread,a\nwrite,b,20 MB\ndelete,a\n"
    )
    return str(tmp_path / "stream.csv")


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_methods_are_compared_at_every_distance(ssd: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("--drive", ssd, "--parameters", "1e6", "--models", "text-gpt", "--snap-dis", "3,10", "--json")

    data = printed(capsys)
    runs = data["results"]
    assert [(row["snap_dis"], row["encoding"]) for row in runs][6:8] == [
        (3, "dynrle-chain"),
        (10, "complete"),
    ]
    assert len(runs) == 2 * 7
    assert runs[0]["stored_bytes"] == 25 * 4_000_000
    assert runs[0]["erases"] > runs[-2]["erases"] > 0
    assert runs[0]["lifetime"]["even_bytes"] == pytest.approx(
        runs[0]["written_bytes"] * 100_000 * data["drive"]["blocks"] / runs[0]["erases"]
    )
    assert runs[0]["lifetime"]["even_years"] is None
    assert data["drive"]["exported_bytes"] == SMALL.exported_bytes


def test_the_table_names_what_is_missing_and_what_is_scaled(
    ssd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"name": "plain", "parameters": 1_000, "complete_bytes": [4_000, 4_000]}
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"format": "penstock snapshot sizes 1", "models": [model]}))

    run(
        "--drive", ssd, "--sizes", str(sizes), "--parameters", "1000000", "--snap-dis", "5", "--every",
        "25 min",
    )  # fmt: skip

    out = capsys.readouterr().out
    assert "plain: 2 snapshots of 1,000,000 parameters" in out
    assert "Left out: what plain has no recorded sizes for." in out
    assert "are scaled to 1,000,000 parameters" in out
    assert "Years need" not in out


def test_a_stream_is_summed_up_by_phase(ssd: str, stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("--drive", ssd, "--recording", stream, "--every", "12 h", "--json")

    (data,) = printed(capsys)["results"]
    pages = -(-20_000_000 // 4_096)
    assert data["written_pages"] == 2 * pages
    assert [phase["name"] for phase in data["phases"]] == ["one", "two"]
    assert data["phases"][1]["read_pages"] == pages
    assert data["trimmed_pages"] == pages
    assert data["bytes_per_day"] == pytest.approx(2 * pages * 4_096)
    life = data["lifetime"]
    assert life["even_bytes"] == pytest.approx(
        data["written_bytes"] * 100_000 / data["erases_per_block"]["mean"]
    )
    assert life["even_years"] == pytest.approx(life["even_bytes"] / data["bytes_per_day"] / 365.25)
    assert life["first_block_bytes"] <= life["even_bytes"]
    assert sum(row["blocks"] for row in data["histogram"]) == SMALL.blocks


BLKPARSE = """\
  8,0    1        1     0.000000001  4162  Q   W 1000 + 8 [python]
  8,0    1        2     0.000000002  4162  Q   W 1008 + 16 [python]
  8,0    1        3     0.000000003  4162  Q   R 1000 + 8 [python]
"""
FIO = """\
fio version 2 iolog
/ckpt add
/ckpt open
/ckpt write 0 8192
/ckpt write 0 4096
/ckpt close
"""


@pytest.mark.parametrize(
    ("form", "log", "files", "devices", "pages"), [("blkparse", BLKPARSE, 0, 1, 3), ("fio", FIO, 1, 0, 3)]
)
def test_the_writes_of_a_recording_are_run(
    form: str,
    log: str,
    files: int,
    devices: int,
    pages: int,
    ssd: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "log").write_text(log)
    file = str(tmp_path / "run.blocks")
    write_recording(file, import_recording([tmp_path / "log"], form))

    run("--drive", ssd, "--recording", file, "--repeats", "2", "--json")
    data = printed(capsys)
    run("--drive", ssd, "--recording", file)

    assert data["results"][0]["written_pages"] == 2 * pages
    assert data["recording"] == {
        "files": files,
        "devices": devices,
        "writes": 2,
        "written_bytes": 3 * 4_096,
        "pages_beyond_drive": 0,
    }
    assert "It contains no delete and no TRIM" in capsys.readouterr().out


def test_a_drive_that_nothing_was_erased_on_lasts_for_ever(
    ssd: str, stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--drive", ssd, "--recording", stream, "--warm-up", "none", "--json")
    assert printed(capsys)["results"][0]["lifetime"]["even_bytes"] is None

    run("--drive", ssd, "--recording", stream, "--warm-up", "none")
    assert "never: nothing was erased" in capsys.readouterr().out


def test_repeating_multiplies_what_is_written(
    ssd: str, stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--drive", ssd, "--recording", stream, "--repeats", "30", "--per-day", "1 TB", "--warm-up", "random")

    out = capsys.readouterr().out
    assert "1.2 GB (292,980 pages)" in out
    assert "years" in out
    assert "No block was erased more than" not in out


def test_pictures_are_drawn(ssd: str, stream: str, tmp_path: Path) -> None:
    run("--drive", ssd, "--recording", stream, "--plot", str(tmp_path / "blocks.svg"))
    run(
        "--drive", ssd, "--models", "digits-cnn", "--parameters", "1000", "--plot",
        str(tmp_path / "methods.svg"),
    )  # fmt: skip

    assert (tmp_path / "blocks.svg").stat().st_size > 1_000
    assert (tmp_path / "methods.svg").stat().st_size > 1_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drive", "{tmp}/none.toml"], "there is no such file; the built-in one is paper"),
        (["--drive", "{tmp}/bad.toml"], "bad.toml: chanels is not a field"),
        (["--models", "resnet"], "--models: 'resnet' is not recorded; the models are digits-cnn, text-gpt"),
        (["--encodings", "zip"], "--encodings: 'zip' is no encoding; the known ones are complete"),
        (["--snap-dis", "3,x"], "--snap-dis is 'x'; it must be an integer"),
        (["--snap-dis", "0"], "--snap-dis is '0'"),
        (["--parameters", "nan"], "--parameters is 'nan'"),
        (["--parameters", "1.5"], "--parameters is '1.5'"),
        (["--parameters", "1e15"], "'snapshot 1' needs .* pages, and .* are free"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--warm-up", "hot"], "warm-up is 'hot'; it must be one of sequential"),
        (["--recording", "{tmp}/bad.csv"], r"bad.csv, line 2: 'copy' is no operation"),
        (["--recording", "{stream}", "--models", "x"], "--recording and --models do not go together"),
        (["--recording", "{stream}", "--per-day", "5"], "--per-day: '5' has no unit"),
        (["--recording", "{stream}", "--every", "0 s"], "--every is '0 s'; it must be finite and above zero"),
        (
            ["--recording", "{tmp}/pages.csv", "--every", "1 s"],
            "writes no files, so it has no rate of its own",
        ),
        (["--sizes", "{tmp}/bad.csv"], "bad.csv, line 1: it is not JSON"),
        (["--recording", "{stream}", "--plot", "{tmp}/picture.xyz"], "ends in '.xyz', which is no picture"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], message: str, ssd: str, stream: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_text("# a comment\ncopy,a\n")
    (tmp_path / "pages.csv").write_text("write_pages,0\n")
    (tmp_path / "bad.toml").write_text("chanels = 8\n")
    if "--drive" not in arguments:
        arguments = [*arguments, "--drive", ssd]

    with pytest.raises(PenstockError, match=message):
        run(*(text.replace("{tmp}", str(tmp_path)).replace("{stream}", stream) for text in arguments))


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("# nothing\n")

    with pytest.raises(PenstockError, match=r"empty\.csv has no operation"):
        run("--recording", str(tmp_path / "empty.csv"))
