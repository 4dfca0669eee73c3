"""What each process that torchrun started does with a store, for tests/checkpoint/test_store_ranks.py.

Run as: store_torchrun.py FOLDER, with torchrun's variables
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from penstock.checkpoint import SnapshotStore, alone
from penstock.errors import ConfigError

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
report: dict[str, object] = {}

with SnapshotStore(folder / "before", codec="stored", report=None, schedule="1 steps") as store:
    report["read before"] = store.restore()["w"].tolist()
    try:
        store.is_due(1)
    except ConfigError as error:
        report["refused"] = str(error)

torch.distributed.init_process_group("gloo")
with SnapshotStore(folder / "job", codec="stored", report=None) as store:
    report["is alone"] = store.is_alone
    saved = store.save(5, {"w": np.arange(1000.0)}, per_rank={"rank": rank}).wait()
    restored = store.restore()
    report["together"] = [saved.step, restored["w"].sum(), restored.per_rank]
# One rank reads by itself, such as another training's weights.
if rank == 1:
    with SnapshotStore(folder / "before", ranks=alone, report=None) as store:
        report["by itself"] = store.restore()["w"].tolist()
(folder / f"report-{rank}.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
