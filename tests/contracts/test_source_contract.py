"""What every source of samples here must do, more than others; a new one is added to `SOURCES` and has all of these."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from tests.store.litdata_files import write_litdata
from tests.store.mds_files import pack_mds, write_mds
from tests.store.tfrecord_files import write_records

from penstock.errors import ConfigError, DataError
from penstock.measure.slow_source import SlowSource
from penstock.store import (
    Arrays,
    ArrowFiles,
    ArrowTable,
    CocoImages,
    FileList,
    FlatFolder,
    Hdf5,
    ImageFolder,
    ImageNetVal,
    JsonLines,
    LitDataChunks,
    Manifest,
    MixedSource,
    MosaicShards,
    PackedFiles,
    ParquetFiles,
    Records,
    Selection,
    Source,
    TarShards,
    TFRecords,
    Tokens,
    read_group,
)
from penstock.store.members import TarMembers
from penstock.store.selection import unselected
from penstock.store.testing import SourceContract, Stored

# Sizes round the borders of pages and pipes, and one that takes a while to read.
SIZES = (1, 2, 100, 4095, 4096, 4097, 65_536, 65_537, 300_000)


@dataclass(frozen=True)
class Opened:
    """A source over files that a test may damage."""

    source: Source
    contents: list[bytes]
    labels: list[int]
    #: Of each sample one of its own.
    files: list[Path]
    #: What in the file the sample is, behind its path.
    within: str = ""

    @property
    def sizes(self) -> list[int]:
        return [len(content) for content in self.contents]


def write_files(folder: Path, names: list[str]) -> tuple[list[bytes], list[Path]]:
    random = np.random.default_rng(5)
    contents = [random.bytes(size) for size in SIZES]
    files = [folder / name for name in names]
    for file, content in zip(files, contents, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return contents, files


def image_folder(folder: Path) -> Opened:
    contents, files = write_files(folder, [f"{'cat' if i < 4 else 'dog'}/{i}.jpg" for i in range(len(SIZES))])
    return Opened(ImageFolder(folder), contents, [0] * 4 + [1] * 5, files)


def flat_folder(folder: Path) -> Opened:
    contents, files = write_files(folder, [f"{i}.png" for i in range(len(SIZES))])
    return Opened(FlatFolder(folder), contents, [-1] * len(SIZES), files)


def file_list(folder: Path) -> Opened:
    contents, files = write_files(folder, [f"files/{i}.bin" for i in range(len(SIZES))])
    listing = folder / "list.csv"
    listing.write_text("".join(f"files/{i}.bin,{i % 3}\n" for i in range(len(SIZES))))
    return Opened(FileList(listing), contents, [i % 3 for i in range(len(SIZES))], files)


def compressed_hdf5(folder: Path) -> Opened:
    return hdf5(folder, compression="gzip", shuffle=True)


def manifest(folder: Path) -> Opened:
    contents, files = write_files(folder, [f"files/{i}.bin" for i in range(len(SIZES))])
    table = folder / "train.jsonl"
    table.write_text("".join(f'{{"path": "files/{i}.bin", "label": {i % 3}}}\n' for i in range(len(SIZES))))
    return Opened(Manifest(table), contents, [i % 3 for i in range(len(SIZES))], files)


def coco(folder: Path) -> Opened:
    contents, files = write_files(folder, [f"files/{i}.jpg" for i in range(len(SIZES))])
    found = {
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(len(SIZES))],
        "annotations": [{"id": i, "image_id": i, "category_id": 7 + i % 3} for i in range(len(SIZES))],
        "categories": [{"id": 7 + number, "name": f"class {number}"} for number in range(3)],
    }
    (folder / "train.json").write_text(json.dumps(found))
    source = CocoImages(folder / "train.json", folder / "files", labels="category")
    return Opened(source, contents, [i % 3 for i in range(len(SIZES))], files)


def imagenet_val(folder: Path) -> Opened:
    names = [f"ILSVRC2012_val_{i + 1:08}" for i in range(len(SIZES))]
    contents, files = write_files(folder, [f"val/{name}.JPEG" for name in names])
    lines = [f"{name},n0000000{i % 3} 1 2 3 4\n" for i, name in enumerate(names)]
    (folder / "solution.csv").write_text("ImageId,PredictionString\n" + "".join(lines))
    source = ImageNetVal(folder / "val", folder / "solution.csv")
    return Opened(source, contents, [i % 3 for i in range(len(SIZES))], files)


def write_tar(shard: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(shard, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return shard


def tar_shards(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents = [random.bytes(size) for size in SIZES]
    files = [
        write_tar(folder / f"{i}.tar", {"a.json": b"{}", "a.jpg": content, "a.cls": b"%d" % (i % 3)})
        for i, content in enumerate(contents)
    ]
    return Opened(
        TarShards(folder / "{0..8}.tar"), contents, [i % 3 for i in range(len(SIZES))], files, ": a.jpg"
    )


def tf_records(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents = [random.bytes(size) for size in SIZES]
    files = [
        write_records(folder / f"{i}.tfrecord", [{"image/encoded": content, "label": [i % 3]}])
        for i, content in enumerate(contents)
    ]
    return Opened(
        TFRecords(folder / "*.tfrecord"), contents, [i % 3 for i in range(len(SIZES))], files, ": record 0"
    )


def arrays(folder: Path) -> Opened:
    """Rows of one size, one in each file: other sources have one of each size."""
    rows = np.random.default_rng(5).integers(0, 256, (len(SIZES), 1, 4095), np.uint8)
    files = [folder / f"{i}.npy" for i in range(len(SIZES))]
    for file, row in zip(files, rows, strict=True):
        np.save(file, row)
    labels = [i % 3 for i in range(len(SIZES))]
    source = Arrays(folder / "*.npy", labels=np.array(labels))
    return Opened(source, [row.tobytes() for row in rows], labels, files, ": row 0")


def records(folder: Path) -> Opened:
    """Records of one length behind a header, one in each file."""
    rows = np.random.default_rng(5).integers(0, 256, (len(SIZES), 4095), np.uint8)
    files = [folder / f"{i}.bin" for i in range(len(SIZES))]
    labels = [i % 3 for i in range(len(SIZES))]
    for file, row, label in zip(files, rows, labels, strict=True):
        file.write_bytes(b"head" + bytes([label]) + row.tobytes())
    kind = [("label", "u1"), ("image", "u1", (4095,))]
    source = Records(folder / "*.bin", kind, field="image", labels="label", header_bytes=4)
    return Opened(source, [row.tobytes() for row in rows], labels, files, ": row 0")


def hdf5(folder: Path, **how: Any) -> Opened:
    rows = np.random.default_rng(5).integers(0, 256, (len(SIZES), 1, 4095), np.uint8)
    labels = [i % 3 for i in range(len(SIZES))]
    files = [folder / f"{i}.h5" for i in range(len(SIZES))]
    for path, row, label in zip(files, rows, labels, strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=row, **how)
            file["labels"] = [label]
    return Opened(Hdf5(folder / "*.h5"), [row.tobytes() for row in rows], labels, files, ": row 0")


def mosaic(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents, labels = [random.bytes(size) for size in SIZES], [i % 3 for i in range(len(SIZES))]
    pairs = zip(contents, labels, strict=True)
    files = write_mds(folder / "mds", [[pair] for pair in pairs])
    return Opened(MosaicShards(folder / "mds"), contents, labels, files, ": sample 0")


def packed_mosaic(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents, labels = [random.bytes(size) for size in SIZES], [i % 3 for i in range(len(SIZES))]
    files = pack_mds(folder / "mds", [[pair] for pair in zip(contents, labels, strict=True)])
    return Opened(MosaicShards(folder / "mds"), contents, labels, files, ": sample 0")


def litdata(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents, labels = [random.bytes(size) for size in SIZES], [i % 3 for i in range(len(SIZES))]
    files = write_litdata(folder / "lit", [[pair] for pair in zip(contents, labels, strict=True)])
    return Opened(LitDataChunks(folder / "lit"), contents, labels, files, ": sample 0")


def arrow(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents, labels = [random.bytes(size) for size in SIZES], [i % 3 for i in range(len(SIZES))]
    files = [folder / f"{i}.arrow" for i in range(len(SIZES))]
    for file, content, label in zip(files, contents, labels, strict=True):
        table = pa.table({"image": [content], "label": [label]})
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return Opened(ArrowFiles(folder / "*.arrow"), contents, labels, files, ": row 0")


def parquet(folder: Path) -> Opened:
    random = np.random.default_rng(5)
    contents, labels = [random.bytes(size) for size in SIZES], [i % 3 for i in range(len(SIZES))]
    files = [folder / f"{i}.parquet" for i in range(len(SIZES))]
    for file, content, label in zip(files, contents, labels, strict=True):
        pq.write_table(pa.table({"image": [content], "label": [label]}), file)
    return Opened(ParquetFiles(folder), contents, labels, files, ": row 0")


def slow_source(folder: Path) -> Opened:
    behind = image_folder(folder)
    return Opened(SlowSource(behind.source, 1e-5, 1e-5, 1e9), behind.contents, behind.labels, behind.files)


def selected(folder: Path) -> Opened:
    return _backwards(image_folder(folder))


def selected_of_shards(folder: Path) -> Opened:
    return _backwards(tar_shards(folder))


def _backwards(behind: Opened) -> Opened:
    source = Selection(behind.source, range(len(SIZES)))
    ids = list(reversed(range(len(SIZES))))
    return Opened(
        source.select(ids), behind.contents[::-1], behind.labels[::-1], behind.files[::-1], behind.within
    )


def mixed(folder: Path) -> Opened:
    parts = [image_folder(folder / "a"), image_folder(folder / "b")]
    kept = slice(2, 5), slice(3, 9)
    source = MixedSource(
        [Selection(part.source, range(len(SIZES))[each]) for part, each in zip(parts, kept, strict=True)],
        [1, 2],
        "stop",
    )
    contents, labels, files = (
        [value for part, each in zip(parts, kept, strict=True) for value in getattr(part, name)[each]]
        for name in ("contents", "labels", "files")
    )
    return Opened(source, contents, labels, files)


SOURCES = [
    mixed,
    image_folder,
    flat_folder,
    file_list,
    manifest,
    coco,
    imagenet_val,
    tar_shards,
    tf_records,
    mosaic,
    packed_mosaic,
    litdata,
    arrow,
    parquet,
    arrays,
    records,
    hdf5,
    compressed_hdf5,
    slow_source,
    selected,
    selected_of_shards,
]


def tokens(folder: Path) -> Stored:
    """Return windows that overlap: samples share what they are."""
    values = np.random.default_rng(5).integers(0, 1000, 80, np.uint16)
    values.tofile(folder / "train.bin")
    source = Tokens(folder / "train.bin", length=16, dtype="<u2", stride=8)
    return Stored(source, [values[begin : begin + 17].tobytes() for begin in range(0, 80 - 16, 8)])


def tar_members(folder: Path) -> Stored:
    for number in range(3):
        write_tar(
            folder / f"{number}.tar",
            {f"{key}.{end}": b"%d" % key * 9 for key in range(4) for end in ("a", "b")},
        )
    padding = 512 - 9 + 512  # to the end of a block, and the header of the next member
    source = TarMembers(folder / "*.tar")
    contents = [source.read(sample) for sample in range(len(source))]
    for key, content in enumerate(contents):
        assert (content[:9], content[9 + padding :]) == (b"%d" % (key % 4) * 9,) * 2
    return Stored(source, contents)


def json_lines(folder: Path) -> Stored:
    lines = [b'{"a": %d}' % 10**number for number in range(9)]
    (folder / "a.jsonl").write_bytes(b"\n\n".join(lines[:5]) + b"\n")
    (folder / "b.jsonl").write_bytes(b"\n".join(lines[5:]))
    return Stored(JsonLines(folder), lines)


def table(folder: Path) -> Stored:
    contents = [bytes([number]) * (number + 1) for number in range(9)]
    chunks = [pa.array(contents[:4], pa.binary()), pa.array(contents[4:], pa.binary())]
    labels = pa.array([number % 3 for number in range(9)])
    return Stored(ArrowTable(pa.table({"image": pa.chunked_array(chunks), "label": labels})), contents)


@pytest.fixture(params=[tokens, table, tar_members, json_lines], ids=lambda build: build.__name__)
def stored_without_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    found: Stored = request.param(tmp_path)
    yield found
    if isinstance(found.source, PackedFiles):
        found.source.close()


class TestSourcesWithoutAFileForEachSample(SourceContract):
    @pytest.fixture
    def stored(self, stored_without_files: Stored) -> Stored:
        return stored_without_files


@pytest.fixture(params=SOURCES, ids=lambda build: build.__name__)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """One that a test may damage."""
    yield from _built(request.param, tmp_path)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda build: build.__name__)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """One that all tests read which leave its files alone; it has opened them, for some keep them open."""
    for found in _built(request.param, tmp_path_factory.mktemp("intact")):
        for sample in range(len(found.source)):
            found.source.read(sample)
        yield found


def _built(build: Callable[[Path], Opened], folder: Path) -> Iterator[Opened]:
    found = build(folder)
    yield found
    source = unselected(found.source)
    if isinstance(source, SlowSource | PackedFiles):
        source.close()


def _labels(source: Source) -> np.ndarray:
    assert isinstance(source.labels, np.ndarray)
    return source.labels


class TestSourceContract(SourceContract):
    def test_labels_are_known_before_anything_is_read(self, stored: Opened) -> None:
        assert _labels(stored.source).dtype == np.int64
        assert _labels(stored.source).tolist() == stored.labels

    def test_nobody_can_change_sizes_and_labels(self, stored: Opened) -> None:
        for known in (stored.source.sizes_bytes, _labels(stored.source)):
            with pytest.raises(ValueError, match="read-only"):
                known[0] = 7

    def test_a_buffer_that_is_too_small_is_refused_with_both_sizes(self, stored: Opened) -> None:
        size = stored.sizes[4] - 1
        with pytest.raises(ConfigError, match=f"{size:,} bytes cannot hold"):
            stored.source.read_into(4, memoryview(bytearray(size)))

    def test_a_sample_is_described_by_its_path(self, stored: Opened) -> None:
        assert [stored.source.describe(sample) for sample in range(len(SIZES))] == [
            f"{f}{stored.within}" for f in stored.files
        ]

    def test_what_is_wrong_with_a_file_is_named_and_does_not_spoil_its_neighbours(
        self, opened: Opened
    ) -> None:
        """Files that nobody has read before: one after the other, alone and in a group."""
        sizes = [file.stat().st_size for file in opened.files]
        opened.files[3].unlink()
        self.expect_data_error(opened, 3, "has vanished")
        self.expect_all_but_one_of_a_group(opened, np.array([0, 3, 1, 0, 2]))

        os.truncate(opened.files[4], 4000)
        self.expect_data_error(opened, 4, f"has shrunk from {sizes[4]:,} to 4,000 bytes")

        os.truncate(opened.files[5], 0)
        self.expect_data_error(opened, 5, f"has shrunk from {sizes[5]:,} to 0 bytes")

        with opened.files[6].open("ab") as file:
            file.write(b"x")
        self.expect_data_error(opened, 6, f"has grown from {sizes[6]:,} to {sizes[6] + 1:,} bytes")

        opened.files[7].unlink()
        opened.files[7].mkdir()
        self.expect_data_error(opened, 7, "cannot be read: Is a directory")

        assert bytes(opened.source.read(8)) == opened.contents[8]

    def expect_all_but_one_of_a_group(self, opened: Opened, ids: np.ndarray) -> None:
        begins = np.concatenate(([0], np.cumsum(opened.source.sizes_bytes[ids])))
        into = np.zeros(begins[-1], np.uint8)

        ((index, error),) = read_group(opened.source, ids, into, begins)

        assert (index, type(error)) == (1, DataError)
        assert str(error).startswith(f"{opened.files[3]} has vanished")
        for sample, (begin, end) in zip(ids.tolist(), pairwise(begins), strict=True):
            assert sample == 3 or into[begin:end].tobytes() == opened.contents[sample]

    def expect_data_error(self, opened: Opened, sample: int, message: str) -> None:
        for read in (
            lambda: opened.source.read(sample),
            lambda: opened.source.read_into(sample, memoryview(bytearray(opened.sizes[sample]))),
        ):
            with pytest.raises(DataError) as caught:
                read()
            assert str(caught.value).startswith(str(opened.files[sample]))
            assert message in str(caught.value)
