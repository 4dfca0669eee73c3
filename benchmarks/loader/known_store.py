"""What `penstock bench` measures on a store whose behaviour is known, against what follows from that in closed form.

    make bench NAME=loader/known_store           # about four minutes

The store: 5 ms per open and 10 ms for its reads, which overlap, and one wire of 50 MB/s. T readers of samples of s
bytes get min(wire, T s / (latency + s / wire)). A training without prefetch reads an epoch of N samples in N (latency
+ s / wire) seconds; it takes longer than one whose prefetch hides everything by that and by decoding. Planted outliers:
a store that stops for half a second during less than every second run. What bare threads get of the store, which do
nothing but read, stands beside: where they miss the closed form as well, the host wakes threads late. Last, a FUSE
mount where that can be made, whose kernel has costs of its own: printed, not judged.

Exits with a failure if rates with 1, 4 and 16 readers differ by more than 5 %, with outliers too, or the excess without
prefetch, less the decoding, by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import _slow_mount
import cv2
import numpy as np

from penstock.bench.input_rates import InputRates, InputSettings, measure_input
from penstock.bench.loaders import Work
from penstock.bench.training import FixedStep, Setting, measure_training
from penstock.measure.slow_source import SlowSource
from penstock.ranks import alone
from penstock.store import FlatFolder, Source

OPEN_SECONDS, READ_SECONDS, WIRE = 5e-3, 10e-3, 50e6
LATENCY_SECONDS = OPEN_SECONDS + READ_SECONDS
READERS = (1, 4, 16)
MOST_RATE_ERROR, MOST_EXCESS_ERROR = 0.05, 0.10


class Stopping(SlowSource):
    """A slow store that stops for a while at one read of many, as another user's burst stops it."""

    reads = 0
    every = 0

    def read_into(self, sample: int, buffer: memoryview) -> int:
        self.reads += 1
        if self.every and self.reads % self.every == 0:
            time.sleep(0.5)
        return super().read_into(sample, buffer)


def write_pictures(folder: Path, count: int) -> None:
    """Write JPEG files of about 100 KB."""
    draw = np.random.default_rng(0)
    for number in range(count):
        coarse = cv2.resize(draw.integers(0, 256, (40, 50, 3), np.uint8), (500, 400))
        noise = draw.integers(-24, 25, coarse.shape)
        picture = np.clip(coarse.astype(np.int64) + noise, 0, 255).astype(np.uint8)
        assert cv2.imwrite(str(folder / f"{number:04}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 88])


def expected_rate(readers: int, sample_bytes: float) -> float:
    """Return bytes/s of so many readers."""
    return min(WIRE, readers * sample_bytes / (LATENCY_SECONDS + sample_bytes / WIRE))


def rates(source: Source, samples: int, repeats: int) -> InputRates:
    """Return what `penstock bench input --work read` measures."""
    asked = InputSettings(READERS, [16], [Work.READ], samples=samples)
    return measure_input(source, asked, repeats=repeats, ranks=alone())


def bare_rate(source: Source, readers: int, samples: int) -> float:
    """Return the bytes/s of threads that do nothing but read, while all of them do."""
    ids = iter(np.random.default_rng().permutation(len(source))[:samples].tolist())
    ends: list[tuple[float, int]] = []

    def read() -> None:
        buffer = memoryview(bytearray(int(source.sizes_bytes.max())))
        for sample in ids:  # one step of an iterator over a list at a time: the interpreter's lock is enough
            size = source.read_into(sample, buffer)
            ends.append((time.perf_counter(), size))

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steady = sorted(ends)[readers - 1 : len(ends) - readers + 1]
    return sum(size for _, size in steady[1:]) / (steady[-1][0] - steady[0][0])


def print_rates(title: str, source: Source, found: InputRates) -> list[float]:
    """Print rates beside the expected ones; return by how much they differ, in shares."""
    errors = []
    for each in found.results:
        measured = each.samples_per_second.median * found.bytes_per_sample
        wanted = expected_rate(each.threads, found.bytes_per_sample)
        errors.append(measured / wanted - 1)
        print(
            f"{title}, {each.threads:2} readers: {measured / 1e6:5.1f} MB/s, {wanted / 1e6:5.1f} in closed form "
            f"({errors[-1]:+.1%}; bare threads {bare_rate(source, each.threads, found.samples) / wanted - 1:+.1%})"
        )
    return errors


def print_excess(source: Source, steps: int, batch_size: int, step_seconds: float, repeats: int) -> float:
    """Print the excess without prefetch beside the time of all reads; return by how much it differs, as a share."""
    settings = [Setting(0, batch_size), Setting(16, batch_size)]
    found = measure_training(
        source, FixedStep(step_seconds), settings, steps=steps, repeats=repeats, ranks=alone()
    )
    assert found.has_equal_losses
    without, ahead = found.results
    excess = without.run_seconds.median - ahead.run_seconds.median
    reads = found.steps * batch_size * (LATENCY_SECONDS + float(source.sizes_bytes.mean()) / WIRE)
    error = (excess - without.decode_seconds) / reads - 1
    print(
        f"training: {without.run_seconds.median:.2f} s without prefetch, {ahead.run_seconds.median:.2f} s with it; the "
        f"excess of {excess:.2f} s, {without.decode_seconds:.2f} s of it decoding, against {reads:.2f} s of reads in "
        f"closed form ({error:+.1%}; by the clock reads took {without.read_seconds:.2f} s)"
    )
    return error


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few reads: shows that it runs")
    options = parser.parse_args(arguments)
    count, samples, repeats, steps = (32, 32, 2, 2) if options.quick else (640, 256, 6, 20)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        images, mountpoint = Path(folder) / "images", Path(folder) / "mounted"
        images.mkdir()
        mountpoint.mkdir()
        write_pictures(images, count)
        source = FlatFolder(images)
        with SlowSource(source, OPEN_SECONDS, READ_SECONDS, WIRE) as slow:
            errors = print_rates("slowed source", slow, rates(slow, samples, repeats))
            if max(map(abs, errors)) > MOST_RATE_ERROR:
                missed.append("rates")
            if abs(print_excess(slow, steps, 16, 0.1, min(repeats, 4))) > MOST_EXCESS_ERROR:
                missed.append("excess")
        with Stopping(source, OPEN_SECONDS, READ_SECONDS, WIRE) as stopping:
            stopping.every = 3 * samples  # less than every second run
            errors = print_rates("with outliers", stopping, rates(stopping, samples, repeats))
            if max(map(abs, errors)) > MOST_RATE_ERROR:
                missed.append("outliers")
        if not options.quick and not _slow_mount.is_possible():
            print("FUSE mount: left out; it needs /dev/fuse and the Debian package fuse3")
        elif not options.quick:
            with _slow_mount.mounted(images, mountpoint, OPEN_SECONDS, READ_SECONDS, WIRE):
                mounted = FlatFolder(mountpoint)
                print_rates("FUSE mount", mounted, rates(mounted, samples, repeats))
    if missed and not options.quick:
        sys.exit(f"targets missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
