"""`penstock snapshots study`: what it prints of a small sequence, as tables, as JSON, as a picture."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import SnapshotStore
from penstock.cli.main import main


def run(*words: object) -> None:
    assert main(["snapshots", "study", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four snapshots of 40,000 weights that move by some per cent, then less."""
    folder = tmp_path_factory.mktemp("snapshots")
    random = np.random.default_rng(0)
    weights = random.standard_normal(40_000).astype(np.float32) * 0.05
    for step in range(1, 5):
        np.save(folder / f"step-{step}000.npy", weights)
        weights = weights * (1 + random.standard_normal(weights.size, np.float32) * 0.01 / step)
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("picture") / "study.svg"


@pytest.fixture(scope="module")
def out(folder: Path, picture: Path, fonts: None) -> str:
    """Return what a study printed; it drew the picture, too."""
    with redirect_stdout(io.StringIO()) as printed:
        run(folder, "--storage", "300 kB", "--plot", picture)
    return printed.getvalue()


def test_tables_tell_what_each_method_writes_needs_and_costs(out: str) -> None:
    for title in ("Table 1", "Figure 8", "Figure 9", "Table 9", "5.7.3", "Table 10"):
        assert title in out
    # Names that a store takes, and no others.
    for method in (
        "stored, complete",
        "gzip-delta, progressive",
        "rle4-gzip, progressive",
        "dynrle, progressive",
        "dynrle, chain",
        "balance, progressive",
    ):
        assert method in out
    assert "dynrle-" not in out
    assert "penstock" not in out.lower()
    assert "Compared: floating point, 1 tensor, 40,000 parameters, 160 kB a snapshot, 4 snapshots." in out
    assert "step-4000" in out
    # Two baselines, of 132 kB each, and a delta do not fit with anybody's codec; a baseline and a delta do.
    assert "balance, progressive: 2, the largest of those that fit" in out


def test_json_has_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--json", "--storage", "20 kB")

    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["snapshots"] == [f"step-{step}000" for step in range(1, 5)]
    assert (data["tensors"], data["parameters"], data["bytes"]) == (1, 40_000, 160_000)
    assert [row["later"] for row in data["likeness"]] == data["snapshots"][1:]
    assert data["likeness"][0]["pages"] == 40
    first, last = (data["likeness"][place]["same_heading_bits"]["12"] for place in (0, -1))
    assert 0 < first < last < 1
    assert sum(data["exponents"]["float32"].values()) == 40_000
    written = {(row["encoding"], row["snap_dis"]): row for row in data["results"]}
    assert len(written) == 8 * 3
    for row in written.values():
        assert row["stored_share"] == row["stored_bytes"] / 640_000
        assert row["written_pages"] >= row["stored_bytes"] / 4096
    shares = {method: row["stored_share"] for (method, snap_dis), row in written.items() if snap_dis == 10}
    assert shares["penstock"] < shares["dynrle-progressive"] < shares["rle4"] < shares["complete"] == 1
    assert shares["dynrle-progressive"] < shares["dynrle-chain"]
    storage = [row for row in data["storage"] if row["encoding"] == "dynrle-chain"]
    own = [row["stored_bytes"] for row in storage]
    assert [row["useful_bytes"] for row in storage] == [own[0], *(own[0] + each for each in own[1:])]
    assert storage[0]["useful_pages"] == -(-own[0] // 4096)
    assert all(row["save_seconds"] > 0 and row["restore_processor_seconds"] > 0 for row in storage)
    assert {row["codec"] for row in data["processor"]} >= {"dynrle", "rle4", "gzip-delta"}
    advice = {row["encoding"]: row for row in data["advice"]}
    assert data["storage_bytes"] == 20_000
    assert [row["snap_dis"] for row in advice.values()] == [None, None, None]
    assert [(row["codec"], row["scheme"]) for row in advice.values()] == [
        ("dynrle", "progressive"),
        ("dynrle", "chain"),
        ("balance", "progressive"),
    ]
    for row in (*data["results"], *data["storage"], *data["advice"]):
        SnapshotStore(folder.parent / "store", codec=row["codec"], scheme=row["scheme"]).close()
    assert "storage_bytes is 20000, and the least" in advice["dynrle-chain"]["reason"]
    assert data["drive"]["times"] == 1


def test_a_picture_is_drawn(out: str, picture: Path) -> None:
    drawn = picture.read_text()
    assert f"The picture: {picture}" in out
    for text in (
        "Like the snapshot before",
        "12 bits",
        "Exponents of step-4000",
        "balance, progressive",
        "B, by codec and scheme",
        "Blocks erased",
    ):
        assert text in drawn
    assert "in GB" not in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--only", "optimizer/*"],
            "no tensors that fit optimizer/* are alike in all 4 snapshots; the first one has",
        ),
        (["--storage", "much"], "--storage: 'much'"),
        (["--plot", "study.txt"], "--plot study.txt ends in '.txt'"),
    ],
)
def test_what_cannot_be_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["snapshots", "study", str(folder), *words]) == 1

    assert message in capsys.readouterr().err
