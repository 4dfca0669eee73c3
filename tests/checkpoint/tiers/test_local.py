"""A folder as a place for snapshots: what only a file system can do to it. The contract's tests are beside."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import DataError

UID = "a1"


def save(tier: LocalTier, folder: str, data: bytes = b"data") -> None:
    draft = tier.begin(folder, UID)
    writer = draft.create("part")
    writer.write(np.frombuffer(data, np.uint8))
    writer.finish()
    draft.commit(b"manifest")


def test_the_folders_above_are_made(tmp_path: Path) -> None:
    save(LocalTier(tmp_path / "runs" / "a"), "step-1")

    assert (tmp_path / "runs" / "a" / "step-1" / "part").read_bytes() == b"data"


def test_a_relative_path_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra, for one, changes the folder once the program has begun."""
    monkeypatch.chdir(tmp_path)
    tier = LocalTier("runs/a")
    assert tier.name == "runs/a"
    assert tier.where("step-1") == "runs/a/step-1"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    save(tier, "step-1")

    assert (tmp_path / "runs" / "a" / "step-1" / "part").read_bytes() == b"data"
    assert os.listdir(".") == []
    assert tier.name == str(tmp_path / "runs" / "a"), "what was given leads elsewhere now"
    assert tier.where("step-1") == str(tmp_path / "runs" / "a" / "step-1")
    assert tier.folders() == ["step-1"]

    os.rmdir(tmp_path / "elsewhere")
    assert tier.name == str(tmp_path / "runs" / "a")
    with pytest.raises(DataError, match=r"^runs/b: No such file or directory"):
        LocalTier("runs/b")


@pytest.mark.parametrize("below", [False, True])
def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, below: bool) -> None:
    (tmp_path / "store").write_bytes(b"")

    with pytest.raises(DataError, match="store"):
        LocalTier(tmp_path / "store" / "a" if below else tmp_path / "store")


CALLS: dict[str, Callable[[LocalTier], object]] = {
    "folders": lambda tier: tier.folders(),
    "begin": lambda tier: tier.begin("step-2", UID),
    "sweep": lambda tier: tier.sweep(),
    "free_bytes": lambda tier: tier.free_bytes(),
}


@for_each("call", CALLS)
def test_a_folder_that_vanished_is_named(tmp_path: Path, call: str) -> None:
    tier = LocalTier(tmp_path / "store")
    tier.make()
    shutil.rmtree(tier.path)

    with pytest.raises(DataError, match=r"store is gone: the folder with the snapshots was moved or removed"):
        CALLS[call](tier)


@pytest.mark.parametrize("call", ["folders", "delete", "free_bytes", "sweep", "make"])
def test_a_folder_that_cannot_be_asked_for_is_named(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of a network file system that came back with other handles."""
    tier = LocalTier(tmp_path)
    tier.make()
    stat = os.stat

    def refuse(path: Any, *those: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *those, **named)

    monkeypatch.setattr(os, "stat", refuse)

    with pytest.raises(DataError, match=rf"{tmp_path}.*: Stale file handle"):
        getattr(tier, call)(*(["step-1"] if call == "delete" else []))


def test_a_rank_that_sees_another_folder_than_rank_0_is_told_so(tmp_path: Path) -> None:
    LocalTier(tmp_path / "one").begin("step-1", UID)
    elsewhere = LocalTier(tmp_path / "other").begin("step-1", UID, join=True)

    with pytest.raises(DataError, match=r"other is another folder here .* all ranks must see the same one"):
        elsewhere.create("part")


def test_a_file_is_written_whole_from_any_number_of_pieces_of_any_size(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pieces = [draw.integers(0, 256, size, np.uint8) for size in draw.integers(0, 40, 3000)]
    pieces.append(draw.integers(0, 256, 20 << 20, np.uint8))
    draft = LocalTier(tmp_path).begin("step-1", UID)
    writer = draft.create("part")

    writer.write(*pieces)
    writer.write()
    writer.write(pieces[0], pieces[-1])
    writer.finish()
    draft.commit(b"manifest")

    expected = np.concatenate([*pieces, pieces[0], pieces[-1]]).tobytes()
    assert LocalTier(tmp_path).read("step-1", "part") == expected


def test_a_system_that_takes_a_few_bytes_at_a_time_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(descriptor: int, buffers: list[memoryview]) -> int:
        return os.write(descriptor, buffers[0][:7])

    monkeypatch.setattr(os, "writev", some)
    pieces = [np.frombuffer(bytes(range(size)), np.uint8) for size in (1, 7, 8, 20, 0, 3)]
    writer = LocalTier(tmp_path).begin("step-1", UID).create("part")
    writer.write(*pieces)
    writer.finish()

    (part,) = tmp_path.glob("*/part")
    assert part.read_bytes() == np.concatenate(pieces).tobytes()


def test_a_draft_whose_folder_vanished_says_so_and_aborts(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "store")
    draft = tier.begin("step-1", UID)
    shutil.rmtree(tier.path)

    with pytest.raises(DataError, match="unfinished-step-1"):
        draft.create("part")
    with pytest.raises(DataError, match="unfinished-step-1"):
        draft.commit(b"manifest")
    draft.abort()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for, and /dev/zero has no end."""
    tier = LocalTier(tmp_path)
    (tmp_path / "step-1").mkdir()
    file = tmp_path / "step-1" / "part"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()

    with pytest.raises(DataError, match="step-1/part is not a plain file"):
        tier.read("step-1", "part")
    with pytest.raises(DataError, match="step-1/part is not a plain file"):
        tier.open("step-1", "part")


def test_a_snapshot_that_was_moved_to_another_disk_and_linked_is_read_and_its_link_deleted(
    tmp_path: Path,
) -> None:
    tier = LocalTier(tmp_path / "store")
    save(tier, "step-1")
    (tmp_path / "store" / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "store" / "step-1").symlink_to(tmp_path / "elsewhere")
    assert tier.folders() == ["step-1"]
    assert tier.read("step-1", "part") == b"data"

    tier.delete("step-1")

    assert os.listdir(tmp_path / "store") == []
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["manifest.json", "part"]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_whatever_bears_the_name_of_something_unfinished_is_swept(tmp_path: Path, kind: str) -> None:
    tier = LocalTier(tmp_path / "store")
    tier.make()
    (tmp_path / "elsewhere").mkdir()
    left = tmp_path / "store" / ".unfinished-step-1-a1"
    if kind == "file":
        left.write_bytes(b"")
    elif kind == "link":
        left.symlink_to(tmp_path / "elsewhere")
    else:
        left.mkdir()
        (left / "part").write_bytes(b"")

    assert tier.sweep() == [left.name]

    assert os.listdir(tmp_path / "store") == []
    assert (tmp_path / "elsewhere").is_dir()


def test_what_does_not_belong_to_the_store_is_left_alone(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    save(tier, "step-1")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / ".hidden").mkdir()

    tier.sweep()
    tier.delete("step-1")

    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.txt"]
    assert tier.folders() == []
