"""How long training waits for its batches, as figures 5.11 to 5.14 of the thesis have it, at this machine's size.

    python benchmarks/scale/training_stalls.py                      the table: five minutes
    python benchmarks/scale/training_stalls.py --plot stalls.png    and a picture of it

The store is one wire of 50 MB/s behind 5 ms, for all ranks together; a sample has 110,592 bytes, as a file of ImageNet
has on average, and is a picture as it lies in memory: nothing is decoded. Each rank trains on 16 of them a step. A step
computes elsewhere, as on a GPU, for as long as those networks took on a P100, and meanwhile trains a small classifier,
whose gradients ranks add up. All loaders give the same batches, so that all classifiers are the same, bit by bit: that
is checked. All ranks together have memory for 1.2 times the data set; `hash-home` has it on local disks instead, as a
cache on the nodes' drives does (HVAC, a cache group of JuiceFS). Printed for each: for how long a rank waits in the
whole run, median of ranks, and as rank 0 predicts it (`Loader.predict`); the least that it takes to bring each sample
once, where steps take no longer than they should; the share of the run; how many times longer a rank of DataLoader
waits, with no worker and with 4; and how many of 1,000 new pictures the classifier names. The first wait begins before
the loader is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from peers import LATENCY_SECONDS, RATE, Made, Pipes, batches_of, predicted_epochs, run_job

from penstock.measure.slow_source import SlowSource
from penstock.ranks import Ranks

LOCAL_BATCH, CLASSES, VALIDATION = 16, 10, 1000
#: A picture of 192 x 192 has 6 x 6 tiles of 32 x 32 pixels with three colours.
TILES, TILE = 6, 32
FEATURES = TILES * TILES * 3
SAMPLE_BYTES = FEATURES * TILE * TILE
#: Of a step. ResNet-50: 219 pictures a second, as TensorFlow's published benchmarks have it on a P100. SqueezeNet takes
#: a fifth of its multiplications (0.82 of 4.1 billion a picture).
STEP_SECONDS = {"ResNet-50": LOCAL_BATCH / 219, "SqueezeNet": LOCAL_BATCH / 219 / 5}
OWN = 'share="host"'
#: By name: worker processes of PyTorch's DataLoader, or what differs from a loader whose ranks share memory.
LOADERS: dict[str, int | dict[str, Any]] = {
    "DataLoader, 0 workers": 0,
    "DataLoader, 4 workers": 4,
    OWN: {},
    "hash-home, local disk": {"policy": "hash-home", "share_of_data": 0.05},
}
DATALOADERS = tuple(LOADERS)[:2]


class Figure(NamedTuple):
    """What a figure of the thesis has. published: how much longer those of `DATALOADERS` wait, and where."""

    network: str
    ranks: tuple[int, ...]
    samples: int
    epochs: int
    published: str


FIGURES = {
    "5.11": Figure("ResNet-50", (1, 2, 4), 384, 3, "1,132 and 36 (10 % of ImageNet)"),
    "5.12": Figure("SqueezeNet", (1, 2, 4), 384, 3, "longer in all runs (10 % of ImageNet)"),
    "5.13": Figure("ResNet-50", (2, 4), 768, 3, "2,924 and 44 (ImageNet, 8 to 32 nodes)"),
    "5.14": Figure("ResNet-50", (4,), 384, 10, "HDMLP waits in no step of 10 epochs (ImageNet, 256 nodes)"),
}
QUICK = {"5.12": FIGURES["5.12"]._replace(ranks=(1, 2), samples=64, epochs=2)}


def pictures(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pictures, uint8[count, SAMPLE_BYTES], and their classes: tiles with colours of a class, and noise."""
    of_classes = np.random.default_rng(0).normal(0, 1, (CLASSES, FEATURES))
    draws = np.random.default_rng([1, seed])
    labels = draws.integers(0, CLASSES, count)
    tiles = of_classes[labels] + draws.normal(0, 3, (count, FEATURES))
    colours = np.clip(128 + 20 * tiles, 0, 255).astype(np.uint8).reshape(count, TILES, 1, TILES, 1, 3)
    return np.broadcast_to(colours, (count, TILES, TILE, TILES, TILE, 3)).reshape(count, -1), labels


class Pictures(Made):
    """Pictures that are in memory."""

    fingerprint = "pictures"

    def __init__(self, samples: int) -> None:
        super().__init__(samples, SAMPLE_BYTES)
        self._pixels, self.labels = pictures(samples, seed=0)

    def read(self, sample: int) -> bytes:
        self.reads += 1
        return bytes(self._pixels[sample])


class Classifier:
    """A softmax of the tiles' mean colours. Sums of pixels are integers, so that no bit depends on who adds them up."""

    def __init__(self) -> None:
        self.weights = np.zeros((FEATURES + 1, CLASSES))

    def scores(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        sums = rows.reshape(-1, TILES, TILE, TILES, TILE, 3).sum((2, 4), dtype=np.int64)
        inputs = np.ones((len(rows), FEATURES + 1))
        inputs[:, 1:] = sums.reshape(len(rows), FEATURES) / (20.0 * TILE * TILE) - 128 / 20
        return inputs, inputs @ self.weights

    def gradient(self, rows: NDArray[np.uint8], labels: NDArray[np.int64]) -> NDArray[np.float64]:
        inputs, scores = self.scores(rows)
        likely = np.exp(scores - scores.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        likely[np.arange(len(rows)), labels] -= 1
        found: NDArray[np.float64] = inputs.T @ likely
        return found

    def accuracy(self) -> float:
        """Return the share of pictures that it names which it was not trained on."""
        rows, labels = pictures(VALIDATION, seed=1)
        return float((self.scores(rows)[1].argmax(1) == labels).mean())


def sum_of(gradients: Sequence[bytes]) -> bytes:
    total: NDArray[np.float64] = np.sum([np.frombuffer(each) for each in gradients], 0)
    return bytes(total)


def train(job: dict[str, Any], source: SlowSource, made: Made, pipes: Pipes) -> dict[str, Any]:
    """Return how long one rank waited in each step, and what it has learned."""
    own = Ranks(pipes)
    learned, waits = Classifier(), []
    own.all_gather("the begin", None)
    began = asked = time.perf_counter()
    with batches_of(job, source, made, own) as loader:
        for _ in range(job["epochs"]):
            for rows, labels in loader:
                waits.append((now := time.perf_counter()) - asked)
                gradient = learned.gradient(np.asarray(rows), np.asarray(labels)).tobytes()
                del rows
                time.sleep(max(0.0, now + job["step_seconds"] - time.perf_counter()))
                total = own.gather_then_decide("a step", partial(bytes, gradient), sum_of)
                learned.weights -= 0.1 / job["batch"] * np.frombuffer(total).reshape(learned.weights.shape)
                asked = time.perf_counter()
        seconds = time.perf_counter() - began
        predicted = sum(waited for _, waited in predicted_epochs(loader, job)) if own.rank == 0 else 0.0
    model = hashlib.blake2b(learned.weights.tobytes(), digest_size=8).hexdigest()
    accuracy = learned.accuracy() if own.rank == 0 else 0.0
    return {"waits": waits, "seconds": seconds, "model": model, "accuracy": accuracy, "predicted": predicted}


class Row(NamedTuple):
    """What a run came to. waits: float[ranks, steps], seconds. predicted_seconds: of waits; 0 of a DataLoader."""

    waits: NDArray[np.float64]
    seconds: float
    model: str
    accuracy: float
    predicted_seconds: float

    @property
    def stall_seconds(self) -> float:
        return float(median(self.waits.sum(1)))


def job_of(name: str, figure: Figure, ranks: int) -> dict[str, Any]:
    how = LOADERS[name]
    job: dict[str, Any] = {
        "ranks": ranks,
        "samples": figure.samples,
        "sample_bytes": SAMPLE_BYTES,
        "batch": LOCAL_BATCH * ranks,
        "epochs": figure.epochs,
        "step_seconds": STEP_SECONDS[figure.network],
        "share_of_data": 1.2,
        "shares": "host",
    }
    return job | ({"workers": how} if isinstance(how, int) else how)


def run_all(jobs: Sequence[dict[str, Any]]) -> None:
    """Run jobs, and print what the ranks of each say."""
    for job in jobs:
        with tempfile.TemporaryDirectory() if job["share_of_data"] < 1 else nullcontext() as folder:
            print(json.dumps(run_job(job | {"disk": folder}, train, Pictures(job["samples"]))), flush=True)


def row_of(of_ranks: Sequence[dict[str, Any]]) -> Row:
    """Return what a job came to. of_ranks: what `train` returned."""
    (model,) = {each["model"] for each in of_ranks}
    seconds = max(each["seconds"] for each in of_ranks)
    waits, first = np.array([each["waits"] for each in of_ranks]), of_ranks[0]
    return Row(waits, seconds, model, first["accuracy"], first["predicted"])


Rows = dict[tuple[str, int, str], Row]


def least_seconds(figure: Figure, ranks: int) -> float:
    """Return how long training waits at least for what crosses the wire once: the first batch, or all but its steps."""
    batch, all_samples = (count * SAMPLE_BYTES / RATE for count in (LOCAL_BATCH * ranks, figure.samples))
    steps = figure.samples / (LOCAL_BATCH * ranks)
    return LATENCY_SECONDS + max(batch, all_samples - (steps - 1) * STEP_SECONDS[figure.network])


def factors(rows: Rows, figure: str, ranks: int) -> list[float]:
    """Return how many times longer than ranks that share those of DataLoader wait, by its number of workers."""
    own = rows[figure, ranks, OWN].stall_seconds
    return [rows[figure, ranks, name].stall_seconds / own for name in DATALOADERS]


def plot(rows: Rows, figures: dict[str, Figure], path: Path) -> None:
    """Draw a panel for each figure: seconds waited over the number of ranks; of 5.14 the longest wait of each step."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 7), layout="constrained")
    panels = canvas.subplots(2, 2).ravel()
    for axes, (number, figure) in zip(panels, figures.items(), strict=False):
        title = f"As {number}: {figure.network}, {figure.samples} samples, {figure.epochs} epochs"
        for name in LOADERS:
            if number == "5.14":
                longest = 1e3 * rows[number, figure.ranks[0], name].waits.max(0)
                axes.plot(np.maximum(longest, 1e-2), linewidth=1)
            else:
                own = [rows[number, ranks, name].stall_seconds for ranks in figure.ranks]
                axes.plot(figure.ranks, own, marker="o", label=name)
                axes.set_xscale("log", base=2)
                axes.set_xticks(figure.ranks, list(map(str, figure.ranks)))
        axes.set(yscale="log", title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        if number == "5.14":
            axes.set(xlabel=f"step, on {figure.ranks[0]} ranks", ylabel="longest wait of a rank, ms")
        else:
            axes.set(xlabel="ranks", ylabel="seconds that a rank waits in the run")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LOADERS))
    canvas.savefig(path, dpi=110)


def print_table(rows: Rows, figures: dict[str, Figure]) -> None:
    """Print all rows in Markdown, and the factors beside the published ones."""
    print(
        "| figure | ranks | loader | s waited in the run | predicted | at least | of the run | DataLoader waits "
        "longer, 0 and 4 workers | accuracy |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (number, ranks, name), row in rows.items():
        share = 100 * row.waits.sum(1).mean() / row.seconds
        longer = " and ".join(f"{each:,.1f}" for each in factors(rows, number, ranks)) if name == OWN else ""
        predicted = f"{row.predicted_seconds:.3f}" if name not in DATALOADERS else ""
        print(
            f"| {number}, {figures[number].network} | {ranks} | {name} | {row.stall_seconds:.3f} | {predicted} "
            f"| {least_seconds(figures[number], ranks):.3f} | {share:.1f} % | {longer} | {100 * row.accuracy:.1f} % |"
        )
    for number, figure in figures.items():
        pairs = [factors(rows, number, ranks) for ranks in figure.ranks]
        most = " and ".join(f"{max(each):,.1f}" for each in zip(*pairs, strict=True))
        longest = 1e3 * np.median(rows[number, figure.ranks[-1], OWN].waits.max(0))
        print(
            f"{number}: DataLoader waits up to {most} times longer with 0 and 4 workers, published: "
            f"{figure.published}; longest wait of {figure.ranks[-1]} ranks in a step, median of steps: {longest:.2f} ms"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few samples, 1 and 2 ranks")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job is not None:
        run_all(json.loads(given.job))
        return
    figures = QUICK if given.quick else FIGURES
    cases = [
        (number, ranks, name) for number, each in figures.items() for ranks in each.ranks for name in LOADERS
    ]
    jobs = [job_of(name, figures[number], ranks) for number, ranks, name in cases]
    command = [sys.executable, __file__, "--job", json.dumps(jobs)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    rows = {case: row_of(json.loads(line)) for case, line in zip(cases, lines, strict=True)}
    for number, ranks, _ in cases:
        models = {rows[number, ranks, name].model for name in LOADERS}
        assert len(models) == 1, f"classifiers differ: {models}"
    print_table(rows, figures)
    if given.plot is not None:
        plot(rows, figures, given.plot)


if __name__ == "__main__":
    main()
