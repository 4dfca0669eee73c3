"""The Trainer of Hugging Face saves snapshots, and goes on from them exactly."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.patience import patient
from torch import nn

from penstock.checkpoint import StopOnSignal
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError
from penstock.torch import Loader

if TYPE_CHECKING:
    from tests.torch.on_trainer import (
        Reading,
        Signalling,
        SnapshotCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

STEPS_PER_EPOCH = 4


@pytest.fixture(scope="module", autouse=True)
def _trainer() -> None:
    """Import it, which takes seconds, in the process that runs these tests alone: all of a run collect them."""
    parts = importlib.import_module("tests.torch.on_trainer")
    globals().update({name: getattr(parts, name) for name in parts.__all__})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(values).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.rows = torch.randn(8 * STEPS_PER_EPOCH, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": self.rows[index]}


Open = Callable[[str], SnapshotStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a store with a schedule."""
    with ExitStack() as stack:
        yield lambda schedule: stack.enter_context(
            SnapshotStore(tmp_path / "store", schedule=schedule, report=None, threads=1)
        )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that makes a trainer of 12 steps, from weights that follow from the seed."""

    def build(seed: int = 7, **options: Any) -> Trainer:
        set_seed(seed)
        arguments = {
            "per_device_train_batch_size": 8,
            "max_steps": 12,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_steps": 2,
            **options,
        }
        return Trainer(Net(), TrainingArguments(str(tmp_path / "out"), **arguments), train_dataset=Rows())

    return build


@pytest.mark.parametrize(
    "step", [pytest.param(8, marks=pytest.mark.slow), 6], ids=["between epochs", "within an epoch"]
)
def test_twice_n_steps_are_n_steps_and_a_restore_and_n_steps(
    make: Callable[..., Trainer], open_store: Open, step: int, tmp_path: Path
) -> None:
    """With shuffling, dropout, running statistics, AdamW and a schedule; the second life begins from other weights."""
    store = open_store(f"{step} steps")
    straight = make()
    callback = SnapshotCallback(straight, store)
    straight.add_callback(callback)
    callback.train()

    again = make()
    with torch.no_grad():
        again.model.layers[0].weight.fill_(3)  # type: ignore[union-attr, index]
    callback = SnapshotCallback(again, store)
    again.add_callback(callback)
    callback.train(step)

    assert again.state.global_step == straight.state.global_step == 12
    expected = straight.model.state_dict()  # type: ignore[union-attr]
    for name, tensor in again.model.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, expected[name]), name
    assert again.optimizer.state_dict()["state"][0]["step"] == 12  # type: ignore[union-attr]
    assert [entry.get("loss") for entry in again.state.log_history[: step // 2 - 1]] == [
        entry.get("loss") for entry in straight.state.log_history[: step // 2 - 1]
    ]


@pytest.mark.parametrize(
    ("accumulated", "is_skipped", "step"),
    [
        pytest.param(2, False, 3, id="with its state within an epoch"),
        pytest.param(1, True, 3, id="skipping within an epoch", marks=pytest.mark.slow),
        pytest.param(1, False, 4, id="with its state between epochs", marks=pytest.mark.slow),
        pytest.param(2, True, 4, id="skipping between epochs", marks=pytest.mark.slow),
    ],
)
def test_a_loader_of_penstock_goes_on_with_the_next_batch(
    open_store: Open, tmp_path: Path, accumulated: int, is_skipped: bool, step: int
) -> None:
    """By the Trainer's own skipping of batches, reading none; or by the loader's state, where it does not skip."""
    store = open_store(f"{step} steps")
    rows = Rows()

    def train(from_step: int | None) -> Reading:
        set_seed(7)
        options: dict[str, Any] = {
            "max_steps": 9,
            "gradient_accumulation_steps": accumulated,
            "save_strategy": "no",
        }
        options |= {
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "ignore_data_skip": not is_skipped,
        }
        arguments = TrainingArguments(str(tmp_path), **options)
        with Loader(rows, batch_size=4, seed=1, epochs=6, report=None) as loader:
            if from_step is not None and not is_skipped:
                loader.load_state_dict(loader.state_at(*divmod(from_step * accumulated, len(loader))))
            trainer = Reading(loader, Net(), arguments, train_dataset=rows)
            callback = SnapshotCallback(trainer, store)
            trainer.add_callback(callback)
            callback.train(from_step)
        return trainer

    straight, again = train(None), train(step)

    assert again.seen == straight.seen[step * accumulated :]
    assert len(straight.seen) == 9 * accumulated
    expected = straight.model.state_dict()  # type: ignore[union-attr]
    for name, tensor in again.model.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, expected[name]), name


def test_where_nothing_was_saved_training_begins_at_the_beginning(
    make: Callable[..., Trainer], open_store: Open
) -> None:
    store = open_store("1 steps")
    trainer = make(max_steps=2)
    callback = SnapshotCallback(trainer, store)
    trainer.add_callback(callback)

    callback.train()

    assert [listed.step for listed in store.list()] == [1, 2]


def test_a_snapshot_can_be_taken_whenever_the_trainer_saves(
    make: Callable[..., Trainer], open_store: Open
) -> None:
    store = open_store("1 steps")
    trainer = make(max_steps=4, save_strategy="steps", save_steps=2)
    trainer.add_callback(SnapshotCallback(trainer, store, beside_checkpoints=True))

    trainer.train()

    assert [listed.step for listed in store.list()] == [2, 4]


@pytest.mark.slow
def test_a_training_that_goes_back_replaces_what_was_saved_after(
    make: Callable[..., Trainer], open_store: Open
) -> None:
    store = open_store("1 steps")
    for step in (None, 2):
        trainer = make(max_steps=4)
        callback = SnapshotCallback(trainer, store)
        trainer.add_callback(callback)
        callback.train(step)

    assert [listed.step for listed in store.list()] == [1, 2, 3, 4]


def test_the_folder_of_a_resumed_training_is_gone_after_its_first_step(
    make: Callable[..., Trainer], open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    store = open_store("1 steps")
    trainer = make(max_steps=2)
    callback = SnapshotCallback(trainer, store)
    trainer.add_callback(callback)
    callback.train()
    seen: list[list[str]] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.append(files(tmp_path / "temporary"))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(files(tmp_path / "temporary"))

    trainer = make(max_steps=3)
    callback = SnapshotCallback(trainer, store)
    trainer.add_callback(callback)
    trainer.add_callback(Look())
    callback.train()

    assert seen[0] == [
        "optimizer.pt",
        "pytorch_model.bin",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
    ]
    assert seen[1] == []
    assert list((tmp_path / "temporary").iterdir()) == []


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_trainer_that_shards_its_state_is_refused(make: Callable[..., Trainer], open_store: Open) -> None:
    trainer = make()
    trainer.is_fsdp_enabled = True

    with pytest.raises(ConfigError, match="FSDP"):
        SnapshotCallback(trainer, open_store("1 steps"))


def test_a_signal_has_the_step_saved_and_ends_the_training(
    make: Callable[..., Trainer], open_store: Open
) -> None:
    store = open_store("100 steps")

    def train(at: int) -> tuple[int, int]:
        """Return after how many steps the training ended, and with which status."""
        trainer = make(gradient_accumulation_steps=2)
        with StopOnSignal(grace_seconds=60, report=lambda line: None) as stop:
            snapshots = SnapshotCallback(trainer, store, stop=stop)
            trainer.add_callback(snapshots)
            trainer.add_callback(Signalling(at))
            snapshots.train()
        return trainer.state.global_step, stop.exit_code

    assert train(at=4) == (5, 143)
    assert [listed.step for listed in store.list()] == [5]
    assert train(at=5) == (6, 143)


def test_what_is_no_store_or_no_trainer_is_refused(make: Callable[..., Trainer], open_store: Open) -> None:
    with pytest.raises(ConfigError, match=r"^store is 'runs/a'; it is a SnapshotStore"):
        SnapshotCallback(make(), "runs/a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^trainer is 3"):
        SnapshotCallback(3, open_store("2 steps"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^stop is True; it is a StopOnSignal"):
        SnapshotCallback(make(), open_store("2 steps"), stop=True)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_that_are_killed_go_on_as_if_they_had_not_been(tmp_path: Path) -> None:
    """Under torchrun, with a store opened after the Trainer and without ranks=; DDP with running statistics."""
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("trainer_torchrun.py")
    killed, again = (
        subprocess.run(
            [*job, script, tmp_path, life], capture_output=True, text=True, timeout=patient(60), check=False
        )
        for life in ("killed", "again")
    )

    assert killed.returncode, "it was killed"
    assert again.returncode == 0, again.stderr
    for rank in range(2):
        resumed, straight = json.loads((tmp_path / f"report-{rank}.json").read_text())
        assert resumed["steps"] == [4, 5, 6, 7, 8]
        assert straight["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert resumed["model"] == straight["model"]
        assert not resumed["is alone"]
