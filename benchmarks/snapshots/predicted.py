"""Saves of a real training next to their prediction, on tiers whose speed is known.

    sh benchmarks/snapshots/capped_disk.sh SLOW 40
    sh benchmarks/snapshots/capped_disk.sh FAST 80
    python benchmarks/snapshots/predicted.py --slow SLOW --fast FAST [--rounds 2] [--megabytes 100]

First, what a prediction needs is measured while a training goes on: the same training saves to memory, which gives the
shares that are stored and the rates of copying and encoding, and to each folder as it is, then nothing but a commit,
which gives the rate and what comes on top of it; a process drains zeros, which gives what a drain takes to start.

Then it trains without a fast tier, with one, with a cap on its drains, and with one that has space for one snapshot,
and records a trace. A step is one of a small network with AdamW, held to 100 ms: an accelerator would take the rest of
it. Each run begins with the same weights, so it saves the same bytes.

Blocked and durable are those that the store reports, until the commit; drained is from the trace, from the beginning
of a save to the end of the last piece of its drain. Predicted well is within 10 % of what was measured, or within 1 %
of the run. Exits with a failure if a mean over saves is not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.checkpoint.saving import Saved
from penstock.checkpoint.store import SnapshotStore
from penstock.compiling import without_plain_forms
from penstock.flow.recorder import Recorder
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.policy.retention import Keep
from penstock.simulate.saving import FastTier, PredictedSaves, SavePlan, predict_saves
from penstock.trace.file import TraceWriter, read_trace
from penstock.trace.schema import NO_EPOCH, Kind
from penstock.units import format_bytes, format_rate, format_seconds

KEEP, SNAP_DIS = Keep(last=2), 3
SAVES = 5
DRAIN_CAP = 20e6
#: Drains end well before the next save but one begins, or well after.
SLOW_DRAIN_CAP = 17e6
TIMES = 3
#: As a snapshot store begins to drain by a process.
LEAST_APART_BYTES = 64 << 20


class Training:
    """A small network, its optimizer and their steps."""

    def __init__(self, megabytes: float) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        width = 512 if megabytes > 10 else 64
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))  # weights and two moments, float32
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(8, width)
        self.step(0.0)  # makes the moments

    def step(self, least_seconds: float) -> None:
        end = time.perf_counter() + least_seconds
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        time.sleep(max(0.0, end - time.perf_counter()))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass(frozen=True)
class Tier:
    """What was measured of a folder; rates in bytes/s. commit_seconds: of a snapshot beyond its bytes."""

    read: float
    write: float
    commit_seconds: float

    @property
    def curves(self) -> tuple[Curve, Curve]:
        return Curve.flat(self.read), Curve.flat(self.write)


@dataclass(frozen=True)
class Costs:
    """What was measured for a prediction; rates in bytes/s."""

    state_bytes: int
    baseline_share: float
    delta_share: float
    copy: float
    encode: float
    slow: Tier
    fast: Tier
    drain_start_seconds: float


@dataclass(frozen=True)
class Measured:
    """What a run recorded of one save; as `PredictedSave`."""

    blocked_seconds: float
    durable_seconds: float
    drained_seconds: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny state: shows that it runs")
    parser.add_argument("--slow", type=Path, metavar="FOLDER", help="on a capped disk (temporary)")
    parser.add_argument("--fast", type=Path, metavar="FOLDER", help="on a quicker one (temporary)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of state (default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    options = parser.parse_args(arguments)
    every, step_seconds = 30, 0.1
    if options.quick:
        options.megabytes, options.rounds, every, step_seconds = 0.1, 1, 2, 1e-3
    compiled: AbstractContextManager[None] = nullcontext() if options.quick else without_plain_forms()
    with (
        compiled,
        tempfile.TemporaryDirectory(dir=options.slow) as slow,
        tempfile.TemporaryDirectory(dir=options.fast) as fast,
    ):
        tiers = Path(slow), Path(fast)
        costs = measure(options.megabytes, every, step_seconds, *tiers)
        print_costs(costs)
        plan = SavePlan(
            range(every, every * SAVES + 1, every),
            every * SAVES,
            step_seconds,
            costs.state_bytes,
            KEEP,
            snap_dis=SNAP_DIS,
            baseline_share=costs.baseline_share,
            delta_share=costs.delta_share,
            encode_bytes_per_second=costs.encode,
            commit_seconds=costs.slow.commit_seconds,
        )
        print("seconds: means predicted, measured (least to most); predicted / measured of each save")
        far = 0
        for name, tier in alternatives(costs).items():
            predicted = predict_saves(machine_of(costs), plan, tier)
            runs = [run(options.megabytes, plan, tier, *tiers) for _ in range(options.rounds)]
            far += print_comparison(name, predicted, runs)
    if far and not options.quick:
        sys.exit(
            f"{far} means are neither predicted within 10 % of the measured ones nor within 1 % of the run"
        )


def alternatives(costs: Costs) -> dict[str, FastTier | None]:
    """Return what is compared, by its name."""
    start = costs.drain_start_seconds
    commit = costs.fast.commit_seconds
    return {
        "no fast tier": None,
        "fast tier": FastTier("fast", None, math.inf, start, commit),
        "drains capped": FastTier("fast", None, DRAIN_CAP, start, commit),
        "space for one": FastTier("fast", int(1.5 * costs.state_bytes), SLOW_DRAIN_CAP, start, commit),
    }


def machine_of(costs: Costs) -> Machine:
    """Return the machine that was measured."""
    staging = StorageClass("staging", 10**12, 1, Curve.flat(costs.copy))
    fast = StorageClass("fast", 10**12, 1, *costs.fast.curves, 0.0, "filesystem", "fast")
    read, write = costs.slow.curves
    return Machine(SharedStore(read, write=write), (staging, fast))


# -- What a prediction needs -----------------------------------------------------------------------------------


def measure(megabytes: float, every: int, step_seconds: float, slow: Path, fast: Path) -> Costs:
    """Return the medians of what is measured."""
    memory = Path("/dev/shm")
    training = Training(megabytes)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        saved = saves(training, Path(folder), {"snap_dis": SNAP_DIS}, every, 0.0)
        nbytes = saved[0].raw_bytes
        starts = [0.0]
        if nbytes >= LEAST_APART_BYTES:
            starts = [drain_start_seconds(training, step_seconds, Path(folder)) for _ in range(TIMES)]
    shares = [one.stored_bytes / nbytes for one in saved]

    def tier(folder: Path) -> Tier:
        """Return the cost of saves to a folder: of nothing, and of the state as it is."""
        commit = durable_seconds(saves(Training(0), folder, {}, 1, step_seconds))
        stored = durable_seconds(saves(training, folder, {"codec": "stored"}, every // 3 + 1, step_seconds))
        file = folder / "file"
        file.write_bytes(bytes(nbytes))
        begin = time.perf_counter()
        file.read_bytes()
        read_seconds = time.perf_counter() - begin
        file.unlink()  # nor is it written back during a run
        return Tier(nbytes / read_seconds, nbytes / max(stored - commit, commit), commit)

    return Costs(
        nbytes,
        statistics.mean(shares[::SNAP_DIS]),
        statistics.mean(share for number, share in enumerate(shares) if number % SNAP_DIS),
        nbytes / statistics.median(one.blocked_seconds for one in saved),
        nbytes / durable_seconds(saved),
        tier(slow),
        tier(fast),
        max(0.0, statistics.median(starts)),
    )


def saves(
    training: Training, folder: Path, settings: dict[str, Any], every: int, step_seconds: float
) -> list[Saved]:
    """Train, save to a folder every so many steps, and return what was saved."""
    saved = []
    with (
        tempfile.TemporaryDirectory(dir=folder) as top,
        SnapshotStore(top, keep=KEEP, threads=1, report=None, **settings) as store,
    ):
        store.prepare(training.state)
        for number in range(SAVES):
            for _ in range(every):
                training.step(step_seconds)
            saving = store.save(number, training.state)
            while not saving.is_done:
                training.step(step_seconds)
            saved.append(saving.wait())
    return saved


def durable_seconds(saved: Sequence[Saved]) -> float:
    """Return the median of the time that saves take once the training goes on."""
    return statistics.median(one.durable_seconds - one.blocked_seconds for one in saved)


def drain_start_seconds(training: Training, step_seconds: float, folder: Path) -> float:
    """Return the time of a drain by a process that is left if a state is made smaller and smaller.

    Hardly a byte of zeros is written; what they take to be read and encoded is the difference of two sizes. Of a second
    drain: the process begins with the first save.
    """
    seconds = []
    for nbytes in (LEAST_APART_BYTES, 2 * LEAST_APART_BYTES):
        recorder = Recorder(256)
        with (
            tempfile.TemporaryDirectory(dir=folder) as near,
            tempfile.TemporaryDirectory(dir=folder) as far,
            SnapshotStore(far, fast=near, scheme="complete", threads=1, trace=recorder, report=None) as store,
        ):
            for step in (1, 2):
                saving = store.save(step, {"zeros": np.zeros(nbytes, np.uint8)})
                while not (Path(far) / f"step-{step:012d}").exists():
                    training.step(step_seconds)
        spans = recorder.drain()
        spans = spans[spans["step"] == 2]
        begin = spans["start"][spans["kind"] == Kind.SAVE].min() + saving.wait().durable_seconds
        seconds.append(float(spans["end"][spans["kind"] == Kind.DRAIN].max() - begin))
    return 2 * seconds[0] - seconds[1]


# -- A run ------------------------------------------------------------------------------------------------------


def run(
    megabytes: float, plan: SavePlan, tier: FastTier | None, slow: Path, fast: Path
) -> dict[int, Measured]:
    """Train, and return what was recorded of each save, by its step."""
    training = Training(megabytes)
    recorder = Recorder(1 << 12)
    ring = recorder.ring(0)
    settings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=slow) as folder, tempfile.TemporaryDirectory(dir=fast) as near:
        if tier is not None:
            cap = tier.drain_bytes_per_second
            settings = {"fast": near, "fast_bytes": tier.capacity_bytes}
            settings |= {"drain_bytes_per_second": None if cap == math.inf else cap}
        store = SnapshotStore(
            folder, keep=KEEP, snap_dis=SNAP_DIS, threads=1, trace=recorder, report=None, **settings
        )
        savings = []
        with store:
            store.prepare(training.state)
            for step in range(1, plan.last_step + 1):
                start = recorder.clock()
                training.step(plan.step_seconds)
                ring.record(Kind.STEP, start, recorder.clock(), epoch=NO_EPOCH, step=step)
                if step in plan.steps:
                    savings.append(store.save(step, training.state))
        path = Path(folder) / "run.trace"
        with TraceWriter(path, {}) as writer:
            writer.append(recorder.drain(), recorder.dropped)
        spans = read_trace(path).spans
    measured = {}
    for saving in savings:
        saved = saving.wait()
        own = spans[spans["step"] == saved.step]
        begin = own["start"][own["kind"] == Kind.SAVE].min()
        drained = own["end"][own["kind"] == Kind.DRAIN]
        drained_seconds = float(drained.max() - begin) if drained.size else None
        measured[saved.step] = Measured(saved.blocked_seconds, saved.durable_seconds, drained_seconds)
    return measured


# -- What is printed --------------------------------------------------------------------------------------------


def print_costs(costs: Costs) -> None:
    """Print what was measured for the prediction."""
    print(
        f"{format_bytes(costs.state_bytes)} of state, of which a baseline takes {costs.baseline_share:.3f}, a delta "
        f"{costs.delta_share:.3f}; copied at {format_rate(costs.copy)}, encoded at {format_rate(costs.encode)}; slow "
        f"tier written at {format_rate(costs.slow.write)}, fast one at {format_rate(costs.fast.write)}, each "
        f"snapshot there {format_seconds(costs.slow.commit_seconds)} and {format_seconds(costs.fast.commit_seconds)} "
        f"beyond that; a drain starts in {format_seconds(costs.drain_start_seconds)}",
        flush=True,
    )


def print_comparison(name: str, predicted: PredictedSaves, runs: Sequence[dict[int, Measured]]) -> int:
    """Print a line for each kind of seconds, and return how many of their means are predicted badly."""
    far = 0
    for kind in ("blocked_seconds", "durable_seconds", "drained_seconds"):
        pairs = [
            (getattr(save, kind), getattr(run[save.step], kind)) for run in runs for save in predicted.saves
        ]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        if not both:
            continue

        def is_near(one: float, other: float) -> bool:
            return abs(one - other) <= max(0.1 * other, 0.01 * predicted.run_seconds)

        means = [statistics.mean(each) for each in zip(*both, strict=True)]
        measured = [other for _, other in both]
        ratios = [one / other for one, other in both]
        other_drains = len(pairs) - len(both) - pairs.count((None, None))
        far += not is_near(*means) or other_drains > 0
        print(
            f"{name}, {kind.removesuffix('_seconds')}: {means[0]:.3f}, {means[1]:.3f} "
            f"({min(measured):.3f} to {max(measured):.3f}); {min(ratios):.2f} to {max(ratios):.2f}, "
            f"{sum(is_near(*pair) for pair in both)} of {len(both)} predicted well"
            + (f"; drained in one alone: {other_drains}" if other_drains else ""),
            flush=True,
        )
    return far


if __name__ == "__main__":
    main()
