"""Runs saves in a process of their own under strace: recorded, counted, killed or made to fail at the nth call.

strace is attached once the process has imported everything and waits, so that a trial costs a fork (some 50 ms) and
its first traced call is the first of the store's opening. strace counts calls by thread and by the call's name, so a
site is a pair (name, n): the nth call of that name in any thread.

What is not covered: a close that fails is not carried out, so that its descriptor stays open and a lock held; calls
that are no file's (memory, locks) fail nowhere, and a death at one is the same as at the next that is a file's.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.checkpoint.crash.saver import GO
from tests.checkpoint.crash.subject import subject_named
from tests.patience import patient

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = patient(30)
#: For a process that imports, and may have to compile, what a save needs.
WARM_UP_SECONDS = patient(110)

#: The calls in which a store can meet a file system. A question mark: not on every architecture.
FILE_CALLS = (
    "?open,openat,?creat,close,read,pread64,readv,preadv,write,pwrite64,writev,pwritev,lseek,ftruncate,truncate,"
    "fallocate,fsync,fdatasync,sync,syncfs,sync_file_range,?rename,renameat,renameat2,?link,linkat,?symlink,symlinkat,"
    "?unlink,unlinkat,?mkdir,mkdirat,?rmdir,?getdents,getdents64,?stat,?lstat,fstat,?newfstatat,statx,statfs,fstatfs,"
    "?access,faccessat,faccessat2,?readlink,readlinkat,?chmod,fchmod,fchmodat,utimensat,fcntl,flock,sendfile,"
    "copy_file_range,fadvise64"
)
#: Those that can need space, and so can find none.
_TAKES_SPACE = re.compile(
    r"open|creat|close|p?write|f?truncate|fallocate|fsync|fdatasync|rename|link|mkdir|sendfile|copy"
)

_CALL = re.compile(r"^(\d+) +(?:[\d.]+ )?(\w+)\(")

#: Steps to save, for each time that the store is opened and closed.
Sessions = list[list[int]]


def steps_of(sessions: Sessions) -> list[int]:
    """Return the steps of all sessions."""
    return [step for steps in sessions for step in steps]


@dataclass(frozen=True, order=True)
class Site:
    """A call of a series of saves: the nth of its name in a thread, counted from 1."""

    call: str
    n: int

    @property
    def takes_space(self) -> bool:
        """Say whether a full disk can show here."""
        return _TAKES_SPACE.match(self.call) is not None

    def injection(self, fault: str) -> list[str]:
        """Return strace's option. fault: KILL, or the name of an error."""
        what = f"signal={fault}" if fault == "KILL" else f"error={fault}"
        return ["-e", f"inject={self.call}:{what}:when={self.n}"]


@dataclass
class Trial:
    """What a series of saves reported before its end."""

    #: Steps that were reported saved.
    saved: list[int] = field(default_factory=list)
    #: The steps whose snapshots were there once each of these was saved.
    seen: list[list[int]] = field(default_factory=list)
    #: Packets of steps that were reported failed, in order; see saver.py.
    failed: list[dict[str, Any]] = field(default_factory=list)
    #: As os.waitpid has it.
    status: int = 0

    def is_clean(self, sessions: Sessions) -> bool:
        """Say whether every step was saved."""
        return (self.saved, self.failed, self.status) == (steps_of(sessions), [], 0)

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
        self._warm: set[str] = set()
        self._errors = scratch / "saver.stderr"
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.crash.saver", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
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

    def record(self, subject: str, folder: Path, sessions: Sessions, *options: str) -> tuple[Trial, Path]:
        """Run saves and return what was reported, and the log of every call with its data, for recording.py."""
        log = self._scratch / "recorded.strace"
        wanted = (
            f"trace={FILE_CALLS},sendto,dup,dup2,dup3,mmap,clone,clone3,?fork,?vfork,execve,io_uring_setup"
        )
        seen = ["-y", "-xx", "-s", str(1 << 24), "-o", str(log), "-e", wanted]
        return self.run(subject, folder, sessions, *seen, *options), log

    def sites(self, subject: str, folder: Path, sessions: Sessions) -> list[Site]:
        """Return every site of a clean series, in the order of the calls' names; the folder is gone again."""
        log = self._scratch / "counted.strace"
        trial = self.run(subject, folder, sessions, "-o", str(log), "-e", f"trace={FILE_CALLS}")
        assert trial.is_clean(sessions), trial
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
        self, subject: str, folder: Path, sessions: Sessions, site: Site, fault: str
    ) -> tuple[Trial, bool]:
        """Run saves of which one meets a fault; return what they reported, and whether the fault came about.

        There is one fault: strace lets go once it has come about.
        """
        return self._run(subject, folder, sessions, ["-e", f"trace={site.call}", *site.injection(fault)])

    def run(self, subject: str, folder: Path, sessions: Sessions, *options: str) -> Trial:
        """Run a series of saves under strace with options.

        Raises: Hang if nothing is heard for half a minute.
        """
        return self._run(subject, folder, sessions, options)[0]

    def _run(
        self, subject: str, folder: Path, sessions: Sessions, options: Sequence[str]
    ) -> tuple[Trial, bool]:
        if subject not in self._warm:
            self._send({"subject": subject, "warm_up": str(self._scratch / "warm-up")})
            self._receive(None, WARM_UP_SECONDS)
            self._warm.add(subject)
        self._send({"subject": subject, "folder": str(folder), "sessions": sessions})
        child = self._receive(None)["child"]
        trial = Trial()
        with _Strace(child, options) as strace:
            self._link.sendall(GO)
            while "ended" not in (packet := self._receive(child, strace=strace)):
                if "saved" in packet:
                    trial.saved.append(packet["saved"])
                    trial.seen.append(subject_named(subject).steps(folder))
                else:
                    trial.failed.append(packet)
                    strace.let_go()
                self._link.sendall(GO)
            trial.status = packet["ended"]
            strace.finish()
        if trial.status and not trial.was_killed:
            raise AssertionError(f"the saving process ended ({trial}):\n{self._errors.read_text()[-3000:]}")
        return trial, trial.was_killed or strace.has_injected

    def _send(self, packet: dict[str, Any]) -> None:
        try:
            self._link.sendall(json.dumps(packet).encode())
        except OSError as error:
            raise AssertionError(f"the process that forks is gone:\n{self._errors.read_text()}") from error

    def _receive(
        self, child: int | None, timeout_seconds: float = TIMEOUT_SECONDS, strace: _Strace | None = None
    ) -> dict[str, Any]:
        """Return the next packet. Raises: Hang; the child is killed then."""
        if not self._is_readable(time.monotonic() + timeout_seconds, strace):
            self._link.settimeout(TIMEOUT_SECONDS)
            if child is None:
                self._process.kill()
            else:
                os.kill(child, signal.SIGKILL)
                while b"ended" not in self._link.recv(1 << 20):
                    pass
            raise Hang(f"nothing was heard for {timeout_seconds:.0f} s\n{self._errors.read_text()}")
        packet = self._link.recv(1 << 20)
        if not packet:
            raise AssertionError(f"the process that forks ended:\n{self._errors.read_text()}")
        answer: dict[str, Any] = json.loads(packet)
        return answer

    def _is_readable(self, deadline: float, strace: _Strace | None) -> bool:
        """Wait for a packet, and say whether there is one; listen to strace meanwhile."""
        while True:
            sources: list[socket.socket | _Strace] = [self._link]
            if strace is not None and not strace.is_silent:
                sources.append(strace)
            ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
            if strace is not None and strace in ready:
                strace.listen()
                if strace.has_injected:
                    strace.let_go()
            if self._link in ready or not ready:
                return bool(ready)


class _Strace:
    """An strace that is attached to a process."""

    def __init__(self, process: int, options: Sequence[str]) -> None:
        """Return once it is attached. Raises: AssertionError with what it said if it cannot be."""
        if shutil.which("strace") is None:
            raise AssertionError("these tests need strace: apt-get install strace")
        command = ["strace", "-f", *options, "-p", str(process)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        self._pipe = self._process.stderr
        self._said = b""
        self.is_silent = False
        while not re.search(rb"Process \d+ attached", self._said):
            self.listen()
            if self.is_silent:
                self.finish()
                raise AssertionError(f"{' '.join(command)} did not attach:\n{self._said.decode()}")

    def fileno(self) -> int:
        return self._pipe.fileno()

    def listen(self) -> None:
        """Take what it says next."""
        said = os.read(self._pipe.fileno(), 1 << 16)
        self._said += said
        self.is_silent = not said

    @property
    def has_injected(self) -> bool:
        """Say whether a call was made to fail, as far as was heard."""
        return b"(INJECTED)" in self._said

    def let_go(self) -> None:
        """Have what was traced go on without it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self.finish()

    def finish(self) -> None:
        """Wait until it has ended, and hear it out."""
        while not self.is_silent:
            self.listen()
        self._process.wait(TIMEOUT_SECONDS)

    def __enter__(self) -> _Strace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self._pipe.close()
