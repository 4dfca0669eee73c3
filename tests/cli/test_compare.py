"""`penstock compare` as a user types it: a run of a loader, recorded, and its prediction."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.compare import _notes, add_compare
from penstock.errors import FormatError, PenstockError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.slow_source import SlowSource
from penstock.store import ImageFolder

pytestmark = pytest.mark.usefixtures("fonts")

GB = 10**9


def compare(*words: object) -> None:
    parser = argparse.ArgumentParser()
    add_compare(parser.add_subparsers())
    options = parser.parse_args(["compare", *map(str, words)])
    options.run(options)


@pytest.fixture
def run(image_folder: Callable[..., Path], tmp_path: Path) -> Path:
    memory = Curve.flat(5e9)
    machine = Machine(
        SharedStore(None, Curve.flat(1e6), 2e-3, threads=4), (StorageClass("staging", GB, 2, memory),)
    )
    source = SlowSource(ImageFolder(image_folder(images=12)), 1e-3, 1e-3, 1e6)
    with (
        source,
        Loader(
            source,
            batch_size=4,
            epochs=2,
            transforms=(Resize(16), ToTensor()),
            memory="64 MiB",
            machine=machine,
            trace=tmp_path / "run.trace",
            report=None,
        ) as loader,
    ):
        for _ in range(2):
            for _batch in loader:
                pass
    return tmp_path / "run.trace"


def test_a_recorded_run_is_laid_over_its_prediction(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(run, "--plot", tmp_path / "both.png")

    out = capsys.readouterr().out
    for told in ("epoch 0", "epoch 1", "all epochs", "source read", "Stall: predicted", "of the run"):
        assert told in out
    assert (tmp_path / "both.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("predicted", "measured", "told"),
    [
        (0.0, 0.09, "; too little to judge, below 1 % of the run."),
        (
            3.0,
            0.09,
            "; off by +29.10 % of the run.",
        ),  # predicted waiting that was not there is wrong, and told
        (0.0, 3.0, "; off by -100.0 % of the stall, -30.00 % of the run."),
    ],
)
def test_only_waiting_that_was_neither_predicted_nor_measured_judges_nothing(
    predicted: float, measured: float, told: str
) -> None:
    comparison: Any = SimpleNamespace(stall_seconds=(predicted, measured), run_seconds=(10.0, 10.0))

    assert _notes(comparison)[0].endswith(told)


def test_the_comparison_is_json_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(run, "--json", "--step-seconds", "10ms")

    values = json.loads(capsys.readouterr().out)
    assert [epoch["steps"] for epoch in values["results"]] == [3, 3]
    assert values["results"][0]["own"]["predicted_seconds"] == pytest.approx(0.03)
    total = values["stall"]
    assert total["difference_of_run"] == pytest.approx(
        (total["predicted_seconds"] - total["measured_seconds"]) / values["run"]["measured_seconds"]
    )
    assert total["difference_of_stall"] == pytest.approx(
        total["predicted_seconds"] / total["measured_seconds"] - 1
    )
    assert set(values["stall_by_cause"]) >= {"source read", "decode"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--step-seconds", "0s"], "--step-seconds is '0s'"), (["--machine", "none.toml"], "none.toml")],
)
def test_options_that_cannot_be_are_refused_by_name(run: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(PenstockError, match=said):
        compare(run, *arguments)


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    (tmp_path / "no.trace").write_text("nothing")

    with pytest.raises(FormatError, match="is not a trace"):
        compare(tmp_path / "no.trace")
    with pytest.raises(FileNotFoundError, match=r"missing\.trace"):
        compare(tmp_path / "missing.trace")
