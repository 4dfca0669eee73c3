"""The tasks of a sweep on a Ray cluster, for sweeps that are too large for one machine.

Ray does what it is there for: it spreads the tasks, starts again what a lost worker was at, and scales the cluster if
that can be scaled. Nothing else of Penstock needs it (`pip install penstock[ray]`), and only this module imports it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ConfigError, DataError
from penstock.measure.sweep import Finished, Outcome, Runner, Task

#: How often a task whose worker was lost is begun anew, on another one.
_MOST_RETRIES = 3
_CONNECT_SECONDS = 5.0


def on_ray(address: str, jobs: int) -> Runner:
    """Return what runs tasks on a Ray cluster, one processor each.

    address: ``local`` starts Ray on this machine for the time of the sweep, with `jobs` processors at most; ``auto`` is
        the cluster that this machine belongs to; else that of a cluster's head, "host:6379" or "ray://host:10001".

    Raises: ModuleNotFoundError without Ray; ConfigError for an empty address; on running, DataError where no cluster
    answers there.
    """
    if not address.strip():
        raise ConfigError("--ray is empty; give local, auto or the address of a cluster's head")
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; at least one process must work")
    # Before ray is loaded: it asks the network for nothing on its own.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    def run(tasks: Sequence[Task], work: Callable[[Task], Outcome]) -> Finished:
        is_ours = not ray.is_initialized()
        if is_ours:
            _connect(ray, address, min(jobs, len(tasks)))
        running: dict[Any, Task] = {}
        try:
            remote = ray.remote(num_cpus=1, max_retries=_MOST_RETRIES)(_do)
            shared = ray.put(work)
            running = {remote.remote(shared, task): task for task in tasks}
            while running:
                ended, _ = ray.wait(list(running), num_returns=1)
                for reference in ended:
                    yield running.pop(reference), _outcome(ray, reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            if is_ours:
                ray.shutdown()

    return run


def _do(work: Callable[[Task], Outcome], task: Task) -> Outcome:
    return work(task)


def _connect(ray: Any, address: str, jobs: int) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"num_cpus": jobs, "include_dashboard": False}
    host, has_port, port = address.removeprefix("ray://").rpartition(":")
    try:
        if has_port:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise DataError(
            f"--ray {address}: no cluster answers there ({error}); start one with `ray start --head`, set "
            "RAY_AUTH_MODE=token if it asks for Ray's token, or give local"
        ) from error


def _outcome(ray: Any, reference: Any) -> Outcome:
    """Return a finished task's outcome. What a task itself raises is in there already: this is Ray's own trouble."""
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines() or [""]
        return Outcome("failed", reason=f"{type(error).__name__}: {first[0]}")
    return outcome
