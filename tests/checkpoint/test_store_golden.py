"""Stores as they were written once are read for ever: a change that makes one of these fail is a new version.

They are in tests/golden/snapshots-v1, made by the script beside it. What they hold is written here as bits and digests.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.snapshot_files import files_of, opened, said_by

from penstock.errors import FormatError

FOLDER = Path(__file__).parents[1] / "golden" / "snapshots-v1"
#: The stores, and to which step each of their three snapshots is a difference.
STORES: dict[str, list[int | None]] = {
    "stored-complete": [None, None, None],
    "gzip-complete": [None, None, None],
    "gzip-delta-progressive": [None, 0, 1],
    "rle4-progressive": [None, 0, 1],
    "rle4-gzip-chain": [None, 0, 0],
    "dynrle-progressive": [None, 0, 1],
    "dynrle-chain": [None, 0, 0],
    "speed-progressive": [None, 0, 1],
    "balance-progressive": [None, 0, 1],
    "balance-chain": [None, 0, 0],
}
#: Of step 0: NaN with a payload, signalling NaN, -0.0, the least denormal, -inf, inf, the largest, 1; where a type
#: has no infinities its largest and least, the least normal and 1. One further in step 1, and so on.
ODD = {
    "float64": "7ff8deadbeef0001 7ff0000000000001 8000000000000000 0000000000000001 "
    "fff0000000000000 7ff0000000000000 7fefffffffffffff 3ff0000000000000",
    "float32": "7fc0beef 7f800001 80000000 00000001 ff800000 7f800000 7f7fffff 3f800000",
    "float16": "7ead 7c01 8000 0001 fc00 7c00 7bff 3c00",
    "bfloat16": "7fea 7f81 8000 0001 ff80 7f80 7f7f 3f80",
    "float8_e4m3fn": "7f ff 80 01 7e fe 08 38",
    "float8_e5m2": "7f 7d 80 01 fc 7c 7b 3c",
}
#: By step, SHA-256 of 4,096 float32 weights that drift, of the same as bfloat16, and the first four weights' bytes.
WEIGHTS = {
    0: (
        "5a8585886a4cfc5d9fad83b92c3cbd60f8e86e43ae146bda0cafb7c698ed3e83",
        "2cb8b9b120c00ae18569ff88bc595bc73692115d93601e9ef05206dfe32eaaf3",
        "bd74e23c3908c7bb22d3033d8636ef3c",
    ),
    1: (
        "468f6d9bc21b6e36fded2da1d87bffeaf3cd84c826f153ed0b5bbe51a4ed4912",
        "27e67ba51a0c7015997378d0cccfc0442b023a573b555d3a34d498c16dd62aac",
        "f882e23c78f7c6bb1bc2033daf5aef3c",
    ),
    2: (
        "111342fbee730460ceafd1f98124f866f3db1d7e533ff083afbe141f2d0c9322",
        "49a105a8ab74f1af0b078ba923fe49ef613d7ad75a1976ba550fc7a250394f4e",
        "4c9de23c96ebc6bbe7cc033df762ef3c",
    ),
}


@pytest.fixture(params=STORES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copied(folder: Path, name: str) -> Path:
    """Return a copy of a golden store, for a store writes a lock."""
    shutil.copytree(FOLDER / name, folder)
    return folder


def bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(torch.uint8).numpy().tobytes()
    return bytes(np.ascontiguousarray(value).tobytes())


def test_a_store_of_version_1_is_read_bit_for_bit_and_gone_on_with(copied: Path, name: str) -> None:
    store = opened(copied)
    for listed in (store.list(), store.verify()):
        assert [(one.step, one.condition) for one in listed] == [(0, "intact"), (1, "intact"), (2, "intact")]
        assert [one.reference_step for one in listed] == STORES[name]
        assert {one.codec for one in listed} == {name.rpartition("-")[0]}
    for step in range(3):
        said = said_by(copied / f"step-{step:012d}" / "manifest.json")
        assert (said["format"], said["version"], said["step"]) == ("penstock snapshot", 1, step)
        check_state(store.restore(step).state, step)

    codec, _, scheme = name.rpartition("-")
    with opened(copied, codec=codec, scheme=scheme, snap_dis=9) as store:
        state = store.restore(2).state
        saved = store.save(3, state).wait()

        assert saved.reference_step == {"progressive": 2, "chain": 0, "complete": None}[scheme]
        assert bytes_of(store.restore(3)["odd"]["float32"]) == bytes_of(state["odd"]["float32"])


def check_state(state: Any, step: int) -> None:
    for dtype, words in ODD.items():
        expected = words.split()
        expected = expected[step:] + expected[:step]
        found = state["odd"][dtype]
        assert found.dtype == getattr(torch, dtype)
        assert bytes_of(found) == b"".join(bytes.fromhex(word)[::-1] for word in expected), dtype
    weight, half, first = WEIGHTS[step]
    assert state["model"]["weight"].dtype == np.float32
    assert bytes_of(state["model"]["weight"])[:16].hex() == first
    assert hashlib.sha256(bytes_of(state["model"]["weight"])).hexdigest() == weight
    assert hashlib.sha256(bytes_of(state["twin"])).hexdigest() == weight
    assert state["model"]["half"].dtype == torch.bfloat16
    assert hashlib.sha256(bytes_of(state["model"]["half"])).hexdigest() == half
    assert state["model"]["table"].tolist() == list(range(600))
    assert state["flags"].tolist() == [number % 3 == 0 for number in range(70)]
    assert bytes_of(state["complex"]).hex() == "000000800000807f"
    assert (state["empty"].shape, state["empty"].dtype) == ((0, 3), np.float16)
    assert (state["scalar"].shape, state["scalar"].item()) == ((), step)
    plain = state["plain"]
    assert math.isnan(plain.pop("nan"))
    assert plain == {"step": step, "name": "ä/~\u2028", "huge": 2**70, "items": (1, [None, True])}


def test_a_flipped_bit_of_it_is_found(copied: Path) -> None:
    random = np.random.default_rng(0)
    for file in files_of(copied):
        whole = file.read_bytes()
        for place in random.integers(0, len(whole), 3):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
            with pytest.raises(FormatError, match=file.name):
                opened(copied).restore(int(file.parent.name[5:]))
        file.write_bytes(whole)


def test_every_golden_store_is_read() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(STORES)
