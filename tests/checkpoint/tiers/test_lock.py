"""One writer per folder, whoever it is, and no longer than it lives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests.interpreters import Interpreters

from penstock.checkpoint.tiers.lock import WriterLock
from penstock.errors import ConfigError, DataError

HOLD = """
import sys
from pathlib import Path
from penstock.checkpoint.tiers.lock import WriterLock
lock = WriterLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_of_the_same_process_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)

    said = rf"written by this very process, process {os.getpid()} on {socket.gethostname()}: .*close\(\) the store"
    with pytest.raises(ConfigError, match=said):
        WriterLock(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=said):
        WriterLock(tmp_path / "link")

    lock.release()
    WriterLock(tmp_path).release()


def test_a_second_process_is_refused_until_the_first_is_killed(
    tmp_path: Path, interpreters: Interpreters
) -> None:
    with interpreters.start(HOLD, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            WriterLock(tmp_path)

        holder.send_signal(signal.SIGKILL)
        holder.wait()
    WriterLock(tmp_path).release()


def test_a_forked_child_that_lives_on_does_not_hold_the_lock(tmp_path: Path) -> None:
    """The workers of a data loader are forked while the store is open, and may outlive it."""
    lock = WriterLock(tmp_path)
    inner, outer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outer)
        os.read(inner, 1)  # until the test lets go of its end
        os._exit(0)
    os.close(inner)
    try:
        with pytest.raises(ConfigError, match="one writer at a time"):
            WriterLock(tmp_path)

        lock.release()

        WriterLock(tmp_path).release()
    finally:
        os.close(outer)
        os.waitpid(child, 0)


def test_the_lock_stays_held_when_a_forked_child_ends(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)

    child = os.fork()
    if child == 0:
        lock.release()  # as a copy of the store does when it is closed
        os._exit(0)
    os.waitpid(child, 0)

    with pytest.raises(ConfigError, match="one writer at a time"):
        WriterLock(tmp_path)
    lock.release()


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    lock.release()
    lock.release()


def test_a_holder_that_left_no_name_is_another_process(tmp_path: Path, interpreters: Interpreters) -> None:
    with interpreters.start(HOLD, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / ".lock").write_bytes(b"")

        with pytest.raises(ConfigError, match="written by another process"):
            WriterLock(tmp_path)
        holder.kill()


def test_a_name_that_does_not_fit_on_the_disk_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)

    WriterLock(tmp_path).release()


@pytest.mark.parametrize("kind", ["missing", "file", "folder in place of the lock"])
def test_a_folder_that_refuses_is_named(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "store"
    if kind == "file":
        place.write_bytes(b"")
    elif kind != "missing":
        (place / ".lock").mkdir(parents=True)

    with pytest.raises(DataError, match=r"store/\.lock: "):
        WriterLock(place)
