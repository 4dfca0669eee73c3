"""What another process removes while it is read, as retention does, is not damaged: one looks again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import opened, same, training
from tests.ranks.in_memory import run

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint.files.catalog import MOST_LOOKS
from penstock.checkpoint.files.reading import Chain
from penstock.checkpoint.interop.exporting import open_readable
from penstock.checkpoint.restoring import Restorer
from penstock.checkpoint.sync.wire import Refresher
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.remote import RemoteTier
from penstock.errors import ConfigError, DataError
from penstock.ranks import Ranks

Before = Callable[..., None]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """Return what has something done just before a step's file is first opened or read, by whichever thread."""

    def arrange(step: int, action: Callable[[], None], *, how: str = "open", tier: Any = LocalTier) -> None:
        untouched = getattr(tier, how)
        actions = [action]

        def act_first(self: Any, folder: str, file: str) -> Any:
            if folder == f"step-{step:012d}" and actions:
                actions.pop()()
            return untouched(self, folder, file)

        monkeypatch.setattr(tier, how, act_first)

    return arrange


def save(folder: Any, *steps: int, keep: Keep = Keep(last=None), **settings: Any) -> None:  # noqa: B008
    with SnapshotStore(folder, keep=keep, codec="stored", report=None, threads=1, **settings) as store:
        for step in steps:
            store.save(step, training(step)).wait()


def replaces_all_by(folder: Any, step: int) -> Callable[[], None]:
    """Return what saves a snapshot and keeps none of the others."""
    return lambda: save(folder, step, keep=Keep(last=1), scheme="complete")


# -- Restoring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(1, 2), (2,)])
@pytest.mark.parametrize("scheme", ["complete", "progressive"])
@pytest.mark.parametrize("how", ["open", "read"])
def test_a_restore_of_the_latest_takes_what_is_the_latest_by_then(
    folder: Path, before: Before, scheme: Any, how: str, steps: tuple[int, ...]
) -> None:
    save(folder, *steps, scheme=scheme)
    lines: list[str] = []
    with opened(folder, report=lines.append) as store:
        before(2, replaces_all_by(folder, 3), how=how)
        restored = store.restore()
    assert (restored.step, lines) == (3, [])
    assert same(restored.state, training(3))


def test_a_restore_of_a_step_says_that_it_was_removed_meanwhile_and_names_the_nearest(
    folder: Path, before: Before
) -> None:
    save(folder, 1, 2, 3)
    lines: list[str] = []
    with opened(folder, report=lines.append) as store:
        before(2, replaces_all_by(folder, 4))
        with pytest.raises(
            ConfigError, match=r"step 2 in .* was removed meanwhile.*; the nearest are of step 4$"
        ):
            store.restore(2)
        before(4, lambda: shutil.rmtree(folder / "step-000000000004"))
        with pytest.raises(ConfigError, match="no snapshot of step 4: it was removed meanwhile"):
            store.restore(4)
    assert lines == []


def test_a_step_that_is_saved_anew_meanwhile_is_restored_as_it_is_by_then(
    folder: Path, before: Before
) -> None:
    save(folder, 1, 2, scheme="complete")
    new = {**training(2), "anew": np.arange(5)}

    def save_anew() -> None:
        with opened(folder) as other:
            other.rewind(1)
            other.save(2, new).wait()

    with opened(folder) as store:
        before(2, save_anew)
        assert same(store.restore(2).state, new)


def test_a_copy_that_left_the_fast_tier_meanwhile_is_read_from_the_slow_one_and_nothing_is_told(
    folder: Path, tmp_path: Path, before: Before
) -> None:
    save(folder, 1, 2, fast=tmp_path / "fast")
    lines: list[str] = []
    with SnapshotStore(folder, fast=tmp_path / "fast", report=lines.append) as store:
        before(2, lambda: shutil.rmtree(tmp_path / "fast" / "step-000000000002"))
        assert same(store.restore(2).state, training(2))
        before(1, lambda: shutil.rmtree(tmp_path / "fast" / "step-000000000001"))
        assert [one.condition for one in store.verify()] == ["intact", "intact"]
    assert lines == []


def test_on_an_object_store_what_goes_while_blocks_are_read_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, before: Before, folder: Path
) -> None:
    address = f"memory://races-{folder.parent.name}/runs"
    save(address, 1, 2, scheme="complete")
    lines: list[str] = []
    with SnapshotStore(address, report=lines.append) as store:
        # Once the parts are open: each read is a request of its own.
        begin = Chain.__init__
        actions = [replaces_all_by(address, 3)]

        def remove_first(self: Chain, links: Any) -> None:
            begin(self, links)
            if actions:
                actions.pop()()

        monkeypatch.setattr(Chain, "__init__", remove_first)
        restored = store.restore()
    assert (restored.step, lines) == (3, [])
    assert same(restored.state, training(3))


def test_all_ranks_look_again_together(folder: Path, before: Before) -> None:
    save(folder, 1, 2, scheme="complete")
    before(2, replaces_all_by(folder, 3))

    def part(ranks: Ranks) -> tuple[int, bool]:
        with SnapshotStore(folder, ranks=lambda: ranks, report=None, threads=1) as store:
            restored = store.restore()
            return restored.step, same(restored.state, training(3))

    assert run(2, part) == [(3, True), (3, True)]


def test_a_rank_that_looked_earlier_restores_what_rank_0_sees_now(folder: Path) -> None:
    """Both listed step 2 before a training went back and saved it anew."""
    save(folder, 1, 2, scheme="complete")
    new = {**training(2), "anew": np.arange(5)}

    def part(ranks: Ranks) -> bool:
        with SnapshotStore(folder, ranks=lambda: ranks, report=None, threads=1) as store:
            store.list()
            ranks.all_gather("the list", None)
            if ranks.rank == 0:
                with opened(folder) as other:
                    other.rewind(1)
                    other.save(2, new).wait()
            ranks.all_gather("the other training", None)
            return same(store.restore(2).state, new)

    assert run(2, part) == [True, True]


def test_ranks_do_not_restore_parts_of_two_snapshots_of_one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is saved anew after rank 0 has opened its files, and before rank 1 does."""
    save(folder, 1, 2, scheme="complete")
    new = {name: np.asarray(value) + 1 for name, value in training(2).items()}
    is_saved = threading.Event()
    untouched = Restorer._load

    def part(ranks: Ranks) -> bool:
        with SnapshotStore(folder, ranks=lambda: ranks, report=None, threads=1) as store:
            if ranks.rank == 1:
                tier = store._catalog.tiers[0]
                read = tier.read

                def read_later(*those: Any) -> bytes:
                    assert is_saved.wait(60)
                    return read(*those)

                monkeypatch.setattr(tier, "read", read_later)
            else:

                def load_then_save(self: Restorer, *those: Any) -> Any:
                    loaded = untouched(self, *those)
                    if not is_saved.is_set():
                        with opened(folder) as other:
                            other.rewind(1)
                            other.save(2, new).wait()
                        is_saved.set()
                    return loaded

                monkeypatch.setattr(store._restorer, "_load", load_then_save.__get__(store._restorer))
            return same(store.restore(2).state, new)

    assert run(2, part) == [True, True]


def test_one_does_not_look_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that saves faster than anybody can read."""
    save(folder, 1, scheme="complete")
    asked: list[int] = []
    untouched = LocalTier.open

    def open_too_late(self: LocalTier, file_folder: str, file: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.append(int(file_folder[5:]))
            replaces_all_by(folder, asked[-1] + 1)()
        return untouched(self, file_folder, file)

    monkeypatch.setattr(LocalTier, "open", open_too_late)
    with opened(folder) as store:
        with pytest.raises(DataError, match=f"the snapshot of step {MOST_LOOKS} was removed meanwhile"):
            store.restore()
        assert asked == list(range(1, MOST_LOOKS + 1))


# -- Looking after ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["open", "read"])
@pytest.mark.parametrize("call", ["list", "verify"])
def test_what_is_removed_while_it_is_looked_at_is_not_told_as_damaged(
    folder: Path, before: Before, call: str, how: str
) -> None:
    save(folder, 1, 2, 3, snap_dis=2)
    with opened(folder) as store:
        before(2, replaces_all_by(folder, 4), how=how)
        found = store.list() if call == "list" else store.verify()
    assert {one.condition for one in found} == {"intact"}
    assert 2 not in [one.step for one in found]


def test_a_step_that_is_removed_while_it_is_verified_is_told_with_the_nearest(
    folder: Path, before: Before
) -> None:
    save(folder, 1, 2)
    with opened(folder) as store:
        before(2, replaces_all_by(folder, 4))
        with pytest.raises(ConfigError, match=r"step 2 in .* was removed meanwhile"):
            store.verify(2)


def test_what_is_torn_is_told_as_torn_though_others_are_removed_meanwhile(
    folder: Path, before: Before
) -> None:
    save(folder, 1, 2, 3, scheme="complete")
    (folder / "step-000000000003" / "part-00000.pst").unlink()
    with opened(folder) as store:
        before(1, lambda: shutil.rmtree(folder / "step-000000000001"))
        assert [(one.step, one.condition) for one in store.list()] == [(2, "intact"), (3, "torn")]


# -- On the wire -----------------------------------------------------------------------------------------------


def test_a_refresh_to_the_latest_sends_what_is_the_latest_when_it_begins(
    folder: Path, before: Before
) -> None:
    save(folder, 1, 2, scheme="complete")
    state = training(1)
    with opened(folder) as store:
        messages = store.refresh(None)
        before(2, replaces_all_by(folder, 3))
        assert Refresher(state).apply(messages).step == 3
        with pytest.raises(ConfigError, match="no snapshot of step 2"):
            store.refresh(None, 2)
        save(folder, 4, scheme="complete")
        messages = store.refresh(None, 3)
        before(3, replaces_all_by(folder, 5))
        with pytest.raises(ConfigError, match=r"step 3 in .* was removed meanwhile"):
            next(messages)


def test_a_refresh_of_what_is_removed_while_it_is_sent_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"memory://races-{folder.parent.name}/wire"
    save(address, 1, scheme="complete")
    with SnapshotStore(address, report=None) as store:
        messages = store.refresh(None)
        next(messages)
        replaces_all_by(address, 2)()
        with pytest.raises(DataError, match="the snapshot of step 1 was removed meanwhile"):
            list(messages)


def test_the_manifest_of_a_remote_snapshot_that_goes_is_not_missed(folder: Path, before: Before) -> None:
    address = f"memory://races-{folder.parent.name}/list"
    save(address, 1, 2, scheme="complete")
    with SnapshotStore(address, report=None) as store:
        before(1, replaces_all_by(address, 3), how="read", tier=RemoteTier)
        assert {one.condition for one in store.list()} <= {"intact"}


# -- Exporting -------------------------------------------------------------------------------------------------


def test_an_export_takes_what_is_the_latest_by_then(folder: Path, before: Before) -> None:
    save(folder, 1, 2, scheme="complete")
    before(2, replaces_all_by(folder, 3))
    with open_readable([LocalTier(folder)]) as (step, source):
        assert step == 3
        assert source.read("weight").tobytes() == training(3)["weight"].tobytes()
    before(3, replaces_all_by(folder, 4))
    with pytest.raises(ConfigError, match=r"step 3 in .* was removed meanwhile"):
        open_readable([LocalTier(folder)], 3).__enter__()
