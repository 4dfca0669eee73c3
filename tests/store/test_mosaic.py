"""Which samples MDS shards have, where they lie, and every way a shard can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.store.mds_files import write_mds
from tests.store.reads import labels_of

from penstock import open_source
from penstock.errors import ConfigError, DataError
from penstock.store import MosaicShards

GOLDEN = Path(__file__).parents[1] / "golden" / "mds"
TWO = [[(b"one", 3), (b"", 1)], [(b"three", 2)]]


def test_shards_of_another_program_are_read() -> None:
    """tests/golden/mds was written by mosaicml-streaming 0.13.0, with columns image, label, name and weight."""
    source = open_source(GOLDEN)

    assert isinstance(source, MosaicShards)
    assert [source.read(i) for i in range(7)] == [bytes(range(i, i + 20)) * (1 + 3 * i) for i in range(7)]
    assert labels_of(source) == [1, 2, 3, 1, 2, 3, 1]
    assert source.describe(5) == f"{GOLDEN}/shard.00001.mds: sample 1"
    assert MosaicShards(GOLDEN, label="name").classes == tuple(f"n{i}" for i in range(7))
    assert [MosaicShards(GOLDEN, sample="name", label=None).read(i) for i in (0, 6)] == [b"n0", b"n6"]


def test_samples_are_numbered_by_shard(tmp_path: Path) -> None:
    write_mds(tmp_path, TWO)
    source = MosaicShards(tmp_path)

    assert source.sizes_bytes.tolist() == [3, 0, 5]
    assert [source.read(0), source.read(2)] == [b"one", b"three"]
    assert labels_of(source) == [3, 1, 2]
    assert labels_of(MosaicShards(tmp_path, label=None)) == [-1, -1, -1]


@for_each(
    ("begin", "new", "message"),
    [
        (0, b"\x00\0\0\0", "it has 0 samples in"),
        (0, b"\xff\xff\xff\xff", "it has 4,294,967,295 samples in"),
        (4, b"\xff\0\0\0", "its samples end at byte"),
        (12, b"\xff\0\0\0", "its samples end at byte 255"),
        (22, b"\xff\0\0\0", "sample 0 is not as long as its columns"),
    ],
)
def test_a_shard_with_wrong_numbers_is_an_error(tmp_path: Path, begin: int, new: bytes, message: str) -> None:
    first, _ = write_mds(tmp_path, TWO)
    content = bytearray(first.read_bytes())
    content[begin : begin + len(new)] = new
    first.write_bytes(content)

    with pytest.raises(DataError, match=message) as caught:
        MosaicShards(tmp_path)

    assert str(caught.value).startswith(f"{first} is cut off, damaged or no MDS shard: ")


def test_a_shard_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    first, _ = write_mds(tmp_path, TWO)
    content = first.read_bytes()
    for size in range(len(content)):
        first.write_bytes(content[:size])
        with pytest.raises(DataError, match="is cut off"):
            MosaicShards(tmp_path)


@for_each(
    ("changes", "message"),
    [
        ({"format": "json"}, "is no index of MDS shards"),
        ({"column_sizes": [None, 8]}, "is no index of MDS shards"),
        ({"column_sizes": [None, -8, 4]}, "is no index of MDS shards"),
        ({"column_sizes": [None, 2**70, 4]}, "is no index of MDS shards"),
        ({"column_names": [[], "label", "name"]}, "is no index of MDS shards"),
        ({"column_encodings": [None, "int", "str"]}, "is no index of MDS shards"),
        ({"raw_data": {"basename": "\0"}}, "is no index of MDS shards"),
        ({"raw_data": {"basename": "../shard.00000.mds"}}, "which is not next to it"),
        ({"raw_data": None}, "is no index of MDS shards"),
        ({"samples": 1}, r"shard\.00000\.mds is .*: it has 2 samples, and index\.json says 1"),
        ({"raw_data": {"basename": "gone.mds"}}, r"gone\.mds cannot be opened"),
    ],
)
def test_an_index_that_is_wrong_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_mds(tmp_path, TWO, **changes)

    with pytest.raises(DataError, match=message):
        MosaicShards(tmp_path)


def test_a_shard_of_other_columns_is_an_error(tmp_path: Path) -> None:
    _, second = write_mds(tmp_path, TWO)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][1]["column_names"] = ["picture", "label", "weight"]
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(DataError, match=f"{second} has other columns than the first shard"):
        MosaicShards(tmp_path)


@for_each("text", ["", "[]", "{}", '{"shards": []}', '{"shards": [7]}', "[" * 100_000])
def test_a_text_that_is_no_index_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)

    with pytest.raises(DataError, match=r"index\.json (is no index of MDS shards|names no shard)"):
        MosaicShards(tmp_path)


def test_columns_that_do_not_do_are_named(tmp_path: Path) -> None:
    write_mds(tmp_path, TWO)

    with pytest.raises(
        ConfigError, match=r"sample is 'picture'; its columns are image \(bytes\), label \(int\)"
    ):
        MosaicShards(tmp_path, sample="picture")
    with pytest.raises(
        ConfigError, match=r"label is 'image'; its columns are image \(bytes\), label \(int\)"
    ):
        MosaicShards(tmp_path, label="image")
    write_mds(tmp_path, TWO, column_encodings=["pkl", "int", "float32"])
    with pytest.raises(ConfigError, match="and of no pickled objects"):
        MosaicShards(tmp_path, sample="image")


def test_a_folder_without_an_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json cannot be read: No such file"):
        MosaicShards(tmp_path)


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")

    with pytest.raises(DataError, match=r"index\.json is not a regular file"):
        MosaicShards(tmp_path)
    with pytest.raises(DataError):
        open_source(tmp_path)


def test_numbers_and_arrays_are_labels_of_their_type(tmp_path: Path) -> None:
    write_mds(tmp_path, TWO, column_encodings=["bytes", "ndarray:uint16:2,2", "float32"])

    one: Any = MosaicShards(tmp_path, label="weight").labels
    several: Any = MosaicShards(tmp_path, label=["label", "weight"]).labels

    assert (one.dtype.name, one.tolist()) == ("float32", [0.5] * 3)
    assert np.array_equal(several["weight"], one)
    numbers = np.array([label for shard in TWO for _, label in shard], "<i8")
    assert several["label"].dtype == np.uint16
    assert np.array_equal(several["label"], numbers.view("<u2").reshape(3, 2, 2))
    write_mds(tmp_path, TWO, column_encodings=["bytes", "ndarray:uint16:3", "float32"])
    with pytest.raises(DataError, match=r"labels have 8 bytes, no ndarray:uint16:3"):
        MosaicShards(tmp_path)


@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray:no:2", "json"])
def test_a_column_called_label_that_cannot_be_one_is_an_error(tmp_path: Path, encoding: str) -> None:
    """Else a training would learn from -1."""
    write_mds(tmp_path, TWO, column_encodings=["bytes", encoding, "float32"])

    with pytest.raises(ConfigError, match=rf"label is 'label'; its columns are .*label \({encoding}\)"):
        open_source(tmp_path)
    assert labels_of(MosaicShards(tmp_path, label=None)) == [-1, -1, -1]
