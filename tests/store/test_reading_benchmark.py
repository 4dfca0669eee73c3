"""The benchmark of reading goes on running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reading.py"


def test_the_benchmark_checks_its_answers_and_prints_each_cost_beside_its_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith(("read", "keep"))] == [
        "read_into",
        "read",
        "keep in a fresh memory tier",
        "read_group, threads: 1",
        "read, threads: 1",
        "read_group, threads: 2",
        "read, threads: 2",
    ]
    assert sum("bound: " in line for line in lines) in (2, 4)  # without or with a C compiler
