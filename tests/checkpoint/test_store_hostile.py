"""Files made by a stranger, their checksums right: a state or a FormatError, soon, in little memory; nothing else."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.snapshot_files import (
    EQUAL,
    OTHER_UID,
    STORED,
    UID,
    Block,
    MadeTensor,
    made_part,
    made_snapshot,
    opened,
    replica,
    reseal,
    said_by,
    same,
    save_all,
    sealed,
    tensor,
    training,
)
from tests.interpreters import Interpreters

from penstock.checkpoint.state.tensors import BLOCK_VALUES
from penstock.errors import DataError, FormatError

ONE = np.arange(5, dtype=np.int32)
#: What a restore may take beside what is there when it begins.
SPACE_BYTES = 300 << 20
WHOLE = bytes(BLOCK_VALUES)


# -- Snapshots by hand -----------------------------------------------------------------------------------------


def lying(**lies: Any) -> Callable[[Path], object]:
    return lambda folder: made_snapshot(folder, [tensor("one", ONE)], **lies)


def rows(*written: Any) -> Callable[[Path], object]:
    """Return what makes a snapshot of one block whose manifest has other tensors."""
    return lying(tensors=[list(row) for row in written])


def tree(node: Any) -> Callable[[Path], object]:
    return lying(tree=node)


def view(dtype: str, shape: Any, strides: Any, offset: int, kind: str = "numpy") -> Callable[[Path], object]:
    seen = {"dtype": dtype, "shape": shape, "strides": strides, "offset": offset}
    return tree({"map": {"one": {"array": {"of": "one", "kind": kind, "view": seen}}}})


def differing(*references: int) -> Callable[[Path], object]:
    """Return what makes steps 1, 2, ... that are as the step of their reference; 0: none."""

    def make(folder: Path) -> None:
        for step, reference in enumerate(references, 1):
            row = MadeTensor(
                "one",
                "int32",
                [5],
                [Block(ONE.tobytes(), EQUAL if reference else STORED, b"" if reference else None)],
            )
            made_snapshot(
                folder,
                [row],
                step=step,
                uid=f"{step:032x}",
                reference=(reference, f"{reference:032x}") if reference else None,
            )

    return make


def blocks(name: str, dtype: str, *made: Block) -> Callable[[Path], object]:
    item = np.dtype(dtype).itemsize
    return lambda folder: made_snapshot(folder, [MadeTensor(name, dtype, [len(made[0].raw) // item], made)])


def bomb(kind: int, payload: bytes | Callable[[], bytes]) -> Callable[[Path], object]:
    raw = bytes(16 * BLOCK_VALUES)
    return lambda folder: made_snapshot(
        folder,
        [
            MadeTensor(
                "one",
                "complex128",
                [BLOCK_VALUES],
                [Block(raw, kind, payload if isinstance(payload, bytes) else payload())],
            )
        ],
    )


BOMB_PIECES = 512


def squeezed_zeros() -> bytes:
    """Return 512 MiB of zeros as one deflate stream: every MiB, which needs none before it, is the same bytes."""
    squeeze = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    piece = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    return piece * BOMB_PIECES + squeeze.flush()


def gzip_bomb() -> bytes:
    checksum = 0
    for _ in range(BOMB_PIECES):
        checksum = zlib.crc32(bytes(1 << 20), checksum)
    head = gzip.compress(b"", 9, mtime=0)[:10]
    return head + squeezed_zeros() + struct.pack("<II", checksum, BOMB_PIECES << 20)


def zlib_bomb() -> bytes:
    sum_of_sums = (BOMB_PIECES << 20) % 65521  # Adler-32, whose first sum stays 1
    return zlib.compress(b"", 9)[:2] + squeezed_zeros() + struct.pack(">HH", sum_of_sums, 1)


@pytest.mark.slow
def test_the_bombs_are_what_they_are_taken_for() -> None:
    """As any reader has them: whole, their checksums right."""
    with gzip.GzipFile(fileobj=io.BytesIO(gzip_bomb())) as file:
        assert sum(len(piece) for piece in iter(lambda: file.read(1 << 20), b"")) == BOMB_PIECES << 20
    reader = zlib.decompressobj()
    assert sum(len(reader.decompress(piece)) for piece in pieces(zlib_bomb())) == BOMB_PIECES << 20
    assert reader.eof


def pieces(data: bytes) -> list[bytes]:
    return [data[start : start + 10_000] for start in range(0, len(data), 10_000)]


def points(count: int, dimensions: int = 40) -> Callable[[Path], object]:
    """Return what makes a tensor of many parts of one number each, which are not all of it."""
    whole = [2] * dimensions
    made = [
        MadeTensor(
            "w", "int8", [1] * dimensions, [Block(b"a")], [whole, [i >> bit & 1 for bit in range(dimensions)]]
        )
        for i in range(count)
    ]
    return lambda folder: made_snapshot(folder, made, tree=None)


def a_pipe(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        file = made_snapshot(folder, [tensor("one", ONE)]) / name
        file.unlink()
        os.mkfifo(file)

    return make


def a_link(name: str, to: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        file = made_snapshot(folder, [tensor("one", ONE)]) / name
        file.unlink()
        file.symlink_to(to)

    return make


def a_manifest(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (made_snapshot(folder, [tensor("one", ONE)]) / "manifest.json").write_bytes(data)


def deep(levels: int, tag: str = "tuple") -> Any:
    """Return a nested node as text: json.dumps would go that deep itself."""
    node = b'{"%s":[' % tag.encode() * levels + b"]}" * levels
    line = json.dumps(said_of_one()).encode().replace(b'"TREE"', node)
    return sealed(line)


def said_of_one() -> dict[str, Any]:
    part = made_part([Block(ONE.tobytes())])
    return {
        "format": "penstock snapshot",
        "version": 1,
        "step": 1,
        "uid": UID,
        "created_seconds": 1.0,
        "since_bytes": [],
        "codec": "rle4",
        "reference": None,
        "kept_mantissa_bits": None,
        "parts": [["part-00000.pst", len(part.data), part.table]],
        "tensors": [["one", "int32", [5], None, 0, 0]],
        "tree": "TREE",
        "rank_trees": [None],
    }


def a_sparse_part(folder: Path) -> None:
    """A file of 64 GB with nothing in it but a footer that says it is all table."""
    made = made_snapshot(folder, [tensor("one", ONE)])
    blocks = 1_600_000_000
    nbytes = 32 + 56 + 40 * blocks
    said = struct.pack("<QQ", 32, blocks) + bytes(16)
    import xxhash

    with open(made / "part-00000.pst", "r+b") as file:
        file.truncate(nbytes - 56)
        file.seek(nbytes - 56)
        file.write(said + xxhash.xxh3_64_digest(said) + b"PENSTEND" + bytes(8))
    reseal(made / "manifest.json", lambda told: told["parts"][0].__setitem__(1, nbytes))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a shape beyond memory": rows(["one", "int32", [2**40], None, 0, 0]),
    "a shape of the last number": rows(["one", "int32", [2**63 - 1], None, 0, 0]),
    "a shape whose product wraps": rows(["one", "int32", [2**32, 2**32], None, 0, 0]),
    "a shape that is empty only at its end": rows(["one", "int32", [2**62, 2**62, 0], None, 0, 0]),
    "a negative shape": rows(["one", "int32", [-5], None, 0, 0]),
    "a shape of 10,000 dimensions": rows(["one", "int32", [1] * 10_000, None, 0, 0]),
    "a block of another tensor": rows(["one", "int32", [5], None, 0, 0], ["two", "int32", [5], None, 0, 0]),
    "a block behind the last": rows(["one", "int32", [5], None, 0, 2**62]),
    "a part that is not there": rows(["one", "int32", [5], None, 7, 0]),
    "a part of a path": lying(parts=[["../../../etc/passwd", 148, UID]]),
    "a part of an absolute path": lying(parts=[["/etc/passwd", 148, UID]]),
    "a part with a NUL": lying(parts=[["part-00000.pst\0", 148, UID]]),
    "a part that is not there either": lying(parts=[["part-00001.pst", 148, UID]]),
    "ten thousand parts": lying(parts=[[f"part-{i:06d}.pst", 88, UID] for i in range(10_000)], tensors=[]),
    "a number of a million digits": a_manifest(sealed(b'{"step":' + b"9" * 1_000_000 + b"}")),
    "a number beyond floats": lying(created_seconds=10**400),
    "a difference to itself": differing(1),
    "two that are differences to each other": differing(2, 1),
    "a ring of three": differing(2, 3, 1),
    "a difference to nothing": differing(9),
    "a repeat of itself": blocks("one", "int32", replica(0, ONE.tobytes())),
    "a repeat of what follows": blocks("one", "int8", replica(1, WHOLE), Block(WHOLE)),
    "a row of repeats": lambda folder: made_snapshot(
        folder,
        [
            MadeTensor(
                "one",
                "int8",
                [BLOCK_VALUES * 2001],
                [Block(WHOLE), *(replica(i, WHOLE) for i in range(2000))],
            )
        ],
    ),
    "a gzip bomb": bomb(34, gzip_bomb),
    "a zlib bomb": bomb(34, zlib_bomb),
    "a gzip bomb of a difference": bomb(36, gzip_bomb),
    "a Huffman tree of nothing": bomb(32, bytes(1000)),
    "the last numbers as a Huffman tree": bomb(32, b"\xff" * 1000),
    "the last numbers as our own": bomb(16, b"\xff" * 1000),
    "a table as large as a disk": a_sparse_part,
    "a pipe for a manifest": a_pipe("manifest.json"),
    "a pipe for a part": a_pipe("part-00000.pst"),
    "a manifest without an end": a_link("manifest.json", "/dev/zero"),
    "a part without an end": a_link("part-00000.pst", "/dev/zero"),
    "a part that leads to itself": a_link("part-00000.pst", "part-00000.pst"),
    "a part that leads out": a_link("part-00000.pst", "/etc/passwd"),
    "a manifest that leads out": a_link("manifest.json", "/etc/passwd"),
    "a tree of 100,000 levels": a_manifest(deep(100_000)),
    "a tree of 900 levels": a_manifest(deep(900)),
    "a list of 100,000 levels": a_manifest(b"[" * 100_000 + b"]" * 100_000),
    "a view of a terabyte": view("int32", [2**38], [4], 0),
    "a view that runs back": view("int32", [5], [-4], 0),
    "a view that begins before": view("int32", [1], [4], -4),
    "a view whose end wraps": view("int32", [3], [2**62], 0),
    "a terabyte of bytes": tree({"map": {"one": {"array": {"of": "one", "kind": "bytes"}}}}),
    "a tensor that is not there": tree({"map": {"one": {"array": {"of": "../one", "kind": "numpy"}}}}),
    "a type that is code": tree({"dtype": "os.system"}),
    "a tag that is none": tree({"pickle": "gASVAAAAAA=="}),
    "parts that are points": points(1000),
    "parts of one dimension too few": lying(tensors=[["one", "int32", [5], [[5, 5], [0, 0]], 0, 0]]),
}

#: Restores every store that it is told of, in little memory, and tells what happened.
RESTORE = """
import json, resource, sys, time
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import PenstockError
import penstock.checkpoint.codecs

def restore(folder):
    store = SnapshotStore(folder, codec="rle4", threads=1, report=None)
    return store.restore(), store.verify()

restore(sys.argv[1])
penstock.checkpoint.codecs.codec_named("balance")
with open("/proc/self/statm") as file:
    now_bytes = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now_bytes + int(sys.argv[2]), -1))
for line in sys.stdin:
    begin = time.process_time()
    try:
        restore(line.rstrip("\\n"))
        told = ["restored", ""]
    except BaseException as error:
        told = [type(error).__name__, str(error)[:300]]
    print(json.dumps([*told, time.process_time() - begin]), flush=True)
"""


def restored_in_little_memory(
    interpreters: Interpreters, good: Path, folders: Sequence[Path]
) -> list[list[Any]]:
    """Return for each store the error that its restore ended with, what that said, and the CPU seconds."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with interpreters.start(RESTORE, str(good), str(SPACE_BYTES), text=True, **pipes) as process:
        told, errors = process.communicate("".join(f"{folder}\n" for folder in folders))
    lines = [json.loads(line) for line in told.splitlines()]
    assert len(lines) == len(folders), f"{folders[len(lines)]}: {errors[-2000:]}"
    return lines


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, interpreters: Interpreters) -> dict[str, list[Any]]:
    """Return for each hostile store the error that its restore ended with, what that said, and the CPU seconds."""
    top = tmp_path_factory.mktemp("hostile")
    save_all(top / "good", [1, 2])
    for number, make in enumerate(HOSTILE.values()):
        make(top / str(number))
    folders = [top / str(number) for number in range(len(HOSTILE))]
    lines = restored_in_little_memory(interpreters, top / "good", folders)
    return dict(zip(HOSTILE, lines, strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_store_is_refused_soon_and_in_little_memory(name: str, told: dict[str, list[Any]]) -> None:
    kind, message, cpu_seconds = told[name]

    is_no_file = name.startswith(
        ("a pipe", "a manifest without", "a part without", "a part that leads to itself")
    )
    assert kind in ("DataError" if is_no_file else "FormatError", "TornError"), message
    assert cpu_seconds < 10


def test_a_step_that_is_as_a_later_one_is_read_where_that_ends(folder: Path) -> None:
    """Odd, and sound: what matters is that the way ends."""
    differing(2, 0)(folder)

    assert same(opened(folder).restore(1).state, {"one": ONE})


def test_an_empty_tensor_of_any_length_takes_no_memory(folder: Path) -> None:
    made_snapshot(folder, [MadeTensor("one", "int32", [2**40, 0], [])])

    assert opened(folder).restore()["one"].shape == (2**40, 0)


def test_a_number_seen_a_million_million_times_takes_no_memory(folder: Path) -> None:
    view("int32", [2**20, 2**20], [0, 0], 4)(folder)

    array = opened(folder).restore()["one"]

    assert (array.shape, array.strides) == ((2**20, 2**20), (0, 0))


def test_a_store_lists_what_is_hostile_beside_what_is_whole(folder: Path) -> None:
    differing(0)(folder)
    for step, name in (
        (3, "a shape beyond memory"),
        (4, "a pipe for a manifest"),
        (5, "a tree of 900 levels"),
    ):
        HOSTILE[name](folder.parent / "made")
        (folder.parent / "made" / "step-000000000001").rename(folder / f"step-{step:012d}")

    listed = {one.step: one.condition for one in opened(folder).list()}

    assert listed.pop(1) == "intact"
    assert set(listed.values()) == {"damaged"}
    assert opened(folder).restore(5, fallback=True).step == 1


# -- Anything at all -------------------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, 0.5]),
    st.sampled_from(
        ["", "weight", "moment", "part-00000.pst", UID, "float32", "bfloat16", "complex128", "torch", "bytes"]
    ),
    st.text(max_size=3),
)
NODES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["map", "items", "tuple", "array", "of", "kind", "view", "scalar", "bytes", "int", "x"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values within one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_snapshot_whose_manifest_was_changed_anywhere_is_restored_or_refused(
    folder: Path, data: st.DataObject
) -> None:
    if not folder.exists():
        save_all(folder, [1, 2])
        (folder / "whole").write_bytes((folder / "step-000000000002" / "manifest.json").read_bytes())
    manifest = folder / "step-000000000002" / "manifest.json"
    said = said_by(folder / "whole")
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from([place for place in places(said) if place]))
        parent: Any = said
        for key in above:
            parent = parent[key]
        parent[last] = data.draw(NODES)
    manifest.write_bytes(sealed(said))
    store = opened(folder)

    with suppress(FormatError):
        store.restore(2, framework=data.draw(st.sampled_from([None, "numpy"])))
    with suppress(FormatError):
        store.restore(2, only=["*"])
    (listed,) = store.verify(2)
    assert listed.condition in ("intact", "damaged", "newer", "torn")
    assert same(store.restore(1).state, training(1))


BLOCKS = st.builds(
    Block,
    raw=st.sampled_from([ONE.tobytes(), (ONE + 1).tobytes(), b"", b"12345678", bytes(40)]),
    kind=st.sampled_from([0, 1, 2, 3, 16, 17, 32, 33, 34, 35, 36, 255]),
    payload=st.one_of(
        st.none(),
        st.binary(max_size=60),
        st.integers(0, 4).map(lambda of: struct.pack("<Q", of)),
        st.just(gzip.compress(ONE.tobytes(), mtime=0)),
    ),
    lies=st.dictionaries(
        st.sampled_from(["offset", "checksum", "raw_checksum", "stored", "raw", "kind"]),
        st.sampled_from([0, 1, 8, 20, 32, 52, 255]),
        max_size=1,
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(BLOCKS, min_size=1, max_size=4),
    footer=st.dictionaries(
        st.sampled_from(["offset", "blocks"]), st.integers(0, 200) | st.just(2**64 - 1), max_size=1
    ),
)
def test_a_part_of_any_blocks_is_restored_or_refused(
    folder: Path, made: list[Block], footer: dict[str, int]
) -> None:
    for old in folder.glob("step-*/*"):
        old.unlink()
    for old in folder.glob("step-*"):
        old.rmdir()
    made_snapshot(folder, [tensor(f"t{number}", ONE) for number in range(len(made))], step=1)
    rows = [MadeTensor(f"t{number}", "int32", [5], [block]) for number, block in enumerate(made)]
    part = made_part(made, uid=OTHER_UID, footer=footer)
    made_snapshot(folder, rows, step=2, uid=OTHER_UID, reference=(1, UID), part=part)
    store = opened(folder)

    try:
        restored = store.restore(2)
    except (FormatError, DataError):
        return
    # Whatever came back has the checksum that its maker gave it.
    for number, block in enumerate(made):
        if not block.lies:
            assert restored[f"t{number}"].tobytes() == block.raw


def test_a_spread_tensor_of_many_columns_is_put_together_soon(folder: Path) -> None:
    """Sound, and once took the square of their number: half a minute for 3,000."""
    count = 3_000
    columns = [MadeTensor("w", "int8", [2, 1], [Block(b"ab")], [[2, count], [0, i]]) for i in range(count)]
    made_snapshot(folder, columns)

    begin = time.process_time()
    restored = opened(folder).restore()["w"]

    assert restored.tobytes() == b"a" * count + b"b" * count
    assert time.process_time() - begin < 20


def test_the_limit_of_memory_is_one(tmp_path: Path, interpreters: Interpreters) -> None:
    """Else the tests above would prove nothing: a tensor of 655 MB that takes 328 kB, as one of zeros may."""
    save_all(tmp_path / "good", [1])
    bomb = [Block(WHOLE), *(replica(0, WHOLE) for _ in range(5000))]
    made_snapshot(tmp_path / "large", [MadeTensor("one", "int8", [BLOCK_VALUES * 5001], bomb)])

    ((kind, _, _),) = restored_in_little_memory(interpreters, tmp_path / "good", [tmp_path / "large"])

    assert "MemoryError" in kind
