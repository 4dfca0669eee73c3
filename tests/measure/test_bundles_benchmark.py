"""The benchmark of bundles goes on running."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bundles.py"


@pytest.mark.slow
def test_the_benchmark_trains_compares_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick", "--out", str(tmp_path / "study.json")])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("16 trainings of 3 epochs")
    assert sum("less full shuffle" in line for line in lines) == 8
    assert "Table 1" in lines[-1]
    assert len(json.loads((tmp_path / "study.json").read_text())["runs"]) == 16


def test_unequal_files_lose_hits_of_bundles_and_none_of_a_full_shuffle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(BENCHMARK))["main"](["--quick", "--file-sizes"])

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    original, proposed = (
        [float(row[row.index(name) + 1]) for row in rows] for name in ("original", "proposed")
    )
    assert all(abs(hits - 12.27) < 0.3 for hits in original)
    assert proposed[0] > 39.9
    assert proposed == sorted(proposed, reverse=True)
