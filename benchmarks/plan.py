"""How fast an order answers, and how many rounds its bijection needs.

    python benchmarks/plan.py             positions a second on one core, and the questions a rank asks
    python benchmarks/plan.py --quality   every statistic of the Feistel network by number of rounds (minutes)

Speed is checked for the right answer first. The spread is that of single repetitions, first to ninth decile.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Order
from penstock.plan import _kernels as kernels
from penstock.plan.bijection import sides

Ids = NDArray[np.int64]


def measure(work: Callable[[], object], repetitions: int) -> tuple[float, float, float]:
    """Return median, first and ninth decile of the seconds that `work` takes, once warmed up."""
    work()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9))
    return float(median), float(low), float(high)


def print_rate(name: str, work: Callable[[], object], count: int, repetitions: int) -> None:
    median, low, high = measure(work, repetitions)
    middle, slow, fast = (count / seconds / 1e6 for seconds in (median, high, low))
    print(f"{name:56} {middle:8.1f} M positions/s  ({slow:.1f} to {fast:.1f})")


def speed(positions_a_time: int, repetitions: int) -> None:
    """Time every question, after a check of the answer."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}, one thread")
    rng = np.random.default_rng(0)
    worst = [65_536, 65_537, 2**20 + 1, 2**30 + 1, 2**32 + 1, 10**12, 2**40 + 1, 2**52 + 1, 2**61 + 1]
    for samples in worst:
        order = FullShuffle(samples, seed=1)
        positions = rng.integers(0, samples, positions_a_time)
        ids = order.at(0, positions)
        assert (order.position_of(0, ids) == positions).all()
        forward, backward = partial(order.at, 0, positions), partial(order.position_of, 0, ids)
        print_rate(f"full, F = {samples:,}, at", forward, positions_a_time, repetitions)
        print_rate("  position_of", backward, positions_a_time, repetitions)
    for other in (FullShuffle(65_535, 1), BundleShuffle(10**12, 1), BundleShuffle(1_281_167, 1)):
        print_order(other, rng.integers(0, other.samples, positions_a_time), repetitions)
    print_rank_questions(repetitions)


def print_order(order: Order, positions: Ids, repetitions: int) -> None:
    name = f"{type(order).__name__}, F = {order.samples:,}"
    print_rate(f"{name}, anywhere", lambda: order.at(0, positions), positions.size, repetitions)
    epochs = iter(range(1, 2**20))
    first = np.arange(min(order.samples, positions.size))
    print_rate(f"{name}, new epochs", lambda: order.at(next(epochs), first), first.size, repetitions)


def print_rank_questions(repetitions: int) -> None:
    plan = AccessPlan(FullShuffle(10**12, seed=1), batch_size=64 * 4096, epochs=90, ranks=4096)
    ids = plan.stream(17, 3, 1000, 10_000)
    assert (ids[:64] == plan.local_batch(17, 3, 1000)).all()
    questions: dict[str, Callable[[], object]] = {
        "the next 10,000 samples of a rank": lambda: plan.stream(17, 3, 1000, 10_000),
        "who reads 10,000 samples, when": lambda: plan.reader_of(4, ids),
    }
    print("F = 10**12, N = 4,096, 64 samples a rank and step:")
    for name, work in questions.items():
        median, low, high = measure(work, repetitions)
        print(f"  {name:54} {median * 1e3:8.2f} ms  ({low * 1e3:.2f} to {high * 1e3:.2f})")


def shuffles(size: int, rounds: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return `count` permutations of [0, size) by the raw network: int64[count, size]."""
    rows, columns = sides(size)
    keys = rng.integers(0, 2**32, (count, rounds, 2), dtype=np.uint64)
    keys[:, :, 1] |= np.uint64(1)
    values = np.tile(np.arange(size), count)
    out = np.empty_like(values)
    each = np.ones(count, np.int64)
    starts = np.arange(count + 1) * size
    kernels.permute_runs(values, out, starts, each * 0, each * size, each * rows, each * columns, keys, False)
    return out.reshape(count, size)


def uniformity(cells: Ids, count: int, constraints: int = 1) -> tuple[float, float]:
    """Return chi-square per degree of freedom and its p-value, all `count` cells being equally likely."""
    observed = np.bincount(cells.ravel(), minlength=count)
    expected = cells.size / count
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = count - constraints
    return statistic / freedom, float(stats.chi2.sf(statistic, freedom))


def whole_permutations(size: int, rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """All size! permutations of a tiny domain."""
    found = shuffles(size, rounds, min(math.factorial(size) * 1000, 1_800_000), rng)
    ranks = np.zeros(len(found), np.int64)
    for place in range(size):
        smaller_after = (found[:, place + 1 :] < found[:, place : place + 1]).sum(axis=1)
        ranks = ranks * (size - place) + smaller_after
    return uniformity(ranks, math.factorial(size))


def position_by_sample(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Every sample at every position, 101 of each."""
    found = shuffles(101, rounds, 40_000, rng)
    return uniformity(np.arange(101) * 101 + found, 101 * 101, constraints=2 * 101 - 1)


def ordered_pairs(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """What stands at two neighbouring positions, all 101 * 100 ordered pairs."""
    found = shuffles(101, rounds, 100_000, rng)
    place = int(rng.integers(0, 100))
    first, second = found[:, place], found[:, place + 1]
    return uniformity(first * 100 + second - (second > first), 101 * 100)


def neighbour_differences(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Difference between neighbours modulo F, at F = 65,537."""
    found = shuffles(65_537, rounds, 64, rng)
    return uniformity((np.diff(found, axis=1)[:, ::2] % 65_537 - 1) * 256 // 65_536, 256)


def neighbour_triples(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Eighths of the domain in which three neighbours land, at F = 65,537."""
    found = shuffles(65_537, rounds, 64, rng)[:, :65_535] * 8 // 65_537
    return uniformity(found[:, ::3] * 64 + found[:, 1::3] * 8 + found[:, 2::3], 512)


def rectangles(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Second differences over a row and a column of the network, modulo F, at F = 65,537."""
    _, columns = sides(65_537)
    found = shuffles(65_537, rounds, 64, rng)
    begin = np.arange(0, 65_537 - columns - 1, 2)
    second = found[:, begin] - found[:, begin + 1] - found[:, begin + columns] + found[:, begin + columns + 1]
    return uniformity(second % 65_537 * 256 // 65_537, 256)


def epochs_against_each_other(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Where a sample stands under one key and under the next, in 64 x 64 parts of F = 65,537."""
    found = shuffles(65_537, rounds, 64, rng) * 64 // 65_537
    return uniformity(found[:-1:2] * 64 + found[1::2], 4096)


def fixed_points(rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """Samples that stay where they are: Poisson with mean 1, at F = 1,009."""
    found = shuffles(1009, rounds, 20_000, rng)
    counts = np.bincount(np.minimum((found == np.arange(1009)).sum(axis=1), 6), minlength=7)
    chances = np.append(stats.poisson.pmf(np.arange(6), 1), stats.poisson.sf(5, 1))
    statistic = float(((counts - 20_000 * chances) ** 2 / (20_000 * chances)).sum())
    return statistic / 6, float(stats.chi2.sf(statistic, 6))


def quality_rows() -> Iterator[tuple[str, Callable[[int, np.random.Generator], tuple[float, float]]]]:
    for size in (5, 6, 7, 8, 9):
        yield f"all {size}! permutations", partial(whole_permutations, size)
    for test in (
        position_by_sample,
        ordered_pairs,
        fixed_points,
        neighbour_differences,
        neighbour_triples,
        rectangles,
        epochs_against_each_other,
    ):
        yield test.__name__.replace("_", " "), test


def quality() -> None:
    print("chi-square per degree of freedom (p-value); 1 is random, p below 0.0001 is marked with !")
    choices = (4, 6, 8, 10, 12, 16, 20, 24, 32)
    print(f"{'rounds':32}" + "".join(f"{rounds:>16}" for rounds in choices))
    for name, test in quality_rows():
        row = ""
        for rounds in choices:
            ratio, chance = test(rounds, np.random.default_rng(rounds))
            row += f"{ratio:9.3f} {chance:5.2f}{'!' if chance < 1e-4 else ' '}"
        print(f"{name:32}{row}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quality", action="store_true", help="statistics by number of rounds instead of speed"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    chosen = parser.parse_args(arguments)
    if chosen.quality:
        quality()
    elif chosen.quick:
        speed(positions_a_time=1000, repetitions=1)
    else:
        speed(positions_a_time=1 << 18, repetitions=31)


if __name__ == "__main__":
    main()
