"""Batches on a device, as a training meets them: on a stand-in whose streams wait for the test."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from tests.interrupting import every_place
from tests.stand_in import FakePinning, StandIn

from penstock.errors import ConfigError, StagingError
from penstock.loader import Loader
from penstock.loader.transforms import (
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from penstock.torch.device import tensors_of
from penstock.torch.loader import TORCH

COUNT, BATCH = 22, 4
CROPS = [RandomResizedCrop((8, 6)), RandomHorizontalFlip()]
NUMBERS = [*CROPS, ToTensor(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22 PNG pictures of 9 x 7 random pixels; label k % 2."""
    root = tmp_path_factory.mktemp("on_device") / "data"
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        place = root / f"label{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number:02d}.png"), rng.integers(0, 256, (9, 7, 3), np.uint8))
    return root


def make(
    source: Any, device: StandIn | None = None, pinning: FakePinning | None = None, **options: Any
) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": 3,
        "memory": "32 MiB",
        "report": None,
        "timeout_seconds": 60,
        "front_end": replace(TORCH, device=device, pinning=pinning),
        **options,
    }
    return Loader(source, **settings)


def batches_of(loader: Loader) -> list[list[torch.Tensor]]:
    """Return the tensors of all batches, each looked at when it was handed out."""
    found = []
    with loader:
        while loader.position[0] < loader.plan.epochs:
            found += [[each.clone() for each in tensors_of(batch)] for batch in loader]
    return found


def same_bits(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    assert len(ours) == len(theirs) > 0
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.numpy().tobytes() == other.numpy().tobytes()
        if one.dtype != torch.bfloat16
        else torch.equal(one.view(torch.int16), other.view(torch.int16))
        for one, other in pairs
    )


class Rows:
    """A data set of dicts."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": np.full(100, index), "name": f"row {index}", "words": np.arange(index % 5)}


def collated(samples: list[Any]) -> dict[str, Any]:
    return {
        "rows": torch.from_numpy(np.stack([each["row"] for each in samples])),
        "names": [each["name"] for each in samples],
    }


@pytest.mark.parametrize(
    ("options", "finishes"),
    [
        pytest.param({"transforms": NUMBERS}, None, marks=pytest.mark.slow),
        ({"transforms": NUMBERS, "dtype": "bfloat16", "layout": "NHWC"}, False),
        ({"transforms": NUMBERS, "dtype": "float16", "decoders": 0}, None),
        pytest.param({"transforms": CROPS, "dtype": "uint8"}, False, marks=pytest.mark.slow),
        ({"transforms": CROPS, "dtype": "float32"}, None),
        ({"transforms": [*NUMBERS, lambda image: image * 2]}, False),
        ({"transforms": NUMBERS, "mix_images": MixUp(num_classes=2)}, None),
    ],
    ids=["float32", "bfloat16", "float16, own thread", "bytes", "byte values", "a callable", "mixed"],
)
def test_images_on_a_device_have_the_bits_that_they_have_without(
    folder: Path, options: dict[str, Any], finishes: bool | None
) -> None:
    expected = batches_of(make(folder, **options))

    assert same_bits(batches_of(make(folder, StandIn(finishes=finishes), **options)), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"ragged": ["words"]},
        {"collate_fn": collated},
        pytest.param({"ragged": ["words"], "workers": 1}, marks=pytest.mark.slow),
    ],
    ids=["ragged", "collate_fn", "processes"],
)
def test_batches_of_a_data_set_are_copied_with_all_that_is_in_them(options: dict[str, Any]) -> None:
    expected = batches_of(make(Rows(), **{**options, "workers": "threads"}))

    assert same_bits(batches_of(make(Rows(), StandIn(), **options)), expected)


def test_what_is_no_tensor_stays() -> None:
    with make(Rows(), StandIn(), ragged=["words"], shuffle=False) as loader:
        assert next(iter(loader))["name"] == ["row 0", "row 1", "row 2", "row 3"]


def test_images_that_become_numbers_on_the_device_cross_as_bytes(folder: Path) -> None:
    """A sample takes a quarter of the bytes in a slot, and people are told."""
    with make(folder, StandIn(), transforms=NUMBERS) as loader, make(folder, transforms=NUMBERS) as plain:
        ours, theirs = (each.memory.slot_bytes / each._parts.staging.batch_size for each in (loader, plain))
        assert theirs > 3 * ours
        assert loader.dtype == plain.dtype == "float32"
        assert loader.state_dict() == plain.state_dict()
        assert loader.empty_batch()[0].dtype == torch.float32
        assert loader.start_lines[-1].endswith(
            "copies batches of 2.91 kB to stand-in ahead of the training, whose images cross as bytes and get "
            "their last steps there; they take at most 11.6 kB there"
        )


def test_the_state_counts_batches_that_were_handed_out_and_not_those_that_are_on_the_device(
    folder: Path,
) -> None:
    device = StandIn()
    with make(folder, device, transforms=NUMBERS) as loader, make(folder, transforms=NUMBERS) as plain:
        ours, theirs = iter(loader), iter(plain)
        next(ours), next(theirs)
        device.wait_until_copied(3)

        assert loader.state_dict() == plain.state_dict()
        state = loader.state_dict()
    rest = batches_of(make(folder, StandIn(), transforms=NUMBERS, state=state))

    assert same_bits(rest, batches_of(make(folder, transforms=NUMBERS))[1:])


def test_a_loop_that_is_left_early_is_followed_by_the_next_epoch(folder: Path) -> None:
    expected = batches_of(make(folder, transforms=NUMBERS))
    with make(folder, StandIn(), transforms=NUMBERS) as loader:
        next(iter(loader))
        second = [[each.clone() for each in batch] for batch in loader]

    assert same_bits(second, expected[6:12])


def test_a_training_that_fills_the_device_with_batches_gets_the_error_and_continues_from_the_state(
    folder: Path,
) -> None:
    options: dict[str, Any] = {"transforms": CROPS, "dtype": "uint8"}
    expected, kept = batches_of(make(folder, **options)), list[Any]()
    with make(folder, StandIn(capacity_bytes=2_600), **options) as loader:
        with pytest.raises(StagingError, match="stand-in has no memory for 576 bytes"):
            kept.extend(loader)
        state = loader.state_dict()

    rest = batches_of(make(folder, StandIn(), state=state, **options))
    assert 0 < len(kept) < 6
    assert same_bits(rest, expected[len(kept) :])


def broken(folder: Path, tmp_path: Path) -> Path:
    """Return a folder like this one, of which two pictures are none."""
    root = tmp_path / "broken"
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        (root / path.parent.name).mkdir(parents=True, exist_ok=True)
        (root / path.parent.name / path.name).write_bytes(b"no" if number in (3, 4) else path.read_bytes())
    return root


def test_a_batch_that_lacks_samples_has_the_others(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"transforms": NUMBERS, "on_error": "skip"}
    root = broken(folder, tmp_path)
    expected = batches_of(make(root, **options))

    assert sum(len(batch[0]) for batch in expected) == 3 * (COUNT - 2)
    assert same_bits(batches_of(make(root, StandIn(), **options)), expected)


def test_slots_are_locked_once_each_and_unlocked_at_the_end(folder: Path) -> None:
    pinning = FakePinning()
    with make(folder, StandIn(), pinning, transforms=[Resize((100, 60)), ToTensor()]) as loader:
        for _ in loader:
            pass
        slots = loader.memory.slots

        assert 1 <= len(pinning.locked) <= slots
        assert set(pinning.locked.values()) == {loader._parts.staging.slot_bytes}
        assert not pinning.closed
    assert pinning.closed


def test_a_loader_that_is_closed_while_copies_are_under_way_waits_for_them(folder: Path) -> None:
    """The memory that they read must not go before."""
    device, pinning = StandIn(), FakePinning()
    loader = make(folder, device, pinning, transforms=[Resize((100, 60)), ToTensor()])
    with device.copies.held():
        loader.start()
        device.wait_until_copied(1)
        closing = threading.Thread(target=loader.close)
        closing.start()
        device.wait_until_waited_for()

        assert not pinning.closed
    closing.join()

    assert pinning.closed


def is_of_penstock(code: CodeType) -> bool:
    return "/penstock/" in code.co_filename


@pytest.mark.parametrize("stride", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_after_ctrl_c_anywhere_the_next_loop_has_all_batches(stride: int) -> None:
    with make(Rows(), StandIn(), ragged=["words"], epochs=None) as loader:
        for interrupter in every_place(is_of_penstock, stride):
            with interrupter, contextlib.suppress(KeyboardInterrupt):
                for _ in loader:
                    pass

            seen = [number for batch in loader for number in batch["row"][:, 7].tolist()]

            assert sorted(seen) == list(range(COUNT)), interrupter.where


def test_a_wait_for_a_copy_is_reported_as_one(folder: Path) -> None:
    device, lines = StandIn(), list[str]()
    seen = threading.Event()

    def report(line: str) -> None:
        if "copy to" in line:
            lines.append(line)
            seen.set()

    with make(folder, device, transforms=NUMBERS, report=report, patience_seconds=0.05) as loader:
        passes = iter(loader)
        with device.main.held():
            held = threading.Thread(target=lambda: [next(passes) for _ in range(5)])
            held.start()
            assert seen.wait(60)
        held.join()

    assert "it is loaded, and waits for its copy to stand-in" in lines[0]


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (
            StandIn(limit_bytes=5000),
            {"transforms": NUMBERS},
            r"device_memory is 5 kB, and a batch takes 2.91 kB",
        ),
        (
            StandIn(finishes=True),
            {"transforms": [*CROPS, lambda image: image]},
            r"normalize_on_device is True, and",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(
    folder: Path, device: StandIn, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(folder, device, **options)
