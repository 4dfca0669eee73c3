"""Which copies go, where a new snapshot goes, and what nobody may take away meanwhile."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import steps_in

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.housekeeping import Housekeeping
from penstock.checkpoint.recipe import EncodingConfig
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes

WAY = EncodingConfig("progressive", 10, "balance")


def saved(folder: Path, steps: int, *, snap_dis: int = 10) -> None:
    """Save snapshots of steps 1, 2, ... and keep them all; some 40 kB each."""
    with SnapshotStore(folder, keep=Keep(last=None), snap_dis=snap_dis, threads=1, report=None) as store:
        weights = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
        for step in range(1, steps + 1):
            weights[::9] *= np.float32(1.001)
            store.save(step, {"weights": weights}).wait()


def of(*folders: Path, keep: Keep = Keep(last=1), fast_bytes: int | None = None) -> Housekeeping:  # noqa: B008
    return Housekeeping(Catalog([LocalTier(folder) for folder in folders]), keep, fast_bytes)


@pytest.fixture
def upkeeps() -> Iterator[list[Housekeeping]]:
    opened: list[Housekeeping] = []
    yield opened
    for housekeeping in opened:
        housekeeping.close()


def test_what_is_held_stays_with_all_it_needs_until_it_is_let_go_of(
    folder: Path, upkeeps: list[Housekeeping]
) -> None:
    saved(folder, 6, snap_dis=3)  # 1 < 2 < 3, 4 < 5 < 6
    housekeeping = of(folder)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()

    housekeeping.hold([2])
    housekeeping.hold([2])
    housekeeping.forget(0.0, 0)
    assert steps_in(folder) == [1, 2, 4, 5, 6]
    housekeeping.let_go([2])
    housekeeping.forget(0.0, 0)
    assert steps_in(folder) == [1, 2, 4, 5, 6], "it is held twice"
    housekeeping.let_go([2])
    housekeeping.forget(0.0, 0)

    assert steps_in(folder) == [4, 5, 6]


class Stuck(LocalTier):
    """A folder whose deletes wait for the test, or fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered, self.let = threading.Event(), threading.Event()
        self.fails_at: str | None = None

    def delete(self, folder: str) -> None:
        if folder == self.fails_at:
            raise DataError(f"{folder}: the tier is away")
        self.entered.set()
        assert self.let.wait(60)
        super().delete(folder)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Return where a test has something done that may have to wait."""
    with ThreadPoolExecutor() as executor:
        yield executor


def test_a_delete_that_hangs_on_the_slow_tier_holds_up_no_save_to_the_fast_one(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping], aside: ThreadPoolExecutor
) -> None:
    saved(tmp_path / "fast", 4, snap_dis=1)
    shutil.copytree(tmp_path / "fast", folder, ignore=shutil.ignore_patterns("*4"))
    slow = Stuck(folder)
    catalog = Catalog([LocalTier(tmp_path / "fast"), slow])
    housekeeping = Housekeeping(catalog, Keep(last=1), None)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()
    try:
        drain = aside.submit(housekeeping.forget, 0.0, 1)
        assert slow.entered.wait(60)

        assert aside.submit(housekeeping.why_not_fast, 1_000).result(60) == ""
        aside.submit(housekeeping.hold, [4]).result(60)
        aside.submit(housekeeping.forget, 0.0, 0).result(60)
        aside.submit(catalog.look).result(60)
        assert [copy.step for copy in catalog.on_tier(1)] == [3], "nobody plans on what goes"
        assert not drain.done()
    finally:
        slow.let.set()
    drain.result(60)
    assert steps_in(folder) == [3]


def test_a_place_waits_for_the_space_that_it_counts_on_whoever_makes_it(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping], aside: ThreadPoolExecutor
) -> None:
    saved(folder, 2, snap_dis=1)
    shutil.copytree(folder, tmp_path / "fast")
    fast = Stuck(tmp_path / "fast")
    one = max(path.stat().st_size for path in folder.rglob("part-*"))
    housekeeping = Housekeeping(Catalog([fast, LocalTier(folder)]), Keep(last=1), int(2.5 * one))
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()
    try:
        forgetting = aside.submit(housekeeping.forget, 0.0, 0)
        assert fast.entered.wait(60)
        placing = aside.submit(housekeeping.why_not_fast, one)
        assert not wait([placing], 0.05).done, "the space is not there yet"
    finally:
        fast.let.set()
    forgetting.result(60)
    assert placing.result(60) == ""
    assert steps_in(tmp_path / "fast") == [2]

    fast.entered.clear()
    fast.let.clear()
    try:
        placing = aside.submit(housekeeping.why_not_fast, 2 * one)
        assert fast.entered.wait(60)
        assert not wait([placing], 0.05).done
    finally:
        fast.let.set()
    assert placing.result(60) == ""
    assert steps_in(tmp_path / "fast") == []


def test_what_is_committed_while_one_decides_is_not_there_yet(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, 1)
    saved(tmp_path / "fast", 2, snap_dis=1)
    catalog = Catalog([LocalTier(tmp_path / "fast"), LocalTier(folder)])
    housekeeping = Housekeeping(catalog, Keep(last=1), None)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()
    manifest = catalog.manifest(0, 2)
    assert manifest is not None
    catalog.take_out(0, [2])
    stored = catalog.stored

    def then_commit(tier: int) -> Any:
        found = stored(tier)
        if tier == 1:
            catalog.add(0, manifest)
        return found

    monkeypatch.setattr(catalog, "stored", then_commit)

    assert housekeeping.next_to_drain(0.0) is None
    assert housekeeping.next_to_drain(0.0) == 2


def test_what_cannot_be_removed_is_known_again_with_all_it_needs(
    folder: Path, upkeeps: list[Housekeeping]
) -> None:
    saved(folder, 9, snap_dis=4)  # 1 < 2 < 3 < 4, 5 < 6 < 7 < 8, 9
    tier = Stuck(folder)
    tier.let.set()
    catalog = Catalog([tier])
    housekeeping = Housekeeping(catalog, Keep(last=1), None)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()

    tier.fails_at = "step-000000000006"
    with pytest.raises(DataError, match=r"that is to go could not be removed: .*the tier is away"):
        housekeeping.forget(0.0, 0)
    assert catalog.steps() == steps_in(folder) == [1, 2, 3, 4, 5, 6, 9]
    tier.fails_at = None
    housekeeping.forget(0.0, 0)
    assert catalog.steps() == steps_in(folder) == [9]


def test_a_snapshot_that_others_need_or_that_is_in_use_or_not_there_is_not_deleted(
    folder: Path, upkeeps: list[Housekeeping]
) -> None:
    saved(folder, 3)
    housekeeping = of(folder)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()

    with pytest.raises(
        ConfigError, match=r"step 1 cannot be deleted: step 3, 2 are stored as differences to it"
    ):
        housekeeping.delete(1)
    with pytest.raises(ConfigError, match=r"no snapshot of step 9.*nearest are of step 2 and 3"):
        housekeeping.delete(9)
    housekeeping.hold([3])
    with pytest.raises(ConfigError, match="step 3 cannot be deleted while"):
        housekeeping.delete(3)
    housekeeping.let_go([3])
    for step in (3, 2, 1):
        housekeeping.delete(step)

    assert steps_in(folder) == []


def test_both_folders_are_locked_and_swept_once_and_let_go_of_together(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping]
) -> None:
    fast = tmp_path / "fast"
    saved(folder, 1)
    for place in (folder, fast):
        (place / ".unfinished-step-000000000007-ab").mkdir(parents=True)
    first, second = of(fast, folder), of(fast, folder)
    upkeeps += [first, second]

    first.open_for_writing()
    first.open_for_writing()

    assert not any([*fast.glob(".unfinished*"), *folder.glob(".unfinished*")])
    with pytest.raises(ConfigError, match="one writer at a time"):
        second.open_for_writing()
    first.close()
    first.close()
    second.open_for_writing()


def test_a_folder_that_is_locked_by_another_leaves_the_other_folder_free(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping]
) -> None:
    """The slow tier is in use, the fast one was locked first: it must not stay locked."""
    slow_alone, both, fast_alone = of(folder), of(tmp_path / "fast", folder), of(tmp_path / "fast")
    upkeeps += [slow_alone, both, fast_alone]
    slow_alone.open_for_writing()

    with pytest.raises(ConfigError, match="one writer at a time"):
        both.open_for_writing()

    fast_alone.open_for_writing()


def test_a_new_snapshot_goes_to_the_fast_tier_until_that_is_full_of_what_is_not_drained(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping]
) -> None:
    fast = tmp_path / "fast"
    saved(fast, 3, snap_dis=1)
    held = sum(path.stat().st_size for path in fast.glob("step-*/*"))
    housekeeping = of(fast, folder, keep=Keep(last=None), fast_bytes=held + 50_000)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()

    assert housekeeping.why_not_fast(50_000) == ""
    refused = housekeeping.why_not_fast(50_001)
    assert refused.startswith(f"the snapshot takes up to 50 kB, and {fast} has space for ")
    assert refused.endswith(f", of which snapshots that are not drained yet take {format_bytes(held)}")
    assert housekeeping.next_to_drain(0.0) == 3
    assert steps_in(fast) == [1, 2, 3]

    with SnapshotStore(folder, fast=fast, keep=Keep(last=None), report=None) as store:
        housekeeping.close()
        store.drain()
    housekeeping.open_for_writing()
    assert housekeeping.next_to_drain(0.0) is None
    assert housekeeping.why_not_fast(50_001) == ""
    assert steps_in(fast) == [2, 3], "the oldest made space: it is on the slow tier"
    housekeeping.hold([2])
    assert "not drained" not in housekeeping.why_not_fast(held)
    assert steps_in(fast) == [2, 3]


def test_without_a_limit_the_fast_tier_is_full_when_its_disk_is(
    folder: Path, tmp_path: Path, upkeeps: list[Housekeeping], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "fast", 1)
    housekeeping = of(tmp_path / "fast", folder)
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 1_000)

    assert housekeeping.why_not_fast(1_000) == ""
    assert housekeeping.why_not_fast(1_001)


def test_space_is_asked_of_the_slow_tier_and_counts_what_this_training_took_so_far(
    folder: Path, upkeeps: list[Housekeeping], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, 3, snap_dis=3)
    housekeeping = of(folder, keep=Keep(last=2))
    upkeeps.append(housekeeping)
    housekeeping.open_for_writing()
    stored = [path.stat().st_size for path in sorted(folder.rglob("part-*"))]

    needed = housekeeping.check_space(40_000, range(4, 30), EncodingConfig("progressive", 3, "balance"))

    # The largest is a baseline as those before; deltas are counted as they were, not as large as the state.
    assert abs(needed.largest_bytes - stored[0]) < 0.02 * stored[0]
    assert needed.kept_bytes < stored[0] + 2 * stored[1] + stored[0] * 1.1
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 1_000)
    with pytest.raises(ConfigError, match=r"has 1 kB free, and snapshots will need .* is there already"):
        housekeeping.check_space(40_000, range(4, 30), WAY)
