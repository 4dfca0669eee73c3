"""The benchmark of the request model goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "requests.py"


def test_the_benchmark_checks_its_answers_and_prints_speed_and_growth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum(" s wall " in line for line in lines) == 2
    assert sum(line.startswith(("physical", "thesis")) for line in lines) == 4
    assert sum(line.startswith(("naive", "staging", "frequency", "cover", "push")) for line in lines) == 30
