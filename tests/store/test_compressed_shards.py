"""Compressed shards of rows: which are read, how often they are unpacked, and every way one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.for_each import for_each
from tests.store.litdata_files import write_litdata
from tests.store.mds_files import PACK, pack_mds
from tests.store.reads import contents

from penstock import Loader, open_source
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import DecodeRaw
from penstock.store import LitDataChunks, MosaicShards
from penstock.store.group import Bytes

GOLDEN = Path(__file__).parents[1] / "golden" / "packed"
SHARDS = [[(b"one", 3), (b"twofold", 1)], [(b"three", 2)], [(b"four" * 9, 0)]]


def pack_litdata(folder: Path, chunks: Sequence[Sequence[tuple[bytes, int]]]) -> list[Path]:
    """Write LitData's chunks and compress them as its optimize(..., compression="zstd:4") does."""
    files = write_litdata(folder, chunks)
    packed = [file.with_name(f"{file.stem}.zstd:4.bin") for file in files]
    for file, target in zip(files, packed, strict=True):
        target.write_bytes(PACK["zstd"](file.read_bytes()))
        file.unlink()
    change_index(folder, "config", compression="zstd:4")
    index = json.loads((folder / "index.json").read_text())
    for chunk, target in zip(index["chunks"], packed, strict=True):
        chunk["filename"] = target.name
    (folder / "index.json").write_text(json.dumps(index))
    return packed


def change_index(folder: Path, *at: str | int, **values: Any) -> None:
    """Change values of a part of an index."""
    index = part = json.loads((folder / "index.json").read_text())
    for key in at:
        part = part[key]
    part |= values
    (folder / "index.json").write_text(json.dumps(index))


@for_each("codec", list(PACK))
def test_compressed_shards_of_another_program_are_read(codec: str) -> None:
    """tests/golden/packed/mds-* were written by mosaicml-streaming 0.13.0 with compression="zstd:7", "br" and so on."""
    source = open_source(GOLDEN / f"mds-{codec}")

    assert isinstance(source, MosaicShards)
    assert len(source.files) > 1
    assert contents(source) == [bytes(range(i, i + 20)) * (1 + 3 * i) for i in range(5)]
    assert np.asarray(source.labels).tolist() == [0, 1, 2, 0, 1]


def test_compressed_chunks_of_another_program_are_read() -> None:
    """litdata 0.2.76 wrote tests/golden/packed/litdata-zstd: compression="zstd:4", compression_level="chunk"."""
    source = LitDataChunks(GOLDEN / "litdata-zstd", label="1")

    assert contents(source) == [b"pair" * number for number in range(1, 6)]
    assert np.asarray(source.labels).tolist() == [0, 1, 2, 3, 4]


def test_each_shard_is_unpacked_once_for_what_is_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_mds(tmp_path, [[(bytes([shard, row] * 8), 0) for row in range(10)] for shard in range(3)])
    source = MosaicShards(tmp_path)
    unpacked = list[int]()
    decode = source._decode

    def counted(unit: int, descriptor: int) -> Bytes:
        unpacked.append(unit)
        return decode(unit, descriptor)

    monkeypatch.setattr(source, "_decode", counted)

    with Loader(
        source, batch_size=30, epochs=2, transforms=[DecodeRaw("uint8", (16,))], dtype="uint8", report=None
    ) as loader:
        for images, _ in [batch for _ in range(2) for batch in loader]:
            assert sorted(map(bytes, images)) == sorted(
                bytes([s, r] * 8) for s in range(3) for r in range(10)
            )

    assert sorted(unpacked) == [0, 1, 2]


def test_shards_that_were_unpacked_are_read_as_they_are(tmp_path: Path) -> None:
    packed = pack_mds(tmp_path, SHARDS)
    for file in packed[:2]:
        file.with_suffix("").write_bytes(pa.input_stream(file, compression="zstd").read())
    expected = [content for shard in SHARDS for content, _ in shard]

    some = MosaicShards(tmp_path)
    assert [Path(file).suffix for file in some.files] == [".mds", ".mds", ".zstd"]
    assert contents(some) == expected

    packed[2].with_suffix("").write_bytes(pa.input_stream(packed[2], compression="zstd").read())
    all_of_them = MosaicShards(tmp_path)
    assert all_of_them.decoded_units is None
    assert contents(all_of_them) == expected


@for_each("codec", list(PACK))
def test_a_compressed_shard_that_is_cut_off_anywhere_is_an_error(tmp_path: Path, codec: str) -> None:
    first, *_ = pack_mds(tmp_path, SHARDS, codec)
    content = first.read_bytes()

    for size in [0, *range(1, len(content), 5), len(content) - 1]:
        first.write_bytes(content[:size])
        with pytest.raises(DataError, match=f"{first} is (cut off|damaged)"):
            MosaicShards(tmp_path)
    first.write_bytes(b"\0" + content)
    with pytest.raises(DataError, match=f"{first} is cut off, damaged or not compressed by {codec}"):
        MosaicShards(tmp_path)


def test_a_shard_that_unpacks_to_more_than_its_index_says_is_not_unpacked_further(tmp_path: Path) -> None:
    first, *_ = pack_mds(tmp_path, SHARDS)
    first.write_bytes(PACK["zstd"](bytes(1 << 30)))

    with pytest.raises(
        DataError, match=r"is damaged: unpacked it has more than [\d,]+ bytes, and its index says"
    ):
        MosaicShards(tmp_path)


@for_each(
    ("values", "message"),
    [
        (
            {"compression": "snappy"},
            r"shard\.00000\.mds\.zstd is compressed \(snappy\): .* by zstd, br, gz, bz2",
        ),
        ({"compression": "gz"}, r"is no index of MDS shards"),
        ({"zip_data": {"basename": "../shard.00000.mds.zstd"}}, "which is not next to it"),
        ({"raw_data": {"basename": "shard.00000.mds"}}, "is no index of MDS shards"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": -1}}, "is no index of MDS shards"),
        ({"samples": 5}, r"it has 2 samples, and index\.json says 5"),
    ],
)
def test_an_index_of_compressed_shards_that_is_wrong_is_an_error(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    pack_mds(tmp_path, SHARDS)
    change_index(tmp_path, "shards", 0, **values)

    with pytest.raises(DataError, match=message):
        MosaicShards(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compression": "lz4"}, r"is compressed \(lz4\)"),
        ({"compression": "gz"}, "is no index of LitData chunks"),
        ({"compression_level": "batch"}, r"is compressed within its chunks .* compression_level=\"chunk\""),
    ],
)
def test_chunks_that_are_compressed_otherwise_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    pack_litdata(tmp_path, SHARDS)
    change_index(tmp_path, "config", **values)

    with pytest.raises(DataError, match=message):
        LitDataChunks(tmp_path)


def test_a_shard_larger_than_memory_is_refused(tmp_path: Path) -> None:
    pack_mds(tmp_path, [[(bytes(50_000), 0)]])

    with pytest.raises(ConfigError, match=r"all samples of .*mds\.zstd has 50 kB .* more memory="):
        MosaicShards(tmp_path, memory="20 KiB")


def test_a_shard_that_was_replaced_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    _, second, third = pack_mds(tmp_path, SHARDS)
    source = MosaicShards(tmp_path)
    assert source.read(0) == b"one"

    shutil.copy(third, second)
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.zstd .* open"):
        source.read(2)
