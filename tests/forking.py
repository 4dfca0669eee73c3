"""Processes that begin with everything imported: forked, for all tests, from one that has imported it once.

To import PyTorch, load the compiled kernels and take the interpreter down again takes a second or two, and what a rank
of a test does a tenth of that. The fixture `forks` is the process that has them; the first test that asks starts it.

    the tests ──a script, arguments──▶ the process ──fork──▶ one for the job ──fork──▶ its ranks
       ▲                                                           │
       └───────── what they write, and how each ended ─────────────┘

A rank ends as an interpreter does, its exit functions called, but takes nothing apart: how a process group ends that
has lost a rank is PyTorch's business.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.few_readers import start_few_readers
from tests.patience import patient

#: The arguments of each of a job's processes; before them, as `env` has them, variables of its environment.
Job = list[list[str]]

_MODULES = (
    "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "penstock.checkpoint.preemption", "penstock.checkpoint.codecs.ours",
    "penstock.loader.transforms.pipeline", "penstock.torch", "penstock.torch.dcp",
)  # fmt: skip
_REQUEST_BYTES = 1 << 17


# -- Where the tests are -------------------------------------------------------------------------------


class Forks:
    """The process from which others are forked."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "ignore", "-m", "tests.forking", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1]
            )

    def start(self, script: Path, rows: Sequence[Sequence[Job]], *, modules: Sequence[str] = ()) -> Forked:
        """Start rows of jobs beside each other, those of a row one after the other; each process runs the script.

        modules: to import before, once for all.
        """
        (out, their_out), (result, their_result) = os.pipe(), os.pipe()
        data = json.dumps([str(script), rows, modules]).encode()
        assert len(data) < _REQUEST_BYTES, "so many arguments are cut off"
        socket.send_fds(self._requests, [data], [their_out, their_result])
        os.close(their_out)
        os.close(their_result)
        return Forked(out, result)

    def run(self, program: str, *arguments: str) -> tuple[str, int]:
        """Run a program as one process; return what it writes, and its exit status, or minus a signal."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(textwrap.dedent(program))
            script.flush()
            with self.start(Path(script.name), [[[list(arguments)]]]) as forked:
                told, statuses = forked.wait()
        (status,) = statuses.values()
        return told, status

    def close(self) -> None:
        # It ends, and with it what it forked; whoever else has this socket does not keep it.
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)
        self._requests.close()
        self._process.wait()


class Forked:
    """Processes of one `Forks.start`. A context that kills those which are left."""

    def __init__(self, out: int, result: int) -> None:
        self.out = open(out, encoding="utf-8")  # noqa: SIM115, what they write, errors too
        self._result = open(result, encoding="utf-8")  # noqa: SIM115
        self._group = int(self._result.readline())

    def wait(self) -> tuple[str, dict[int, int]]:
        """Return what they wrote, and by process id how each ended: its exit status, or minus a signal.

        Raises: AssertionError if they hang; they are killed.
        """
        timeout_seconds = patient(100)
        timer = threading.Timer(timeout_seconds, self.kill)
        timer.start()
        try:
            told, result = self.out.read(), self._result.read()
        finally:
            timer.cancel()
            timer.join()
        assert result, f"after {timeout_seconds:g} s they were killed: {told}"
        return told, {int(pid): status for pid, status in json.loads(result).items()}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.kill()
        self.out.close()
        self._result.close()


# -- The process ---------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> NoReturn:
    for module in _MODULES:
        importlib.import_module(module)
    start_few_readers()
    _warm_up()
    gc.collect()
    gc.freeze()  # else each process would go through it, and copy it for that
    groups: set[int] = set()
    while True:
        data, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 2)
        if not data:
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            os._exit(0)
        script, rows, modules = json.loads(data)
        if any(module not in sys.modules for module in modules):
            for module in modules:
                importlib.import_module(module)
            gc.collect()
            gc.freeze()
        groups.add(_forked(_run_job, requests, script, rows, *descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                groups.remove(ended)


def _warm_up() -> None:
    """Do what every process would load something for: a save, a difference, a restore, a step of an optimizer."""
    import numpy as np
    import torch

    from penstock.checkpoint.store import SnapshotStore

    torch.set_num_threads(1)  # a process with threads is not forked
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    numbers = np.random.default_rng(1).normal(0, 1, 1 << 14).astype("f4")
    with tempfile.TemporaryDirectory() as folder, SnapshotStore(folder, report=None, threads=1) as store:
        for step in range(2):
            numbers += numbers * np.float32(1e-6)
            words = {"b": numbers.astype("f8"), "c": numbers.view("u1"), "d": numbers.astype("i8")}
            store.save(step, {"a": numbers, "e": torch.from_numpy(numbers).bfloat16(), **words})
        store.restore()


def _forked(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the id of a process that calls the function and ends."""
    if child := os.fork():
        return child
    status = 1
    try:
        function(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_job(requests: socket.socket, script: str, rows: list[list[Job]], out: int, result: int) -> None:
    requests.close()
    os.setsid()  # its processes are killed together
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    # The streams of the server may be over a file, which can be asked where it is.
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.write(result, f"{os.getpid()}\n".encode())
    row_of: dict[int, int] = {}  # by process that runs
    ended: dict[int, int] = {}

    def begin(row: int) -> None:
        if rows[row]:
            for arguments in rows[row].pop(0):
                row_of[_forked(_run_script, script, arguments, result)] = row

    for row in range(len(rows)):
        begin(row)
    while row_of:
        pid, status = os.wait()
        ended[pid] = os.waitstatus_to_exitcode(status)
        row = row_of.pop(pid)
        if row not in row_of.values():
            begin(row)
    os.write(result, json.dumps(ended).encode())


def _run_script(script: str, arguments: list[str], result: int) -> None:
    os.close(result)
    while arguments and (variable := re.fullmatch("([A-Z_]+)=(.*)", arguments[0])):
        os.environ[variable[1]] = variable[2]
        arguments = arguments[1:]
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
