"""`penstock simulate layout` as a user types it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.cli.typed import run_command

from penstock.cli import layout
from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.simulate.layout import compare_layouts

TEXT = """
[machine]
ranks = 4
[machine.source]
clients = { 1 = "50 MB/s", 4 = "200 MB/s" }
sequential = { 1 = "100 MB/s", 4 = "400 MB/s" }
random_read = "1 MB"
[[machine.storage]]
name = "staging"
capacity = "25 MB"
threads = 2
read = "9 GB/s"

[data]
samples = 2_000
distribution = "constant"
loc = "1 MB"

[training]
batch_size = 100
epochs = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "cats.toml").write_text(TEXT)
    return str(tmp_path / "cats.toml")


run = partial(run_command, layout, "layout")


def test_a_table_and_the_verdict_are_printed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(file, "--files", "--order", "bundle:0.05")

    out = capsys.readouterr().out
    assert "cats: 4 ranks, bundle:0.05" in out
    assert "packed once (collective)" in out
    assert "A request costs 10 ms in addition to its bytes, which come at 100 MB/s" in out
    assert (
        "Packing the samples once costs 15 s and 2 GB, and pays from 4 epochs on, too many for this run."
        in out
    )


def test_the_json_says_what_the_table_says(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(file, "--files", "--order", "bundle:0.05", "--epochs", "6", "--json")

    found = json.loads(capsys.readouterr().out)
    options = {option["name"]: option for option in found["results"]}
    assert (found["scenario"], found["order"], found["epochs"]) == ("cats", "bundle:0.05", 6)
    assert found["request_seconds"] == pytest.approx(0.01)
    assert found["hole_bytes"] == pytest.approx(1e6)
    assert options["samples"]["run_seconds"] == pytest.approx(6 * 10)
    assert options["packed"]["once_seconds"] == pytest.approx(15)
    assert options["packed"]["later_epoch"]["how"] == "collective"
    assert options["packed"]["later_epoch"]["seconds"] == pytest.approx(5.2)
    assert options["packed"]["break_even_epochs"] == 4
    assert found["best"] == "packed"


def test_the_store_can_be_described_on_the_command_line(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "scenario1", "--json", "--samples", "1000", "--sequential", "500 MB/s", "--random-read", "1 MB",
        "--latency", "2 ms", "--window", "1 MB",
    )  # fmt: skip

    found = json.loads(capsys.readouterr().out)
    # 4 clients share 1,000 requests and 500 MB a second; scattered, they got 146 MB a second in reads of 1 MB.
    assert found["sequential_bytes_per_second"] == pytest.approx(125e6)
    assert found["request_seconds"] == pytest.approx(4 * (1 / 146 - 1 / 500))
    assert found["window_samples"] == pytest.approx(1e6 / found["sample_bytes"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequential", "500 MB"], "--sequential: '500 MB': 'MB' is not one of"),
        (["--sequential", "-5 MB/s"], "--sequential: '-5 MB/s' cannot be"),
        (["--latency", "nan s"], "--latency: 'nan s'"),
        (["--window", "5"], "--window: '5' has no unit"),
        (["--window", "0 B"], "window_bytes is 0"),
        (["--order", "bundles"], "there is no order 'bundles'; known are full"),
        (["--plot", "layout.txt"], "ends in '.txt', which is no picture"),
    ],
)
def test_what_cannot_be_is_named_with_its_option(file: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(file, *arguments)

    assert message in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("--ranks", "0"), ("--epochs", "-1"), ("--batch-size", "x")])
def test_numbers_that_cannot_be_are_refused_with_the_usage(
    file: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(file, option, value)

    assert option in capsys.readouterr().err


@pytest.mark.usefixtures("fonts")
def test_a_picture_is_drawn(file: str, tmp_path: Path) -> None:
    run(file, "--files", "--plot", str(tmp_path / "layout.svg"))

    drawn = (tmp_path / "layout.svg").read_text()
    assert drawn.lstrip().startswith("<?xml")


def test_long_runs_say_how_much_of_them_was_counted() -> None:
    memory = StorageClass("staging", 10**6, 1, Curve.flat(1e9))
    plan = AccessPlan(FullShuffle(1_000), 100, epochs=9)
    machine = Machine(SharedStore(Curve.flat(1e6)), (memory,))

    part = compare_layouts(plan, machine, np.full(1_000, 10), counted_reads=1_000)

    assert layout._caveats(part) == ["Counted in the first 50 % of 2 of 9 epochs; they stand for the rest."]
    assert layout._caveats(compare_layouts(plan, machine, np.full(1_000, 10))) == []
