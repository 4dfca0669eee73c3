"""Writes a folder of MDS shards by the format's few lines."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Columns: picture, weight and label, in the order of their names.
NAMES, ENCODINGS, SIZES = ["image", "label", "weight"], ["bytes", "int", "float32"], [None, 8, 4]


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
