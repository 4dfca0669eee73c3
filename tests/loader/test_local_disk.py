"""Samples kept on a local disk: read there in later epochs and later runs, whatever happens to the disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.patience import patient, wait_until

from penstock.errors import ConfigError, DataError
from penstock.loader import NUMPY, Loader, LoaderConfig, local_disk, predict, setup
from penstock.loader.local_disk import Content, Disk, fingerprint_of, kept_on, open_disks
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.explain import explain
from penstock.policy import Placement
from penstock.policy.forms import DiskPart
from penstock.policy.runnable import WriteQueue
from penstock.simulate import loading
from penstock.store import FlatFolder, MemoryTier
from penstock.store import disk as store_disk
from penstock.store.calls import Calls
from penstock.store.disk import DiskTier
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.mounts import Mount
from penstock.trace import read_trace
from penstock.trace.schema import NO_PEER, SOURCE, Kind

SAMPLES, NBYTES, BATCH = 96, 2_000, 8


class CountedFolder(FlatFolder):
    """Counts which samples are read from the store; its files take a while."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, extensions=None)
        self.reads: list[int] = []

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        self.reads += ids.tolist()
        time.sleep(4e-3)  # a disk is not asked for what a store gives as fast
        return super().read_group(ids, into, begins)


@pytest.fixture(autouse=True)
def _much_space_to_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of these tests is as fast as their disk: whatever finds no space there is read once more."""
    monkeypatch.setattr(setup, "_QUEUE", WriteQueue(0.6, 1 << 30))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for sample in range(SAMPLES):
        (folder / f"{sample:03}.bin").write_bytes(content(sample))
    return folder


def content(sample: int) -> bytes:
    return np.random.default_rng(sample).bytes(NBYTES)


#: By which a disk is always the sooner one, on a busy machine, too.
SLOW_STORE = Machine(
    SharedStore(None, Curve.flat(1e6), 100.0),
    (StorageClass("staging", 10**6, 1, Curve.flat(1e9)), StorageClass("memory", 10**6, 1, Curve.flat(1e9))),
)

Run = tuple[list[bytes], list[int], list[str]]


def run(
    data: Path,
    *,
    memory: str = "300 kB",
    decoders: int = 1,
    epochs: int = 3,
    before_last: Callable[[], object] = list,
    **arguments: Any,
) -> Run:
    """Return the batches of a run, the samples that were read from the store, and what was reported."""
    source, lines = CountedFolder(data), list[str]()
    with Loader(
        source,
        batch_size=BATCH,
        epochs=epochs,
        seed=5,
        memory=memory,
        decoders=decoders,
        transforms=[DecodeRaw("uint8", (NBYTES,))],
        dtype="uint8",
        report=lines.append,
        **arguments,
    ) as loader:
        batches = [images.tobytes() for _ in range(epochs - 1) for images, _ in loader]
        before_last()
        batches += [images.tobytes() for images, _ in loader]
    return batches, source.reads, lines


def tier_at(disk: Path, data: Path) -> DiskTier:
    source = CountedFolder(data)
    return DiskTier(disk, 10**6, fingerprint_of(source), source.sizes_bytes)


def kept(data: Path, disk: Path) -> set[int]:
    """Return which samples a disk has, right to the last byte."""
    tier = tier_at(disk, data)
    ids = tier.held()
    into = np.empty(ids.size * NBYTES, np.uint8)
    failed = {index for index, _ in tier.read_group(ids, into, NBYTES * np.arange(ids.size + 1))}
    tier.close()
    found = into.reshape(-1, NBYTES)
    return {
        int(sample)
        for index, sample in enumerate(ids)
        if index not in failed and found[index].tobytes() == content(int(sample))
    }


def test_samples_are_dropped_from_memory_and_disk_after_their_last_use_and_batches_stay_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four ranks; what it has dropped makes space on both for others that it still reads."""
    gone: dict[type, threading.Event] = {MemoryTier: threading.Event(), DiskTier: threading.Event()}

    def noting(tier: type, evict: Callable[[Any, Ids], None]) -> Callable[[Any, Ids], None]:
        def noted(self: Any, ids: Ids) -> None:
            held = any(map(self.contains, ids.tolist()))
            evict(self, ids)
            # What a disk is writing at the time stays.
            assert tier is DiskTier or not any(map(self.contains, ids.tolist()))
            if held:
                gone[tier].set()

        return noted

    for tier in (MemoryTier, DiskTier):
        monkeypatch.setattr(tier, "evict", noting(tier, tier.evict))
    rank: dict[str, Any] = {"rank": 0, "world_size": 4, "epochs": 12, "memory": "110 kB", "readers": 4}
    plain, _, _ = run(data, policy="staging", **rank)

    disk = {str(tmp_path / "disk"): 20 * NBYTES}
    rank |= {"policy": "frequency-cleanup", "local_disk": disk}
    dropping, _, _ = run(data, before_last=lambda: [gone[tier].wait(patient(5.0)) for tier in gone], **rank)

    assert dropping == plain
    assert all(event.is_set() for event in gone.values())


def test_what_memory_cannot_keep_a_disk_does_and_the_next_run_finds_it(data: Path, tmp_path: Path) -> None:
    plain, plain_reads, _ = run(data, memory="120 kB")
    first, first_reads, lines = run(data, local_disk=tmp_path / "disk")
    second, second_reads, more = run(data, local_disk=tmp_path / "disk", machine=SLOW_STORE)
    missing = [3, 50, 77]
    with closing(tier_at(tmp_path / "disk", data)) as tier:
        tier.evict(np.array(missing))
    third, third_reads, _ = run(data, local_disk=tmp_path / "disk", machine=SLOW_STORE)
    (memory,) = (line for line in lines if "of memory" in line)

    assert plain == first == second == third
    assert len(plain_reads) > 2 * SAMPLES
    assert set(first_reads) == kept(data, tmp_path / "disk") == set(range(SAMPLES))
    assert second_reads == []
    assert sorted(third_reads) == missing
    assert re.search(
        f"keeps .* % of the samples, .* and copies of .* on local disk '{tmp_path / 'disk'}'", memory
    )
    assert "for samples that wait to be written to disk" in memory
    assert any(" there already" in line for line in more)


def test_a_disk_that_gets_only_copies_of_what_memory_keeps_says_so(data: Path, tmp_path: Path) -> None:
    copies = (
        f"; keeps copies of {SAMPLES} samples that memory keeps, 192 kB, on local disk '{tmp_path / 'disk'}'"
    )

    for ending in (copies, f"{copies}, {SAMPLES} samples there already"):
        _, _, lines = run(data, memory="5 MB", local_disk=tmp_path / "disk")
        assert any(line.endswith(ending) for line in lines), lines


def test_too_little_memory_beside_a_disk_is_refused_with_an_amount_that_works_in_a_prediction_too(
    data: Path, tmp_path: Path
) -> None:
    config = partial(
        LoaderConfig,
        FlatFolder(data, extensions=None),
        batch_size=BATCH,
        epochs=1,
        machine=SLOW_STORE,
        local_disk=tmp_path / "disk",
        transforms=[DecodeRaw("uint8", (NBYTES,))],
        dtype="uint8",
    )

    with pytest.raises(
        ConfigError, match="memory is 60 kB, of which 36 kB are for samples that wait"
    ) as refused:
        Loader(config(memory="60 kB"), report=None)
    with pytest.raises(ConfigError, match=re.escape(str(refused.value))):
        predict(config(memory="60 kB"), step_seconds=0.01)
    (asked,) = re.findall(r"give ([\d.]+ kB), or make", str(refused.value))
    with Loader(config(memory=asked), report=None) as loader:
        assert sum(len(labels) for _, labels in loader) == SAMPLES
    assert predict(config(memory=asked), step_seconds=0.01).epochs()[0].samples == SAMPLES


def test_any_number_of_threads_memory_and_disks_gives_the_same_batches(data: Path, tmp_path: Path) -> None:
    expected, _, _ = run(data)
    disks = {str(tmp_path / "a"): "50 kB", str(tmp_path / "b"): "60 kB"}

    assert run(data, local_disk=disks, decoders=0)[0] == expected
    assert run(data, local_disk=disks, decoders=3, memory="200 kB")[0] == expected
    assert {path.name for path in tmp_path.iterdir()} == {"data", "a", "b"}


def test_one_flipped_byte_on_a_disk_is_one_read_of_the_store_which_is_counted_and_mends_it(
    data: Path, tmp_path: Path
) -> None:
    expected, _, _ = run(data, local_disk=tmp_path / "disk")
    (file,) = (tmp_path / "disk").glob("*.samples")
    stored = bytearray(file.read_bytes())
    stored[stored.index(content(50)) + 1234] ^= 1
    file.write_bytes(stored)
    how: dict[str, Any] = {"local_disk": tmp_path / "disk", "machine": SLOW_STORE}

    found, reads, lines = run(data, **how, trace=tmp_path / "run.trace")
    intact = kept(data, tmp_path / "disk")
    again, reads_again, more = run(data, **how)

    assert found == again == expected
    assert reads == [50], "in three epochs"
    assert intact == set(range(SAMPLES)), "it was written anew"
    assert reads_again == []
    trace = read_trace(tmp_path / "run.trace")
    (retry,) = trace.spans[trace.spans["kind"] == Kind.RETRY]
    assert (retry["place"], retry["peer"], retry["samples"]) == (2, NO_PEER, 1)
    lost = "1 sample could not be had from"
    assert len([line for line in lines if lost in line]) == 1
    assert not any(lost in line for line in more)
    assert explain(trace).notes[-1].startswith(lost)


@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(each, marks=pytest.mark.slow) for each in ("garbage", "remove"))]
)
def test_a_disk_that_is_damaged_between_two_runs_changes_no_batch(
    data: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage is found, and mended, where the disk is asked; for a few samples the store may be the sooner one."""
    asked, read_group = set[int](), DiskTier.read_group

    def noting(tier: DiskTier, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        asked.update(ids.tolist())
        return read_group(tier, ids, into, begins)

    expected, _, _ = run(data, local_disk=tmp_path / "disk")
    (file,) = (tmp_path / "disk").glob("*.samples")
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "remove":
        file.unlink()
    else:
        (index,) = (tmp_path / "disk").glob("*.index")
        index.write_bytes(os.urandom(5_000))

    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "read_group", noting)
        found, reads, _ = run(data, local_disk=tmp_path / "disk")
    intact = kept(data, tmp_path / "disk")
    assert asked
    assert asked <= intact, "what was read anew was written anew"
    again, _, _ = run(data, local_disk=tmp_path / "disk")

    assert found == again == expected
    assert len(reads) >= SAMPLES // 4


def test_a_disk_that_fails_in_the_middle_of_a_run_is_reported_once_and_changes_no_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, _ = run(data)
    write, read, calls = os.pwrite, DiskTier._read, list[int]()

    def fails_to_write(number: int) -> Any:
        def fail(file: int, content: bytes, begin: int) -> int:
            calls.append(begin)
            if len(calls) > 20:
                raise OSError(number, os.strerror(number))
            return write(file, content, begin)

        return fail

    def fails_to_read(
        tier: DiskTier, file: int, ids: Ids, into: Bytes, begins: Ids, is_loose: bool
    ) -> list[int]:
        calls.append(file)
        if len(calls) > 5:
            return list(range(ids.size))
        return read(tier, file, ids, into, begins, is_loose)

    def is_removed(file: int, content: bytes, begin: int) -> int:
        calls.append(begin)
        if len(calls) == 20:
            shutil.rmtree(tmp_path / "disk")
        return write(file, content, begin)

    for where, name, fault, line in (
        (os, "pwrite", fails_to_write(errno.ENOSPC), "cannot be written any more (No space left on device)"),
        (DiskTier, "_read", fails_to_read, "cannot be read, so that no more are kept on this disk"),
        (os, "pwrite", is_removed, "was removed: this run still reads from it"),
    ):
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(where, name, fault)
            found, _, lines = run(data, local_disk=tmp_path / "disk")
        assert found == expected
        of_disk = [each for each in lines if str(tmp_path / "disk") in each]
        if name == "_read" and "were damaged or lost" in of_disk[-1]:  # more than one, said at the end
            of_disk.pop()
        assert len(of_disk) == 2, "the start line and the fault"
        assert any(line in each for each in lines)


def test_nothing_is_read_for_a_disk_that_has_failed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int, content: bytes, begin: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    source, lines = CountedFolder(data), list[str]()
    with Loader(
        source,
        batch_size=BATCH,
        epochs=2,
        memory="200 kB",
        prefetch=1,
        readers=2,
        decoders=1,
        transforms=[DecodeRaw("uint8", (NBYTES,))],
        dtype="uint8",
        report=lines.append,
        local_disk=tmp_path / "disk",
    ) as loader:
        next(iter(loader))
        wait_until(lambda: any("cannot be written any more" in line for line in lines))
        wait_until(
            lambda: loader._parts.engine is not None and not loader._parts.engine._scheduler.moves_running
        )
        assert len(source.reads) < SAMPLES / 2


def test_a_disk_that_is_full_or_broken_at_the_start_is_left_out_and_a_network_file_system_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, _ = run(data)
    with monkeypatch.context() as patched:
        patched.setattr(os, "makedirs", raises(OSError(errno.EROFS, os.strerror(errno.EROFS))))
        found, _, lines = run(data, local_disk=tmp_path / "disk")
    assert found == expected
    (line,) = (line for line in lines if "Read-only file system" in line)
    assert line.endswith("this run continues without it")

    with monkeypatch.context() as patched:
        patched.setattr(local_disk, "mounted", lambda: [Mount("/", "nfs4", "server:/scratch", "rw")])
        found, _, lines = run(data, local_disk=tmp_path / "disk")
    assert found == expected
    assert any(f"{tmp_path / 'disk'} lies on nfs4 (server:/scratch)" in line for line in lines)


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_other_data_full_refresh_and_other_memory_are_told_apart(data: Path, tmp_path: Path) -> None:
    run(data, local_disk=tmp_path / "disk")
    other = tmp_path / "other"
    other.mkdir()
    for sample in range(SAMPLES):
        (other / f"{sample:03}.bin").write_bytes(content(sample + 1_000))

    expected, _, _ = run(other)
    found, reads, _ = run(other, local_disk=tmp_path / "disk")
    assert found == expected
    assert set(reads) == set(range(SAMPLES))

    # What another memory keeps is on the disk just as well.
    _, reads, _ = run(data, local_disk=tmp_path / "disk", memory="250 kB", machine=SLOW_STORE)
    assert reads == []


def test_the_disks_of_a_machine_are_used(data: Path, tmp_path: Path) -> None:
    read = Curve(((1, 1e9),))
    storage = (
        StorageClass("staging", 10**6, 1, read),
        StorageClass("ssd", 10**6, 2, read, backend="filesystem", path=str(tmp_path / "ssd")),
    )
    machine = Machine(SLOW_STORE.source, storage)

    expected, _, _ = run(data)
    found, _, _ = run(data, machine=machine)
    _, reads, lines = run(data, machine=machine)

    assert found == expected
    assert reads == []
    assert any(f"on local disk '{tmp_path / 'ssd'}'" in line for line in lines)
    how: dict[str, Any] = {
        "transforms": [DecodeRaw("uint8", (NBYTES,))],
        "dtype": "uint8",
        "memory": "300 kB",
    }
    config = LoaderConfig(CountedFolder(data), batch_size=BATCH, epochs=3, seed=5, machine=machine, **how)
    with Loader(config, report=None) as loader:
        warm, cold = loader.predict(step_seconds=0.01), predict(config, step_seconds=0.01)
    assert [each.reads_by_place.get(SOURCE, 0) for each in warm.epochs()] == [0, 0, 0]
    assert cold.epochs()[0].reads_by_place[SOURCE] >= SAMPLES


def test_a_prediction_counts_what_a_disk_gets_of_what_memory_keeps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has space for all. One processor decodes a sample in a second, and writes one in ten."""
    monkeypatch.setattr(loading, "_WRITE_SECONDS", 10.0)
    quick = SharedStore(None, Curve.flat(1e9))
    on = replace(SLOW_STORE, source=quick, preprocess_bytes_per_second=NBYTES, processors=1)

    def seconds(local_disk: Path | None) -> list[float]:
        config = LoaderConfig(
            FlatFolder(data, extensions=None),
            batch_size=BATCH,
            epochs=2,
            seed=5,
            machine=on,
            memory="5 MB",
            local_disk=local_disk,
            transforms=[DecodeRaw("uint8", (NBYTES,))],
            dtype="uint8",
        )
        return [each.stall_seconds for each in predict(config, step_seconds=0.0).epochs()]

    without, copies = seconds(None), seconds(tmp_path / "disk")

    assert sum(copies) > sum(without) + 0.9 * SAMPLES


@pytest.mark.parametrize(
    ("share", "left_out"), [("jobs", "'ssd', 'own'"), ("host", "'own'"), ("hosts", "'own'")]
)
def test_disks_of_a_machine_that_share_leaves_out_are_named(
    data: Path, tmp_path: Path, share: str, left_out: str
) -> None:
    fast = Curve.flat(1e9)
    storage = (
        StorageClass("staging", 10**6, 1, fast),
        StorageClass("ssd", 10**6, 2, fast, backend="filesystem", path=str(tmp_path / "ssd")),
        StorageClass("own", 10**6, 2, fast, backend="builtins:dict", path="7"),
    )
    machine = Machine(SharedStore(None, Curve.flat(1e6), 0.01), storage)
    source, lines = FlatFolder(data, extensions=None), list[str]()
    how: dict[str, Any] = {"transforms": [DecodeRaw("uint8", (NBYTES,))], "dtype": "uint8", "share": share}
    config = LoaderConfig(source, batch_size=BATCH, epochs=2, machine=machine, **how)

    with ExitStack() as closing:
        setup.drafted(config, NUMPY, Calls(report=lines.append), closing, opened=None)

    (line,) = (line for line in lines if line.startswith("machine.storage"))
    assert f'nothing is kept by {left_out}, as share is "{share}": ' in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "local_disk is 7; it is a folder, or folders and what each may hold"),
        ({}, r"local_disk is \{\}"),
        ({"/scratch": "much"}, r"local_disk\['/scratch'\]: "),
        ({"/scratch": 0}, r"local_disk\['/scratch'\]: "),
        ({"/scratch": 1_999}, r"'/scratch' is to keep 1,999 bytes; .* the largest sample \(2,000 bytes\)"),
    ],
)
def test_a_local_disk_that_is_none_is_refused(data: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(data, local_disk=given)


def test_a_folder_that_cannot_be_used_and_a_data_set_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can keep no samples"):
        run(data, local_disk=data / "000.bin")
    with pytest.raises(
        ConfigError, match=r'the data set list reads by itself, .*: cache="rows" keeps what it makes'
    ):
        Loader([1, 2, 3], batch_size=1, epochs=1, local_disk=tmp_path)


def test_nothing_is_left_open(data: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    run(data, local_disk=tmp_path / "disk")
    with pytest.raises(ConfigError):
        run(data, local_disk=tmp_path / "disk", memory="10 kB")

    assert len(os.listdir("/proc/self/fd")) == before
    # And no lock: the next run takes the same tier.
    run(data, local_disk=tmp_path / "disk")
    assert len(list((tmp_path / "disk").iterdir())) == 2


@pytest.mark.parametrize(("capacity_bytes", "left"), [(1200, 6), (1000, 1), (500, 0)])
def test_what_a_run_left_for_other_tiers_makes_room_for_a_disks_own_samples(
    tmp_path: Path, capacity_bytes: int, left: int
) -> None:
    sizes = np.full(12, 100)
    homes = np.repeat(np.array([1, 2, 3], np.int8), [1, 5, 6])
    part = DiskPart(
        StorageClass("disk", capacity_bytes, 1, Curve(((1, 1e9),)), backend="filesystem", path=str(tmp_path))
    )
    with closing(DiskTier(tmp_path, capacity_bytes, bytes(16), sizes)) as tier:
        # A sample of memory's, and others that are another disk's now.
        for sample in (0, 6, 7, 8, 9, 10)[: capacity_bytes // 100]:
            assert tier.put(sample, bytes(100))
        kept = kept_on([Disk(part, tier)], 2, Placement(homes, np.arange(12)), sizes, 10_000)
        assert kept.held[2].size == left
        for sample in range(1, 6):
            assert tier.put(sample, bytes(100))
        for each in kept.tiers.values():
            each.close()


@pytest.mark.parametrize("blocks", [(6, 2), (2, 6)])
def test_on_a_full_disk_the_part_that_needs_less_than_before_makes_room_for_the_one_that_needs_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int]
) -> None:
    """All eight blocks of a disk are an earlier run's, four for each of its two tiers.

    Whether or not the file system of the test reserves space: a file takes as much as it has bytes.
    """
    contents = {each: Content(bytes([each] * 16), np.full(9, -1), "") for each in (True, False)}
    free = 8 * 4096

    def free_bytes(folder: Path) -> int:
        return free - sum(each.stat().st_size for each in folder.glob("*.samples"))

    def reserving(stat: Callable[..., os.stat_result]) -> Callable[..., SimpleNamespace]:
        def found(*arguments: Any) -> SimpleNamespace:
            of_file = stat(*arguments)
            fields = {name: getattr(of_file, name) for name in dir(of_file) if name.startswith("st_")}
            return SimpleNamespace(**fields | {"st_blocks": of_file.st_size // 512})

        return found

    def opened(sizes: tuple[int, int]) -> list[int]:
        parts = [
            DiskPart(
                StorageClass(
                    str(each), size * 4096, 1, Curve.flat(1e9), backend="filesystem", path=str(tmp_path)
                ),
                is_in_form=each,
            )
            for each, size in zip((True, False), sizes, strict=True)
        ]
        with ExitStack() as closing:
            disks = open_disks(parts, contents, 0, Calls(), closing, is_new=False, page_cache_bytes=1 << 30)
        return [disk.storage.capacity_bytes // 4096 for disk in disks]

    monkeypatch.setattr(store_disk, "free_bytes", free_bytes)
    patched_os = vars(os) | {"stat": reserving(os.stat), "fstat": reserving(os.fstat)}
    monkeypatch.setattr(store_disk, "os", SimpleNamespace(**patched_os))
    assert opened((4, 4)) == [4, 4]
    assert opened(blocks) == list(blocks)
