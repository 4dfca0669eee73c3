"""One training, twice: PyTorch's loader and Penstock on the same slow store, and what was predicted beforehand."""

from __future__ import annotations

import csv
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import penstock.torch as pt
from penstock.errors import ConfigError, DataError
from penstock.flow.cpus import available_cpus
from penstock.loader import LoaderConfig, predict
from penstock.loader.transforms import CenterCrop, Normalize, Resize, Scratch, ToTensor, compile_pipeline
from penstock.loader.transforms.pipeline import Transform
from penstock.machine import Machine
from penstock.measure.calibrate import calibrate, decode_with
from penstock.measure.plot import plot_trace
from penstock.measure.slow_source import SlowSource
from penstock.measure.watch import watch
from penstock.plan.torch_order import TorchShuffle
from penstock.store import ImageFolder, Source, open_source
from penstock.trace import SOURCE, EpochMetrics, Trace, read_trace

SIDE = 32
BATCH_SIZE = 64
TEST_EVERY = 5
OPEN_SECONDS = READ_SECONDS = 5e-3
# The wire is as narrow for the data as a busy file server's is for photographs: all of them once, in this time.
WIRE_SECONDS_PER_EPOCH = 2.0
WORKER_CHOICES = (4, 8, 16, 32, 64)
# More workers than the last choice must save as much of the time, or they are not worth trying.
WORTH_MORE_WORKERS = 0.05
TRANSFORMS = (Resize(SIDE), CenterCrop(SIDE), ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3))


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What one loader's training came to. `accuracy` is of the test set, None for a prediction."""

    name: str
    trace: Trace
    accuracy: float | None

    @property
    def epochs(self) -> list[EpochMetrics]:
        return [epoch for epoch in self.trace.epochs() if epoch.steps]

    @property
    def stall_seconds(self) -> float:
        return sum(epoch.stall_seconds for epoch in self.epochs)


def write_digits(root: Path) -> Path:
    """Write scikit-learn's 1,797 scans of handwritten digits as an image folder of PNG files; return the folder.

    The scans have 8 x 8 pixels of 17 grey levels (Alpaydin & Kaynak, UCI optical recognition of handwritten
    digits); they are enlarged to 32 x 32. A folder that is there already is kept.
    """
    import cv2
    from sklearn.datasets import load_digits

    folder = root / "digits"
    if folder.is_dir():
        return folder
    digits = load_digits()
    unfinished = root / f"digits.{os.getpid()}.unfinished"
    for number, (scan, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = unfinished / str(label)
        place.mkdir(parents=True, exist_ok=True)
        enlarged = cv2.resize(
            (scan * (255 / 16)).astype(np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC
        )
        if not cv2.imwrite(str(place / f"{number:04d}.png"), enlarged):
            raise DataError(f"{place} cannot be written: give another folder with --out")
    unfinished.rename(folder)
    return folder


def split_folder(folder: Path, out: Path) -> tuple[Path, Path, int]:
    """Write lists of an image folder's training and test files, every fifth of a class for the test.

    Returns: the two lists, and the number of classes.
    """
    source = ImageFolder(folder)
    if len(source.classes) < 2:
        raise ConfigError(f"{folder} has one label folder; a classifier needs at least two")
    members = np.arange(len(source))
    labels = np.asarray(source.labels)
    rank_in_class = members - np.searchsorted(labels, labels)
    is_test = rank_in_class % TEST_EVERY == TEST_EVERY - 1
    lists = (out / "train.csv", out / "test.csv")
    for path, chosen in zip(lists, (~is_test, is_test), strict=True):
        if not chosen.any():
            raise ConfigError(
                f"{folder} has fewer than {TEST_EVERY} images per label: no {path.stem} set can be made"
            )
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("path", "label"))
            rows.writerows((source.path_of(int(k)), int(source.labels[k])) for k in members[chosen])
    return lists[0], lists[1], len(source.classes)


class StoredImages(Dataset[tuple[Tensor, int]]):
    """The usual map-style data set over a store: read, decode, transform one sample."""

    def __init__(self, source: Source, transforms: Sequence[Transform] = TRANSFORMS) -> None:
        self._source = source
        self._pipeline = compile_pipeline(transforms, seed=0, dtype="float32", layout="NCHW")
        #: Made in the worker that uses it: a decoder's buffers are nobody else's.
        self._scratch: Scratch | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image(index), int(np.asarray(self._source.labels)[index])

    def image(self, index: int) -> Tensor:
        """Return a sample without its label, of whatever kind that is."""
        self._scratch = self._scratch or Scratch()
        image = np.empty(self._pipeline.output_shape, np.float32)
        draws = self._pipeline.draw(0, np.array([index]))
        self._pipeline.run(self._source.read(index), image, draws, 0, self._scratch)
        return torch.from_numpy(image)


@contextmanager
def many_workers() -> Iterator[None]:
    """Let PyTorch's loader have more workers than processors, as a store with latency asks for, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def small_cnn(classes: int) -> nn.Module:
    """Return the model, with weights that depend on nothing but its shape."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, classes)),
    )


class Training:
    """A model under training, and a fingerprint of every batch that it was given."""

    def __init__(self, classes: int) -> None:
        self._model = small_cnn(classes)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self._loss = nn.CrossEntropyLoss()
        self.batches: list[NDArray[np.float64]] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        pixels = images.sum(dim=(1, 2, 3), dtype=torch.float64)
        self.batches.append(torch.stack([labels.double(), pixels]).numpy())
        self._optimizer.zero_grad()
        self._loss(self._model(images), labels).backward()
        self._optimizer.step()

    def run(self, loader: Iterable[tuple[Tensor, Tensor]], epochs: int) -> None:
        with many_workers():
            for _ in range(epochs):
                for images, labels in loader:
                    self.step(images, labels)

    def accuracy(self, test_list: Path) -> float:
        """Return the share of the test images that the model names rightly."""
        right = total = 0
        with (
            torch.no_grad(),
            pt.Loader(
                test_list,
                batch_size=256,
                epochs=1,
                shuffle=False,
                transforms=TRANSFORMS,
                memory="64 MiB",
                report=None,
            ) as loader,
        ):
            for images, labels in loader:
                right += int((self._model(images).argmax(1) == labels).sum())
                total += labels.numel()
        return right / total


def measure_step_seconds(classes: int) -> float:
    """Return the median time of a training step on a random batch."""
    training = Training(classes)
    images, labels = torch.randn(BATCH_SIZE, 3, SIDE, SIDE), torch.randint(classes, (BATCH_SIZE,))
    seconds = []
    for _ in range(25):
        begin = time.perf_counter()
        training.step(images, labels)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[5:])


def torch_loader(source: Source, workers: int, generator: torch.Generator) -> DataLoader[tuple[Tensor, int]]:
    with many_workers():
        return DataLoader(
            StoredImages(source),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=4,
            generator=generator,
        )


def exhaust(loader: Iterable[object], step_seconds: float) -> None:
    with many_workers():
        for _ in loader:
            time.sleep(step_seconds)


def best_workers(source: Source, step_seconds: float) -> int:
    """Return the number of workers from which on more of them make an epoch with PyTorch's loader no shorter.

    An epoch with steps, as long as the training's: beyond what keeps the store busy, more workers only make the
    first batch later. The second one, in which the workers run already.
    """
    best, best_seconds = 0, math.inf
    for workers in WORKER_CHOICES:
        loader = torch_loader(source, workers, torch.Generator())
        exhaust(loader, 0.0)
        begin = time.perf_counter()
        exhaust(loader, step_seconds)
        seconds = time.perf_counter() - begin
        if seconds > best_seconds * (1 - WORTH_MORE_WORKERS):
            break
        best, best_seconds = workers, seconds
    return best


@dataclass(frozen=True, slots=True)
class Exercise:
    """What both loaders are given: a training set on a slow store, a test set, a plan."""

    train_list: Path
    test_list: Path
    classes: int
    epochs: int

    def slow_store(self) -> SlowSource:
        source = open_source(self.train_list)
        wire = float(source.sizes_bytes.sum()) / WIRE_SECONDS_PER_EPOCH
        return SlowSource(source, OPEN_SECONDS, READ_SECONDS, wire)

    def run_torch(self, workers: int) -> tuple[DemoRun, Training]:
        watched = watch(
            torch_loader(self.slow_store(), workers, torch.Generator().manual_seed(0)),
            quiet=True,
            keep_batches=0,
        )
        training = Training(self.classes)
        training.run(watched, self.epochs)
        name = f"PyTorch, {workers} workers"
        return DemoRun(name, watched.trace(), training.accuracy(self.test_list)), training

    def predict(self, machine: Machine, step_seconds: float) -> DemoRun:
        config = self._config(open_source(self.train_list), machine)  # the slow store is not touched
        return DemoRun("Penstock, predicted", predict(config, step_seconds=step_seconds), None)

    def run_penstock(self, machine: Machine, trace: Path) -> tuple[DemoRun, Training]:
        training = Training(self.classes)
        with pt.Loader(self._config(self.slow_store(), machine), trace=trace, report=None) as loader:
            training.run(loader, self.epochs)
        return DemoRun("Penstock", read_trace(trace), training.accuracy(self.test_list)), training

    def _config(self, source: Source, machine: Machine) -> LoaderConfig:
        state = torch.Generator().manual_seed(0).get_state()
        return LoaderConfig(
            source,
            batch_size=BATCH_SIZE,
            epochs=self.epochs,
            shuffle=TorchShuffle(len(source), state, persistent_workers=True),
            transforms=TRANSFORMS,
            memory="256 MiB",
            machine=machine,
        )


def run_demo(data: Path | None, out: Path, epochs: int, console: Console) -> list[DemoRun]:
    """Run the demonstration and write its trace, machine and plot into a folder.

    data: an image folder; the handwritten digits unless given.
    Returns: PyTorch's run, the prediction and Penstock's run.

    Raises: ConfigError, DataError for a folder that cannot serve; AssertionError if the two loaders did not
        give the same batches.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = write_digits(out) if data is None else data
    exercise = Exercise(*split_folder(folder, out), epochs)
    store = exercise.slow_store()
    console.print(
        f"{len(store):,} images to train on, behind a store that takes {OPEN_SECONDS * 1e3:.0f} ms per open,\n"
        f"{READ_SECONDS * 1e3:.0f} ms per read, and whose wire carries them all in {WIRE_SECONDS_PER_EPOCH:.0f} s"
    )
    # The model's arithmetic and the loader's decoding share the processors: one is left to the loader.
    torch.set_num_threads(max(1, available_cpus() - 1))

    machine = calibrate(store, decode=decode_with(TRANSFORMS), max_seconds=8)
    (out / "machine.toml").write_text(machine.to_toml())
    step_seconds = measure_step_seconds(exercise.classes)
    workers = best_workers(store, step_seconds)
    console.print(
        f"calibrated: {machine.source.latency_seconds * 1e3:.1f} ms a read; a training step takes "
        f"{step_seconds * 1e3:.1f} ms;\nPyTorch's loader is fastest with {workers} workers"
    )
    predicted = exercise.predict(machine, step_seconds)
    console.print(
        f"predicted, before anything is trained: Penstock will stall {predicted.stall_seconds:.2f} s"
    )

    theirs, their_training = exercise.run_torch(workers)
    ours, our_training = exercise.run_penstock(machine, out / "penstock.trace")
    _check_same_batches(their_training, our_training)

    runs = [theirs, predicted, ours]
    plot_trace([(run.name, run.trace) for run in runs], out / "demo.png")
    console.print(_table(runs))
    console.print(f"Both loaders gave the same {len(our_training.batches):,} batches in the same order.")
    console.print(f"The picture: {out / 'demo.png'}", soft_wrap=True)
    console.print(
        f"What was predicted and missed, epoch by epoch: penstock compare {out / 'penstock.trace'}",
        soft_wrap=True,
    )
    return runs


def _check_same_batches(theirs: Training, ours: Training) -> None:
    assert len(theirs.batches) == len(ours.batches), "the loaders gave different numbers of batches"
    for number, (one, other) in enumerate(zip(theirs.batches, ours.batches, strict=True)):
        assert one.shape == other.shape, f"batch {number} has another size"
        assert np.array_equal(one, other), f"batch {number} holds other samples"


def _table(runs: list[DemoRun]) -> Table:
    """Return the sums of the runs, for 80 columns.

    What a batch took came from the store or from memory. A sample that was read ahead into the memory tier is a
    store read when it is used first.
    """
    table = Table(title="The same training, fed by", box=box.SIMPLE)
    table.add_column("loader", no_wrap=True)
    for heading in ("stall", "in\nepoch 0", "s per\nepoch", "store\nreads", "from\nmemory", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        epochs = run.epochs
        reads = sum(epoch.reads_by_place.get(SOURCE, 0) for epoch in epochs)
        samples = sum(epoch.samples for epoch in epochs)
        seconds = sum(epoch.stall_seconds + epoch.own_seconds for epoch in epochs)
        traced = samples > 0
        table.add_row(
            run.name,
            f"{run.stall_seconds:.2f} s",
            f"{epochs[0].stall_seconds:.2f} s",
            f"{seconds / len(epochs):.2f}",
            f"{reads:,}" if traced else "all",
            f"{samples - reads:,}" if traced else "none",
            "" if run.accuracy is None else f"{run.accuracy:.1%}",
        )
    return table
