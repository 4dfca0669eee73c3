"""The server that children are forked from: they begin with its imports, and nothing else is different for them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import forkserver
from penstock.forkserver import ForkedChild, fork_child

TASKS = """
import os, signal, sys, time
importer = os.getpid()
def tell():
    files = sorted(os.listdir("/proc/self/fd"))[:-1]  # the last is that of the listing
    print(os.getpid(), os.getppid(), importer, os.getpgid(0), *files, os.environ["OF_A_TEST"], flush=True)
    sys.exit(3)
def hang():
    print(os.getpid(), flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module for children; the servers end with the test."""
    (tmp_path / "tasks_of_a_fork.py").write_text(TASKS)
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forkserver, "_servers", [])
    monkeypatch.setenv("OF_A_TEST", "one")
    yield "tasks_of_a_fork"
    forkserver._end_servers()


def started(task: str, *modules: str) -> tuple[ForkedChild, list[str]]:
    """Start a child and return what its first line is."""
    with tempfile.TemporaryFile() as inherited:
        os.set_inheritable(inherited.fileno(), True)
        reading, writing = os.pipe()
        before = os.dup(1)
        try:
            os.dup2(writing, 1)
            child = fork_child(task, modules, stdin=reading, environment={"OPENBLAS_NUM_THREADS": "1"})
        finally:
            os.dup2(before, 1)
            os.close(before)
            os.close(writing)
    with open(reading) as answer:
        return child, answer.readline().split()


def test_children_have_the_imports_of_one_server_and_besides_only_what_a_new_interpreter_has(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, (pid, server, importer, group, *rest) = started(f"{tasks}:tell", tasks)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    other, (other_pid, other_server, *_) = started(f"{tasks}:tell", tasks)

    assert [child.wait(), other.wait()] == [3, 3]
    assert [child.pid, other.pid] == [int(pid), int(other_pid)]
    assert server == other_server == importer
    assert group == pid
    assert rest == ["0", "1", "2", "one"]

    # What it would import now may depend on this.
    monkeypatch.setenv("OF_A_TEST", "two")
    child, (_, other_server, *_, value) = started(f"{tasks}:tell", tasks)

    assert child.wait() == 3
    assert other_server != server
    assert value == "two"

    # And on this: the first of the name is another one.
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / f"{tasks}.py").write_text(TASKS.replace("sys.exit(3)", "sys.exit(4)"))
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    child, _ = started(f"{tasks}:tell", tasks)

    assert child.wait() == 4


def test_a_server_with_threads_is_not_forked_and_its_children_end_as_others_do(tasks: str) -> None:
    child, (pid, server, importer, *_) = started(f"{tasks}:tell", tasks, "starts_a_thread")

    assert child.wait() == 3
    assert importer == pid != server


def test_a_child_that_is_killed_or_whose_server_is_has_ended_by_a_signal_and_others_can_be_started(
    tasks: str,
) -> None:
    child, _ = started(f"{tasks}:hang", tasks)
    assert child.poll() is None
    child.kill()
    assert child.wait() == -signal.SIGKILL

    child, _ = started(f"{tasks}:hang", tasks)
    forkserver._servers[-1].process.kill()
    assert child.wait() == -signal.SIGKILL

    child, _ = started(f"{tasks}:tell", tasks)
    assert child.wait() == 3


def test_a_child_that_is_killed_before_it_is_forked_never_is(tasks: str) -> None:
    child, _ = started(f"{tasks}:tell", tasks)
    child.wait()
    server = forkserver._servers[-1].process
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)
    unwanted = fork_child(f"{tasks}:hang", [tasks], stdin=0, environment={})
    assert unwanted.poll() is None
    unwanted.kill()
    os.kill(server.pid, signal.SIGCONT)
    next_child, _ = started(f"{tasks}:tell", tasks)

    assert unwanted.wait() == -signal.SIGKILL
    assert unwanted.pid == 0
    assert next_child.wait() == 3
    assert Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text() == ""
