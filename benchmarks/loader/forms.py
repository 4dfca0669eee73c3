"""Pictures decoded once for several epochs, beside decoding each time: images per second and processor time.

    python benchmarks/loader/make_images.py      # once: 2,000 photographs, about 105 KB each
    python benchmarks/loader/forms.py [--quick] [--rounds N] [--crops K] [--threads N] [--only PART ...]

RandomResizedCrop 224, flip, normalise, float32 NCHW, batches of 64, five of them ahead, the page cache warm. All epochs
but the first and the last are timed, of six, and of a validation of twelve. `keep="stored"` and `keep="K crops"` take
turns, in another order each round, with the same `memory=`: as much as the crops take; then `keep="decoded"` does so,
with as much as decoded pictures take. The same for a validation (Resize 256, CenterCrop 224), whose one crop serves all
epochs. First the batches of both are compared, bit by bit. Printed: images per second and processor milliseconds per
image, median with least and most, and the ratio of each pair. Target: 2.0 times the images of the plain path for K = 3.

Where FFCV is installed (set_up_peers.sh) its `raw` and `proportion` files stand beside them, which hold decoded pixels
of all or half of the pictures; their bytes, in the page cache, are printed.

Then a disk keeps all, as stored and as pixels, and another run finds these: the page cache is warm, memory keeps 4 MiB,
and batches are compared. The second epoch is not timed either, in which the last of what the first made is written; the
first is, apart. Beside it stand what is predicted and, as no prediction has it, what the start takes: by how much the
first epoch is longer than others where no disk keeps anything, less what is predicted of that.

Beside the ratio, and the first epoch, stands what is predicted (`Loader.predict`) from the rate of the plain path, from
how fast threads finish crops that lie in memory: normalise them into a batch, and nothing else; and of a disk from how
fast threads read as many bytes from it, and write them.

--only: parts to run: crops, decoded, validation, disk, ffcv.

--quick: 12 drawn pictures and one round; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from images import FFCV, Contender, print_heading, run_rounds
from make_images import draw_images
from numpy.typing import NDArray
from peer_protocol import BATCH, CACHE, IMAGES, MEAN, SIZE, STD

from penstock.loader import Loader
from penstock.loader.images import size_of
from penstock.loader.transforms import (
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
    compile_pipeline,
)
from penstock.loader.transforms.compiled import CROP_KERNELS, GROUP_KERNELS, KERNELS
from penstock.loader.transforms.crops import CropPass
from penstock.loader.transforms.geometry import pixel_bytes
from penstock.loader.transforms.pipeline import Pipeline
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.in_threads import repeat_until
from penstock.store.direct import READ_SAMPLES
from penstock.store.disk import DiskTier

TAIL = (ToTensor(), Normalize(MEAN, STD))
TRAINING = (RandomResizedCrop(SIZE), RandomHorizontalFlip(), *TAIL)
VALIDATION = (Resize(256), CenterCrop(SIZE), *TAIL)
#: Epochs of a run. The first and the last are not timed: it is as far ahead at the end of the others as at their begin.
#: Nor is the second where a disk keeps what the first has made.
EPOCHS = {TRAINING: 6, VALIDATION: 12}
#: Batches ahead: a loader that looks for their number takes new memory for them in an epoch that is timed.
AHEAD = 5
TARGET = 2.0
#: Crops that a thread finishes over and over, in an order that no processor foresees, and batches that it finishes them
#: into, more than a processor's caches hold; and for how long, which is as long as it reads from a disk.
_CROPS, _BATCHES, _MEASURED_SECONDS = 8 * BATCH, 2, 1.0
#: That the disks are said to read: of slower ones, samples are kept as stored. They are warm.
DISK_BYTES_PER_SECOND = 5e9
#: What a run takes beside what it keeps: slots, buffers, bytes on their way.
OTHER_BYTES = 512 << 20
PARTS = ["crops", "decoded", "validation", "disk", "ffcv"]


def loader_of(
    images: Path,
    transforms: tuple[Any, ...],
    keep: str,
    memory: int,
    threads: int,
    machine: Machine | None = None,
) -> Loader:
    """Return what loads a run. machine: whose disks it uses."""
    return Loader(
        images,
        batch_size=BATCH,
        epochs=EPOCHS[transforms],
        seed=1,
        transforms=transforms,
        keep=keep,
        memory=memory,
        decoders=threads,
        prefetch=AHEAD,
        machine=machine,
        report=None,
    )


def epochs_of(*run: Any) -> Iterator[Loader]:
    """Yield how to go through each epoch of a run; its arguments are those of `loader_of`."""
    with loader_of(*run) as loader:
        for _ in range(loader.plan.epochs):
            yield loader


def checksum(*run: Any) -> int:
    """Return one number that depends on all batches of a run."""
    value = 0
    for epoch in epochs_of(*run):
        for pictures, labels in epoch:
            value = zlib.crc32(labels, zlib.crc32(pictures, value))
    return value


def measure(*run: Any) -> tuple[float, float, float]:
    """Return images per second and processor milliseconds per image, of the timed epochs; the former of the first."""
    images, seconds, processor_seconds, untimed, first = 0, 0.0, 0.0, untimed_epochs(*run), 0.0
    for number, epoch in enumerate(epochs_of(*run)):
        begin, worked = time.perf_counter(), processor_time()
        count = sum(len(labels) for _, labels in epoch)
        took = time.perf_counter() - begin
        first = first or count / took
        if untimed <= number < epoch.plan.epochs - 1:
            images += count
            seconds += took
            processor_seconds += processor_time() - worked
    return images / seconds, 1000 * processor_seconds / images, first


def untimed_epochs(*run: Any) -> int:
    """Return how many epochs at the begin of a run are not timed; its arguments are those of `loader_of`."""
    return 1 if len(run) < len(signature(loader_of).parameters) else 2


def finished_crops(
    pipeline: Pipeline, crops: NDArray[np.uint8], batches: NDArray[np.float32]
) -> Iterator[int]:
    """Finish crops into batches, again and again; yield their bytes each time."""
    front, order = CropPass(pipeline), np.random.default_rng(0).permutation(_CROPS)
    while True:
        for first in range(0, _CROPS, BATCH):
            row = first % len(batches)
            group = [crops[index] for index in order[first : first + BATCH]]
            assert front.finish_group(group, batches, range(row, row + BATCH)), "it is compiled"
            yield BATCH * crops[0].nbytes


def finishing_curve(threads: int) -> Curve:
    """Return the bytes of crops a second that one thread finishes, and as many together as there are processors for."""
    return Curve(tuple((count, finishing_rate(count)) for count in sorted({1, at_once(threads)})))


def at_once(threads: int) -> int:
    """Return how many of so many threads compute at once."""
    return min(threads, len(os.sched_getaffinity(0)))


def finishing_rate(threads: int) -> float:
    """Return the bytes of crops a second that so many threads finish together."""
    pipeline = compile_pipeline(VALIDATION, seed=0)
    crops = np.random.default_rng(0).integers(0, 256, (_CROPS, SIZE, SIZE, 3), np.uint8)
    # Each has its own, which the kernel has supplied already.
    shape = _BATCHES * BATCH, *pipeline.output_shape
    works = [
        partial(finished_crops, pipeline, crops.copy(), np.ones(shape, np.float32)) for _ in range(threads)
    ]
    return repeat_until(time.perf_counter() + _MEASURED_SECONDS, time.perf_counter, works)


def with_curves(disk: StorageClass, folder: Path, nbytes: int, threads: int) -> StorageClass:
    """Return a disk with the bytes/s at which threads read samples of one size from it, a batch at a time, and write.

    threads: that read: one, as many of these as compute at once, and all. So many write as the disk says.
    """
    content = bytes(nbytes)

    def in_tier(name: str, work: Callable[[DiskTier, int], Iterator[int]], count: int) -> float:
        # Each thread has samples of its own, and writes most of them for the first time.
        sizes = np.full(_CROPS * count, nbytes, np.int64)
        with closing(DiskTier(folder / name, int(sizes.sum()), bytes(16), sizes)) as tier:
            works = [partial(work, tier, number) for number in range(count)]
            return repeat_until(time.perf_counter() + _MEASURED_SECONDS, time.perf_counter, works)

    def write(tier: DiskTier, number: int) -> Iterator[int]:
        samples = range(number * _CROPS, (number + 1) * _CROPS)
        while True:
            for sample in samples:
                assert tier.put(sample, content)
                yield nbytes
            tier.evict(np.array(samples))

    def read(tier: DiskTier, number: int) -> Iterator[int]:
        # As in a run, whose batches pass through the caches in between, they have nothing of what is read to.
        samples, into = number * _CROPS + np.arange(_CROPS), np.ones(_CROPS * nbytes, np.uint8)
        for sample in samples.tolist():
            tier.put(sample, content)
        order = np.random.default_rng(number).permutation(samples)
        while True:
            for first in range(0, _CROPS, BATCH):
                some = order[first : first + BATCH]
                assert not tier.read_group(some, into, nbytes * np.arange(first, first + BATCH + 1))
                yield BATCH * nbytes

    READ_SAMPLES.wait()
    reading, writing = (
        Curve(
            tuple(
                (count, in_tier(f"{what.__name__} {count}", what, count))
                for count in sorted({1, at_once(most), most})
            )
        )
        for what, most in ((read, threads), (write, disk.writing_threads))
    )
    return replace(disk, read=reading, write=writing)


def predicted_rates(
    stored_rate: float, costs: Curve, disk: StorageClass | None, *run: Any
) -> tuple[float, float]:
    """Return images per second of the timed epochs, and of the first, as predicted by what decoding each time reaches.

    costs: of finishing crops. disk: that keeps pixels, with what it costs.
    """
    images, _, _, memory, *_ = run
    sizes, processors = [each.stat().st_size for each in images.glob("*/*.jpg")], len(os.sched_getaffinity(0))
    tiers = tuple(StorageClass(name, memory, 2, costs) for name in ("staging", "memory"))
    machine = Machine(
        SharedStore(None, Curve.flat(5e9), threads=32),
        tiers if disk is None else (*tiers, disk),
        preprocess_bytes_per_second=stored_rate * statistics.mean(sizes) / processors,
        processors=processors,
    )
    with loader_of(*run) as loader:
        predicted = loader.predict(machine=machine, step_seconds=0.0).epochs()
    seconds = [epoch.stall_seconds + epoch.own_seconds for epoch in predicted]
    timed = seconds[untimed_epochs(*run) : -1]
    return len(sizes) * len(timed) / sum(timed), len(sizes) / seconds[0]


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def compare(
    images: Path, transforms: tuple[Any, ...], keep: str, rounds: int, threads: int, crop_bytes: int
) -> None:
    """Time both sides in turns, and print them."""
    count = sum(1 for _ in images.glob("*/*.jpg"))
    memory = count * crop_bytes + OTHER_BYTES
    sides = {each: (images, transforms, each, memory, threads) for each in ("stored", keep)}
    if checksum(*sides["stored"]) != checksum(*sides[keep]):
        raise SystemExit(f"batches with keep={keep!r} are others than without")
    found: dict[str, list[tuple[float, float, float]]] = {each: [] for each in sides}
    order = random.Random(0)
    for _ in range(rounds):
        for each in order.sample(sorted(sides), len(sides)):
            found[each].append(measure(*sides[each]))
    for each, figures in found.items():
        rates, milliseconds, _ = map(list, zip(*figures, strict=True))
        print(
            f"{each:14} {spread(rates, ',.0f'):>28} images/s {spread(milliseconds, '.3f'):>26} ms of CPU an image"
        )
    pairs = list(zip(found[keep], found["stored"], strict=True))
    rates = [ours[0] / plain[0] for ours, plain in pairs]
    work = [plain[1] / ours[1] for ours, plain in pairs]
    wanted = "" if keep == "crops" else f", wanted {TARGET}"
    stored_rate = statistics.median(rate for rate, *_ in found["stored"])
    costs = finishing_curve(threads)
    wanted += f", predicted {predicted_rates(stored_rate, costs, None, *sides[keep])[0] / stored_rate:.2f}"
    print(f"{keep} / stored: images/s {spread(rates, '.2f')}{wanted}; CPU {spread(work, '.2f')} times less\n")


def compare_on_disk(images: Path, transforms: tuple[Any, ...], keep: str, rounds: int, threads: int) -> None:
    """Time a disk that keeps samples as stored, one that keeps pixels, and the next run over the latter, in turns."""
    each_bytes = 3 * SIZE * SIZE if keep == "crops" else picture_bytes(images)
    count = sum(1 for _ in images.glob("*/*.jpg"))
    nbytes = count * (each_bytes if keep == "crops" else 2 * each_bytes)

    def run_on(path: str, form: str) -> tuple[StorageClass, tuple[Any, ...]]:
        fast, read = Curve.flat(5e9), Curve.flat(DISK_BYTES_PER_SECOND)
        disk = StorageClass("disk", nbytes, 2, read, backend="filesystem", path=path)
        memory = (
            StorageClass(name, size, 2, fast) for name, size in (("staging", 1 << 30), ("memory", 4 << 20))
        )
        machine = Machine(SharedStore(None, fast, threads=8), (*memory, disk))
        return disk, (images, transforms, form, OTHER_BYTES, threads, machine)

    found: dict[str, list[tuple[float, float, float]]] = {}
    values, starts = set[int](), list[float]()
    for _ in range(rounds):
        rate, _, first = measure(images, transforms, "stored", OTHER_BYTES, threads)
        starts.append(count / first - count / rate)
        with tempfile.TemporaryDirectory() as folder:
            for name, form in (("stored", "stored"), (keep, keep), (f"{keep}, started again", keep)):
                _, run = run_on(f"{folder}/{form}", form)
                found.setdefault(name, []).append(measure(*run))
                values.add(checksum(*run))
    if len(values) > 1:
        raise SystemExit(f"batches with keep={keep!r} on a disk are others than without")
    for name, figures in found.items():
        rates, milliseconds, _ = map(list, zip(*figures, strict=True))
        print(
            f"{name:24} {spread(rates, ',.0f'):>24} images/s {spread(milliseconds, '.3f'):>24} ms of CPU an image"
        )
    stored_rate = statistics.median(rate for rate, *_ in found["stored"])
    costs, predicted = finishing_curve(threads), dict[str, tuple[float, float]]()
    plain_rate, plain_first = predicted_rates(
        stored_rate, costs, None, images, transforms, "stored", OTHER_BYTES, threads
    )
    starts = [each - (count / plain_first - count / plain_rate) for each in starts]
    for form in ("stored", keep):
        with tempfile.TemporaryDirectory() as folder:
            disk, run = run_on(f"{folder}/{form}", form)
            written_bytes = each_bytes if form == keep else mean_bytes(images)
            disk = with_curves(disk, Path(folder), written_bytes, threads)
            predicted[form] = predicted_rates(stored_rate, costs, disk, *run)
    for name in (keep, f"{keep}, started again"):
        ratios = [ours[0] / plain[0] for ours, plain in zip(found[name], found["stored"], strict=True)]
        print(
            f"{name} / stored, on a disk: images/s {spread(ratios, '.2f')}, predicted "
            f"{predicted[keep][0] / stored_rate:.2f}"
        )
    for form, (_, rate) in predicted.items():
        firsts = spread([count / first for *_, first in found[form]], ".2f")
        print(
            f"{form}, the first epoch, which writes: {firsts} s, predicted {count / rate:.2f}, and "
            f"{spread(starts, '.2f')} for the start"
        )
    print()


def mean_bytes(images: Path) -> int:
    """Return what a picture takes as stored, in the mean."""
    return round(statistics.mean(each.stat().st_size for each in images.glob("*/*.jpg")))


def picture_bytes(images: Path) -> int:
    """Return what a decoded picture takes in memory: all are of one size."""
    size = size_of(np.fromfile(next(images.glob("*/*.jpg")), np.uint8))
    assert size is not None, "it was made as a JPEG file"
    return pixel_bytes(*size)


def beside_ffcv(images: Path, rounds: int, threads: int) -> None:
    """Print what FFCV makes of the same pictures, decoded when they were written."""
    peers = [
        Contender(
            f"FFCV {mode}",
            [str(FFCV), "peer_ffcv.py", "--images", str(images), "--threads", str(threads), "--mode", mode],
        )
        for mode in ("raw", "proportion")
    ]
    run_rounds(peers, rounds)
    for mode, peer in zip(("raw", "proportion"), peers, strict=True):
        (path,) = CACHE.glob(f"ffcv-{mode}-*.beton")
        each = path.stat().st_size / sum(1 for _ in images.glob("*/*.jpg"))
        print(
            f"{peer.name:14} {spread(peer.rates, ',.0f'):>28} images/s, {each:,.0f} bytes an image in the page cache"
        )


def main(argv: list[str] | None = None) -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crops", type=int, default=3, help="for how many epochs a picture is decoded")
    parser.add_argument("--threads", type=int, default=cores + 1, help="decoding threads")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="drawn pictures, one round")
    options = parser.parse_args(argv)
    for part in (KERNELS["float32"], GROUP_KERNELS["group_float32"], *CROP_KERNELS.values()):
        part.wait()
    with tempfile.TemporaryDirectory() as place:
        images = options.images
        if options.quick:
            images = Path(place)
            draw_images(images, 12, 400, 500)
        elif not images.exists():
            raise SystemExit("no images: run benchmarks/loader/make_images.py first")
        rounds, crop_bytes = 1 if options.quick else options.rounds, 3 * SIZE * SIZE
        print_heading(images, options.threads)
        # Of K crops, (K - 1) / 2 are there on average; and a little more, as they stray.
        kept = (options.crops - 1) * crop_bytes // 2 * 5 // 4
        parts = {
            "crops": [partial(compare, images, TRAINING, f"{options.crops} crops", crop_bytes=kept)],
            "decoded": [partial(compare, images, TRAINING, "decoded", crop_bytes=picture_bytes(images))],
            "validation": [partial(compare, images, VALIDATION, "crops", crop_bytes=crop_bytes)],
            "disk": [
                partial(compare_on_disk, images, TRAINING, "decoded"),
                partial(compare_on_disk, images, VALIDATION, "crops"),
            ],
        }
        for part in options.only:
            for run in parts.get(part, []):
                run(rounds=rounds, threads=options.threads)
        if "ffcv" in options.only and FFCV.exists() and not options.quick:
            beside_ffcv(images, rounds, min(options.threads, cores))


if __name__ == "__main__":
    main()
