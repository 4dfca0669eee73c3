"""A process that imports everything once and forks one child for each series of saves: run by injection.py.

    python -m tests.checkpoint.crash.saver SOCKET       the number of an open descriptor of a socket

Packets are JSON. From the harness: {"subject", "warm_up": folder}, answered by {"warm": subject}; or {"subject",
"folder", "sessions"}, then "go" to the child; back come {"child": its process}, the child's {"saved": step} and
{"failed": step or null, "error", "message"}, and {"ended": wait status}. After each of its own the child waits
for another "go".

Packets travel by sendto and recvfrom, which are not among the calls that faults are injected into, and a child that
dies leaves what it has sent.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.checkpoint.crash.subject import OpenStore, State, Subject, subject_named

from penstock.compiling import PARTS

#: Said to a child that waits.
GO = b"go"

_PR_SET_PTRACER = 0x59616D61


def main(link: socket.socket) -> None:
    """Serve until the harness closes its end."""
    while packet := link.recv(1 << 20):
        if packet == GO:  # for a child that died before it read it
            continue
        task = json.loads(packet)
        subject = subject_named(task["subject"])
        if "warm_up" in task:
            _warm_up(subject, Path(task["warm_up"]))
            _send(link, {"warm": task["subject"]})
            continue
        child = os.fork()
        if child == 0:
            try:
                _run(link, subject, Path(task["folder"]), task["sessions"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        _send(link, {"ended": status})


def _send(link: socket.socket, packet: dict[str, Any]) -> None:
    link.sendall(json.dumps(packet).encode())


def _warm_up(subject: Subject, folder: Path) -> None:
    """Have everything imported and compiled that a save needs, so that no call of that is among the traced ones."""
    store = subject.open(folder)
    for step in range(1, subject.keep + 3):
        store.save(step, subject.state(step))
        store.restore(step)
    store.close()
    for part in PARTS:  # also of what only a drain that comes in time encodes
        _ = part.folders
    shutil.rmtree(folder)


def _run(link: socket.socket, subject: Subject, folder: Path, sessions: list[list[int]]) -> None:
    # Where Yama restricts tracing, strace is no ancestor of this process; elsewhere this fails and need not work.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    states = {step: subject.state(step) for steps in sessions for step in steps}
    _send(link, {"child": os.getpid()})
    _wait_for_go(link)
    for steps in sessions:
        _run_session(link, subject, folder, {step: states[step] for step in steps})


def _run_session(link: socket.socket, subject: Subject, folder: Path, states: dict[int, State]) -> None:
    """Open the store, save, and close it."""
    store: OpenStore | None = None
    for step, state in states.items():
        try:
            if store is None:
                store = subject.open(folder)
            store.save(step, state)
        except Exception as failure:
            _report(link, step, failure)
            if store is None:  # it could not be opened: it can, now that the fault is over
                store = subject.open(folder)
        else:
            _send(link, {"saved": step})
            _wait_for_go(link)
    try:
        if store is not None:
            store.close()
    except Exception as failure:
        _report(link, None, failure)


def _report(link: socket.socket, step: int | None, failure: Exception) -> None:
    notes = getattr(failure, "__notes__", [])
    _send(
        link, {"failed": step, "error": type(failure).__name__, "message": "\n".join([str(failure), *notes])}
    )
    _wait_for_go(link)


def _wait_for_go(link: socket.socket) -> None:
    if link.recv(100) != GO:
        os._exit(2)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
