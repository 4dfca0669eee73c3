"""Feed the store's readers files that a fuzzer made, their checksums right: a state or a FormatError, and nothing else.

    python tests/checkpoint/fuzz_snapshots.py --seconds 600          our own loop, guided by lines that were reached
    python tests/checkpoint/fuzz_snapshots.py --atheris CORPUS -- -max_total_time=600
                                                                     libFuzzer, where the package atheris is installed
    python tests/checkpoint/fuzz_snapshots.py --again HEX            one input, as a failure printed it

An input is a recipe of edits to a small store of a baseline and a difference, or the text of a manifest. After the
edits every checksum is made right again, so that what lies behind them is reached. A failure is any exception but
FormatError and DataError, more than `MOST_SECONDS` of CPU time, or memory beyond `MOST_BYTES`; its input is printed,
and the exit status is 1. test_fuzz_snapshots.py runs some seconds of it with the slow tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.checkpoint.snapshot_files import OTHER_UID, UID, Block, made_part, sealed

from penstock.checkpoint.codecs.codec import Pair
from penstock.checkpoint.codecs.paper import CODECS
from penstock.checkpoint.files import catalog, manifest, parts, reading
from penstock.checkpoint.files.catalog import Catalog, open_links
from penstock.checkpoint.files.reading import parts_by_name, tree_of
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state import sharding, tree
from penstock.checkpoint.state import unflatten as loading
from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.state.unflatten import plan_loading
from penstock.checkpoint.tiers.tier import MANIFEST, Draft
from penstock.errors import DataError, FormatError

MOST_SECONDS = 10.0
MOST_BYTES = 4 << 30
PART = "part-00000.pst"


# -- A store in memory -----------------------------------------------------------------------------------------


class MemoryTier:
    """Snapshots as a mapping of folders of files; read only."""

    name = "memory"

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self._files = files

    def where(self, folder: str) -> str:
        return f"{self.name}/{folder}"

    def folders(self) -> list[str]:
        return sorted(self._files)

    def read(self, folder: str, file: str) -> bytes:
        try:
            return self._files[folder][file]
        except KeyError:
            raise FileNotFoundError(2, "no such file", f"{folder}/{file}") from None

    def open(self, folder: str, file: str) -> MemoryReader:
        return MemoryReader(self.read(folder, file))

    def begin(self, folder: str, uid: str, *, join: bool = False) -> Draft:
        raise DataError("read only")

    def delete(self, folder: str) -> None:
        raise DataError("read only")

    def free_bytes(self) -> int | None:
        return None

    def sweep(self) -> list[str]:
        return []


class MemoryReader:
    """A file in memory."""

    reads_at_once = 1

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def read_into(self, offset: int, out: Bytes) -> None:
        if offset + out.size > self.nbytes:
            raise DataError("the file ends before what was to be read")
        out[:] = np.frombuffer(self._data, np.uint8, out.size, offset)

    def close(self) -> None: ...


def restore(files: dict[str, dict[str, bytes]]) -> int:
    """Restore every step of a store, and return of how many that was refused."""
    refused = 0
    seen = Catalog([MemoryTier(files)])
    seen.look()
    for step in seen.steps():
        try:
            with closing(open_links(seen, seen.chains(step)[0])) as chain:
                by_name = parts_by_name(chain.manifest)
                plan = plan_loading(tree_of(chain.manifest, by_name), framework="numpy")
                wanted = {destination.layout.name for destination in plan.destinations}
                scratch = Scratch()
                for stored in chain.manifest.tensors:
                    for index in range(len(stored.blocks)):
                        chain.block(stored.layout, index, scratch)
                for destination in plan.destinations:
                    assert destination.layout.name in wanted
                    assert destination.memory.size == destination.layout.nbytes
                    destination.finish()
                plan.state()
        except (FormatError, DataError):
            refused += 1
    return refused


# -- A good store, and edits of it -----------------------------------------------------------------------------

NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    20,
    32,
    52,
    64,
    99,
    255,
    2**17,
    2**31,
    2**32 - 1,
    2**53,
    2**61,
    2**62,
    2**63 - 1,
]
VALUES: list[Any] = [
    *NUMBERS,
    *(-number for number in NUMBERS),
    2**63,
    2**64 - 1,
    10**400,
    0.5,
    1e308,
    True,
    None,
    "",
    *("one", "two", "three", "float32", "int32", "bfloat16", "complex128", "bool", "uint8", "float8_e5m2"),
    *(
        "torch",
        "numpy",
        "bytes",
        UID,
        OTHER_UID,
        PART,
        "part-00001.pst",
        "../x",
        "\0",
        "ff" * 8,
        "0x10",
        "cuda:0",
    ),
    [],
    {},
    [1],
    [5],
    [0, 3],
    [2, 4],
    [[2, 4], [0, 0]],
    [[10], [5]],
    {"array": {"of": "one", "kind": "numpy"}},
    {"array": {"of": "two", "kind": "bytes"}},
    {
        "array": {
            "of": "one",
            "kind": "numpy",
            "view": {"dtype": "int32", "shape": [5], "strides": [-4], "offset": 16},
        }
    },
    {"array": {"of": "one", "kind": "numpy", "big_endian": True}},
    {"array": {"of": "two", "kind": "torch", "parameter": True, "grad": True}},
    {"tuple": [1, {"map": {"a": 2}}]},
    {"items": [[1, 2], [{"tuple": [1]}, 3]]},
    {"map": {}},
    {"int": "0x123456789abcdef01"},
    {"float": "7ff8000000000000"},
    {"complex": ["7ff8000000000000", "0000000000000000"]},
    {"text": "eda080"},
    {"bytes": "00ff"},
    {"scalar": ["float32", "0000803f"]},
    {"size": [1, 2]},
    {"dtype": "float32"},
    {"device": "cpu"},
]


def _encoded(codec: str, raw: bytes, reference: bytes | None) -> Block:
    """Return a block as a codec stores it."""
    pair = Pair(_bytes(raw), DTYPES["float32"], None if reference is None else _bytes(reference))
    coder = next(one for one in CODECS if one.name == codec).coder(lambda: iter([pair]))
    out = np.zeros(len(raw) + (1 << 16), np.uint8)
    kind, length = coder.encode(pair, out)
    return Block(raw, int(kind), raw if kind == 0 else out[:length].tobytes())


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()


@cache
def good_blocks() -> tuple[list[Block], list[Block]]:
    """Return the blocks of a baseline and of a difference to it, of many kinds."""
    base = np.linspace(-1, 1, 64, dtype=np.float32)
    old, new = base.tobytes(), (base * np.float32(1.0001)).tobytes()
    one = np.arange(5, dtype=np.int32).tobytes()
    baseline = [
        Block(one),
        _encoded("dynrle", old, None),
        _encoded("gzip", old, None),
        Block(old, 2, struct.pack("<Q", 1)),
        Block(old),
        Block(one[:10]),
        Block(one[10:]),
    ]
    difference = [
        Block(one, 1, b""),
        _encoded("dynrle", new, old),
        _encoded("gzip-delta", new, old),
        Block(new, 2, struct.pack("<Q", 1)),
        _encoded("rle4-gzip", new, old),
        Block(one[:10], 1, b""),
        Block(one[10:]),
    ]
    return baseline, difference


def said_of(step: int, uid: str, reference: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the manifest says, without its parts."""
    rows: list[list[Any]] = [["one", "int32", [5], None, 0, 0]]
    rows += [
        [name, "float32", [64], None, 0, 1 + place]
        for place, name in enumerate(("two", "three", "four", "five"))
    ]
    rows += [["box", "uint8", [10], [[20], [0]], 0, 5], ["box", "uint8", [10], [[20], [10]], 0, 6]]
    arrays = {
        name: {"array": {"of": name, "kind": "numpy"}}
        for name in ("one", "two", "three", "four", "five", "box")
    }
    return {
        "format": "penstock snapshot",
        "version": 1,
        "step": step,
        "uid": uid,
        "created_seconds": float(step),
        "since_bytes": [9] if reference else [],
        "codec": "rle4",
        "reference": reference,
        "kept_mantissa_bits": None,
        "tensors": rows,
        "tree": {
            "map": {
                **arrays,
                "plain": [1, {"tuple": [None, "x"]}],
                "mixed": [{"array": {"of": "one", "kind": "numpy"}}],
            }
        },
        "rank_trees": [None],
    }


class Recipe:
    """Numbers taken from an input's bytes, 0 once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, most: int) -> int:
        wide = 1 if most <= 256 else 4
        taken = self._data[self._at : self._at + wide]
        self._at += wide
        return int.from_bytes(taken, "little") % max(1, most)

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], len(self._data)
        return taken

    def some(self) -> bytes:
        count = self.below(40)
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)


def files_of(data: bytes) -> dict[str, dict[str, bytes]]:
    """Return the store that an input stands for."""
    recipe = Recipe(data)
    if recipe.below(256) < 16:
        return {"step-000000000001": {MANIFEST: sealed(recipe.rest()), PART: made_part([]).data}}
    blocks = list(map(list, good_blocks()))
    said = [said_of(1, UID, None), said_of(2, OTHER_UID, {"step": 1, "uid": UID})]
    late: list[Callable[[], object]] = []
    frame: list[dict[str, Any]] = [{}, {}]
    while not recipe.is_over:
        which, how = recipe.below(2), recipe.below(8)
        if how < 4:
            _edit_json(recipe, said[which], late if how == 3 else None)
        elif how < 7:
            _edit_block(recipe, blocks[which], how)
        else:
            field = ("offset", "blocks")[recipe.below(2)]
            frame[which]["footer"] = {field: NUMBERS[recipe.below(len(NUMBERS))]}
    files: dict[str, dict[str, bytes]] = {}
    for told, those, lies, uid in zip(said, blocks, frame, (UID, OTHER_UID), strict=True):
        part = made_part(those, uid=uid, **lies)
        told.setdefault("parts", [[PART, len(part.data), part.table]])
        folder = f"step-{1 + len(files):012d}"
        files[folder] = {PART: part.data}
        for change in late:
            change()
        files[folder][MANIFEST] = sealed(json.dumps(told).encode())
        late = []
    return files


def _edit_json(recipe: Recipe, said: dict[str, Any], late: list[Callable[[], object]] | None) -> None:
    """Replace, remove or repeat a value. late: done once the parts are written down, which it can reach then."""

    def edit() -> None:
        # Level by level, so that what is near the top is as likely as what lies deep.
        parent: Any = said
        while True:
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            last: Any = keys[recipe.below(len(keys))]
            if not isinstance(parent[last], (dict, list)) or not parent[last] or recipe.below(4) == 0:
                break
            parent = parent[last]
        way = recipe.below(8)
        if way == 0:
            del parent[last]
        elif way == 1 and isinstance(parent, list):
            parent.insert(last, parent[last])
        elif way == 2 and isinstance(parent[last], int) and not isinstance(parent[last], bool):
            parent[last] += recipe.below(7) - 3
        else:
            parent[last] = json.loads(json.dumps(VALUES[recipe.below(len(VALUES))]))

    if not said:
        return
    if late is None:
        edit()
    else:
        late.append(edit)


def _edit_block(recipe: Recipe, blocks: list[Block], how: int) -> None:
    if not blocks:
        return
    place = recipe.below(len(blocks))
    block = blocks[place]
    payload = bytearray(block.stored)
    if how == 4:
        blocks[place] = Block(block.raw, recipe.below(40), bytes(payload), block.lies)
    elif how == 5 and payload:
        at, way = recipe.below(len(payload)), recipe.below(4)
        some = recipe.some()
        if way == 0:
            payload[at : at + len(some)] = some
        elif way == 1:
            payload[at:at] = some
        elif way == 2:
            del payload[at : at + recipe.below(20)]
        else:
            payload[at] ^= 1 << recipe.below(8)
        lies = block.lies
        if block.kind in (34, 36) and recipe.below(2):
            payload = bytearray(gzip.compress(recipe.some() * 3, mtime=0))
        blocks[place] = Block(block.raw, block.kind, bytes(payload), lies)
    else:
        field = ("offset", "checksum", "raw_checksum", "stored", "raw", "zero")[recipe.below(6)]
        value = NUMBERS[recipe.below(16)] % 2**32
        blocks[place] = Block(block.raw, block.kind, bytes(payload), {**block.lies, field: value})


def run(data: bytes) -> int:
    """Restore what an input stands for, and return how many steps were refused. Raises: what is a failure."""
    begin = time.process_time()
    refused = restore(files_of(data))
    took = time.process_time() - begin
    assert took < MOST_SECONDS, f"{took:.1f} s of CPU time"
    return refused


# -- Our own loop ----------------------------------------------------------------------------------------------

WATCHED = {module.__file__ for module in (catalog, loading, manifest, parts, reading, sharding, tree)}


def reached_by(data: bytes) -> set[tuple[str, int, int]]:
    """Run an input, and return the pairs of lines that followed each other in the watched modules."""
    found: set[tuple[str, int, int]] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            found.add((frame.f_code.co_filename, last.get(id(frame), 0), frame.f_lineno))
            last[id(frame)] = frame.f_lineno
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return found


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Return an input that is a little different."""
    made = bytearray(data)
    for _ in range(1 << draw.randrange(4)):
        at = draw.randrange(len(made) + 1)
        way = draw.randrange(6)
        if way == 0 and made:
            made[at % len(made)] = draw.randrange(256)
        elif way == 1:
            made[at:at] = draw.randbytes(1 + draw.randrange(6))
        elif way == 2:
            del made[at : at + 1 + draw.randrange(6)]
        elif way == 3:
            made[at:] = other[draw.randrange(len(other) + 1) :]
        elif way == 4 and made:
            made[at % len(made)] ^= 1 << draw.randrange(8)
        else:
            made += draw.randbytes(4)
    return bytes(made[:400])


def loop(seconds: float, seed: int) -> tuple[int, int, int]:
    """Try inputs for so long. Returns: how many, of which so many reached something new, and the pairs of lines.

    Raises: what is a failure, with the input as a note.
    """
    draw = random.Random(seed)
    corpus = [b"\xff", b"\x00{}", *(b"\xff" + draw.randbytes(6) for _ in range(20))]
    seen: set[tuple[str, int, int]] = set()
    tried, kept = 0, 0
    deadline = time.monotonic() + seconds
    waiting = list(corpus)
    while time.monotonic() < deadline:
        data = waiting.pop() if waiting else mutated(draw.choice(corpus), draw.choice(corpus), draw)
        tried += 1
        try:
            new = reached_by(data) - seen
        except BaseException as error:
            error.add_note(f"the input: {data.hex()}")
            raise
        if new:
            seen |= new
            corpus.append(data)
            kept += 1
    return tried, kept, len(seen)


def main() -> int:
    """Fuzz. Returns: the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of our own loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", metavar="HEX", help="run one input")
    parser.add_argument("--atheris", metavar="CORPUS", help="use libFuzzer, with a folder of inputs")
    parser.add_argument("options", nargs="*", help="of libFuzzer, after --")
    options = parser.parse_args()
    if options.again is not None:
        print(f"{run(bytes.fromhex(options.again))} steps were refused")
        return 0
    if options.atheris is not None:
        return with_atheris(options.atheris, options.options)
    restore(files_of(b"\xff"))  # what is imported lazily is imported
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, -1))
    try:
        tried, kept, pairs = loop(options.seconds, options.seed)
    except Exception:
        traceback.print_exc()
        return 1
    print(f"{tried:,} inputs, {kept:,} of them reached something new: {pairs:,} pairs of lines; no failure")
    return 0


def with_atheris(corpus: str, options: list[str]) -> int:
    """Hand over to libFuzzer, which ends the process."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for module in (catalog, loading, manifest, parts, reading, sharding, tree):
        for name, member in vars(module).copy().items():
            if (
                callable(member)
                and getattr(member, "__module__", None) == module.__name__
                and hasattr(member, "__code__")
            ):
                setattr(module, name, atheris.instrument_func(member))
    Path(corpus).mkdir(parents=True, exist_ok=True)
    atheris.Setup([sys.argv[0], corpus, *options], lambda data: run(data) and None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
