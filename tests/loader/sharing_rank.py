"""What each rank of a job does for tests/loader/test_sharing.py: it trains on samples that ranks share, and reports.

Gets the folder of reports and the kind of job; for torch also the address, rank and size. Ranks of torch share memory
that they map; those of MPI, each as if on a host of its own, send samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

from tests.loader.sharing_data import Counted, expected, loader
from tests.patience import patient

from penstock.policy import Scheduler
from penstock.ranks import ranks_of_this_job

reports, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "torch":
    import torch.distributed as distributed

    address, rank, size = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
else:
    import mpi4py.MPI  # noqa: F401
ranks = ranks_of_this_job()
share, host = ("host", "this host") if kind == "torch" else ("hosts", f"host {ranks.rank}")
source, batches = Counted(200), []
with (
    patch.object(Scheduler, "waited", lambda *_: []),  # nobody is late
    patch("penstock.policy.peer_patience.LEAST_SECONDS", patient(30)),
    patch("penstock.policy.peer_patience.MOST_SECONDS", patient(30)),
    patch("penstock.ranks.descriptors.host_id", lambda: host),
    loader(source, ranks, share=share) as load,
):
    for _ in range(load.plan.epochs):
        for rows, ids in load:
            assert (rows == expected(ids)).all()
            batches.append(ids.tolist())
            ranks.all_gather("a step", None)
    sharing = load._parts.setup.sharing
    assert sharing is not None
    assert sharing.peers is not None
    far = sharing.peers.far
    # By name: the module of MPI's would make these ranks of torch ranks of MPI.
    assert (None if far is None else type(far._carrier).__name__) == {"torch": None, "mpi": "MpiCarrier"}[
        kind
    ]
    ranks.all_gather("the end", None)
report = {"batches": batches, "reads": int(source.reads.sum())}
(reports / f"report-{kind}-{ranks.rank}.json").write_text(json.dumps(report))
if kind == "torch":
    distributed.destroy_process_group()
