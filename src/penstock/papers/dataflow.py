"""Figures 1, 2 and 4 to 9 of TensorFlow's white paper as graphs of `penstock.graph`, drawn and counted.

Source: M. Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed Systems", 2015.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph import Graph, Session, gradients, place_graph
from penstock.graph.model.check import dependencies
from penstock.graph.model.node import Endpoint
from penstock.graph.run.reach import needed_nodes
from penstock.measure.picture import Colour, name_axes, new_figure, write
from penstock.papers.catalog import Repeated, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEVICES = ("A", "B", "C")
_FILLS = {"": "#FFFFFF", "A": "#DCEBF5", "B": "#FBE5CC", "C": "#D9F0E6"}
_WHY = "The paper draws this figure and prints no number;"


@dataclass(frozen=True, slots=True)
class Box:
    """A node as it is drawn. inputs: names. device: by which it is coloured. is_faint: does not run."""

    name: str
    op: str
    inputs: tuple[str, ...]
    device: str = ""
    is_faint: bool = False


def boxes_of(graph: Graph, devices: Mapping[str, str] | None = None) -> list[Box]:
    """Return the nodes of a graph. devices: of each; the node's own unless given."""
    devices = {name: node.device for name, node in graph.nodes.items()} if devices is None else devices
    return [
        Box(
            name,
            node.op,
            tuple(dict.fromkeys([*(each.node for each in dependencies(node)), *node.controls])),
            devices.get(name, ""),
        )
        for name, node in graph.nodes.items()
    ]


def with_transfers(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes with a Send and a Recv for each value that another device needs, once for each device.

    Source: section 3.2.2: all users of a tensor on a device share one Recv node.
    """
    device_of = {box.name: box.device for box in boxes}
    added: dict[str, Box] = {}

    def received(name: str, device: str) -> str:
        if device_of[name] == device:
            return name
        send, recv = f"send {name} to {device}", f"recv {name} on {device}"
        added[send] = Box(send, "Send", (name,), device_of[name])
        added[recv] = Box(recv, "Recv", (send,), device)
        return recv

    moved = [replace(box, inputs=tuple(received(name, box.device) for name in box.inputs)) for box in boxes]
    return [*moved, *added.values()]


def layers_of(boxes: Sequence[Box]) -> dict[str, int]:
    """Return in which row each box is drawn: one above the highest of its inputs."""
    by_name = {box.name: box for box in boxes}
    rows: dict[str, int] = {}

    def row(name: str) -> int:
        if name not in rows:
            rows[name] = 1 + max((row(each) for each in by_name[name].inputs), default=-1)
        return rows[name]

    for box in boxes:
        row(box.name)
    return rows


def example() -> tuple[Graph, Any, Any]:
    """Return the graph of Figure 1, its cost and its two variables."""
    graph = Graph()
    b = graph.variable("float32", [100], initial=np.zeros(100, np.float32), name="b")
    random = graph.add("RandomUniform", shape=[100, 784], name="random_uniform")
    weights = graph.variable("float32", [100, 784], initial=random, name="W")
    x = graph.placeholder("float32", [784, 1], name="x")
    product = graph.add("MatMul", graph.add("Read", weights), x, name="MatMul")
    total = graph.add("Add", graph.add("Sum", product, axis=1), graph.add("Read", b), name="Add")
    relu = graph.add("ReLU", total, name="ReLU")
    return graph, graph.add("Sum", graph.add("Square", relu), name="C"), (weights, b)


def figure_1() -> Repeated:
    """Run the program of Figure 1: ten steps, the cost of each."""
    graph, cost, _ = example()
    with Session(graph, seed=0) as session:
        session.run(graph.initialize_all())
        costs = [
            float(session.run(cost, {"x": np.random.default_rng(step).random((784, 1), np.float32)}))
            for step in range(10)
        ]
    results = [Result(f"step {step}, cost", value, None, "count") for step, value in enumerate(costs)]
    why = f"{_WHY} its cost is left open, and is here the sum of the squares of what ReLU gives."
    return Repeated(results, why, lambda: _draw([("", boxes_of(graph))]))


def figure_2() -> Repeated:
    """Return the graph of Figure 1."""
    graph, _, _ = example()
    boxes = boxes_of(graph)
    why = f"{_WHY} reads of variables are nodes of their own here, and so are their first values."
    return Repeated(_counted("", boxes), why, lambda: _draw([("", boxes)]))


def _partitioned() -> list[Box]:
    """Return Figure 4's graph: x on B feeds b and c on A."""
    graph = Graph()
    weights = graph.variable("float32", [100, 100], initial=np.eye(100, dtype=np.float32), name="W")
    x = graph.placeholder("float32", [100, 1], name="x")
    a = graph.add("ReLU", x, name="a")
    read = graph.add("Read", weights, name="read")
    graph.add("MatMul", read, a, name="b")
    graph.add("Add", a, a, name="c")
    for name, node in graph.nodes.items():
        node.placement = {"only": "B" if name in ("x", "a") else "A"}
    placed = place_graph(graph, DEVICES[:2])
    shown = {name: placed.device[name] for name in graph.nodes}
    return boxes_of(graph, shown)


def figure_4() -> Repeated:
    """Return a graph on two devices, before and after transfers are put in."""
    before = _partitioned()
    device_of = {box.name: box.device for box in before}
    crossing = sum(device_of[name] != box.device for box in before for name in box.inputs)
    after = with_transfers(before)
    results = [
        Result("edges between devices, before", crossing, None, "count"),
        Result("pairs of Send and Recv, after", sum(box.op == "Send" for box in after), None, "count"),
    ]
    why = (
        f"{_WHY} as there, the two users of a tensor on one device share one transfer. Sessions here run on one "
        "device: placement is the graph's own, the pairs are put into the drawing."
    )
    return Repeated(results, why, lambda: _draw([("before", before), ("after", after)]))


def figure_5() -> Repeated:
    """Return the graph with the gradients of its cost."""
    graph, cost, variables = example()
    own = len(graph.nodes)
    gradients(graph, cost, list(variables))
    boxes = boxes_of(graph)
    added = [replace(box, device="B") if at >= own else box for at, box in enumerate(boxes)]
    results = [*_counted("", boxes[:own]), Result("nodes of gradients", len(boxes) - own, None, "count")]
    why = f"{_WHY} gradients are nodes here as there (coloured), and those of a ReLU or Sum are several."
    return Repeated(results, why, lambda: _draw([("", added)]))


def figure_6() -> Repeated:
    """Return what is left to run where one node is fed and another one fetched."""
    graph = Graph()
    a = graph.placeholder("float32", [4], name="a")
    b = graph.add("ReLU", a, name="b")
    c = graph.add("Square", b, name="c")
    d = graph.add("Neg", a, name="d")
    graph.add("Exp", d, name="e")
    graph.add("Add", c, b, name="f")
    needed, _ = needed_nodes(graph.nodes, [Endpoint("f")], (), {Endpoint("b")})
    runs = {node.name for node in needed}
    with Session(graph) as session:
        value = session.run("f:0", {"b:0": np.full(4, 3, np.float32)})
    boxes = boxes_of(graph)
    after = [replace(box, is_faint=box.name not in runs) for box in boxes]
    results = [
        Result("nodes", len(boxes), None, "count"),
        Result("nodes that run for f with b fed", len(runs), None, "count"),
        Result("f for b = 3", float(value[0]), None, "count"),
    ]
    why = f"{_WHY} as there, neither what is before a fed node nor what nobody fetched is run."
    return Repeated(results, why, lambda: _draw([("before", boxes), ("run(f, feed b)", after)]))


def _replicas(*, is_synchronous: bool) -> Graph:
    """Return three replicas of a model on three devices, which change one set of parameters."""
    graph = Graph()
    weights = graph.variable("float32", [8], initial=np.zeros(8, np.float32), name="P")
    graph.nodes["P"].device = DEVICES[0]
    changes = []
    for device in DEVICES:
        x = graph.placeholder("float32", [8], name=f"input {device}".replace(" ", "_"))
        read = graph.add("Read", weights, name=f"read_{device}")
        model = graph.add("Square", read - x, name=f"model_{device}")
        loss = graph.add("Sum", model, name=f"loss_{device}")
        (gradient,) = gradients(graph, loss, [weights])
        assert gradient is not None, "the loss depends on the parameters"
        changes.append(gradient)
        if not is_synchronous:
            graph.add("AssignAdd", weights, gradient * -0.1, name=f"update_{device}")
    if is_synchronous:
        total = changes[0] + changes[1] + changes[2]
        graph.add("AssignAdd", weights, total * (-0.1 / 3), name="update")
    _colour_by_replica(graph)
    return graph


def _colour_by_replica(graph: Graph) -> None:
    """Put each node on the device of what it is computed from; of several, on the first."""
    for box in boxes_of(graph):
        last = box.name.rpartition("_")[2]
        of_inputs = {graph.nodes[name].device for name in box.inputs if name != "P"} - {""}
        device = last if last in DEVICES else (of_inputs.pop() if len(of_inputs) == 1 else "")
        graph.nodes[box.name].device = device or DEVICES[0]


def figure_7() -> Repeated:
    """Return synchronous and asynchronous data-parallel training."""
    graphs = {
        name: _replicas(is_synchronous=name == "synchronous") for name in ("synchronous", "asynchronous")
    }
    results = []
    for name, graph in graphs.items():
        boxes = boxes_of(graph)
        results += _counted(f"{name}, ", boxes)
        updates = [box.name for box in boxes if box.op == "AssignAdd"]
        results.append(Result(f"{name}, updates of the parameters", len(updates), None, "count"))
        feeds = {f"input_{device}": np.full(8, number, np.float32) for number, device in enumerate(DEVICES)}
        with Session(graph) as session:
            session.run(graph.initialize_all())
            session.run(updates, feeds)
            (value, *_) = session.run("read_A:0", {}).tolist()
        results.append(Result(f"{name}, a parameter after a step", value, None, "count"))
    why = (
        f"{_WHY} replicas share one process here. Inputs of 0, 1 and 2 at a rate of 0.1 lead from 0 to 0.2 "
        "synchronously; asynchronously each gradient may have been computed before or after another update."
    )
    return Repeated(results, why, lambda: _draw([(name, boxes_of(graph)) for name, graph in graphs.items()]))


def figure_8() -> Repeated:
    """Return a recurrent model whose layers are on three devices."""
    graph = Graph()
    below = [graph.placeholder("float32", [1, 8], name=f"input_{step}") for step in range(3)]
    for device in DEVICES:
        weights = graph.variable("float32", [8, 8], initial=np.eye(8, dtype=np.float32), name=f"W{device}")
        read = graph.add("Read", weights, name=f"read_{device}")
        state = None
        for step, value in enumerate(below):
            joined = value if state is None else graph.add("Add", value, state)
            state = graph.add("ReLU", graph.add("MatMul", joined, read), name=f"layer{device}_{step}")
            below[step] = state
        for name, node in graph.nodes.items():
            if not node.device and not name.startswith("input"):
                node.device = device
    for step in range(3):
        graph.nodes[f"input_{step}"].device = DEVICES[0]
    boxes = boxes_of(graph)
    transfers = sum(box.op == "Send" for box in with_transfers(boxes))
    results = [*_counted("", boxes), Result("transfers between devices", transfers, None, "count")]
    why = f"{_WHY} three layers are unrolled over three steps, each layer on a device of its own."
    return Repeated(results, why, lambda: _draw([("", boxes)]))


def figure_9() -> Repeated:
    """Return how many steps of one graph run at the same time, in one session."""
    graph, steps = Graph(), 3
    begun, go = (
        graph.add("FIFOQueue", capacity=8, components=[["float32", []]], name=name)
        for name in ("begun", "go")
    )
    number = graph.placeholder("float32", [], name="number")
    graph.add("Enqueue", begun, number, name="begin")
    graph.add("Dequeue", go, name="step", controls=["begin"])
    graph.add("Dequeue", begun, name="other")
    graph.add("Enqueue", go, number, name="let")
    with Session(graph) as session:
        threads = [
            threading.Thread(target=session.run, args=("step:0", {"number": np.float32(each)}))
            for each in range(steps)
        ]
        for thread in threads:
            thread.start()
        # All have begun, and none can end.
        most = len({float(session.run("other:0")) for _ in threads})
        for each in range(steps):
            session.run("let", {"number": np.float32(each)})
        for thread in threads:
            thread.join()
    results = [Result("steps of a graph at the same time", most, 3, "count")]
    why = "Any number of steps may run in one session; the paper draws three, and so many wait here for a queue."
    return Repeated(results, why, lambda: _draw([(f"step {number}", boxes_of(graph)) for number in range(3)]))


def _counted(of: str, boxes: Iterable[Box]) -> list[Result]:
    boxes = list(boxes)
    return [
        Result(f"{of}nodes", len(boxes), None, "count"),
        Result(f"{of}edges", sum(len(box.inputs) for box in boxes), None, "count"),
    ]


def _draw(panels: Sequence[tuple[str, Sequence[Box]]]) -> Figure:
    """Return graphs side by side: rows from below, inputs first; a colour for each device."""
    figure = new_figure(1.0 + 5.4 * len(panels), 6.4)
    for axes, (title, boxes) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = layers_of(boxes)
        places: dict[str, tuple[float, float]] = {}
        for row in range(max(rows.values(), default=0) + 1):
            own = [box for box in boxes if rows[box.name] == row]
            # Above its inputs, as far as there is space.
            own.sort(key=lambda box: float(np.mean([places[name][0] for name in box.inputs] or [0.0])))
            for at, box in enumerate(own):
                places[box.name] = (at - (len(own) - 1) / 2, float(row))
        for box in boxes:
            for name in box.inputs:
                looks = {"arrowstyle": "->", "color": Colour.FAINT, "lw": 0.9, "shrinkA": 9, "shrinkB": 14}
                # Around the boxes of the rows between.
                looks["connectionstyle"] = f"arc3,rad={0.2 if rows[box.name] - rows[name] > 1 else 0}"
                axes.annotate("", places[box.name], places[name], arrowprops=looks)
        for box in boxes:  # after all arrows, so that none crosses a name
            label = box.name.removeprefix("gradients/")  # names of whole scopes do not fit side by side
            if box.op not in label:
                label = f"{label}\n{box.op}"
            frame = {"boxstyle": "round", "fc": _FILLS[box.device], "ec": Colour.FAINT}
            colour = Colour.PALE if box.is_faint else Colour.INK
            write(
                axes,
                label,
                places[box.name],
                (0, 0),
                ha="center",
                va="center",
                fontsize=7,
                bbox=frame,
                color=colour,
            )
        widest = max((abs(x) for x, _ in places.values()), default=0.0)
        axes.set_xlim(-widest - 0.7, widest + 0.7)
        axes.set_ylim(-0.6, max(rows.values(), default=0) + 0.6)
        axes.set_axis_off()
        name_axes(axes, title)
    return figure
