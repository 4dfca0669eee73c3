"""Every flipped bit and every cut, in any file of a store, is found before a value is returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import files_of, opened, reseal, said_by, same, save_all, training

from penstock.checkpoint.store import SnapshotStore
from penstock.errors import FormatError

#: A store of a baseline and two differences, by scheme; all kinds of blocks are in it.
SCHEMES: dict[str, dict[str, Any]] = {
    "progressive": {"scheme": "progressive", "snap_dis": 3, "codec": "rle4"},
    "chain": {"scheme": "chain", "snap_dis": 3, "codec": "dynrle"},
    "complete": {"scheme": "complete", "codec": "stored"},
}
STEPS = (1, 2, 3)
#: By scheme and step, the steps whose files are needed to restore it.
NEEDED = {
    "progressive": {1: {1}, 2: {1, 2}, 3: {1, 2, 3}},
    "chain": {1: {1}, 2: {1, 2}, 3: {1, 3}},
    "complete": {1: {1}, 2: {2}, 3: {3}},
}
#: By scheme, steps whose files stand for those of the others, which the slow test below damages, too.
KINDS_OF_FILES = {"progressive": {1, 3}, "chain": {1, 3}, "complete": {3}}
MANIFESTS: dict[str, set[int]] = {"progressive": {3}, "chain": set(), "complete": set()}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(folder: Path, scheme: str) -> SnapshotStore:
    """Return a store of three snapshots, opened anew."""
    save_all(folder, STEPS, **SCHEMES[scheme])
    return opened(folder, **SCHEMES[scheme])


def step_of(file: Path) -> int:
    return int(file.parent.name.removeprefix("step-"))


def restorable(store: SnapshotStore) -> set[int]:
    """Return the steps that are restored as they were saved; others must raise FormatError."""
    found = set()
    for step in STEPS:
        try:
            restored = store.restore(step)
        except FormatError:
            continue
        assert same(restored.state, training(step)), f"step {step} is not what was saved"
        found.add(step)
    return found


def broken_by(scheme: str, step: int) -> set[int]:
    """Return the steps that cannot be restored when a file of one is damaged."""
    return {other for other in STEPS if step in NEEDED[scheme][other]}


# -- Bits ------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_any_file_is_found_and_named(
    folder: Path, scheme: str, saved: SnapshotStore
) -> None:
    """One bit of every fifth byte, each in turn; all bits of a part and a manifest in their own tests, and below."""
    for file in files_of(folder):
        step = step_of(file)
        if step not in (KINDS_OF_FILES if file.suffix != ".json" else MANIFESTS)[scheme]:
            continue
        whole = file.read_bytes()
        for place in range(step % 5, len(whole), 5):
            bit = 1 << (place + step) % 8
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(FormatError, match=file.name if file.suffix == ".json" else r"part-00000"):
                saved.restore(step)
        file.write_bytes(whole)
    assert restorable(saved) == set(STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_flipped_bit_of_any_file_costs_only_what_depends_on_it(
    folder: Path, scheme: str, saved: SnapshotStore
) -> None:
    for file in files_of(folder):
        if file.suffix == ".json" and scheme != "progressive":
            continue
        whole = file.read_bytes()
        for place in range(len(whole)):
            for bit in range(8):
                file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
                step, whole_ones = step_of(file), restorable(saved)
                assert step not in whole_ones
                # A block that is no difference needs none of the one before: more may be whole, never less.
                assert whole_ones >= set(STEPS) - broken_by(scheme, step)
        file.write_bytes(whole)


def test_a_damaged_file_costs_only_what_depends_on_it_and_verify_says_which(
    folder: Path, scheme: str, saved: SnapshotStore
) -> None:
    for file in files_of(folder):
        whole = file.read_bytes()
        file.write_bytes(whole[:-20] + bytes([whole[-20] ^ 4]) + whole[-19:])
        broken = broken_by(scheme, step_of(file))

        assert restorable(saved) == set(STEPS) - broken
        listed = {one.step: one for one in saved.verify()}
        assert {step for step, one in listed.items() if one.condition != "intact"} == broken
        for step in broken:
            assert str(file) in listed[step].why
        assert saved.verify(step_of(file))[0].condition == "damaged"

        file.write_bytes(whole)
        assert {one.condition for one in saved.verify()} == {"intact"}


def test_a_byte_of_a_tensor_that_is_damaged_is_named_with_its_tensor(folder: Path) -> None:
    save_all(folder, [1], codec="stored")
    part = next(folder.glob("step-*/part-*"))
    whole = part.read_bytes()
    assert whole[32:80] == training(1)["weight"].tobytes()  # the header has 32 bytes
    part.write_bytes(whole[:50] + b"\xff" + whole[51:])

    store = opened(folder, codec="stored")
    with pytest.raises(FormatError, match=r"part-00000\.pst .* block 0 .*, in tensor 'weight'"):
        store.restore()
    assert same(
        store.restore(only=["moment", "table"]).state, {k: training(1)[k] for k in ("moment", "table")}
    )
    # `list` opens files, and reads them not to their end.
    assert store.list()[0].condition == "intact"
    (verified,) = store.verify()
    assert verified.condition == "damaged"
    assert "in tensor 'weight'" in verified.why


@pytest.mark.parametrize("codec", ["stored", "rle4", "dynrle"])
def test_random_bytes_of_a_larger_store_that_are_damaged_are_found(folder: Path, codec: str) -> None:
    random = np.random.default_rng(0)
    weight = random.normal(0, 1, 300_000).astype(np.float32)
    states = [{"weight": weight}, {"weight": weight + random.normal(0, 1e-4, weight.size).astype(np.float32)}]
    with opened(folder, codec=codec) as store:
        for step, state in enumerate(states):
            store.save(step, state).wait()
        for file in sorted(folder.glob("step-*/part-*")):
            step = step_of(file)
            whole = file.read_bytes()
            for place in random.integers(0, len(whole), 12):
                byte = bytes([whole[place] ^ int(random.integers(1, 256))])
                file.write_bytes(whole[:place] + byte + whole[place + 1 :])
                with pytest.raises(FormatError, match=r"part-00000\.pst"):
                    store.restore(step)
            file.write_bytes(whole)
            assert same(store.restore(step).state, states[step])


# -- Cuts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "stride"),
    [
        pytest.param(STEPS[:2], 7, id="a difference"),
        pytest.param(STEPS, 1, marks=pytest.mark.slow, id="a chain"),
    ],
)
def test_any_file_that_is_cut_anywhere_is_found(folder: Path, steps: Sequence[int], stride: int) -> None:
    save_all(folder, steps)
    saved = opened(folder)
    for file in files_of(folder):
        whole = file.read_bytes()
        for length in {*range(0, len(whole), stride), *range(len(whole) - 8, len(whole))}:
            file.write_bytes(whole[:length])
            with pytest.raises(FormatError, match=file.name):
                saved.restore(step_of(file))
        file.write_bytes(whole + b"\0")
        with pytest.raises(FormatError, match=file.name):
            saved.restore(step_of(file))
        file.write_bytes(whole)
    for step in steps:
        assert same(saved.restore(step).state, training(step))


def test_a_file_that_is_missing_or_cut_is_torn_and_others_are_damaged(folder: Path) -> None:
    save_all(folder, STEPS, scheme="complete")
    one, two, three = (folder / f"step-{step:012d}" for step in STEPS)
    (one / "manifest.json").unlink()
    (two / "part-00000.pst").write_bytes((two / "part-00000.pst").read_bytes()[:-1])
    part = bytearray((three / "part-00000.pst").read_bytes())
    part[0] ^= 1
    (three / "part-00000.pst").write_bytes(part)

    listed = {one.step: one for one in opened(folder).list()}

    assert {step: one.condition for step, one in listed.items()} == {1: "torn", 2: "torn", 3: "damaged"}
    assert "step-000000000001 has no manifest" in listed[1].why
    assert "bytes instead of" in listed[2].why
    assert "does not begin as part 0" in listed[3].why


def test_an_empty_folder_of_a_step_is_torn(folder: Path) -> None:
    save_all(folder, [1])
    (folder / "step-000000000002").mkdir()

    store = opened(folder)

    assert {one.step: one.condition for one in store.list()} == {1: "intact", 2: "torn"}
    with pytest.raises(FormatError, match="step-000000000002 has no manifest"):
        store.restore(2)
    assert same(store.restore(1).state, training(1))


# -- Files that are whole, in the wrong place ------------------------------------------------------------------


def swap_parts(folder: Path) -> None:
    one, two = (folder / f"step-{step:012d}" / "part-00000.pst" for step in (2, 3))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def swap_blocks(folder: Path) -> None:
    """Swap two blocks of one length: of `table` in the baseline, and of the moment."""
    part = folder / "step-000000000003" / "part-00000.pst"
    data = bytearray(part.read_bytes())
    data[32:40], data[40:48] = data[40:48], data[32:40]
    part.write_bytes(data)


def swap_manifests(folder: Path) -> None:
    one, two = (folder / f"step-{step:012d}" / "manifest.json" for step in (2, 3))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def replay_manifest(folder: Path) -> None:
    """Put an older snapshot's manifest, made out for this step, into its place."""
    older = (folder / "step-000000000001" / "manifest.json").read_bytes()
    newer = folder / "step-000000000003" / "manifest.json"
    newer.write_bytes(older)
    reseal(newer, lambda said: said.update(step=3))


def swap_folders(folder: Path) -> None:
    one, two = (folder / f"step-{step:012d}" for step in (2, 3))
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


SWAPS: dict[str, Callable[[Path], None]] = {
    "parts": swap_parts,
    "blocks": swap_blocks,
    "manifests": swap_manifests,
    "an older manifest": replay_manifest,
    "folders": swap_folders,
}


@pytest.mark.parametrize("swap", SWAPS)
def test_what_was_swapped_is_found_and_never_taken_for_another(
    folder: Path, scheme: str, saved: SnapshotStore, swap: str
) -> None:
    SWAPS[swap](folder)

    assert restorable(saved) <= {1, 2}
    with pytest.raises(FormatError):
        saved.restore(3)
    assert 3 in {one.step for one in saved.verify() if one.condition == "damaged" or one.condition == "torn"}


def test_a_baseline_saved_again_is_not_the_one_that_differences_are_to(folder: Path) -> None:
    save_all(folder, [1, 2])
    aside = folder.with_name("aside")
    (folder / "step-000000000001").rename(aside)
    with opened(folder) as store:
        store.save(1, training(7)).wait()

        assert same(store.restore(1).state, training(7))
        with pytest.raises(
            FormatError, match="step-000000000002 is a difference to step 1, which is not there"
        ):
            store.restore(2)
        assert {one.step: one.condition for one in store.list()} == {1: "intact", 2: "damaged"}


# -- The newest intact one -------------------------------------------------------------------------------------


def test_fallback_takes_the_newest_whole_one_and_says_so(folder: Path) -> None:
    save_all(folder, range(1, 7), snap_dis=2)
    told: list[str] = []
    for step in (5, 6):
        part = folder / f"step-{step:012d}" / "part-00000.pst"
        part.write_bytes(part.read_bytes()[:-1])
    store = opened(folder, report=told.append)

    with pytest.raises(FormatError, match="step-000000000005"):
        store.restore()
    restored = store.restore(fallback=True)

    assert restored.step == 4
    assert same(restored.state, training(4))
    assert [line[:24] for line in told] == ["step 6 is not restored: ", "step 5 is not restored: "]
    assert all("bytes instead of" in line for line in told)


def test_fallback_from_a_step_takes_what_was_saved_before_it(folder: Path) -> None:
    save_all(folder, range(1, 5), scheme="complete")
    (folder / "step-000000000003" / "part-00000.pst").unlink()
    store = opened(folder)

    assert store.restore(3, fallback=True).step == 2
    assert store.restore(4, fallback=True).step == 4


def test_without_a_whole_one_the_last_failure_is_raised(folder: Path) -> None:
    save_all(folder, [1, 2])
    for file in folder.glob("step-*/part-*"):
        file.unlink()

    with pytest.raises(FormatError, match=r"step-000000000001/part-00000\.pst is missing"):
        opened(folder).restore(fallback=True)


def test_a_state_that_was_half_loaded_is_told_by_the_error(folder: Path) -> None:
    """What is loaded into may be changed by then, but never with a wrong value."""
    save_all(folder, [1], codec="stored")
    part = folder / "step-000000000001" / "part-00000.pst"
    whole = part.read_bytes()
    part.write_bytes(whole[:32] + b"\xff" + whole[33:])
    into = {
        key: np.zeros(value.shape, value.dtype) if key != "step" else 0 for key, value in training(0).items()
    }

    with pytest.raises(FormatError, match="in tensor 'weight'"):
        opened(folder, codec="stored").restore(into=into)

    for key, value in training(1).items():
        if key != "weight" and key != "step":
            assert same(into[key], value) or not np.any(into[key])


def test_a_store_goes_on_with_a_baseline_after_the_reference_was_damaged(folder: Path) -> None:
    save_all(folder, [1, 2])
    (folder / "step-000000000002" / "manifest.json").write_bytes(b"{}")

    with opened(folder) as store:
        saved = store.save(3, training(3)).wait()
        assert saved.reference_step in (None, 1)
        assert same(store.restore(3).state, training(3))


def damage_reference(folder: Path) -> None:
    part = folder / "step-000000000001" / "part-00000.pst"
    whole = part.read_bytes()
    part.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])


def test_a_state_that_was_to_be_a_difference_to_damaged_files_is_saved_whole(folder: Path) -> None:
    save_all(folder, [1])
    damage_reference(folder)
    told: list[str] = []

    with opened(folder, reference="stored", report=told.append) as store:
        saved = store.save(2, training(2)).wait()

        assert saved.reference_step is None
        assert "step 1, to which it was to be a difference, is damaged" in told[0]
        assert same(store.restore(2).state, training(2))
        assert not list(folder.glob(".unfinished*"))


def test_a_state_that_is_staged_in_waves_is_not_there_any_more_to_be_saved_whole(folder: Path) -> None:
    save_all(folder, [1])
    damage_reference(folder)

    with opened(folder, reference="stored", staging_bytes=64) as store:
        with pytest.raises(FormatError, match="step-000000000001"):
            store.save(2, training(2)).wait()

        assert store.save(3, training(3)).wait().reference_step is None
        assert same(store.restore(3).state, training(3))
        assert not list(folder.glob(".unfinished*"))


@pytest.mark.parametrize("how", ["verify", "restore"])
def test_a_reference_that_is_known_to_be_damaged_is_not_chosen_again(folder: Path, how: str) -> None:
    save_all(folder, [1])
    damage_reference(folder)

    with opened(folder, reference="stored") as store:
        if how == "verify":
            store.verify()
        else:
            with pytest.raises(FormatError, match="step-000000000001"):
                store.restore(1)

        assert store.save(3, training(3)).wait().reference_step is None
        assert same(store.restore(3).state, training(3))


def test_a_manifest_says_what_the_files_are(folder: Path) -> None:
    save_all(folder, [1])
    (snapshot,) = folder.glob("step-*")
    said = said_by(snapshot / "manifest.json")

    assert said["parts"][0][:2] == ["part-00000.pst", (snapshot / "part-00000.pst").stat().st_size]
    assert sorted(file.name for file in snapshot.iterdir()) == ["manifest.json", "part-00000.pst"]


@pytest.mark.parametrize("tree", [[], {"map": {"rank 1": 5}}, {"map": {}}, 7])
def test_what_a_rank_had_for_itself_is_its_own_or_refused(folder: Path, tree: Any) -> None:
    with opened(folder) as store:
        store.save(1, training(1), per_rank={"draws": 5}).wait()
        assert store.restore().per_rank == {"draws": 5}
    (snapshot,) = folder.glob("step-*")

    reseal(snapshot / "manifest.json", lambda said: said.update(rank_trees=[tree]))

    with pytest.raises(FormatError):
        opened(folder).restore()
    assert [one.condition for one in opened(folder).list()] == ["damaged"]
