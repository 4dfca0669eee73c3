"""`penstock snapshots predict` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.typed import run_command

from penstock.checkpoint import SnapshotStore
from penstock.cli import snapshot_predict
from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.simulate.saving import FastTier, SavePlan, predict_saves

GB = 10**9
Captured = pytest.CaptureFixture[str]


def machine() -> Machine:
    """Return a machine with a local disk and with memory, which would not outlive the host."""
    return Machine(
        SharedStore(Curve.flat(1 * GB), write=Curve.flat(0.5 * GB)),
        (
            StorageClass("staging", 64 * GB, 1, Curve.flat(8 * GB)),
            StorageClass("ram", 64 * GB, 1, Curve.flat(8 * GB)),
            StorageClass(
                "nvme", 200 * GB, 1, Curve.flat(3 * GB), Curve.flat(2 * GB), 0.0, "filesystem", "/n"
            ),
        ),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(machine().to_toml())
    return path


#: One save of 60 GB every 250 s: 120 s of the shared store's time, 30 s of the disk's.
TRAINING = ("--state", "60 GB", "--every", "1000", "--steps", "10000", "--step-seconds", "250ms")


def predict(*words: object) -> None:
    run_command(snapshot_predict, "predict", *words)


def results(capsys: Captured, *words: object) -> tuple[list[dict[str, Any]], str]:
    predict(*words, "--json")
    data = json.loads(capsys.readouterr().out)
    return data["results"], data["advice"]


def test_each_local_disk_and_each_cap_is_an_alternative_to_saving_directly(
    file: Path, capsys: Captured
) -> None:
    words = (file, *TRAINING, "--baseline-share", "83%", "--delta-share", "0.55", "--read", "800 MB/s")
    found, _ = results(capsys, *words, "--encode", "200 MB/s", "--drain-cap", "none,100 MB/s")

    plan = SavePlan(
        range(1_000, 10_001, 1_000),
        10_000,
        0.25,
        60 * GB,
        baseline_share=0.83,
        delta_share=0.55,
        encode_bytes_per_second=0.2 * GB,
        read_bytes_per_second=0.8 * GB,
    )
    assert [(each["fast"], each["drain_bytes_per_second"]) for each in found] == [
        (None, None),
        ("nvme", None),
        ("nvme", 1e8),
    ]
    alternatives = (None, FastTier("nvme"), FastTier("nvme", drain_bytes_per_second=1e8))
    for each, fast in zip(found, alternatives, strict=True):
        expected = predict_saves(machine(), plan, fast)
        assert each["blocked_seconds"] == expected.blocked_seconds
        assert each["slowed_seconds"] == expected.slowed_seconds
        assert each["run_seconds"] == expected.run_seconds
        assert each["durable_seconds"] == max(save.durable_seconds for save in expected.saves)
        assert [save["step"] for save in each["saves"]] == list(plan.steps)

    predict(*words, "--drain-cap", "none,100 MB/s")
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("  n", "  nvme"))
    ]
    assert [row[0] for row in rows] == ["none", "nvme", "nvme"]


def test_the_advice_is_what_is_durable_first_of_what_costs_the_training_least(
    file: Path, capsys: Captured
) -> None:
    """Both block for the copy alone, 75 s of 2,575."""
    found, advice = results(capsys, file, *TRAINING)

    assert [each["durable_seconds"] for each in found] == [pytest.approx(127.5), pytest.approx(37.5)]
    assert advice == (
        "Save to nvme first: the training loses 2.9 % of its time to saves, and each snapshot is durable within 37.5 s."
    )


def test_a_fast_tier_that_is_too_small_is_named_with_the_space_that_would_do(
    file: Path, capsys: Captured
) -> None:
    """A drain at 150 MB/s takes 400 s, saves come every 257 s."""
    words = (file, *TRAINING, "--fast-space", "70 GB", "--drain-cap", "150 MB/s")
    found, advice = results(capsys, *words)

    sufficient = found[1]["sufficient_bytes"]
    assert sufficient > 70 * GB
    assert not found[1]["is_fast_sufficient"]
    enough, _ = results(capsys, *words[:-4], "--fast-space", f"{sufficient} B", *words[-2:])
    assert enough[1]["is_fast_sufficient"]
    less, _ = results(capsys, *words[:-4], "--fast-space", f"{sufficient - 1} B", *words[-2:])
    assert not less[1]["is_fast_sufficient"]
    assert "find no space on nvme" in advice or advice.startswith("Save to the shared store directly")


def test_a_store_says_how_large_a_state_is_how_often_it_is_saved_and_what_is_stored(
    file: Path, tmp_path: Path, capsys: Captured
) -> None:
    weights = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    with SnapshotStore(tmp_path / "runs", codec="balance", threads=1, report=None) as store:
        for step in (400, 800, 1200):
            weights[::9] *= np.float32(1.001)
            store.save(step, {"weights": weights}).wait()
        baseline, *deltas = [one.stored_bytes for one in store.list()]

    found, _ = results(capsys, file, "--from", tmp_path / "runs", "--step-seconds", "1s", "--steps", "2000")

    plan = SavePlan(
        range(400, 2001, 400),
        2000,
        1.0,
        200_000,
        baseline_share=baseline / 200_000,
        delta_share=sum(deltas) / 400_000,
    )
    expected = predict_saves(machine(), plan)
    assert [save["step"] for save in found[0]["saves"]] == [400, 800, 1200, 1600, 2000]
    # The mean of shares may be the next float, and a size of bytes the next integer then.
    assert [save["durable_seconds"] for save in found[0]["saves"]] == pytest.approx(
        [save.durable_seconds for save in expected.saves], rel=1e-3
    )
    assert expected.saves[1].durable_seconds < expected.saves[0].durable_seconds, "deltas are smaller"
    # What is typed counts more than what the store says.
    typed, _ = results(
        capsys, file, "--from", tmp_path / "runs", "--step-seconds", "1s", "--every", "500", "--state", "1 GB"
    )
    assert [save["step"] for save in typed[0]["saves"]] == list(range(500, 5001, 500))
    assert typed[0]["saves"][0]["durable_seconds"] > 1


def test_what_is_taken_for_granted_is_said(tmp_path: Path, capsys: Captured) -> None:
    """Calibrating measures no writes."""
    path = tmp_path / "machine.toml"
    disk = StorageClass("nvme", GB, 1, Curve.flat(GB), None, 0.0, "filesystem", "/n")
    measured = Machine(SharedStore(Curve.flat(GB)), (StorageClass("staging", GB, 1, Curve.flat(GB)), disk))
    path.write_text(measured.to_toml())

    predict(path, "--state", "100 MB", "--every", "10", "--step-seconds", "1s")

    printed = capsys.readouterr().out
    predict(path, "--state", "100 MB", "--every", "10", "--step-seconds", "1s", "--json")
    notes = json.loads(capsys.readouterr().out)["notes"]
    for said in ("source.write is not given", "write of nvme is not given", "stored as they are"):
        assert said in printed
        assert any(said in note for note in notes)


def test_a_scenario_has_a_machine_too(capsys: Captured) -> None:
    found, _ = results(
        capsys, "scenario1", "--ranks", "2", "--state", "1 GB", "--every", "9", "--step-seconds", "1s"
    )
    assert [each["fast"] for each in found] == [None, "ssd"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--every", "5"), "^--state is missing"),
        (("--state", "1 GB"), "^--every is missing"),
        (("--state", "1 GB", "--every", "5", "--steps", "4"), "^--steps is 4"),
        (("--state", "1 GB", "--every", "5", "--drain-cap", "fast"), "^--drain-cap: 'fast'"),
        (("--state", "1 GB", "--every", "5", "--fast", "tape"), "^fast is 'tape'"),
        (("--state", "1 GB", "--every", "5", "--fast", "ram"), "^--fast names ram, which is memory"),
        (
            ("--state", "1 GB", "--every", "5", "--read", "2 GB/s"),
            "^read_bytes_per_second is 2 GB/s, and the shared store gives each of 1 rank 1 GB/s, also without",
        ),
        (("--from", "nowhere"), "^nowhere is no folder"),
    ],
)
def test_what_is_missing_or_cannot_be_is_named(file: Path, words: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        predict(file, "--step-seconds", "1s", *words)


def test_a_store_without_snapshots_says_nothing(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="says nothing of what another would take"):
        predict(file, "--step-seconds", "1s", "--from", tmp_path / "runs")
