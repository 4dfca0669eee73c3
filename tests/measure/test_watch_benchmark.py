"""The benchmark of watching goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "watch.py"


def test_the_benchmark_of_watching_prints_the_cost_beside_the_bare_loop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert [line[:9].strip() for line in lines if line.endswith("us/step")] == [
        "bare loop",
        "handed on",
        "watched",
    ]
