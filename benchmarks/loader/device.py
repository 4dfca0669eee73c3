"""Batches on a device: a training step with the loader beside one on resident data, and what each copy costs.

    python benchmarks/loader/device.py [--quick] [--rounds N] [--steps N] [--batch N] [--width N] [--images DIR]

On a CUDA device:

- "step": a residual network written here, --width times as wide as a ResNet-18, in bfloat16, trained on random crops
  of JPEG files, 224 x 224, channels last: batches that are on the device already, beside those that the loader copies
  there. Both are timed from the first step's begin to the last one's end on the device, in turn. "stall" is what the
  trace of the loader says. The processors have to decode as many images as the device trains on: a network that trains
  on more shows how fast they decode, not what the copies cost.
- "H2D": 64 MB to the device out of a registered slot (private, and shared with processes), out of memory that PyTorch
  pins, which is the limit, and out of pageable memory.
- "normalise": what the table look-up of a batch takes on the device, in pieces and beside multiply and add; and what
  the loader gives per second with images that cross as bytes, and as numbers.
- "late device": every step begins with a delay on the device, so that copies and releases come late; the numbers of
  every batch are compared with the samples' own. Any slot or device memory that is used again too early shows here.
- DALI's GPU pipeline over the same files, where it can be imported.

--quick runs on a CPU: a small network, a stand-in for the device whose streams are held, and no figures that mean
anything. Printed: medians with least and most over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from make_images import draw_images
from tests.stand_in import StandIn

import penstock
import penstock.torch as pt
from penstock.arena import Arena
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.loader.transforms.compiled import GROUP_KERNELS, KERNELS
from penstock.loader.transforms.sink import Sink
from penstock.torch.device import PinnedSlots, looked_up, table_of
from penstock.torch.loader import TORCH

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COPIED_BYTES = 64 << 20
WANTED_RATIO = 1.01
#: Without types, as PyTorch has none for most of it.
cuda: Any = torch.cuda


def spread(values: list[float], form: str) -> str:
    """Return the median with least and most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def network(width: int, blocks: int) -> nn.Sequential:
    """Return a residual network of four stages; 64 and 2 make a ResNet-18."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage in range(4):
        for block in range(blocks):
            layers.append(Block(channels, width << stage, 2 if stage and not block else 1))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Training:
    """Steps of a network, on a device."""

    def __init__(self, device: torch.device, width: int, blocks: int) -> None:
        torch.manual_seed(0)
        self._device = device
        model: Any = network(width, blocks)
        self._model = model.to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on a batch, channels last in memory."""
        with torch.autocast(self._device.type, torch.bfloat16):
            loss: Any = nn.functional.cross_entropy(self._model(images.permute(0, 3, 1, 2)), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def seconds(self, batches: Iterator[Any], steps: int) -> float:
        """Return what a step takes, over so many, after two that are not timed."""
        for _ in range(2):
            self.step(*next(batches))
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(*next(batches))
        self.wait()
        return (time.perf_counter() - begin) / steps

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def loader_of(folder: Path, batch: int, side: int, device: str | StandIn, **options: Any) -> penstock.Loader:
    """Return a loader of random crops that never ends."""
    transforms = [RandomResizedCrop((side, side)), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)]
    settings: dict[str, Any] = {
        "batch_size": batch,
        "epochs": None,
        "transforms": transforms,
        "dtype": "bfloat16",
        "layout": "NHWC",
        "drop_last": True,
        "report": None,
        **options,
    }
    if isinstance(device, StandIn):
        return penstock.Loader(folder, front_end=replace(TORCH, device=device), **settings)
    return pt.Loader(folder, device=device, **settings)


def endless(loader: penstock.Loader) -> Iterator[Any]:
    while True:
        yield from loader


def compare_steps(folder: Path, arguments: argparse.Namespace, device: torch.device, side: int) -> None:
    """Print what a step takes on resident data, and with the loader."""
    training = Training(device, *((8, 1) if arguments.quick else (64 * arguments.width, 2)))
    given: str | StandIn = StandIn() if device.type == "cpu" else "cuda"
    with loader_of(folder, arguments.batch, side, given) as loader:
        batches = endless(loader)
        resident = [next(batches) for _ in range(4)]
        if given != "cuda":
            resident = [(images.clone(), labels.clone()) for images, labels in resident]

        def again() -> Iterator[Any]:
            while True:
                yield from resident

        for _ in range(arguments.steps):  # whatever is chosen or compiled at first
            training.step(*next(batches))
        alone, loaded = [], []
        for number in range(arguments.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                if which:
                    loaded.append(training.seconds(batches, arguments.steps))
                else:
                    alone.append(training.seconds(again(), arguments.steps))
        stall, images = loader.metrics[-1].stall_seconds, arguments.batch / statistics.median(loaded)
    print(f"step on resident data: {spread([each * 1e3 for each in alone], '.2f')} ms")
    print(
        f"step with the loader: {spread([each * 1e3 for each in loaded], '.2f')} ms, {images:,.0f} images/s"
    )
    ratios = [one / other for one, other in zip(loaded, alone, strict=True)]
    verdict = (
        "" if device.type == "cpu" else f": {'PASS' if statistics.median(ratios) <= WANTED_RATIO else 'FAIL'}"
    )
    print(f"loader over resident data: {spread(ratios, '.4f')} x; wanted {WANTED_RATIO}{verdict}")
    print(f"stall by the trace, of the latest epoch: {stall:.3f} s")


def gigabytes_per_second(source: torch.Tensor, rounds: int) -> list[float]:
    """Return the rate of copies to the device, of each round."""
    target = torch.empty_like(source, device="cuda")
    stream, found = cuda.Stream(), []
    with cuda.stream(stream):
        for _ in range(rounds + 1):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(4):
                target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            found.append(4 * source.nbytes / begin.elapsed_time(end) / 1e6)
    assert torch.equal(target.cpu(), source)
    return found[1:]


def compare_copies(rounds: int) -> None:
    """Print the rates of copies out of each kind of memory."""
    numbers = torch.from_numpy(np.random.default_rng(0).integers(0, 256, COPIED_BYTES, np.uint8))
    limit = gigabytes_per_second(numbers.pin_memory(), rounds)
    print(f"H2D, memory that PyTorch pins: {spread(limit, '.1f')} GB/s (the limit)")
    for name, is_shared in (("private slot", False), ("shared slot", True)):
        lines: list[str] = []
        with Arena(COPIED_BYTES, huge_pages=True, is_shared=is_shared) as arena:
            pinning, memory = PinnedSlots(torch.device("cuda", 0), lines.append), arena.array
            memory[:] = numbers.numpy()
            pinning.pin(memory)
            slot = torch.from_numpy(memory)
            is_pinned, found = slot.is_pinned(), gigabytes_per_second(slot, rounds)
            pinning.close()
            del memory, slot
        share = statistics.median(found) / statistics.median(limit)
        verdict = "PASS" if share >= 0.95 and is_pinned else f"FAIL {lines}"
        print(f"H2D, registered {name}: {spread(found, '.1f')} GB/s, {share:.3f} of the limit: {verdict}")
    print(f"H2D, pageable: {spread(gigabytes_per_second(numbers, rounds), '.1f')} GB/s")


def milliseconds(work: Callable[[], object], rounds: int) -> list[float]:
    """Return what work takes on the device."""
    found = []
    for _ in range(rounds + 2):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found[2:]


def compare_normalising(batch: int, rounds: int) -> None:
    """Print what a batch's last steps take on the device, and check them against the CPU's own code."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (batch, 224, 224, 3), np.uint8))
    on_device = images.cuda()
    for dtype in ("float32", "bfloat16"):
        values = Sink(dtype, "NHWC", (ToTensor(), Normalize(MEAN, STD))).byte_values
        assert values is not None
        table = table_of(values)
        expected = looked_up(images[:8], table, channels_last=True)
        table = table.cuda()
        found = looked_up(on_device[:8], table, channels_last=True).cpu()
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), "bits differ"
        spent = milliseconds(lambda table=table: looked_up(on_device, table, channels_last=True), rounds)  # type: ignore[misc]
        print(
            f"normalise, table, {dtype}: {spread(spent, '.3f')} ms for {batch} images, bits of the CPU's: PASS"
        )
    scale = (1 / 255 / torch.tensor(STD)).cuda()
    bias = (-torch.tensor(MEAN) / torch.tensor(STD)).cuda()
    spent = milliseconds(lambda: on_device.mul(scale).add_(bias), rounds)
    print(f"normalise, multiply and add, float32: {spread(spent, '.3f')} ms")
    pinned = images.pin_memory()
    as_bytes = milliseconds(lambda: pinned.cuda(non_blocking=True), rounds)
    numbers = images.float().pin_memory()
    as_numbers = milliseconds(lambda: numbers.cuda(non_blocking=True), rounds)
    print(
        f"copy of the same as bytes: {spread(as_bytes, '.3f')} ms; as float32: {spread(as_numbers, '.3f')} ms"
    )


def compare_rates(folder: Path, batch: int, side: int, steps: int) -> None:
    """Print what the loader gives where nothing is trained."""
    for name, normalizes in (("bytes", None), ("numbers", False)):
        for dtype in ("float32", "bfloat16"):
            with loader_of(
                folder, batch, side, "cuda", dtype=dtype, normalize_on_device=normalizes
            ) as loader:
                batches = endless(loader)
                for _ in range(8):
                    next(batches)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(steps):
                    images, _ = next(batches)
                    images.add_(1)
                torch.cuda.synchronize()
                rate = batch * steps / (time.perf_counter() - begin)
            print(f"loader alone, {dtype} that cross as {name}: {rate:,.0f} images/s")


class Numbered:
    """Rows whose elements are their number, so that a batch tells whether it is what it should be."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(1 << 14, index, np.float32), index


def check_late_device(device: torch.device, steps: int) -> None:
    """Read batches on a device that is steps behind, and compare each with its samples' numbers."""
    stand_in = StandIn() if device.type == "cpu" else None
    settings: dict[str, Any] = {"batch_size": 64, "epochs": None, "memory": "32 MB", "report": None}
    if stand_in is None:
        made: penstock.Loader = pt.Loader(Numbered(), device="cuda", device_memory="20 MB", **settings)
    else:
        made = penstock.Loader(Numbered(), front_end=replace(TORCH, device=stand_in), **settings)
    wrong: list[torch.Tensor] = []
    with made as loader:
        batches = endless(loader)
        for _ in range(steps):
            rows, ids = next(batches)
            if stand_in is None:
                cuda._sleep(20_000_000)
                wrong.append((rows != ids[:, None]).sum())
            else:
                stand_in.main.enqueue(lambda rows=rows, ids=ids: wrong.append((rows != ids[:, None]).sum()))  # type: ignore[misc]
            del rows, ids
        total = int(sum(each.cpu() for each in wrong))
    assert len(wrong) == steps
    print(f"late device: {steps} batches, {total} wrong numbers: {'FAIL' if total else 'PASS'}")
    assert not total


def compare_dali(folder: Path, batch: int, side: int, steps: int) -> None:
    """Print what DALI's GPU pipeline gives per second of the same files."""
    try:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator
    except ImportError:
        print("DALI: not installed")
        return

    @pipeline_def(batch_size=batch, num_threads=os.cpu_count() or 1, device_id=0)  # type: ignore[untyped-decorator, unused-ignore]
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(files, device="mixed", output_type=types.RGB)
        images = fn.resize(images, size=(side, side))
        mean, std = [255 * each for each in MEAN], [255 * each for each in STD]
        flip = fn.random.coin_flip()
        return (
            fn.crop_mirror_normalize(
                images, dtype=types.FLOAT16, output_layout="HWC", mean=mean, std=std, mirror=flip
            ),
            labels.gpu(),
        )

    made = pipeline()
    made.build()
    batches = DALIGenericIterator(made, ["images", "labels"], auto_reset=True)

    def again() -> Iterator[Any]:
        while True:
            yield from batches

    endless_batches = again()
    for _ in range(8):
        next(endless_batches)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        next(endless_batches)[0]["images"].add_(1)
    torch.cuda.synchronize()
    print(f"DALI alone, float16: {batch * steps / (time.perf_counter() - begin):,.0f} images/s")


@contextlib.contextmanager
def images_in(given: str | None, count: int, side: int) -> Iterator[Path]:
    """Yield the folder of images: the given one, or one that is made for the time of the block."""
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        draw_images(Path(folder), count, side, side)
        yield Path(folder)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="on a CPU, few samples: to see that it runs")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=2, help="of the network, in ResNet-18s")
    parser.add_argument("--images", help="a folder of JPEG files by label, in place of made ones")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batch = 1, 2, 4
    has_device = torch.cuda.is_available() and not arguments.quick
    if not has_device and not arguments.quick:
        raise SystemExit("there is no CUDA device: --quick runs on a CPU, to see that it runs")
    device = torch.device("cuda", 0) if has_device else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if has_device else "a stand-in for a device"
    print(f"{platform.node()}, {os.cpu_count()} processors, {name}, PyTorch {torch.__version__}", flush=True)
    side = 224 if has_device else 32
    with images_in(arguments.images, 2048 if has_device else 16, 256 if has_device else 40) as folder:
        if has_device:
            torch.backends.cudnn.benchmark = True
            for part in (
                KERNELS["uint8"],
                GROUP_KERNELS["group_uint8"],
                KERNELS["table"],
                GROUP_KERNELS["group_table"],
            ):
                part.wait()
        check_late_device(device, 6 if arguments.quick else 60)
        compare_steps(folder, arguments, device, side)
        if has_device:
            compare_copies(arguments.rounds)
            compare_normalising(arguments.batch, arguments.rounds)
            compare_rates(folder, arguments.batch, side, arguments.steps)
            compare_dali(folder, arguments.batch, side, arguments.steps)


if __name__ == "__main__":
    main()
