"""Which samples Arrow files have, where they lie, and every way a file can be wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each
from tests.store.reads import contents, labels_of

from penstock import open_source
from penstock.errors import ConfigError, DataError
from penstock.store import ArrowFiles


def write(
    file: Path, table: Any, *, stream: bool = False, rows: int = 3, compression: str | None = None
) -> Path:
    """Write a file, or a stream as Hugging Face's datasets does, in batches of so many rows."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file


def pictures(contents: list[bytes | None], labels: list[Any], **kinds: Any) -> Any:
    return pa.table({"image": pa.array(contents, kinds.get("image", pa.binary())), "label": labels})


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.binary(min_size=1, max_size=200), st.integers(0, 20)), min_size=1, max_size=12
    ),
    at_once=st.integers(1, 12),
    stream=st.booleans(),
    first=st.integers(0, 3),
)
def test_samples_and_labels_are_those_that_pyarrow_reads(
    tmp_path: Path, kind: Any, rows: list[tuple[bytes, int]], at_once: int, stream: bool, first: int
) -> None:
    images, labels = (list(column) for column in zip(*rows, strict=True))
    table = pictures([*[b"left out"] * first, *images], [0] * first + labels, image=kind).slice(first)

    source = ArrowFiles(write(tmp_path / "a.arrow", table, stream=stream, rows=at_once))

    assert contents(source) == images
    assert labels_of(source) == labels


def test_pictures_as_datasets_keeps_them_are_found(tmp_path: Path) -> None:
    picture = [{"bytes": b"%d" % number, "path": f"{number}.jpg"} for number in range(7)]
    for number in range(2):
        table = pa.table({"image": picture[4 * number :][:4], "label": list(range(7))[4 * number :][:4]})
        write(tmp_path / f"data-{number:05}-of-00002.arrow", table, stream=True)

    source = open_source(tmp_path / "data-*-of-00002.arrow")

    assert isinstance(source, ArrowFiles)
    assert contents(source) == [b"%d" % number for number in range(7)]
    assert labels_of(source) == list(range(7))
    assert source.describe(5) == f"{tmp_path}/data-00001-of-00002.arrow: row 1"


def test_text_may_be_the_sample_and_names_the_labels(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two", "drei"], "target": ["b", "a", "b"]})

    source = ArrowFiles(write(tmp_path / "a.feather", table))

    assert contents(source) == [b"one", b"two", b"drei"]
    assert (labels_of(source), source.classes) == ([1, 0, 1], ("a", "b"))


@for_each(
    ("make", "message"),
    [
        (lambda: pictures([b"1", None], [1, 2]), "row 1 of 'image' has no value"),
        (lambda: pictures([b"1", b"2"], [None, 2]), "row 0 of 'label' has no value"),
        (
            lambda: pa.table({"image": [{"bytes": b"1", "path": ""}, {"bytes": None, "path": "x.jpg"}]}),
            "row 1 of 'image.bytes' has no bytes in it, but the path of a file",
        ),
        (
            lambda: pa.table(
                {
                    "image": pa.StructArray.from_arrays(
                        [pa.array([b"1", b"hidden"])], ["bytes"], mask=pa.array([False, True])
                    )
                }
            ),
            "row 1 of 'image.bytes' has no value",
        ),
        (lambda: pictures([], [])[:0], "has no rows"),
    ],
)
def test_a_row_without_a_value_is_named(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    table = make()  # not before: with the first array pyarrow imports pandas
    if not table.num_rows:
        table = table.cast(pa.schema([("image", pa.binary()), ("label", pa.int64())]))
    file = write(tmp_path / "a.arrow", table)

    with pytest.raises(DataError, match=message) as caught:
        ArrowFiles(file)

    assert str(caught.value).startswith(str(file))


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", pictures([bytes(5000)] * 5, [0] * 5), compression="lz4")

    with pytest.raises(DataError, match=r"is compressed, .* write it with compression=None"):
        ArrowFiles(file)


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_that_is_cut_off_or_none_is_an_error(tmp_path: Path, stream: bool) -> None:
    file = write(tmp_path / "a.arrow", pictures([b"1" * 500] * 9, [0] * 9), stream=stream)
    data = file.read_bytes()
    for content in (b"", b"no Arrow file at all", data[: len(data) // 2], data[:100]):
        file.write_bytes(content)
        with pytest.raises(DataError, match="is no complete Arrow file"):
            ArrowFiles(file)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.arrow")

    with pytest.raises(DataError, match=r"a\.arrow is not a regular file"):
        ArrowFiles(tmp_path / "a.arrow")


def test_a_text_that_ends_beyond_its_file_is_an_error_and_not_read(tmp_path: Path) -> None:
    """Where texts end is believed by pyarrow itself, which would end the process."""
    file = write(tmp_path / "a.arrow", pictures([b"x" * 40] * 3, ["cat", "dog", "ape"]))
    data = file.read_bytes()
    at = data.index(bytes([0, 0, 0, 0, 3, 0, 0, 0, 6, 0, 0, 0]))
    file.write_bytes(data[: at + 8] + b"\xff\xff\xff\x7f" + data[at + 12 :])

    with pytest.raises(DataError, match=r"a\.arrow is no complete Arrow file .*out of bounds"):
        ArrowFiles(file)


@pytest.mark.parametrize("stream", [False, True])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5))
def test_damage_is_a_data_error_or_another_picture(
    tmp_path: Path, changes: list[tuple[int, int]], stream: bool
) -> None:
    table = pictures([b"x" * 40] * 12, [f"c{number % 3}" for number in range(12)])
    file = write(tmp_path / "a.arrow", table, stream=stream, rows=5)
    data = bytearray(file.read_bytes())
    for place, byte in changes:
        data[place % len(data)] = byte
    file.write_bytes(data)

    try:
        source = ArrowFiles(file, sample="image", label="label")
    except (DataError, ConfigError):
        return
    assert all(len(source.read(sample)) for sample in np.flatnonzero(source.sizes_bytes).tolist())


def test_an_empty_batch_among_others_is_no_damage(tmp_path: Path) -> None:
    table = pictures([b"1", b"2"], [0, 1])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for part in (table.slice(0, 1), table.slice(1, 0), table.slice(1)):
            for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
                writer.write_batch(batch)

    assert contents(ArrowFiles(tmp_path / "a.arrow")) == [b"1", b"2"]


def test_columns_that_no_reader_takes_are_named_as_what_they_are(tmp_path: Path) -> None:
    twice = pa.table([pa.array([b"1"]), pa.array([b"2"])], names=["image", "image"])
    with pytest.raises(DataError, match="has the column 'image' more than once: rename or drop one"):
        ArrowFiles(write(tmp_path / "a.arrow", twice))
    coded = pa.table({"image": pa.array([b"1"]).dictionary_encode()})
    with pytest.raises(
        DataError, match=r"has its samples as a dictionary, .*: write it with table.cast to binary"
    ):
        ArrowFiles(write(tmp_path / "b.arrow", coded))
