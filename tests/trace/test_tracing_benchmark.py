"""The benchmark of tracing goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tracing.py"


def test_the_benchmark_checks_its_answers_and_prints_a_cost_per_span(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("us/span") for line in lines) == 4
    assert sum(line.endswith("us/sample") for line in lines) == 4
