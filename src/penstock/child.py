"""Another Python interpreter next to this one: how it starts, and that it ends with its parent.

    parent   start_child("penstock.compiling:_serve", words, stderr=PIPE) -> Popen
    child    ignores the signals of the job, watches its parent, imports penstock.compiling, calls _serve()

It imports from where its parent does, inherits no descriptor but its standard files, and is in a process group of its
own. What the signals mean that a job's manager sends to all processes of a job is the parent's to decide.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

_PROGRAM = "from penstock.child import _run; _run()"
_SIGNALS_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_PARENT_SECONDS = 0.3


class NoChild(Exception):
    """No other interpreter can be started here; the message says why."""


def has_interpreter() -> bool:
    """Return whether there is one for a child: the executable of a frozen program is the program itself."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def start_child(
    task: str,
    words: Sequence[str] = (),
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = subprocess.DEVNULL,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    watches_parent: bool = True,
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls a function, and ends with it or with this process, however that ends.

    task: "module:function". words: its `sys.argv[1:]`. stdin, stdout, stderr: as for Popen, unbuffered.
    environment: variables that it has besides this process's.
    watches_parent: by a thread; else the task has to end when its parent does.
    Raises: NoChild; RuntimeError where this interpreter is shutting down.
    """
    if not has_interpreter():
        raise NoChild("this program is no Python interpreter that another could be started with")
    # The child inherits the mask: signals stay pending until it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_JOB)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid() if watches_parent else 0), task, *words],
            env=variables_of_a_child(environment or {}),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            process_group=0,  # signals to the parent's group do not reach it
        )
    except (OSError, ValueError) as error:  # no more processes are allowed, or no environment holds the path
        raise NoChild(str(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def variables_of_a_child(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables and those besides them, with which a child imports from where this one does."""
    # Entries of other types are legal there, and nothing is imported from them.
    places = [place for place in sys.path if isinstance(place, str) and place]
    variables = os.environ | dict(environment) | {"PYTHONPATH": os.pathsep.join(places)}
    # With it, an interpreter that fails asks its standard input what to do next.
    variables.pop("PYTHONINSPECT", None)
    return variables


def _run() -> None:
    """Do what a child does first, and then its task."""
    for number in _SIGNALS_OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)
    parent, task = sys.argv[1:3]
    del sys.argv[1:3]
    call(task, int(parent))


def call(task: str, parent: int) -> None:
    """Call what a child is for. parent: the process that it ends with; 0 for none."""
    if parent:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    module, _, function = task.partition(":")
    getattr(importlib.import_module(module), function)()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_PARENT_SECONDS)
    os._exit(1)
