"""Requests per second of cache replays, beside libCacheSim's.

    python benchmarks/caches.py            F = 200,000 samples, 5 epochs, and a skewed trace; under a minute
    python benchmarks/caches.py --quick    only see that it runs, and that the answers are equal

Both sides replay the same oracleGeneral file, in turn in one process and one thread, and must find the same number of
hits, before anything is timed. Three comparisons: from the file to the hit ratio (libCacheSim's `process_trace` over
its `TraceReader`, the fastest way that its Python package has; it has none over arrays); ours over an array in
memory; all sizes from 1 to 100 %, where libCacheSim replays once per size, ours in one pass where there is one.
libCacheSim's hash table is given as many buckets as suit it best (--buckets; its default of 2**24 is slower here).
Warm: the file is in the page cache, compiled loops are compiled. Ratios are medians of pairs measured next to each
other, with first and ninth decile.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import libcachesim
import numpy as np
from numpy.typing import NDArray

from penstock.plan import AccessPlan, FullShuffle
from penstock.recordings.references import References, read_references, write_references
from penstock.simulate.caches import EVICTIONS, hit_shares, replay, stack_distances

Ids = NDArray[np.int64]

THEIRS = {
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "clock": libcachesim.Clock,
    "fifo": libcachesim.FIFO,
    "min": libcachesim.Belady,
}


def strings(samples: int, epochs: int) -> dict[str, Ids]:
    """Return the requests to replay: a training's, and some with a few hot objects and wide ids."""
    rng = np.random.default_rng(0)
    shuffled = AccessPlan(FullShuffle(samples, seed=0), samples, epochs).string(0)
    wide_ids = rng.permutation(samples) * 0x1F3D5B79 + 2**40
    chance = 1 / np.arange(1, samples + 1)
    popular = wide_ids[rng.choice(samples, samples * epochs, p=chance / chance.sum())]
    hot = rng.zipf(1.2, samples * epochs).clip(max=20 * samples) * 0x1F3D5B79 + 2**40
    return {"full shuffle": shuffled, "Zipf 1.0, wide ids": popular, "Zipf 1.2, wide ids": hot}


def theirs(policy: str, file: Path, capacity: int, buckets: int) -> float:
    """Return libCacheSim's hit ratio, reading the file included."""
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    missed, _ = THEIRS[policy](capacity, hashpower=buckets).process_trace(reader)
    return 1.0 - float(missed)


def ours(policy: str, file: Path, capacity: int) -> float:
    """Return our hit ratio, reading the file included."""
    return float(replay(read_references(file).ids, capacity, policy).mean())


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def spread(values: list[float], digits: int = 1) -> str:
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return f"{median:7.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compare(name: str, string: Ids, folder: Path, buckets: int, repetitions: int) -> None:
    file = folder / "trace.oracleGeneral"
    write_references(file, References.of(string))
    objects = np.unique(string).size
    capacity = objects // 2
    millions = string.size / 1e6
    print(f"\n{name}: {string.size:,} requests, {objects:,} objects, cache of half of them")
    print(f"{'':12}{'libCacheSim, M/s':>24}{'ours, file, M/s':>24}{'ratio':>24}{'ours, array, M/s':>24}")
    for policy in EVICTIONS:
        in_memory = partial(replay, string, capacity, policy)
        in_memory()
        if policy not in THEIRS:
            rates = [millions / seconds(in_memory) for _ in range(repetitions)]
            print(f"{policy:12}{'has none':>24}{'':48}{spread(rates):>24}")
            continue
        expected = theirs(policy, file, capacity, buckets)
        assert abs(expected - ours(policy, file, capacity)) < 1e-9, f"{policy}: answers differ"
        works = (
            partial(theirs, policy, file, capacity, buckets),
            partial(ours, policy, file, capacity),
            in_memory,
        )
        pairs = [[seconds(work) for work in works] for _ in range(repetitions)]
        their_rates = [millions / their for their, _, _ in pairs]
        our_rates = [millions / our for _, our, _ in pairs]
        array_rates = [millions / array for _, _, array in pairs]
        ratios = [their / our for their, our, _ in pairs]
        print(
            f"{policy:12}{spread(their_rates):>24}{spread(our_rates):>24}{spread(ratios):>24}{spread(array_rates):>24}"
        )


def all_sizes(string: Ids, folder: Path, buckets: int, repetitions: int, sizes: int) -> None:
    file = folder / "trace.oracleGeneral"
    write_references(file, References.of(string))
    objects = np.unique(string).size
    capacities = np.maximum(np.arange(1, sizes + 1) * objects // sizes, 1)
    their = sizes * seconds(partial(theirs, "lru", file, objects // 2, buckets))
    print(
        f"\nall of {sizes} sizes, {string.size:,} requests (libCacheSim, LRU: about {their:.1f} s, once per size)"
    )
    for policy in EVICTIONS:
        ratios = hit_shares(string, capacities[[0, -1]], policy)
        assert ratios[1] == 1 - objects / string.size, (
            f"{policy}: a cache of everything misses first uses alone"
        )
        took = [seconds(partial(hit_shares, string, capacities, policy)) for _ in range(repetitions)]
        print(f"{policy:12}{spread([1e3 * each for each in took]):>28} ms")
    small = string[string < 4000] if string.max() < objects else string[:20_000]
    one_pass, replays = (
        stack_distances(small, "min"),
        np.arange(1, sizes + 1) * np.unique(small).size // sizes,
    )
    expected = hit_shares(small, replays, "min")
    assert (np.searchsorted(np.sort(one_pass), replays, side="right") / small.size == expected).all()
    in_one = [seconds(partial(stack_distances, small, "min")) for _ in range(repetitions)]
    by_size = [seconds(partial(hit_shares, small, replays, "min")) for _ in range(repetitions)]
    print(
        f"MIN over {np.unique(small).size:,} objects, {small.size:,} requests: one pass over Mattson's stack "
        f"{spread([1e3 * each for each in in_one])} ms, {sizes} replays {spread([1e3 * each for each in by_size])} ms"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument(
        "--buckets", type=int, metavar="LOG2", help="of libCacheSim's hash table (about 3 times the objects)"
    )
    chosen = parser.parse_args(arguments)
    samples, repetitions, sizes = (2_000, 1, 10) if chosen.quick else (200_000, 9, 100)
    print(f"{platform.machine()}, {os.cpu_count()} cores, one thread, libCacheSim {version('libcachesim')}")
    with tempfile.TemporaryDirectory() as folder:
        for name, string in strings(samples, epochs=5).items():
            buckets = chosen.buckets or (3 * int(np.unique(string).size)).bit_length()
            compare(name, string, Path(folder), buckets, repetitions)
            if name == "full shuffle":
                all_sizes(string, Path(folder), buckets, min(repetitions, 3), sizes)


if __name__ == "__main__":
    main()
