"""One writer per folder of snapshots."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from pathlib import Path

from penstock.checkpoint.tiers.local import OpenFile
from penstock.errors import ConfigError, DataError
from penstock.ranks.transport_of_job import launcher_of_several

_FILE = ".lock"


class WriterLock(OpenFile):
    """Held by the process that writes snapshots into a folder; the system lets go of it when the process ends.

    `close` lets go of the file alone, in a forked process: its parent holds the lock on.
    """

    def __init__(self, folder: Path) -> None:
        """Take it. Raises: ConfigError naming who holds it; DataError if the folder refuses."""
        self._path = path = folder / _FILE
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        try:
            status = os.fstat(self._descriptor)
            #: Whatever its path is called.
            self._file = status.st_dev, status.st_ino
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if any(lock._file == self._file for lock in list(_held) if lock._descriptor >= 0):
                    raise ConfigError(
                        f"{folder} is being written by this very process, {_this_process()}: one writer at a time; "
                        "close() the store that saved there before, or save with that"
                    ) from None
                holder = (
                    os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                )
                raise ConfigError(
                    f"{folder} is being written by {holder}: one writer at a time; wait for it, end it, "
                    f"or give this training a folder of its own{_job_clause()}"
                ) from None
            # For the message above alone: a full disk must not keep anybody from deleting snapshots.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{_this_process()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise DataError(f"{path}: {error.strerror}") from error
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def release(self) -> None:
        if self._descriptor >= 0:
            # Not by closing alone: a process that is just being started has the descriptor, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _job_clause() -> str:
    """Return what to say where the other writer may be another rank of the same job, or ""."""
    if (launcher := launcher_of_several()) is None:
        return ""
    rank, size, _ = launcher
    return (
        f"; this is rank {os.environ.get(rank, '?')} of {os.environ[size]}: if all of them save together, "
        "leave out ranks=alone"
    )


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close what a fork copied: a loader's worker that outlives its trainer must not hold the trainer's lock."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
