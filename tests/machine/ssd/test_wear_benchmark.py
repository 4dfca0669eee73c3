"""The benchmark of the drive goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "wear.py"


def test_the_benchmark_checks_its_answers_and_prints_two_rates(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("M pages/s") for line in lines) == 2
