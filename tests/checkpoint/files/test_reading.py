"""Blocks found through repeats and differences, whoever wrote the files: right, or an error that says where."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import (
    EQUAL,
    HEADING_ZEROS,
    OTHER_UID,
    STORED,
    UID,
    Block,
    MadeTensor,
    made_snapshot,
    replica,
    tensor,
)

from penstock.checkpoint.files.catalog import Catalog, open_links
from penstock.checkpoint.files.parts import TornError
from penstock.checkpoint.files.reading import (
    Chain,
    Wanted,
    decode_all,
    load_manifest,
    parts_by_name,
    read_wanted,
)
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.tensors import BLOCK_VALUES
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import FormatError
from penstock.flow.ordered import Workers

ONE = np.arange(5, dtype=np.int32)
TWO = np.array([1.5, -0.0, np.nan])


def chain(folder: Path, step: int = 1) -> Chain:
    catalog = Catalog([LocalTier(folder)])
    catalog.look()
    return open_links(catalog, catalog.chains(step)[0])


def read(folder: Path, step: int = 1) -> dict[str, bytes]:
    """Return the bytes of all tensors, whole, read by two threads."""
    with closing(chain(folder, step)) as opened, Workers(2, "test-read") as workers:
        wanted = []
        for parts in parts_by_name(opened.manifest).values():
            layout = parts[0].layout.whole
            wanted.append(Wanted(layout, parts, np.zeros(layout.nbytes, np.uint8)))
        assert list(read_wanted(opened, wanted, workers)) == wanted
        decode_all(opened, workers)
        return {one.layout.name: one.out.tobytes() for one in wanted}


def zeros(name: str, blocks: list[Block], dtype: str = "uint8") -> MadeTensor:
    """Return a tensor of whole blocks."""
    return MadeTensor(name, dtype, [BLOCK_VALUES * len(blocks)], blocks)


WHOLE = bytes(BLOCK_VALUES)


def test_tensors_come_back_as_they_were_stored(folder: Path) -> None:
    made_snapshot(folder, [tensor("one", ONE), tensor("none", np.zeros((0, 3))), tensor("two", TWO)])

    assert read(folder) == {"one": ONE.tobytes(), "none": b"", "two": TWO.tobytes()}


def test_a_repeat_is_what_it_repeats_of_whatever_type(folder: Path) -> None:
    again = MadeTensor("again", "uint8", [20], [replica(0, ONE.tobytes())])
    made_snapshot(folder, [tensor("one", ONE), again])

    assert read(folder)["again"] == ONE.tobytes()


def test_a_difference_is_followed_through_any_number_of_snapshots(folder: Path) -> None:
    same = MadeTensor("one", "int32", [5], [Block(ONE.tobytes(), EQUAL, b"")])
    made_snapshot(folder, [tensor("one", ONE)], step=1)
    for step in range(2, 30):
        uid = f"{step:032x}"
        before = UID if step == 2 else f"{step - 1:032x}"
        made_snapshot(folder, [same], step=step, uid=uid, reference=(step - 1, before))

    assert read(folder, 29)["one"] == ONE.tobytes()


def test_a_repeat_of_what_is_as_before_is_what_was_before(folder: Path) -> None:
    """No writer of ours does that; it means something nevertheless."""
    rows = [
        MadeTensor("one", "int32", [5], [Block(ONE.tobytes(), EQUAL, b"")]),
        MadeTensor("again", "int32", [5], [replica(0, ONE.tobytes())]),
    ]
    made_snapshot(folder, [tensor("one", ONE)], step=1)
    made_snapshot(folder, rows, step=2, uid=OTHER_UID, reference=(1, UID))

    assert read(folder, 2) == {"one": ONE.tobytes(), "again": ONE.tobytes()}


def test_parts_of_a_spread_tensor_are_put_together(folder: Path) -> None:
    grid = np.arange(12, dtype=np.int16).reshape(3, 4)
    whole = [3, 4]
    left, right = grid[:, :1], grid[:, 1:]
    rows = [
        MadeTensor("grid", "int16", [3, 1], [Block(left.tobytes())], [whole, [0, 0]]),
        MadeTensor("grid", "int16", [3, 3], [Block(right.tobytes())], [whole, [0, 1]]),
    ]
    made_snapshot(folder, rows)

    assert read(folder)["grid"] == grid.tobytes()


# -- What does not fit together --------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 2**32, 2**63, 2**64 - 1])
def test_a_repeat_of_itself_or_a_later_block_is_refused(folder: Path, of: int) -> None:
    made_snapshot(
        folder,
        [
            tensor("one", ONE),
            MadeTensor("again", "int32", [5], [replica(of, ONE.tobytes())]),
            tensor("x", ONE),
        ],
    )

    with pytest.raises(FormatError, match=r"block 1 repeats no earlier block, in tensor 'again'"):
        read(folder)


def test_a_repeat_of_another_size_is_refused(folder: Path) -> None:
    again = MadeTensor("again", "uint8", [19], [replica(0, ONE.tobytes()[:19])])
    made_snapshot(folder, [tensor("one", ONE), again])

    with pytest.raises(FormatError, match="repeats no earlier block, in tensor 'again'"):
        read(folder)


def test_a_row_of_repeats_is_refused_not_walked_again_for_each(folder: Path) -> None:
    """Twenty thousand of them would be 200 million steps: a megabyte that takes minutes."""
    count = 20_000
    blocks = [Block(WHOLE), *(replica(block, WHOLE) for block in range(count))]
    made_snapshot(folder, [zeros("bomb", blocks)])

    begin = time.process_time()
    with pytest.raises(FormatError, match="block 2 repeats no earlier block, in tensor 'bomb'"):
        read(folder)
    assert time.process_time() - begin < 20


def test_a_difference_to_nothing_is_refused(folder: Path) -> None:
    made_snapshot(folder, [MadeTensor("one", "int32", [5], [Block(ONE.tobytes(), EQUAL, b"")])])

    with pytest.raises(FormatError, match="block 0 is a difference to nothing, in tensor 'one'"):
        read(folder)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "box"])
def test_a_difference_to_another_tensor_is_refused(folder: Path, change: str) -> None:
    made_snapshot(folder, [tensor("one", ONE)], step=1)
    block = Block(ONE.tobytes(), EQUAL, b"")
    other = {
        "name": MadeTensor("two", "int32", [5], [block]),
        "dtype": MadeTensor("one", "uint32", [5], [block]),
        "shape": MadeTensor("one", "int32", [5, 1], [block]),
        "box": MadeTensor("one", "int32", [5], [block], [[5], [0]]),
    }[change]
    made_snapshot(folder, [other], step=2, uid=OTHER_UID, reference=(1, UID))

    with pytest.raises(FormatError, match="is a difference to nothing"):
        read(folder, 2)


def test_a_block_that_is_as_before_and_was_not_is_refused(folder: Path) -> None:
    """As after somebody put another baseline in the place of the right one, with its name."""
    made_snapshot(folder, [tensor("one", ONE)], step=1)
    other = MadeTensor("one", "int32", [5], [Block((ONE + 1).tobytes(), EQUAL, b"")])
    made_snapshot(folder, [other], step=2, uid=OTHER_UID, reference=(1, UID))

    with pytest.raises(
        FormatError, match=r"block 0 .* does not have its checksum as decoded, in tensor 'one'"
    ):
        read(folder, 2)


@pytest.mark.parametrize("kind", [3, 4, 15, 37, 99, 255])
def test_a_kind_that_nobody_knows_is_refused(folder: Path, kind: int) -> None:
    made_snapshot(folder, [MadeTensor("one", "int32", [5], [Block(ONE.tobytes(), kind)])])

    with pytest.raises(FormatError, match=f"kind {kind}, which this Penstock does not know, in tensor 'one'"):
        read(folder)


@pytest.mark.parametrize("kind", [16, 17, 32, HEADING_ZEROS, 34, 35, 36])
@pytest.mark.parametrize("payload", [b"", b"\0", b"\xff" * 20, bytes(range(20)), bytes(20)])
def test_a_payload_that_no_coder_made_is_refused(folder: Path, kind: int, payload: bytes) -> None:
    """That it decodes to the right bytes by chance is left out by the checksum: it is of what no decoder makes."""
    raw = b"\x5a\xa5\x00\xff" * 5
    row = MadeTensor("one", "int32", [5], [Block(raw, kind, payload)])
    made_snapshot(folder, [tensor("one", ONE)], step=1)
    made_snapshot(folder, [row], step=2, uid=OTHER_UID, reference=(1, UID))

    with pytest.raises(FormatError, match="in tensor 'one'"):
        read(folder, 2)


def test_blocks_must_be_those_of_the_tensors(folder: Path) -> None:
    made_snapshot(folder, [MadeTensor("one", "int32", [5], [Block(ONE.tobytes()[:16], STORED)])])
    with pytest.raises(FormatError, match="blocks of one are not of its shape"):
        read(folder)

    made_snapshot(folder, [zeros("two", [Block(WHOLE[:-1]), Block(WHOLE + b"\0")])], step=2)
    with pytest.raises(FormatError, match="blocks of two are not of its shape"):
        read(folder, 2)

    spare = MadeTensor("three", "int32", [5], [Block(ONE.tobytes()), Block(b"spare")])
    made_snapshot(folder, [spare], step=3)
    with pytest.raises(FormatError, match="its 1 blocks cannot take"):
        read(folder, 3)


BOXES = {
    "overlap": [([2, 4], [0, 0]), ([2, 4], [1, 0])],
    "gap": [([1, 4], [0, 0]), ([1, 4], [2, 0])],
    "one twice": [([3, 2], [0, 0]), ([2, 2], [0, 2]), ([1, 2], [1, 2])],
    "less than all": [([3, 2], [0, 0])],
}


@pytest.mark.parametrize("boxes", BOXES)
def test_parts_that_do_not_make_up_the_whole_are_refused(folder: Path, boxes: str) -> None:
    rows = [
        MadeTensor("grid", "uint8", shape, [Block(bytes(int(np.prod(shape))))], [[3, 4], offsets])
        for shape, offsets in BOXES[boxes]
    ]
    made_snapshot(folder, rows)

    with pytest.raises(FormatError, match="the snapshot of step 1 is damaged: grid"):
        read(folder)


def test_parts_of_different_wholes_or_types_are_refused(folder: Path) -> None:
    half = Block(bytes(8))
    for step, (dtype, whole) in enumerate([("int16", [4, 4]), ("int8", [4, 4]), ("int8", [2, 8])], 1):
        rows = [
            MadeTensor("grid", "int8", [2, 4], [half], [[4, 4], [0, 0]]),
            MadeTensor("grid", dtype, [2, 4], [Block(bytes(16 if dtype == "int16" else 8))], [whole, [0, 4]]),
        ]
        if dtype == "int8" and whole == [4, 4]:
            rows.pop()
        made_snapshot(folder, rows, step=step, tree=None)
        with pytest.raises(FormatError, match=r"grid|what cannot be"):
            read(folder, step)


def test_a_snapshot_in_the_folder_of_another_step_is_refused(folder: Path) -> None:
    made_snapshot(folder, [tensor("one", ONE)], step=1).rename(folder / "step-000000000002")

    with pytest.raises(FormatError, match=r"is of step 1: it was moved here from another folder"):
        load_manifest(LocalTier(folder), "step-000000000002")


def test_a_part_that_is_missing_is_torn_and_named(folder: Path) -> None:
    (made_snapshot(folder, [tensor("one", ONE)]) / "part-00000.pst").unlink()

    with pytest.raises(TornError, match=r"part-00000\.pst is missing"):
        read(folder)


def test_a_block_is_a_reference_in_a_space_of_its_own(folder: Path) -> None:
    made_snapshot(folder, [tensor("one", ONE), tensor("two", TWO)])
    with closing(chain(folder)) as opened:
        scratch = Scratch()
        layouts = [stored.layout for stored in opened.manifest.tensors]

        block = opened.block(layouts[0], 0, scratch)

        assert block is not None
        assert block.tobytes() == ONE.tobytes()
    assert chain_without(folder, layouts[0].name) is None


def chain_without(folder: Path, name: str) -> object:
    """Return the block of a tensor that there is not."""
    with closing(chain(folder)) as opened:
        layout = next(stored.layout for stored in opened.manifest.tensors if stored.layout.name != name)
        other = type(layout)(f"not {layout.name}", layout.dtype, layout.shape)
        return opened.block(other, 0, Scratch())
