"""What memory delivers by number of threads: copied, read and written in sequence, read at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from penstock.measure.file_rates import BLOCK_BYTES, Access, MeasuredCurve
from penstock.measure.in_threads import Clock, repeat_until
from penstock.measure.spread import Spread

# By all threads together, and larger than most processors' caches.
COPIED_BYTES = 64_000_000
#: At random, in one call.
_ROWS = 256

Work = Callable[[], Iterator[int]]


def thread_counts(cpus: int) -> list[int]:
    """Return 1, 2, 4 ... and the number of processors."""
    return sorted({*(1 << bit for bit in range(cpus.bit_length()) if 1 << bit <= cpus), cpus})


def measure_memory(
    cpus: int, max_seconds: float, clock: Clock, repeats: int
) -> tuple[MeasuredCurve, tuple[MeasuredCurve, ...]]:
    """Return what copying reaches, and the curves of reads in sequence and at random, and of writes.

    Source: thesis, Figure 5.1, by STREAM's kernels as NumPy has them.
    """
    works: list[tuple[Access, Callable[[int], Iterator[int]]]] = [
        (Access(True, False, 0), copier),
        (Access(False, False, 0), _reader),
        (Access(False, True, BLOCK_BYTES), _random_reader),
        (Access(True, False, 0), _writer),
    ]
    counts = thread_counts(cpus)
    runs: list[dict[int, list[float]]] = [{count: [] for count in counts} for _ in works]
    begin, left = clock(), repeats * len(works) * len(counts)
    for _ in range(repeats):
        for (_, work), own in zip(works, runs, strict=True):
            for count in counts:
                until = clock() + max(0.0, begin + max_seconds - clock()) / left
                left -= 1
                threads: Sequence[Work] = [partial(work, COPIED_BYTES // count)] * count
                own[count].append(repeat_until(until, clock, threads))
    copies, *others = (
        MeasuredCurve(access, tuple((count, Spread.of(values)) for count, values in own.items()))
        for (access, _), own in zip(works, runs, strict=True)
    )
    return copies, tuple(others)


def copier(nbytes: int) -> Iterator[int]:
    """Copy memory, and yield the bytes copied each time."""
    origin, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    while True:
        np.copyto(target, origin)
        yield nbytes


def _reader(nbytes: int) -> Iterator[int]:
    array = np.ones(nbytes // 8, np.int64)
    while True:
        np.add.reduce(array)
        yield array.nbytes


def _random_reader(nbytes: int) -> Iterator[int]:
    rows = np.ones((max(1, nbytes // BLOCK_BYTES), BLOCK_BYTES), np.uint8)
    out, draw = np.empty((_ROWS, BLOCK_BYTES), np.uint8), np.random.default_rng()
    while True:
        np.take(rows, draw.integers(0, len(rows), _ROWS), axis=0, out=out, mode="clip")
        yield out.nbytes


def _writer(nbytes: int) -> Iterator[int]:
    array = np.zeros(nbytes, np.uint8)
    while True:
        array.fill(1)
        yield nbytes
