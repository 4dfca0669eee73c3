"""The CUDA side of batches on a device, as far as it can be seen without one."""

from __future__ import annotations

import contextlib
import gc
import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each

from penstock.errors import ConfigError, StagingError
from penstock.loader.transforms import Normalize, ToTensor
from penstock.loader.transforms.sink import Sink
from penstock.torch import Loader
from penstock.torch.device import CudaDevice, PinnedSlots, changed, device_of, looked_up, table_of


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that believes to have two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_devices")
def test_a_device_has_the_number_that_is_current_unless_it_is_given() -> None:
    assert device_of(None) is device_of("cpu") is None
    assert device_of("cuda") == torch.device("cuda", 1)
    assert device_of(torch.device("cuda", 0)) == torch.device("cuda", 0)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:2", r"device is 'cuda:2', and this process sees 2 CUDA devices"),
        ("meta", r"device is 'meta'; batches are copied to CUDA devices"),
        ("gpu", r"device is 'gpu'; it is \"cuda\", \"cuda:1\", \"cpu\" or a torch.device"),
    ],
)
def test_a_device_that_there_is_not_is_refused(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device_of(device)


def test_without_cuda_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for is_built, reason in ((True, "no driver or device is found"), (False, "built without CUDA")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        with pytest.raises(ConfigError, match=reason):
            device_of("cuda")


@pytest.mark.usefixtures("two_devices")
def test_a_rank_that_shares_the_first_device_with_others_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device_of("cuda:1")
    with pytest.warns(RuntimeWarning, match=r"LOCAL_RANK=1: .* torch.cuda.set_device\(1\)"):
        device_of("cuda:0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_memory": "1 GiB"}, "device_memory is '1 GiB', and no device is given"),
        ({"normalize_on_device": True}, "normalize_on_device is True, and no device is given"),
    ],
)
def test_what_is_for_a_device_is_refused_without_one(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader([(k,) for k in range(8)], batch_size=4, epochs=1, **arguments)


def test_without_a_device_memory_is_not_locked_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        pytest.warns(UserWarning, match="pin_memory is True, and there is no CUDA device"),
        Loader(
            [(k,) for k in range(8)], batch_size=4, epochs=1, memory="1 MB", pin_memory=True, report=None
        ) as loader,
    ):
        assert len(list(loader)) == 2


def test_a_device_without_memory_for_a_batch_is_an_error_that_says_how_much_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(batch: object, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("penstock.torch.device.copied_to", full)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2_000, 10**9))
    device = CudaDevice(torch.device("cuda", 1), None, None)

    with pytest.raises(
        StagingError,
        match="cuda:1 has no memory for a batch of 400 B: 2 kB are free, and this process's PyTorch has 3 MB; give a",
    ):
        device.move(torch.zeros(100))


@for_each("layout", ["NCHW", "NHWC"])
@for_each("dtype", ["float32", "float16", "bfloat16"])
def test_bytes_become_the_numbers_that_a_normalised_tensor_has(dtype: str, layout: str) -> None:
    """By PyTorch's own arithmetic: within one rounding of the type, as its steps round one after the other."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    values = Sink(dtype, layout, (ToTensor(), Normalize(mean, std))).byte_values
    assert values is not None
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), np.uint8))
    wanted = (images.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    if layout == "NHWC":
        images, wanted = (each.permute(0, 2, 3, 1).contiguous() for each in (images, wanted))

    found = looked_up(images, table_of(values), channels_last=layout == "NHWC")

    assert found.dtype == getattr(torch, dtype)
    assert torch.allclose(found.double(), wanted, rtol=torch.finfo(found.dtype).eps, atol=1e-6)


def test_a_structure_is_changed_leaf_by_leaf_and_keeps_its_kinds() -> None:
    nested = {"a": [1, (2, 3)], "b": types.SimpleNamespace()}

    assert changed(nested, lambda leaf: leaf * 10 if isinstance(leaf, int) else leaf) == {
        **nested,
        "a": [10, (20, 30)],
    }


class FakeDriver:
    """The CUDA driver's list of page-locked memory."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802, as it is called there
        assert flags == 1
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return made


def test_locked_memory_lives_until_it_is_unlocked_by_close_or_with_the_last_reference(
    driver: FakeDriver,
) -> None:
    for ends in (PinnedSlots.close, lambda slots: None):
        slots = PinnedSlots(torch.device("cuda", 0), None)
        memory = np.zeros(4096, np.uint8)
        address = memory.ctypes.data
        slots.pin(memory)
        del memory

        assert driver.locked == {address: 4096}

        ends(slots)
        del slots
        gc.collect()

        assert driver.locked == {}


def test_memory_that_cannot_be_locked_is_reported_once(driver: FakeDriver) -> None:
    driver.error = 2
    lines: list[str] = []
    slots = PinnedSlots(torch.device("cuda", 0), lines.append)
    slots.pin(np.zeros(4096, np.uint8))
    slots.pin(np.zeros(4096, np.uint8))
    slots.close()

    assert [line[:58] for line in lines] == [
        "a batch slot of 4.1 kB cannot be page-locked (cudaHostRegis"[:58]
    ]
