"""Which snapshots there are, and how one is read, whatever else lies in the folders of the tiers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.checkpoint.snapshot_files import (
    EQUAL,
    OTHER_UID,
    UID,
    Block,
    MadeTensor,
    made_snapshot,
    reseal,
    tensor,
)

from penstock.checkpoint.files import catalog as catalog_module
from penstock.checkpoint.files.catalog import Catalog, Copy, Link, Removed, open_links
from penstock.checkpoint.files.manifest import NewerFormat
from penstock.checkpoint.files.parts import TornError
from penstock.checkpoint.files.reading import load_manifest
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError, DataError, FormatError

ONE = np.arange(5, dtype=np.int32)


def uid_of(step: int) -> str:
    return f"{step:032x}"


def made(folder: Path, step: int, reference: int | None = None, created_seconds: float | None = None) -> Path:
    """Write a snapshot of one tensor, as it was in the step of its reference."""
    row = (
        tensor("one", ONE)
        if reference is None
        else MadeTensor("one", "int32", [5], [Block(ONE.tobytes(), EQUAL, b"")])
    )
    told = None if reference is None else (reference, uid_of(reference))
    lies: dict[str, Any] = {} if created_seconds is None else {"created_seconds": created_seconds}
    return made_snapshot(folder, [row], step=step, uid=uid_of(step), reference=told, **lies)


def looked(*folders: Path) -> Catalog:
    catalog = Catalog([LocalTier(folder) for folder in folders])
    catalog.look()
    return catalog


def links_of(*places: tuple[int, int]) -> list[Link]:
    """Return the links of a chain. places: tier and step of each."""
    return [Link(tier, step, uid_of(step)) for tier, step in places]


def open_and_close(catalog: Catalog, links: Sequence[Link]) -> list[int]:
    chain = open_links(catalog, links)
    steps = [link.manifest.step for link in chain.links]
    chain.close()
    chain.close()
    return steps


def remove(catalog: Catalog, step: int) -> None:
    for copy in catalog.take_out(0, [step]):
        catalog.remove(copy)


def test_snapshots_are_in_the_order_in_which_they_were_saved(folder: Path) -> None:
    for step, created_seconds in ((10, 3.0), (20, 1.0), (30, 2.0)):
        made(folder, step, created_seconds=created_seconds)

    catalog = looked(folder)

    assert catalog.steps() == [20, 30, 10]
    assert [copy.step for copy in catalog.on_tier(0)] == [20, 30, 10]
    assert catalog.newest_seconds() == 3.0
    assert Catalog([]).newest_seconds() == 0.0


def test_what_cannot_be_read_is_not_taken_for_the_oldest(folder: Path) -> None:
    for step in (10, 20, 30):
        made(folder, step)
    (folder / "step-000000000030" / "manifest.json").write_bytes(b"")

    catalog = looked(folder)

    assert catalog.steps() == [10, 20, 30]
    (copy,) = catalog.copies(30)
    assert copy.manifest is None
    assert "cut off or damaged" in str(copy.fault)
    assert [one.is_intact for one in catalog.stored(0)] == [True, True, False]


def test_other_entries_are_no_snapshots(folder: Path) -> None:
    made(folder, 1)
    (folder / "step-1").mkdir()
    (folder / "step-000000000002").write_bytes(b"")
    (folder / ".step-000000000003").mkdir()

    assert looked(folder).steps() == [1]


def test_a_way_is_from_what_needs_nothing_to_what_is_wanted(folder: Path) -> None:
    made(folder, 1)
    made(folder, 2, 1)
    made(folder, 3, 2)
    made(folder, 4, 1)
    catalog = looked(folder)

    assert catalog.chains(3) == [links_of((0, 1), (0, 2), (0, 3))]
    assert catalog.chains(4) == [links_of((0, 1), (0, 4))]
    assert catalog.chains(1) == [links_of((0, 1))]
    assert open_and_close(catalog, catalog.chains(3)[0]) == [1, 2, 3]


def test_the_nearest_copy_is_the_first_way_and_the_other_tier_the_second(folder: Path) -> None:
    fast, slow = folder / "fast", folder / "slow"
    made(slow, 1)
    made(slow, 2, 1)
    made(fast, 2, 1)
    catalog = looked(fast, slow)

    assert [links[-1] for links in catalog.chains(2)] == links_of((0, 2), (1, 2))
    assert catalog.chains(2)[1] == links_of((1, 1), (1, 2))
    assert catalog.chains(1) == [links_of((1, 1))]


def test_a_ring_of_differences_has_no_way(folder: Path) -> None:
    made(folder, 1, 2)
    made(folder, 2, 1)
    made(folder, 3, 3)
    catalog = looked(folder)

    for step in (1, 2, 3):
        with pytest.raises(FormatError, match="it is a difference to itself"):
            catalog.chains(step)


def test_a_difference_to_what_is_not_there_says_so(folder: Path) -> None:
    made(folder, 2, 1)
    with pytest.raises(FormatError, match="step-000000000002 is a difference to step 1, which is not there"):
        looked(folder).chains(2)

    # Another one in its place does not pass for it.
    made_snapshot(folder, [tensor("one", ONE)], step=1, uid=UID)
    with pytest.raises(FormatError, match="step-000000000002 is a difference to step 1, which is not there"):
        looked(folder).chains(2)


def test_a_difference_to_what_cannot_be_read_says_why(folder: Path) -> None:
    (made(folder, 1) / "manifest.json").write_bytes(b"x")
    made(folder, 2, 1)

    with pytest.raises(
        FormatError, match=r"is a difference to step 1: .*step-000000000001.* cut off or damaged"
    ):
        looked(folder).chains(2)


def test_a_step_that_is_not_there_is_told_with_the_two_nearest(folder: Path) -> None:
    for step in (10, 20, 30, 40):
        made(folder, step)
    catalog = looked(folder)

    for asked, near in ((12, "10 and 20"), (0, "10 and 20"), (26, "20 and 30"), (10**6, "30 and 40")):
        with pytest.raises(ConfigError, match=f"the nearest are of step {near}$"):
            catalog.chains(asked)
    assert "does not exist" in looked(folder.with_name("empty")).missing(3)
    folder.with_name("empty").mkdir()
    assert "has none at all" in looked(folder.with_name("empty")).missing(3)
    assert "delete it first" in catalog.there_already(10)


def test_a_newer_version_is_told(folder: Path) -> None:
    made(folder, 1)
    assert looked(folder).newer_format() is None
    reseal(made(folder, 2) / "manifest.json", lambda said: said.update(version=9))

    assert isinstance(looked(folder).newer_format(), NewerFormat)


def test_what_is_added_and_deleted_is_known_without_another_look(folder: Path) -> None:
    made(folder, 1)
    catalog = looked(folder)
    (first,) = catalog.copies(1)
    assert first.manifest is not None
    made(folder, 2, 1)
    (second,) = looked(folder).copies(2)
    assert second.manifest is not None

    catalog.add(0, second.manifest)
    assert catalog.steps() == [1, 2]
    assert catalog.manifest(0, 2) == second.manifest
    remove(catalog, 2)

    assert catalog.steps() == [1]
    assert catalog.manifest(0, 2) is None
    assert os.listdir(folder) == ["step-000000000001"]


class Interrupted(LocalTier):
    """A tier on which something happens between a listing and the reading of what was listed."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def folders(self) -> list[str]:
        found = super().folders()
        self.meanwhile()
        return found


def test_what_is_committed_and_removed_during_a_look_is_known_as_it_is_after_it(folder: Path) -> None:
    made(folder, 1)
    tier = Interrupted(folder)
    catalog = Catalog([tier])
    catalog.look()
    made(folder, 2)
    (second,) = looked(folder).copies(2)
    shutil.move(folder / "step-000000000002", folder / ".2")

    def commit_and_remove() -> None:
        del tier.meanwhile
        assert second.manifest is not None
        shutil.move(folder / ".2", folder / "step-000000000002")
        catalog.add(0, second.manifest)
        remove(catalog, 1)

    tier.meanwhile = commit_and_remove
    catalog.look()

    assert catalog.steps() == [2]


def test_what_is_committed_between_two_looks_at_all_copies_is_not_half_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save commits to the fast tier while the thread of a drain asks what is there."""
    made(folder, 1)
    catalog = looked(folder)
    made(folder, 2)
    manifest = load_manifest(LocalTier(folder), "step-000000000002")
    on_tier = catalog_module._Known.on_tier

    def then_add(known: Any, tier: int) -> list[Copy]:
        found = on_tier(known, tier)
        if catalog.manifest(0, 2) is None:
            catalog.add(0, manifest)
        return found

    monkeypatch.setattr(catalog_module._Known, "on_tier", then_add)

    assert [one.step for one in catalog.stored(0)] == [1]
    assert [one.step for one in catalog.stored(0)] == [1, 2]


def test_what_somebody_reads_is_not_changed_by_a_commit(folder: Path) -> None:
    made(folder, 1)
    catalog = looked(folder)
    made(folder, 2)
    read: list[Any] = []
    manifest = load_manifest(LocalTier(folder), "step-000000000002")

    class Told(Catalog):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_known":
                read.append((value.copies, dict(value.copies)))
            super().__setattr__(name, value)

    catalog.__class__ = Told
    catalog.add(0, manifest)
    catalog.take_out(0, [1])

    assert len(read) == 2
    assert all(value == as_published for value, as_published in read)


def test_what_is_about_to_be_removed_is_not_seen_and_what_stays_is_seen_again(folder: Path) -> None:
    for step in (1, 2, 3):
        made(folder, step)
    catalog = looked(folder)

    taken = catalog.take_out(0, [3, 1, 9])
    catalog.look()

    assert ([copy.step for copy in taken], catalog.steps()) == ([3, 1], [2])
    assert (catalog.is_going(tier=0, step=3), catalog.is_going(step=2), catalog.is_going(tier=1)) == (1, 0, 0)
    catalog.remove(taken[0])
    catalog.put_back(taken[1:])
    assert catalog.steps() == [1, 2]
    assert not catalog.is_going()
    catalog.look()
    assert catalog.steps() == [1, 2]


def test_what_is_known_to_be_damaged_is_not_whole_until_another_is_in_its_place(folder: Path) -> None:
    made(folder, 1)
    catalog = looked(folder)
    catalog.mark_damaged(1)
    assert [one.is_intact for one in catalog.stored(0)] == [False]
    catalog.look()
    assert [one.is_intact for one in catalog.stored(0)] == [False]

    shutil.rmtree(folder / "step-000000000001")
    made_snapshot(folder, [tensor("one", ONE)], step=1, uid=UID)
    catalog.look()

    assert [one.is_intact for one in catalog.stored(0)] == [True]


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_way_that_cannot_be_opened_leaves_no_file_open(folder: Path, broken: int) -> None:
    made(folder, 1)
    made(folder, 2, 1)
    made(folder, 3, 2)
    catalog = looked(folder)
    (links,) = catalog.chains(3)
    (folder / f"step-{broken:012d}" / "part-00000.pst").unlink()
    files = psutil.Process().num_fds()

    with pytest.raises(TornError, match=rf"step-{broken:012d}/part-00000\.pst is missing"):
        open_links(catalog, links)

    assert psutil.Process().num_fds() == files


def test_a_way_that_another_rank_saw_is_opened_without_a_look(folder: Path) -> None:
    made(folder, 1)
    made(folder, 2, 1)
    blind = Catalog([LocalTier(folder)])

    assert open_and_close(blind, links_of((0, 1), (0, 2))) == [1, 2]
    with pytest.raises(TornError, match=r"manifest\.json is missing"):
        open_links(blind, links_of((0, 7)))


def test_what_one_rank_knows_of_an_older_snapshot_in_the_same_place_does_not_count(folder: Path) -> None:
    made(folder, 1)
    catalog = looked(folder)
    (old,) = catalog.chains(1)
    shutil.rmtree(folder / "step-000000000001")
    made_snapshot(folder, [tensor("one", ONE)], step=1, uid=UID)

    assert open_and_close(catalog, [Link(0, 1, UID)]) == [1]
    shutil.rmtree(folder / "step-000000000001")
    made_snapshot(folder, [tensor("one", ONE)], step=1, uid=OTHER_UID)
    with pytest.raises(Removed, match="step-000000000001 is not the snapshot that was to be read"):
        open_links(catalog, [Link(0, 1, UID)])
    assert catalog.was_removed(old)
    assert not catalog.was_removed([Link(0, 1, OTHER_UID)])


def test_a_folder_that_vanished_cannot_be_looked_at(folder: Path) -> None:
    made(folder, 1)
    catalog = looked(folder)
    shutil.rmtree(folder)

    with pytest.raises(DataError, match=str(folder)):
        catalog.look()
    assert catalog.steps() == [1]  # what was seen last
