"""The programs of the page of idioms run, and find what one process finds."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.graph import workers as package
from penstock.graph.workers import Worker

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "graph-idioms.md"
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


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
@pytest.mark.parametrize("name", ["synchronous.py", "pipeline.py", "asynchronous.py"])
def test_a_program_runs_with_processes_as_it_is_written(name: str, tmp_path: Path) -> None:
    for each, text in PROGRAMS.items():
        (tmp_path / each).write_text(text)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one process" in done.stdout
