"""Thorough calibration: what is measured, what the machine takes of it, what is refused, and that nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.ranks.in_memory import run

from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure import file_rates
from penstock.measure.file_rates import (
    Access,
    FileRates,
    MeasuredCurve,
    ScratchFile,
    SequentialMaximum,
    accesses,
    measure_files,
    remarks,
    run_access,
)
from penstock.measure.in_threads import rate_of_all
from penstock.measure.pagecache import cached_share
from penstock.measure.rank_rates import RankRates, measure_ranks
from penstock.measure.spread import Spread, interval_ranks
from penstock.measure.thorough import machine_of
from penstock.ranks import Ranks
from penstock.store.mounts import mount_of, mounted


def test_the_interval_of_a_median_is_that_of_the_binomial_distribution() -> None:
    """Thesis, equation 5.1: of ten runs the second and the ninth."""

    def inside(repeats: int, first: int, last: int) -> float:
        return float(sum(comb(repeats, count) for count in range(first, last)) / 2**repeats)

    assert interval_ranks(10) == (2, 9)
    for repeats in range(6, 60):
        first, last = interval_ranks(repeats)
        assert first + last == repeats + 1
        assert inside(repeats, first, last) >= 0.95
        assert first + 1 >= last - 1 or inside(repeats, first + 1, last - 1) < 0.95
    assert [interval_ranks(few) for few in (1, 2, 5)] == [(1, 1), (1, 2), (1, 5)]
    assert Spread.of([5.0, 1, 9, 2, 3, 4, 6, 7, 8, 10]) == Spread(5.5, 2, 9, 10)


def test_a_rate_counts_what_was_done_while_all_threads_worked() -> None:
    """The second thread begins at 2 s; at 4 s the first has ended, and the second continues, faster."""
    first = np.array([0.0, 2.0, 4.0]), np.array([100.0, 20.0])
    second = np.array([2.0, 4.0, 5.0]), np.array([20.0, 100.0])
    apart = np.array([7.0, 8.0]), np.array([30.0])

    assert rate_of_all([first, second]) == (20 + 20) / 2
    assert rate_of_all([first]) == 120 / 4
    # A round that began before counts for its part.
    assert rate_of_all([first, (np.array([1.0, 4.0]), np.array([30.0]))]) == (50 + 20 + 30) / 3
    # No two worked at the same time: all they did, over all the time.
    assert rate_of_all([first, apart]) == 150 / 8


def test_requests_are_of_a_sample_and_whole_blocks() -> None:
    found = accesses(100_000)

    assert {each.request_bytes for each in found if each.is_random and not each.is_write} == {4096, 102_400}
    assert all(each.request_bytes % 4096 == 0 for each in (*found, *accesses(1), *accesses(1e9)))


def test_a_scratch_file_has_no_name_and_is_read_past_the_page_cache(tmp_path: Path) -> None:
    """The first block differs from the others; what is read at an offset is what was written there."""
    blocks = np.frombuffer(np.random.default_rng(0).bytes(3 * 4096), np.uint8)
    aligned = file_rates._noise(3 * 4096)
    aligned[:] = blocks
    with ScratchFile(tmp_path) as scratch:
        scratch.grow(aligned.size, aligned)
        into = file_rates._noise(2 * 4096)
        scratch.read(np.array([8192, 0]), 4096, into)

        assert os.listdir(tmp_path) == []
        assert into.tobytes() == blocks[8192:].tobytes() + blocks[:4096].tobytes()
        scratch.read(np.array([8192, 0, 4096]), 4096, into)  # from the front again, where it is full
        assert into.tobytes() == blocks[4096:8192].tobytes() + blocks[:4096].tobytes()
        if scratch.is_direct:
            assert cached_share(scratch.descriptor) == 0.0


def test_calls_of_a_fast_disk_grow_and_read_into_the_same_memory() -> None:
    counts = list[int]()

    class FastFile(ScratchFile):
        def __init__(self) -> None:
            self.size_bytes = 1 << 30

        def read(self, offsets: NDArray[np.int64], request_bytes: int, into: NDArray[np.uint8]) -> None:
            counts.append(offsets.size)
            assert into.size == request_bytes

    access = Access(is_write=False, is_random=True, request_bytes=96 << 10)
    for _ in itertools.islice(file_rates._rounds(FastFile(), access, 0, 1, call_seconds=1e9), 13):
        pass

    assert counts == [*(2**power for power in range(11)), 1024, 1024]


@for_each(
    ("becomes", "message"),
    [
        ("/dev/full", "cannot be written: No space left on device; make some space there"),
        ("a pipe", "cannot be read: Illegal seek; is its device still there?"),
        ("an empty file", "cannot be read: the file that was just written is cut off"),
    ],
)
def test_a_disk_that_fills_up_or_vanishes_is_named(tmp_path: Path, becomes: str, message: str) -> None:
    """As far as reads and writes can tell, a descriptor that becomes another one's is a device that does."""
    block, twice = file_rates._noise(4096), np.array([0, 0])
    with ScratchFile(tmp_path) as scratch, ExitStack() as others:
        scratch.grow(block.size, block)
        if becomes == "a pipe":
            ends = os.pipe()
            others.callback(os.close, ends[1])
            other = ends[0]
        elif becomes == "an empty file":
            other = os.memfd_create("empty")
        else:
            other = os.open(becomes, os.O_RDWR)
        others.callback(os.close, other)
        os.dup2(other, scratch.descriptor)

        use = (
            partial(scratch.write, block, 0)
            if becomes == "/dev/full"
            else partial(scratch.read, twice, 4096, block)
        )
        with pytest.raises(DataError, match=re.escape(f"{tmp_path} {message}")):
            use()


def test_a_folder_is_measured_by_access_and_threads_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rates, "_LEAST_BYTES", 8 << 20)
    said: list[str] = []

    found = measure_files(tmp_path, 10_000, 0.0, time.perf_counter, said.append, threads=(1, 2), repeats=2)

    assert os.listdir(tmp_path) == []
    assert [curve.access for curve in found.curves] == list(accesses(10_000))
    assert all([users for users, _ in curve.points] == [1, 2] for curve in found.curves)
    assert all(spread.low > 0 and spread.repeats == 2 for curve in found.curves for _, spread in curve.points)
    assert found.maximum is not None
    assert (found.maximum.file_bytes, found.maximum.read.repeats) == (8 << 20, 5)
    assert len(said) == 3


@pytest.mark.parametrize("kind", ["missing", "read-only", "full"])
def test_a_folder_that_cannot_be_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path
    if kind == "missing":
        folder /= "nowhere"
    if kind == "read-only":  # to root, too
        folder = Path("/proc/self")
    if kind == "full":
        monkeypatch.setattr(file_rates, "_LEAST_BYTES", 1 << 60)

    with pytest.raises(
        DataError, match=rf"{folder} .*: (name a folder|make some space)|{folder} .*; name a folder"
    ):
        measure_files(folder, 1000, 0.1, time.perf_counter, lambda line: None)


def test_what_is_no_local_disk_is_said(tmp_path: Path) -> None:
    """The type of a file system as the kernel's own tool knows it."""
    known = subprocess.run(["stat", "-f", "-c", "%T", "/proc"], capture_output=True, text=True, check=True)

    mount = mount_of("/proc", mounted())
    assert mount is not None
    assert mount.kind == known.stdout.strip() == "proc"
    assert "memory (tmpfs)" in remarks("tmpfs", True, 0.0)[0]
    assert all("network" in remarks(kind, True, 0.0)[0] for kind in ("nfs4", "lustre", "fuse.s3fs", "fuse"))
    assert remarks("ext4", True, 1.0) == remarks("xfs", False, 0.01) == ()
    assert "page cache" in remarks("ext4", False, None)[0]
    assert "page cache" in remarks("ext4", False, 0.5)[0]


def _curve(access: Access, *points: tuple[int, float]) -> MeasuredCurve:
    return MeasuredCurve(access, tuple((users, Spread.of([rate])) for users, rate in points))


def test_the_machine_takes_reads_of_samples_and_writes_in_sequence() -> None:
    """Of a disk the tier's own pattern; of the store the rest of what its samples cannot show."""
    base = Machine(
        SharedStore(Curve.flat(100e6), Curve.flat(100e6)),
        tuple(StorageClass(name, 1000, 2, Curve.flat(1e9)) for name in ("staging", "memory")),
    )
    curves = (
        _curve(Access(False, True, 4096), (1, 10e6), (2, 20e6)),
        _curve(Access(False, True, 102_400), (1, 100e6), (2, 190e6), (4, 200e6)),
        _curve(Access(False, False, 1 << 20), (1, 300e6)),
        _curve(Access(True, True, 4096), (1, 5e6)),
        _curve(Access(True, False, 1 << 20), (1, 150e6), (4, 160e6)),
    )
    maximum = SequentialMaximum(1, Spread.of([1]), Spread.of([1]))
    disk = FileRates("/scratch", "ext4", True, 0.0, 1000, curves, maximum, ())
    copies = _curve(Access(True, False, 0), (1, 5e9), (2, 8e9))

    alone = machine_of(base, copies, [disk], disk, None)
    rates = RankRates(
        _curve(Access(False, True, 102_400), (1, 100e6), (2, 150e6)),
        _curve(Access(False, False, 1 << 20), (1, 90e6), (2, 400e6)),
        Spread.of([2e9]),
        is_one_host=True,
    )
    together = machine_of(base, copies, [disk], disk, rates, 2)

    tier = alone.storage[2]
    assert (tier.backend, tier.path, tier.threads) == ("filesystem", "/scratch", 2)
    assert tier.read == Curve(((1, 100e6), (2, 190e6), (4, 200e6)))
    assert tier.write == Curve(((1, 150e6), (4, 160e6)))
    assert [each.read for each in alone.storage[:2]] == [Curve(((1, 5e9), (2, 8e9)))] * 2
    assert (alone.source.sequential, alone.source.write) == (Curve.flat(300e6), Curve.flat(160e6))
    # Nowhere below the rate of random reads.
    store = together.source
    assert (store.clients, store.sequential) == (
        Curve(((1, 100e6), (2, 150e6))),
        Curve(((1, 100e6), (2, 400e6))),
    )
    assert (together.ranks, together.network_bytes_per_second) == (2, 2e9)
    assert together.source_network_bytes_per_second == 100e6
    assert Machine.from_toml(together.to_toml()) == together


def test_ranks_read_what_the_next_one_wrote_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.measure.rank_rates._FILE_BYTES", 8 << 20)
    monkeypatch.setattr("penstock.measure.rank_rates._LEAST_SECONDS", 0.0)
    read: list[tuple[int, int]] = []

    def note(scratch: ScratchFile, access: Access, threads: int, *rest: Any) -> float:
        read.append((os.fstat(scratch.descriptor).st_ino, threads))
        return run_access(scratch, access, threads, *rest)

    monkeypatch.setattr("penstock.measure.rank_rates.run_access", note)

    def part(ranks: Ranks) -> RankRates:
        return measure_ranks(ranks, tmp_path, 10_000, 2, 0.0, time.perf_counter, lambda line: None, repeats=2)

    first, *others = run(3, part)

    assert os.listdir(tmp_path) == []
    assert first == others[0] == others[1]
    assert [count for count, _ in first.clients.points] == [1, 2, 3]
    assert first.network.median > 0
    assert first.is_one_host
    # Two accesses, twice, by one, two and three ranks, from a file of each.
    assert len(read) == 2 * 2 * (1 + 2 + 3)
    assert len({inode for inode, _ in read}) == 3


def test_ranks_that_share_a_folder_that_cannot_be_written_hear_of_it(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> RankRates:
        where = tmp_path / "nowhere" if ranks.rank == 1 else tmp_path
        return measure_ranks(ranks, where, 1e4, 1, 0.0, time.perf_counter, lambda line: None, repeats=1)

    errors = run(2, part)

    assert all(isinstance(error, DataError) and "nowhere" in str(error) for error in errors)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_the_command_measures_all_places_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_rates, "_LEAST_BYTES", 8 << 20)
    # On a busy machine rates may seem to grow with each doubling of readers until the time is over.
    monkeypatch.setattr("penstock.measure.evidence.is_still_growing", lambda levels: False)
    for module in ("calibrate", "memory_rates"):
        monkeypatch.setattr(f"penstock.measure.{module}.COPIED_BYTES", 1_000_000)
    data, disk = tmp_path / "data", tmp_path / "disk"
    data.mkdir()
    disk.mkdir()
    for number in range(40):
        (data / f"{number}.jpg").write_bytes(bytes(1000))
    arguments = ["calibrate", str(data), "--thorough", "--repeats", "2", "--seconds", "3", "--json"]
    arguments += [
        "--local-disk",
        str(disk),
        "--out",
        str(tmp_path / "m.toml"),
        "--plot",
        str(tmp_path / "m.png"),
    ]

    assert main(arguments) == 0

    results = json.loads(capsys.readouterr().out)["results"]
    machine = Machine.from_toml((tmp_path / "m.toml").read_text())
    assert {each["place"] for each in results} == {"memory", str(disk), "samples of the source"}
    assert all(each["low_bytes_per_second"] <= each["bytes_per_second"] for each in results)
    assert [each.path for each in machine.storage] == [None, None, str(disk)]
    assert (tmp_path / "m.png").stat().st_size > 10_000
    assert sorted(os.listdir(tmp_path)) == ["data", "disk", "m.png", "m.toml"]
    assert os.listdir(disk) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "x", "--local-disk", "/scratch"], "--local-disk belongs to --thorough"),
        (["calibrate"], "name either a SOURCE"),
        (["calibrate", "x", "--from", "y"], "name either a SOURCE"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "access",
    [Access(False, True, 4096), Access(False, False, 1 << 20), Access(True, False, 1 << 20)],
    ids=lambda access: access.label,
)
def test_fio_finds_the_same_rates(tmp_path: Path, access: Access) -> None:
    """fio, by the Debian package of that name, on the same folder, in turns: within a factor of two, as others use the
    disk meanwhile. On a busy machine they are not; how near they are, `benchmarks/fio_rates.py` says."""
    if shutil.which("fio") is None:
        pytest.fail("fio is not installed: `make test-system` installs packages.txt")
    ours, theirs = dict[int, list[float]](), dict[int, list[float]]()
    verb, order = "write" if access.is_write else "read", "rand" if access.is_random else ""
    with ScratchFile(tmp_path) as scratch:
        if not scratch.is_direct:
            pytest.fail(f"{tmp_path} has no direct I/O; run this test in a folder on a disk")
        scratch.grow(256 << 20, file_rates._noise(8 << 20))
        for threads in (1, 4, 1, 4, 1, 4):
            ours.setdefault(threads, []).append(
                run_access(scratch, access, threads, time.perf_counter() + 1.0, time.perf_counter)
            )
            options = f"--name=x --filename={tmp_path}/fio --rw={order}{verb} --bs={access.request_bytes} --direct=1"
            part = 256 if access.is_random else 256 // threads
            options += f" --size={part}M --offset_increment={0 if access.is_random else part}M"
            options += f" --ioengine=psync --numjobs={threads} --group_reporting --runtime=1 --time_based"
            options += " --output-format=json"
            done = subprocess.run(["fio", *options.split()], capture_output=True, text=True, check=True)
            theirs.setdefault(threads, []).append(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])

    for threads in (1, 4):
        assert 0.5 < np.median(ours[threads]) / np.median(theirs[threads]) < 2.0


def test_no_repeats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repeats is 0"):
        interval_ranks(0)
