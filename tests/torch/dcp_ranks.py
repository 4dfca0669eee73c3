"""What every rank of a job does with torch.distributed.checkpoint, for tests/torch/test_dcp.py, where it is judged.

Run as: dcp_ranks.py FOLDER DUTY torch ADDRESS RANK SIZE
"""

from __future__ import annotations

import functools
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock.checkpoint.tiers import local
from penstock.errors import DataError, PenstockError
from penstock.ranks import ranks_of_this_job
from penstock.torch.dcp import StoreReader, StoreWriter

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.patience import brief

FOLDER, DUTY, _, ADDRESS = Path(sys.argv[1]), *sys.argv[2:5]
RANK, SIZE = int(sys.argv[5]), int(sys.argv[6])
Report = dict[str, Any]


def outcome(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    except CheckpointException as error:
        return f"CheckpointException: {error}"
    return "nothing"


class Training:
    """A model whose parameters are spread over the ranks: some unevenly, some on fewer ranks than there are."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 1003), torch.nn.Linear(1003, 150, dtype=None), torch.nn.Linear(150, 3)
        )
        mesh = init_device_mesh("cpu", (SIZE,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 64) * (self.steps + 1)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        plain = {"running": torch.full((5,), float(self.steps)), "scale": torch.tensor(1.5)}
        return {"model": model, "optimizer": optimizer, "plain": plain, "step": self.steps}


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: whole(part) for key, part in value.items()} if isinstance(value, dict) else value


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def loaded_like(folder: Path, expected: Any, step: int) -> bool:
    """Load into another training, and return whether it is what was saved."""
    state = Training(99).state()
    training_state = {key: state[key] for key in ("model", "plain", "step")}
    load(training_state, checkpoint_id=str(step), storage_reader=StoreReader(folder))
    return is_same(whole(training_state), expected)


def go(report: Report) -> None:
    training = Training(1)
    writer = StoreWriter(FOLDER / "store", report=None)
    stored = StoreWriter(FOLDER / "stored", report=None, reference="stored")
    for _ in range(3):
        training.step()
        state = training.state()
        save(state, checkpoint_id=str(training.steps), storage_writer=writer)
        if training.steps < 3:
            save(state, checkpoint_id=str(training.steps), storage_writer=stored)
    expected = whole({key: state[key] for key in ("model", "plain", "step")})
    if RANK == 0:
        torch.save(expected, FOLDER / "expected-3.pt")
    report["loaded"] = loaded_like(FOLDER / "store", expected, 3)
    stored.close()

    training.step()
    # A group of its own, for the training uses the other at the same time.
    beside = distributed.new_group(backend="gloo")
    future = async_save(training.state(), checkpoint_id="4", storage_writer=writer, process_group=beside)
    expected = whole({key: training.state()[key] for key in ("model", "plain", "step")})
    training.step()
    assert isinstance(future, Future), "torch says it of a stager of one's own alone"
    future.result()
    report["async loaded"] = loaded_like(FOLDER / "store", expected, 4)

    with StoreWriter(FOLDER / "plain", report=None) as plain:
        layers = {f"w{number}": torch.full((1000 * (number + 1),), float(number)) for number in range(24)}
        save(layers, checkpoint_id="1", storage_writer=plain)

    write = local.LocalWriter.write
    if RANK == SIZE - 1:

        def fail(self: Any, *pieces: Any) -> None:
            raise DataError("No space left on device")

        local.LocalWriter.write = fail  # type: ignore[method-assign]
    report["full"] = outcome(save, training.state(), checkpoint_id="5", storage_writer=writer)
    local.LocalWriter.write = write  # type: ignore[method-assign]
    lines: list[str] = []
    report["told of tiers"] = lines
    tiers = StoreWriter(FOLDER / "slow", fast=FOLDER / "fast", report=lines.append)
    save(training.state(), checkpoint_id="1", storage_writer=tiers)
    tiers.drain()
    training.step()
    if RANK == SIZE - 1:

        def refuse(self: Any, *pieces: Any) -> None:
            raise DataError("No space left on the fast tier")

        local.LocalWriter.write = refuse  # type: ignore[method-assign]
    report["refused"] = outcome(save, training.state(), checkpoint_id="2", storage_writer=tiers)
    local.LocalWriter.write = write  # type: ignore[method-assign]
    save(training.state(), checkpoint_id="3", storage_writer=tiers)
    tiers.close()
    odd = {"odd": object()} if RANK == SIZE - 1 else {}
    report["unsupported"] = outcome(
        save, {**training.state(), **odd}, checkpoint_id="5", storage_writer=writer
    )
    training.step()
    save(training.state(), checkpoint_id="6", storage_writer=writer)
    report["left"] = len(list((FOLDER / "store").glob(".unfinished*")))
    expected = whole({key: training.state()[key] for key in ("model", "plain", "step")})
    if RANK == 0:
        torch.save(expected, FOLDER / "expected-6.pt")

    # The last rank comes once the others have given up.
    ranks = ranks_of_this_job()
    hasty = StoreWriter(
        FOLDER / "late", report=None, ranks=functools.partial(ranks_of_this_job, timeout_seconds=brief(2))
    )
    if RANK == SIZE - 1:
        ranks.all_gather("the others gave up", None)
    report["late"] = outcome(save, {"w": torch.ones(2)}, checkpoint_id="1", storage_writer=hasty)
    if RANK != SIZE - 1:
        ranks.all_gather("the others gave up", None)
    save({"w": torch.ones(2)}, checkpoint_id="1", storage_writer=hasty)
    report["after being late"] = len(list((FOLDER / "late").glob("step-*")))
    report["different"] = outcome(save, {"w": torch.ones(2)}, checkpoint_id=str(RANK), storage_writer=hasty)
    hasty.close()
    writer.close()


def go_on(report: Report) -> None:
    expected = torch.load(FOLDER / "expected-6.pt", weights_only=True)
    training = Training(5)
    training.step()
    state = training.state()
    load(state, checkpoint_id="6", storage_reader=StoreReader(FOLDER / "store"))
    report["loaded"] = is_same(whole({key: state[key] for key in expected}), expected)
    layers = {f"w{number}": torch.zeros(1000 * (number + 1)) for number in range(24)}
    load(layers, storage_reader=StoreReader(FOLDER / "plain"))
    report["plain loaded"] = all(bool((layers[f"w{number}"] == number).all()) for number in range(24))
    with StoreWriter(FOLDER / "store", report=None) as writer:
        for step in (7, 8):
            training.step()
            save(training.state(), checkpoint_id=str(step), storage_writer=writer)


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=ADDRESS, rank=RANK, world_size=SIZE)
    report: Report = {}
    {"save": go, "reshard": go_on}[DUTY](report)
    with open(FOLDER / f"report-{DUTY}-{RANK}.json", "w") as file:
        json.dump(report, file)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
