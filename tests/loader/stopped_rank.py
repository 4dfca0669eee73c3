"""What each of three ranks does for tests/loader/test_stopped_ranks.py: one stops in a phase, until the others end.

Gets the folder of reports, `share`, the phase and the rank that stops; torchrun's variables say which rank this is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as distributed
from tests.loader.sharing_data import Counted, expected, loader
from tests.patience import brief, wait_until

from penstock.errors import PenstockError
from penstock.loader.sharing import Meeting
from penstock.ranks import ranks_of_this_job

folder, share, phase, victim = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host = f"host {rank if share == 'hosts' else 0}"
place, error = Meeting.place, None
batches: list[list[int]] = []


def stop(now: str) -> None:
    """Stop this process, if it is to stop now."""
    if (now, rank) == (phase, victim):
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(folder / "pid")
        os.kill(os.getpid(), signal.SIGSTOP)


def place_later(*arguments: Any) -> None:
    stop("between exchanges")
    place(*arguments)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def train() -> None:
    """Read all batches, as fast as they come, with or without the others."""
    ranks = ranks_of_this_job(timeout_seconds=brief(2))
    with loader(Counted(200), ranks, share=share) as load:
        for epoch in range(load.plan.epochs):
            for rows, ids in load:
                assert (rows == expected(ids)).all()
                batches.append(ids.tolist())
                if len(batches) == 2:
                    stop("in the first epoch")
            if epoch == 0:
                stop("at the end of an epoch")
        stop("at close")


distributed.init_process_group("gloo")
stop("before the first exchange")
with patch("penstock.ranks.descriptors.host_id", lambda: host), patch.object(Meeting, "place", place_later):
    try:
        train()
    except PenstockError as raised:
        error = [type(raised).__name__, str(raised)]
(folder / f"report-{rank}.json").write_text(json.dumps({"error": error, "batches": batches}))
others = [other for other in range(size) if other != victim]
if rank in others and all((folder / f"report-{other}.json").exists() for other in others):
    wait_until((folder / "pid").exists)
    pid = int((folder / "pid").read_text())
    with contextlib.suppress(
        FileNotFoundError, ProcessLookupError
    ):  # another rank was as late, and it has ended
        wait_until(lambda: is_stopped(pid))
        os.kill(pid, signal.SIGCONT)
distributed.destroy_process_group()
