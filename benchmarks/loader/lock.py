"""How much of the interpreter's lock an image takes, and what a second decoding thread brings.

    python benchmarks/loader/lock.py [--sizes 16 64 448] [--rounds N] [--quick]

JPEG files of each size, made here (smooth pictures with noise, quality 90), are loaded by one decoding thread and by
two: random crop to the size or 224, mirror image, normalise, float32, batches of 64, the page cache warm. Printed for
each size, as medians over rounds:

    images/s    with one thread and with two, and their ratio, round by round
    CPU us      processor time per image, of all threads, with two that decode
    lock us     what of it is not spent within compiled loops, which hold no lock: at most so long is the lock held.
                What the kernel does for threads that wake each other counts, too, though it needs no lock
    cores       CPU us over lock us: so many processors one process can keep busy, if memory and storage allow
    expert      with --expert: images/s of a DataLoader written by an expert (peer_torch.py), the best of one and two
                workers of each round, and how much faster the better of ours is

Nothing else should run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import io
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from peer_protocol import BATCH, MEAN, STD
from PIL import Image

from penstock.compiling import without_plain_forms
from penstock.flow import engine
from penstock.loader import Loader
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.machine_code import Loop

LABELS = 4
#: Files of a size: an epoch then takes about half a second.
PIXELS = 6_000_000
MOST_FILES, LEAST_FILES = 8192, 768


class Outside:
    """Sums the processor time that threads spend within compiled loops."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._sums: list[list[float]] = []
        self._run = Loop._run

    @property
    def seconds(self) -> float:
        return sum(each[0] for each in self._sums)

    def watch(self) -> None:
        """Count every call of a loop from now on."""

        def run(loop: Loop, words: bytes, native: Any) -> Any:
            if native is not loop._call:
                return self._run(loop, words, native)
            mine = self._mine()
            begin = time.thread_time()
            try:
                return self._run(loop, words, native)
            finally:
                mine[0] += time.thread_time() - begin

        setattr(Loop, "_run", run)  # noqa: B010 - mypy refuses the plain form

    def _mine(self) -> list[float]:
        found: list[float] | None = getattr(self._threads, "sum", None)
        if found is None:
            found = self._threads.sum = [0.0]
            self._sums.append(found)
        return found


class Epoch(NamedTuple):
    """Of one image: seconds, processor seconds, and those of them outside of compiled loops."""

    seconds: float
    cpu_seconds: float
    lock_seconds: float


def encoded(size: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    coarse: NDArray[np.uint8] = rng.integers(0, 256, (4, 4, 3), np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)).astype(int)
    noisy = np.clip(picture + rng.integers(-12, 13, picture.shape), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def make_files(folder: Path, size: int, count: int) -> None:
    for label in range(LABELS):
        (folder / str(label)).mkdir(parents=True)
    different = [encoded(size, seed) for seed in range(min(count, 64))]
    for number in range(count):
        (folder / str(number % LABELS) / f"{number:05d}.jpg").write_bytes(different[number % len(different)])


def run_epoch(folder: Path, size: int, decoders: int, outside: Outside) -> Epoch:
    """Time the second of three epochs: the loader is as far ahead when it ends as when it begins."""
    transforms = (RandomResizedCrop(min(size, 224)), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD))
    with (
        without_plain_forms(),
        Loader(
            folder, batch_size=BATCH, epochs=3, transforms=transforms, decoders=decoders, report=None
        ) as loader,
    ):
        for _ in loader:
            pass
        begin, cpu, loops = time.perf_counter(), time.process_time(), outside.seconds
        images = sum(len(labels) for _, labels in loader)
        seconds, cpu, loops = time.perf_counter() - begin, time.process_time() - cpu, outside.seconds - loops
    return Epoch(seconds / images, cpu / images, (cpu - loops) / images)


def median_of(epochs: list[Epoch], name: str) -> float:
    values: list[float] = [getattr(epoch, name) for epoch in epochs]
    return statistics.median(values)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 448])
    parser.add_argument("--threads", type=int, nargs=2, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--expert", action="store_true", help="time a DataLoader, too")
    parser.add_argument("--quick", action="store_true", help="few files and one round: shows that it runs")
    options = parser.parse_args(argv)
    few, many = options.threads
    print(
        f"{datetime.date.today()}  {platform.processor() or platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {few} and {many} decoding threads"
    )
    columns = f"{'size':>6} {'images/s':>16} {'ratio':>18} {'CPU us':>8} {'lock us':>18} {'cores':>6}"
    print(columns + "  expert" * options.expert)
    engine._WORTH_COMPILING_SAMPLES = 0  # as in a training that is longer than these epochs
    outside = Outside()
    outside.watch()
    with tempfile.TemporaryDirectory() as root:
        for size in options.sizes:
            count = LEAST_FILES if options.quick else min(MOST_FILES, max(LEAST_FILES, PIXELS // size**2))
            folder = Path(root) / str(size)
            make_files(folder, size, count)
            run_epoch(folder, size, many, outside)
            epochs: dict[int, list[Epoch]] = {few: [], many: []}
            expert = Expert(folder, min(size, 224)) if options.expert else None
            theirs: list[float] = []
            for number in range(1 if options.quick else options.rounds):
                if expert is not None:
                    theirs.append(expert.seconds())
                for threads in (few, many) if number % 2 else (many, few):
                    epochs[threads].append(run_epoch(folder, size, threads, outside))
            ratios = [one.seconds / two.seconds for one, two in zip(epochs[few], epochs[many], strict=True)]
            rates = " ".join(f"{1 / median_of(epochs[threads], 'seconds'):,.0f}" for threads in (few, many))
            cpu, lock = median_of(epochs[many], "cpu_seconds"), median_of(epochs[many], "lock_seconds")
            locks = [1e6 * epoch.lock_seconds for epoch in epochs[many]]
            print(
                f"{size:6} {rates:>16} {with_spread(ratios, 2):>18} {1e6 * cpu:8.1f} "
                f"{with_spread(locks, 1):>18} {cpu / lock:6.1f}  {against(theirs, epochs)}"
            )


def against(theirs: list[float], epochs: dict[int, list[Epoch]]) -> str:
    ours = [min(epoch.seconds for epoch in each) for each in zip(*epochs.values(), strict=True)]
    if not theirs:
        return ""
    ratios = [other / mine for other, mine in zip(theirs, ours, strict=True)]
    return f"{1 / statistics.median(theirs):,.0f} {with_spread(ratios, 2)}"


class Expert:
    """DataLoaders with one and two workers over the same files, bilinear."""

    def __init__(self, folder: Path, size: int) -> None:
        torch = importlib.import_module("torch")
        peer = importlib.import_module("peer_torch")
        self._loaders = [
            torch.utils.data.DataLoader(
                peer.BatchedCrops(folder, size),
                BATCH,
                shuffle=True,
                num_workers=workers,
                persistent_workers=True,
                worker_init_fn=peer.start_worker,
                collate_fn=peer.as_it_is,
            )
            for workers in (1, 2)
        ]
        self.seconds()

    def seconds(self) -> float:
        """Return the seconds per image of an epoch, of the faster one."""
        return min(map(self._seconds, self._loaders))

    @staticmethod
    def _seconds(loader: Any) -> float:
        begin = time.perf_counter()
        images = sum(len(labels) for _, labels in loader)
        return (time.perf_counter() - begin) / images


def with_spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
