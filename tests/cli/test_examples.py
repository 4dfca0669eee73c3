"""The first example that each command's help shows runs as it stands, where what it names is there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.test_plan import _in_this_process  # noqa: F401 - a fixture
from tests.cli.test_words import COMMANDS
from tests.for_each import for_each
from tests.machines import SLOW_STORE

from penstock.checkpoint import SnapshotStore
from penstock.cli.main import main
from penstock.graph import Graph
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor

pytestmark = pytest.mark.usefixtures("fonts")

#: What runs for long, or until it is stopped; tests of their own run these with less to do.
LONG = (
    *("penstock bench checkpoint", "penstock bench input", "penstock bench train", "penstock calibrate"),
    *("penstock compile", "penstock decode-server", "penstock demo", "penstock graph worker", "penstock ps"),
    *("penstock watch",),
)
#: What takes from one second to ten.
SLOW = (
    *("penstock paper", "penstock plan", "penstock simulate caches", "penstock simulate layout"),
    *("penstock simulate loading", "penstock simulate wear", "penstock snapshots study"),
)
_EXPORT = "snapshots export snapshots model.safetensors --part model"
#: What has been typed before.
BEFORE = {
    "penstock snapshots check": [_EXPORT, "snapshots seal model.safetensors"],
    "penstock snapshots import": [_EXPORT, "snapshots delete snapshots --step 400"],
    "penstock snapshots seal": [_EXPORT],
}
MACHINE = 'preprocess = "1 GB/s"' + SLOW_STORE


@pytest.fixture
def made(tmp_path: Path, image_folder: Callable[..., Path]) -> Path:
    """Return a folder with all that the examples name."""
    folder = tmp_path / "made"
    shutil.copytree(image_folder(images=24), folder / "photos" / "train")
    (folder / "saves").mkdir()
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "scratch" / "penstock").mkdir(parents=True)
    photos, machine, run = folder / "photos" / "train", folder / "machine.toml", folder / "run.trace"
    settings: Any = {"transforms": (Resize(16), ToTensor()), "memory": "64 MiB", "machine": machine}
    with Loader(photos, batch_size=4, epochs=2, trace=run, report=None, **settings) as loader:
        for _ in range(2):
            list(loader)
    for place in ("snapshots", "runs/a"):
        fast = folder / "local" / "run" if place == "snapshots" else None
        with SnapshotStore(folder / place, fast=fast, scheme="complete", report=None) as store:
            for step in (400, 800):
                store.save(step, {"model": {"weight": np.full(1000, step, np.float32)}}).wait()
    graph = Graph()
    a = graph.constant(np.zeros(4, np.float32))
    (folder / "model.json").write_text((a + a).graph.to_json())
    return folder


@for_each("name", [name for name in COMMANDS if name not in (*LONG, *SLOW)])
def test_the_first_example_of_a_help_runs(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(name, made, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_first_example_of_a_help_that_takes_long_runs(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(name, made, tmp_path, monkeypatch, capsys)


def _run(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / name.replace(" ", "-"))
    monkeypatch.chdir(folder)
    found = re.search(rf"^.*?{name}\b(.*?)(?: && .*)?(?: +#.*)?$", COMMANDS[name].epilog or "", re.MULTILINE)
    assert found
    example = re.sub(r"(?<= )/(local|scratch)/", rf"{folder}/\1/", found[1])
    for words in (*BEFORE.get(name, ()), f"{name.removeprefix('penstock ')} {example}"):
        assert main(shlex.split(words)) == 0, f"{words}: {capsys.readouterr().err}"
