"""Calibration of a real file system that is slow: opens cost time, and the kernel caches what was read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.machine import Machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "loader"


def fuse_can_be_opened() -> bool:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not fuse_can_be_opened(), reason="/dev/fuse cannot be opened"),
]


@pytest.fixture
def benchmark_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what imports a benchmark of loaders, or the helper of one."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_mounted_slow_store_gets_a_machine_of_its_rate_and_of_enough_threads(
    benchmark_named: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 ms per open, 10 ms per read, 30 MB/s: about eight readers of 90 KB files are enough."""
    rng = np.random.default_rng(5)
    files, mountpoint, written = tmp_path / "files", tmp_path / "mount", tmp_path / "machine.toml"
    files.mkdir()
    mountpoint.mkdir()
    for number in range(400):
        (files / f"{number}.jpg").write_bytes(rng.bytes(int(rng.integers(60_000, 120_000))))

    with benchmark_named("_slow_mount").mounted(files, mountpoint, 0.010, 0.010, 30e6):
        status = main(["calibrate", str(mountpoint), "--seconds", "6", "--out", str(written)])

    source = Machine.from_toml(written.read_text()).source
    assert status == 0
    assert "(cold)" in capsys.readouterr().out
    assert source.threads >= 8
    assert source.read is not None
    assert 20e6 < source.read.at(source.threads) < 35e6
    assert 0.015 < source.latency_seconds < 0.060


def test_the_benchmark_of_a_mounted_store_goes_on_running(
    benchmark_named: Callable[[str], Any],
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    benchmark = benchmark_named("mounted")
    monkeypatch.setattr(benchmark, "MOST_LONGER", float("inf"))  # this host may be busy with other tests

    benchmark.main(["--images", str(image_folder(images=150)), "--rounds", "1"])

    lines = capsys.readouterr().out.splitlines()
    assert [line[:18].strip() for line in lines[-2:]] == ["without a machine", "with its machine"]
