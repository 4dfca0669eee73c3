"""A tensor in parts, as a training of several ranks leaves it in a snapshot; here one process writes them all."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.housekeeping import Housekeeping
from penstock.checkpoint.recipe import EncodingConfig
from penstock.checkpoint.saving import Waves
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.state.tensors import Box, Layout, Piece
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.writer import Blocked, Content, Job, OwnPart, SnapshotWriter
from penstock.flow.ordered import Workers
from penstock.policy.retention import Keep
from penstock.policy.saving import Save, SaveTerms
from penstock.ranks import alone

TREE: Any = {"map": {"table": {"array": {"of": "table", "kind": "numpy"}}}}


def save_rows(
    folder: str | os.PathLike[str],
    step: int,
    table: NDArray[np.float32],
    *,
    cut: int = 15,
    way: EncodingConfig = EncodingConfig("progressive", 10, "balance"),  # noqa: B008, it is frozen
) -> None:
    """Save a state {"table": table} in two parts, the rows before `cut` and the others."""
    catalog = Catalog([LocalTier(folder)])
    housekeeping = Housekeeping(catalog, Keep(last=None), None)
    pieces = []
    for first, rows in ((0, table[:cut]), (cut, table[cut:])):
        layout = Layout("table", dtype_named("float32"), rows.shape, Box(table.shape, (first, 0)))
        pieces.append(Piece(layout, 0, np.frombuffer(rows.tobytes(), np.uint8)))
    layouts = [piece.layout for piece in pieces]
    waves = Waves(1, 1, table.nbytes)
    waves.put(pieces)
    own, blocked = OwnPart(waves, StagingArea()), Blocked(time.monotonic())
    job = Job(step, Content(layouts, TREE), own, Save(SaveTerms()), blocked)
    blocked.is_copied.set()
    writer = SnapshotWriter(catalog, way, housekeeping, alone())
    try:
        writer.begin(job)
        writer.write(job, Workers(1, "penstock-test"))
    finally:
        housekeeping.close()
