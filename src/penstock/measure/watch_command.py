"""Watching a command from outside: a run as a folder, of what devices and processes did and what loaders recorded."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from penstock.measure.running import Interrupts, check_command, running, status_of
from penstock.measure.sampling import Sampler
from penstock.recordings.devices import FILE, DeviceWriter, check_new
from penstock.trace.file import RUN_FOLDER
from penstock.trace.trace import JSON

#: Rows of so long are written together.
_WRITE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What came of a command.

    exit_status: its own; 128 and the number of the signal that ended it, as shells have it.
    """

    exit_status: int
    interrupted_by: int | None


def watch_command(
    command: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    period_seconds: float = 0.1,
    report: Callable[[str], None],
    stdout: int | None = None,
) -> Watched:
    """Run a command and sample the host and its processes; Penstock's loaders inside write their traces to the folder.

    folder: of the run, made if it is missing; `penstock.recordings.devices` has the file in it.
    period_seconds: between samples. report: gets a line where the record breaks off, as on a full disk; the command
        continues. stdout: of the command, as for subprocess.
    Raises: ConfigError if there is no such command, or the folder has another run; OSError if the command cannot be
        started, or the folder cannot be written.
    """
    check_command(command)
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    check_new(path)
    environment = {**os.environ, RUN_FOLDER: str(path)}
    with (
        Interrupts() as interrupts,
        running(command, environment, stdout, interrupts, is_traced=False) as process,
    ):
        _sample(process, path, command, period_seconds, report)
    return Watched(status_of(process.returncode), interrupts.first)


def _sample(
    process: subprocess.Popen[bytes],
    folder: Path,
    command: Sequence[str],
    period_seconds: float,
    report: Callable[[str], None],
) -> None:
    """Sample until the process ends."""
    sampler = Sampler(process.pid)
    meta: dict[str, JSON] = {
        "command": list(command),
        "started": datetime.now().astimezone().isoformat(),
        "host": os.uname().nodename,
        "cores": os.cpu_count() or 1,
        "ticks_per_second": os.sysconf("SC_CLK_TCK"),
    }
    ended = _Ended(process)
    try:
        with DeviceWriter(folder / FILE, sampler.columns, meta) as writer:
            sampler.sample()
            while not ended.within(period_seconds):
                if sampler.sample() * period_seconds >= _WRITE_SECONDS:
                    writer.append(sampler.rows())
            sampler.sample(everything=True)
            writer.append(sampler.rows())
            writer.close(status_of(process.wait()))
    except OSError as error:
        report(f"the record breaks off here; the command continues: {error}")
        process.wait()
    finally:
        sampler.close()
        ended.close()


class _Ended:
    """Waits for a process to end, a period at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._number = -1
        self._poll = select.poll()
        with suppress(OSError):  # a kernel without them: subprocess looks again and again
            self._number = os.pidfd_open(process.pid)
            self._poll.register(self._number, select.POLLIN)

    def within(self, seconds: float) -> bool:
        """Wait so long at most; return whether it has ended."""
        if self._number >= 0:
            return bool(self._poll.poll(1000 * seconds))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
            self._number = -1
