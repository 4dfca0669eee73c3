"""Workers of graphs and sessions on them, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.patience import patient

from penstock.graph import Graph
from penstock.graph.workers.session import WorkerSession
from penstock.graph.workers.worker import Worker

SECRET = os.urandom(32)
TASKS = [f"/job:worker/task:{number}" for number in range(3)]


def fail(given: Any) -> Any:
    raise OSError("the disk is gone")


def new_worker(task: str, port: int = 0, **functions: Any) -> Worker:
    return Worker(task, SECRET, port=port, functions={"fail": fail, **functions})


def opened(graph: Graph, workers: dict[str, str], **options: Any) -> WorkerSession:
    # A machine that is busy with other tests lags, too.
    options = options if "config" in options else {"lag_seconds": patient(3.5), **options}
    return WorkerSession(graph, workers, SECRET, report=None, **options)


class Killed:
    """A worker that is a process of its own, at a port that stays, and can be killed."""

    def __init__(self, task: str, port: int, key: Path) -> None:
        words = ["graph", "worker", "--task", task, "--listen", f"127.0.0.1:{port}", "--key", str(key)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
