"""A small training's steps while a snapshot drains, and while none does; a line of JSON for each round.

    python benchmarks/snapshots/steps_beside_drain.py --state FOLDER --folder SLOW --fast FOLDER --threads N --rounds N

Run by compare_saves.py. A round saves the state to the fast tier, waits until it is durable there, steps until it has
come to the slow one, and takes as many steps again with nothing under way. With --apart another process saves and
drains: what is then left of the difference is the machine's, and no matter of Python's threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
from peer_saves import read_states

from penstock.checkpoint.store import SnapshotStore
from penstock.policy.keeping import Keep

CAP_BYTES_PER_SECOND = 100 * 2**20
MOST_SECONDS = 120


class Drains(Protocol):
    """Who saves and drains."""

    def save(self, step: int) -> None:
        """Return once a snapshot is durable on the fast tier; its drain begins."""
        ...

    def is_draining(self, step: int) -> bool:
        """Return whether it is still to come to the slow tier."""
        ...

    def finish(self) -> None:
        """Return once all is drained. Raises: what it failed with."""
        ...

    def close(self) -> None:
        """Save no more."""
        ...


class Here:
    """This process: the drain's threads are beside the training's."""

    def __init__(self, state: Path, fast: Path, slow: Path) -> None:
        self._state, self._fill = read_states(state)
        self._slow = slow
        self._store = SnapshotStore(
            slow,
            fast=fast,
            drain_bytes_per_second=CAP_BYTES_PER_SECOND,
            keep=Keep(last=2),
            snap_dis=3,
            report=None,
        )

    def save(self, step: int) -> None:
        self._fill(step % 2)
        self._store.save(step, self._state).wait()

    def is_draining(self, step: int) -> bool:
        return not (self._slow / f"step-{step:012d}").exists()

    def finish(self) -> None:
        self._store.drain()

    def close(self) -> None:
        self._store.close()


class Apart:
    """Another process, for comparison."""

    def __init__(self, state: Path, fast: Path, slow: Path) -> None:
        self._slow = slow
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, state, fast, slow), daemon=True)
        self._process.start()
        theirs.close()

    def save(self, step: int) -> None:
        self._ask(step)

    def is_draining(self, step: int) -> bool:
        return not (self._slow / f"step-{step:012d}").exists()

    def finish(self) -> None:
        self._ask(None)

    def _ask(self, step: int | None) -> None:
        self._pipe.send(step)
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, state: Path, fast: Path, slow: Path) -> None:
    here = Here(state, fast, slow)
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            here.close()
            return
        if step is None:
            here.finish()
        else:
            here.save(step)
        pipe.send(None)


def main() -> None:
    """Train, save, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the slow tier")
    parser.add_argument("--fast", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--apart", action="store_true", help="another process saves and drains")
    options = parser.parse_args()
    step = small_training(options.threads)
    drains: Drains = (Apart if options.apart else Here)(options.state, options.fast, options.folder)
    for number in range(options.rounds + 1):
        for _ in range(5):
            step()
        drains.save(number)
        steps, begin = 0, time.perf_counter()
        while drains.is_draining(number):
            step()
            steps += 1
            if time.perf_counter() - begin > MOST_SECONDS:
                drains.finish()  # raises what it failed with
                raise SystemExit(f"a drain took more than {MOST_SECONDS} s")
        draining = time.perf_counter() - begin
        drains.finish()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        quiet = time.perf_counter() - begin
        if number and steps:  # the first compiles and touches
            print(
                json.dumps({"draining": draining / steps, "quiet": quiet / steps, "seconds": draining}),
                flush=True,
            )
    drains.close()
    shutil.rmtree(options.fast)


def small_training(threads: int) -> Callable[[], None]:
    """Return what takes a step of a training that is always the same."""
    torch.set_num_threads(threads)
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

    return step


if __name__ == "__main__":
    main()
