"""What is installed from a wheel, without the repository at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.machines import SLOW_STORE

REPOSITORY = Path(__file__).parent.parent

MACHINE = "decode_threads = 1" + SLOW_STORE

PREDICT = """
import sys
import penstock
from penstock.loader.transforms import CenterCrop, ToTensor

config = penstock.LoaderConfig(sys.argv[1], batch_size=4, epochs=2, transforms=[CenterCrop(16), ToTensor()])
print(len(penstock.predict(config, sys.argv[2], step_seconds=0.01).epochs()), penstock.__file__)
"""


@pytest.mark.system
def test_an_installed_wheel_has_all_files_and_works_outside_the_checkout(
    tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

    def run(*command: str | Path) -> str:
        """Run a command where the repository is not, with the installed package before the editable one."""
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, REPOSITORY)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    run(*pip, "install", "--no-deps", "--target", installed, wheel)
    command = installed / "bin" / "penstock"
    (elsewhere / "machine.toml").write_text(MACHINE)

    tracked = subprocess.run(
        ["git", "-C", REPOSITORY, "ls-files", "src"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.removeprefix("src/") for name in tracked} <= set(zipfile.ZipFile(wheel).namelist())
    assert "calibrate" in run(command, "--help")
    assert "frequency" in run(
        command, "simulate", "loading", "scenario1", "--samples", "500", "--epochs", "2"
    )
    assert "free blocks" in run(command, "paper", "deltas-table-8")
    epochs, file = run(sys.executable, "-c", PREDICT, image_folder(), "machine.toml").split()
    assert (epochs, Path(file).parent) == ("2", installed / "penstock")
