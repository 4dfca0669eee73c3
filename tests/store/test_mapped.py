"""Files of small samples are copied from mappings, and no file that is cut off meanwhile ends the process.

What ends a process is looked at in processes of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.patience import patient

from penstock.store import Records, mapped, open_files
from penstock.store.group import read_group

ROWS, ROW_BYTES = 1000, 4096


def write_rows(path: Path) -> NDArray[np.uint8]:
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    rows.tofile(path)
    return rows


#: Reads all rows of a file; what happens then is the scene.
READS = """
import faulthandler, mmap, os, signal, sys
import numpy as np
from penstock.store import Records, mapped, open_files
from penstock.store.group import read_group

path, scene = sys.argv[1:]
if scene == "a handler of before":
    faulthandler.enable()
source = Records(path, "u1", 4096)
ids, into = np.random.default_rng(1).permutation(1000), np.zeros(1000 * 4096, np.uint8)

def read():
    return read_group(source, ids, into, np.arange(1001) * 4096)

def is_right():
    return bool((into.reshape(1000, -1) == np.fromfile(path, np.uint8).reshape(1000, -1)[ids]).all())

assert read() == [] and is_right() and mapped.is_guarded()
if scene == "cut off":
    faulthandler.enable()
    assert not mapped.is_guarded()
    into[:] = 0
    assert read() == [] and is_right()  # not from memory
    faulthandler.disable()
    assert mapped.is_guarded()
    borrow = open_files.OpenFiles.borrow

    def cutting(files, unit, **options):
        file = borrow(files, unit, **options)
        os.truncate(path, 500 * 4096 + 100)
        return file

    open_files.OpenFiles.borrow = cutting
    failed = read()
    print(len(failed), failed[0][1])
else:
    with open(path, "r+b") as file:
        other = mmap.mmap(file.fileno(), 0)  # not ours: a fault there goes to the handler that was there before
        os.truncate(path, 0)
        print("touching", flush=True)
        other[-1]
    print("still there")
"""


def run_scene(path: Path, scene: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READS, path, scene], capture_output=True, text=True, timeout=patient(60)
    )


def test_a_file_that_is_cut_off_while_it_is_copied_is_an_error_and_the_process_goes_on(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "a.bin")

    found = run_scene(tmp_path / "a.bin", "cut off")

    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(
        f"{ROWS} {tmp_path}/a.bin has shrunk from 4,096,000 to 2,048,100 bytes since"
    )


@pytest.mark.parametrize("scene", ["a handler of before", pytest.param("no handler", marks=pytest.mark.slow)])
def test_a_fault_that_is_none_of_ours_goes_to_the_handler_of_before(tmp_path: Path, scene: str) -> None:
    write_rows(tmp_path / "a.bin")

    found = run_scene(tmp_path / "a.bin", scene)

    assert (found.returncode, found.stdout) == (-signal.SIGBUS, "touching\n")
    assert ("Fatal Python error: Bus error" in found.stderr) == (scene == "a handler of before")


@for_each("row_bytes", [33, 64, 2050, 4097])
@for_each("total_bytes", [300_000, 1_500_000])
def test_rows_of_any_size_are_copied_to_any_address_and_nothing_beside_them(
    tmp_path: Path, row_bytes: int, total_bytes: int
) -> None:
    rng = np.random.default_rng(row_bytes)
    rows = rng.integers(0, 256, (100, row_bytes), np.uint8)
    rows.tofile(tmp_path / "a.bin")
    ids = rng.integers(0, len(rows), total_bytes // row_bytes)
    # A row begins anywhere in a line of the caches, with up to 70 bytes between it and the one before.
    begins = np.zeros(ids.size + 1, np.int64)
    np.cumsum(row_bytes + rng.integers(0, 70, ids.size), out=begins[1:])
    into = rng.integers(0, 256, begins[-1], np.uint8)
    expected = into.copy()
    for sample, begin in zip(ids.tolist(), begins.tolist(), strict=False):
        expected[begin : begin + row_bytes] = rows[sample]

    failed = read_group(Records(tmp_path / "a.bin", "u1", row_bytes), ids, into, begins)

    assert failed == []
    np.testing.assert_array_equal(into, expected)


def test_a_file_that_is_written_while_it_is_copied_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "a.bin")
    source = Records(tmp_path / "a.bin", "u1", ROW_BYTES)
    borrow = open_files.OpenFiles.borrow

    def writing(files: open_files.OpenFiles, unit: int, *, is_mapped: bool = False) -> open_files.OpenFile:
        file = borrow(files, unit, is_mapped=is_mapped)
        os.utime(tmp_path / "a.bin", ns=(1, 1))
        return file

    monkeypatch.setattr(open_files.OpenFiles, "borrow", writing)
    ids = np.arange(3)
    failed = read_group(source, ids, np.empty(3 * ROW_BYTES, np.uint8), np.arange(4) * ROW_BYTES)

    assert [index for index, _ in failed] == [0, 1, 2]
    assert "was written again since its samples were listed" in str(failed[0][1])
    source.close()


def test_a_thread_that_blocks_the_signal_copies_from_no_mapping(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.bin")
    source, into = Records(tmp_path / "a.bin", "u1", ROW_BYTES), np.empty(ROW_BYTES, np.uint8)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
    try:
        assert read_group(source, np.array([7]), into, np.array([0, ROW_BYTES])) == []
        assert not mapped.is_guarded()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert (into == rows[7]).all()
    assert mapped.is_guarded()
    source.close()


def test_the_handler_of_before_is_there_again_once_nothing_is_mapped(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.bin")
    was_guarded = mapped.is_guarded()
    source, into = Records(tmp_path / "a.bin", "u1", ROW_BYTES), np.empty(ROW_BYTES, np.uint8)

    assert read_group(source, np.array([7]), into, np.array([0, ROW_BYTES])) == []
    assert (into == rows[7]).all()
    assert mapped.is_guarded()
    source.close()

    assert mapped.is_guarded() == was_guarded
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()


@pytest.mark.parametrize("path", ["/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_a_file_of_no_local_disk_is_not_mapped(path: str) -> None:
    with open(path, "rb") as file:
        assert mapped.map_file(file.fileno(), 100) is None
