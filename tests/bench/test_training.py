"""`penstock bench train`: the same batches with and without prefetch, what I/O costs, what is refused."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.ranks.in_memory import run

from penstock.bench.models import TrainingStep, alexnet, resnet50
from penstock.bench.traffic import Flow, Traffic, disk_of, flow_of
from penstock.bench.training import (
    FixedStep,
    Setting,
    Step,
    TrainingResult,
    TrainingResults,
    measure_training,
)
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.measure.calibrate import PageCache
from penstock.measure.spread import Spread
from penstock.ranks import Ranks, alone
from penstock.recordings.devices import DeviceRecord
from penstock.store import FlatFolder

NOTHING = Flow("nothing", np.zeros(0), np.zeros(0))


@pytest.fixture
def good(photos: Path) -> Path:
    (photos / "07.jpg").unlink()
    return photos


class Noting:
    """A step that computes nothing, and keeps what it is given, by run."""

    def __init__(self) -> None:
        self.runs: list[list[bytes]] = []

    def begin(self) -> None:
        self.runs.append([])

    def __call__(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        self.runs[-1].append(images.tobytes())
        return float(images.sum())


def train(source: Path, step: Step, ranks: Ranks, batch_size: int = 4) -> TrainingResults:
    settings = [Setting(0, batch_size), Setting(2, batch_size)]
    return measure_training(FlatFolder(source), step, settings, steps=2, repeats=2, ranks=ranks)


def test_every_setting_gets_the_same_batches_and_has_the_same_losses(good: Path) -> None:
    step = Noting()

    found = train(good, step, alone())

    assert len(step.runs) == 4  # each setting, twice
    assert step.runs[0] == step.runs[1] == step.runs[2] == step.runs[3]
    assert len(set(step.runs[0])) == 2
    assert found.has_equal_losses
    assert found.cautions == ()
    without, ahead = found.results
    assert (without.setting.has_prefetch, ahead.setting.has_prefetch) == (False, True)
    assert without.last_loss == ahead.last_loss
    # The one thread that loads and trains waits for all that it loads, and for little else.
    loading = without.read_seconds + without.decode_seconds
    assert 0 < loading <= without.stall_seconds <= without.run_seconds.median


@pytest.mark.parametrize(("max_seconds", "steps"), [(math.inf, 5), (1e-6, 2)])
def test_a_run_has_as_many_steps_as_time_allows(good: Path, max_seconds: float, steps: int) -> None:
    settings = [Setting(0, 2), Setting(2, 2, prefetch=1)]

    found = measure_training(
        FlatFolder(good), Noting(), settings, steps=None, repeats=3, max_seconds=max_seconds, ranks=alone()
    )

    assert found.steps == steps
    assert [each.run_seconds.repeats for each in found.results] == 2 * [2 if steps == 5 else 1]


def test_a_model_that_computes_otherwise_each_time_is_found_out(good: Path) -> None:
    class Restless(Noting):
        def __call__(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
            return float(len(self.runs))

    found = train(good, Restless(), alone())

    assert not found.has_equal_losses
    assert any("losses differ" in line for line in found.cautions)


def test_ranks_share_the_batches(good: Path) -> None:
    steps = [Noting(), Noting()]

    def part(ranks: Ranks) -> TrainingResults:
        return train(good, steps[ranks.rank], ranks)

    first, second = run(2, part)

    assert first.ranks == second.ranks == 2
    assert [each.run_seconds for each in first.results] == [each.run_seconds for each in second.results]
    together = Noting()
    train(good, together, alone())
    images = [np.frombuffer(b"".join(each.runs[0]), np.float32).reshape(-1, 3, 224, 224) for each in steps]
    # Every second sample of the batches that one process has.
    shared = np.stack(images, axis=1).reshape(-1, 3, 224, 224)
    assert shared.tobytes() == b"".join(together.runs[0])


def test_the_excess_without_prefetch_is_what_io_costs() -> None:
    def result(threads: int, seconds: float, stall: float) -> TrainingResult:
        return TrainingResult(
            Setting(threads, 64), Spread(seconds, seconds, seconds, 2), stall, 1.0, 2.0, NOTHING, 0.5
        )

    results = (result(0, 30.0, 20.0), result(1, 25.0, 15.0), result(4, 12.0, 0.6))
    found = TrainingResults(results, 20, 1, PageCache.COLD, True, ())

    assert found.cost_of_io(64) == (results[0], results[2])
    assert "without prefetch the run takes 18 s longer (150 %)" in found.meaning
    assert "with prefetch and 4 threads 5.0 % of the run" in found.meaning
    assert found.cost_of_io(32) is None


def test_a_fixed_step_waits_for_what_its_own_sum_leaves_of_it() -> None:
    waited: list[float] = []
    step = FixedStep(10.0, waited.append)
    images, labels = np.ones((2, 3, 32, 32), np.float32), np.array([3, 4])

    assert step(images, labels) == 2 * 3 * 2 * 2 + 7
    assert 0 < waited[0] <= 10.0


@for_each(
    ("disk", "network", "asked", "place", "total"),
    [
        (1000, 50, 1000, "block devices", 1000),
        (100, 900, 1000, "network", 900),  # a network file system; the disk serves somebody else
        (100, 100, 1000, "this process", 1000),  # from a page cache, or by FUSE
        (0, 0, 0, "this process", 0),
    ],
)
def test_what_moved_the_bytes_is_what_moved_most_of_them(
    disk: int, network: int, asked: int, place: str, total: int
) -> None:
    columns = ("nanoseconds", "disk:vda:read_bytes", "net:received_bytes", "tree:asked_bytes")
    rows = np.array([[10**9, 5, 7, 9], [3 * 10**9, 5 + disk, 7 + network, 9 + asked]], np.int64)

    flow = flow_of(DeviceRecord(columns, rows, {}, None), "read")

    assert (flow.place, flow.total_bytes) == (place, total)
    assert flow.seconds.tolist() == [2.0]
    assert flow.rates.tolist() == [total / 2]


def test_the_disk_that_is_named_counts_whatever_else_moves() -> None:
    disks = ("disk:vda:written_bytes", "disk:vdb:written_bytes")
    columns = ("nanoseconds", *disks, "tree:written_bytes", "net:sent_bytes")
    rows = np.array([[0, 0, 0, 0, 0], [10**9, 70, 5, 1000, 0]], np.int64)
    record = DeviceRecord(columns, rows, {}, None)

    assert flow_of(record, "written", "vdb")[::2] == ("vdb", np.array([5.0]))
    assert flow_of(record, "written", "loop0").place == "this process"


def test_a_disk_is_found_below_partitions_and_volumes(tmp_path: Path) -> None:
    """As in /sys: a volume dm-0 on the partition vda2 of vda; dm-1 on two disks; a file system without a device."""
    block, numbers = tmp_path / "block", tmp_path / "dev" / "block"
    numbers.mkdir(parents=True)
    for name in ("vda/vda2/partition", "vdb", "dm-0/slaves", "dm-1/slaves"):
        (block / name).mkdir(parents=True)
    (block / "dm-0/slaves/vda2").symlink_to(block / "vda/vda2")
    for disk in ("vda", "vdb"):
        (block / "dm-1/slaves" / disk).symlink_to(block / disk)
    for number, name in (("254:0", "vda"), ("254:2", "vda/vda2"), ("253:0", "dm-0"), ("253:1", "dm-1")):
        (numbers / number).symlink_to(block / name)

    found = [
        disk_of(os.makedev(*number), tmp_path) for number in ((254, 0), (254, 2), (253, 0), (253, 1), (0, 9))
    ]

    assert found == ["vda", "vda", "vda", "", ""]


def test_traffic_sees_what_this_process_reads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))

    with Traffic(period_seconds=1e-3) as traffic:
        (tmp_path / "file").read_bytes()

    record = traffic.record
    assert record.grown("tree:asked_bytes") >= 1_000_000
    assert (np.diff(record.seconds) >= 0).all()


def test_models_have_as_many_weights_as_published() -> None:
    """61,100,840 and 25,557,032: torchvision's table of models."""
    with torch.device("meta"):
        assert sum(each.numel() for each in alexnet(1000).parameters()) == 61_100_840
        assert sum(each.numel() for each in resnet50(1000).parameters()) == 25_557_032


@pytest.mark.slow  # PyTorch's optimisers import its compiler
def test_a_model_that_is_begun_anew_has_the_same_losses() -> None:
    step = TrainingStep("transformer", 4)
    images = np.random.default_rng(0).random((2, 3, 224, 224), np.float32)
    labels = np.array([0, 3])

    def losses() -> list[float]:
        step.begin()
        return [step(images, labels) for _ in range(3)]

    first = losses()
    assert first[-1] < first[0]
    assert losses() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the source has 11 samples, fewer than two batches of 64"),
        (
            ["--batch-size", "4", "--prefetch", "-1"],
            "--prefetch is '-1'; it is 0, a number of batches, or auto",
        ),
        (["--batch-size", "4", "--steps", "1"], "--steps is 1; train for at least 2"),
        (["--batch-size", "4", "--repeats", "1"], "repeats is 1; the first is left out"),
        (["--model", "vgg"], "--model is 'vgg'; it is one of alexnet, resnet50, transformer"),
        (["--model", "alexnet", "--step-seconds", "1s"], "--model and --step-seconds do not go together"),
        (["--step-seconds", "0s"], "--step-seconds is '0s'; it must be finite and above zero"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    good: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", str(good), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_decoded_ends_the_training(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--batch-size", "6", "--step-seconds", "1ms", "--prefetch", "auto", "--threads", "1"]

    assert main(["bench", "train", str(photos), *arguments]) == 1
    assert "07.jpg" in capsys.readouterr().err

    for error in run(2, lambda ranks: train(photos, Noting(), ranks, 6)):
        assert isinstance(error, DataError), "every rank raises it, and its text names the rank"
        assert re.search(r"rank [01] of 2, a run: .*07\.jpg", str(error))


def test_a_batch_that_ranks_cannot_share_equally_is_refused(good: Path) -> None:
    for error in run(2, lambda ranks: train(good, Noting(), ranks, 3)):
        assert isinstance(error, ConfigError)


@pytest.mark.usefixtures("fonts")
def test_the_command_prints_json_and_draws(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "train", str(good), "--batch-size", "2,4", "--steps", "2", "--repeats", "2"]
    arguments += [
        "--threads", "1", "--prefetch", "0,1", "--step-seconds", "1ms", "--json", "--plot",
        str(good.parent / "t.svg"),
    ]  # fmt: skip

    assert main(arguments) == 0

    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    shown = [(each["prefetch"], each["threads"], each["batch_size"]) for each in found["results"]]
    assert shown == [("0", 1, 2), ("1", 1, 2), ("0", 1, 4), ("1", 1, 4)]
    assert found["equal_losses"] is True
    assert (good.parent / "t.svg").stat().st_size > 1000
