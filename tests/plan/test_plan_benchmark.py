"""The benchmark of plans goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def test_the_benchmark_checks_its_answers_and_prints_a_rate_per_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum("M positions/s" in line for line in lines) == 24
    assert sum(" ms  (" in line for line in lines) == 4
