"""Manifests: what a snapshot says of itself comes back, and nothing that cannot be is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.snapshot_files import OTHER_UID, UID, sealed
from tests.for_each import for_each

from penstock.checkpoint.files.manifest import (
    Manifest,
    NewerFormat,
    Reference,
    Stored,
    folder_of,
    read_layout,
    read_manifest,
    step_of,
    write_layout,
    write_manifest,
)
from penstock.checkpoint.files.parts import Part
from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Box, Layout, count_blocks
from penstock.errors import FormatError

WEIGHT = Layout("model/weight", DTYPES["float32"], (3, 4))
LARGE = Layout("model/large", DTYPES["bfloat16"], (2, BLOCK_VALUES))
SHARD = Layout("model/shard", DTYPES["int64"], (2, 5), Box((4, 5), (2, 0)))
EMPTY = Layout("empty", DTYPES["bool"], (0, 7))
SCALAR = Layout("scalar", DTYPES["float64"], ())

MANIFEST = Manifest(
    step=120,
    uid=UID,
    created_seconds=1_750_000_000.25,
    clock_seconds=1_750_000_000.25,
    since_bytes=(700, 300),
    codec="balance",
    reference=Reference(110, OTHER_UID),
    kept_mantissa_bits=None,
    tree={"map": {"model": None, "ä": [1, 2.5, True, "x\n"]}},
    rank_trees=(None, {"map": {}}),
    parts=(
        Part("part-00000.pst", 88 + 3 * 40 + 500, "a" * 32),
        Part("part-00001-" + "b" * 32 + ".pst", 88 + 2 * 40 + 20, "c" * 32),
    ),
    tensors=(
        Stored(WEIGHT, 0, 0),
        Stored(EMPTY, 0, 1),
        Stored(SHARD, 1, 0),
        Stored(LARGE, 0, 1),
        Stored(SCALAR, 1, 1),
    ),
)


def said() -> dict[str, Any]:
    """Return what the manifest above says, as JSON."""
    written: dict[str, Any] = json.loads(write_manifest(MANIFEST).split(b"\n")[0])
    return written


def test_a_manifest_comes_back_as_it_was_written() -> None:
    assert read_manifest(write_manifest(MANIFEST), "here") == MANIFEST
    whole = replace(MANIFEST, reference=None, since_bytes=(), kept_mantissa_bits=10)
    assert read_manifest(write_manifest(whole), "here") == whole


def test_what_the_clock_said_is_written_where_it_had_been_set_back_and_read_where_it_is() -> None:
    back = replace(MANIFEST, clock_seconds=1_700_000_000.5)

    assert read_manifest(write_manifest(back), "here") == back
    assert "clock_seconds" not in said(), "as those who came before wrote it"


def test_it_says_how_many_bytes_there_are() -> None:
    assert MANIFEST.raw_bytes == 48 + 4 * BLOCK_VALUES + 80 + 8
    assert MANIFEST.stored_bytes == 708 + 188


@for_each(
    ("values", "blocks"), [(0, 0), (1, 1), (BLOCK_VALUES, 1), (BLOCK_VALUES + 1, 2), (10 * BLOCK_VALUES, 10)]
)
def test_a_tensor_is_cut_into_blocks_of_so_many_values(values: int, blocks: int) -> None:
    assert count_blocks(Layout("a", DTYPES["int8"], (values,))) == blocks


@for_each("step", [0, 1, 999_999_999_999, 10**12, 2**63 - 1])
def test_a_step_is_found_in_the_name_of_its_folder(step: int) -> None:
    assert step_of(folder_of(step)) == step


@for_each(
    "name",
    [
        "step-1",
        "step-00000000001",
        "step-0000000000001",
        "step--00000000001",
        "step-+00000000001",
        "Step-000000000001",
        "step-000000000001 ",
        "step-000000000001\n",
        "step-" + "٠" * 12,
        "xstep-000000000001",
        "step-1e0000000000",
    ],
)
def test_other_names_are_no_snapshots(name: str) -> None:
    assert step_of(name) is None


def test_a_flipped_bit_anywhere_is_found() -> None:
    data = write_manifest(MANIFEST)
    for place in range(len(data)):
        for bit in range(8):
            flipped = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            with pytest.raises(FormatError, match=r"here is cut off or damaged"):
                read_manifest(flipped, "here")


def test_a_cut_anywhere_is_found() -> None:
    data = write_manifest(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"here is cut off or damaged"):
            read_manifest(data[:length], "here")
    with pytest.raises(FormatError, match=r"here is cut off or damaged"):
        read_manifest(data + b"\n", "here")


@for_each("version", [2, 2**70, "two", None, [1]])
def test_a_newer_one_says_so(version: object) -> None:
    with pytest.raises(NewerFormat, match=r"here is of version .*; this Penstock reads version 1"):
        read_manifest(sealed(said() | {"version": version}), "here")


def lies() -> dict[str, Callable[[dict[str, Any]], object]]:
    """Return by name what makes a manifest one that cannot be."""
    changes: dict[str, Callable[[dict[str, Any]], object]] = {}

    def setting(field: str, *values: Any) -> None:
        for value in values:
            changes[f"{field} {json.dumps(value)[:40]}"] = partial(_set, (field,), value)

    def tensor(column: int, *values: Any) -> None:
        for value in values:
            changes[f"tensor {column} {json.dumps(value)[:40]}"] = partial(
                _set, ("tensors", 0, column), value
            )

    def part(column: int, *values: Any) -> None:
        for value in values:
            changes[f"part {column} {json.dumps(value)[:40]}"] = partial(_set, ("parts", 0, column), value)

    numbers: tuple[Any, ...] = (-1, 2**63, 10**400, 1.5, True, None, "1", [1], {})
    setting("step", *numbers)
    setting("uid", 1, None, "", UID.upper(), UID[:-1], UID + "0", "../" + UID[3:], UID[:-1] + "\n")
    setting("created_seconds", 10**400, -(10**400), math.inf, math.nan, True, None, "now", [])
    setting("since_bytes", None, 5, [-1], [1.0], [True], [[1]], [10**400], {"0": 1})
    setting("codec", None, 1, ["rle4"])
    setting("kept_mantissa_bits", -1, 1.5, "1", True, 10**30)
    setting(
        "reference", 5, [], {}, {"step": 1}, {"uid": UID}, {"step": -1, "uid": UID}, {"step": 1, "uid": "x"}
    )
    setting("rank_trees", None, {}, "x")
    setting("parts", None, {}, [[]], [1], [["part-00000.pst", 708]], [])
    setting("tensors", None, {}, [[]], [1], ["abcdef"], [])
    part(
        0, "../part-00000.pst", "/etc/passwd", "part-00000.pst\0", "part-0.pst", "part-00000.pst\n",
        "manifest.json",
    )  # fmt: skip
    part(0, "part-00000/../../x.pst", "part-00001-" + "b" * 32 + ".pst", "", None, 7)
    part(1, *numbers, 0, 87, 88 + 119, 88 + 3 * 40 + 48 + 4 * BLOCK_VALUES + 25, 2**62)
    part(2, None, "", "A" * 32, "a" * 31, 5)
    tensor(0, None, 5, ["a"])
    tensor(1, None, "float33", "", 5, "__class__", ["float32"])
    tensor(2, None, 12, "12", [-1], [1.0], [True], [2**63], [10**400], [2**32, 2**32], [1] * 65, {"0": 1})
    tensor(2, [2**61, 0], [2**40] * 2 + [0])
    tensor(2, [BLOCK_VALUES + 1])
    tensor(
        3, [], [[3, 4]], [[3, 4], [0, 0], 1], [[2, 4], [0, 0]], [[3, 4], [1, 0]], [[3, 4], [0]], [[3], [0]], 5
    )
    tensor(3, [[3, 4], [-1, 0]], [[2**63, 4], [0, 0]], {"whole": [3, 4]})
    tensor(4, *numbers, 2, 1)
    tensor(5, *numbers, 1, 2)
    changes["two of one name"] = lambda told: told["tensors"].append(["empty", "bool", [0, 7], None, 0, 3])
    changes["two parts of one file"] = lambda told: told["parts"].append(told["parts"][0])
    changes["a row too long"] = lambda told: told["tensors"][0].append(0)
    changes["a row too short"] = lambda told: told["tensors"][0].pop()
    changes["not a manifest"] = lambda told: told.update(format="penstock trace")
    changes["without a format"] = lambda told: told.pop("format")
    return changes


def _set(path: tuple[Any, ...], value: Any, told: Any) -> None:
    *above, last = path
    for key in above:
        told = told[key]
    told[last] = value


def test_what_cannot_be_is_refused() -> None:
    for lie, change in lies().items():
        told = said()
        change(told)
        with pytest.raises(FormatError, match=r"^here ") as raised:  # noqa: PT012, to say which is not
            read_manifest(sealed(told), "here")
            pytest.fail(f"{lie} passes")
        assert not isinstance(raised.value, NewerFormat), lie
        assert len(str(raised.value)) < 600, lie


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"{",
        b"\xff\xfe",
        b"{'step': 1}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"1" * 5_000,
        b"1e999999",
        b"[" * 50_000 + b"]" * 50_000,
        b'{"format":"penstock snapshot","version":1}',
    ],
    ids=lambda line: f"{line[:12].decode(errors='replace')} x {len(line)}",
)
def test_what_is_no_manifest_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here "):
        read_manifest(sealed(line), "here")


def test_names_of_tensors_may_be_any_text() -> None:
    """They are not paths: nothing is opened by them."""
    names = ["../../etc/passwd", "/etc/passwd", "", "\0", "ä" * 1000, "\ud800", "a\nb"]
    told = said()
    told["tensors"] = [[name, "bool", [0], None, 0, 0] for name in names]
    told["parts"] = [["part-00000.pst", 88, "a" * 32]]

    read = read_manifest(sealed(told), "here")

    assert [stored.layout.name for stored in read.tensors] == names


# -- Anything at all ---------------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, -1, 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**400]),
    st.floats(),
    st.sampled_from(["", "part-00000.pst", UID, OTHER_UID, "float32", "empty", "../x", "\0"]),
    st.text(max_size=5),
)
ANYTHING = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values within one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


PLACES = places(said())


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(PLACES), ANYTHING, st.sampled_from(["replace", "remove", "repeat", "move"])
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_manifest_changed_anywhere_is_read_or_refused(
    changes: list[tuple[tuple[Any, ...], Any, str]],
) -> None:
    told: Any = said()
    for path, value, how in changes:
        told = changed(told, path, value, how)
    data = sealed(json.dumps(told).encode())

    try:
        manifest = read_manifest(data, "here")
    except FormatError:
        return
    # The tree is read on its own: `penstock.checkpoint.state.tree`.
    manifest = replace(manifest, tree=None, rank_trees=())
    assert read_manifest(write_manifest(manifest), "again") == manifest
    for stored in manifest.tensors:
        assert 0 <= stored.part < len(manifest.parts)
        assert stored.blocks.stop * 40 <= manifest.parts[stored.part].nbytes


def changed(told: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    """Return JSON with another value at a place, if it still is there."""
    if not path:
        return value if how == "replace" else told
    *above, last = path
    parent = told
    try:
        for key in above:
            parent = parent[key]
        old = parent[last]
        if how == "replace":
            parent[last] = value
        elif how == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(0 if how == "move" else last, old if how == "repeat" else parent.pop(last))
    except (KeyError, IndexError, TypeError):
        pass
    return told


# -- Layouts, as ranks tell each other -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", [WEIGHT, LARGE, SHARD, EMPTY, SCALAR], ids=lambda layout: layout.name)
def test_a_layout_comes_back_as_it_was_written(layout: Layout) -> None:
    assert read_layout(json.loads(json.dumps(write_layout(layout)))) == layout


@given(written=ANYTHING)
def test_what_is_no_layout_is_refused(written: Any) -> None:
    with pytest.raises(FormatError, match="a layout says what cannot be"):
        read_layout(written)
