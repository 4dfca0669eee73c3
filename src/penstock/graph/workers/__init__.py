"""A graph on several machines: workers that run parts of it, one client that asks.

access.py      the secret of a cluster, and addresses
wire.py        messages as bytes: trees of plain values and arrays
link.py        a process's connections, in a thread of its own
host.py        what workers of one host send each other
nodes.py       the nodes of a part in a message
lanes.py       the timeline of all workers
mail.py        values on their way from Sends to Recvs
worker.py      a worker: the state and parts of sessions
config.py      how a session on workers is opened, as a value
link_probe.py  what sending takes between two workers
requests.py    what is asked of workers, and who is lost
placement.py   where nodes run, and what each worker runs of a step
session.py     `WorkerSession`: a session whose nodes run on workers
job.py         workers that are the ranks of a job
local.py       workers of this host, started and ended with a program
"""

from penstock.ranks.access import needing_zmq

with needing_zmq("the workers of graphs need pyzmq"):
    import zmq  # noqa: F401

from penstock.graph.workers.access import KEY
from penstock.graph.workers.config import SessionConfig
from penstock.graph.workers.job import session_of_job
from penstock.graph.workers.local import LocalWorkers
from penstock.graph.workers.session import WorkerSession
from penstock.graph.workers.worker import Worker

__all__ = ["KEY", "LocalWorkers", "SessionConfig", "Worker", "WorkerSession", "session_of_job"]
