"""Which samples an Arrow table and a datasets.Dataset have, and that no value is copied to find them."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.for_each import for_each
from tests.store.reads import contents

from penstock import Loader
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import DecodeRaw, Resize, ToTensor
from penstock.store import ArrowTable, packed, read_group
from penstock.store.packed import copy_pieces


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def pictures(count: int) -> Any:
    import datasets

    features = {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["wolf", "cat"])}
    rows = {
        "image": [{"bytes": picture(number), "path": None} for number in range(count)],
        "label": [number % 2 for number in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@settings(max_examples=60)
@given(
    chunks=st.lists(st.lists(st.binary(min_size=1, max_size=30), max_size=5), min_size=1, max_size=4),
    kind=st.sampled_from([pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary())]),
    data=st.data(),
)
def test_samples_are_those_that_pyarrow_has(chunks: list[list[bytes]], kind: Any, data: Any) -> None:
    rows = [row for chunk in chunks for row in chunk]
    table = pa.table(
        {"image": pa.chunked_array([pa.array(chunk, pa.binary()) for chunk in chunks]).cast(kind)}
    )
    if not rows:
        with pytest.raises(DataError, match="has no rows"):
            ArrowTable(table)
        return
    begin = data.draw(st.integers(0, len(rows) - 1))
    ids = np.array(data.draw(st.lists(st.integers(0, len(rows) - begin - 1), max_size=20)), np.int64)

    source = ArrowTable(table.slice(begin))

    wanted = rows[begin:]
    assert contents(source) == wanted
    begins = np.concatenate(([0], np.cumsum(source.sizes_bytes[ids])))
    into = np.empty(begins[-1], np.uint8)
    assert read_group(source, ids, into, begins) == []
    assert into.tobytes() == b"".join(wanted[sample] for sample in ids)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_pieces_of_some_arrays_are_copied_and_all_else_stays(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    packed.READ_PIECES.wait()
    if not is_compiled:
        monkeypatch.setattr(type(packed.READ_PIECES), "ask", lambda part: None)
    arrays = {7: np.arange(100, dtype=np.uint8), 3: np.arange(100, 150, dtype=np.uint8)}
    # Array 5 is not given, and the third piece is empty.
    which, offsets, sizes, begins = np.array(
        [[7, 5, 3, 3, 7], [90, 0, 4, 48, 0], [10, 3, 0, 2, 1], [0, 10, 13, 13, 15]]
    )

    copy_pieces(arrays, which, offsets, sizes, into := np.full(17, 255, np.uint8), begins)
    copy_pieces({}, which, offsets, sizes, into, begins)

    assert into.tolist() == [*range(90, 100), 255, 255, 255, 148, 149, 0, 255]
    with pytest.raises(ValueError):
        copy_pieces(arrays, which[:1], offsets[:1] + 1, sizes[:1], into, begins[:1])


def test_what_select_and_shuffle_chose_is_read_and_labels_have_their_names() -> None:
    dataset = pictures(40).shuffle(seed=1).select(range(5, 25))

    source = ArrowTable(dataset)

    assert contents(source) == [row["image"]["bytes"] for row in dataset]
    assert isinstance(source.labels, np.ndarray)
    assert (source.labels.tolist(), source.classes) == (dataset["label"][:], ("wolf", "cat"))
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    assert source.facts != ArrowTable(pictures(40).shuffle(seed=2)).facts
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.read, range(20))) == contents(source)


def test_a_part_is_selected_as_of_other_sources() -> None:
    train, test = ArrowTable(pictures(10)).split([0.8, 0.2], seed=1)

    assert (len(train), len(test)) == (8, 2)
    assert sorted([*map(train.read, range(8)), *map(test.read, range(2))]) == sorted(map(picture, range(10)))


def test_values_are_not_copied() -> None:
    table = pa.table({"image": pa.array([b"1" * 1000] * 1000)})
    before = pa.total_allocated_bytes()

    source = ArrowTable(table)

    assert pa.total_allocated_bytes() == before
    (piece,) = source._pieces
    assert piece.ctypes.data == table["image"].chunk(0).buffers()[2].address


def test_a_loader_of_a_dataset_decodes_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a progress bar leaves a thread behind
    pictures(12).save_to_disk(tmp_path / "saved")
    dataset = datasets.load_from_disk(str(tmp_path / "saved")).shuffle(seed=3).with_format("numpy")

    with Loader(
        dataset, batch_size=4, epochs=1, transforms=[Resize((8, 8)), ToTensor()], report=None
    ) as loader:
        batches = [(images.copy(), labels.copy()) for images, labels in loader]
        assert loader.classes == ("wolf", "cat")

    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    reds = np.rint(images[:, 0, 0, 0] * 255).astype(int)
    assert sorted(reds.tolist()) == list(range(12))
    assert (labels == reds % 2).all()


def test_a_data_set_whose_samples_a_function_makes_is_asked_for_them() -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0]}).with_transform(
        lambda rows: {"x": [2 * value for value in rows["x"]]}
    )

    with Loader(dataset, batch_size=3, epochs=1, shuffle=False, report=None) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[2, 4, 6]]
    with pytest.raises(ConfigError, match="transforms are given with the data set Dataset"):
        Loader(dataset, batch_size=3, epochs=1, transforms=[DecodeRaw("f8")], report=None)


def test_several_columns_of_numbers_are_labels_by_name() -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "x": [1.5, 2.5, 3.5], "y": [1, 2, 3]})

    source = ArrowTable(dataset.select([2, 0]), label=["x", "y"])

    assert isinstance(source.labels, dict)
    assert {name: each.tolist() for name, each in source.labels.items()} == {"x": [3.5, 1.5], "y": [3, 1]}


def test_lists_of_one_length_are_numbers() -> None:
    import datasets

    rows = np.arange(30, dtype="f4").reshape(10, 3)
    features = datasets.Features({"x": datasets.List(datasets.Value("float32"), length=3)})
    dataset = datasets.Dataset.from_dict({"x": rows.tolist()}, features=features).select([7, 2, 5])

    with Loader(
        ArrowTable(dataset, sample="x"), batch_size=3, epochs=1, shuffle=False, report=None
    ) as loader:
        (batch,) = [batch.copy() for batch in loader]

    assert batch.dtype == np.float32
    assert (batch == rows[[7, 2, 5]]).all()


@for_each(
    ("table", "sample", "error", "message"),
    [
        (pa.table({"image": [b"1", None]}), None, DataError, "row 1 of 'image' has no value"),
        (
            pa.table({"image": [{"bytes": None, "path": "a.jpg"}]}).cast(
                pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))])
            ),
            None,
            DataError,
            "row 0 of 'image.bytes' has no bytes in it, but the path of a file",
        ),
        (pa.table({"a": [1]}), None, ConfigError, "sample is None; its columns are a"),
        (pa.table({"a": [b"1"]}), "b", ConfigError, "sample is 'b'; its columns are a"),
        (
            pa.table({"x": pa.array([["a"]], pa.list_(pa.string(), 1))}),
            "x",
            ConfigError,
            "x has lists of string",
        ),
        ({"image": [b"1"]}, None, ConfigError, r"is no pyarrow\.Table and no datasets\.Dataset"),
    ],
)
def test_what_does_not_do_is_named(
    table: Any, sample: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ArrowTable(table, sample=sample)


def test_a_sample_without_bytes_and_one_that_is_not_there_are_errors() -> None:
    source = ArrowTable(pa.table({"image": [b"one", b"", b"three"]}))

    with pytest.raises(DataError, match=r"Table: row 1 is empty \(0 bytes\)"):
        source.read(1)
    with pytest.raises(IndexError, match="no sample 3"):
        source.read(3)
    with pytest.raises(ConfigError, match=r"a buffer of 2 bytes cannot hold Table: row 0 \(3 bytes\)"):
        source.read_into(0, memoryview(bytearray(2)))
    into = np.zeros(8, np.uint8)
    ((index, error),) = read_group(source, np.array([0, 1, 2]), into, np.array([0, 3, 3, 8]))
    assert (index, into.tobytes()) == (1, b"onethree")
    assert isinstance(error, DataError)
