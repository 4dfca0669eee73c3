"""Workers that are the ranks of a job, which torchrun or mpirun starts; rank 0 is the client, too."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import RankError
from penstock.graph.model.graph import Graph
from penstock.graph.workers.session import WorkerSession
from penstock.graph.workers.worker import FORGOTTEN_SECONDS, MOST_MPI_BYTES, Worker
from penstock.ranks.carrier_zmq import address_of_this_host
from penstock.ranks.exchange import Ranks
from penstock.ranks.transport_mpi import MpiTransport
from penstock.ranks.transport_of_job import transport_of_this_job


@contextlib.contextmanager
def session_of_job(
    graph: Graph | None,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    batches: Mapping[str, Iterable[Any] | Callable[[], Iterable[Any]]] | None = None,
    **options: Any,
) -> Iterator[WorkerSession | None]:
    """Give rank 0 a session whose workers are the ranks of this job, and the others None when it has ended.

        torch.distributed.init_process_group("gloo")        # or: import mpi4py.MPI
        with session_of_job(graph) as session:
            if session is not None:                         # on rank 0
                session.run(...)

    Every rank calls it, and is "/job:worker/task:RANK". Addresses and a secret of this job alone go by the job's own
    messages; in a job of MPI, what workers of different hosts need of each other is sent by MPI, too.
    functions, batches: of this rank's worker. options: of `WorkerSession`.
    Raises: ConfigError where the job's processes do not know each other yet; RankError if a rank fails to start, and
        where rank 0 says nothing for a minute.
    """
    ranks = Ranks(transport := transport_of_this_job())
    secret = bytes.fromhex(
        ranks.on_rank_zero("the secret of the graph's workers", lambda: secrets.token_hex(32))
    )
    host = address_of_this_host() if ranks.size > 1 else "127.0.0.1"
    worker = Worker(
        f"/job:worker/task:{ranks.rank}", secret, interface=host, functions=functions, batches=batches
    )
    with contextlib.closing(worker):
        mpi = transport if isinstance(transport, MpiTransport) else None
        offer = [worker.task, worker.address, 0 if mpi is None else mpi.free_tag]
        offers = ranks.all_gather("the addresses of the graph's workers", offer)
        tasks = {task: address for task, address, _ in offers}
        if mpi is not None:
            worker.send_by(mpi.carrier(max(tag for _, _, tag in offers), MOST_MPI_BYTES), list(tasks))
        if ranks.rank:
            if not worker.wait(FORGOTTEN_SECONDS):
                raise RankError(
                    f"rank 0, the client of the graph's workers, says nothing for {FORGOTTEN_SECONDS:g} s: it has "
                    "ended, or hangs"
                )
            yield None
            return
        with WorkerSession(graph, tasks, secret, **options) as session:
            try:
                yield session
            finally:
                session.end_workers()
