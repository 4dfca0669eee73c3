"""Chunks as LitData writes them, for tests: of pairs of bytes and an integer."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path


def write_litdata(folder: Path, chunks: Sequence[Sequence[tuple[bytes, int]]]) -> list[Path]:
    """Write chunks and their index; return the chunks' files."""
    folder.mkdir(parents=True, exist_ok=True)
    files, described = [], []
    for number, pairs in enumerate(chunks):
        items = [
            struct.pack("<II", len(content), 8) + content + struct.pack("<q", label)
            for content, label in pairs
        ]
        ends = [4 * (len(items) + 2)]
        for item in items:
            ends.append(ends[-1] + len(item))
        files.append(folder / f"chunk-0-{number}.bin")
        files[-1].write_bytes(struct.pack(f"<{len(ends) + 1}I", len(items), *ends) + b"".join(items))
        described.append({"filename": files[-1].name, "chunk_size": len(items), "chunk_bytes": ends[-1]})
    leaf: dict[str, object] = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": '["image", "label"]', "children_spec": [leaf, leaf]}
    config = {
        "compression": None,
        "encryption": None,
        "data_format": ["bytes", "int"],
        "data_spec": json.dumps([1, tree]),
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": described, "config": config}))
    return files
