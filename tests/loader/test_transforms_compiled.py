"""Where compiled kernels are kept: in one folder, whoever asks, and never in a stranger's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.loader.transforms.compiled import _cache_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the system's temporary folder of a user whose own cannot be written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_folder_of_ones_own_there_is_one_below_the_temporary_one(temporary: Path) -> None:
    folder = _cache_folder()

    assert folder.parents[1] == temporary / f"penstock-{os.geteuid()}"
    assert _cache_folder() == folder


def test_a_process_that_put_its_rights_aside_has_the_folder_of_whom_it_acts_for(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders belong to the effective user; by the real one it would be a stranger's, and a new one made each time."""
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)

    assert _cache_folder() == _cache_folder()
    assert sorted(path.name for path in temporary.iterdir()) == ["file", f"penstock-{os.geteuid()}"]


def test_where_even_that_is_a_strangers_the_folder_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{os.geteuid() + 1}").mkdir()
    (tmp_path / "file").touch()
    script = f"""
import os
os.geteuid = lambda: {os.geteuid() + 1}
from penstock.loader.transforms.compiled import _cache_folder
folder = _cache_folder()
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(folder, folder.is_dir())
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PENSTOCK_CACHE": str(tmp_path / "file")}

    said = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    folder, was_there = said.stdout.split()
    assert Path(folder).parent == tmp_path
    assert was_there == "True"
    assert not Path(folder).exists()
