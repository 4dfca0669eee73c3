"""What it costs to read a file, to keep it in memory and to pass a slowed store's wire.

    python benchmarks/reading.py [--quick]

Prints the median cost per sample with its 5th and 95th percentile over rounds that take turns: reading beside a
bare loop of open, preadv and close and beside Python's own open().read(), keeping beside a bare copy. One thread;
2,000 files of 100 KB, in the page cache (the first round, which is not counted, reads them all).
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path

import numpy as np

from penstock.store import FlatFolder, MemoryTier
from penstock.store.slow import SharedWire

FILE_BYTES = 100_000


def main(arguments: list[str] | None = None) -> None:
    """Check the answers, time them, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it runs, not how fast"
    )
    quick = parser.parse_args(arguments).quick
    rounds, files = (1, 20) if quick else (20, 2_000)
    with tempfile.TemporaryDirectory(prefix="penstock-reading-") as folder:
        random = np.random.default_rng(0)
        for number in range(files):
            (Path(folder) / f"{number:05}.jpg").write_bytes(random.bytes(FILE_BYTES))
        with closing(SharedWire(1e9)) as wire:
            report(time_all(FlatFolder(folder), wire, rounds))


def time_all(source: FlatFolder, wire: SharedWire, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per sample of each round of each contender, the warming round left out."""
    count = len(source)
    paths = [source.path_of(sample) for sample in range(count)]
    buffer = memoryview(bytearray(FILE_BYTES + 1))
    content = source.read(0)
    check_answers(source, paths, buffer)
    arena = np.zeros(count * FILE_BYTES, np.uint8)

    def bare_read(sample: int) -> None:
        descriptor = os.open(paths[sample], os.O_RDONLY)
        os.preadv(descriptor, [buffer], 0)
        os.close(descriptor)

    def open_and_read(sample: int) -> None:
        with open(paths[sample], "rb") as file:
            file.read()

    def bare_copy(sample: int) -> None:
        arena[sample * FILE_BYTES : (sample + 1) * FILE_BYTES] = np.frombuffer(content, np.uint8)

    contenders: dict[str, Callable[[int], object]] = {
        "read_into": lambda sample: source.read_into(sample, buffer),
        "read": source.read,
        "  bound: bare open, preadv, close": bare_read,
        "  open().read()": open_and_read,
        "  bound: copy to touched memory": bare_copy,
        "passing an idle wire": lambda _: wire.reserve(0.0, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*contenders, "keep in a fresh memory tier")}
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            seconds[name].append(time_one(call, count))
        seconds["keep in a fresh memory tier"].append(time_keeping(content, count))
    return {name: measured[1:] for name, measured in seconds.items()}


def time_keeping(content: bytes, count: int) -> float:
    with closing(MemoryTier(count * len(content))) as tier:
        return time_one(lambda sample: tier.put(sample, content), count)


def time_one(call: Callable[[int], object], count: int) -> float:
    begin = time.perf_counter()
    for sample in range(count):
        call(sample)
    return (time.perf_counter() - begin) / count


def check_answers(source: FlatFolder, paths: list[str], buffer: memoryview) -> None:
    for sample, path in enumerate(paths[:20]):
        expected = Path(path).read_bytes()
        assert source.read(sample) == expected
        assert buffer[: source.read_into(sample, buffer)] == expected


def report(seconds: dict[str, list[float]]) -> None:
    print(f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'us per sample of 100 KB':36}{'median':>9}{'p5':>9}{'p95':>9}")
    for name, measured in seconds.items():
        median, low, high = np.percentile(measured, [50, 5, 95]) * 1e6
        print(f"{name:36}{median:9.2f}{low:9.2f}{high:9.2f}")


if __name__ == "__main__":
    main()
