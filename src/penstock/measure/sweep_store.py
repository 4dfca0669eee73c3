"""Finished points on disk: a line of JSON each, durable before the next one is begun.

A line that was cut off by a crash is recognised by its missing end and thrown away; anything else that is no such line
is damage, and said to be.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.closing import Closeable
from penstock.errors import ConfigError, FormatError
from penstock.files import sync_folder
from penstock.measure.sweep import Outcome, Task

NAME = "points.jsonl"


class KeptPoints(Closeable):
    """The finished tasks of a folder, of whatever sweeps; one process at a time writes.

    Raises: ConfigError if another process holds the folder, or it cannot be made; FormatError naming file and line of
    what is no such line; OSError if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be a folder ({error.strerror}): give another one with --out"
            ) from error
        self.path = folder / NAME
        is_new = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_new:
                sync_folder(folder)
            self._kept = self._read()
        except BlockingIOError as error:
            os.close(self._file)
            raise ConfigError(
                f"{folder} is in use by another penstock plan: wait for it, or give another folder with --out"
            ) from error
        except BaseException:
            os.close(self._file)
            raise
        self._is_closed = False

    def kept(self) -> dict[str, Outcome]:
        """Return what is kept, by key, without failures: these are tried again."""
        return {key: outcome for key, outcome in self._kept.items() if outcome.status != "failed"}

    def keep(self, key: str, task: Task, outcome: Outcome) -> None:
        """Append one line; it has reached the disk when this returns."""
        line = json.dumps(
            {"key": key, "policy": task.policy, **asdict(task.point), "outcome": asdict(outcome)},
            allow_nan=False,
        )
        data = f"{line}\n".encode()
        begin = os.fstat(self._file).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except BaseException:
            # Half a line, of a full disk or a Ctrl-C, would swallow the next one.
            os.ftruncate(self._file, begin)
            raise
        self._kept[key] = outcome

    def close(self) -> None:
        """Give the folder back. Twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._file)

    def _read(self) -> dict[str, Outcome]:
        data = self.path.read_bytes()
        whole = data.rpartition(b"\n")[0] + b"\n" if b"\n" in data else b""
        kept = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                values: dict[str, Any] = json.loads(line)
                kept[str(values["key"])] = Outcome(**values["outcome"])
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{self.path}, line {number} is no kept point ({error!r}): delete the line, or give another folder "
                    "with --out"
                ) from error
        if len(whole) < len(data):
            os.ftruncate(self._file, len(whole))
        return kept
