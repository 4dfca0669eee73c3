"""The examples of the how-to pages on sources run as they are written, and read what is there."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet as pq
from tests.store.litdata_files import write_litdata
from tests.store.mds_files import write_mds
from tests.store.tfrecord_files import Feature, write_records

from penstock import Loader
from penstock.cli.main import main
from penstock.loader.transforms import DecodeRaw
from penstock.plan import Sequential
from penstock.store.testing import SourceContract, Stored

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = HOWTO / "a-source-of-your-own.md"


def test_records_of_files_are_read_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.arange(2 * 1000 * 256, dtype="<f4").reshape(2000, 16, 16)
    files = [tmp_path / "0.bin", tmp_path / "1.bin"]
    for file, part in zip(files, np.split(values, 2), strict=True):
        part.tofile(file)
    given: dict[str, Any] = {"files": files}

    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(example, given)

    assert capsys.readouterr().out.splitlines()[-1].startswith("(64, 16, 16) float32 [")
    assert given["Records"](files).read(1001) == values[1001].tobytes(), "the first class reads by itself"
    (tmp_path / "few.bin").write_bytes(values[:3].tobytes())
    few = Stored(given["RecordsInFiles"]([tmp_path / "few.bin"]), [each.tobytes() for each in values[:3]])
    checks = [name for name in dir(SourceContract) if name.startswith("test_")]
    for name in checks:
        if "pickled" not in name:  # the class of an example is in no module
            getattr(given["TestRecords"](), name)(few)
    source = given["RecordsInFiles"](files)
    asked: list[int] = []
    read_ranges = source.read_ranges

    def noted(unit: int, ranges: Any, into: Any) -> None:
        asked.append(len(ranges))
        read_ranges(unit, ranges, into)

    source.read_ranges = noted
    with Loader(
        source,
        batch_size=50,
        epochs=1,
        shuffle=Sequential(2000),
        transforms=[DecodeRaw("<f4", (16, 16))],
        report=None,
    ) as loader:
        batches = [numbers.copy() for numbers, _ in loader]
    assert np.array_equal(np.concatenate(batches), values)
    assert sum(asked) < 200, "each read brings many of the 2,000 records"


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as tar:
            for number in range(16):
                content = io.BytesIO()
                Image.new("RGB", (80, 70), (number, shard, 0)).save(content, "PNG")
                mask = io.BytesIO()
                Image.new("L", (80, 70), number).save(mask, "PNG")
                label = f"{number % 10}", f'{{"class": "{"cat" if number % 2 else "dog"}"}}'
                for name, data in (
                    ("png", content.getvalue()),
                    ("cls", label[0].encode()),
                    ("json", label[1].encode()),
                    ("seg.png", mask.getvalue()),
                    ("txt", b"a picture"),
                ):
                    member = tarfile.TarInfo(f"{number:05}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def test_shards_arrays_and_tokens_are_opened_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "shards")
    for number in range(2):
        records: list[dict[str, Feature]] = [
            {"image/encoded": b"1", "image/class/label": [each]} for each in range(3)
        ]
        write_records(Path(f"records/train-{number:05}-of-00002"), records)
    write_mds(Path("mds"), [[(b"1", 0), (b"2", 1)], [(b"3", 2)]])
    write_litdata(Path("litdata"), [[(b"1", 0), (b"2", 1)]])
    for number in range(2):
        table = pa.table({"image": [{"bytes": b"1", "path": ""}] * 2, "label": [0, 1]})
        with (
            pa.OSFile(f"data-{number:05}-of-00002.arrow", "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(table)
    Path("talks.jsonl").write_text(
        '{"prompt": "a", "talk": []}\n{"prompt": "b", "talk": [{"role": "user"}]}\n', "utf-8"
    )
    Path("parquet").mkdir()
    pq.write_table(table, "parquet/train-00000-of-00001.parquet")
    with h5py.File("images.h5", "w") as file:
        file.create_dataset("train/images", (40, 8, 8), "u1", chunks=(4, 8, 8))[:] = 7
        file["train/labels"] = np.arange(40) % 3
    random = np.random.default_rng(0)
    np.save("features.npy", random.random((100, 16), np.float32))
    np.save("classes.npy", random.integers(0, 5, 100))
    for number in (1, 2):
        Path(f"data_batch_{number}.bin").write_bytes(random.bytes(20 * 3073))
    random.integers(0, 50_000, 1000).astype("<u2").tofile("train.bin")
    given: dict[str, Any] = {}

    printed = []
    for example in re.findall(
        r"```python\n(.*?)```", (HOWTO / "shards-arrays-tokens.md").read_text(), re.DOTALL
    ):
        exec(example, given)
        printed.append(capsys.readouterr().out.splitlines()[-1])

    assert printed == [
        "(32, 3, 64, 64) (32,)",
        f"TarShards('{tmp_path}/shards/*.tar'): 64 samples, 4 shards, 2 classes ('cat', 'dog')",
        "(32, 3, 64, 64) (32, 64, 64) a picture (32,)",
        f"TFRecords('{tmp_path}/records/train-*-of-00002'): 6 samples, 2 shards, 3 classes "
        f"{tmp_path}/records/train-00000-of-00002: record 0",
        f"MosaicShards('{tmp_path}/mds'): 3 samples, 2 shards, 3 classes ('0', '1', '2')",
        f"LitDataChunks('{tmp_path}/litdata'): 2 samples, 1 shard, 2 classes ('0', '1')",
        f"ArrowFiles('{tmp_path}/data-00000-of-00002.arrow and 1 more'): 4 samples, 2 shards, 2 classes ('0', '1')",
        "ArrowTable(Table): 2 samples, 2 classes ('cat', 'dog')",
        "['first text', 'second'] [1 0]",
        "['a', 'b'] [{'role': 'user'}]",
        f"ParquetFiles('{tmp_path}/parquet/train-*.parquet'): 2 samples, 1 shard, 2 classes ('0', '1')",
        "(32, 16) float32",
        "(32, 16) (32,)",
        "(32, 8, 8) uint8 (32,)",
        "(32, 3, 32, 32) float32 int64",
        "(8, 64) (8, 64) int64",
    ]


def write_pictures(folder: Path, samples: int) -> None:
    for number in range(samples):
        path = folder / ("dog" if number % 4 == 0 else "cat") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80 + number, 70), (number, 0, 0)).save(path)


def test_tables_are_opened_and_data_sets_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos", 80)
    write_pictures(tmp_path / "data", 2)
    write_pictures(tmp_path / "val", 2)
    shutil.rmtree("val/cat")
    Path("data/metadata.csv").write_text("file_name,label\ndog/000.png,dog\ncat/001.png,cat\n")
    records: list[dict[str, Any]] = [
        {"image": "dog/000.png", "age": 3.5, "tags": ["brown", "old"]},
        {"image": "cat/001.png", "age": 1, "tags": ["brown"]},
    ]
    Path("data/train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    given: dict[str, Any] = {}

    printed = []
    for example in re.findall(
        r"```python\n(.*?)```", (HOWTO / "manifests-and-splits.md").read_text(), re.DOTALL
    ):
        exec(example, given)
        printed += capsys.readouterr().out.splitlines()

    whole = f"ImageFolder('{tmp_path}/photos'): 80 samples, 2 classes"
    assert printed == [
        f"Manifest('{tmp_path}/data'): 2 samples, 2 classes ('cat', 'dog')",
        "{'age': ('float32', (2,)), 'tags': ('uint8', (2, 2))}",
        "{'tags': ('brown', 'old')}",
        "('cat', 'dog') [1]",
        f"72 of {whole}",
        f"8 of {whole}",
        "(32, 3, 64, 64) (32,)",
        "8 60 ('cat', 'dog') 37",
    ]
    assert np.bincount(given["val"].labels).tolist() == [6, 2]


def test_a_data_set_is_checked_and_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos", 80)
    Path("photos/cat/003.png").write_bytes(b"no picture")
    page = (HOWTO / "check-and-pack.md").read_text()
    given: dict[str, Any] = {}

    for command in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in command.splitlines():
            assert main(shlex.split(line)[1:]) == int("penstock check" in line), line
    capsys.readouterr()
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, given)

    assert capsys.readouterr().out.splitlines() == ["79 of 80 samples", "('cat', 'dog') cat/001.png", "79"]
