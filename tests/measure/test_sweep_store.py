"""Finished points outlive the process that finished them, and nothing else passes for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError, FormatError
from penstock.files import write_whole
from penstock.measure.sweep import Outcome, Point, Task
from penstock.measure.sweep_store import NAME, KeptPoints

TASK = Task(Point(4, 1, 2, 3), "frequency")
DONE = Outcome("done", run_seconds=1.5, stall_seconds=0.25, took_seconds=3.0)
REFUSED = Outcome("not supported", reason="too small")


def test_what_was_kept_is_there_for_the_next_process(tmp_path: Path) -> None:
    with KeptPoints(tmp_path / "new" / "folder") as points:
        points.keep("a", TASK, DONE)
        points.keep("b", TASK, REFUSED)
        assert points.kept() == {"a": DONE, "b": REFUSED}

    with KeptPoints(tmp_path / "new" / "folder") as points:
        assert points.kept() == {"a": DONE, "b": REFUSED}


def test_a_failure_is_written_down_and_tried_again(tmp_path: Path) -> None:
    with KeptPoints(tmp_path) as points:
        points.keep("a", TASK, Outcome("failed", reason="out of memory"))
        assert points.kept() == {}
        points.keep("a", TASK, DONE)

    assert "out of memory" in (tmp_path / NAME).read_text()
    with KeptPoints(tmp_path) as points:
        assert points.kept() == {"a": DONE}


def test_a_line_that_a_crash_cut_off_is_dropped_wherever_the_cut_is(tmp_path: Path) -> None:
    with KeptPoints(tmp_path) as points:
        points.keep("a", TASK, DONE)
        first = (tmp_path / NAME).read_bytes()
        points.keep("b", TASK, REFUSED)
    whole = (tmp_path / NAME).read_bytes()

    for cut in (len(first), len(first) + 1, len(first) + 50, len(whole) - 1):
        (tmp_path / NAME).write_bytes(whole[:cut])
        with KeptPoints(tmp_path) as points:
            assert points.kept() == {"a": DONE}
            points.keep("c", TASK, DONE)
        with KeptPoints(tmp_path) as points:
            assert points.kept() == {"a": DONE, "c": DONE}


@pytest.mark.parametrize(
    "line", [b"{}", b"nonsense", b'{"key": "a", "outcome": {"status": "done", "wings": 2}}']
)
def test_a_line_that_is_no_point_is_named(tmp_path: Path, line: bytes) -> None:
    with KeptPoints(tmp_path) as points:
        points.keep("a", TASK, DONE)
    with (tmp_path / NAME).open("ab") as file:
        file.write(line + b"\n")

    with pytest.raises(FormatError, match=r"points\.jsonl, line 2 is no kept point"):
        KeptPoints(tmp_path)


def test_two_sweeps_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with KeptPoints(tmp_path), pytest.raises(ConfigError, match="in use by another penstock plan"):
        KeptPoints(tmp_path)

    with KeptPoints(tmp_path) as points:
        points.close()


def test_a_write_that_fails_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after ten bytes."""
    write = os.write

    def full(file: int, data: memoryview) -> int:
        if len(data) <= 10:
            raise OSError(28, "No space left on device")
        return write(file, data[:10]) if len(data) > 100 else write(file, data[: len(data) - 10])

    with KeptPoints(tmp_path) as points:
        points.keep("a", TASK, DONE)
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            points.keep("b", TASK, DONE)
        monkeypatch.undo()
        points.keep("c", TASK, REFUSED)

    with KeptPoints(tmp_path) as points:
        assert points.kept() == {"a": DONE, "c": REFUSED}


def test_a_file_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "plan.json", b"before")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_whole(tmp_path / "plan.json", b"after")

    assert (tmp_path / "plan.json").read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_hosts_whose_processes_have_one_number_write_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each first process of a container has number 1; torn between two of them a file would be neither's."""
    written: list[Path] = []
    write_bytes = Path.write_bytes

    def other_host_first(self: Path, data: bytes) -> int:
        written.append(self)
        if len(written) == 1:
            write_whole(tmp_path / "file", b"theirs")
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", other_host_first)

    write_whole(tmp_path / "file", b"ours")

    assert len(set(written)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"ours"
