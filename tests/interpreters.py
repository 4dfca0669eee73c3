"""Programs that begin with Penstock imported and end as an interpreter ends, for tests of processes.

To start Python and import Penstock takes most of a second, and what such a test is about a tenth of that. The fixture
`interpreters` is a process that has imported it; a program is forked from it and runs as that of `python -c` does, up
to the last thing that an interpreter does. It is a child of the tests, as if `subprocess` had started it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.few_readers import start_few_readers

_MODULES = (
    "llvmlite.binding",  # what loads kernels
    "multiprocessing.connection",
    "numpy.ma",
    "penstock.checkpoint.codecs.paper",
    "penstock.checkpoint.store",
    "penstock.cli.main",
    "penstock.loader.packing",
    "penstock.loader.transforms.pipeline",
    "penstock.measure.watch",
)
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 1 << 17
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Interpreters:
    """The process from which programs are forked. It has no threads, and imports no PyTorch."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # At the top of a program, so that what a forked one raises ends it.
        serve = "import sys; from tests.interpreters import _serve; exec(_serve(int(sys.argv[1])))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", serve, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                start_new_session=True,
            )

    def start(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program, in a session of its own. options: those of Popen for its files, and env."""
        requests, program = self._requests, textwrap.dedent(program)

        class Forked(subprocess.Popen[Any]):
            def _execute_child(self, args: Any, *rest: Any) -> None:
                """Have it forked: so much of Popen is about how a process starts."""
                environment, files = rest[5], rest[9:15]
                request = [program, arguments, os.getcwd(), dict(environment or os.environ)]
                given = (files[0], files[3], files[5])
                theirs = [number if file == -1 else file for number, file in enumerate(given)]
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
                socket.send_fds(requests, [json.dumps(request).encode()], theirs)
                self.pid = int(requests.recv(20))
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
                self._child_created = True
                self._close_pipe_fds(*files)  # type: ignore[attr-defined]

        return Forked(["python", "-c", program, *arguments], **options)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(program, *arguments, text=True, **pipes) as process:
            out, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


def _serve(number: int) -> str:
    """Return, in each forked process, the program that it is to run."""
    requests = socket.socket(fileno=number)
    for module in _MODULES:
        importlib.import_module(module)
    start_few_readers()
    gc.collect()
    gc.freeze()
    while True:
        data, files, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not data:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)  # so that the forked one becomes a child of the tests
        break
    while os.getppid() == between:
        time.sleep(0.001)
    requests.send(str(os.getpid()).encode())
    requests.close()
    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    # Those of this process may be over a file, which can be asked where it is.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    program, arguments, folder, environment = json.loads(data)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv = ["-c", *arguments]
    return str(program)
