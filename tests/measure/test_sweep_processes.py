"""A sweep's tasks in real processes: shared out, replaced when they die, ended when nobody wants them any more."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.measure import sweep_processes
from penstock.measure.sweep import Point, Task
from penstock.measure.sweep_processes import in_processes
from penstock.measure.sweep_store import KeptPoints

# Processes are spawned: what they do has to be in a module that they can import.
WORK = """
import os, signal, threading
from pathlib import Path
from penstock.errors import ConfigError
from penstock.measure.sweep import Outcome, Point, Sweep, Task

FOLDER = Path(__file__).parent

def work(task):
    if task.policy == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.policy == "dies once":
        first = FOLDER / "died"
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if task.policy == "hangs":
        os.write(1, f"{os.getpid()}\\n".encode())
        threading.Event().wait()
    return Outcome("done", run_seconds=float(task.point.ranks), reason=str(os.getpid()))

def evaluate(scenario, policy):
    with (FOLDER / "computed").open("a") as file:
        file.write(f"{scenario.machine.ranks} {policy}\\n")
    if scenario.machine.ranks == 4 and policy == "naive" and (FOLDER / "hang").exists():
        os.write(1, f"{os.getpid()}\\n".encode())
        threading.Event().wait()
    return Outcome("done", run_seconds=1.0)
"""

SWEEP = """
import sys
from pathlib import Path
import work_of_a_sweep
from penstock.measure.sweep import Sweep, run_sweep
from penstock.measure.sweep_processes import in_processes
from penstock.measure.sweep_store import KeptPoints
from penstock.simulate.scenario import scenario_named

if __name__ == "__main__":
    sweep = Sweep(scenario_named("scenario1"), ("naive",), ranks=(2, 4, 8))
    with KeptPoints(Path(sys.argv[1])) as kept:
        run_sweep(sweep, in_processes(1), kept, evaluate=work_of_a_sweep.evaluate)
"""


@pytest.fixture(autouse=True, scope="module")
def _tracker() -> None:
    """Python's own process for shared memory lives, with its pipe, as long as the process that spawned first."""
    resource_tracker.ensure_running()


def left_in(group: int) -> list[int]:
    """Return the processes of a group that have not ended, after waiting for those that are on their way out."""
    left = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                descriptor = os.pidfd_open(int(file.parent.name))
                ended, _, _ = select.select([descriptor], [], [], 3)
                os.close(descriptor)
                left += [] if ended else [int(file.parent.name)]
    return left


def task(ranks: int, policy: str = "returns") -> Task:
    return Task(Point(ranks, 1, 0, 0), policy)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "work_of_a_sweep.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("work_of_a_sweep")
    del sys.modules["work_of_a_sweep"]


def test_every_task_is_done_once_on_no_more_processes_than_asked(module: ModuleType) -> None:
    tasks = [task(ranks) for ranks in range(1, 8)]

    done = dict(in_processes(2)(tasks, module.work))

    assert {each.point.ranks: outcome.run_seconds for each, outcome in done.items()} == {
        ranks: float(ranks) for ranks in range(1, 8)
    }
    workers = {outcome.reason for outcome in done.values()}
    assert 1 <= len(workers) <= 2
    assert str(os.getpid()) not in workers


@pytest.mark.slow
def test_there_are_no_more_processes_than_tasks(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Counted(sweep_processes._Worker):
        def __init__(self, *arguments: Any) -> None:
            begun.append(self)
            assert len(begun) <= 2
            super().__init__(*arguments)

    monkeypatch.setattr(sweep_processes, "_Worker", Counted)

    assert len(dict(in_processes(100_000)([task(1), task(2)], module.work))) == 2
    assert len(begun) == 2


def test_a_process_that_dies_is_replaced_and_its_task_tried_again(module: ModuleType) -> None:
    tasks = [task(1, "dies once"), task(2), task(3, "dies"), task(4)]

    done = {
        each.policy + str(each.point.ranks): outcome for each, outcome in in_processes(1)(tasks, module.work)
    }

    assert {name: outcome.status for name, outcome in done.items()} == {
        "dies once1": "done",
        "returns2": "done",
        "dies3": "failed",
        "returns4": "done",
    }
    assert "by SIGKILL, 2 times" in done["dies3"].reason
    assert "smaller --jobs" in done["dies3"].reason


def test_closing_ends_what_is_under_way(module: ModuleType) -> None:
    """What is left behind fails the test by itself."""
    run = in_processes(2)([task(1), task(2, "hangs"), task(3, "hangs")], module.work)

    first, _ = next(run)
    run.close()

    assert first == task(1)


def test_no_process_at_all_cannot_work() -> None:
    with pytest.raises(ConfigError, match="--jobs is 0"):
        in_processes(0)


class Interrupted:
    """A sweep as a process of its own, in a group of its own, as a terminal starts it; hangs at its third task."""

    def __init__(self, folder: Path) -> None:
        (folder / "work_of_a_sweep.py").write_text(WORK)
        (folder / "sweep.py").write_text(SWEEP)
        self._folder = folder

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "sweep.py", "out"],
            cwd=self._folder,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_and_wait_until_it_hangs(self) -> subprocess.Popen[str]:
        (self._folder / "hang").touch()
        process = self.start()
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        (self._folder / "hang").unlink()
        return process


def test_ctrl_c_keeps_finished_tasks_leaves_no_process_and_the_same_command_goes_on(tmp_path: Path) -> None:
    sweep = Interrupted(tmp_path)
    process = sweep.start_and_wait_until_it_hangs()

    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to all of them
    _, errors = process.communicate()

    assert errors.count("Traceback") == 1  # the sweep's own; the workers say nothing
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert left_in(process.pid) == []
    with KeptPoints(tmp_path / "out") as points:
        before = len(points.kept())
    assert before == 4  # three bounds and one policy
    again = sweep.start()
    _, errors = again.communicate()
    assert (again.returncode, errors) == (0, "")
    computed = (tmp_path / "computed").read_text().splitlines()
    assert computed[before:] == ["4 naive", "4 naive", "8 naive"]
    with KeptPoints(tmp_path / "out") as points:
        assert len(points.kept()) == 6


def test_a_killed_sweep_takes_its_processes_along(tmp_path: Path) -> None:
    process = Interrupted(tmp_path).start_and_wait_until_it_hangs()

    process.kill()

    # Its output ends when the last process that could write to it has ended.
    with contextlib.closing(process.stdout or sys.stdin) as output:
        assert output.read() == ""
    process.communicate()
    with KeptPoints(tmp_path / "out") as points:
        assert len(points.kept()) == 4
