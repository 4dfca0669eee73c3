"""The fit against stores whose latency and curve are known, simulated here event by event."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.measure.fit import Level, StoreFit, fit_store, steady_level

READERS = (1, 2, 4, 8, 16, 32, 64)

Sizes = NDArray[np.int64]


def photographs(reads: int = 700) -> Sizes:
    """Sizes as JPEG files have them: 100 KB, give or take a quarter."""
    drawn = np.random.default_rng(1).normal(100_000, 25_000, reads)
    return np.clip(drawn, 10_000, None).astype(np.int64)


def behind_one_wire(readers: int, latency: float, wire: float, sizes: Sizes) -> Level:
    """Each read waits the latency, then passes a wire that serves one read after the other."""
    free, wire_free = [(0.0, reader) for reader in range(readers)], 0.0
    starts, ends = [], []
    for size in sizes:
        start, reader = heapq.heappop(free)
        wire_free = max(start + latency, wire_free) + float(size) / wire
        starts.append(start)
        ends.append(wire_free)
        heapq.heappush(free, (wire_free, reader))
    return steady_level(readers, np.array(starts), np.array(ends), sizes)


def sharing(readers: int, latency: float, rate: Callable[[int], float], sizes: Sizes) -> Level:
    """Each read waits the latency, then all reads share rate(number of them) in equal parts."""
    todo = iter(sizes.tolist())
    now = 0.0
    waiting: list[tuple[float, float, int]] = []  # (arrival, start, size)
    flowing: list[list[float]] = []  # [bytes left, start, size]
    starts, ends, done = [], [], []

    def begin() -> None:
        size = next(todo, None)
        if size is not None:
            heapq.heappush(waiting, (now + latency, now, size))

    for _ in range(readers):
        begin()
    while waiting or flowing:
        each = rate(len(flowing)) / len(flowing) if flowing else 0.0
        first = min(flowing) if flowing else None
        until_end = first[0] / each if first else np.inf
        until_arrival = waiting[0][0] - now if waiting else np.inf
        elapsed = min(until_end, until_arrival)
        now += elapsed
        for read in flowing:
            read[0] -= elapsed * each
        if first is not None and until_end < until_arrival:
            flowing.remove(first)
            starts.append(first[1])
            ends.append(now)
            done.append(int(first[2]))
            begin()
        else:
            _, start, size = heapq.heappop(waiting)
            flowing.append([float(size), start, float(size)])
    return steady_level(readers, np.array(starts), np.array(ends), np.array(done))


def rates_at(fit: StoreFit, *users: float) -> list[float]:
    return [fit.read.at(user) for user in users]


def test_a_latency_before_one_wire_is_recovered() -> None:
    fit = fit_store([behind_one_wire(p, 0.010, 50e6, photographs()) for p in READERS])

    assert fit.latency_seconds == pytest.approx(0.010, rel=0.01)
    assert rates_at(fit, 1, 2, 10, 60) == pytest.approx([50e6] * 4, rel=0.01)
    # 10 ms of latency and 2 ms of wire: six readers fill it.
    assert fit.enough_readers in (8, 16)


def test_files_of_one_size_give_the_same_by_the_best_throughput() -> None:
    sizes = np.full(700, 100_000)

    fit = fit_store([behind_one_wire(p, 0.010, 50e6, sizes) for p in READERS])

    assert fit.latency_seconds == pytest.approx(0.010, rel=0.01)
    assert rates_at(fit, 1, 60) == pytest.approx([50e6, 50e6], rel=0.01)


def test_a_wire_that_is_empty_now_and_then_is_not_taken_for_a_slower_one() -> None:
    """Eight readers of a shared 50 MB/s behind 10 ms get 47: now and then all wait out their latency at once."""
    eight = sharing(8, 0.010, lambda _: 50e6, photographs())
    assert eight.bytes_per_second < 48e6

    fit = fit_store([sharing(p, 0.010, lambda _: 50e6, photographs()) for p in READERS])

    assert rates_at(fit, 2, 3, 4) == pytest.approx([50e6] * 3, rel=0.02)


def test_a_store_that_limits_each_stream_is_told_from_a_latency() -> None:
    """100 MB/s for each read up to 1 GB/s, behind 1 ms: by speed alone it looks like 2 ms and one fast wire."""
    fit = fit_store([sharing(p, 0.001, lambda n: min(n * 100e6, 1e9), photographs()) for p in READERS])

    assert fit.latency_seconds == pytest.approx(0.001, rel=0.02)
    assert rates_at(fit, 1, 2, 4, 30) == pytest.approx([100e6, 200e6, 400e6, 1e9], rel=0.1)


def test_a_store_that_slows_down_under_many_readers_keeps_its_fall() -> None:
    fit = fit_store([sharing(p, 0.002, lambda n: 100e6 / (1 + 0.02 * n), photographs()) for p in READERS])

    assert fit.latency_seconds == pytest.approx(0.002, rel=0.1)
    assert rates_at(fit, 14, 30, 60) == pytest.approx([100e6 / 1.28, 100e6 / 1.6, 100e6 / 2.2], rel=0.05)


def test_a_store_without_latency_is_given_none() -> None:
    fit = fit_store([sharing(p, 0.0, lambda n: min(n * 9e9, 16e9), photographs()) for p in READERS])

    assert fit.latency_seconds == pytest.approx(0.0, abs=1e-8)
    assert rates_at(fit, 1, 2, 60) == pytest.approx([9e9, 16e9, 16e9], rel=0.05)


def test_now_and_then_a_read_that_takes_ten_times_as_long_does_not_bend_the_slope() -> None:
    level = behind_one_wire(1, 0.010, 50e6, photographs())
    seconds = level.seconds.copy()
    seconds[::50] *= 10

    fit = fit_store([Level(1, level.sizes_bytes, seconds, level.bytes_per_second), level_of(8), level_of(32)])

    assert fit.read.at(1) == pytest.approx(50e6, rel=0.02)


def test_a_single_read_that_took_a_second_is_not_the_latency_of_a_store() -> None:
    """Ten reads of 20 ms, one of which met the burst of another client."""
    seconds = np.full(10, 0.020)
    seconds[4] = 0.996
    ends = np.cumsum(seconds)

    level = steady_level(1, ends - seconds, ends, np.full(10, 1000))

    assert level.mean_seconds == pytest.approx((7 * 0.020 + 0.100) / 8)
    assert level.bytes_per_second == pytest.approx(1000 / level.mean_seconds)
    assert level.reads == 10


def level_of(readers: int) -> Level:
    return behind_one_wire(readers, 0.010, 50e6, photographs())


def test_small_files_that_never_fill_the_wire_are_not_held_up_by_the_rate_that_is_given() -> None:
    """64 readers of 400 bytes behind 10 ms get 2.5 MB/s from a wire of 50; a wire of 2.5 would give them less."""
    sizes = np.full(2000, 400)
    levels = [behind_one_wire(p, 0.010, 50e6, sizes) for p in READERS]

    fit = fit_store(levels)

    again = [
        behind_one_wire(p, fit.latency_seconds, fit.read.at(1), photographs(2000) // 250) for p in READERS
    ]
    assert fit.latency_seconds == pytest.approx(0.010, rel=0.02)
    for level, modelled in zip(levels, again, strict=True):
        assert modelled.bytes_per_second == pytest.approx(level.bytes_per_second, rel=0.03)


def test_whatever_was_measured_gives_a_curve() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        levels = [
            Level(p, photographs(40), rng.uniform(0.001, 0.1, 40), float(rng.uniform(1e6, 1e8)))
            for p in READERS
        ]

        fit = fit_store(levels)

        assert 0 <= fit.latency_seconds <= levels[0].mean_seconds
        assert all(0 < rate < 1e12 for _, rate in fit.read.points)


def test_no_rate_of_a_full_store_is_above_the_best_that_was_seen() -> None:
    """A slope over reads whose latency varies by a fifth would have said 59 MB/s."""
    levels = [behind_one_wire(p, 0.010, 50e6, photographs()) for p in READERS]
    jitter = np.random.default_rng(8).normal(0, 0.002, len(levels[0].seconds))
    levels[0] = Level(1, levels[0].sizes_bytes, levels[0].seconds + jitter, levels[0].bytes_per_second)

    fit = fit_store(levels)

    assert fit.best_bytes_per_second == max(level.bytes_per_second for level in levels)


def test_one_level_alone_gives_what_one_reader_got() -> None:
    fit = fit_store([Level(1, np.array([1000]), np.array([0.5]), 2000.0)])

    assert fit.latency_seconds == 0.0
    assert fit.read.points == ((1.0, 2000.0),)
    assert fit.enough_readers == 1


def test_the_start_together_and_the_end_alone_do_not_count() -> None:
    # Two readers of ten bytes a second each, a first read that took five seconds, and one reader left at the
    # end.
    starts = np.array([0.0, 0.0, 5.0, 5.0, 6.0, 6.0, 7.0])
    ends = np.array([5.0, 5.0, 6.0, 6.0, 7.0, 7.0, 9.0])

    level = steady_level(2, starts, ends, np.full(7, 10))

    assert level.bytes_per_second == pytest.approx(20.0)
    assert level.seconds.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_too_few_reads_for_a_steady_part_all_count() -> None:
    level = steady_level(4, np.zeros(4), np.array([1.0, 1.0, 2.0, 2.0]), np.full(4, 10))

    assert level.bytes_per_second == pytest.approx(20.0)
    assert level.mean_seconds == 1.5
