"""Another interpreter: it starts whatever the parent looks like, and is gone when the parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.patience import wait_until

from penstock.child import NoChild, start_child

TASKS = """
import os, sys, time
def tell():
    print(sorted(os.listdir("/proc/self/fd")), sys.argv[1:], os.environ.get("PYTHONINSPECT"), flush=True)
def hang():
    tell()
    time.sleep(3600)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module for children."""
    (tmp_path / "tasks_of_a_child.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tasks_of_a_child"


def test_a_child_imports_what_its_parent_can_and_inherits_no_descriptor(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", tmp_path, b"/of bytes", *sys.path])
    monkeypatch.setenv("PYTHONINSPECT", "1")
    with tempfile.TemporaryFile() as inherited:
        os.set_inheritable(inherited.fileno(), True)
        child = start_child(f"{tasks}:tell", ["one", "two"], stdout=subprocess.PIPE)

    # The fourth is that of the listing.
    assert child.communicate()[0] == b"['0', '1', '2', '3'] ['one', 'two'] None\n"
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("executable", "/nowhere/python", "/nowhere/python"),
        ("executable", "", "no Python interpreter"),
        # Its executable is the training itself.
        ("frozen", True, "no Python interpreter"),
        ("path", ["nul\0"], "null byte"),
    ],
)
def test_where_no_child_can_be_started_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    with pytest.raises(NoChild, match=why):
        start_child("time:time")

    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_signals_to_all_of_a_job_do_not_end_a_child_from_its_first_moment_on(
    tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def signalled(*words: Any, **options: Any) -> Any:
        process = start(*words, **options)
        send_all(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", signalled)
    with start_child(f"{tasks}:hang", stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        send_all(child.pid)
        assert child.poll() is None
        child.kill()


def send_all(process: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process, number)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit()"])
def test_a_child_ends_with_its_parent_even_while_one_that_was_forked_from_that_lives_on(
    tasks: str, end: str
) -> None:
    """Such as one that loads data, and holds the parent's files open."""
    script = f"""
import os, signal, subprocess, sys, time
from penstock.child import start_child
child = start_child("{tasks}:hang", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
forked = os.fork()
if not forked:
    time.sleep(3600)
print(child.pid, forked, flush=True)
{end}
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child, forked = map(int, parent.stdout.readline().split())
        try:
            parent.wait()
            wait_until(lambda: has_ended(child))
        finally:
            os.kill(forked, signal.SIGKILL)


def has_ended(process: int) -> bool:
    """Return whether a process of nobody's has ended; whoever took it over may not have asked yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
