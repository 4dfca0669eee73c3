"""Which samples LitData's chunks have, where they lie, and every way a chunk can be wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.for_each import for_each
from tests.store.litdata_files import write_litdata
from tests.store.reads import contents, labels_of

from penstock import open_source
from penstock.errors import ConfigError, DataError
from penstock.store import LitDataChunks
from penstock.store.calls import Calls

GOLDEN = Path(__file__).parents[1] / "golden" / "litdata"
TWO: list[list[tuple[bytes, int]]] = [[(b"one", 3), (b"", 1)], [(b"three", 2)]]


class TestChunksOfAnotherProgram:
    """tests/golden/litdata was written by litdata 0.2.76."""

    def test_pictures_lie_as_they_were_stored(self) -> None:
        source = open_source(GOLDEN / "pictures")

        assert isinstance(source, LitDataChunks)
        sizes = [Image.open(io.BytesIO(content)).size for content in contents(source)]
        assert sizes == [(8 + number, 6) for number in range(5)]
        assert labels_of(source) == [0, 3, 6, 9, 12]
        assert source.describe(3) == f"{GOLDEN}/pictures/chunk-0-1.bin: sample 1"
        names = LitDataChunks(GOLDEN / "pictures", label="name")
        assert names.classes == tuple(f"n{number}" for number in range(5))

    def test_rows_of_plain_values_lie_in_an_arrow_file(self) -> None:
        source = LitDataChunks(GOLDEN / "rows", sample="text")

        assert contents(source) == [b"sample %d" % number for number in range(5)]
        assert (labels_of(source), source.classes) == ([1, 0, 1, 0, 1], ("cat", "dog"))

    def test_columns_of_tuples_are_called_by_their_numbers(self) -> None:
        source = LitDataChunks(GOLDEN / "pairs", label="1")

        assert contents(source) == [b"pair" * number for number in range(1, 6)]
        assert labels_of(source) == [0, 1, 2, 3, 4]
        calls = Calls(report=(lines := list[str]()).append)
        assert labels_of(LitDataChunks(GOLDEN / "pairs", calls=calls)) == [-1] * 5
        assert any("no labels are taken" in line and "give label='1' if that is it" in line for line in lines)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(
        st.lists(st.tuples(st.binary(max_size=50), st.integers(0, 9)), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
    )
)
def test_samples_are_numbered_by_chunk(tmp_path: Path, chunks: list[list[tuple[bytes, int]]]) -> None:
    write_litdata(tmp_path, chunks)
    rows = [row for chunk in chunks for row in chunk]

    source = LitDataChunks(tmp_path, refresh="full")

    assert source.sizes_bytes.tolist() == [len(content) for content, _ in rows]
    assert [source.read(k) if content else b"" for k, (content, _) in enumerate(rows)] == [
        content for content, _ in rows
    ]
    assert labels_of(source) == [label for _, label in rows]


@for_each(
    ("begin", "new", "message"),
    [
        (0, b"\0\0\0\0", "it has 0 samples in"),
        (0, b"\xff\xff\xff\xff", "it has 4,294,967,295 samples in"),
        (12, b"\xff\0\0\0", "its samples end at byte 255"),
        (16, b"\xff\0\0\0", "sample 0 is not as long as its columns"),
    ],
)
def test_a_chunk_with_wrong_numbers_is_an_error(tmp_path: Path, begin: int, new: bytes, message: str) -> None:
    first, _ = write_litdata(tmp_path, TWO)
    content = bytearray(first.read_bytes())
    content[begin : begin + 4] = new
    first.write_bytes(content)

    with pytest.raises(DataError, match=f"is cut off, damaged or no LitData chunk: {message}") as caught:
        LitDataChunks(tmp_path)
    assert str(caught.value).startswith(str(first))


@pytest.mark.parametrize("rows", [[], [b"x"], ["0"]])
def test_a_folder_of_another_kind_is_none(tmp_path: Path, rows: Sequence[Any]) -> None:
    (tmp_path / "index.json").write_text(str(rows))
    (tmp_path / "a.jpg").write_bytes(b"1")

    assert not isinstance(open_source(tmp_path), LitDataChunks)


@for_each(
    ("change", "message"),
    [
        ({"ipc_compression": "zstd"}, r"is compressed within its chunks \(zstd\): .* compression=None"),
        ({"encryption": {"algorithm": "fernet"}}, "is encrypted"),
        ({"item_loader": "TokensLoader"}, "was written for TokensLoader"),
        ({"data_format": ["bytes"]}, "is no index of LitData chunks"),
        ({"data_spec": "[1, 2]"}, "is no index of LitData chunks"),
        ({"data_spec": None}, "is no index of LitData chunks"),
        ({"data_format": [None, "int"]}, "is no index of LitData chunks"),
    ],
)
def test_what_cannot_be_read_is_answered_with_what_to_do(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_litdata(tmp_path, TWO)
    index = json.loads((tmp_path / "index.json").read_text())
    index["config"] |= change
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


def test_a_chunk_beyond_the_folder_is_refused(tmp_path: Path) -> None:
    write_litdata(tmp_path, TWO)
    index = json.loads((tmp_path / "index.json").read_text())
    index["chunks"][0]["filename"] = "../secret"
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(DataError, match="which is not next to it"):
        LitDataChunks(tmp_path)


def test_an_arrow_file_in_a_chunk_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "rows", tmp_path / "rows")
    file = tmp_path / "rows" / "chunk-0-0.bin"
    data = file.read_bytes()
    for content in (data[:40] + b"\xff" * 300 + data[340:], data[:-12] + b"\xff\xff\0\0" + data[-8:]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"chunk-0-0\.bin"):
            LitDataChunks(tmp_path / "rows", sample="text")


def test_columns_that_do_not_do_are_named(tmp_path: Path) -> None:
    write_litdata(tmp_path, TWO)

    with pytest.raises(
        ConfigError, match=r"sample is 'no'; its columns are 'image' \(bytes\), 'label' \(int\)"
    ):
        LitDataChunks(tmp_path, sample="no")
    with pytest.raises(ConfigError, match="label is 'image'; its columns are"):
        LitDataChunks(tmp_path, label="image")
    os.remove(tmp_path / "chunk-0-1.bin")
    with pytest.raises(DataError, match=r"chunk-0-1\.bin cannot be opened"):
        LitDataChunks(tmp_path)


@for_each("kind", ["no_header_tensor:4", "tensor", "json"])
def test_a_column_called_label_that_cannot_be_one_is_an_error(tmp_path: Path, kind: str) -> None:
    """Else a training would learn from -1."""
    write_litdata(tmp_path, TWO)
    index = json.loads((tmp_path / "index.json").read_text())
    index["config"]["data_format"] = ["bytes", kind]
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match=rf"label is 'label'; its columns are .*label \({kind}\)"):
        open_source(tmp_path)
    assert labels_of(LitDataChunks(tmp_path, label=None)) == [-1, -1, -1]


@for_each(("kind", "dtype"), [("float", "f8"), ("no_header_numpy:9", "f4"), ("no_header_tensor:15", "i4")])
def test_numbers_and_arrays_are_labels_of_their_type(tmp_path: Path, kind: str, dtype: str) -> None:
    """As `optimize` stores 0.5, np.zeros(2, np.float32) and torch.zeros(2, dtype=torch.int32)."""
    write_litdata(tmp_path, TWO)
    index = json.loads((tmp_path / "index.json").read_text())
    index["config"]["data_format"] = ["bytes", kind]
    (tmp_path / "index.json").write_text(json.dumps(index))

    one: Any = LitDataChunks(tmp_path).labels
    several: Any = LitDataChunks(tmp_path, label=["label"]).labels

    numbers = np.array([label for chunk in TWO for _, label in chunk], "<i8").view(dtype)
    assert one.dtype == dtype
    assert one.tolist() == numbers.reshape(one.shape).tolist()
    assert np.array_equal(several["label"], one)
