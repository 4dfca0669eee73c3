"""Labels that are names get the same numbers in the validation as in the training."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from tests.for_each import for_each
from tests.store.litdata_files import write_litdata
from tests.store.mds_files import write_mds
from tests.store.tfrecord_files import write_records

from penstock.errors import ConfigError, DataError
from penstock.store import (
    ArrowFiles,
    ArrowTable,
    FileList,
    Hdf5,
    ImageFolder,
    LitDataChunks,
    Manifest,
    MosaicShards,
    ParquetFiles,
    TarShards,
    TFRecords,
)

#: Opens samples of these labels, written into a folder, with classes= or without.
Opener = Callable[..., Any]


def files(folder: Path, labels: list[str]) -> list[str]:
    names = [f"{label}/{number}.jpg" for number, label in enumerate(labels)]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return names


def image_folder(folder: Path, labels: list[str], **given: Any) -> ImageFolder:
    files(folder, labels)
    return ImageFolder(folder, **given)


def file_list(folder: Path, labels: list[str], **given: Any) -> FileList:
    rows = zip(files(folder, labels), labels, strict=True)
    (folder / "list.txt").write_text("".join(f"{name},{label}\n" for name, label in rows))
    return FileList(folder / "list.txt", **given)


def manifest(folder: Path, labels: list[str], **given: Any) -> Manifest:
    rows = zip(files(folder, labels), labels, strict=True)
    (folder / "a.csv").write_text("file_name,label\n" + "".join(f"{name},{label}\n" for name, label in rows))
    return Manifest(folder / "a.csv", **given)


def tar_shards(folder: Path, labels: list[str], **given: Any) -> TarShards:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, label in enumerate(labels):
            for ending, content in (("jpg", b"x"), ("cls", label.encode())):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return TarShards(folder / "a.tar", **given)


def tf_records(folder: Path, labels: list[str], **given: Any) -> TFRecords:
    write_records(folder / "a.tfrecord", [{"image": b"x", "label": label.encode()} for label in labels])
    return TFRecords(folder / "a.tfrecord", **given)


def table(labels: list[str]) -> pa.Table:
    return pa.table({"image": [b"x"] * len(labels), "label": labels})


def arrow(folder: Path, labels: list[str], **given: Any) -> ArrowFiles:
    rows = table(labels)
    with pa.ipc.new_file(folder / "a.arrow", rows.schema) as writer:
        writer.write_table(rows)
    return ArrowFiles(folder / "a.arrow", **given)


def arrow_table(folder: Path, labels: list[str], **given: Any) -> ArrowTable:
    return ArrowTable(table(labels), **given)


def parquet(folder: Path, labels: list[str], **given: Any) -> ParquetFiles:
    pq.write_table(table(labels), folder / "a.parquet")
    return ParquetFiles(folder / "a.parquet", **given)


def mosaic(folder: Path, labels: list[str], **given: Any) -> MosaicShards:
    write_mds(folder, [[(b"x", int(label)) for label in labels]])
    return MosaicShards(folder, **given)


def litdata(folder: Path, labels: list[str], **given: Any) -> LitDataChunks:
    write_litdata(folder, [[(b"x", int(label)) for label in labels]])
    return LitDataChunks(folder, **given)


OF_NAMES = (image_folder, file_list, manifest, tar_shards, tf_records, arrow, arrow_table, parquet)


@for_each(
    ("opener", "one", "other"),
    [*((opener, "dog", "emu") for opener in OF_NAMES), (mosaic, "1", "2"), (litdata, "1", "2")],
)
def test_classes_of_the_training_number_the_validation(
    tmp_path: Path, opener: Opener, one: str, other: str
) -> None:
    train = ("ape", other, "cat", one)

    source = opener(tmp_path, [one, one, other], classes=train)

    assert source.classes == train
    assert source.labels.tolist() == [3, 3, 1]
    assert pickle.loads(pickle.dumps(source)).labels.tolist() == [3, 3, 1]
    with pytest.raises(ValueError, match="read-only"):
        source.labels[0] = 1


@for_each(("opener", "other"), [*((opener, "emu") for opener in OF_NAMES), (mosaic, "2"), (litdata, "2")])
def test_a_label_that_classes_do_not_have_is_an_error_that_names_it_and_its_file(
    tmp_path: Path, opener: Opener, other: str
) -> None:
    message = (
        rf"(?s){'Table' if opener is arrow_table else tmp_path}.*'{other}'.* which classes= does not have"
    )

    with pytest.raises(DataError, match=message):
        opener(tmp_path, [other, other], classes=["cat", "dog"])


def test_a_sample_without_a_label_stays_one(tmp_path: Path) -> None:
    source: Any = mosaic(tmp_path, ["1", "-1", "0"], classes=("0", "3", "1"))

    assert source.labels.tolist() == [2, -1, 0]


@for_each(
    ("classes", "message"),
    [
        ("cat", "classes is 'cat'; it is a list of names"),
        ([0, 1], r"classes is \[0, 1\]; it is a list of names"),
        (["cat", "dog", "cat"], "classes has 'cat' twice"),
    ],
)
@for_each("opener", [image_folder, parquet, manifest])
def test_what_are_no_classes_is_refused(tmp_path: Path, opener: Opener, classes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opener(tmp_path, ["cat"], classes=classes)


def test_classes_for_labels_that_are_no_names_are_refused(tmp_path: Path) -> None:
    rows = pa.table({"image": [b"x"], "x": np.zeros(1), "y": np.zeros(1)})
    pq.write_table(rows, tmp_path / "a.parquet")

    for label in (None, ["x", "y"]):
        with pytest.raises(ConfigError, match="classes are given, and labels of the source are no names"):
            ParquetFiles(tmp_path / "a.parquet", label=label, classes=["cat"])


@for_each(
    ("opener", "arguments", "message"),
    [
        (ParquetFiles, {"sample": ["image"]}, r"sample is \['image'\]; it is a name"),
        (ArrowFiles, {"label": [["a"]]}, r"label is \['a'\]; it is a name"),
        (ParquetFiles, {"label": []}, r"label is \[\]; it is the name of a column, a list of names"),
        (MosaicShards, {"label": 3}, r"label is 3; it is the name of a column, a list of names"),
        (LitDataChunks, {"sample": 0}, "sample is 0; it is a name"),
        (Hdf5, {"data": ["data"]}, r"data is \['data'\]; it is a name"),
        (TarShards, {"member": ["png"]}, r"member is \['png'\]; it is the ending"),
        (Manifest, {"labels": 3}, "labels is 3; it names columns"),
    ],
)
def test_an_argument_that_is_no_name_is_refused(
    tmp_path: Path, opener: Any, arguments: dict[str, Any], message: str
) -> None:
    table = pa.table({"image": [b"1"], "a": [1]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.csv").write_text("file,label\nb.jpg,1\n")
    place = {ParquetFiles: "a.parquet", ArrowFiles: "a.arrow", Manifest: "a.csv"}.get(opener, "a")

    with pytest.raises(ConfigError, match=message):
        opener(tmp_path / place, **arguments)
