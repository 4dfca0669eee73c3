"""A loader over a store that behaves otherwise in mid-run: how many readers it settles on, and what that gives.

    make bench NAME=loader/self_tuning              # two minutes

A read takes 40 ms, of which any number overlap; then, for a while, the store has a head that goes back and forth: the
more reads at once beyond 16, the longer each (1.5th power), so that 16 give the most; then it is as before. No
machine=, so that the loader begins with its usual 32 readers and looks for a better number. The training takes batches
as fast as they come. For each part: the rate over its last quarter, beside the most that the store could give with
1 to 128 readers, and the numbers that were settled on, as the trace has them.

--quick: a second for each part; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.trace import read_trace
from penstock.trace.schema import SOURCE, Kind

NBYTES, BATCH, SAMPLES, MOST_READERS = 4096, 32, 400_000, 128
LATENCY_SECONDS = 0.04


def overlaps(reads: int) -> float:
    """Return how long each of so many reads takes of a store that serves any number at once."""
    return LATENCY_SECONDS


def thrashes(reads: int) -> float:
    """The same of a disk whose head goes back and forth."""
    slower: float = max(1.0, reads / 16) ** 1.5
    return LATENCY_SECONDS * slower


PARTS: tuple[tuple[str, Callable[[int], float], float], ...] = (
    ("any number overlaps", overlaps, 20.0),
    ("16 are best", thrashes, 60.0),
    ("any number overlaps again", overlaps, 20.0),
)


class Store:
    """Zeros, after as long as a read of as many at once takes."""

    classes: tuple[str, ...] = ()
    fingerprint = "benchmarks/loader/self_tuning"

    def __init__(self) -> None:
        self.sizes_bytes, self.labels = np.full(SAMPLES, NBYTES, np.int64), np.full(SAMPLES, -1, np.int64)
        self.seconds_of: Callable[[int], float] = overlaps
        self.reads = self._running = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return SAMPLES

    def __repr__(self) -> str:
        return "a store that changes"

    def describe(self, sample: int) -> str:
        return f"sample {sample}"

    def read(self, sample: int) -> bytes:
        content = bytearray(NBYTES)
        self.read_into(sample, memoryview(content))
        return bytes(content)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        with self._lock:
            self._running += 1
            seconds = self.seconds_of(self._running)
        time.sleep(seconds)
        with self._lock:
            self._running -= 1
            self.reads += 1
        return NBYTES


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(words)
    store, rates, ends = Store(), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        with Loader(
            store,
            batch_size=BATCH,
            epochs=1,
            seed=1,
            transforms=[DecodeRaw("uint8", (NBYTES,))],
            dtype="uint8",
            memory="64 MiB",
            trace=f"{folder}/run.trace",
            report=None,
        ) as loader:
            batches, begin = iter(loader), time.perf_counter()
            for _, store.seconds_of, seconds in PARTS:
                seconds = 1.0 if options.quick else seconds
                go_on(batches, 0.75 * seconds)
                before, since = store.reads, time.perf_counter()
                go_on(batches, 0.25 * seconds)
                rates.append((store.reads - before) / (time.perf_counter() - since))
                ends.append(time.perf_counter() - begin)
        trace = read_trace(Path(folder, "run.trace"))
    spans = trace.spans[(trace.spans["kind"] == Kind.THREADS) & (trace.spans["place"] == SOURCE)]
    at = spans["start"] - trace.spans["start"].min()
    readers = trace.meta["limits"]["readers"]  # type: ignore[index, call-overload]
    for (name, seconds_of, _), rate, first, last in zip(PARTS, rates, [0.0, *ends], ends, strict=False):
        most = max(reads / seconds_of(reads) for reads in range(1, MOST_READERS + 1))
        settled = spans["samples"][(at >= first) & (at < last)].tolist()
        print(
            f"{name}: {rate:,.0f} reads/s, the most {most:,.0f}: {rate / most:.2f}; readers {readers}"
            + "".join(f" -> {number}" for number in settled)
        )
        readers = settled[-1] if settled else readers


def go_on(batches: object, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        next(batches)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
