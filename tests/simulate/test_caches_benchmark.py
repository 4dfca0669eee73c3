"""The benchmark of caches goes on running, and finds libCacheSim's answers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "caches.py"


def test_the_benchmark_checks_its_answers_and_prints_a_rate_per_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("lru ") for line in lines) == 4
    assert sum("has none" in line for line in lines) == 6
