"""What every rank of a job does with a snapshot store, for tests/checkpoint/test_store_ranks.py, where it is judged.

Run as: store_ranks.py FOLDER DUTY mpi|torch [ADDRESS RANK SIZE]
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.state.flatten import Shard
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers import local
from penstock.errors import DataError, PenstockError
from penstock.policy.retention import Keep
from penstock.ranks import Ranks, ranks_of_this_job

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint.ranks_state import LAYERS, arrays_of, own_of, part_of, shard_of, state_of
from tests.patience import brief

Report = dict[str, Any]
FOLDER, DUTY = Path(sys.argv[1]), sys.argv[2]
#: Over MPI blocks are stored as they are: each process would load the other codecs for itself.
CODEC = "stored" if sys.argv[3] == "mpi" else "balance"


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return what a function raises: its kind and its message."""
    try:
        function(*arguments, **options)
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


class DueOn:
    """A schedule that depends on the clock of a rank, which is fast on all but one."""

    is_known_ahead = False
    least_seconds = 0.0

    def __init__(self, is_due: bool) -> None:
        self._is_due = is_due

    def steps(self, until: int, **_: Any) -> Any:
        raise AssertionError("nobody knows them ahead")

    def is_due(self, *_: Any) -> bool:
        return self._is_due


@contextmanager
def full_disk(is_full: bool, within: str = "") -> Any:
    """Let writes fail, of files whose path has a text in it."""
    write = local.LocalWriter.write

    def fail(self: Any, *pieces: Any) -> None:
        if within in str(self._path):
            raise DataError(f"{self._path}: No space left on device")
        write(self, *pieces)

    if is_full:
        local.LocalWriter.write = fail  # type: ignore[method-assign]
    yield
    local.LocalWriter.write = write  # type: ignore[method-assign]


def save_and_restore(report: Report, ranks: Ranks) -> None:
    rank, size = ranks.rank, ranks.size
    is_last = rank == size - 1
    lines: list[str] = []
    store = SnapshotStore(
        FOLDER / "store",
        keep=Keep(last=2),
        codec=CODEC,
        ranks=ranks_of_this_job,
        report=lines.append,
        schedule=DueOn(rank == 0),
    )
    for step in (1, 2, 3):
        saving = store.save(step, state_of(step, rank, size), per_rank=own_of(step, rank))
    saved = saving.wait()
    report["saved"] = [saved.step, saved.reference_step, saved.raw_bytes]
    report["lines"] = len(lines)
    report["is due"] = store.is_due(4)

    restored = store.restore()
    whole = arrays_of(3)
    report["whole"] = all(np.array_equal(restored["model"][name], array) for name, array in whole.items())
    report["per rank"] = restored.per_rank == own_of(3, rank)

    # Just as it was saved; then cut otherwise: rows where columns were.
    for turn, (rows_cut, columns_cut) in enumerate([(0, 1), (1, 0)]):
        empty = {name: np.zeros_like(array) for name, array in whole.items()}
        into = {
            "model": {
                **{name: empty[name] for name in LAYERS},
                "rows": shard_of(empty["rows"], rank, size, rows_cut),
                "columns": shard_of(empty["columns"], rank, size, columns_cut),
            },
            "step": 0,
            "rates": None,
        }
        again = store.restore(into=into)
        report[f"into {turn}"] = [
            np.array_equal(empty["a"], whole["a"]),
            np.array_equal(
                part_of(empty["rows"], rank, size, rows_cut), part_of(whole["rows"], rank, size, rows_cut)
            ),
            np.array_equal(
                part_of(empty["columns"], rank, size, columns_cut),
                part_of(whole["columns"], rank, size, columns_cut),
            ),
            # Nothing beside the part is touched.
            size == 1 or rank > 0 or not part_of(empty["rows"], 1, size, rows_cut).any(),
            [*again.not_loaded, *again.not_found],
            into["step"],
        ]

    # What fails on one rank fails on all, and leaves nothing.
    with full_disk(is_last):
        report["full"] = outcome(store.save(4, state_of(4, rank, size)).wait)
    with full_disk(is_last):
        store.save(5, state_of(5, rank, size))
        report["full at the next save"] = outcome(store.save, 6, state_of(6, rank, size))
    odd = {**state_of(4, rank, size), **({"x": object()} if is_last else {})}
    report["unsupported"] = outcome(store.save, 4, odd)
    extra = {**state_of(4, rank, size), **({"y": np.zeros(3)} if is_last else {})}
    report["another name"] = outcome(store.save, 4, extra)
    gap = {"z": Shard(np.zeros(4), (4 * size + 1,), (4 * rank,))}
    report["gap"] = outcome(store.save, 4, gap)
    report["twice"] = outcome(store.save, 3, state_of(3, rank, size))
    report["missing"] = outcome(store.restore, 99)
    report["left"] = sorted(path.name for path in (FOLDER / "store").glob(".unfinished*"))

    saved = store.save(7, state_of(7, rank, size), per_rank=own_of(7, rank)).wait()
    report["after failures"] = [saved.step, saved.reference_step]
    store.close()


def on_two_tiers(report: Report, ranks: Ranks) -> None:
    rank, size = ranks.rank, ranks.size
    with SnapshotStore(
        FOLDER / "slow", fast=FOLDER / "fast", ranks=ranks_of_this_job, report=None, keep=Keep(last=3)
    ) as store:
        for step in (1, 2):
            store.save(step, state_of(step, rank, size), per_rank=own_of(step, rank)).wait()
        store.drain()
        restored = store.restore()
        report["from fast"] = np.array_equal(restored["model"]["rows"], arrays_of(2)["rows"])
        # The drain is rank 0's; that it failed is raised on all.
        with full_disk(rank == 0, within="slow"):
            store.save(3, state_of(3, rank, size)).wait()
            report["drain failed"] = outcome(store.drain)
            store.save(4, state_of(4, rank, size)).wait()
            if rank == 0:
                assert store._drainer is not None, "there is a fast tier"
                with store._drainer._changed:
                    while store._drainer._thread is not None:
                        store._drainer._changed.wait()
        report["save after it"] = outcome(store.save, 5, state_of(5, rank, size))
        store.save(5, state_of(5, rank, size)).wait()


def reshard(report: Report, ranks: Ranks) -> None:
    """Restore what another number of ranks saved, and go on."""
    rank, size = ranks.rank, ranks.size
    whole = arrays_of(7)
    store = SnapshotStore(FOLDER / "store", codec=CODEC, ranks=ranks_of_this_job, report=None)
    empty = {name: np.zeros_like(array) for name, array in whole.items()}
    into = {"model": {"rows": shard_of(empty["rows"], rank, size, 0), "columns": empty["columns"]}}
    restored = store.restore(into=into, only=["model/rows", "model/columns"])
    report["rows"] = np.array_equal(
        part_of(empty["rows"], rank, size, 0), part_of(whole["rows"], rank, size, 0)
    )
    report["columns"] = np.array_equal(empty["columns"], whole["columns"])
    report["per rank"] = restored.per_rank
    saved = store.save(8, state_of(8, rank, size)).wait()
    report["first"] = [saved.step, saved.reference_step]
    saved = store.save(9, state_of(9, rank, size)).wait()
    report["second"] = [saved.step, saved.reference_step]
    store.close()


def be_killed(report: Report, ranks: Ranks, victim: int) -> None:
    """Save, and lose a rank in the middle of the next save."""
    rank, size = ranks.rank, ranks.size
    folder = FOLDER / f"killed-{victim}"
    with SnapshotStore(folder, report=None) as store:
        store.save(1, state_of(1, rank, size)).wait()
    store = SnapshotStore(
        folder, ranks=functools.partial(ranks_of_this_job, timeout_seconds=brief(3)), report=None
    )
    if rank == victim:
        local.LocalWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    report["killed"] = outcome(store.save(2, state_of(2, rank, size)).wait)


def main() -> None:
    if sys.argv[3] == "mpi":
        import mpi4py.MPI  # noqa: F401, with it the ranks find each other
    else:
        import torch.distributed as distributed

        address, rank, size = sys.argv[4:]
        distributed.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size))
    ranks = ranks_of_this_job()
    report: Report = {"rank": ranks.rank, "size": ranks.size}
    for duty in DUTY.split(","):
        if duty.startswith("killed"):
            be_killed(report, ranks, int(duty.removeprefix("killed")))
        else:
            {"save": save_and_restore, "tiers": on_two_tiers, "reshard": reshard}[duty](report, ranks)
    with open(FOLDER / f"report-{DUTY.split(',')[0]}-{ranks.rank}.json", "w") as file:
        json.dump(report, file)
    ranks.all_gather("the end", None) if "killed" not in DUTY else None


if __name__ == "__main__":
    main()
