"""`penstock cache`: what local disks keep, shown and removed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.store.disk import DiskTier

SIZES = np.array([1_000, 2_000])


def test_what_a_folder_keeps_is_listed_and_what_nobody_uses_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = DiskTier(tmp_path, 3_000, bytes(16), SIZES, about="photos")
    DiskTier(tmp_path, 3_000, bytes(range(16)), SIZES, about="texts").close()

    assert main(["cache", "list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "photos" in out
    assert "texts" in out
    assert main(["cache", "list", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(each["data"], each["is_used"]) for each in results} == {("photos", True), ("texts", False)}

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
        assert f"gone cannot be {done}: No such file or directory" in capsys.readouterr().err
