"""Runs saves in a process of their own under strace: recorded, counted, killed or made to fail at the nth call.

strace is attached once the process has imported everything and waits, so that a trial costs a fork (some 50 ms) and
its first traced call is the first of the store's opening. strace counts calls by thread and by the call's name, so a
site is a pair (name, n): the nth call of that name in any thread.

What is not covered: a close that fails is not carried out, so that its descriptor stays open; calls that are no
file's (memory, locks) fail nowhere, and a death at one of them is the same as at the next that is a file's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 30.0

#: The calls in which a store can meet a file system. A question mark: not on every architecture.
FILE_CALLS = (
    "?open,openat,?creat,close,read,pread64,readv,preadv,write,pwrite64,writev,pwritev,lseek,ftruncate,truncate,"
    "fallocate,fsync,fdatasync,sync,syncfs,sync_file_range,?rename,renameat,renameat2,?link,linkat,?symlink,symlinkat,"
    "?unlink,unlinkat,?mkdir,mkdirat,?rmdir,?getdents,getdents64,?stat,?lstat,fstat,?newfstatat,statx,statfs,fstatfs,"
    "?access,faccessat,faccessat2,?readlink,readlinkat,?chmod,fchmod,fchmodat,utimensat,fcntl,flock,sendfile,"
    "copy_file_range,fadvise64"
)
#: Those that can need room, and so can find none.
_TAKES_ROOM = re.compile(
    r"open|creat|close|p?write|f?truncate|fallocate|fsync|fdatasync|rename|link|mkdir|sendfile|copy"
)

_CALL = re.compile(r"^(\d+) +(?:[\d.]+ )?(\w+)\(")


@dataclass(frozen=True, order=True)
class Site:
    """A call of a series of saves: the nth of its name in a thread, counted from 1."""

    call: str
    n: int

    @property
    def takes_room(self) -> bool:
        """Say whether a full disk can show here."""
        return _TAKES_ROOM.match(self.call) is not None

    def injection(self, fault: str) -> list[str]:
        """Return strace's option. fault: KILL, or the name of an error."""
        what = f"signal={fault}" if fault == "KILL" else f"error={fault}"
        return ["-e", f"inject={self.call}:{what}:when={self.n}"]


@dataclass
class Trial:
    """What a series of saves reported before its end."""

    #: Steps that were reported saved.
    saved: list[int] = field(default_factory=list)
    #: Packets of steps that were reported failed, in order; see saver.py.
    failed: list[dict[str, Any]] = field(default_factory=list)
    #: As os.waitpid has it.
    status: int = 0

    @property
    def was_killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL


class Hang(AssertionError):
    """A series of saves stopped getting on."""


class Savers:
    """A process from which those that save are forked."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(TIMEOUT_SECONDS)
        self._errors = scratch / "saver.stderr"
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.crash.saver", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stderr=errors,
            )

    def __enter__(self) -> Savers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()
        try:
            self._process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def record(self, subject: str, folder: Path, steps: list[int], *options: str) -> tuple[Trial, Path]:
        """Run saves and return what was reported, and the log of every call with its data, for recording.py."""
        log = self._scratch / "recorded.strace"
        wanted = (
            f"trace={FILE_CALLS},sendto,dup,dup2,dup3,mmap,clone,clone3,?fork,?vfork,execve,io_uring_setup"
        )
        seen = ["-y", "-xx", "-s", str(1 << 24), "-o", str(log), "-e", wanted]
        return self.run(subject, folder, steps, *seen, *options), log

    def sites(self, subject: str, folder: Path, steps: list[int]) -> list[Site]:
        """Return every site of a clean series, in the order of the calls' names; the folder is gone again."""
        log = self._scratch / "counted.strace"
        trial = self.run(subject, folder, steps, "-o", str(log), "-e", f"trace={FILE_CALLS}")
        assert (trial.saved, trial.failed, trial.status) == (steps, [], 0), trial
        shutil.rmtree(folder)
        calls: Counter[tuple[str, str]] = Counter()
        for line in log.read_text("latin-1").splitlines():
            if found := _CALL.match(line):
                calls[found[1], found[2]] += 1
        most: dict[str, int] = {}
        for (_, call), count in calls.items():
            most[call] = max(most.get(call, 0), count)
        return [Site(call, n + 1) for call in sorted(most) for n in range(most[call])]

    def inject(
        self, subject: str, folder: Path, steps: list[int], site: Site, fault: str
    ) -> tuple[Trial, bool]:
        """Run saves of which one meets a fault; return what they reported, and whether the fault came about.

        Once a save has failed strace lets go, so that the later ones meet no fault.
        """
        log = self._scratch / "injected.strace"
        options = ["-o", str(log), "-e", f"trace={site.call}", *site.injection(fault)]
        trial = self.run(subject, folder, steps, *options)
        return trial, trial.was_killed or "(INJECTED)" in log.read_text("latin-1")

    def run(self, subject: str, folder: Path, steps: list[int], *options: str) -> Trial:
        """Run a series of saves under strace with options.

        Raises: Hang if nothing is heard for half a minute.
        """
        warm_up = str(self._scratch / "warm-up")
        task = {"subject": subject, "folder": str(folder), "warm_up": warm_up, "steps": steps}
        self._link.sendall(json.dumps(task).encode())
        child = self._receive(None)["child"]
        trial = Trial()
        with _attached(child, options) as strace:
            self._link.sendall(b"go")
            while "ended" not in (packet := self._receive(child)):
                if "saved" in packet:
                    trial.saved.append(packet["saved"])
                else:
                    trial.failed.append(packet)
                    _end(strace)
                    self._link.sendall(b"go")
            trial.status = packet["ended"]
            strace.wait(TIMEOUT_SECONDS)
        if trial.status and not trial.was_killed:
            raise AssertionError(f"the saving process ended ({trial}):\n{self._errors.read_text()[-3000:]}")
        return trial

    def _receive(self, child: int | None) -> dict[str, Any]:
        try:
            packet = self._link.recv(1 << 20)
        except TimeoutError:
            if child is not None:
                os.kill(child, signal.SIGKILL)
                self._link.recv(1 << 20)  # that it ended
            raise Hang(f"nothing was heard for {TIMEOUT_SECONDS:.0f} s\n{self._errors.read_text()}") from None
        if not packet:
            raise AssertionError(f"the process that forks ended:\n{self._errors.read_text()}")
        answer: dict[str, Any] = json.loads(packet)
        return answer


@contextmanager
def _attached(process: int, options: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    if shutil.which("strace") is None:
        raise AssertionError("these tests need strace: apt-get install strace")
    command = ["strace", "-f", *options, "-p", str(process)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        try:
            _wait_until_attached(strace.stderr, command)
            yield strace
        finally:
            _end(strace)


def _wait_until_attached(said: IO[str], command: list[str]) -> None:
    heard = []
    for line in said:
        heard.append(line)
        if re.search(r"Process \d+ attached", line):
            return
    raise AssertionError(f"{' '.join(command)} did not attach:\n{''.join(heard)}")


def _end(strace: subprocess.Popen[str]) -> None:
    """Have strace let go of what it traces, which goes on."""
    if strace.poll() is None:
        strace.send_signal(signal.SIGINT)
        strace.wait(TIMEOUT_SECONDS)
