"""A small training's steps while a snapshot drains, and while none does; a line of JSON for each round.

    python benchmarks/snapshots/steps_beside_drain.py --state FOLDER --folder SLOW --fast FOLDER --threads N --rounds N

Run by compare_saves.py. A round saves the state to the fast tier, waits until it is durable there, steps until it has
come to the slow one, and takes as many steps again with nothing under way.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from peer_saves import read_states

from penstock.checkpoint.store import SnapshotStore
from penstock.policy.retention import Keep

CAP_BYTES_PER_SECOND = 100 * 2**20
MOST_SECONDS = 600


def main() -> None:
    """Train, save, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the slow tier")
    parser.add_argument("--fast", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(768, 768), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(128, 768)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    state, fill = read_states(options.state)
    with SnapshotStore(
        options.folder,
        fast=options.fast,
        drain_bytes_per_second=CAP_BYTES_PER_SECOND,
        keep=Keep(last=2),
        snap_dis=3,
        report=None,
    ) as store:
        for number in range(options.rounds + 1):
            fill(number % 2)
            for _ in range(5):
                step()
            store.save(number, state).wait()
            slow = options.folder / f"step-{number:012d}"
            steps, begin = 0, time.perf_counter()
            while not slow.exists():
                step()
                steps += 1
                if time.perf_counter() - begin > MOST_SECONDS:
                    store.drain()  # raises what it failed with
                    raise SystemExit(f"a drain took more than {MOST_SECONDS} s")
            draining = time.perf_counter() - begin
            store.drain()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            quiet = time.perf_counter() - begin
            if number and steps:  # the first compiles and touches
                print(
                    json.dumps({"draining": draining / steps, "quiet": quiet / steps, "seconds": draining}),
                    flush=True,
                )
    shutil.rmtree(options.fast)


if __name__ == "__main__":
    main()
