"""Workers of this host, started and ended with a program: for a first try and for tests."""

from __future__ import annotations

import contextlib
import secrets
import select
import subprocess
import sys

from penstock.child import start_child
from penstock.closing import Closeable
from penstock.errors import ConfigError
from penstock.graph.workers.worker import Worker, brought_by
from penstock.heap import keep_freed_memory

#: How long a worker may take to start: it imports PyTorch.
_START_SECONDS, _END_SECONDS = 120.0, 5.0


class LocalWorkers(Closeable):
    """Worker processes that end with this one, or with the `with` block.

        with LocalWorkers(2) as workers, WorkerSession(graph, workers.addresses, workers.secret) as session:
            ...

    addresses: by task, "/job:worker/task:0" and so on. secret: of this cluster alone.
    """

    def __init__(
        self,
        count: int,
        *,
        job: str = "worker",
        nodes: str | None = None,
        slowness: dict[int, float] | None = None,
    ) -> None:
        """Start workers.

        nodes: a Python module with what Call and NextBatch nodes name. slowness: by number of the task, see `Worker`.

        Raises: ConfigError with what a worker said that did not start.
        """
        self.secret = secrets.token_bytes(32)
        self.addresses: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for number in range(count):
                task = f"/job:{job}/task:{number}"
                words = [task, str((slowness or {}).get(number, 1.0)), *([] if nodes is None else [nodes])]
                self.processes[task] = start_child(
                    "penstock.graph.workers.local:serve", words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            for task, process in self.processes.items():
                assert process.stdin is not None, "it is a pipe"
                assert process.stdout is not None, "it is a pipe"
                process.stdin.write(self.secret.hex().encode("ascii") + b"\n")
                answer = select.poll()
                answer.register(process.stdout, select.POLLIN)
                if not answer.poll(1e3 * _START_SECONDS):
                    raise ConfigError(
                        f"{task} did not start: its process says nothing for {_START_SECONDS:g} s"
                    )
                address = process.stdout.readline().decode("ascii").strip()
                if not address:
                    raise ConfigError(f"{task} did not start: its process ended with {process.wait()}")
                self.addresses[task] = address
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers. Twice is harmless."""
        for process in self.processes.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for process in self.processes.values():
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()


def serve() -> None:
    """Be a worker until standard input ends. `sys.argv`: task, slowness, module of nodes or nothing."""
    task, slowness, *nodes = sys.argv[1:]
    secret = bytes.fromhex(sys.stdin.readline())
    keep_freed_memory()
    functions, batches = brought_by(nodes[0] if nodes else None)
    worker = Worker(task, secret, functions=functions, batches=batches, slowness=float(slowness))
    print(worker.address, flush=True)
    sys.stdin.read()
    worker.close()
