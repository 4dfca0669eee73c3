"""A store of snapshots small enough to be seen to be right, and the ways in which it can be made wrong.

    FOLDER/step-000000007/{weights, moments, manifest.json}     a snapshot
    FOLDER/.unfinished-...                                      a save or a delete on the way

These show that the harness sees what it is there to see: the right one stands every fault, each wrong one falls.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from tests.checkpoint.crash.subject import State

MANIFEST = "manifest.json"
STEP = "step-"
UNFINISHED = ".unfinished-"


class Broken(Enum):
    """What is wrong with the store."""

    NOTHING = "nothing"
    # What a power cut finds.
    NO_FSYNC = "no fsync of files"
    NO_FOLDER_FSYNC = "no fsync of the snapshot's folder"
    NO_PARENT_FSYNC = "no fsync of the store's folder"
    RENAME_BEFORE_FSYNC = "rename before fsync"
    RETENTION_FIRST = "old snapshots deleted before the new one is committed"
    DELETE_UNSYNCED = "files of a snapshot removed before its renaming is synced"
    # What a power cut finds after a death.
    SWEEP_UNSYNCED = "leavings removed before the names that they have are synced"
    # What any death on the way finds.
    MANIFEST_FIRST = "manifest written before the parts, in the open"
    IN_PLACE = "one snapshot overwritten in place"
    DELETE_IN_PLACE = "files of a snapshot removed one by one in the open"
    NEVER_SWEEPS = "unfinished saves never removed"
    # What a failing call finds.
    SWALLOWS = "errors of writes and syncs swallowed"
    NAMES_NOTHING = "errors that name no file"
    STAYS_FAILED = "no save works after one failed"


@dataclass(frozen=True)
class StandInSubject:
    """The stand-in with something wrong, or nothing."""

    broken: Broken

    @property
    def keep(self) -> int:
        return 1 if self.broken is Broken.IN_PLACE else 2

    def state(self, step: int) -> State:
        generator = np.random.default_rng(step)
        return {"weights": generator.bytes(9_000), "moments": generator.bytes(300)}

    def open(self, folder: Path) -> StandIn:
        return StandIn(folder, self)

    def steps(self, folder: Path) -> list[int]:
        names = [name for name in os.listdir(folder) if name.startswith(STEP)]
        if self.broken in (Broken.MANIFEST_FIRST, Broken.DELETE_IN_PLACE, Broken.IN_PLACE):
            names = [name for name in names if (folder / name / MANIFEST).exists()]
        return sorted(int(name.removeprefix(STEP)) for name in names)

    def leftovers(self, folder: Path, steps: list[int]) -> list[str]:
        explained = {_name(step) for step in steps}
        return [name for name in os.listdir(folder) if name not in explained]


class StandIn:
    """An open store; the subject says what it leaves out."""

    def __init__(self, folder: Path, subject: StandInSubject) -> None:
        self._folder, self._subject = folder, subject
        self._keep, self._broken = subject.keep, subject.broken
        self._failed = False
        try:
            if not folder.exists():
                folder.mkdir()
            _sync(folder.parent)  # also where an earlier process made it and died before this
            if self._broken is not Broken.SWEEP_UNSYNCED:
                _sync(folder)  # the names that such a process gave: from here on they are durable, too
            left = [name for name in os.listdir(folder) if name.startswith(UNFINISHED)]
            for name in left if self._broken is not Broken.NEVER_SWEEPS else ():
                shutil.rmtree(folder / name)
        except OSError as failure:
            raise OSError(f"{folder} cannot be opened: {failure}") from failure

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def restore(self, step: int) -> State:
        folder = self._folder / _name(step)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        parts = {name: (folder / name).read_bytes() for name in manifest["parts"]}
        for name, checksum in manifest["parts"].items():
            if zlib.crc32(parts[name]) != checksum:
                raise ValueError(f"{folder / name} is damaged")
        return parts

    def save(self, step: int, state: State) -> None:
        if self._failed and self._broken is Broken.STAYS_FAILED:
            raise OSError(f"{self._folder}: an earlier save failed")
        draft = self._folder / f"{UNFINISHED}{step}"
        try:
            if self._broken is Broken.RETENTION_FIRST:
                self._retain(self._keep - 1)
            if self._broken is Broken.MANIFEST_FIRST:
                self._write_in_the_open(self._folder / _name(step), state)
            elif self._broken is Broken.IN_PLACE:
                self._overwrite(step, state)
            else:
                self._commit(draft, self._folder / _name(step), state)
            self._retain(self._keep)
        except OSError as failure:
            self._failed = True
            with contextlib.suppress(OSError):
                shutil.rmtree(draft)
            if self._broken is Broken.NAMES_NOTHING:
                raise OSError(f"saving failed: {failure.strerror}") from failure
            raise OSError(f"{self._folder / _name(step)} cannot be written: {failure}") from failure

    def _commit(self, draft: Path, final: Path, state: State) -> None:
        draft.mkdir()
        for name, data in state.items():
            self._write(draft / name, data)
        self._write(draft / MANIFEST, _manifest(state))
        if self._broken is not Broken.NO_FOLDER_FSYNC:
            _sync(draft)
        draft.rename(final)
        if self._broken is Broken.RENAME_BEFORE_FSYNC:
            for file in final.iterdir():
                _sync(file)
        if self._broken is not Broken.NO_PARENT_FSYNC:
            _sync(self._folder)

    def _write_in_the_open(self, folder: Path, state: State) -> None:
        folder.mkdir()
        self._write(folder / MANIFEST, _manifest(state))
        for name, data in state.items():
            self._write(folder / name, data)
        _sync(folder)
        _sync(self._folder)

    def _overwrite(self, step: int, state: State) -> None:
        old = self._subject.steps(self._folder)
        folder = self._folder / _name(old[0] if old else step)
        folder.mkdir(exist_ok=True)
        for name, data in state.items():
            self._write(folder / name, data)
        self._write(folder / MANIFEST, _manifest(state))
        _sync(folder)
        folder.rename(self._folder / _name(step))
        _sync(self._folder)

    def _write(self, file: Path, data: bytes) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            left = memoryview(data)
            while left:
                try:
                    left = left[os.write(descriptor, left[:4_000]) :]
                except OSError:
                    if self._broken is not Broken.SWALLOWS:
                        raise
                    left = left[4_000:]
            if self._broken not in (Broken.NO_FSYNC, Broken.RENAME_BEFORE_FSYNC):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _retain(self, keep: int) -> None:
        steps = self._subject.steps(self._folder)
        for step in steps[: max(0, len(steps) - keep)]:
            self._delete(step)

    def _delete(self, step: int) -> None:
        folder, gone = self._folder / _name(step), self._folder / f"{UNFINISHED}delete-{step}"
        if self._broken is Broken.DELETE_IN_PLACE:
            gone = folder
        else:
            folder.rename(gone)
            if self._broken is not Broken.DELETE_UNSYNCED:
                _sync(self._folder)
        for file in sorted(gone.iterdir(), reverse=True):
            file.unlink()
        gone.rmdir()


def _name(step: int) -> str:
    return f"{STEP}{step:09d}"


def _manifest(state: State) -> bytes:
    return json.dumps({"parts": {name: zlib.crc32(data) for name, data in state.items()}}).encode()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
