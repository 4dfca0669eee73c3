"""Automatic placement on real workers beside fixed ones, over rates of links and speeds of workers.

    python benchmarks/graph/placed_workers.py [--rounds N] [--only MODEL ...] [--quick]

Two worker processes, each on one thread. The kernels of `chain` and `branches` wait on a clock, so that two workers and
their client are honest on two processors; those of `halves` multiply matrices: two halves of a batch, as of a training
in step, through two layers. A worker of a speed of 1/5 takes 5 times as long for each kernel. Links: memory that both
map; and encrypted messages over a loopback whose rate tc limits, in a network namespace of its own. That needs root and
iproute2; where they are missing, a line says that these links are left out.

The first node's input and the last node are on the first worker. Fixed are all placements of the other nodes of `chain`
and `branches`, and of `halves` five by hand. All run in turn three times, then the four fastest and the single workers
--rounds times: the fastest of these is the best fixed one. It and the better single worker run --rounds times more, in
turn with the automatic placement, so that none of them is judged by the rounds that it was chosen by. The automatic one
is that after one run that `learn` measured and the steps in which it is tried; nothing is said to it of links and
speeds. Printed for each: the median time of its step over that of the best fixed one, with the least and the most of
the rounds, and of the better single worker over it. It fails where results differ in a bit, where the automatic
placement is over 5 % behind, where it is nowhere 5 % ahead of the best placement that is the same in the whole sweep,
or where nodes of `chain` are on a worker that is 5 times as slow, and the link is fast.

Nothing else should run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.graph import Edge, Graph, Session
from penstock.graph.workers import LocalWorkers, WorkerSession
from penstock.policy.graph_trial import MOST_STEPS

TASKS = ("/job:worker/task:0", "/job:worker/task:1")
#: Bytes a second; None is memory that both map.
RATES = (None, 1e8, 1e7)
#: How many times as long each worker takes.
SLOWNESS = ((1, 1), (1, 2), (1, 5), (5, 1))
SLOW, MOST_BEHIND, CANDIDATES = 5, 0.05, 4
#: How often all placements run.
TRIES = 3


def wait(seconds: float, count: int, *given: torch.Tensor) -> torch.Tensor:
    """Return numbers that follow from all that are given, so many seconds after the call."""
    end = time.perf_counter() + seconds
    total = sum(float(each.double().sum()) for each in given)
    found = torch.arange(count, dtype=torch.float32).add_(total % 1000)
    time.sleep(max(0.0, end - time.perf_counter()))
    return found


def digest(given: torch.Tensor) -> torch.Tensor:
    return torch.tensor(zlib.crc32(given.numpy().tobytes()), dtype=torch.int64)


#: Of nodes: milliseconds, and how many thousand float32 they give.
KINDS = [(2, 250), (4, 60), (6, 250), (3, 60), (5, 250)]
#: What Call nodes name.
functions: dict[str, Callable[..., Any]] = {
    "digest": digest,
    **{f"{ms} ms": partial(wait, ms / 1000, 1000 * count) for ms, count in KINDS},
}

#: By node: the worker that it asks for.
Where = Mapping[str, str]


def waiting(edges: Mapping[str, Sequence[str]], graph: Graph, where: Where) -> Edge:
    """Add nodes that wait, by their inputs; "" is what the first worker has. Return the last node's output."""
    with graph.on_device(TASKS[0]):
        made: dict[str, Edge] = {"": graph.add("Zeros", dtype="float32", shape=[1000])}
    for (name, inputs), (ms, count) in zip(edges.items(), itertools.cycle(KINDS)):
        with graph.on_device(where.get(name, "")):
            made[name] = graph.add(
                "Call",
                *(made[each] for each in inputs),
                function=f"{ms} ms",
                outputs=[["float32", [1000 * count]]],
            )
    return made[list(edges)[-1]]


CHAIN = {f"n{k}": (f"n{k - 1}" if k else "",) for k in range(5)}
BRANCHES = {"b0": ("",), "c0": ("",), "b1": ("b0",), "c1": ("c0",), "z": ("b1", "c1")}


def halves(graph: Graph, where: Where) -> Edge:
    """Add two halves of a batch through two layers, and return what comes out of both, added up."""
    random = np.random.default_rng(0)

    def read(*shape: int) -> Edge:
        initial = random.normal(0, 0.1, shape).astype(np.float32)
        found: Edge = graph.add("Read", graph.variable("float32", list(shape), initial=initial))
        return found

    with graph.on_device(TASKS[0]):
        layers, batches = [read(512, 512) for _ in range(2)], [read(512, 512) for _ in range(2)]
    ends = []
    for half, x in enumerate(batches):
        for number, layer in enumerate(layers):
            with graph.on_device(where.get(f"half {half}, layer {number}", "")):
                x = graph.add("ReLU", x @ layer)
        ends.append(x)
    with graph.on_device(TASKS[0]):
        total: Edge = ends[0] + ends[1]
        return total


def everywhere(names: Sequence[str]) -> Iterator[Where]:
    for tasks in itertools.product(TASKS, repeat=len(names)):
        yield dict(zip(names, tasks, strict=True))


def by_hand() -> Iterator[Where]:
    for tasks in ((0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1)):
        names = [f"half {half}, layer {layer}" for half in range(2) for layer in range(2)]
        yield {name: TASKS[task] for name, task in zip(names, tasks, strict=True)}


#: By name: what adds its nodes, given where they are, and fixed placements.
MODELS: dict[str, tuple[Callable[[Graph, Where], Edge], list[Where]]] = {
    "chain": (partial(waiting, CHAIN), list(everywhere(list(CHAIN)))),
    "branches": (partial(waiting, BRANCHES), list(everywhere(list(BRANCHES)))),
    "halves": (halves, list(by_hand())),
}


def ended(graph: Graph, last: Edge) -> Edge:
    """Return a checksum of what a node gives, on the first worker."""
    with graph.on_device(TASKS[0]):
        end: Edge = graph.add("Call", last, function="digest", outputs=[["int64", []]])
    return end


def seconds_of(run: Callable[[], object], expected: int) -> float:
    """Return how long a run takes that gives what is expected."""
    begin = time.perf_counter()
    found = run()
    took = time.perf_counter() - begin
    assert found == expected, "the result is another one"
    return took


def medians_of(
    runs: Sequence[Callable[[], object]], expected: int, rounds: int
) -> tuple[list[list[float]], list[float]]:
    """Return how long runs take in turn, by round, and the median of each."""
    times = [[seconds_of(each, expected) for each in runs] for _ in range(rounds)]
    return times, [statistics.median(column) for column in zip(*times, strict=True)]


class Row(NamedTuple):
    """What a model came to on one link, for one pair of workers.

    seconds: of each fixed placement, medians of a few rounds of all; beside: of the automatic one in these.
    on_slow: nodes of a chain that are on a slow worker although the link is fast.
    """

    name: str
    automatic: float
    ratios: list[float]
    behind: float
    single: float
    seconds: list[float]
    beside: float
    on_slow: int


def measured(
    name: str, workers: LocalWorkers, slowness: tuple[int, int], rate: float | None, rounds: int
) -> Row:
    """Run a model under all its fixed placements, and in turn with the best of them under the automatic one."""
    add, fixed = MODELS[name]
    own, other = Graph(), Graph()
    automatic = ended(own, add(own, {}))
    ends = [ended(other, add(other, where)) for where in fixed]
    for graph in (own, other):
        graph.initialize_all(name="init")
    with Session(own, functions=functions) as one:
        one.run(targets=["init"])
        expected = int(one.run(automatic))
    options: dict[str, Any] = {"shares_memory": rate is None, "lag_seconds": 30.0}
    with (
        WorkerSession(own, workers.addresses, workers.secret, **options) as learned,
        WorkerSession(other, workers.addresses, workers.secret, **options) as session,
    ):
        for each in (learned, session):
            each.run(targets=["init"])
        runs = [partial(session.run, end) for end in ends]
        for run in runs:
            seconds_of(run, expected)
        learned.learn(automatic)
        run = partial(learned.run, automatic)
        for _ in range(MOST_STEPS):
            seconds_of(run, expected)
        beside, *seconds = medians_of([run, *runs], expected, min(rounds, TRIES))[1]
        singles = [place for place, where in enumerate(fixed) if len(set(where.values())) == 1]
        best = sorted(range(len(fixed)), key=seconds.__getitem__)[:CANDIDATES]
        tried = list(dict.fromkeys([*best, *singles]))
        chosen = medians_of([runs[place] for place in tried], expected, rounds)[1]
        of = dict(zip(tried, chosen, strict=True))
        fastest, single = min(tried, key=of.__getitem__), min(singles, key=of.__getitem__)
        times, medians = medians_of([run, runs[fastest], runs[single]], expected, rounds)
        device = learned.placement().device
    slow = {task for task, each in zip(TASKS, slowness, strict=True) if each == SLOW}
    calls = [node.name for node in own.nodes.values() if node.op == "Call" and not node.device]
    return Row(
        name,
        medians[0],
        [row[0] / row[1] for row in times],
        medians[0] / medians[1],
        medians[2] / medians[0],
        seconds,
        beside,
        sum(device[each].startswith(tuple(slow)) for each in calls)
        if slow and rate is None and name == "chain"
        else 0,
    )


def limit(rate: float | None) -> None:
    """Let so many bytes a second pass the loopback of this network namespace. None: as many as there are."""
    if rate is None:
        subprocess.run(["tc", "qdisc", "delete", "dev", "lo", "root"], check=False, stderr=subprocess.DEVNULL)
        return
    bucket = ["tbf", "rate", f"{8 * rate:.0f}bit", "burst", "32kb", "limit", "100mb"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *bucket], check=True)


def sweep(
    rates: Sequence[float | None],
    pairs: Sequence[tuple[int, int]],
    rounds: int,
    models: Sequence[str] = tuple(MODELS),
) -> list[Row]:
    """Measure all models, and print a line for each."""
    rows = []
    os.environ["OMP_NUM_THREADS"] = "1"
    for slowness in pairs:
        with LocalWorkers(
            len(TASKS), nodes=Path(__file__).stem, slowness=dict(enumerate(map(float, slowness)))
        ) as workers:
            for rate in rates:
                if len(rates) > 1:
                    limit(rate)
                for name in models:
                    row = measured(name, workers, slowness, rate, rounds)
                    rows.append(row)
                    link = "shared memory" if rate is None else f"{rate / 1e6:.0f} MB/s"
                    print(
                        f"{name}, {link}, workers {slowness[0]} and {slowness[1]} times as slow: "
                        f"{1e3 * row.automatic:.1f} ms, {row.behind:.3f} ({min(row.ratios):.3f} to "
                        f"{max(row.ratios):.3f}) of the best fixed placement; one worker takes {row.single:.2f} of it",
                        flush=True,
                    )
    return rows


def sum_up(rows: Sequence[Row]) -> tuple[float, float]:
    """Print and return how far the automatic placement is behind at most, and ahead: ratios of times."""
    behind = max(rows, key=lambda row: row.behind)
    print(f"behind the best fixed placement at most {behind.behind - 1:.1%}, with {behind.name}")
    ahead = 0.0
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        sums = [sum(math.log(row.seconds[place]) for row in own) for place in range(len(own[0].seconds))]
        same = min(range(len(sums)), key=sums.__getitem__)
        most = max(row.seconds[same] / row.beside for row in own)
        ahead = max(ahead, most)
        print(f"{name}: ahead of the fixed placement that is the best for the whole sweep up to {most:.2f} x")
    return behind.behind, ahead


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="one pair of workers, one link, one round")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.quick:
        sum_up(sweep(RATES[:1], SLOWNESS[2:3], 1))
        return
    if given.inside:
        subprocess.run(["ip", "link", "set", "lo", "mtu", "16000", "up"], check=True)
    elif os.geteuid() == 0 and shutil.which("tc") and shutil.which("unshare"):
        words = sys.argv[1:] if arguments is None else arguments
        inside = ["unshare", "--net", sys.executable, __file__, *words, "--inside"]
        sys.exit(subprocess.run(inside, check=False).returncode)
    else:
        print("links that are limited are left out: they need root, tc and unshare")
    rows = sweep(RATES if given.inside else RATES[:1], SLOWNESS, given.rounds, given.only)
    behind, ahead = sum_up(rows)
    on_slow = sum(row.on_slow for row in rows)
    assert not on_slow, f"{on_slow} nodes of the chain are on the slow worker"
    assert behind <= 1 + MOST_BEHIND, f"{behind - 1:.1%} behind the best fixed placement"
    assert ahead > 1 + MOST_BEHIND, "nowhere ahead of one placement for the whole sweep"


if __name__ == "__main__":
    main()
