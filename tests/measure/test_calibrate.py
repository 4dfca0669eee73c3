"""Calibration end to end on small stores: what comes out, what is refused, and that nothing stays behind."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import os
import pty
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure import calibrate as calibrate_module
from penstock.measure import in_threads
from penstock.measure.calibrate import (
    Calibration,
    PageCache,
    StoreReader,
    calibrate,
    measure_machine,
    read_until,
)
from penstock.measure.fit import Level
from penstock.measure.slow_source import SlowSource
from penstock.store import FlatFolder


class FakeSource:
    """Samples from nowhere; those in `broken` cannot be read."""

    classes: tuple[str, ...] = ()

    def __init__(self, samples: int, broken: set[int] | None = None, size: int = 1000) -> None:
        self.sizes_bytes: NDArray[np.int64] = np.full(samples, size, np.int64)
        self.labels: NDArray[np.int64] = np.full(samples, -1, np.int64)
        self.broken = broken or set()

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def read(self, sample: int) -> bytes:
        if sample in self.broken:
            raise DataError(f"{self.describe(sample)} has vanished")
        return bytes(int(self.sizes_bytes[sample]))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        data = self.read(sample)
        buffer[: len(data)] = data
        return len(data)

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


@pytest.fixture(autouse=True)
def _memory_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes deliver all they have at once, so a calibration of AMPLE seconds ends at once too."""
    monkeypatch.setattr(calibrate_module, "_measure_memory", lambda *_: Curve.flat(1e9))


#: More than any of these calibrations needs, however busy this host is.
AMPLE = 30.0


def test_a_machine_comes_out_that_can_be_written_down() -> None:
    machine = calibrate(FakeSource(500), max_seconds=AMPLE)

    assert Machine.from_toml(machine.to_toml()) == machine
    assert machine.ranks == 1
    assert [storage.name for storage in machine.storage] == ["staging", "memory"]
    assert machine.preprocess_bytes_per_second == math.inf
    assert machine.compute is None
    assert machine.source.threads >= 1


def test_all_clients_share_the_best_rate_of_the_one_that_was_measured() -> None:
    calibration = measure_machine(FakeSource(500), max_seconds=AMPLE)

    source = calibration.machine.source
    assert source.clients is not None
    assert source.clients.at(1) == source.clients.at(100)
    assert source.read is not None
    assert source.clients.at(1) == max(rate for _, rate in source.read.points)


def test_readers_go_up_in_powers_of_two_as_far_as_there_are_samples() -> None:
    many = measure_machine(FakeSource(500), max_seconds=AMPLE)
    few = measure_machine(FakeSource(9), max_seconds=AMPLE)

    assert [level.readers for level in many.levels] == [1, 2, 4, 8, 16, 32, 64]
    assert [level.readers for level in few.levels] == [1, 2, 4]


def test_no_sample_is_read_twice_for_one_number_of_readers() -> None:
    source = FakeSource(64)
    read: list[int] = []
    plain = source.read_into

    def note(sample: int, buffer: memoryview) -> int:
        read.append(sample)
        return plain(sample, buffer)

    source.read_into = note  # type: ignore[method-assign]

    calibration = measure_machine(source, max_seconds=AMPLE)

    assert len(read) <= 64 * len(calibration.levels)
    assert sorted(read[:64]) == list(range(64))


def test_a_decoder_is_measured_on_the_samples() -> None:
    seen: set[bytes] = set()

    machine = calibrate(FakeSource(100), decode=seen.add, max_seconds=1)

    assert seen == {bytes(1000)}
    assert 0 < machine.preprocess_bytes_per_second < math.inf
    assert machine.processors == machine.decode_threads


def test_what_a_decoder_does_first_in_each_thread_is_not_its_speed() -> None:
    """Ten bytes a second, after a first call in each thread that takes a hundred."""
    seconds = [0.0]
    threads = threading.local()

    def decode(data: bytes) -> None:
        seconds[0] += 1.0 if hasattr(threads, "is_warm") else 100.0
        threads.is_warm = True

    rate = calibrate_module._measure_decode(decode, [bytes(10)], 1, 120.0, lambda: seconds[0])

    assert rate == 10.0


def test_decoding_that_was_not_measured_is_said_to_be_taken_as_free() -> None:
    plain = measure_machine(FakeSource(50), max_seconds=AMPLE).to_toml()
    decoded = measure_machine(FakeSource(50), decode=len, max_seconds=1).to_toml()

    assert "# Decoding was not measured: predictions take it as free.\n" in plain
    assert "Decoding was not measured" not in decoded


def test_a_decoder_that_refuses_everything_is_reported() -> None:
    def refuse(_: bytes) -> None:
        raise DataError("not an image")

    with pytest.raises(DataError, match="none of 64 samples could be decoded"):
        calibrate(FakeSource(100), decode=refuse, max_seconds=AMPLE)


def test_a_decoder_that_fails_otherwise_fails_the_calibration() -> None:
    def divide(_: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        calibrate(FakeSource(100), decode=divide, max_seconds=AMPLE)


def test_samples_too_large_to_keep_are_not_decoded() -> None:
    with pytest.raises(ConfigError, match="no sample is small enough to decode"):
        calibrate(FakeSource(8, size=1_000_001), decode=len, max_seconds=AMPLE)


def test_samples_that_cannot_be_read_are_counted_and_left_out() -> None:
    calibration = measure_machine(FakeSource(66, broken={3, 5}), max_seconds=AMPLE)

    assert calibration.unreadable == 2 * len(calibration.levels)
    assert f"{calibration.unreadable} reads failed" in calibration.to_toml()


def test_a_source_of_which_nothing_can_be_read_is_an_error() -> None:
    with pytest.raises(DataError, match="has vanished"):
        calibrate(FakeSource(9, broken=set(range(9))), max_seconds=AMPLE)


def test_too_few_samples_that_can_be_read_are_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError, match=r"7 reads .*at least 8: 2 reads failed \(sample [35] has vanished"):
        calibrate(FakeSource(9, broken={3, 5}), max_seconds=AMPLE)


def test_a_failing_reader_is_not_waited_for() -> None:
    class Fails(FakeSource):
        def read_into(self, sample: int, buffer: memoryview) -> int:
            raise RuntimeError("a bug in a source")

    with pytest.raises(RuntimeError, match="a bug in a source"):
        calibrate(Fails(100), max_seconds=60)


@for_each("max_seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_refused(max_seconds: float) -> None:
    with pytest.raises(ConfigError, match="max_seconds"):
        calibrate(FakeSource(5), max_seconds=max_seconds)


@pytest.mark.parametrize("samples", [0, 7])
def test_a_source_with_too_few_samples_is_refused(samples: int) -> None:
    with pytest.raises(ConfigError, match=f"has {samples} samples; .* at least 8: calibrate on a larger"):
        calibrate(FakeSource(samples))


def test_ctrl_c_ends_the_readers() -> None:
    """Somebody presses Ctrl-C while all read; no thread goes on for the minute, which every test is checked for."""

    class Interrupted(FakeSource):
        reads = itertools.count(1)  # no two threads have one number

        def read_into(self, sample: int, buffer: memoryview) -> int:
            read = next(self.reads)
            if read == 100:
                _thread.interrupt_main()
            if read >= 100:
                time.sleep(0.01)
            return super().read_into(sample, buffer)

    with pytest.raises(KeyboardInterrupt):
        calibrate(Interrupted(100_000), max_seconds=60)


def test_ctrl_c_ends_a_calibration_whose_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, reads = threading.Event(), itertools.count()

    class Hangs(FakeSource):
        def read_into(self, sample: int, buffer: memoryview) -> int:
            if next(reads) == 0:  # a second Ctrl-C might come after the calibration
                _thread.interrupt_main()
            answers.wait()
            return super().read_into(sample, buffer)

    monkeypatch.setattr(in_threads, "_GRACE_SECONDS", 0.01)
    try:
        with pytest.raises(KeyboardInterrupt):
            calibrate(Hangs(100), max_seconds=60)
    finally:
        answers.set()


# -- The time ------------------------------------------------------------------------------------------


class VirtualTime:
    """A clock that passes when something takes time, whoever does it, and a little when it is looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._passing = threading.Lock()

    def __call__(self) -> float:
        self.take(1e-5)
        return self.seconds

    def take(self, seconds: float) -> None:
        with self._passing:
            self.seconds += seconds


def slow_after(reads: int, slow_seconds: float, time: VirtualTime) -> FakeSource:
    """Return a source that delivers 100 samples a second to all readers together, and from then on hardly any."""
    source = FakeSource(1000)
    done = iter(range(10**9))
    plain = source.read_into

    def read_into(sample: int, buffer: memoryview) -> int:
        time.take(0.01 if next(done) < reads else slow_seconds)
        return plain(sample, buffer)

    source.read_into = read_into  # type: ignore[method-assign]
    return source


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0])
def test_it_takes_the_given_time_and_the_last_reads(seconds: float) -> None:
    time = VirtualTime()

    measure_machine(slow_after(10**9, 0.0, time), max_seconds=seconds, clock=time)

    assert time.seconds < seconds + 64 * 0.01 + 0.1


def test_threads_do_not_come_from_a_level_that_was_cut_short() -> None:
    """The store stops nearly when sixteen read: what is written comes from the eight before."""
    time = VirtualTime()

    calibration = measure_machine(slow_after(550, 5.0, time), max_seconds=10, clock=time)

    most = calibration.levels[-1].readers
    assert most < 64
    assert calibration.machine.source.threads <= most
    assert calibration.not_measured == tuple(
        readers for readers in (1, 2, 4, 8, 16, 32, 64) if readers > most
    )
    assert f"# CAUTION: {' and '.join(map(str, calibration.not_measured))} readers" in calibration.to_toml()


def test_a_single_slow_read_makes_no_machine() -> None:
    time = VirtualTime()

    with pytest.raises(
        ConfigError, match=r"one reader got through 1 read .* 50 s each; .* --seconds 240[01]$"
    ):
        measure_machine(slow_after(0, 50.0, time), max_seconds=10, clock=time)


# -- The page cache ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> FlatFolder:
    for name in range(20):
        (tmp_path / f"{name}.jpg").write_bytes(os.urandom(5000))
    return FlatFolder(tmp_path)


def test_a_path_is_opened_and_no_source_of_letters(files: FlatFolder) -> None:
    machine = calibrate(files.root, max_seconds=AMPLE)

    assert 0 <= machine.source.latency_seconds < AMPLE  # 0 where files come from the page cache
    with pytest.raises(DataError, match="missing"):
        calibrate(Path(files.root) / "missing")


@pytest.mark.parametrize(
    ("share", "expected", "said"),
    [
        (0.0, PageCache.COLD, "(cold)"),
        (1.0, PageCache.WARM, "(warm)"),
        (0.5, PageCache.MIXED, "(mixed)"),
        (None, PageCache.UNKNOWN, "(cold or warm) is unknown"),
    ],
)
def test_cold_or_warm_is_said(
    files: FlatFolder, monkeypatch: pytest.MonkeyPatch, share: float | None, expected: PageCache, said: str
) -> None:
    monkeypatch.setattr(calibrate_module, "cached_share", lambda _: share)

    calibration = measure_machine(files, max_seconds=AMPLE)

    assert calibration.page_cache == expected
    assert said in calibration.to_toml()
    assert Machine.from_toml(calibration.to_toml()) == calibration.machine


def test_a_reader_drops_each_file_that_it_has_opened(
    files: FlatFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[str, str]] = []

    def note(descriptor: int) -> None:
        dropped.append((os.readlink(f"/proc/self/fd/{descriptor}"), threading.current_thread().name))

    monkeypatch.setattr(calibrate_module, "drop_cached", note)

    calibration = measure_machine(files, max_seconds=AMPLE)

    assert len(dropped) == sum(level.reads for level in calibration.levels)
    assert {path for path, _ in dropped} == {files.path_of(sample) for sample in range(20)}
    assert {thread for _, thread in dropped} == {"penstock-calibrate"}


def test_dropping_is_in_the_given_time_but_not_in_that_of_a_read(
    files: FlatFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = VirtualTime()
    monkeypatch.setattr(calibrate_module, "drop_cached", lambda _: time.take(0.1))
    source = StoreReader(files, time)
    timed = read_until(source, np.arange(20), 1, 1.0, 2.0, time, keep=False)

    assert 8 <= len(timed.ends) <= 10
    assert max(np.subtract(timed.ends, timed.starts)) < 0.01


def test_a_vanished_file_is_left_to_the_read_that_reports_it(files: FlatFolder) -> None:
    os.unlink(files.path_of(7))

    assert measure_machine(files, max_seconds=AMPLE).unreadable > 0


def test_nothing_is_said_about_the_cache_of_what_are_no_files() -> None:
    assert measure_machine(FakeSource(50), max_seconds=AMPLE).page_cache == PageCache.UNKNOWN


def test_what_was_measured_in_a_moment_is_said_to_be() -> None:
    """Half a second of 100 samples a second, and ten."""
    briefly, long = (
        measure_machine(slow_after(10**9, 0.0, time), max_seconds=seconds, clock=time).to_toml()
        for seconds, time in ((0.5, VirtualTime()), (10.0, VirtualTime()))
    )

    assert re.search(
        r"# CAUTION: all of this was read within \d+ ms, so that other users .* --seconds", briefly
    )
    assert "was read within" not in long


def test_a_limit_that_was_not_reached_and_one_client_alone_are_said() -> None:
    few = Level(1, np.full(9, 1000), np.full(9, 0.01), 1e5)

    def written(most_bytes_per_second: float, clients: Curve | None = None) -> str:
        source = SharedStore(clients=clients, read=Curve.flat(2e5))
        machine = Machine(source, (StorageClass("staging", 1, 1, Curve.flat(1e9)),))
        most = Level(2, np.full(9, 1000), np.full(9, 0.01), most_bytes_per_second)
        return Calibration(machine, (few, most), PageCache.UNKNOWN, unreadable=0).to_toml()

    assert "limit was not reached" in written(1.9e5)
    assert "limit was not reached" not in written(1.2e5)
    assert "One client was measured" in written(1.2e5, Curve.flat(2e5))
    assert "One client was measured" not in written(1.2e5, Curve(((1, 1e5), (2, 2e5))))


# -- The progress bar ----------------------------------------------------------------------------------


def test_nothing_is_shown_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    calibrate(FakeSource(50), max_seconds=AMPLE)

    assert capfd.readouterr() == ("", "")


def test_a_terminal_is_shown_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as pool, open(theirs, "w") as terminal:
        shown = pool.submit(read_until_closed, screen)
        monkeypatch.setattr(sys, "stderr", terminal)
        calibrate(FakeSource(50), max_seconds=AMPLE)
        terminal.close()
        text = shown.result()
    os.close(screen)

    assert "calibrating" in text
    assert "memory: " in text


def read_until_closed(screen: int) -> str:
    text = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while chunk := os.read(screen, 100_000):
            text += chunk
    return text.decode()


# -- In real time --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_store_is_recognised() -> None:
    """5 ms + 5 ms and 50 MB/s, measured for ten seconds: what the model of the thesis' shared store needs."""
    rng = np.random.default_rng(2)
    behind = FakeSource(2000)
    behind.sizes_bytes = rng.integers(50_000, 150_000, 2000)
    with SlowSource(behind, 0.005, 0.005, 50e6) as slow:
        machine = calibrate(slow, max_seconds=10)

    assert machine.source.latency_seconds == pytest.approx(0.010, rel=0.1)
    assert machine.source.read is not None
    assert [machine.source.read.at(n) for n in (1, 2, 8, 50)] == pytest.approx([50e6] * 4, rel=0.1)
