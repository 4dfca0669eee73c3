"""Running a command of the user's as a shell would: signals are passed on, its exit status is kept, nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from penstock.errors import ConfigError

#: How long a command that was ended may take to be gone.
_GONE_SECONDS = 5.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that is missing, or whose program is, before anything is written for it. Raises: ConfigError."""
    if not command:
        raise ConfigError("no command is given: put it behind --, for example -- python train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]!r} is not found or cannot be executed: check its name and PATH")


class Interrupts:
    """Passes the first Ctrl-C or SIGTERM on to the command, and kills it at the second."""

    def __init__(self) -> None:
        #: The first signal that came.
        self.first: int | None = None
        #: Process ids to tell, and to kill; set while a command runs.
        self.targets: Callable[[], list[int]] = list
        self.killed: Callable[[], list[int]] = list
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _INTERRUPTS:
            self._before[number] = signal.signal(number, self._on)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on(self, number: int, _frame: FrameType | None) -> None:
        if self.first is not None:
            _send(signal.SIGKILL, self.killed())
            return
        self.first = number
        if number == signal.SIGINT and _is_in_foreground():
            print("penstock: waiting for the command to end; Ctrl-C again kills it", file=sys.stderr)
        else:
            self.pass_on()

    def pass_on(self) -> None:
        """Send the signal that came on to the command."""
        if self.first is not None:
            _send(self.first, self.targets())


def _is_in_foreground() -> bool:
    """Tell whether a Ctrl-C came from the terminal, which gives it to the command as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    stdout: int | None,
    interrupts: Interrupts,
    *,
    is_traced: bool,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, or strace with one; whatever happens inside, none of it is left in the end."""
    process = subprocess.Popen(command, env=environment, stdout=stdout)

    def targets() -> list[int]:
        return children(process.pid) if is_traced else [process.pid]

    def everything() -> list[int]:
        return [*descendants(process.pid), *([] if is_traced else [process.pid])]

    interrupts.targets, interrupts.killed = targets, everything
    if interrupts.first is not None:  # while it was being started
        interrupts.pass_on()
    try:
        yield process
    except BaseException:
        _send(signal.SIGTERM, targets())
        try:
            process.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            _send(signal.SIGKILL, [*everything(), process.pid])
        raise
    finally:
        interrupts.targets = interrupts.killed = list
        process.wait()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    found: list[int] = []
    folder = f"/proc/{pid}/task"
    with suppress(OSError):
        # Without pathlib, which takes four times as long: trees are looked through every second.
        for thread in os.listdir(folder):
            with suppress(OSError), open(f"{folder}/{thread}/children", "rb", buffering=0) as listing:
                found += map(int, listing.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return those processes, theirs, and so on."""
    own = children(pid)
    return [*own, *(each for child in own for each in descendants(child))]


def _send(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def status_of(returncode: int) -> int:
    """Return a command's exit status as shells have it: 128 and the number of the signal that ended it."""
    return 128 - returncode if returncode < 0 else returncode
