"""A training on a slow store: PyTorch's loader at its best setting and Penstock in turn, beside the floor.

    make bench NAME=loader/slow_store            # about three minutes; ARGS="--rounds 5" for more

The store (`SlowSource`, the same for both): 5 ms per open and 5 ms per read, which overlap, and one wire
of 50 MB/s for all readers. 2,000 JPEGs of about 100 KB (benchmarks/loader/make_images.py), batches of 64, 3 epochs,
100 ms per step. A step is a sleep: the accelerator computes, this host does not; what decoding costs is not hidden by
it. Clocks start at the construction of each loader. Both decode with the same pipeline.

Exits with a failure if Penstock stalls longer than the floor and 4 % of the run, if the prediction is off by more than
10 %, or if the store is read more than 1 % beyond the bound.

The floor is what any loader with this memory must wait: the bytes that must have crossed the wire by an epoch's end,
less the steps that ran meanwhile. The bound on reads is F + (E - 1)(F - C), C the samples that the memory holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

import penstock.torch as pt
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.machine import Machine, StorageClass
from penstock.measure.calibrate import calibrate, decode_with
from penstock.measure.demo import StoredImages, many_workers
from penstock.measure.slow_source import SlowSource
from penstock.measure.watch import watch
from penstock.store import ImageFolder, Source
from penstock.trace import SOURCE, EpochMetrics

IMAGES = Path(__file__).resolve().parent.parent / ".cache" / "images"
OPEN_SECONDS = READ_SECONDS = 5e-3
WIRE_BYTES_PER_SECOND = 50e6
BATCH_SIZE = 64
EPOCHS = 3
STEP_SECONDS = 0.1
TRANSFORMS = (
    RandomResizedCrop(224),
    RandomHorizontalFlip(),
    ToTensor(),
    Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)


def slow(source: Source) -> SlowSource:
    return SlowSource(source, OPEN_SECONDS, READ_SECONDS, WIRE_BYTES_PER_SECOND)


def train(loader: Iterable[tuple[Tensor, Tensor]]) -> None:
    with many_workers():
        for _ in range(EPOCHS):
            for _images, _labels in loader:
                time.sleep(STEP_SECONDS)


def run_torch(source: Source, workers: int) -> list[float]:
    """Return the stall of each epoch, seconds; the first holds the start of the workers."""
    begin = time.perf_counter()
    with many_workers():
        loader = DataLoader(
            StoredImages(slow(source), TRANSFORMS),
            BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=4,
        )
    watched = watch(loader, quiet=True, keep_batches=0)
    construction = time.perf_counter() - begin
    train(watched)
    stalls = [epoch.stall_seconds for epoch in watched.trace().epochs()]
    stalls[0] += construction
    return stalls


def run_penstock(
    source: Source, machine: Machine, memory_bytes: int, trace: Path | None
) -> tuple[list[EpochMetrics], float, Any]:
    """Return the sums of each epoch, the seconds of construction and start, and the prediction."""
    begin = time.perf_counter()
    loader = pt.Loader(
        slow(source),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        transforms=TRANSFORMS,
        memory=memory_bytes,
        machine=machine,
        trace=trace,
        report=None,
    )
    loader.start()
    construction = time.perf_counter() - begin
    with loader:
        train(loader)
        metrics = loader.metrics
    return metrics, construction, loader.predict(step_seconds=STEP_SECONDS)


def keeping(machine: Machine, tier_bytes: int) -> Machine:
    """Return the machine with a memory tier of this capacity."""
    fast = machine.storage[-1].read
    storage = [machine.storage[0]]
    if tier_bytes:
        storage.append(StorageClass("memory", tier_bytes, 2, fast))
    return Machine(
        machine.source,
        tuple(storage),
        preprocess_bytes_per_second=machine.preprocess_bytes_per_second,
        decode_threads=machine.decode_threads,
    )


def floor_seconds(source: Source, kept_bytes: int) -> float:
    """Return the least total stall: at no epoch's end can more have been consumed than has crossed the wire."""
    steps = -(-len(source) // BATCH_SIZE)
    total_bytes = int(source.sizes_bytes.sum())
    crossing_bytes = [total_bytes] + [total_bytes - min(kept_bytes, total_bytes)] * (EPOCHS - 1)
    crossed_seconds = np.cumsum(crossing_bytes) / WIRE_BYTES_PER_SECOND
    hidden_seconds = (np.arange(1, EPOCHS + 1) * steps - 1) * STEP_SECONDS
    return max(0.0, float((crossed_seconds - hidden_seconds).max()))


#: Over the floor, as a share of the run; predicted against measured stall; reads against their bound.
MOST_OVER_FLOOR, MOST_MISPREDICTED, MOST_READS_OVER = 0.04, 0.1, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=Path, default=IMAGES, help="an image folder of about 2,000 JPEGs")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[8, 16, 32], help="PyTorch's, to choose the best of"
    )
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="keep the last round's, for penstock compare"
    )
    options = parser.parse_args()
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    if not options.images.is_dir():
        parser.error(f"{options.images} is missing: run python benchmarks/loader/make_images.py")
    source = ImageFolder(options.images)
    total_bytes = int(source.sizes_bytes.sum())
    print(f"{len(source)} JPEGs, {total_bytes / 1e6:.0f} MB")

    machine = calibrate(slow(source), decode=decode_with(TRANSFORMS), max_seconds=10)
    print(f"calibrated: latency {machine.source.latency_seconds * 1e3:.1f} ms, wire {machine.source.read}")

    settings = [
        ("no memory", 256 << 20, 0),
        ("half in memory", 2 << 30, total_bytes // 2),
        ("all in memory", 2 << 30, total_bytes),
    ]
    rivals: dict[int, list[list[float]]] = {workers: [] for workers in options.workers}
    ours: dict[str, list[tuple[list[float], float, int]]] = {name: [] for name, _, _ in settings}
    for round_number in range(options.rounds):
        for workers, results in rivals.items():
            results.append(run_torch(source, workers))
        for name, memory_bytes, tier_bytes in settings:
            trace = None if options.traces is None else options.traces / f"{name.replace(' ', '-')}.trace"
            metrics, construction, prediction = run_penstock(
                source, keeping(machine, tier_bytes), memory_bytes, trace
            )
            stalls = [epoch.stall_seconds for epoch in metrics]
            stalls[0] += construction
            predicted = sum(epoch.stall_seconds for epoch in prediction.epochs())
            reads = sum(epoch.reads_by_place.get(SOURCE, 0) for epoch in metrics)
            ours[name].append((stalls, predicted, reads))
        print(f"round {round_number + 1} of {options.rounds} done")

    best = min(rivals, key=lambda workers: _median_total(rivals[workers]))
    torch_stall = _median_total(rivals[best])
    print(
        f"\nstall, seconds: median [least .. most] of {options.rounds} rounds, epochs 1 / 2 / 3 of the median round"
    )
    _print_row(f"PyTorch, {best} workers", rivals[best], "")
    steps_seconds = EPOCHS * -(-len(source) // BATCH_SIZE) * STEP_SECONDS
    missed = []
    for name, _, tier_bytes in settings:
        floor = floor_seconds(source, tier_bytes)
        totals = [epochs for epochs, _, _ in ours[name]]
        measured = _median_total(totals)
        predicted = ours[name][0][1]
        kept = int(np.searchsorted(np.cumsum(source.sizes_bytes), tier_bytes, side="right"))
        bound = len(source) + (EPOCHS - 1) * (len(source) - kept)
        over = (measured - floor) / (steps_seconds + measured)
        mispredicted = predicted / measured - 1
        all_reads = statistics.median(reads for _, _, reads in ours[name])
        _print_row(
            f"Penstock, {name}",
            totals,
            f"floor {floor:.2f}, over it by {over:.1%} of the run; "
            f"predicted {predicted:.2f} ({mispredicted:+.1%}); reads {all_reads:.0f}, bound {bound} "
            f"({all_reads / bound - 1:+.2%}); PyTorch stalls {torch_stall / measured:.1f} x as long",
        )
        within = over <= MOST_OVER_FLOOR and abs(mispredicted) <= MOST_MISPREDICTED
        if not within or all_reads > bound * (1 + MOST_READS_OVER):
            missed.append(name)
    if missed:
        sys.exit(f"targets missed: {', '.join(missed)}")


def _median_total(stalls: list[list[float]]) -> float:
    return statistics.median(sum(epochs) for epochs in stalls)


def _print_row(name: str, stalls: list[list[float]], rest: str) -> None:
    totals = [sum(epochs) for epochs in stalls]
    middle = sorted(stalls, key=sum)[len(stalls) // 2]
    by_epoch = " / ".join(f"{seconds:.2f}" for seconds in middle)
    print(
        f"{name:26} {statistics.median(totals):6.2f} [{min(totals):.2f} .. {max(totals):.2f}]  ({by_epoch})  {rest}"
    )


if __name__ == "__main__":
    main()
