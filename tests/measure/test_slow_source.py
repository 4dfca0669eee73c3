"""A slowed store in virtual time against arithmetic, and its wire shared by threads and processes."""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.patience import patient

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.measure import slow_source as slow_module
from penstock.measure.slow_source import SharedWire, SlowSource


class FakeSource:
    """Samples of given sizes, all zero; one of size -1 cannot be read."""

    labels: NDArray[np.int64] = np.zeros(0, np.int64)
    classes: tuple[str, ...] = ()

    def __init__(self, *sizes: int) -> None:
        self.sizes_bytes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def read(self, sample: int) -> bytes:
        if self.sizes_bytes[sample] < 0:
            raise DataError(f"{self.describe(sample)} has vanished")
        return bytes(int(self.sizes_bytes[sample]))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        size = int(self.sizes_bytes[sample])
        buffer[:size] = bytes(size)
        return size

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


class FakeClock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def throughput(slow: SlowSource, clock: FakeClock, readers: int, reads: int) -> float:
    """Return bytes per second of readers that each read again as soon as they can, in virtual time."""
    free = [(0.0, reader) for reader in range(readers)]
    total = 0
    for _ in range(reads):
        clock.now, reader = heapq.heappop(free)
        total += len(slow.read(0))
        heapq.heappush(free, (clock.now, reader))
    return total / max(time for time, _ in free)


def test_one_read_costs_both_latencies_and_its_time_on_the_wire(clock: FakeClock) -> None:
    with SlowSource(FakeSource(100_000), 0.005, 0.003, 50e6, clock=clock, sleep=clock.sleep) as slow:
        slow.read(0)
        assert clock.now == pytest.approx(0.005 + 0.003 + 0.002)

        assert slow.read_into(0, memoryview(bytearray(100_000))) == 100_000
        assert clock.now == pytest.approx(2 * (0.005 + 0.003 + 0.002))


@pytest.mark.parametrize(
    ("readers", "expected"), [(1, 100_000 / 0.012), (4, 4 * 100_000 / 0.012), (16, 50e6)]
)
def test_readers_add_up_until_the_wire_is_full(clock: FakeClock, readers: int, expected: float) -> None:
    with SlowSource(FakeSource(100_000), 0.005, 0.005, 50e6, clock=clock, sleep=clock.sleep) as slow:
        assert throughput(slow, clock, readers, 2000) == pytest.approx(expected, rel=0.02)


def test_reads_pass_the_wire_in_the_order_in_which_they_came(clock: FakeClock) -> None:
    ends = []
    with SlowSource(FakeSource(1000, 5000), 0.0, 1.0, 1000.0, clock=clock, sleep=clock.sleep) as slow:
        for asked, sample in ((0.0, 1), (0.5, 0), (0.6, 1), (20.0, 0)):
            clock.now = asked
            slow.read(sample)
            ends.append(clock.now)

    # On the wire from 1 to 6, 6 to 7, 7 to 12; the last finds it free.
    assert ends == pytest.approx([6.0, 7.0, 12.0, 22.0])


def test_the_slowed_sources_own_time_runs_within_the_latency(clock: FakeClock) -> None:
    class Takes3Seconds(FakeSource):
        def read(self, sample: int) -> bytes:
            clock.now += 3.0
            return super().read(sample)

    with SlowSource(Takes3Seconds(1000), 2.0, 2.0, 1000.0, clock=clock, sleep=clock.sleep) as slow:
        slow.read(0)
        assert clock.now == pytest.approx(5.0)
    clock.now = 0.0
    with SlowSource(Takes3Seconds(1000), 0.5, 0.5, 1000.0, clock=clock, sleep=clock.sleep) as slow:
        slow.read(0)
        assert clock.now == pytest.approx(4.0)


def test_a_failed_read_takes_no_time_on_the_wire(clock: FakeClock) -> None:
    with SlowSource(FakeSource(1000, -1), 0.0, 0.0, 1000.0, clock=clock, sleep=clock.sleep) as slow:
        with pytest.raises(DataError, match="sample 1 has vanished"):
            slow.read(1)
        slow.read(0)

    assert clock.now == pytest.approx(1.0)


def test_without_latency_or_wire_nobody_sleeps(clock: FakeClock) -> None:
    with SlowSource(FakeSource(1000), 0.0, 0.0, math.inf, clock=clock, sleep=clock.sleep) as slow:
        slow.read(0)

    assert clock.now == 0.0


@for_each(
    ("arguments", "message"),
    [
        ((-1.0, 0.0, 5.0), "open_seconds is -1.0"),
        ((0.0, math.inf, 5.0), "read_seconds is inf"),
        ((0.0, math.nan, 5.0), "read_seconds is nan"),
        ((0.0, 0.0, 0.0), "bytes_per_second is 0.0"),
        ((0.0, 0.0, math.nan), "bytes_per_second is nan"),
    ],
)
def test_a_store_that_cannot_be_is_refused(arguments: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlowSource(FakeSource(1), *arguments)


def test_a_closed_store_is_not_read() -> None:
    slow = SlowSource(FakeSource(1), 0.0, 0.0, 1e9)
    slow.close()
    slow.close()

    with pytest.raises(ClosedError):
        slow.read(0)


# -- One wire for all ----------------------------------------------------------------------------------

RESERVATIONS = 2000


def reserve_many(wire: SharedWire) -> float:
    return max(wire.reserve(0.0, 1) for _ in range(RESERVATIONS))


def test_threads_lose_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = slow_module._MOMENTS

    class YieldingStruct:
        """Lets other threads run between looking at the wire and taking it."""

        pack_into = staticmethod(moments.pack_into)

        @staticmethod
        def unpack_from(memory: Any) -> tuple[Any, ...]:
            found = moments.unpack_from(memory)
            time.sleep(0)
            return found

    with closing(SharedWire(1.0)) as wire, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(slow_module, "_MOMENTS", YieldingStruct)
        ends = list(pool.map(reserve_many, [wire] * 8))

        assert max(ends) == 8 * RESERVATIONS


@pytest.fixture(scope="module")
def _helpers_of_multiprocessing() -> None:
    """Start what `multiprocessing` keeps until the interpreter ends, so that no test is blamed for it."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


def run_child(connection: Connection, wire: SharedWire) -> None:
    connection.recv()
    connection.send(reserve_many(wire))


@pytest.mark.usefixtures("_helpers_of_multiprocessing")
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_processes_lose_no_reservation(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with closing(SharedWire(1.0)) as wire:
        children, ends = [], []
        for _ in range(3):
            here, there = context.Pipe()
            child = context.Process(target=run_child, args=(there, wire))
            child.start()
            there.close()
            children.append((child, here))
        for _, connection in children:
            connection.send("go")
        reserve_many(wire)
        for child, connection in children:
            ends.append(connection.recv())
            child.join()
            connection.close()

        assert wire.reserve(0.0, 1) == 4 * RESERVATIONS + 1
        assert max(ends) <= 4 * RESERVATIONS


def test_a_copy_by_pickle_is_the_same_wire() -> None:
    with closing(SharedWire(1.0)) as wire:
        with closing(pickle.loads(pickle.dumps(wire))) as copy:
            assert wire.reserve(0.0, 5) == 5.0
            assert copy.reserve(0.0, 5) == 10.0
        assert wire.reserve(0.0, 5) == 15.0


def test_a_process_that_is_killed_while_it_holds_the_wire_does_not_keep_it() -> None:
    with closing(SharedWire(1.0)) as wire:
        ready_read, ready_write = os.pipe()
        child = os.fork()
        if child == 0:
            import fcntl

            fcntl.lockf(wire._descriptor, fcntl.LOCK_EX)
            os.write(ready_write, b"x")
            signal.pause()
        os.read(ready_read, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready_read)
        os.close(ready_write)

        assert wire.reserve(0.0, 1) == 1.0


def test_a_child_forked_while_another_thread_holds_the_lock_can_still_read() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with slow_module._between_threads:
            held.set()
            release.wait()

    with closing(SharedWire(1.0)) as wire:
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if wire.reserve(0.0, 1) == 1.0 else 1)
        try:
            assert wait_for(child, seconds=patient(60)) == 0
        finally:
            release.set()
            holder.join()


def wait_for(child: int, seconds: float) -> int:
    """Return the child's exit code; kill it when it takes longer."""
    killer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    killer.start()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    killer.join()
    return os.waitstatus_to_exitcode(status)


def test_a_store_nobody_refers_to_gives_its_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        SlowSource(FakeSource(1), 0.0, 0.0, 1e9)

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_is_woken_late_each_time_still_gets_the_rate_of_the_store(clock: FakeClock) -> None:
    """Each sleep takes three reads more. Of a pause after a read, nothing is made up for."""
    late = 33e-3

    def oversleep(seconds: float) -> None:
        clock.now += seconds + late

    with SlowSource(FakeSource(1000), 0.0, 10e-3, 1e6, clock=clock, sleep=oversleep) as slow:
        for _ in range(50):
            slow.read(0)
        assert 50 * 11e-3 <= clock.now <= 50 * 11e-3 + late
        clock.now = 9.0
        slow.read(0)

    assert clock.now == pytest.approx(9.0 + 11e-3 + late)


def test_who_comes_late_uses_the_time_in_which_the_wire_was_idle() -> None:
    with closing(SharedWire(1.0)) as wire:
        assert wire.reserve(10.0, 2) == 12.0
        assert wire.reserve(30.0, 5) == 35.0
        assert wire.reserve(13.0, 3) == 16.0
        assert wire.reserve(11.0, 2) == 18.0  # one second from 12 on is too little
        assert wire.reserve(11.0, 1) == 13.0
        assert wire.reserve(11.0, 13) == 48.0

    draw = np.random.default_rng(0)
    with closing(SharedWire(10.0)) as wire:
        taken = []
        for number in range(200):
            arrival, size = number - draw.uniform(0, 20), int(draw.integers(1, 16))
            through = wire.reserve(arrival, size)
            assert through >= arrival + size / 10
            taken.append((through - size / 10, through))
    taken.sort()
    assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(taken))
