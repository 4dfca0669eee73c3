"""What a step costs as a graph, against the same step in PyTorch's eager mode.

    python benchmarks/graph/steps.py [--rounds N] [--threads 1] [--wall] [--only NAME,...] [--estimates] [--quick]

Printed for each workload: processor time of a step in both, as medians over short rounds that take turns, also in who
is first; the median ratio of a round, with the least and the most, and the ratio of the least times, which other
programs disturb least. Before it is timed, both give the same result. Workloads:

    mlp     784-512-512-10, batch 64: forward, backward and update
    cnn     two convolutions and a linear layer over 32 images of 28 x 28: the same
    alexnet three convolutions and two linear layers over 16 images of 32 x 32, imported by add_module: the same
    block   a transformer block of width 128, 4 heads, over 8 sequences of 64, imported: the same
    files   the perceptron, its batches read from a .npy file by a loader: as a node, and in a loop over such a loader
    tiny    40 additions of scalars: what the engine itself costs
    loop    1,000 iterations of x * w + 1 on scalars: what the executor costs per iteration

Nothing else should run. The first session makes glibc keep what a step frees, for both sides: without, it fetches up to
1,500 pages a step from the system again, at 3 us each, in either of the two, by chance. A turn begins when no thread
has work. One of `files` has whole epochs, as the first batch of an epoch costs more, and ends when its loader has read
as far ahead again: so no side pays for batches that the other takes. With several threads, the others spin while one
runs Python, which processor time counts for each: see --wall.

--estimates compares, in place of that, what nodes of a training step are estimated to take with what they took: of two
nodes with 5 % of a step or more each, whose times differ by half, which one is slower; and how far off the estimates
are that are most so.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from penstock.graph import Devices, Edge, Graph, Session, Statistics, add_module, gradients
from penstock.graph.ops.work import work_of
from penstock.loader import Loader

Step = Callable[[], Any]


@dataclass(frozen=True)
class GraphStep:
    """A step of training as a graph; it gives the loss."""

    session: Session
    loss: Edge
    feeds: dict[Edge, Any]
    updates: list[str]

    def __call__(self, counted: Statistics | None = None) -> float:
        return float(self.session.run(self.loss, self.feeds, self.updates, statistics=counted))


RATE = 0.01
#: Of the workload that reads files.
EPOCH_STEPS = 64


def training(
    layers: Sequence[torch.Tensor],
    batch: torch.Tensor,
    forward: Callable[[Graph, Edge, list[Edge]], Edge],
    eager: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
    regions: bool,
) -> tuple[Step, Step]:
    """Return a step of training as a graph and one in eager mode, each giving the loss."""
    graph = Graph()
    edges = [graph.variable("float32", list(layer.shape), initial=layer) for layer in layers]
    start = graph.initialize_all()
    x = graph.placeholder("float32", list(batch.shape), name="x")
    loss = graph.add(
        "Sum", graph.add("Square", forward(graph, x, [graph.add("Read", edge) for edge in edges]))
    )
    updates = [
        graph.add_node("AssignAdd", edge, slope * (-RATE / batch.numel())).name
        for edge, slope in zip(edges, gradients(graph, loss, edges), strict=True)
        if slope is not None
    ]
    session = Session(graph, regions=regions)
    session.run(start)
    array = batch.numpy()
    weights = [layer.clone().requires_grad_() for layer in layers]

    def step_eagerly() -> float:
        value = eager(batch, weights).square().sum()
        slopes = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight += slope * (-RATE / batch.numel())
        return float(value.detach())

    return GraphStep(session, loss, {x: array}, updates), step_eagerly


def mlp(regions: bool) -> tuple[Step, Step]:
    """Return the steps of a perceptron of three layers."""
    torch.manual_seed(0)
    layers = [torch.randn(a, b) / a**0.5 for a, b in ((784, 512), (512, 512), (512, 10))]

    def forward(graph: Graph, x: Edge, weights: list[Edge]) -> Edge:
        for weight in weights[:-1]:
            x = graph.add("ReLU", x @ weight)
        result: Edge = x @ weights[-1]
        return result

    def eager(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        for weight in weights[:-1]:
            x = torch.relu(x @ weight)
        return x @ weights[-1]

    return training(layers, torch.randn(64, 784), forward, eager, regions)


def cnn(regions: bool) -> tuple[Step, Step]:
    """Return the steps of a network of two convolutions."""
    torch.manual_seed(0)
    layers = [torch.randn(5, 5, 1, 16) / 5, torch.randn(5, 5, 16, 32) / 20]

    def forward(graph: Graph, x: Edge, weights: list[Edge]) -> Edge:
        for weight in weights:
            x = graph.add("ReLU", graph.add("Convolution2D", x, weight, padding="VALID"))
            x = graph.add("MaxPool", x, ksize=2, strides=2, padding="VALID")
        return x

    def eager(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        planes = x.permute(0, 3, 1, 2)
        for weight in weights:
            planes = torch.relu(torch.nn.functional.conv2d(planes, weight.permute(3, 2, 0, 1)))
            planes = torch.nn.functional.max_pool2d(planes, 2)
        return planes

    return training(layers, torch.randn(32, 28, 28, 1), forward, eager, regions)


def imported(module: torch.nn.Module, batch: torch.Tensor, regions: bool) -> tuple[Step, Step]:
    """Return the steps of training a module, imported and as it is."""
    graph = Graph()
    x = graph.placeholder("float32", list(batch.shape))
    (y,), start = add_module(graph, module, [x])
    loss = graph.add("Sum", graph.add("Square", y))
    handles = [graph.edge(f"{name}:0") for name, node in graph.nodes.items() if node.op == "Variable"]
    updates = [
        graph.add_node("AssignAdd", handle, slope * (-RATE / batch.numel())).name
        for handle, slope in zip(handles, gradients(graph, loss, handles), strict=True)
        if slope is not None
    ]
    session = Session(graph, regions=regions)
    session.run((), targets=start)
    array, weights = batch.numpy(), list(module.parameters())

    def step_eagerly() -> float:
        value = module(batch).square().sum()
        slopes = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight.add_(slope * (-RATE / batch.numel()))
        return float(value.detach())

    return GraphStep(session, loss, {x: array}, updates), step_eagerly


def alexnet(regions: bool) -> tuple[Step, Step]:
    """Return the steps of a small AlexNet."""
    torch.manual_seed(0)
    nn = torch.nn
    parts: list[torch.nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    module = nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    return imported(module, torch.randn(16, 3, 32, 32), regions)


class Block(torch.nn.Module):
    """Attention and a perceptron, each after a normalisation and added to what it takes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, result: float32[sequences, length, width]."""
        count, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(count, length, width))
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return result


def block(regions: bool) -> tuple[Step, Step]:
    """Return the steps of a transformer block."""
    torch.manual_seed(0)
    return imported(Block(128, 4), torch.randn(8, 64, 128), regions)


def files(regions: bool, stack: ExitStack) -> tuple[Step, Step]:
    """Return the steps of the perceptron over a loader's batches."""
    path = f"{stack.enter_context(TemporaryDirectory())}/rows.npy"
    np.save(path, np.random.default_rng(0).normal(size=(EPOCH_STEPS * 64, 784)).astype(np.float32))
    loaders = [
        stack.enter_context(Loader(path, batch_size=64, epochs=10_000, seed=0, report=None)) for _ in "ge"
    ]
    torch.manual_seed(0)
    layers = [torch.randn(a, b) / a**0.5 for a, b in ((784, 512), (512, 512), (512, 10))]
    graph = Graph()
    handles = [graph.variable("float32", list(layer.shape), initial=layer) for layer in layers]
    start = graph.initialize_all()
    x = graph.add("NextBatch", batches="train", outputs=[["float32", [64, 784]]])
    weights = [layer.clone().requires_grad_() for layer in layers]

    def endless(loader: Loader) -> Iterator[Any]:
        while True:
            yield from loader

    for place, handle in enumerate(handles):
        x = x @ graph.add("Read", handle)
        x = graph.add("ReLU", x) if place < 2 else x
    loss = graph.add("Sum", graph.add("Square", x))
    slopes = gradients(graph, loss, handles)
    updates = [
        graph.add_node("AssignAdd", handle, slope * (-RATE / (64 * 784))).name
        for handle, slope in zip(handles, slopes, strict=True)
        if slope is not None
    ]
    session = stack.enter_context(Session(graph, regions=regions, batches={"train": endless(loaders[0])}))
    session.run(start)
    batches = endless(loaders[1])

    def step_eagerly() -> float:
        rows = torch.from_numpy(next(batches))
        for weight in weights[:-1]:
            rows = torch.relu(rows @ weight)
        value = (rows @ weights[-1]).square().sum()
        found = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for weight, slope in zip(weights, found, strict=True):
                weight += slope * (-RATE / (64 * 784))
        return float(value.detach())

    return GraphStep(session, loss, {}, updates), step_eagerly


def tiny(regions: bool) -> tuple[Step, Step]:
    """Return a chain of additions."""
    graph = Graph()
    x = graph.placeholder("float32", [], name="x")
    y = x
    for _ in range(40):
        y = graph.add("Add", y, x)
    session = Session(graph, regions=regions)
    one, tensor = np.float32(1), torch.tensor(1.0)

    def eager() -> float:
        total = tensor
        for _ in range(40):
            total = torch.add(total, tensor)
        return float(total)

    return lambda: float(session.run(y, {x: one})), eager


def loop(regions: bool) -> tuple[Step, Step]:
    """Return a loop over a scalar."""
    graph = Graph()
    w = graph.placeholder("float32", [], name="w")
    _, result = graph.while_loop(
        lambda i, x: i < 1000, lambda i, x: (i + 1, x * w + 1.0), [graph.constant(0), graph.constant(1.0)]
    )
    session = Session(graph, regions=regions)
    factor = torch.tensor(0.5)

    def eager() -> float:
        count, x, limit, one = torch.tensor(0), torch.tensor(1.0), torch.tensor(1000), torch.tensor(1)
        while bool(count < limit):
            count, x = count + one, x * factor + 1.0
        return float(x)

    return lambda: float(session.run(result, {w: np.float32(0.5)})), eager


WORKLOADS: dict[str, Callable[..., tuple[Step, Step]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet": alexnet,
    "block": block,
    "files": files,
    "tiny": tiny,
    "loop": loop,
}


def seconds_of(step: Step, repeats: int, clock: Callable[[], float], reads_ahead: bool = False) -> float:
    """Return the time of a step; reads_ahead: with what its loader's threads do until they have read as far again."""
    if repeats > 1:
        wait_for_rest()
    begin = clock()
    for _ in range(repeats):
        step()
    if repeats > 1 and reads_ahead and clock is time.process_time:
        wait_for_rest()
    return (clock() - begin) / repeats


def wait_for_rest() -> None:
    """Wait until the threads that read ahead, or spin, take no more processor time, or for a second."""
    for _ in range(200):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.0005:
            return


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Steps as graphs, against PyTorch's eager mode.")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch's kernels")
    parser.add_argument("--wall", action="store_true", help="elapsed time in place of processor time")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these workloads alone")
    parser.add_argument("--no-regions", action="store_true", help="run each node by itself")
    parser.add_argument("--estimates", action="store_true", help="what nodes take against what is estimated")
    parser.add_argument("--quick", action="store_true", help="once, for a test")
    options = parser.parse_args(words)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    print(f"{platform.processor() or platform.machine()}, {date.today()}, PyTorch {torch.__version__}")
    for name in options.only.split(",") if options.only else WORKLOADS:
        with ExitStack() as stack:
            (compare if options.estimates else report)(name, options, stack)
    torch.set_num_threads(before)


def compare(name: str, options: argparse.Namespace, stack: ExitStack) -> None:
    """Print how what nodes of a step are estimated to take compares with what they took."""
    make = WORKLOADS[name]
    step, _ = make(False, stack) if make is files else make(False)
    if not isinstance(step, GraphStep):
        return  # its nodes take what the engine does
    for _ in range(1 if options.quick else 12):
        step()
    runs = []
    for _ in range(1 if options.quick else options.rounds):
        step(counted := Statistics(is_warm=True))
        runs.append(counted.seconds)
    nodes, cpu = step.session.graph.nodes, Devices(["cpu:0"])
    took = {each: statistics.median(run[each] for run in runs) for each in runs[0] if each in nodes}
    works = {each: work_of(nodes[each]) for each in took}
    ratios = {each: cpu.kernel_seconds("cpu:0", w.flops, w.nbytes) / took[each] for each, w in works.items()}
    heavy = [each for each, seconds in took.items() if seconds >= 0.05 * sum(took.values())]
    pairs = [(a, b) for a in heavy for b in heavy if took[a] > 1.5 * took[b]]
    right = sum(ratios[a] * took[a] > ratios[b] * took[b] for a, b in pairs)
    by_ratio = sorted(heavy, key=ratios.__getitem__)
    ends = ", ".join(f"{ratios[each]:.2f} x {nodes[each].op}" for each in (by_ratio[0], by_ratio[-1]))
    print(
        f"{name}: {right} of {len(pairs)} pairs of {len(heavy)} heavy nodes are in order; estimates of these are {ends}"
    )


def report(name: str, options: argparse.Namespace, stack: ExitStack) -> None:
    """Measure a workload and print what came of it."""
    make, clock = WORKLOADS[name], time.perf_counter if options.wall else time.process_time
    graph, eager = make(not options.no_regions, stack) if make is files else make(not options.no_regions)
    # Enough steps that gradients are traced, which is not what is timed.
    for _ in range(2 if options.quick else 12):
        one, other = graph(), eager()
        assert abs(one - other) <= 1e-3 * abs(other), f"{name}: {one} is not {other}"
    repeats = 1 if options.quick else max(1, int(0.2 / seconds_of(eager, 3, clock)))
    if make is files and not options.quick:
        repeats = max(repeats // EPOCH_STEPS, 4) * EPOCH_STEPS
    rounds = []
    for number in range(1 if options.quick else options.rounds):
        turns = (number % 2, 1 - number % 2)
        both = [(place, seconds_of((graph, eager)[place], repeats, clock, make is files)) for place in turns]
        rounds.append(tuple(seconds for _, seconds in sorted(both)))
    ours, theirs = (statistics.median(each) * 1e6 for each in zip(*rounds, strict=True))
    ratios = sorted(each / max(reference, 1e-9) for each, reference in rounds)
    least, least_eager = (max(min(each), 1e-9) for each in zip(*rounds, strict=True))
    print(
        f"{name}: {ours:,.0f} us a step, eager {theirs:,.0f} us: "
        f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}); of the least times "
        f"{least / least_eager:.2f} x"
    )


if __name__ == "__main__":
    main()
