"""Writes a folder of MDS shards by the format's few lines."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

#: Columns: picture, weight and label, in the order of their names.
NAMES, ENCODINGS, SIZES = ["image", "label", "weight"], ["bytes", "int", "float32"], [None, 8, 4]

#: What compresses shards, by what indexes call it.
PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
    "br": lambda content: bytes(pa.compress(content, codec="brotli", asbytes=True)),
    "gz": gzip.compress,
    "bz2": bz2.compress,
}


def write_mds(folder: Path, shards: Sequence[Sequence[tuple[bytes, int]]], **changes: Any) -> list[Path]:
    """Write shards of (sample, label). changes: of what the index says of each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    facts, files = [], []
    for number, samples in enumerate(shards):
        bodies = [
            struct.pack("<I", len(image)) + image + struct.pack("<qf", label, 0.5) for image, label in samples
        ]
        text, begin = b"a text", 4 * (len(samples) + 2) + 6
        begins = [begin + sum(map(len, bodies[:count])) for count in range(len(bodies) + 1)]
        files.append(folder / f"shard.{number:05}.mds")
        head = struct.pack(f"<{len(samples) + 2}I", len(samples), *begins)
        files[-1].write_bytes(head + text + b"".join(bodies))
        raw = {"basename": files[-1].name, "bytes": files[-1].stat().st_size, "hashes": {}}
        shard = {"column_names": NAMES, "column_encodings": ENCODINGS, "column_sizes": SIZES, "format": "mds"}
        shard |= {
            "compression": None,
            "raw_data": raw,
            "samples": len(samples),
            "version": 2,
            "zip_data": None,
        }
        facts.append(shard | changes)
    (folder / "index.json").write_text(json.dumps({"shards": facts, "version": 2}))
    return files


def pack_mds(folder: Path, shards: Sequence[Sequence[tuple[bytes, int]]], codec: str = "zstd") -> list[Path]:
    """Write MDS shards and compress them as MosaicML's Streaming does."""
    files = write_mds(folder, shards)
    index = json.loads((folder / "index.json").read_text())
    packed = []
    for file, shard in zip(files, index["shards"], strict=True):
        packed.append(file.with_name(f"{file.name}.{codec}"))
        packed[-1].write_bytes(PACK[codec](file.read_bytes()))
        shard["compression"] = f"{codec}:7"
        shard["zip_data"] = {"basename": packed[-1].name, "bytes": packed[-1].stat().st_size, "hashes": {}}
        file.unlink()
    (folder / "index.json").write_text(json.dumps(index))
    return packed
