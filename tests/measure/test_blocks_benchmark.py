"""The benchmark of recording goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "blocks.py"


@pytest.mark.system
def test_the_benchmark_checks_what_was_recorded_and_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum(" x  (" in line for line in lines) == 3
