"""Batches on a real CUDA device: `python -m pytest -m cuda tests/torch/test_cuda.py`."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from penstock.checkpoint import SnapshotStore
from penstock.errors import ConfigError, StagingError
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.torch import DataLoader, Loader
from penstock.torch.device import tensors_of

pytestmark = pytest.mark.cuda

COUNT, BATCH = 96, 16
NUMBERS = [
    RandomResizedCrop((96, 96)),
    RandomHorizontalFlip(),
    ToTensor(),
    Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
#: Cycles of the device's clock: 20 to 50 ms.
DELAY = 50_000_000
#: Without types, as PyTorch has none for most of it.
cuda: Any = torch.cuda


@pytest.fixture(scope="module", autouse=True)
def _cuda_is_in_use() -> None:
    """Have the driver open its files before a test is held to leaving none."""
    with cuda.stream(cuda.Stream()):
        torch.zeros(1000).pin_memory().to("cuda", non_blocking=True).add_(1)
    cuda.synchronize()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 PNG pictures of 100 x 120 random pixels; label k % 2."""
    root = tmp_path_factory.mktemp("cuda") / "data"
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        place = root / f"label{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number:02d}.png"), rng.integers(0, 256, (100, 120, 3), np.uint8))
    return root


def make(source: Any, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": 3,
        "memory": "64 MiB",
        "report": None,
        **options,
    }
    return Loader(source, **settings)


def on_host(folder: Path, **options: Any) -> list[list[torch.Tensor]]:
    """Return the batches of a loader without a device."""
    with make(folder, transforms=NUMBERS, **options) as loader:
        return [[each.clone() for each in batch] for _ in range(3) for batch in loader]


def same_bits(ours: list[Any], theirs: list[Any]) -> bool:
    assert len(ours) == len(theirs)
    return all(
        torch.equal(one.cpu().contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for batch, expected in zip(ours, theirs, strict=True)
        for one, other in zip(batch, expected, strict=True)
    )


@pytest.mark.parametrize("normalizes", [None, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16", "layout": "NHWC"}, {"dtype": "float16"}, {"decoders": 0}],
    ids=["float32", "bfloat16", "float16", "own thread"],
)
def test_batches_on_the_device_have_the_bits_of_the_cpu(
    folder: Path, options: dict[str, Any], normalizes: bool | None
) -> None:
    with make(folder, transforms=NUMBERS, device="cuda", normalize_on_device=normalizes, **options) as loader:
        found = [[each.clone() for each in batch] for _ in range(3) for batch in loader]

    assert {each.device.type for batch in found for each in batch} == {"cuda"}
    assert same_bits(found, on_host(folder, **options))


def test_neither_a_slot_nor_a_tensor_is_overwritten_while_the_device_is_behind(folder: Path) -> None:
    """Every step of the training, and so every release, comes late; memory is for few slots and three batches."""
    found = []
    with make(folder, transforms=NUMBERS, device="cuda", memory="6 MiB", device_memory="8 MiB") as loader:
        for _ in range(3):
            for images, labels in loader:
                cuda._sleep(DELAY)
                found.append((images.sum(dtype=torch.float64), (images * 1).clone(), labels.clone()))
                del images, labels
    expected = on_host(folder)

    assert same_bits([batch[1:] for batch in found], expected)
    for (total, *_), (images, _) in zip(found, expected, strict=True):
        assert torch.isclose(total.cpu(), images.sum(dtype=torch.float64))


def test_a_batch_that_is_handed_to_a_stream_of_the_trainings_own_is_not_overwritten(folder: Path) -> None:
    found = []
    stream = cuda.Stream()
    with make(folder, transforms=NUMBERS, device="cuda") as loader, cuda.stream(stream):
        for _ in range(3):
            for images, labels in loader:
                cuda._sleep(DELAY)
                found.append([(images * 1), (labels * 1)])
    stream.synchronize()

    assert same_bits(found, on_host(folder))


def test_kept_batches_stay_what_they_were(folder: Path) -> None:
    with make(folder, transforms=NUMBERS, device="cuda", device_memory="6 MiB") as loader:
        kept = [batch for _ in range(3) for batch in loader]

    assert same_bits(kept, on_host(folder))


def test_a_thread_that_runs_ahead_of_its_device_takes_no_more_than_was_given(folder: Path) -> None:
    """And none of its waits for the device is counted as a stall."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    batch_bytes = BATCH * 3 * 96 * 96 * 5
    with make(folder, transforms=NUMBERS, device="cuda", device_memory=3 * batch_bytes + 4096) as loader:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            for images, _labels in loader:
                cuda._sleep(DELAY)
                del images, _labels
        peak = torch.cuda.max_memory_allocated() - before
        stall = sum(epoch.stall_seconds for epoch in loader.metrics[1:])
        seconds = sum(epoch.seconds for epoch in loader.metrics[1:])

    # One more that is dropped and whose event PyTorch has not looked at, and places in the table of one piece.
    assert peak <= 4 * batch_bytes + (20 << 20)
    assert stall < seconds / 2


def test_no_call_of_the_trainings_thread_waits_for_the_device(folder: Path) -> None:
    """PyTorch's own look-out for synchronising calls finds none."""
    with make(folder, transforms=NUMBERS, device="cuda") as loader:
        next(iter(loader))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for images, _ in loader:
                images.mul_(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [Loader, DataLoader])
def test_tensors_are_page_locked_where_that_is_asked_for(folder: Path, kind: Any) -> None:
    if kind is DataLoader:
        data = TensorDataset(torch.arange(4096.0).reshape(64, 64))
        batches = list(DataLoader(data, batch_size=16, num_workers=1, workers="threads", pin_memory=True))
    else:
        with make(folder, transforms=NUMBERS, pin_memory=True, epochs=1) as loader:
            batches = []
            for images, labels in loader:
                assert images.is_pinned()
                assert labels.is_pinned()
                copied = images.to("cuda", non_blocking=True)
                cuda._sleep(DELAY // 10)
                batches.append((copied * 1, labels.clone()))
                del images, labels, copied
        with make(folder, transforms=NUMBERS, epochs=1) as loader:
            assert same_bits(batches, [[each.clone() for each in batch] for batch in loader])
        return
    assert all(each.is_pinned() for batch in batches for each in tensors_of(batch))


class Rows:
    """A data set of arrays, for worker processes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((64, 64), index, np.float32), index


def test_slots_that_worker_processes_fill_are_locked_and_copied() -> None:
    lines: list[str] = []
    with make(Rows(), device="cuda", workers=2, epochs=1, report=lines.append) as loader:
        for rows, ids in loader:
            assert torch.equal(rows[:, 0, 0].long(), ids)
    assert not [line for line in lines if "page-locked" in line]


def test_a_device_that_there_is_not_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"this process sees \d+ CUDA device"):
        make(folder, transforms=NUMBERS, device=f"cuda:{torch.cuda.device_count()}")


def test_a_full_device_is_an_error_that_names_the_bytes(folder: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with (
            make(folder, transforms=NUMBERS, device="cuda", device_memory="8 MiB") as loader,
            pytest.raises(
                StagingError, match=r"cuda:0 has no memory for a batch of .* give a smaller batch_size"
            ),
        ):
            next(iter(loader))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_state_counts_what_was_handed_out_and_resumes_there(folder: Path) -> None:
    with make(folder, transforms=NUMBERS, device="cuda") as loader:
        passes = iter(loader)
        next(passes), next(passes)
        state = loader.state_dict()
    with make(folder, transforms=NUMBERS, device="cuda", state=state) as loader:
        rest = [[each.clone() for each in batch] for batch in loader]

    assert same_bits(rest, on_host(folder)[2:6])


def test_ctrl_c_while_copies_are_in_flight_loses_nothing_and_no_batch_is_wrong() -> None:
    """300 interrupts, one every few milliseconds; each ends its epoch, and the next loop begins another."""
    main, left, interrupted, armed = threading.get_ident(), [300], 0, [False]

    def handle(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        while left[0]:
            time.sleep(0.004)
            signal.pthread_kill(main, signal.SIGINT)
            left[0] -= 1

    before = signal.signal(signal.SIGINT, handle)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with make(Rows(), device="cuda", epochs=None) as loader:
            while left[0]:
                try:
                    armed[0] = True
                    for rows, ids in loader:
                        assert torch.equal(rows[:, 5, 5].long(), ids)
                    armed[0] = False
                except KeyboardInterrupt:
                    interrupted += 1
            sender.join()
            assert sorted(number for _, ids in loader for number in ids.tolist()) == list(range(64))
    finally:
        left[0] = 0
        sender.join()
        signal.signal(signal.SIGINT, before)

    assert interrupted > 100


def test_snapshots_of_tensors_on_the_device_restore_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "bf16": torch.randn(1 << 18, device="cuda").bfloat16(),
        "f32": torch.randn(300, 700, device="cuda"),
        "int": torch.arange(1000, device="cuda"),
        "transposed": torch.randn(64, 128, device="cuda").t(),
        "rng": torch.cuda.get_rng_state(),
    }
    kept = {name: each.clone() for name, each in state.items()}
    with SnapshotStore(tmp_path / "run", schedule="1 steps") as store:
        for step in (1, 2):
            saving = store.save(step, state)
            for name in ("bf16", "f32"):  # the training goes on at once
                state[name].mul_(1.5)
            saving.wait()
        first, second = store.restore(1), store.restore(2)
        for name, each in kept.items():
            assert torch.equal(first[name].cpu().contiguous(), each.cpu().contiguous()), name
            assert torch.equal(
                second[name].cpu().contiguous(),
                (each * 1.5 if name in ("bf16", "f32") else each).cpu().contiguous(),
            ), name
