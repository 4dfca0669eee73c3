"""What each rank of a job does for tests/loader/test_agreeing_jobs.py: it makes loaders, and reports.

Gets the folder of a data set, the folder of reports and the kind of job; for torch also the address, rank and size.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.errors import PenstockError
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.ranks import ranks_of_this_job
from penstock.store import open_source

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.patience import brief

data, reports, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
mesh: Any = None
if kind == "torch":
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = int(sys.argv[5]), int(sys.argv[6])
    distributed.init_process_group("gloo", init_method=sys.argv[4], rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
else:
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
meeting = ranks_of_this_job()
report: dict[str, Any] = {}


def load(source: Any = data, **options: Any) -> Any:
    """Return which samples a loader gives, and its seed; or what making it raised."""
    usual: dict[str, Any] = {
        "rank": rank,
        "world_size": size,
        "report": None,
        "memory": "1 MB",
        "decoders": 0,
    }
    arguments = {"batch_size": 8, "epochs": 1, "transforms": [DecodeRaw("uint8", (4,))], "dtype": "uint8"}
    try:
        with Loader(source, **{**arguments, **usual, **options}) as loader:
            seed = loader.state_dict()["transforms"]["seed"]
            return [seed, [int(row[0]) for batch in loader for row in batch[0]]]
    except PenstockError as error:
        return [type(error).__name__, str(error)]


def share() -> Any:
    """Return which samples a loader on a host of its own gives in 2 epochs; to how many ranks it connects, and how."""
    sharing: dict[str, Any] = {
        "rank": rank,
        "world_size": size,
        "share": "hosts",
        "memory": "1 MB",
        "seed": 0,
    }
    with (
        patch("penstock.ranks.descriptors.host_id", lambda: f"host {rank}"),
        Loader(
            data,
            batch_size=8,
            epochs=2,
            transforms=[DecodeRaw("uint8", (4,))],
            dtype="uint8",
            report=None,
            **sharing,
        ) as loader,
    ):
        ids = [[int(row[0]) for batch in loader for row in batch[0]] for _ in range(2)]
        meeting.all_gather("the end of the run", None)
        peers = loader._parts.setup.sharing.peers if loader._parts.setup.sharing is not None else None
        assert peers is not None
        assert peers.far is not None
        return [ids, len(peers.far.ranks), type(peers.far._carrier).__name__]


report["drawn"] = load(seed=None)
report["shared"] = share()
report["seeds"] = load(seed=rank % 2)
report["nobody says"] = load(rank=None, world_size=None)
report["a wrong argument"] = load(decoders="two" if rank == 1 else 0)
report["too little memory"] = load(memory="9 B" if rank == 0 else "1 MB")
report["by itself"] = load(rank=None, world_size=1) if rank == 1 else None
if mesh is not None:
    report["mesh"] = load(rank=None, world_size=None, mesh=mesh, seed=None)
    report["part of a mesh"] = load(rank=None, world_size=None, mesh=mesh["tp"])
    report["both"] = load(mesh=mesh)

listed = open_source(data)
meeting.all_gather("all have listed the folder", None)
if rank == size - 1:
    (data / "16.png").write_bytes(bytes([16] * 4))
    listed = open_source(data)
report["a file appeared"] = load(listed)

# The last rank makes no loader; its process stays alive.
hasty = functools.partial(ranks_of_this_job, timeout_seconds=brief(2))
report["missing"] = load(ranks=hasty) if rank != size - 1 else hasty().rank
meeting.all_gather("the others gave up", None)
report["afterwards"] = load(seed=3, batch_size=17)
(reports / f"report-{kind}-{rank}.json").write_text(json.dumps(report))
if kind == "torch":
    distributed.destroy_process_group()
