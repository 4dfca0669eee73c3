"""A sweep's tasks on Ray: on a real cluster of one processor, that of this machine."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from penstock.errors import ConfigError, DataError
from penstock.measure.sweep import Point, Task
from penstock.measure.sweep_ray import on_ray
from penstock.measure.sweep_store import KeptPoints

WORK = """
import os, signal, threading
from penstock.measure.sweep import Outcome

def work(task):
    if task.policy == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.policy == "raises":
        raise SystemExit("no")
    return Outcome("done", run_seconds=float(task.point.ranks))

def evaluate(scenario, policy):
    if scenario.machine.ranks == 4 and policy == "naive":
        with open(os.environ["PENSTOCK_TEST_HANGS"], "w") as pipe:
            pipe.write(str(os.getpid()))
        threading.Event().wait()
    return Outcome("done", run_seconds=1.0)
"""

SWEEP = """
import sys
from pathlib import Path
import work_on_ray
from penstock.measure.sweep import Sweep, run_sweep
from penstock.measure.sweep_ray import on_ray
from penstock.measure.sweep_store import KeptPoints
from penstock.simulate.scenario import scenario_named

sweep = Sweep(scenario_named("scenario1"), ("naive",), ranks=(2, 4, 8))
with KeptPoints(Path(sys.argv[1])) as kept:
    run_sweep(sweep, on_ray("local", 1), kept, evaluate=work_on_ray.evaluate)
"""


def task(ranks: int, policy: str = "returns") -> Task:
    return Task(Point(ranks, 1, 0, 0), policy)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "work_on_ray.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("work_on_ray")
    del sys.modules["work_on_ray"]


@pytest.mark.parametrize(
    ("address", "jobs", "said"), [(" ", 1, "--ray is empty"), ("local", 0, "--jobs is 0")]
)
def test_an_address_or_number_that_cannot_be_is_refused(address: str, jobs: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        on_ray(address, jobs)


class Cluster:
    """As much of Ray as a runner uses: tasks end in the opposite order, one of them with its worker."""

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._done: dict[int, object] = {}

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **_: object) -> None:
        self.calls.append(f"init {address}")
        if address == "nowhere":
            raise ConnectionError("nobody answers")

    def put(self, value: object) -> object:
        return value

    def remote(self, **_: object) -> object:
        cluster = self

        class Remote:
            def __init__(self, function: object) -> None:
                self._function = function

            def remote(self, *arguments: object) -> int:
                reference = len(cluster._done)
                cluster._done[reference] = self._function(*arguments)  # type: ignore[operator]
                return reference

        return Remote

    def wait(self, references: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference: int) -> object:
        if reference == 1:
            raise self.exceptions.RayError("the worker died\nand more lines")
        return self._done[reference]

    def cancel(self, reference: int, force: bool) -> None:
        self.calls.append(f"cancel {reference}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_outcomes_come_as_tasks_end_and_a_lost_worker_is_a_failure(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Cluster())

    done = list(on_ray("auto", 1)([task(1), task(2), task(3)], module.work))

    assert [each.point.ranks for each, _ in done] == [3, 2, 1]
    assert [outcome.status for _, outcome in done] == ["done", "failed", "done"]
    assert done[1][1].reason == "RayError: the worker died"


def test_closing_cancels_what_is_under_way_and_leaves_the_cluster(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    run = on_ray("auto", 1)([task(1), task(2), task(3)], module.work)

    next(run)
    run.close()

    assert cluster.calls == ["init auto", "cancel 0", "cancel 1", "shutdown"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nowhere", "nobody answers"),
        ("127.0.0.1:1", "Connection refused"),
        ("ray://127.0.0.1:1", "Connection refused"),
        ("127.0.0.1:port", "invalid literal"),
    ],
)
def test_where_no_cluster_answers_the_error_says_what_to_do(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Cluster())

    with pytest.raises(DataError, match=rf"--ray {address}: .*{said}.*ray start --head"):
        next(on_ray(address, 1)([task(1)], module.work))


# The real one


def start(folder: Path, script: str, **environment: str) -> subprocess.Popen[str]:
    """Run a script as a terminal would, in a process group of its own: Ray's processes end with it, or are seen."""
    (folder / "work_on_ray.py").write_text(WORK)
    (folder / "script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "script.py", "out"],
        cwd=folder,
        env={**os.environ, "PENSTOCK_TEST_FOLDER": str(folder), **environment},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(folder: Path) -> list[int]:
    """Return the living processes that were started, at any distance, with a test's folder in their environment."""
    mark, found = f"PENSTOCK_TEST_FOLDER={folder}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:  # it ended, or is somebody else's
            continue
    return found


TASKS = """
import sys
import work_on_ray
from penstock.measure.sweep import Point, Task
from penstock.measure.sweep_ray import on_ray

tasks = [Task(Point(n, 1, 0, 0), policy) for n, policy in ((1, "returns"), (2, "dies"), (3, "returns"))]
for task, outcome in on_ray("local", 2)(tasks, work_on_ray.work):
    print(task.point.ranks, outcome.status, outcome.run_seconds, outcome.reason.partition(":")[0])
"""


@pytest.mark.slow
def test_tasks_run_on_a_real_cluster_and_one_that_kills_its_worker_fails_alone(tmp_path: Path) -> None:
    process = start(tmp_path, TASKS)

    output, errors = process.communicate()

    assert process.returncode == 0, errors
    told = sorted(line for line in output.splitlines() if line[:1].isdigit())  # Ray says something in between
    assert told == ["1 done 1.0 ", "2 failed None WorkerCrashedError", "3 done 3.0 "]
    assert descendants(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_keeps_finished_tasks_and_leaves_nothing_of_the_cluster(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")
    process = start(tmp_path, SWEEP, PENSTOCK_TEST_HANGS=str(tmp_path / "hangs"))
    pipe, ended = os.open(tmp_path / "hangs", os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(process.pid)
    ready, _, _ = select.select([pipe, ended], [], [], 60)
    os.close(ended)
    assert pipe in ready, process.communicate()
    os.close(pipe)

    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()

    assert "KeyboardInterrupt" in errors
    assert descendants(tmp_path) == []
    with KeptPoints(tmp_path / "out") as points:
        assert len(points.kept()) >= 3  # the bounds, which were asked for first
