"""Make tests/golden/snapshots-v1: small stores as they are written today, which must be readable for ever.

    .venv/bin/python tests/golden/make_snapshots.py [CODEC-SCHEME ...]

Makes those that are not there; what is there stays as it is, for that is what it is for. Their tensors are written
as bits in tests/checkpoint/test_store_golden.py, which knows nothing of how they were made.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.store import SnapshotStore
from penstock.policy.delta_schemes import Scheme

FOLDER = Path(__file__).with_name("snapshots-v1")
#: Codec and scheme of each store.
STORES: dict[str, tuple[str, Scheme]] = {
    "stored-complete": ("stored", "complete"),
    "gzip-complete": ("gzip", "complete"),
    "gzip-delta-progressive": ("gzip-delta", "progressive"),
    "rle4-progressive": ("rle4", "progressive"),
    "rle4-gzip-chain": ("rle4-gzip", "chain"),
    "dynrle-progressive": ("dynrle", "progressive"),
    "dynrle-chain": ("dynrle", "chain"),
    "speed-progressive": ("speed", "progressive"),
    "balance-progressive": ("balance", "progressive"),
    "balance-chain": ("balance", "chain"),
}


def state(step: int) -> dict[str, Any]:
    """Return a state of every float's odd values, and a training's weights, which codecs do their work on."""
    import torch

    def bits(dtype: str, word: str, *values: int) -> torch.Tensor:
        turned = values[step:] + values[:step]
        return torch.from_numpy(np.array(turned, word).view(np.uint8)).view(getattr(torch, dtype))

    odd = {
        # NaN with a payload, signalling NaN, -0.0, the least denormal, -inf, inf, the largest, 1.
        "float64": bits(
            "float64",
            "<u8",
            0x7FF8DEADBEEF0001,
            0x7FF0000000000001,
            0x8000000000000000,
            0x0000000000000001,
            0xFFF0000000000000,
            0x7FF0000000000000,
            0x7FEFFFFFFFFFFFFF,
            0x3FF0000000000000,
        ),
        "float32": bits(
            "float32",
            "<u4",
            0x7FC0BEEF,
            0x7F800001,
            0x80000000,
            0x00000001,
            0xFF800000,
            0x7F800000,
            0x7F7FFFFF,
            0x3F800000,
        ),
        "float16": bits("float16", "<u2", 0x7EAD, 0x7C01, 0x8000, 0x0001, 0xFC00, 0x7C00, 0x7BFF, 0x3C00),
        "bfloat16": bits("bfloat16", "<u2", 0x7FEA, 0x7F81, 0x8000, 0x0001, 0xFF80, 0x7F80, 0x7F7F, 0x3F80),
        "float8_e4m3fn": bits("float8_e4m3fn", "u1", 0x7F, 0xFF, 0x80, 0x01, 0x7E, 0xFE, 0x08, 0x38),
        "float8_e5m2": bits("float8_e5m2", "u1", 0x7F, 0x7D, 0x80, 0x01, 0xFC, 0x7C, 0x7B, 0x3C),
    }
    random = np.random.default_rng(20_261_120)
    weight = random.normal(0, 0.02, 4_096).astype(np.float32)
    for _ in range(step):
        weight += random.normal(0, 1e-5, 4_096).astype(np.float32)
    half = torch.from_numpy(weight).to(torch.bfloat16)
    return {
        "odd": odd,
        "model": {"weight": weight, "half": half, "table": np.arange(600, dtype=np.int64)},
        "twin": weight.copy(),
        "flags": np.arange(70) % 3 == 0,
        "complex": np.array([complex(-0.0, float("inf"))], np.complex64),
        "empty": np.zeros((0, 3), np.float16),
        "scalar": np.array(step, np.uint8),
        "plain": {
            "step": step,
            "name": "ä/~\u2028",
            "nan": float("nan"),
            "huge": 2**70,
            "items": (1, [None, True]),
        },
    }


def main() -> None:
    """Make the stores that are not there."""
    for name in sys.argv[1:] or STORES:
        codec, scheme = STORES[name]
        folder = FOLDER / name
        if folder.exists():
            continue
        with SnapshotStore(folder, codec=codec, scheme=scheme, snap_dis=3, report=None) as store:
            for step in range(3):
                store.save(step, state(step)).wait()
        (folder / ".lock").unlink()
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*.*')):,} bytes")


if __name__ == "__main__":
    main()
