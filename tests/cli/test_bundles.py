"""`penstock simulate bundles`: what it prints, as tables and as JSON, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.cli.typed import run_command
from tests.for_each import for_each

from penstock.cli import bundles
from penstock.errors import ConfigError
from penstock.simulate.bundle_choice import Setting, recommend

pytestmark = pytest.mark.usefixtures("fonts")

run = partial(run_command, bundles, "bundles")


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    def of(*arguments: str) -> Any:
        run(*arguments, "--json")
        return json.loads(capsys.readouterr().out)

    return of


def test_the_recommendation_is_that_of_the_library(as_json: Any) -> None:
    data = as_json("--samples", "10000", "--memory", "30%", "--epochs", "10", "--tolerate", "0.1")

    found = recommend(Setting(10_000, 3_000, 10), tolerate=0.1)
    assert data["recommended"]["bundle_ratio"] == found.chosen.bundle_ratio
    assert data["recommended"]["hit_share"] == found.chosen.hit_share
    assert data["recommended"]["counted_hit_share"] == pytest.approx(found.chosen.hit_share, abs=0.003)
    assert data["bound_hit_share"] == pytest.approx(0.27)
    assert [each["bundle_samples"] for each in data["results"]] == [each.bundle for each in found.beside]
    assert data["ids"] == {"noise_growth": None, "scatter": None}


def test_the_table_says_what_to_take_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    run("--samples", "10000", "--memory", "3,000", "--epochs", "10")

    said = capsys.readouterr().out
    assert "take this" in said
    assert "no order hits more than 27.00%" in said
    assert "the largest bundle within 1% of the best hit ratio" in said
    assert "Scattered(BundleShuffle(...))" in said


def test_ids_sorted_by_class_are_to_be_scattered(as_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--samples", "10000", "--memory", "30%", "--classes", "100")

    data = as_json(*arguments)

    assert data["ids"]["scatter"] is True
    assert data["ids"]["noise_growth"] > 3
    run(*arguments)
    assert "Do not use these bundles on the ids as they are" in capsys.readouterr().out


def test_one_class_needs_no_scattering(as_json: Any) -> None:
    data = as_json("--samples", "10000", "--memory", "30%", "--classes", "1")

    assert data["ids"]["scatter"] is False


def test_hits_become_seconds_of_the_store(as_json: Any) -> None:
    data = as_json(
        *("--samples", "10000", "--memory", "300 MB", "--sample-size", "100 kB", "--epochs", "10"),
        *("--store-rate", "50 MB/s"),
    )

    assert data["setting"]["cache"] == 3000
    for each in (data["recommended"], *data["results"]):
        reads = (1 - each["hit_share"]) * 10_000 * 10
        assert each["store_read_seconds"] == pytest.approx(reads * 1e5 / 50e6)


def test_a_folder_tells_its_samples_sizes_and_classes(as_json: Any, tmp_path: Path) -> None:
    for number in range(60):
        place = tmp_path / "abc"[number // 20] / f"{number:02d}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(place)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.png")) / 60

    data = as_json("--data", str(tmp_path), "--memory", f"{int(30 * size) + 1} B", "--batch-size", "4")

    assert data["setting"]["samples"] == 60
    assert data["setting"]["cache"] == 30
    assert data["ids"]["scatter"] is True


def test_a_run_too_long_to_count_is_computed(as_json: Any) -> None:
    data = as_json("--samples", "100000000", "--memory", "30%", "--batch-size", "256")

    assert data["recommended"]["counted_hit_share"] is None
    assert data["recommended"]["hit_share"] > 0.27


@for_each(
    ("arguments", "message"),
    [
        (["--memory", "30%"], "--samples or by --data"),
        (["--samples", "100", "--data", "x", "--memory", "30%"], "--samples or by --data"),
        (["--samples", "100"], "--memory is not given"),
        (["--samples", "0", "--memory", "30%"], "samples is 0"),
        (["--samples", "100", "--memory", "130%"], "--memory is '130%'"),
        (["--samples", "100", "--memory", "much"], "much"),
        (["--samples", "100", "--memory", "8 GB"], "--sample-size"),
        (["--samples", "100", "--memory", "8 GB", "--sample-size", "0 B"], "at least a byte"),
        (["--samples", "100", "--memory", "30%", "--store-rate", "1 MB/s"], "--sample-size"),
        (["--samples", "100", "--memory", "30%", "--classes", "101"], "--classes is 101"),
        (["--samples", "100", "--memory", "30%", "--tolerate", "nan"], "--tolerate: 'nan' is no share"),
        (["--samples", "100", "--memory", "30%", "--tolerate", "1", "--reach", "0.1"], "both given"),
        (["--samples", "100", "--memory", "30%", "--epochs", "0"], "epochs is 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_cache_of_a_share_is_written_with_or_without_a_percent_sign(as_json: Any) -> None:
    bare, percent = (as_json("--samples", "1000", "--memory", text) for text in ("0.3", "30%"))

    assert bare["setting"]["cache"] == 300
    assert bare == percent
