"""The tasks of a sweep in processes of this machine.

Processes are spawned, never forked: the parent has threads, and compiled kernels do not survive a fork. They do not see
a Ctrl-C, which the parent answers for all, and they end with their parent, however that ends.

`concurrent.futures` does not do: a process that dies breaks its whole pool, which cannot say at which task it was nor
how it ended, and before Python 3.14 no pool ends what it is at.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess

from penstock.errors import ConfigError
from penstock.measure.sweep import Finished, Outcome, Runner, Task

#: A task whose process dies so often is not tried again.
_MOST_DEATHS = 2
_GRACE_SECONDS = 5.0


def in_processes(jobs: int) -> Runner:
    """Return what runs tasks on so many processes at once, or as many as there are tasks if these are fewer.

    A process that dies, because memory ran out for example, is replaced, and its task tried once more.

    Raises: ConfigError if jobs is below 1.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; at least one process must work")

    def run(tasks: Sequence[Task], work: Callable[[Task], Outcome]) -> Finished:
        pending = deque(tasks)
        deaths: dict[Task, int] = {}
        context = multiprocessing.get_context("spawn")
        workers: list[_Worker] = []
        try:
            while pending or any(worker.task for worker in workers):
                while pending and len(workers) < min(jobs, len(tasks)):
                    workers.append(_Worker(context, work))
                for worker in workers:
                    if worker.task is None and pending:
                        worker.give(pending.popleft())
                ended = wait([worker.connection for worker in workers if worker.task is not None])
                for worker in [worker for worker in workers if worker.connection in ended]:
                    task, outcome = worker.take()
                    if outcome is None:
                        workers.remove(worker)
                        deaths[task] = deaths.get(task, 0) + 1
                        if deaths[task] < _MOST_DEATHS:
                            pending.appendleft(task)
                            continue
                        outcome = Outcome(
                            "failed",
                            reason=f"its process ended {worker.how_ended()}, {_MOST_DEATHS} times; if memory ran out, "
                            "give a smaller --jobs",
                        )
                    yield task, outcome
        finally:
            for worker in workers:
                worker.end()

    return run


class _Worker:
    """A process, and the task that it is at. Owned by the thread that made it."""

    def __init__(self, context: SpawnContext, work: Callable[[Task], Outcome]) -> None:
        self.task: Task | None = None
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        # Inherited: from its first instruction on, the process leaves Ctrl-C to its parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def give(self, task: Task) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # it died: `take` finds that out
            self.connection.send(task)

    def take(self) -> tuple[Task, Outcome | None]:
        """Return the task and its outcome, None where the process died at it."""
        task = self.task
        assert task is not None, "only workers that are at a task are asked"
        self.task = None
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, OSError):
            self.end()
            return task, None
        return task, outcome

    def how_ended(self) -> str:
        code = self._process.exitcode
        return f"with status {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"

    def end(self) -> None:
        """End the process at once. Twice is harmless."""
        self.connection.close()
        self._process.terminate()
        self._process.join(_GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, work: Callable[[Task], Outcome]) -> None:
    """Do tasks until the parent closes the connection, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(work(task))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child"
    parent.join()
    os._exit(1)
