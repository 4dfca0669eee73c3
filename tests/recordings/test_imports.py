"""Logs of other programs give the references that the program which was recorded made.

logs/*.pfw were really written by DFTracer 2.2.0, logs/random.fio by fio 3.33; logs/disk.blkparse is the output of
blkparse 1.3 for events made up for it. logs/trace.darshan follows the manual of darshan-util: no Darshan ran here.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError, FormatError
from penstock.recordings.blocks import Access, Phase, Recording
from penstock.recordings.imports import FORMATS, import_recording

LOGS = Path(__file__).with_name("logs")
R, W = Access.READ, Access.WRITE


def told(recording: Recording) -> list[tuple[Access, str, int, int, int]]:
    return [
        (
            Access(row["access"]),
            recording.files[row["file"]],
            int(row["offset"]),
            int(row["bytes"]),
            int(row["process"]),
        )
        for row in recording.rows
    ]


A, LAST = "/tmp/example/data/a.bin", "/tmp/example/saves/last.pt"
#: Write a; read 5,000 twice; seek to 100, read 10; pread 100 at 9,000; save; in a fork, read all of a.
DFTRACER_STORY = [
    (W, A, 0, 20_000, 28219),
    (R, A, 0, 5_000, 28219),
    (R, A, 5_000, 5_000, 28219),
    (R, A, 100, 10, 28219),
    (R, A, 9_000, 100, 28219),
    (W, LAST, 0, 10_000, 28219),
    (R, A, 0, 20_000, 28220),
]


def test_dftracers_logs_of_all_processes_become_one_recording() -> None:
    recording = import_recording(
        [LOGS / "fork.pfw", LOGS / "app.pfw"], "dftracer", checkpoints=["/tmp/example/saves"]
    )

    assert told(recording) == DFTRACER_STORY
    assert recording.is_complete
    assert [Phase(each).name for each in recording.file_phases()] == ["OTHER", "CHECKPOINT"]
    assert 0.0 < recording.rows["time"][-1] < 0.1  # microseconds in the log


def test_dftracers_logs_may_be_compressed_and_of_the_older_form(tmp_path: Path) -> None:
    """Up to 1.0 the events stood in a JSON list, one per line."""
    paths = []
    for name in ("app.pfw", "fork.pfw"):
        text = "[\n" + (LOGS / name).read_text().replace('"ph":1', '"ph":"X"').replace("}\n", "},\n")
        paths.append(tmp_path / f"{name}.gz")
        paths[-1].write_bytes(gzip.compress(text.encode()))

    assert told(import_recording(paths, "dftracer")) == DFTRACER_STORY

    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    assert not import_recording(paths, "dftracer").is_complete


def test_one_process_alone_does_not_tell_its_files_names() -> None:
    with pytest.raises(FormatError, match=r"fork\.pfw, line 8: a read without .* logs of all processes"):
        import_recording([LOGS / "fork.pfw"], "dftracer")


def test_dftracers_logs_without_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.pfw").write_text(
        '{"id":7,"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":5,"dur":2,"ph":1}\n'
    )

    with pytest.raises(FormatError, match=r"bare\.pfw, line 1: .*DFTRACER_INC_METADATA=1"):
        import_recording([tmp_path / "bare.pfw"], "dftracer")


def test_darshans_calls_are_put_in_order_and_counted_once() -> None:
    recording = import_recording([LOGS / "trace.darshan"], "darshan", data=["/data/photos"])

    assert told(recording) == [
        (R, "/data/photos/shard-0.tar", 0, 262_144, 0),
        (R, "/data/saves/epoch 0.pt", 4_096, 100, 1),
        (W, "/data/saves/epoch 0.pt", 0, 1_048_576, 1),
        (R, "/data/photos/shard-0.tar", 262_144, 262_144, 0),
    ]
    assert recording.rows["time"] == pytest.approx([0.0, 0.0001, 0.0011, 0.0019])
    assert [part.phase for part in recording.summary()] == [Phase.DATA, Phase.CHECKPOINT]


def test_blkparse_gives_a_devices_requests_as_they_were_queued() -> None:
    recording = import_recording([LOGS / "disk.blkparse"], "blkparse")

    # Sectors of 512 bytes; no trim, no flush, and each request once, not when it was dispatched and completed too.
    assert told(recording) == [
        (R, "device 8,0", 4_456_448 * 512, 64 * 512, 4410),
        (R, "device 8,0", 4_456_512 * 512, 8 * 512, 4410),
        (W, "device 8,0", 10_485_760 * 512, 256 * 512, 4410),
    ]
    assert [part.phase for part in recording.summary()] == [Phase.OTHER]
    assert recording.string().numbers.tolist() == list(range(1, 8 + 1 + 32 + 1))


def test_fios_iolog_is_read_with_and_without_times(tmp_path: Path) -> None:
    story = [(R, 0), (R, 45_056), (R, 53_248), (W, 28_672), (R, 24_576)]
    newer = import_recording([LOGS / "random.fio"], "fio")
    lines = (LOGS / "random.fio").read_text().splitlines()
    older = "\n".join(["fio version 2 iolog", *(line.partition(" ")[2] for line in lines[1:]), ""])
    (tmp_path / "older").write_text(older)

    for recording in (newer, import_recording([tmp_path / "older"], "fio")):
        assert [(access, offset) for access, _, offset, _, _ in told(recording)] == story
        assert set(recording.files) == {"/tmp/example/data/fiofile"}
    assert newer.rows["time"][-1] == pytest.approx((591 - 124) * 1e-6)


def test_a_strace_log_is_imported_with_its_phases() -> None:
    recording = import_recording([LOGS / "paths.strace"], "strace", data=["/tmp/example/data"])

    assert recording.rows.size == 21
    assert recording.is_complete
    assert [part.phase for part in recording.summary()] == [Phase.DATA, Phase.CHECKPOINT]


def test_opens_count_as_whole_files(tmp_path: Path) -> None:
    (tmp_path / "saved").write_bytes(bytes(9_000))
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    (tmp_path / "log").write_text(
        '5.0\t7\tbegin\t0\t""\n'
        f'6.0\t7\tR\t5000\t"/data/\\u00e9\\t1"\n7.5\t8\tW\t0\t"{tmp_path}/link"\n8.0\t8\tW\t0\t"{tmp_path}/gone"\n'
        "9.0\t8\tR\t50"
    )

    recording = import_recording([tmp_path / "log"], "opens")

    assert told(recording) == [(R, "/data/é\t1", 0, 5_000, 7), (W, f"{tmp_path}/saved", 0, 9_000, 8)]
    assert recording.rows["time"].tolist() == [0.0, 1.5]
    assert not recording.is_complete  # its last line breaks off


@for_each(
    ("form", "log", "line", "what"),
    [
        ("strace", "paths.strace", 7, "no line of strace's"),
        ("dftracer", "app.pfw", 7, "an event of DFTracer"),
        ("darshan", "trace.darshan", 14, "a row is module"),
        ("blkparse", "disk.blkparse", 3, "an event is device"),
        ("fio", "random.fio", 4, "a line is"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(
    tmp_path: Path, form: str, log: str, line: int, what: str
) -> None:
    lines = (LOGS / log).read_text().splitlines()
    lines[line - 1] = "%%% nonsense"
    (tmp_path / log).write_text("\n".join(lines) + "\n")

    with pytest.raises(FormatError, match=f"{log}, line {line}: '%%% nonsense' is (malformed: )?{what}"):
        import_recording([tmp_path / log], form)


@for_each("form", ["strace", "dftracer", "darshan", "blkparse", "fio"])
def test_a_log_that_breaks_off_is_not_complete(tmp_path: Path, form: str) -> None:
    name = {"strace": "paths.strace", "dftracer": "app.pfw", "darshan": "trace.darshan"}.get(form)
    name = name or {"blkparse": "disk.blkparse", "fio": "random.fio"}[form]
    (tmp_path / name).write_text((LOGS / name).read_text()[:-3])

    whole, cut = import_recording([LOGS / name], form), import_recording([tmp_path / name], form)

    assert whole.is_complete
    assert not cut.is_complete
    assert cut.rows.tolist() == whole.rows[: cut.rows.size].tolist()


def test_unknown_forms_several_logs_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'ftrace' is not known: give one of {', '.join(FORMATS)}"):
        import_recording([LOGS / "random.fio"], "ftrace")
    with pytest.raises(ConfigError, match="2 logs were given; fio is read from one"):
        import_recording([LOGS / "random.fio"] * 2, "fio")
    with pytest.raises(DataError, match="is a folder"):
        import_recording([tmp_path], "fio")
    with pytest.raises(FileNotFoundError):
        import_recording([tmp_path / "none"], "fio")
    shutil.copy(LOGS / "random.fio", tmp_path / "packed")
    (tmp_path / "packed").write_bytes(b"\x1f\x8b" + bytes(40))
    with pytest.raises(FormatError, match="packed, line 1: not readable as gzip"):
        import_recording([tmp_path / "packed"], "fio")
