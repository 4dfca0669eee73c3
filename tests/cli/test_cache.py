"""`penstock cache`: what is kept of data sets' listings, and on local disks, shown and removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.cache_folders import Folders
from penstock.cli.main import main
from penstock.store import Manifest, catalogs, open_source
from penstock.store.disk import DiskTier

_SIZES = np.array([1_000, 2_000])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the catalogs of tmp_path/photos (two labels) and tmp_path/flat."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(catalogs, "_folders", lambda: Folders((kept,), kept, ""))
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
    for name in ("photos/cat/a.jpg", "photos/cat/b.jpg", "photos/dog/c.jpg", "flat/d.jpg"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1000))
    for name in ("photos", "flat"):
        open_source(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return kept


def test_all_catalogs_are_listed(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = time.time() - 3 * 3600
    for file in kept.iterdir():
        os.utime(file, (used, used))

    assert main(["cache", "list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    (photos,) = (line for line in lines if str(kept.parent / "photos") in line)
    (flat,) = (line for line in lines if str(kept.parent / "flat") in line)
    assert photos.split()[1:6] == ["ImageFolder", "open_source", "3", "3", "3"]
    assert "FlatFolder" in flat
    assert "just now" in flat
    assert "3 hours ago" in flat


def test_a_catalog_is_json_too(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", "photos", "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)["results"]
    times = found.pop("listed_seconds"), found.pop("used_seconds")
    assert all(abs(time.time() - each) < 1000 for each in times)
    file = Path(found.pop("file"))
    assert found.pop("file_bytes") == file.stat().st_size
    catalog = open_source("photos").catalog
    assert catalog is not None
    assert found == {
        "what": "catalog",
        "source": str(kept.parent / "photos"),
        "opener": "open_source",
        "extensions": sorted(catalog.key.extensions or ()),
        "kind": "ImageFolder",
        "samples": 3,
        "data_bytes": 3000,
        "folders": 3,
        "labels": 2,
        "problem": None,
    }


def test_one_data_set_is_shown_with_its_labels(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", "photos"]) == 0

    out = capsys.readouterr().out
    assert "flat" not in out
    assert out.count("ImageFolder") == out.count("open_source") == 1
    assert [line.split() for line in out.splitlines() if line.split()[:1] in (["cat"], ["dog"])] == [
        ["cat", "2", "2", "kB"],
        ["dog", "1", "1", "kB"],
    ]


def test_one_or_all_are_cleared(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / "x.catalog").write_bytes(b"damaged")

    assert main(["cache", "clear", "photos"]) == 0
    assert capsys.readouterr().out == f"removed 1 catalog of {kept}\n"
    assert main(["cache", "list", "photos"]) == 0
    assert capsys.readouterr().out == "photos keeps no samples, and no catalog of it is kept\n"
    assert main(["cache", "list"]) == 0
    assert f"{kept}/x.catalog is cut off: 7 bytes are there" in capsys.readouterr().out
    assert main(["cache", "clear", "--all-catalogs"]) == 0
    assert capsys.readouterr().out == f"removed 2 catalogs of {kept}\n"
    assert not list(kept.iterdir())
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"no catalog is kept in {kept}\n"


def test_all_catalogs_are_removed_where_that_is_asked_alone(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["photos", "--all-catalogs"]):
        assert main(["cache", "clear", *words]) == 1
        assert "give one of PLACE, whose catalogs or samples are removed, and --all-catalogs" in (
            capsys.readouterr().err
        )
    assert len(list(kept.iterdir())) == 2


def test_catalogs_and_samples_of_one_place_are_shown_and_cleared(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DiskTier("photos", 3_000, bytes(16), _SIZES, about="texts").close()

    for command, out in (("list", "just now"), ("clear", "removed 1 catalog")):
        assert main(["cache", "list", "photos", "--json"]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        assert [each["what"] for each in results] == ["catalog", "samples"]
        assert main(["cache", command, "photos"]) == 0
        printed = capsys.readouterr().out
        assert out in printed
        assert ("texts" if command == "list" else "removed 1 tier") in printed
    assert main(["cache", "list", "photos", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"results": []}


def test_a_folder_in_the_place_of_a_catalog_is_named_and_left_alone(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept / "a.catalog" / "mine").mkdir(parents=True)

    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{kept}/a.catalog cannot be read: Is a directory" in out
    assert out.count("open_source") == 2
    assert main(["cache", "clear", "--all-catalogs"]) == 0
    assert capsys.readouterr().out == f"removed 2 catalogs of {kept}\n"
    assert [file.name for file in kept.iterdir()] == ["a.catalog"]


def test_labels_of_several_kinds_are_shown_with_type_and_classes(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("photos/all.jsonl").write_text('{"path": "cat/a.jpg", "age": 0.5, "tags": ["x", "y"]}\n')
    Manifest("photos/all.jsonl", labels=["age", "tags"])
    capsys.readouterr()

    assert main(["cache", "list", "photos/all.jsonl"]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["age", "float32", "0"] in lines
    assert ["tags", "uint8[2]", "2"] in lines


def test_what_a_folder_keeps_is_listed_and_what_nobody_uses_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = DiskTier(tmp_path, 3_000, bytes(16), _SIZES, about="photos")
    DiskTier(tmp_path, 3_000, bytes(range(16)), _SIZES, about="texts").close()

    assert main(["cache", "list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "photos" in out
    assert "texts" in out
    assert main(["cache", "list", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(each["what"], each["data"], each["is_used"]) for each in results} == {
        ("samples", "photos", True),
        ("samples", "texts", False),
    }

    assert main(["cache", "clear", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "removed 1 tier" in out
    assert "1 tier in use: end the loaders that use them first" in out
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".index", ".samples"]
    used.close()


def test_a_folder_that_is_none_is_named_and_one_without_samples_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "list", str(tmp_path)]) == 0
    assert f"{tmp_path} keeps no samples" in capsys.readouterr().out
    for command, done in (("list", "read"), ("clear", "cleared")):
        assert main(["cache", command, str(tmp_path / "gone")]) != 0
        error = capsys.readouterr().err
        assert "gone: no catalog of it is kept" in error
        assert f"it cannot be {done}: No such file or directory" in error


def test_the_command_that_listed_catalogs_names_the_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "photos", "--clear"]) == 1
    assert "with --clear `penstock cache clear`" in capsys.readouterr().err
