"""`penstock explain` as a user types it: a recorded run, and records of which not everything is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from tests.measure.test_compare import slow_machine
from tests.measure.test_explain import FAULTS
from tests.spans import spans_of

from penstock.cli.main import main
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.ranks import alone
from penstock.trace import TraceWriter


@pytest.fixture
def run(image_folder: Callable[..., Path], tmp_path: Path) -> Path:
    folder = image_folder(images=48)
    path = tmp_path / "run.trace"
    with Loader(
        folder,
        batch_size=4,
        epochs=2,
        transforms=(Resize(16), ToTensor()),
        memory="64 MiB",
        trace=path,
        report=None,
    ) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
    return path


def test_a_run_is_explained_and_replayed_with_changes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(run), "--memory", "1GiB", "--readers", "8"]

    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert sum(each["seconds"] for each in found["results"]) == pytest.approx(found["stall_seconds"])
    assert [each["change"] for each in found["changes"]] == ["memory 1.07 GB", "8 readers", "all of these"]
    assert main(["explain", str(run), "--decoders", "4096"]) == 0
    assert "and a replay takes each thread that decodes for one" in capsys.readouterr().out
    assert all(each["stall_seconds"] >= 0 for each in found["changes"])
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("Lost ")
    assert main(["explain", str(run), "--memory", "1kB"]) == 1
    assert "what decodes pictures took" in capsys.readouterr().err


def test_a_record_of_several_ranks_is_replayed_rank_by_rank_and_a_cut_one_says_where_it_ends(
    image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "job", image_folder(images=24)
    out.mkdir()
    for rank in (0, 1):
        with Loader(
            folder,
            batch_size=8,
            epochs=1,
            transforms=(Resize(16), ToTensor()),
            memory="64 MiB",
            machine=slow_machine(),
            rank=rank,
            world_size=2,
            ranks=alone,
            trace=out / f"{rank}.trace",
            report=None,
        ) as loader:
            for _batch in loader:
                pass

    assert main(["explain", str(out), "--memory", "1GiB", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [each["change"] for each in found["changes"]] == ["memory 1.07 GB"]
    assert any(note.startswith("each of the 2 ranks was replayed by itself") for note in found["notes"])
    assert main(["report", str(out), "-o", "-"]) == 0
    page = capsys.readouterr().out
    assert "no prediction to compare with" not in page
    assert all(f"rank {rank}, epoch 0" in page for rank in (0, 1))
    assert "Each of the 2 ranks is predicted by itself" in page
    whole = (out / "1.trace").read_bytes()
    shutil.rmtree(out)
    (tmp_path / "cut.trace").write_bytes(whole[:-20])
    assert main(["explain", str(tmp_path / "cut.trace")]) == 0
    assert "after the start, with epoch 0, step 2" in capsys.readouterr().out


def test_names_from_a_record_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name with a line end, an escape sequence and a byte that is no UTF-8; nothing is known to replay it by."""
    path = tmp_path / "run.trace"
    with TraceWriter(path, {"rank": 0}) as writer:
        writer.append(spans_of(FAULTS["three of sixty reads take two seconds"][1]))
        writer.name({10: "photos/\n\x1b[2J\udcff.jpg"})

    assert main(["explain", str(path)]) == 0

    shown = capsys.readouterr().out
    assert "6 s of it to: a few slow reads" in shown
    assert r"photos/\n\x1b[2J\udcff.jpg" in shown
    assert "what a change would bring is not known" in shown
    assert main(["explain", str(path), "--memory", "1GiB"]) == 1
    assert "its header does not say what was run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["explain", "{}", "--readers", "0"],
            "penstock: --readers is '0'; it must be an integer of at least 1",
        ),
        (
            ["trace", "{}", "--export", "parquet", "--out", "/none/here.parquet"],
            "penstock: --out /none/here.parquet:",
        ),
    ],
)
def test_an_option_is_refused_before_the_trace_is_read(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(tmp_path / "none.trace") for word in words]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_a_run_becomes_a_page_and_its_tables_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run.with_name("report.html")

    assert main(["report", str(run), "-o", str(page), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    titles = [each["title"] for each in found["results"]]
    assert "Stall so far, predicted and measured" in titles
    assert found["verdict"] in unescape(page.read_text(encoding="utf-8"))
    assert [each.name for each in page.parent.iterdir() if "unfinished" in each.name] == []
    assert main(["report", str(run), "-o", str(run.parent / "missing" / "report.html")]) == 1
    page.unlink()
    assert main(["report", str(run), "-o", str(run.parent)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "-o", "-"]) == 0
    assert capsys.readouterr().out == page.read_text(encoding="utf-8")
    assert main(["report", str(run), "-o", "-", "--json"]) == 1
