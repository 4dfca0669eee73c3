"""Data three times the memory, the rest on a local disk: reads of the store and stall beside LRU; the disk beside fio.

    make bench NAME=loader/tiers                 # about three minutes; ARGS="--rounds 5" for more

The store (`SlowSource`): 10 ms a read, which overlap, and one wire of 50 MB/s. Samples of 100 KB that nothing
is computed of, batches of 32, 3 epochs; a step is a sleep. Runs take turns:

    all in memory         what the others are compared with
    a third, disk         memory for a third, a disk for the rest
    started again         the same once more: the disk has it all
    a third, small disk   memory for a third, a disk for a third: the last third is read in every epoch
    a third, LRU          memory for a third as the page cache would have it: whatever was read last

Before each run its stall is predicted, by the figures of the store above and those that a loader takes for a disk that
nobody measured. Wanted: within 10 % of the stall, or 1 % of the run.

The bound on reads of the store is F + (E - 1) (F - C), C the samples that memory and disk hold; started again, F - C an
epoch. A tier's reads, 100 KB each, cold, past the page cache and through it, stand beside those of fio (the Debian
package) and of a bare loop at the same depth and size, in turns. A loader reads to pages of 2 MB where the kernel has
them, to which a direct read is faster: groups that a thread uses at once to memory of its own (`new_buffer`), and what
readers bring for later to memory that goes round (`Reused`). The bare loop reads to `new_buffer`'s. fio has pages of
4 KiB, and of 2 MB as well where root has set some apart, as by `sysctl vm.nr_hugepages=16`. The processor time of the
tier, cold and warm, stands beside that of the bare loop. From the rates past the page cache and through it follows
which share of a tier that would have to hold for reads through it to pay.

--quick: a tenth of the samples, one round; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fio_rates import fio_rate

from penstock.loader import Loader
from penstock.loader.local_disk import padded_bytes
from penstock.loader.reused import Reused
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.pagecache import drop_cached
from penstock.measure.slow_source import SlowSource
from penstock.store import FlatFolder
from penstock.store.direct import BLOCK_BYTES, READ_SAMPLES, new_buffer
from penstock.store.disk import DiskTier
from penstock.store.group import Bytes, Ids
from penstock.store.write_behind import WriteBehind

NBYTES, BATCH, EPOCHS = 98_304, 32, 3
#: Of a sample of the tier beside a bare loop of NBYTES, which are as many blocks: samples of files end within one.
TIER_NBYTES = 98_001
LATENCY_SECONDS, WIRE_BYTES_PER_SECOND, STEP_SECONDS = 10e-3, 50e6, 0.05
DEPTHS = (1, 4)
#: Samples of one call of a tier: about as many as a loader's threads read together.
GROUP = 8
#: Of memory for them, with what lies between samples that are not copied.
GROUP_BYTES = GROUP * (NBYTES + 2 * BLOCK_BYTES) + BLOCK_BYTES


class CountedStore(SlowSource):
    """A slow store that counts its reads, behind an LRU cache of so many bytes."""

    fingerprint = "benchmarks/loader/tiers"

    def __init__(self, folder: Path, lru_bytes: int = 0) -> None:
        source = FlatFolder(folder, extensions=None)
        super().__init__(source, 0.0, LATENCY_SECONDS, WIRE_BYTES_PER_SECOND)
        self.reads = 0
        self._lru_bytes, self._cached = lru_bytes, OrderedDict[int, bytes]()
        self._lock = threading.Lock()

    def read_into(self, sample: int, buffer: memoryview) -> int:
        with self._lock:
            found = self._cached.pop(sample, None)
            if found is not None:
                self._cached[sample] = found
        if found is not None:
            buffer[: len(found)] = found
            return len(found)
        size = super().read_into(sample, buffer)
        with self._lock:
            self.reads += 1
            if self._lru_bytes:
                self._cached[sample] = bytes(buffer[:size])
                if len(self._cached) * NBYTES > self._lru_bytes:
                    self._cached.popitem(last=False)
        return size


def run(
    folder: Path, kept_bytes: int, disk: dict[str, int] | None, lru_bytes: int, step_seconds: float
) -> tuple[int, float, float, float]:
    """Return the reads of the store, the stall, the run, and the stall that was predicted; seconds.

    kept_bytes: that the memory tier may hold.
    """
    store = CountedStore(folder, lru_bytes)
    fast, slow = Curve.flat(5e9), Curve.flat(WIRE_BYTES_PER_SECOND)
    tiers = [StorageClass("memory", kept_bytes, 2, fast)] if kept_bytes else []
    machine = Machine(
        SharedStore(None, slow, LATENCY_SECONDS, threads=32),
        (StorageClass("staging", 1 << 30, 2, fast), *tiers),
    )
    with Loader(
        store,
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=3,
        machine=machine,
        memory=kept_bytes + (256 << 20),
        local_disk=disk,
        transforms=[DecodeRaw("uint8", (NBYTES,))],
        dtype="uint8",
        report=None,
    ) as loader:
        predicted = sum(epoch.stall_seconds for epoch in loader.predict(step_seconds=step_seconds).epochs())
        begin = time.perf_counter()
        for _ in range(EPOCHS):
            for _batch in loader:
                time.sleep(step_seconds)
        seconds = time.perf_counter() - begin
        stall = sum(epoch.stall_seconds for epoch in loader.metrics)
    store.close()
    return store.reads, stall, seconds, predicted


def trainings(folder: Path, samples: int, rounds: int, step_seconds: float) -> None:
    total, third = samples * NBYTES, samples // 3 * NBYTES
    results: dict[str, list[tuple[int, float, float, float]]] = {}
    bounds: dict[str, int] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            whole, small = {f"{place}/whole": total}, {f"{place}/small": third}
            left = samples - samples // 3
            for name, kept, disk, lru, bound in (
                ("all in memory", total, None, 0, samples),
                ("a third, disk", third, whole, 0, samples),
                ("started again", third, whole, 0, 0),
                ("a third, small disk", third, small, 0, samples + (EPOCHS - 1) * (left - samples // 3)),
                ("a third, LRU", 0, None, third, samples + (EPOCHS - 1) * left),
            ):
                bounds[name] = bound
                results.setdefault(name, []).append(run(folder, kept, disk, lru, step_seconds))
    reference = statistics.median(stall for _, stall, *_ in results["all in memory"])
    for name, found in results.items():
        reads = statistics.median(reads for reads, *_ in found)
        stalls = [stall for _, stall, *_ in found]
        seconds = statistics.median(seconds for _, _, seconds, _ in found)
        predicted = statistics.median(predicted for *_, predicted in found)
        off = (predicted - statistics.median(stalls)) / seconds
        # Nobody told it of the LRU cache, which is within the store.
        known = "" if "LRU" in name else f", predicted {predicted:.2f} s ({off:+.1%} of the run)"
        spread = f"{statistics.median(stalls):6.2f} s ({min(stalls):.2f} to {max(stalls):.2f})"
        beyond = (statistics.median(stalls) - reference) / seconds
        over = (reads - bounds[name]) / samples
        print(
            f"{name:20}{reads:6.0f} reads of the store, bound {bounds[name]:5} ({over:+7.2%} of the samples); "
            f"stall {spread}{known}, {beyond:+6.1%} of the run beside all in memory"
        )


def disk_reads(place: Path, samples: int, rounds: int, seconds: float) -> None:
    sizes, capacity_bytes = np.full(samples, TIER_NBYTES, np.int64), samples * TIER_NBYTES
    padding_bytes = padded_bytes(sizes) - capacity_bytes
    new_tier = partial(
        DiskTier, place / "tier", capacity_bytes, bytes(16), sizes, padding_bytes=padding_bytes
    )
    with closing(new_tier()) as cached:
        READ_SAMPLES.wait()
        draw = np.random.default_rng(0)
        for sample in range(samples):
            cached.put(sample, draw.bytes(TIER_NBYTES))
        groups, singles = [], []
        for _ in range(5 * rounds):
            groups.append(cpu_of(tier_read(cached), samples))
            with open(cached.samples_path, "rb") as file:
                singles.append(cpu_of(partial(bare_read, file.fileno()), samples))
        print_cpu("a warm read through the page cache", groups, singles)
    if shutil.which("fio") is None:
        print("fio is not installed: apt-get install fio")
    found: list[dict[int, float]] = []
    for is_direct in (True, False):
        with closing(new_tier(is_direct=is_direct)) as tier:
            own = own_memory()
            for sample in range(samples):  # each is compared with its checksum once
                tier_read(tier)(np.array([sample]), own)
            found.append(cold_reads(tier, samples, rounds, seconds, is_direct=is_direct))
    past, through = found
    for depth in DEPTHS:
        share = through[depth] / past[depth]
        print(
            f"cold reads past the page cache, {depth} at once, take {share:.2f} of the time of those through it: they "
            f"pay where it could hold less than {held_share(share):.2f} of the tier (penstock.store.direct: 0.80)"
        )


def held_share(time_share: float) -> float:
    """Return of which part of a file a page cache finds as much as reads past it save; see `direct.pays`.

    time_share: of a read past the cache, beside one through it that does not find its bytes there.
    """
    left = np.linspace(1e-6, 1.0, 10_001)  # of the file, what the cache could not hold
    missed = left - left * np.log(left)
    return float(1.0 - left[np.searchsorted(missed, min(time_share, 1.0))])


def cold_reads(
    tier: DiskTier, samples: int, rounds: int, seconds: float, *, is_direct: bool
) -> dict[int, float]:
    """Print rates of reads beside those of others. Returns: bytes/s to memory of a thread's own, by depth."""
    own_rates = dict[int, float]()
    how = "past" if is_direct else "through"
    for depth in DEPTHS:
        turn = tier, samples, depth, seconds
        turns: dict[str, Callable[[], list[Rate]]] = {
            "of a thread's own": partial(tier_rate, *turn, own_memory),
            "that goes round": partial(tier_rate, *turn, lasting_memory),
            "a bare loop": partial(bare_rate, *turn, is_direct=is_direct),
            "fio": partial(fio_reads, *turn, is_direct=is_direct),
            "fio to pages of 2 MB": partial(fio_reads, *turn, is_direct=is_direct, is_large=True),
        }
        found: dict[str, list[Rate]] = {name: [] for name in turns}
        for number in range(3 * rounds):
            for name in list(turns)[:: -1 if number % 2 else 1]:
                found[name] += turns[name]()
        medians = {
            name: statistics.median(each.bytes_per_second for each in rates)
            for name, rates in found.items()
            if rates
        }
        own_rates[depth] = medians["of a thread's own"]
        what = f"{how} the page cache, {depth} at once"
        for ours in list(turns)[:2]:
            mine = medians[ours]
            beside = [
                f", {name} {medians[name] / 1e6:.0f}: {mine / medians[name]:.2f}"
                for name in medians
                if name not in list(turns)[:2]
            ]
            print(
                f"cold reads {what}, to memory {ours}: {mine / 1e6:6.0f} MB/s{''.join(beside)} (wanted 0.9 of fio)"
            )
            if found["a bare loop"]:
                times = ([each.cpu_seconds for each in found[name]] for name in (ours, "a bare loop"))
                print_cpu(f"a cold read {what}, to memory {ours}", *times)
    return own_rates


def print_cpu(what: str, ours: list[float], bare: list[float]) -> None:
    mine, theirs = statistics.median(ours), statistics.median(bare)
    print(
        f"processor time of {what}: tier {mine * 1e6:.1f} us, bare preadv {theirs * 1e6:.1f} us: {mine / theirs:.2f} "
        "(wanted 1.2)"
    )


#: Returns memory of so many bytes.
MemoryFor = Callable[[int], Bytes]


def own_memory() -> MemoryFor:
    """Return what gives a thread the same memory again and again, as a loader's has for groups that it uses at once."""
    into = new_buffer(2 * GROUP_BYTES)
    return lambda nbytes: into[:nbytes]


#: Of all readers of a loader.
REUSED = Reused(large_pages=True)


def lasting_memory() -> MemoryFor:
    """Return what gives a reader memory for a group, which is used again once the group is gone."""
    return lambda nbytes: REUSED.empty((nbytes,), np.dtype(np.uint8))


def tier_read(tier: DiskTier) -> Callable[[Ids, MemoryFor], None]:
    """Return how a loader reads samples of a tier."""
    behind, sizes = WriteBehind(tier, 0), np.full(len(tier), TIER_NBYTES)

    def read(ids: Ids, memory_for: MemoryFor) -> None:
        _, _, failed = behind.read(ids, sizes[ids], memory_for)
        assert not failed

    return read


def bare_read(file: int, ids: Ids, memory_for: MemoryFor) -> None:
    into = memory_for(ids.size * NBYTES)
    for number, sample in enumerate(ids.tolist()):
        assert (
            os.preadv(file, [into[number * NBYTES : (number + 1) * NBYTES].data], sample * NBYTES) == NBYTES
        )


def cpu_of(read: Callable[[Ids, MemoryFor], None], samples: int) -> float:
    """Return seconds of processor time of one sample, read by groups in an order of their own."""
    ids = np.random.default_rng(1).permutation(samples // GROUP * GROUP).reshape(-1, GROUP)
    own = own_memory()
    read(ids[0], own)
    begin = time.process_time()
    for group in ids:
        read(group, own)
    return (time.process_time() - begin) / ids.size


class Rate(NamedTuple):
    """bytes_per_second: of all threads. cpu_seconds: of processor time, a sample."""

    bytes_per_second: float
    cpu_seconds: float


def tier_rate(
    tier: DiskTier, samples: int, depth: int, seconds: float, new_memory: Callable[[], MemoryFor]
) -> list[Rate]:
    forget(tier)
    return [rate_of(tier_read(tier), TIER_NBYTES, samples, depth, seconds, new_memory)]


def forget(tier: DiskTier) -> None:
    file = os.open(tier.samples_path, os.O_RDONLY)
    try:
        drop_cached(file)
    finally:
        os.close(file)


def bare_rate(tier: DiskTier, samples: int, depth: int, seconds: float, *, is_direct: bool) -> list[Rate]:
    """Return the rate of bare reads of the same file; nothing where there are none past the page cache."""
    forget(tier)
    try:
        file = os.open(tier.samples_path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    except OSError:
        return []
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        return [rate_of(partial(bare_read, file), NBYTES, samples, depth, seconds, own_memory)]
    finally:
        os.close(file)


def rate_of(
    read: Callable[[Ids, MemoryFor], None],
    nbytes: int,
    samples: int,
    depth: int,
    seconds: float,
    new_memory: Callable[[], MemoryFor],
) -> Rate:
    """Return the rate of so many threads that read samples in a random order, each once at most, by groups.

    nbytes: of a sample. new_memory: makes what gives a thread its memory.
    """
    order = iter(np.random.default_rng().permutation(samples // GROUP * GROUP).reshape(-1, GROUP))
    begin, cpu = time.perf_counter(), time.process_time()

    def work() -> int:
        memory_for, done = new_memory(), 0
        for ids in order:  # next() of an array's iterator is atomic
            read(ids, memory_for)
            done += ids.size * nbytes
            if time.perf_counter() > begin + seconds:
                break
        return done

    with ThreadPoolExecutor(depth) as pool:
        total = sum(each.result() for each in [pool.submit(work) for _ in range(depth)])
    return Rate(total / (time.perf_counter() - begin), (time.process_time() - cpu) * NBYTES / total)


def fio_reads(
    tier: DiskTier, samples: int, depth: int, seconds: float, *, is_direct: bool, is_large: bool = False
) -> list[Rate]:
    """Return the rate of fio's reads of the same file, of which each thread has a part, and none a block twice.

    is_large: to pages of 2 MB, which it takes only of those set apart by root.
    Nothing where fio is not installed, or too few of these are free.
    """
    if shutil.which("fio") is None or (is_large and free_large_pages() < depth):
        return []
    part_bytes = samples // depth * NBYTES
    options = f"--readonly --invalidate=1 --direct={is_direct:d} --offset_increment={part_bytes}"
    options += " --iomem=mmaphuge" if is_large else ""
    rate = fio_rate(str(tier.samples_path), part_bytes, NBYTES, depth, seconds, options)
    return [Rate(rate, math.nan)]


def free_large_pages() -> int:
    found = re.search(r"HugePages_Free: *(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) if found else 0


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument(
        "--disk", type=Path, help="a folder on the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(words)
    samples, rounds = (96, 1) if options.quick else (options.samples, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.disk) as place:
        folder, draw = Path(place, "data"), np.random.default_rng(0)
        folder.mkdir()
        for sample in range(samples):
            (folder / f"{sample:05}.bin").write_bytes(draw.bytes(NBYTES))
        trainings(folder, samples, rounds, 0.005 if options.quick else STEP_SECONDS)
        shutil.rmtree(folder)
        disk_reads(Path(place), 8 * samples, rounds, 0.1 if options.quick else 1.0)


if __name__ == "__main__":
    main()
