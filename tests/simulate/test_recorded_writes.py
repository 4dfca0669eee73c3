"""What was recorded, written on a drive: files in space of their own, devices at their offsets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine.ssd import Drive, PageOp, Ssd
from penstock.recordings.blocks import REFERENCE, Access, Recording
from penstock.simulate.recorded_writes import RecordedWrites, recorded_writes
from penstock.simulate.wear import PageRuns, run_stream
from penstock.trace.trace import JSON

PAGE = 4_096
SMALL = replace(Ssd.paper(), blocks_per_chip=512)
R, W = Access.READ, Access.WRITE


def a_recording(
    rows: list[tuple[int, int, int, Access]], files: list[str], by: str = "strace", **more: int | bool
) -> Recording:
    """Rows are (file, offset, bytes, access)."""
    table = np.zeros(len(rows), REFERENCE)
    for place, (file, offset, size, access) in enumerate(rows):
        table[place] = (float(place), offset, size, file, 1, access)
    meta: dict[str, JSON] = {"by": by}
    return Recording(table, files, meta, **more)  # type: ignore[arg-type]


def pages(writes: RecordedWrites) -> list[int]:
    """Every page that is written, in order."""
    (runs,) = writes.stream.operations
    assert isinstance(runs, PageRuns)
    assert (runs.ops == PageOp.WRITE).all()
    return [
        page
        for first, count in zip(runs.firsts.tolist(), runs.counts.tolist(), strict=True)
        for page in range(first, first + count)
    ]


def test_files_are_written_in_space_of_their_own_and_overwritten_there() -> None:
    recording = a_recording(
        [(1, 0, 2 * PAGE, W), (2, 0, 9 * PAGE, R), (0, 0, 10 * PAGE, W), (1, PAGE, PAGE, W)],
        ["/b", "/a", "/only-read"],
    )

    writes = recorded_writes(recording, SMALL, "run")

    # Each file begins at the first of the 8 chips.
    assert pages(writes) == [0, 1, *range(8, 18), 1]
    assert (writes.files, writes.devices, writes.writes, writes.written_bytes) == (2, 0, 3, 13 * PAGE)
    assert "no delete and no TRIM" in writes.notes[0]


def test_a_page_that_is_filled_call_by_call_is_written_once() -> None:
    rows = [(0, begin, 1_024, W) for begin in range(0, 2 * PAGE, 1_024)]

    assert pages(recorded_writes(a_recording(rows, ["/log"]), SMALL, "run")) == [0, 1]
    # To a device each request is a write.
    of_requests = a_recording(rows, ["device 8,0"], by="blkparse")
    assert pages(recorded_writes(of_requests, SMALL, "run")) == [0] * 4 + [1] * 4


def test_a_page_that_is_written_in_part_is_written() -> None:
    recording = a_recording([(0, 100, PAGE, W), (0, 5 * PAGE + 1, 1, W)], ["/a"])

    assert pages(recorded_writes(recording, SMALL, "run")) == [0, 1, 5]


def test_a_file_that_took_anothers_path_is_written_over_it() -> None:
    """A checkpoint that is written beside the old one and renamed would otherwise fill the drive."""
    rows = [(0, 0, PAGE, W), (1, 0, 9 * PAGE, W), (2, 0, PAGE, W), (3, 0, PAGE, W)]
    recording = a_recording(rows, ["/a", "/a", "/b", "/a"])

    assert pages(recorded_writes(recording, SMALL, "run")) == [0, *range(9), 16, 0]


@pytest.mark.parametrize("path", ["device 259,0", "/dev/nvme0n1"])
def test_a_device_keeps_its_offsets_modulo_the_drive(path: str) -> None:
    size = SMALL.exported_pages
    recording = a_recording(
        [(0, 7 * PAGE, PAGE, W), (0, (size - 1) * PAGE, 3 * PAGE, W), (0, (3 * size + 5) * PAGE, PAGE, W)],
        [path],
        by="fio",
    )

    writes = recorded_writes(recording, SMALL, "run")

    assert pages(writes) == [7, size - 1, 0, 1, 5]
    assert writes.pages_beyond == 3
    assert (writes.files, writes.devices) == (0, 1)
    assert any("3 pages written lie beyond the end of this drive" in note for note in writes.notes)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 500), st.integers(1, 200)), min_size=1, max_size=20)
)
def test_every_page_of_every_request_is_somewhere_on_the_drive_in_order(
    requests: list[tuple[int, int, int]],
) -> None:
    tiny = Ssd(1, 1, 20, 5, PAGE, 0.0, 0.0, 0.0, 1e9, 0.4, 0.1)
    rows = [(device, first * PAGE, count * PAGE, W) for device, first, count in requests]
    recording = a_recording(rows, ["device 8,0", "device 8,16"], by="blkparse")

    writes = recorded_writes(recording, tiny, "run")

    end = max((first + count for device, first, count in requests if device == 0), default=0)
    places = [
        device * end + page for device, first, count in requests for page in range(first, first + count)
    ]
    assert pages(writes) == [place % tiny.exported_pages for place in places]
    assert writes.pages_beyond == sum(place >= tiny.exported_pages for place in places)


def test_a_drive_carries_it_out() -> None:
    recording = a_recording([(0, 0, 100 * PAGE, W)] * 3, ["/a"])

    result = run_stream(Drive(SMALL), recorded_writes(recording, SMALL, "run").stream, repeats=2)

    assert result.work.written_pages == 600


def test_what_the_recording_lacks_is_said() -> None:
    notes = recorded_writes(
        a_recording([(0, 0, 10, W)], ["/a"], is_complete=False, unresolved=7), SMALL, "run"
    ).notes

    assert any("7 reads and writes are left out" in note for note in notes)
    assert any("not complete" in note for note in notes)
    assert any("calls, not the disk's" in note for note in notes)


@for_each(
    ("rows", "files", "message"),
    [
        ([(0, 0, 10, R)], ["/a"], "run is a recording without a write"),
        ([], [], "run is a recording without a write"),
        ([(0, 0, 10, W), (1, 0, 10, W)], ["/a", "device 8,0"], "writes of files and of devices"),
        ([(0, 10**12, 10, W)], ["/a"], r"'/a' needs 244,140,626 pages, and .* are free"),
    ],
)
def test_what_cannot_be_written_is_refused(
    rows: list[tuple[int, int, int, Access]], files: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recorded_writes(a_recording(rows, files), SMALL, "run")
