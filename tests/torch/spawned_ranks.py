"""A training of two ranks that torch.multiprocessing spawns without a launcher, for test_dataloader_semantics.py.

Run as: spawned_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import distributed, multiprocessing

from penstock.torch import DataLoader
from penstock.trace.file import RUN_FOLDER


def record(number: int, folder: str) -> None:
    """Record before it knows its rank, beside the other process, and when torch.distributed does."""
    there = distributed.FileStore(f"{folder}/there", 2)  # type: ignore[attr-defined]
    numbers: Any = list(range(4))
    os.environ[RUN_FOLDER] = f"{folder}/before"
    batches = iter(DataLoader(numbers, 2))
    next(batches)
    there.set(str(number), "")
    there.wait(["0", "1"])
    list(batches)
    os.environ[RUN_FOLDER] = f"{folder}/after"
    distributed.init_process_group("gloo", f"file://{folder}/group", rank=number, world_size=2)
    list(DataLoader(numbers, 2))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(record, (sys.argv[1],), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
