"""The programs of the pages on workers and decode servers run, and find what one process finds."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.graph import workers as package
from penstock.graph.workers import Worker

PAGES = [
    Path(__file__).parents[2] / "docs" / "howto" / f"{name}.md" for name in ("graph-idioms", "decode-servers")
]
PROGRAMS = dict(
    pair
    for page in PAGES
    for pair in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL)
)


@contextlib.contextmanager
def workers_of_this_process(count: int) -> Iterator[SimpleNamespace]:
    secret = os.urandom(32)
    started = [Worker(f"/job:worker/task:{number}", secret) for number in range(count)]
    yield SimpleNamespace(addresses={each.task: each.address for each in started}, secret=secret)
    for each in started:
        each.close()


@pytest.mark.parametrize("name", ["synchronous.py", "pipeline.py"])
def test_a_program_trains_what_one_process_trains(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(package, "LocalWorkers", workers_of_this_process)
    exec(compile(PROGRAMS[name], name, "exec"), {})
    assert "one process" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["synchronous.py", "pipeline.py", "asynchronous.py", "decoding.py"])
def test_a_program_runs_with_processes_as_it_is_written(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"7447": str(one.getsockname()[1]), "7448": str(other.getsockname()[1])}
    for each, text in PROGRAMS.items():
        (tmp_path / each).write_text(re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda port: ports[port[0]], text))
    done = subprocess.run([sys.executable, name], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one process" in done.stdout
