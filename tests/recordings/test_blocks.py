"""A recording keeps what was asked of files, and turns it into the string that a cache is asked for."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ClosedError, ConfigError, FormatError
from penstock.recordings.blocks import (
    REFERENCE,
    Access,
    Phase,
    PhaseRule,
    Recording,
    RecordingWriter,
    is_recording,
    read_recording,
    write_recording,
)
from penstock.trace import JSON

GOLDEN = Path(__file__).parent.parent / "golden" / "blocks-v2.penstock"
R, W, M = Access.READ, Access.WRITE, Access.MAP
RULE = PhaseRule(data=("/data",), checkpoints=("/saves",))

FILES = ["/usr/lib/libc.so.6", "/data/1.jpg", "/data/2.jpg", "/saves/1.pt", "/home/train.log"]
#: The life of a small training: time, offset, bytes, file, process, access.
ROWS = [
    (0.0, 0, 832, 0, 7, R),
    (0.1, 0, 200_000, 0, 7, M),
    (1.0, 0, 5_000, 2, 8, R),
    (1.5, 0, 4_096, 1, 8, R),
    (2.0, 0, 12_288, 3, 7, W),
    (2.5, 0, 10, 4, 7, W),
    (3.0, 0, 4_096, 1, 8, R),
    (3.5, 0, 5_000, 2, 8, R),
]
META: dict[str, JSON] = {
    "by": "strace",
    "command": ["python", "train.py"],
    "data": ["/data"],
    "checkpoints": ["/saves"],
}


def a_recording(rows: list[tuple[float, int, int, int, int, int]] | None = None) -> Recording:
    return Recording(np.array(ROWS if rows is None else rows, REFERENCE), FILES, META)


# -- The string --------------------------------------------------------------------------------------------


def test_blocks_are_numbered_in_the_order_in_which_they_first_appear() -> None:
    """As the source's Figure 2: 1 for the first, and so the first epoch is a straight line."""
    string = a_recording().string()

    assert string.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 4, 2, 3]
    assert [Phase(each).name for each in string.phases] == [
        *["LIBRARY", "DATA", "DATA", "DATA"],
        *["CHECKPOINT"] * 3,
        *["OTHER", "DATA", "DATA", "DATA"],
    ]
    assert string.rows.tolist() == [0, 2, 2, 3, 4, 4, 4, 5, 6, 7, 7]
    assert string.blocks == 8


def test_the_data_set_alone_has_numbers_of_its_own() -> None:
    assert a_recording().string(phases=[Phase.DATA]).numbers.tolist() == [1, 2, 3, 3, 1, 2]
    assert a_recording().string(phases=[Phase.DATA], block_bytes=1 << 20).numbers.tolist() == [1, 2, 2, 1]
    assert a_recording().string(accesses=[W]).numbers.tolist() == [1, 2, 3, 4]


def test_a_mapping_counts_only_where_it_is_asked_for() -> None:
    with_maps = a_recording().string(accesses=[R, M], phases=[Phase.LIBRARY])

    assert with_maps.numbers.tolist() == [1, *range(1, 50)]  # 200,000 bytes are 49 blocks


def test_reading_on_in_the_middle_of_a_block_is_no_new_reference() -> None:
    def read(
        offset: int, size: int, process: int = 8, access: Access = R
    ) -> tuple[float, int, int, int, int, int]:
        return (0.0, offset, size, 1, process, access)

    in_pieces = [read(0, 1_000), read(1_000, 3_096), read(4_096, 10), read(4_106, 5_000)]
    assert a_recording(in_pieces).string().numbers.tolist() == [1, 2, 3]
    assert a_recording(in_pieces).string(join=False).numbers.tolist() == [1, 1, 2, 2, 3]

    # Anew from the start, by another process, or written instead: a reference each.
    others = [read(0, 1_000), read(0, 1_000), read(1_000, 5, process=9), read(1_000, 5, access=W)]
    assert a_recording(others).string().numbers.tolist() == [1, 1, 1, 1]


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    row = st.tuples(
        st.floats(0, 10),
        st.integers(0, 40) | st.integers(0, 2**62),
        st.integers(1, 30),
        st.integers(0, len(FILES) - 1),
        st.integers(0, 2),
        st.sampled_from(Access),
    )
    return a_recording(draw(st.lists(row, max_size=30)))


@given(recordings(), st.integers(1, 9), st.sets(st.sampled_from(Phase)), st.booleans())
def test_the_string_is_what_walking_over_the_calls_gives(
    recording: Recording, block_bytes: int, phases: set[Phase], join: bool
) -> None:
    numbers: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int, int], int] = {}
    expected = []
    for index, (_, offset, size, file, process, access) in enumerate(recording.rows.tolist()):
        if access == M or RULE.phase_of(FILES[file], bool(written(recording)[file])) not in phases:
            continue
        first = offset // block_bytes
        if join and ends.get((process, file, access)) == offset and offset % block_bytes:
            first += 1
        ends[process, file, access] = offset + size
        for block in range(first, (offset + size - 1) // block_bytes + 1):
            expected.append((numbers.setdefault((file, block), len(numbers) + 1), index))

    string = recording.string(block_bytes=block_bytes, phases=phases, join=join)

    assert list(zip(string.numbers.tolist(), string.rows.tolist(), strict=True)) == expected
    assert string.blocks == len(numbers)


def written(recording: Recording) -> np.ndarray:
    was = np.zeros(len(recording.files), np.bool_)
    was[recording.rows["file"][recording.rows["access"] == W]] = True
    return was


def test_the_summary_adds_up() -> None:
    library, data, checkpoint, other = a_recording().summary()

    assert (library.files, library.reads, library.mapped_bytes) == (1, 1, 200_000)
    assert (data.phase, data.files, data.reads, data.writes, data.blocks) == (Phase.DATA, 2, 6, 0, 3)
    assert (data.read_bytes, data.written_bytes) == (2 * (5_000 + 4_096), 0)
    assert (checkpoint.writes, checkpoint.blocks, checkpoint.written_bytes) == (3, 3, 12_288)
    assert (other.phase, other.files, other.writes) == (Phase.OTHER, 1, 1)


def test_more_references_than_memory_are_refused() -> None:
    huge = a_recording([(0.0, 0, 2**62, 1, 7, R)])

    with pytest.raises(ConfigError, match="use larger blocks or choose phases"):
        huge.string()
    assert huge.string(block_bytes=2**61).numbers.tolist() == [1, 2]
    with pytest.raises(ConfigError, match="block_bytes is 0"):
        huge.string(block_bytes=0)


# -- Phases ------------------------------------------------------------------------------------------------


@for_each(
    ("path", "is_written", "told", "guessed"),
    [
        ("/data/train/1.jpg", False, Phase.DATA, Phase.DATA),
        ("/data", False, Phase.DATA, Phase.DATA),
        ("/data2/1.jpg", False, Phase.LIBRARY, Phase.DATA),
        ("/data/cache/index", True, Phase.DATA, Phase.CHECKPOINT),
        ("/saves/last.pt", True, Phase.CHECKPOINT, Phase.CHECKPOINT),
        ("/saves/last.pt", False, Phase.CHECKPOINT, Phase.DATA),
        ("/home/train.log", True, Phase.OTHER, Phase.CHECKPOINT),
        ("/home/train.py", False, Phase.LIBRARY, Phase.LIBRARY),
        ("/home/__pycache__/net.cpython-311.pyc", True, Phase.LIBRARY, Phase.LIBRARY),
        ("/home/me/env/lib/python3.11/site-packages/torch/version.txt", False, Phase.LIBRARY, Phase.LIBRARY),
        ("/opt/cuda/libcudart.so.12.1", False, Phase.LIBRARY, Phase.LIBRARY),
        ("/etc/ld.so.cache", False, Phase.LIBRARY, Phase.LIBRARY),
        ("device 8,0", True, Phase.OTHER, Phase.OTHER),
    ],
)
def test_a_files_phase_follows_from_where_it_is_and_whether_it_was_written(
    path: str, is_written: bool, told: Phase, guessed: Phase
) -> None:
    assert RULE.phase_of(path, is_written) == told
    assert PhaseRule().phase_of(path, is_written) == guessed


def test_of_nested_places_the_deeper_one_counts() -> None:
    rule = PhaseRule(data=("/run/data", "/job/saves/data/"), checkpoints=("/job/saves", "/run/data/saves"))

    assert rule.phase_of("/run/data/saves/1.pt", True) == Phase.CHECKPOINT
    assert rule.phase_of("/job/saves/data/1.jpg", False) == Phase.DATA


def test_a_place_has_to_be_absolute() -> None:
    with pytest.raises(ConfigError, match="data names 'photos'"):
        PhaseRule(data=("photos",))


# -- The file ----------------------------------------------------------------------------------------------


def test_the_golden_file_reads_as_it_always_did() -> None:
    recording = read_recording(GOLDEN)

    assert recording.rows.tolist() == ROWS
    assert (list(recording.files), recording.meta) == (FILES, META)
    assert (recording.is_complete, recording.unresolved) == (True, 3)
    assert recording.rule == RULE


def checked(head: bytes) -> bytes:
    return head + struct.pack("<I", zlib.crc32(head))


def by_the_book(*chunks: tuple[bytes, bytes]) -> bytes:
    """A file as the module's description has it, put together without the module."""
    text = json.dumps(META, sort_keys=True).encode()
    data = checked(b"PENBLOCK" + struct.pack("<III", 2, len(text), zlib.crc32(text))) + text
    for tag, payload in chunks:
        data += checked(tag + struct.pack("<III", 1, len(payload), zlib.crc32(payload))) + payload
    return data


def test_the_writer_follows_the_description_of_the_format(tmp_path: Path) -> None:
    rows = np.array(ROWS, REFERENCE)
    with RecordingWriter(tmp_path / "run", META) as writer:
        writer.append(rows[:3], {0: FILES[0], 1: "/data/unfinished"})
        writer.append(rows[3:], {1: FILES[1], **dict(enumerate(FILES[2:], 2))})
        writer.close(unresolved=3)

    assert (tmp_path / "run").read_bytes() == by_the_book(
        (b"FILE", json.dumps([[0, FILES[0]], [1, "/data/unfinished"]]).encode()),
        (b"REFS", zlib.compress(rows[:3].tobytes(), 1)),
        (b"FILE", json.dumps([[number + 1, name] for number, name in enumerate(FILES[1:])]).encode()),
        (b"REFS", zlib.compress(rows[3:].tobytes(), 1)),
        (b"DONE", struct.pack("<QQ", 8, 3)),
    )
    read = read_recording(tmp_path / "run")
    assert (read.rows.tolist(), list(read.files), read.unresolved) == (ROWS, FILES, 3)
    assert is_recording(tmp_path / "run")


def test_every_cut_leaves_what_came_before_and_is_told(tmp_path: Path) -> None:
    whole = GOLDEN.read_bytes()
    first_chunk = len(by_the_book())
    for cut in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:cut])
        if cut < first_chunk:
            with pytest.raises(FormatError, match=str(tmp_path / "cut")):
                read_recording(tmp_path / "cut")
        else:
            part = read_recording(tmp_path / "cut")
            assert not part.is_complete
            assert part.rows.tolist() == ROWS[: part.rows.size]


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    whole = GOLDEN.read_bytes()
    for place in range(len(whole)):
        (tmp_path / "bad").write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        with pytest.raises(FormatError, match=str(tmp_path / "bad")):
            read_recording(tmp_path / "bad")


@for_each(
    "chunks",
    [
        [(b"WHAT", b"")],
        [(b"FILE", b"{")],
        [(b"FILE", b"[[1, 2, 3]]")],
        [(b"FILE", b'[[1, "/a"]]')],
        [(b"REFS", b"not zlib")],
        [(b"REFS", zlib.compress(bytes(34)))],
        [(b"REFS", zlib.compress(np.array(ROWS, REFERENCE).tobytes()))],
        [(b"DONE", struct.pack("<QQ", 1, 0))],
        [(b"DONE", b"")],
    ],
)
def test_chunks_that_do_not_fit_together_are_damage(
    tmp_path: Path, chunks: list[tuple[bytes, bytes]]
) -> None:
    (tmp_path / "odd").write_bytes(by_the_book(*chunks))

    with pytest.raises(FormatError, match="is damaged at offset"):
        read_recording(tmp_path / "odd")


def test_a_recorder_that_fails_leaves_a_recording_that_is_not_complete(tmp_path: Path) -> None:
    def fail() -> None:
        with RecordingWriter(tmp_path / "run", META) as writer:
            writer.append(np.array(ROWS, REFERENCE), dict(enumerate(FILES)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    recording = read_recording(tmp_path / "run")
    assert not recording.is_complete
    assert recording.rows.tolist() == ROWS
    write_recording(tmp_path / "again", recording)
    assert not read_recording(tmp_path / "again").is_complete


@for_each(
    "row",
    [
        (0.0, -1, 1, 0, 7, R),
        (0.0, 0, 0, 0, 7, R),
        (0.0, 0, 1, 5, 7, R),
        (0.0, 0, 1, -1, 7, R),
        (0.0, 0, 1, 0, 7, 3),
        (float("nan"), 0, 1, 0, 7, R),
        (0.0, 2**63 - 1, 1, 0, 7, R),
    ],
)
def test_rows_that_cannot_be_are_refused(row: tuple[float, int, int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="row 8 is"):
        a_recording([*ROWS, row])


def test_arrays_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="references are a row of REFERENCE"):
        Recording(np.zeros(3, [("time", "<f8")]), FILES)
    with RecordingWriter(tmp_path / "run", {}) as writer:
        with pytest.raises(ConfigError, match="a recording holds REFERENCE"):
            writer.append(np.zeros(3, [("time", "<f8")]), {})
        writer.close()
        writer.close()
        with pytest.raises(ClosedError, match="is closed"):
            writer.append(np.zeros(0, REFERENCE), {})
