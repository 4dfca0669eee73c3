"""How long training stands still for a save whose parts are copied to the memory of the hosts, beside one that is not.

    make bench NAME=snapshots/host_copies       # under a minute; ARGS="--ranks 4 --mib 512" for more

Ranks, each as if on a host of its own, save the same state to a store with `host_copies=` and to one without, in turns,
of which the first are left out. A save begins once the one before and its copies are done. Printed: seconds blocked of
the slowest rank, median with least and most, and the ratio of each pair. Then as many saves of each, one behind the
other: the next one waits for the copies, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scale"))
from peers import Pipes

from penstock.checkpoint import SnapshotStore
from penstock.ranks import Ranks

STORES = ("without", "with")
MOST_SECONDS = 60.0


def wait_for_copies(folder: Path, step: int, ranks: int) -> None:
    """Wait until a host has the parts of its rank, and of the one before. Raises: TimeoutError."""
    until, count = time.monotonic() + MOST_SECONDS, min(2, ranks)
    while len([*folder.glob(f"step-{step:012d}/part-*")]) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{folder} has no copies of step {step} after {MOST_SECONDS:g} s")
        time.sleep(1e-3)


def run_rank(
    of_training: Pipes, of_stores: dict[str, Pipes], folder: Path, memory: Path, nbytes: int, rounds: int
) -> dict[str, Any]:
    """Return seconds blocked, by store: of each save alone, and of all that follow each other.

    of_training, of_stores: messages between ranks, of the training and of each store, which exchange some at any time.
    """
    ranks = Ranks(of_training)
    own = memory / f"host {ranks.rank}"
    weights = np.random.default_rng(0).random(nbytes // 4, np.float32)
    alone: dict[str, list[float]] = {name: [] for name in STORES}
    behind: dict[str, list[float]] = {name: [] for name in STORES}
    how: dict[str, Any] = {"scheme": "complete", "codec": "stored", "keep": 2, "report": None}
    stores = {}
    for name, pipes in of_stores.items():
        copies = own if name == "with" else None
        stores[name] = SnapshotStore(folder / name, ranks=partial(Ranks, pipes), host_copies=copies, **how)
    try:
        for step in range(1, rounds + 2):
            for name in STORES[:: 1 if step % 2 else -1]:
                weights += 1
                ranks.all_gather("a save", None)
                saved = stores[name].save(step, {"weights": weights}).wait()
                alone[name].append(saved.blocked_seconds)
                if name == "with":
                    wait_for_copies(own, step, ranks.size)
        for name in STORES:
            for step in range(rounds + 2, 2 * rounds + 3):
                ranks.all_gather("a save", None)
                begin = time.perf_counter()
                saving = stores[name].save(step, {"weights": weights})
                behind[name].append(time.perf_counter() - begin)
            saving.wait()
    finally:
        for store in stores.values():
            store.close()
    return {"alone": alone, "behind": behind}


def run_job(ranks: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Fork the ranks of a job; return what each says."""
    of_training, of_stores, outputs = Pipes(ranks), {name: Pipes(ranks) for name in STORES}, []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for rank in range(ranks):
            output, end = os.pipe()
            if os.fork() == 0:
                for pipes in (of_training, *of_stores.values()):
                    pipes.rank = rank
                try:
                    found = run_rank(of_training, of_stores, Path(folder), Path(memory), nbytes, rounds)
                    os.write(end, json.dumps(found).encode())
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(end)
            outputs.append(output)
        texts = [os.fdopen(output).read() for output in outputs]
        for _ in outputs:
            os.wait()
    if not all(texts):
        raise SystemExit("a rank failed: see above")
    return [json.loads(text) for text in texts]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--mib", type=int, default=256, help="of the state, of which each rank writes its share"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="1 MiB, two rounds; its figures mean nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        print(json.dumps(run_job(*json.loads(options.job))))
        return
    mib, rounds = (1, 2) if options.quick else (options.mib, options.rounds)
    # A process without threads, to be forked.
    command = [sys.executable, __file__, "--job", json.dumps([options.ranks, mib << 20, rounds])]
    of_ranks = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for how, words in (("alone", "each alone"), ("behind", "one behind the other")):
        # The slowest rank's; the first save of a store takes new memory.
        blocked = {
            name: [max(each) for each in zip(*(rank[how][name] for rank in of_ranks), strict=True)][1:]
            for name in STORES
        }
        for name, seconds in blocked.items():
            print(
                f"{mib} MiB on {options.ranks} ranks, {words}, {name} copies: blocked {1e3 * median(seconds):.1f} ms "
                f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"
            )
        ratios = [ours / plain for ours, plain in zip(blocked["with"], blocked["without"], strict=True)]
        print(f"with / without, {words}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
