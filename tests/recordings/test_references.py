"""Reference strings go through libCacheSim's files unharmed, and what is wrong with a file is told by its place."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import libcachesim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError, FormatError
from penstock.recordings.references import (
    References,
    next_uses,
    number_objects,
    read_references,
    write_references,
)

OFTEN = np.random.default_rng(0)
STRING = References.of(
    OFTEN.integers(0, 50, 1000), seconds=np.arange(1000) // 7, sizes_bytes=OFTEN.integers(1, 100, 1000)
)
WIDE = References.of(np.array([-1, 2**62, -(2**63), 5, -1]), sizes_bytes=[2**32 - 1, 0, 1, 1, 1])


def libcachesim_csv(file: Path) -> Any:
    columns = libcachesim.ReaderInitParam(has_header=True, has_header_set=True, obj_id_is_num_set=True)
    columns.time_field, columns.obj_id_field, columns.obj_size_field = 1, 2, 3
    return libcachesim.TraceReader(str(file), libcachesim.TraceType.CSV_TRACE, columns)


@for_each("references", [STRING, WIDE, References.of(np.empty(0, np.int64))])
@for_each("name", ["a.csv", "a.oracleGeneral", "a.oracleGeneral.bin"])
def test_what_was_written_is_read(name: str, references: References, tmp_path: Path) -> None:
    write_references(tmp_path / name, references)

    read = read_references(tmp_path / name)

    for field in ("ids", "seconds", "sizes_bytes"):
        assert getattr(read, field).tolist() == getattr(references, field).tolist()
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_a_text_file_keeps_the_objects_alone(tmp_path: Path) -> None:
    write_references(tmp_path / "a.txt", WIDE)

    assert (tmp_path / "a.txt").read_text().split() == [
        str(2**64 - 1),
        str(2**62),
        str(2**63),
        "5",
        str(2**64 - 1),
    ]
    assert read_references(tmp_path / "a.txt").ids.tolist() == WIDE.ids.tolist()


def test_libcachesim_reads_what_is_written(tmp_path: Path) -> None:
    for name in ("a.oracleGeneral", "a.csv", "a.txt"):
        write_references(tmp_path / name, STRING)
    expected = list(
        zip(STRING.ids.tolist(), STRING.seconds.tolist(), STRING.sizes_bytes.tolist(), strict=True)
    )

    oracle = libcachesim.TraceReader(
        str(tmp_path / "a.oracleGeneral"), libcachesim.TraceType.ORACLE_GENERAL_TRACE
    )
    text = libcachesim.TraceReader(str(tmp_path / "a.txt"), libcachesim.TraceType.PLAIN_TXT_TRACE)

    for reader in (oracle, libcachesim_csv(tmp_path / "a.csv")):
        assert [(each.obj_id, each.clock_time, each.obj_size) for each in reader] == expected
    assert [each.obj_id for each in text] == STRING.ids.tolist()


def test_an_oracle_file_is_the_one_that_libcachesim_makes(tmp_path: Path) -> None:
    write_references(tmp_path / "a.csv", STRING)
    write_references(tmp_path / "ours.oracleGeneral", STRING)
    reader = libcachesim_csv(tmp_path / "a.csv")

    libcachesim.Util.convert_to_oracleGeneral(reader._reader, str(tmp_path / "theirs"))

    assert (tmp_path / "ours.oracleGeneral").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_trace_of_many_pieces_is_read_whole(tmp_path: Path) -> None:
    references = References.of(np.random.default_rng(1).integers(0, 10**12, 40_000))
    write_references(tmp_path / "a.oracleGeneral", references)

    assert (read_references(tmp_path / "a.oracleGeneral").ids == references.ids).all()


@pytest.mark.parametrize("version", [1, 2])
def test_vscsi_is_read_as_libcachesim_reads_it(version: int, tmp_path: Path) -> None:
    rows = [(3_500_000, 4096, 77), (4_000_000, 512, 2**40), (9_999_999, 4096, 77)]
    if version == 1:
        data = b"".join(
            struct.pack("<IIIHHQQ", 0, size, 1, 42, 1 << 8, block, time) for time, size, block in rows
        )
    else:
        data = b"".join(
            struct.pack("<HHIIIQQQ", 42, 2 << 8, 0, size, 1, block, time, 5) for time, size, block in rows
        )
    (tmp_path / "a.vscsi").write_bytes(data)

    read = read_references(tmp_path / "a.vscsi")

    assert read.ids.tolist() == [77, 2**40, 77]
    assert read.seconds.tolist() == [3, 4, 9]
    assert read.sizes_bytes.tolist() == [4096, 512, 4096]
    theirs = libcachesim.TraceReader(str(tmp_path / "a.vscsi"), libcachesim.TraceType.VSCSI_TRACE)
    assert [(each.obj_id, each.clock_time, each.obj_size) for each in theirs] == list(
        zip(read.ids.tolist(), read.seconds.tolist(), read.sizes_bytes.tolist(), strict=True)
    )


@for_each(
    ("text", "columns", "expected"),
    [
        ("# time, object, size\n1, a, 10\n2, b, 20\n3, a, 10\n", None, ([0, 1, 0], [1, 2, 3], [10, 20, 10])),
        ("timestamp\tkey\tlen\top\n1.9\t7\t10\tread\n", None, ([7], [1], [10])),
        ("1,7,10\n2,8,20\n", None, ([7, 8], [1, 2], [10, 20])),
        ("7\n8\n", None, ([7, 8], [0, 1], [1, 1])),
        ("7|x|3\n8|y|4\n", ("id", "-", "size"), ([7, 8], [0, 1], [3, 4])),
        ("time,id,size\n1,7,10\n", ("size", "id", "-"), ([7], [0], [1])),
        ("id\n5\n\n6\n", None, ([5, 6], [0, 1], [1, 1])),
        ("", None, ([], [], [])),
        (f"id\n{2**64 - 1}\n{2**64}\n", None, ([0, 1], [0, 1], [1, 1])),
    ],
)
def test_columns_are_found_by_header_by_place_or_as_told(
    text: str, columns: tuple[str, ...] | None, expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)

    read = read_references(tmp_path / "a.csv", columns=columns)

    assert (read.ids.tolist(), read.seconds.tolist(), read.sizes_bytes.tolist()) == expected


@for_each(
    ("name", "data", "message"),
    [
        ("a.txt", b"1\n2\n3 4\n", r"a\.txt, line 3: '3 4' has 2 words"),
        ("a.txt", b"1\n\xff\xfe\n", r"a\.txt, line 2: not text in UTF-8"),
        (
            "a.csv",
            b"time,id,size\n1,2,3\n4,5\n",
            r"a\.csv, line 3: '4,5' has 2 columns; needed are time,id,size",
        ),
        ("a.csv", b"time,id,size\n1,2,3\n\n4,,6\n", r"a\.csv, line 4: '4,,6'"),
        ("a.csv", b"1,2,3\nnoon,5,6\n", r"a\.csv, line 2: its time is 'noon'"),
        ("a.csv", b"1,2,3\n4,5,-6\n", r"a\.csv, line 2: its size is '-6'"),
        ("a.csv", b"1,2,3\n4,5,nan\n", r"a\.csv, line 2: its size is 'nan'"),
        ("a.csv", b"1,2,3\n4,5,1e99\n", r"a\.csv, line 2: its size is '1e99'"),
        ("a.bin", bytes(30), r"a\.bin, record 1: cut off after 6 of 24 bytes"),
        (
            "a.bin",
            struct.pack("<IQIq", 0, 1, 1, -1) + struct.pack("<IQIq", 0, 1, 1, 1),
            "record 1: its object's next",
        ),
        ("a.bin", struct.pack("<IQIq", 0, 1, 1, -2), "record 0: its object's next request is said to be -2"),
        ("a.vscsi", bytes(80), "record 0: its version is neither 1 nor 2"),
        ("a.vscsi", b"", "record 0: its version is neither 1 nor 2"),
        (
            "a.vscsi",
            struct.pack("<IIIHHQQ", 0, 1, 1, 1, 256, 1, 1) * 2 + bytes(32),
            "record 2: its version is 0",
        ),
        (
            "a.vscsi",
            struct.pack("<IIIHHQQ", 0, 1, 1, 1, 256, 1, 1) * 3 + b"x",
            "record 3: cut off after 1 of 32",
        ),
    ],
)
def test_a_malformed_file_is_told_by_its_line_or_record(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)

    with pytest.raises(FormatError, match=message):
        read_references(tmp_path / name)


def test_a_quote_that_is_not_closed_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n" + '4,"' + "x" * 200_000 + '",3\n')

    with pytest.raises(FormatError, match=r"a\.csv, line 2: field larger than field limit"):
        read_references(tmp_path / "a.csv")


def test_what_the_user_can_mend_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n")
    (tmp_path / "a.oracleGeneral.zst").write_bytes(b"\x28\xb5\x2f\xfd and so on")
    (tmp_path / "a.txt").write_text("1\n")

    with pytest.raises(ConfigError, match="2 columns and no header"):
        read_references(tmp_path / "a.csv")
    with pytest.raises(
        ConfigError, match=r"compressed by zstd: decompress it first, zstd -d .*a\.oracleGeneral\.zst"
    ):
        read_references(tmp_path / "a.oracleGeneral.zst")
    with pytest.raises(ConfigError, match="does not tell its format by its name: say which, of txt, csv"):
        read_references(tmp_path / "a.trace")
    with pytest.raises(ConfigError, match="no trace format 'lcs'; known are txt, csv, oracleGeneral, vscsi"):
        read_references(tmp_path / "a.txt", "lcs")
    with pytest.raises(ConfigError, match="only csv files have columns"):
        read_references(tmp_path / "a.txt", columns=["id"])
    for columns in (["time"], ["id", "id"], ["id", "weight"]):
        with pytest.raises(ConfigError, match="each is id"):
            read_references(tmp_path / "a.csv", columns=columns)
    with pytest.raises(DataError, match=r"missing\.txt cannot be read: No such file"):
        read_references(tmp_path / "missing.txt")


def test_what_a_file_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="sizes_bytes reach from 1 to 4294967296; oracleGeneral has 32 bits"
    ):
        write_references(tmp_path / "a.bin", References.of([1, 2], sizes_bytes=[1, 2**32]))
    with pytest.raises(ConfigError, match="'vscsi' is no trace format that is written"):
        write_references(tmp_path / "a.vscsi", STRING)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [{"seconds": [1]}, {"sizes_bytes": [1, -1]}, {"ids": [0.5, 1.0]}])
def test_a_string_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        References.of(**({"ids": [1, 2]} | fields))


@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**62, -1, 2**40])),
        max_size=200,
    )
)
def test_objects_are_numbered_apart_and_found_again(references: list[int]) -> None:
    ids, objects = number_objects(np.array(references, np.int64))

    assert len({(old, new) for old, new in zip(references, ids.tolist(), strict=True)}) == len(
        set(references)
    )
    assert len(set(ids.tolist())) == len(set(references))
    assert all(0 <= each < objects for each in ids.tolist())
    expected = [
        next((later for later in range(index + 1, len(references)) if references[later] == each), -1)
        for index, each in enumerate(references)
    ]
    assert next_uses(np.array(references, np.int64), never=-1).tolist() == expected


def test_a_hundred_thousand_wide_ids_are_numbered_by_first_appearance() -> None:
    wide = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 100_000)
    string = np.concatenate([wide, wide[::-1]])

    ids, objects = number_objects(string)

    assert objects == 100_000
    assert (ids == np.concatenate([np.arange(100_000), np.arange(100_000)[::-1]])).all()
