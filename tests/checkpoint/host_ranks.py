"""What every rank of a job on several hosts does with copies of snapshots, for tests/checkpoint/test_host_copies.py.

Run as: host_ranks.py FOLDER save|restore HOSTS torch|mpi [ADDRESS RANK SIZE]

HOSTS: a letter for each rank; each host has a folder of its own, as if in its memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from penstock.checkpoint.host_copies import HostCopies
from penstock.checkpoint.store import SnapshotStore
from penstock.ranks import ranks_of_this_job

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint.ranks_state import arrays_of, own_of, state_of
from tests.patience import patient
from tests.privileges import without_permission

folder, duty, hosts, kind = Path(sys.argv[1]), *sys.argv[2:5]


def save() -> None:
    """Save two snapshots, and restore one between them; be killed with all others."""
    returned = threading.Event()
    copy, is_beside = HostCopies.copy, []

    def copy_later(self: HostCopies, step: int, uid: str) -> None:
        is_beside.append(returned.wait(patient(100)))
        copy(self, step, uid)

    HostCopies.copy = copy_later  # type: ignore[method-assign]
    for step in (1, 2):
        saving = store.save(step, state_of(step, rank, size), per_rank=own_of(step, rank))
        returned.set()
        saving.wait()
        returned.clear()
        if step == 1:
            store.restore()
            there = len(list((folder / f"memory of {hosts[rank]}").glob("step-*/part-*")))
            assert there == size, "of the hosts' parts, each holds all while the job restores"
    assert all(is_beside), "a save returns before its state is copied to the hosts"
    ranks.all_gather("the end", None)
    os.kill(os.getpid(), signal.SIGKILL)


def restore() -> None:
    (own := folder / f"nothing-{rank}").mkdir()
    with without_permission(own):  # and what root may
        restored = store.restore()
    whole = arrays_of(2)
    report = {
        "step": restored.step,
        "whole": all(np.array_equal(restored["model"][name], array) for name, array in whole.items()),
        "per rank": None if restored.per_rank is None else restored.per_rank == own_of(2, rank),
        "lines": lines,
    }
    (folder / f"report-restore-{rank}.json").write_text(json.dumps(report))
    ranks.all_gather("the end", None)


if kind == "mpi":
    import mpi4py.MPI  # noqa: F401, with it the ranks find each other
else:
    import torch.distributed as distributed

    address, rank_given, size_given = sys.argv[5:]
    distributed.init_process_group(
        "gloo", init_method=address, rank=int(rank_given), world_size=int(size_given)
    )
ranks = ranks_of_this_job()
rank, size = ranks.rank, ranks.size
lines: list[str] = []
store = SnapshotStore(
    folder / "store", host_copies=folder / f"memory of {hosts[rank]}", codec="balance", report=lines.append
)
{"save": save, "restore": restore}[duty]()
