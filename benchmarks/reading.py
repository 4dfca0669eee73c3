"""What it costs to read a file, alone or in a group, to keep it in memory and to pass a slowed store's wire.

    python benchmarks/reading.py [--quick]

Prints the median cost per sample with its 5th and 95th percentile over rounds that take turns: reading beside a
bare loop of open, preadv and close and beside Python's own open().read(), keeping beside a bare copy. One thread;
2,000 files of 100 KB, in the page cache (the first round, which is not counted, reads them all).

Then the same for 2,000 files of 4 KB by one and by two threads: groups of 64, and `read`, beside a program in C that
opens, reads (pread) and closes them. It needs the command cc.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from pathlib import Path

import numpy as np

from penstock.measure.slow_source import SharedWire
from penstock.store import FlatFolder, MemoryTier, read_group

FILE_BYTES = 100_000
SMALL_BYTES = 4096
GROUP = 64
#: Prints the seconds per file that so many threads take for a round.
BOUND = r"""
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 10 // so that the start of the process and its fresh pages hardly count

static int threads, files;
static char (*paths)[256];

static void *work(void *number) {
    char *into = malloc(64 * 4096);
    for (int round = 0; round < ROUNDS; round++)
        for (long i = (long)number; i < files; i += threads) {
            int descriptor = open(paths[i], O_RDONLY | O_CLOEXEC);
            if (descriptor < 0 || pread(descriptor, into + i / threads % 64 * 4096, 4096, 0) != 4096) abort();
            close(descriptor);
        }
    free(into);
    return NULL;
}

int main(int count, char **words) {
    threads = atoi(words[2]), files = atoi(words[3]);
    paths = malloc(256L * files);
    for (int i = 0; i < files; i++) snprintf(paths[i], 256, "%s/%05d.jpg", words[1], i);
    pthread_t running[64];
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long t = 0; t < threads; t++) pthread_create(running + t, NULL, work, (void *)t);
    for (int t = 0; t < threads; t++) pthread_join(running[t], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.12f", (end.tv_sec - begin.tv_sec + 1e-9 * (end.tv_nsec - begin.tv_nsec)) / files / ROUNDS);
}
"""


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
        large, small = Path(folder, "large"), Path(folder, "small")
        for place, nbytes in ((large, FILE_BYTES), (small, SMALL_BYTES)):
            place.mkdir()
            for number in range(files):
                (place / f"{number:05}.jpg").write_bytes(random.bytes(nbytes))
        print(
            f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
        )
        with closing(SharedWire(1e9)) as wire:
            report("100 KB", time_all(FlatFolder(large), wire, rounds))
        report("4 KB", time_groups(FlatFolder(small), Path(folder), rounds))


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


def time_groups(source: FlatFolder, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per sample of each round of each contender, the warming round left out."""
    groups = np.array_split(np.arange(len(source)), -(-len(source) // GROUP))
    begins = np.arange(GROUP + 2) * SMALL_BYTES
    arrays = [np.zeros((GROUP + 1) * SMALL_BYTES, np.uint8) for _ in range(2)]
    assert read_group(source, groups[0], arrays[0], begins[: groups[0].size + 1]) == []
    expected = b"".join(Path(source.path_of(sample)).read_bytes() for sample in range(groups[0].size))
    assert arrays[0][: len(expected)].tobytes() == expected

    def in_groups(thread: int, threads: int) -> None:
        for ids in groups[thread::threads]:
            assert read_group(source, ids, arrays[thread], begins[: ids.size + 1]) == []

    def one_by_one(thread: int, threads: int) -> None:
        for sample in range(thread, len(source), threads):
            source.read(sample)

    seconds: dict[str, list[float]] = {}
    program = str(folder / "bound")
    if shutil.which("cc"):
        command = ["cc", "-O2", "-pthread", "-x", "c", "-", "-o", program]
        subprocess.run(command, input=BOUND, text=True, check=True)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds + 1):
            for threads in (1, 2):
                for name, call in (("read_group", in_groups), ("read", one_by_one)):
                    begin = time.perf_counter()
                    for running in [pool.submit(call, thread, threads) for thread in range(threads)]:
                        running.result()
                    spent = (time.perf_counter() - begin) / len(source)
                    seconds.setdefault(f"{name}, threads: {threads}", []).append(spent)
                if os.path.exists(program):
                    words = [program, source.root, str(threads), str(len(source))]
                    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                    seconds.setdefault(f"  bound: C, threads: {threads}", []).append(float(printed))
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


def report(size: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{f'us per sample of {size}':36}{'median':>9}{'p5':>9}{'p95':>9}")
    for name, measured in seconds.items():
        median, low, high = np.percentile(measured, [50, 5, 95]) * 1e6
        print(f"{name:36}{median:9.2f}{low:9.2f}{high:9.2f}")


if __name__ == "__main__":
    main()
