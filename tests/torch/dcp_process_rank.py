"""What a rank does with `async_save` in a process of its own, for tests/torch/test_dcp.py.

Run as: dcp_process_rank.py FOLDER ADDRESS RANK SIZE
"""

from __future__ import annotations

import sys
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from penstock.torch.dcp import StoreWriter


def main(folder: str, address: str, rank: str, size: str) -> None:
    distributed.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size))
    writer = StoreWriter(folder, report=None)
    weight = torch.arange(1000.0)
    for step in (1, 2, 3):
        weight += 1
        future = async_save(
            {"w": weight},
            checkpoint_id=str(step),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(future, Future), "of a stager of one's own alone it is another"
        future.result()
    with pytest.raises(CheckpointException, match="is being written by process"):
        save({"w": weight}, checkpoint_id="4", storage_writer=writer)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
