"""Placement of a graph, drawings, modules, lossy values, event files, batches of a loader."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from tests.graph.graphs import body, constant, node
from tests.patience import patient, wait_until
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import ClosedError, DataError
from penstock.graph import (
    Devices,
    Graph,
    GraphError,
    Session,
    Statistics,
    add_module,
    changed_variables,
    compare_parts,
    event_file,
    from_upper_half,
    gradients,
    parameter_counts,
    place_graph,
    to_dot,
    to_upper_half,
)
from penstock.graph.errors import MismatchError, UnsupportedError
from penstock.graph.ops import aten
from penstock.graph.ops.vjp import TRACED_FROM_USE
from penstock.graph.ops.work import work_of
from penstock.graph.run import timeline
from penstock.graph.run.live import LiveBytes
from penstock.graph.tools.costs import costs_of_trace, read_costs
from penstock.graph.tools.placing import placed_nodes
from penstock.loader import Loader
from penstock.loader.transforms import CenterCrop, ToTensor
from penstock.measure.chrome import write_chrome
from penstock.measure.export import export_trace
from penstock.trace import SPAN, Kind, Trace, read_trace
from penstock.trace.file import RUN_FOLDER


def test_what_only_initialises_takes_no_time_of_a_step() -> None:
    """What a step assigns, draws or takes does, and what a node says that it costs."""
    graph = Graph()
    x = graph.placeholder("float32", [1000], name="x")
    drawn = graph.add("RandomUniform", shape=[1000], name="drawn")
    w = graph.variable("float32", [1000], initial=drawn * 2.0, name="w")
    b = graph.variable("float32", [1000], initial=np.zeros(1000, np.float32), name="b")
    shared = graph.variable("float32", [1000], initial=graph.add("Exp", drawn, name="of_both"), name="shared")
    graph.initialize_all()
    noise = graph.add("RandomUniform", shape=[1000], name="noise")
    moved = graph.add("Assign", w, graph.add("Neg", x + noise, name="slope"), name="moved")
    reset = graph.add("Assign", b, graph.add("Exp", np.ones(1000, np.float32), name="start"), name="reset")
    graph.add_node("NoOp", name="train", controls=[moved, reset])
    graph.add("Neg", shared, name="y")
    graph.nodes["shared/assign"].placement["cost"] = {"cpu:0": 7.0}

    costs = {each.name: each.cost_seconds["cpu:0"] for each in placed_nodes(graph, Devices(["cpu:0"]))}
    free = {name for name, seconds in costs.items() if not seconds and name in graph.nodes}
    assert {"drawn", "of_both", "w/assign", "b/assign"} <= free
    assert not free & {"noise", "slope", "moved", "start", "reset", "y"}
    assert costs["shared/assign"] == 7.0
    again = Graph.from_json(graph.to_json())
    assert costs == {
        each.name: each.cost_seconds["cpu:0"] for each in placed_nodes(again, Devices(["cpu:0"]))
    }


def test_a_graph_is_placed_by_the_fields_of_its_nodes() -> None:
    cost = {"/job:a/task:0/device:cpu:0": 2.0, "/job:a/task:1/device:cpu:0": 1.0}
    nodes = [
        constant("a", 1.0, cost=cost, bytes=8, group="g", only="task:0"),
        node("b", "Neg", "a:0", cost=cost, group="g"),
        node("c", "Exp", "a:0", cost=cost),
    ]
    placed = place_graph(Graph(nodes), Devices(list(cost), 1.0, 4.0))

    # a at 2 on task 0, b after it there at 4; c on task 0 at 6, on task 1 at 2 + 1 + 2 + 1: the first device on a tie.
    assert placed.finish_seconds == {"a": 2, "b": 4, "c": 6}
    assert "task:0" in placed.device["c"]
    with pytest.raises(GraphError, match=r"'a'.*task:7") as caught:
        place_graph(Graph([constant("a", 1.0, cost=cost, only="task:7")]), list(cost))
    assert caught.value.kind == "infeasible"
    with pytest.raises(MismatchError, match=r"'x' is named twice"):
        place_graph(Graph(nodes), ["x", "y", "x"])
    call = node("call", "Call", function="f", outputs=[["float32", []]], only="task:0")
    one, other = cost
    with pytest.raises(GraphError, match=rf"'call' and the function 'f'; those that have: {other}"):
        place_graph(Graph([call]), list(cost), brought={one: [], other: [("Call", "f")]})
    wrong: list[dict[str, Any]] = [{"group": 7}, {"only": ["cpu"]}]
    for field in wrong:
        with pytest.raises(GraphError, match=rf"'a'.*{min(field)}") as caught:
            place_graph(Graph([constant("a", 1.0, **field)]), list(cost))
        assert caught.value.kind == "mismatch"


def test_work_is_estimated_by_operation_and_shapes() -> None:
    """Worked out by hand: FLOPs, and bytes that are read and written."""
    graph = Graph()
    x = graph.placeholder("float32", [8, 100], name="x")
    w = graph.variable("float32", [100, 50], name="w")
    read = graph.add("Read", w, name="read")
    product = graph.add("MatMul", x, read, name="product")
    graph.add("Sum", product, axis=0, name="sum")
    images = graph.placeholder("float32", [2, 9, 9, 3], name="images")
    filters = graph.placeholder("float32", [2, 2, 3, 4], name="filters")
    planes = graph.add("Convolution2D", images, filters, padding="VALID", name="planes")
    graph.add("MaxPool", planes, ksize=2, strides=2, padding="VALID", name="pool")
    square = graph.placeholder("float64", [30, 30], name="square")
    graph.add("MatrixInverse", square, name="inverse")
    graph.add("MatrixDeterminant", square, name="determinant")
    bias = graph.placeholder("float32", [7], name="bias")
    weights = graph.placeholder("float32", [7, 100], name="weights")
    graph.add("aten.linear.default", x, weights, bias, name="linear")
    graph.add("aten.view.default", x, args=[{"input": 0}, [100, 8]], name="view")
    channels = graph.placeholder("float32", [2, 3, 8, 8])
    graph.add(
        "aten.max_pool2d_with_indices.default", channels, args=[{"input": 0}, [2, 2], [2, 2]], name="most"
    )
    graph.add("DecodeImage", graph.placeholder("bytes", []), size=[4, 5], name="picture")
    gradients(graph, graph.add("Sum", product), [x, w])

    def work(name: str) -> tuple[float, float]:
        found = work_of(graph.nodes[name])
        return found.flops, found.nbytes

    assert work("product") == (2 * 8 * 100 * 50, 4 * (8 * 100 + 100 * 50 + 8 * 50))
    assert work("sum") == (8 * 50, 4 * (8 * 50 + 50))
    assert work("planes") == (
        2 * (2 * 8 * 8 * 4) * (2 * 2 * 3),
        4 * (2 * 9 * 9 * 3 + 2 * 2 * 3 * 4 + 2 * 8 * 8 * 4),
    )
    assert work("pool") == (2 * 4 * 4 * 4 * 4, 4 * (2 * 8 * 8 * 4 + 2 * 4 * 4 * 4))
    assert work("inverse") == (2 * 30**3, 2 * 8 * 900)
    assert work("determinant")[0] == pytest.approx(2 / 3 * 30**3)
    assert work("linear")[0] == 2 * 8 * 100 * 7
    assert [work(name) for name in ("x", "w", "read", "view")] == [(0, 0)] * 4
    assert work("most")[0] == 300 * 2 * 3 * 8 * 8
    assert work("picture")[0] == 600 * 4 * 5 * 3
    vjp = next(
        node for node in graph.nodes.values() if node.op == "Vjp" and node.attr["of"]["op"] == "MatMul"
    )
    assert work(vjp.name)[0] == 2 * work("product")[0]
    assert not work_of(graph.nodes["product"]).unknown


def test_what_a_graph_leaves_open_is_guessed_and_said() -> None:
    graph = Graph()
    x, any_ = graph.placeholder("float32", [None, 4], name="x"), graph.placeholder("float32", name="any")
    graph.add("MatMul", x, np.ones((4, 5), np.float32), name="product")
    graph.add("MatMul", any_, any_, name="unknown")
    product = graph.add("MatMul", any_, x)
    gradients(graph, graph.add("Sum", product), [any_])
    n, _ = graph.while_loop(lambda i, y: i < 9, lambda i, y: (i + 1, y * y), [0, np.ones(1000, np.float32)])
    graph.cond(n < 3, lambda: graph.add("Neg", x), lambda: graph.add("Square", graph.add("Neg", x)))
    graph.add("Call", x, function="f", outputs=[["float32", [3]]], name="call")
    graph.add("Concat", graph.placeholder("bytes", [2]), axis=0, name="text")
    found = {name: work_of(node) for name, node in graph.nodes.items()}

    assert (found["product"].flops, found["unknown"].flops) == (2 * 32 * 4 * 5, 2 * 32 * 32)
    assert found["product"].unknown == {"an open size counts as 32"}
    assert next(w for name, w in found.items() if graph.nodes[name].op == "Vjp").flops > 0
    assert found["While"].flops == 32 * (1000 + 1 + 1)
    assert found["While"].unknown == {"a loop counts as 32 iterations"}
    assert found["Cond"].flops == 2 * 32 * 4
    assert found["call"].unknown == {"an open size counts as 32", "a function counts by its elements"}
    assert found["text"].unknown == {"byte strings count as empty"}
    devices = Devices(
        ["cpu:0", "gpu:0"], flops_per_second={"cpu:0": 1e3}, memory_bytes_per_second={"cpu:0": 1e9}
    )
    assert devices.kernel_seconds("cpu:0", 2e3, 1e9) == 2
    assert devices.kernel_seconds("cpu:0", 1e3, 3e9) == 3
    assert devices.kernel_seconds("gpu:0", 1e13, 0) == 1


def test_the_work_of_one_call_of_aten_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, counters = Graph(), []

    class Counter(FlopCounterMode):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            counters.append(self)

    monkeypatch.setattr(aten, "FlopCounterMode", Counter)
    x = graph.placeholder("float32", [7, 100])
    for name, wide in (("a", 11), ("b", 11), ("c", 13)):
        graph.add("aten.mm.default", x, graph.placeholder("float32", [100, wide]), name=name)
    args = [{"input": 0}, [0]], [{"input": 0}, [1]]
    for name, each in zip(("d", "e"), args, strict=True):
        graph.add("aten.sum.dim_IntList", x, args=each, name=name)
    aten._flops_by_torch.cache_clear()

    for _ in range(2):
        found = [work_of(graph.nodes[name]).flops for name in "abcde"]

    assert found == [2 * 7 * 100 * 11, 2 * 7 * 100 * 11, 2 * 7 * 100 * 13, 700, 700]
    assert len(counters) == 4


A, B = "/job:w/task:0/device:cpu:0", "/job:w/task:1/device:cpu:0"


def traced(names: list[str], spans: list[tuple[int, int, int, float]], *tasks: str) -> Trace:
    """Return a trace of a graph's runs. spans: rank, number of the name, step, seconds."""
    made = np.zeros(len(spans), SPAN)
    made["kind"] = Kind.NODE
    for field, values in zip(("rank", "sample", "step", "end"), zip(*spans, strict=True), strict=True):
        made[field] = values
    meta: dict[str, Any] = {"graph": True, **({"ranks": len(tasks)} if tasks else {})}
    return Trace(made, meta, names=dict(enumerate(names)), hosts=dict(enumerate(tasks)))


def test_a_trace_says_what_nodes_cost_and_what_a_region_took_is_shared_as_it_is_estimated() -> None:
    """Two products, one of thrice the work, are a region; a loop runs node by node; a Dequeue waits."""
    graph = Graph()
    x = graph.placeholder("float32", [64, 64], name="x")
    graph.add("MatMul", x, x, name="small")
    graph.add("MatMul", x, graph.placeholder("float32", [64, 256]), name="large")
    graph.while_loop(lambda i: i < 9, lambda i: graph.add("Add", i, i, name="twice"), [1.0], name="loop")
    queue = graph.add("FIFOQueue", capacity=1, components=[["float32", []]], name="queue")
    graph.add("Dequeue", queue, name="wait")
    names = ["small to large (2 nodes)", ":small", ":large", "loop/twice", "wait", ""]
    spans = [(0, 0, step, seconds) for step, seconds in enumerate((9.0, 5.0, 4.0))]
    spans += [(0, 3, 0, 1.0), (0, 3, 0, 2.0), (0, 3, 1, 3.0), (0, 4, 0, 7.0), (0, 5, 0, 7.0)]
    devices = Devices([A, B], flops_per_second={A: 1e9, B: 2e9}, memory_bytes_per_second={A: 1e12, B: 1e12})
    share = devices.kernel_seconds("cpu:0", 2 * 64**3, 3 * 4 * 64**2)
    share /= share + devices.kernel_seconds("cpu:0", 2 * 64**2 * 256, 4 * (64**2 + 2 * 64 * 256))

    found = costs_of_trace(graph, traced(names, spans), devices)

    assert set(found) == {"small", "large", "loop"}
    assert found["small"]["cost"][A] / found["small"]["cost"][B] == pytest.approx(2)
    usual = Devices(["cpu:0"])
    assert costs_of_trace(graph, traced(names, spans), usual)["small"] == {
        "cost": {"cpu:0": pytest.approx(5 * share)},
        "measured_on": ["cpu:0"],
    }
    assert costs_of_trace(graph, traced(names, spans), usual)["loop"]["cost"] == {"cpu:0": 3.0}
    # A loop counts once in a region, however many of its nodes are there.
    regions = [["region", *(f":loop/{each}" for each in parts), ":small"] for parts in ("a", "abc")]
    one, three = (costs_of_trace(graph, traced(names, [(0, 0, 0, 4.0)]), usual) for names in regions)
    assert one == three
    with pytest.raises(MismatchError, match="of another graph: it has 'other', and this one has not"):
        costs_of_trace(graph, traced(["other"], [(0, 0, 0, 1.0)]), devices)
    with pytest.raises(MismatchError, match="no spans of nodes"):
        costs_of_trace(graph, Trace(np.zeros(1, SPAN)), devices)


def test_a_worker_that_a_trace_shows_to_be_slow_is_avoided() -> None:
    """Each ran another product of equal size; what the first took five times as long for is as quick on the second."""
    graph = Graph()
    x = graph.placeholder("float32", [64, 64], name="x")
    for name in ("one", "two"):
        graph.add("MatMul", x, x, name=name)
    trace = traced(["one", "two"], [(0, 0, 0, 5.0), (1, 1, 0, 1.0)], "/job:w/task:0", "/job:w/task:1")
    found = costs_of_trace(graph, trace, Devices([A, B, "gpu:0"]))

    assert found["one"]["cost"] == pytest.approx({A: 5, B: 1, "gpu:0": ANY})
    assert found["two"]["cost"] == pytest.approx({A: 5, B: 1, "gpu:0": ANY})


def test_the_trace_of_a_run_has_all_nodes_of_its_regions(tmp_path: Path) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [2, 2], name="x")
    y = graph.add("Neg", graph.add("MatMul", x, x, name="product"), name="y")
    graph.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * a), [0, y], name="loop")
    path = tmp_path / "run.trace"
    with Session(graph, trace=path) as session:
        for _ in range(2):
            session.run("loop:1", {x: np.eye(2, dtype=np.float32)})
            session.run(y, {x: np.eye(2, dtype=np.float32)})
    found = read_costs(graph, path, Devices([A]))

    assert set(found) == {"product", "y", "loop", "Constant"}
    saved = tmp_path / "costs.json"
    saved.write_text(json.dumps(found))
    again = read_costs(graph, saved, Devices([A, B]))
    assert {name: each["cost"][A] for name, each in again.items()} == {
        n: e["cost"][A] for n, e in found.items()
    }
    for text, said in (
        ('{"nobody": {"cost": {}}}', "another graph"),
        ('{"y": {"cost": {"cpu:0": "much"}}}', "cost of 'y'"),
        ('{"y": [1]}', "cost of 'y' is None"),
        ('{"y": {"cost": {"cpu:0": Infinity}}}', "cost of 'y'"),
        ('{"y": {"cost": {"cpu:0": 1}, "bytes": null}}', "bytes of 'y' is None"),
        ('{"y": {"cost": {"cpu:0": 1}, "hop": NaN}}', "hop of 'y' is nan"),
        ('{"y": {"cost": {"cpu:0": 1}, "measured_on": ["gpu:0"]}}', "measured_on of 'y'"),
        ('{"loop/product": {"cost": {}}}', "another graph: it has 'loop/product'"),
        ('{"": {"cost": {}}}', "another graph: it has ''"),
        ('{"results": []}', "no cost that was measured"),
        ('{"results": [{"cost_from": "given", "cost_seconds": {}}]}', "another graph: it has ''"),
        ('{"results": [{"cost_from": "given", "node": ["y"]}]}', "another graph"),
    ):
        saved.write_text(text)
        with pytest.raises(MismatchError, match=rf"costs\.json: .*{said}"):
            read_costs(graph, saved, Devices([A]))
    saved.write_text(
        '{"results": [{"node": "y", "cost_from": "measured", "measured_on": null, "cost_seconds": {"a": 1}}]}'
    )
    assert read_costs(graph, saved, Devices(["a"])) == {"y": {"cost": {"a": 1}, "measured_on": ["a"]}}
    for text in ('{"y": ', "no trace"):
        saved.write_text(text)
        with pytest.raises(DataError, match=r"costs\.json"):
            read_costs(graph, saved, Devices([A]))
    with pytest.raises(DataError, match="none"):
        read_costs(graph, tmp_path / "none", Devices([A]))


@pytest.mark.parametrize("regions", [True, False])
def test_the_most_bytes_of_live_tensors_are_those_that_something_still_needs(
    regions: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each tensor has 40,000 bytes; variables, constants, views of these and small ones do not count."""
    graph, path = Graph(), tmp_path / "run.trace"
    x = graph.placeholder("float32", [100, 100], name="x")
    w = graph.variable("float32", [100, 100], initial=np.ones((100, 100), np.float32), name="w")
    init = graph.initialize_all()
    chain = x
    for _ in range(5):
        chain = graph.add("Neg", chain)
    part = graph.add("Slice", graph.add("Read", w), begin=[0, 0], size=[-1, -1])
    graph.add("Sum", graph.add("Split", chain, axis=0, num=2)[0], name="total")
    wide = [graph.add("Mul", x, np.float32(k)) for k in range(4)]
    graph.add("Concat", *wide, axis=0, name="joined")
    _, looped = graph.while_loop(
        lambda i, _: i < 5, lambda i, a: (i + 1, graph.add("Sigmoid", a) + a), [0, x]
    )
    graph.add("Sum", part + x, name="with part")
    found = {}
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    with Session(graph, regions=regions, trace=path) as session:
        for name in (init.name, "total:0", "joined:0", "with part:0", str(looped.endpoint)):
            counted = Statistics()
            session.run(
                name, {} if name == init.name else {x: np.ones((100, 100), np.float32)}, statistics=counted
            )
            found[name] = counted.live_bytes
    tensor = 40_000
    assert not [each for each in gc.get_objects() if isinstance(each, LiveBytes)]
    # Input and output of a node; of the join, four inputs, x's last user having run, and an output as large as these.
    expected = [0, 2 * tensor, 8 * tensor, 2 * tensor, 3 * tensor]
    assert found == {name: {"": nbytes} for name, nbytes in zip(found, expected, strict=True)}
    spans = read_trace(path).spans
    assert [int(each) for each in spans["bytes"][spans["kind"] == Kind.STEP]] == expected


def test_half_of_a_float_is_its_upper_half_and_a_nan_stays_one() -> None:
    hidden = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    values = np.array([1.0, -2.5, 3.14159, np.inf, -np.inf, 0.0, -0.0], np.float32)

    back = from_upper_half(to_upper_half(values))

    assert back.view(np.uint32).tolist() == (values.view(np.uint32) & 0xFFFF0000).tolist()
    assert np.isnan(from_upper_half(to_upper_half(hidden))).all()
    assert from_upper_half(to_upper_half(back)).tobytes() == back.tobytes()
    with pytest.raises(GraphError, match="float64"):
        to_upper_half(np.zeros(1))  # type: ignore[arg-type]


def test_a_drawing_has_scopes_bodies_and_both_kinds_of_edges() -> None:
    nodes = [
        constant("layer/a", 1, "int32"),
        node("n", "NoOp", ctrl=["layer/a"]),
        node(
            "w",
            "While",
            "layer/a:0",
            cond=body("i", [constant("t", False, "bool")], "t"),
            body=body("i", [node("m", "Neg", "i")], "m"),
        ),
    ]

    drawn = to_dot(Graph(nodes))

    for line in (
        '"layer/a" -> "n" [style=dashed];',
        '"layer/a" -> "w" [label="0"];',
        '"w/body/i" -> "w/body/m" [label="0"];',
        'subgraph "cluster layer" {',
    ):
        assert line in drawn
    assert drawn.count("{") == drawn.count("}")


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.export show its progress without a thread that stays."""
    import tqdm  # type: ignore[import-untyped]

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(3, 1, 1),
            torch.nn.Flatten(),
            torch.nn.Linear(12, 4),
            torch.nn.LayerNorm(4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        result: torch.Tensor = torch.cond(y.sum() > 0, lambda v: v * 2, lambda v: v - 1, (y,))
        return result


@pytest.mark.filterwarnings("ignore")  # of torch.export, as it traces cond
@pytest.mark.slow  # torch.export makes PyTorch import its compiler: several seconds
def test_a_module_becomes_nodes_that_give_what_it_gives_and_its_gradients(exports: None) -> None:
    module = Mixed().eval()
    graph = Graph()
    x = graph.placeholder("float32", [2, 2, 4, 4], name="x")
    with pytest.raises(MismatchError, match=r"inputs\[0\] is a Tensor; give an edge"):
        add_module(graph, module, [torch.zeros(2, 2, 4, 4)])  # type: ignore[list-item]
    (y,), assigns = add_module(graph, module, [x])
    total = graph.add("Sum", graph.add("Square", y))
    (slope,) = gradients(graph, total, [x])
    with pytest.raises(MismatchError, match=rf"give its output, graph\.edge.*{assigns[0].name}:0"):
        gradients(graph, total, [assigns[0]])
    images = torch.randn(2, 2, 4, 4, requires_grad=True)
    expected = module(images)
    expected.square().sum().backward()
    assert images.grad is not None
    graph = Graph.from_json(graph.to_json())
    with Session(graph) as session:
        session.run((), targets=[each.name for each in assigns])
        assert slope is not None
        result, gradient = session.run([y.name, slope.name], {"x": images.detach().numpy()})

    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, images.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert parameter_counts(graph)["module/layers.5.weight"] == 48
    # A gradient by Vjp would compute the maxima, or the means, again.
    derived = {each.attr["of"]["op"] for each in graph.nodes.values() if each.op == "Vjp"}
    assert not any("pool" in op or "layer_norm" in op for op in derived)


class Looped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(count: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return count + 1, self.layer(state)

        loop: Any = while_loop
        result: torch.Tensor = loop(lambda count, _: count < 4, step, (torch.tensor(0), x))[1]
        return result


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.slow
def test_a_loop_of_a_module_stays_one_and_regions_are_compiled_by_torch(exports: None) -> None:
    module, graph = Looped(), Graph()
    (y,), assigns = add_module(graph, module, [graph.placeholder("float32", [2, 3], name="x")])
    (slope,) = gradients(graph, graph.add("Sum", y), [graph.edge("module/layer.weight:0")])
    x = torch.rand(2, 3)
    expected = module.layer(module.layer(module.layer(module.layer(x))))
    expected.sum().backward()
    assert module.layer.weight.grad is not None
    assert slope is not None

    assert "While" in {each.op for each in graph.nodes.values()}
    for compiler in (None, partial(torch.compile, backend="eager")):  # other backends keep threads
        with Session(graph, compiler=compiler) as session:
            session.run((), targets=[each.name for each in assigns])
            result, gradient = session.run([y, slope], {"x": x.numpy()})
        np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5)
        np.testing.assert_allclose(gradient, module.layer.weight.grad.numpy(), rtol=1e-5)


class Trained(torch.nn.Module):
    """Attention over what a convolution gives, in training: running means, a causal mask, and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, stride=4), torch.nn.BatchNorm2d(8))
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = torch.nn.LSTM(8, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
        rows = self.encoder(rows, src_mask=mask, is_causal=True)
        rows, _ = self.attention(rows, rows, rows, need_weights=False)
        result: torch.Tensor = self.recurrent(rows)[0]
        return result


class Dropped(torch.nn.Module):
    """Attention and channels, of which dropout takes a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first query sees no key
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(x, x, x, mask, dropout_p=0.25) + attend(x, x, x, None, 0.25, True)
        y = torch.nn.functional.dropout(y, 0.5)
        return torch.nn.functional.dropout2d(y[:, None], 0.5)


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.slow
def test_a_module_in_training_gives_what_it_gives_and_updates_its_running_means(exports: None) -> None:
    torch.manual_seed(0)
    module, graph = Trained(), Graph()
    x = graph.placeholder("float32", [2, 3, 8, 8], name="x")
    (y,), assigns = add_module(graph, module, [x])
    names = [name for name, _ in module.named_parameters()]
    slopes = gradients(graph, graph.add("Sum", y * y), [f"module/{name}:0" for name in names])
    graph = Graph.from_json(graph.to_json())
    with Session(graph) as session:
        session.run((), targets=[each.name for each in assigns])
        for _ in range(TRACED_FROM_USE + 1):
            images = torch.randn(2, 3, 8, 8)
            expected = module(images)
            wanted = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
            result, *found = session.run(
                [y.name, *(each.name for each in slopes if each is not None)], {"x": images.numpy()}
            )

            np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other.numpy(), rtol=1e-3, atol=1e-5)
        for name, buffer in module.named_buffers():
            np.testing.assert_array_equal(session.run(f"module/{name}/read:0"), buffer.numpy())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_dropout_of_a_module_draws_as_the_graph_does(exports: None) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [2, 4, 4], name="x")
    (y,), _ = add_module(graph, Dropped(), [x])
    (slope,) = gradients(graph, y, [x])
    assert slope is not None
    draws = [name for name, node in graph.nodes.items() if node.op == "RandomUniform"]
    rows = torch.randn(2, 4, 4, requires_grad=True)
    with Session(graph, seed=3) as session, Session(Graph.from_json(graph.to_json()), seed=3) as other:
        fetches = [f"{name}:0" for name in (*draws, y.endpoint.node, slope.endpoint.node)]
        *drawn, result, gradient = session.run(fetches, {"x": rows.detach().numpy()})
        again = other.run(fetches, {"x": rows.detach().numpy()})

    one, two, three, four = map(torch.from_numpy, drawn)
    scores = rows @ rows.transpose(1, 2) / 2
    # Of what sees no key, as the first query by the first mask, the weights are 0.
    shares = [scores.exp() * torch.ones(4, 4).tril(place) for place in (-1, 0)]
    weights = [each / each.sum(-1, keepdim=True).clamp(min=1e-30) for each in shares]
    expected = sum(
        (each * (draw < 0.75) / 0.75) @ rows for each, draw in zip(weights, (one, two), strict=True)
    )
    expected = (expected * (three < 0.5) / 0.5)[:, None] * (four < 0.5) / 0.5
    (wanted,) = torch.autograd.grad(expected.sum(), rows)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted.numpy(), rtol=1e-4, atol=1e-5)
    for first, second in zip((*drawn, result, gradient), again, strict=True):
        np.testing.assert_array_equal(first, second)
    before = list(graph.nodes)
    with pytest.raises(UnsupportedError, match=r"rrelu.* draws"):
        add_module(
            graph, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.RReLU()), [x]
        )
    assert list(graph.nodes) == before
    assert not graph.initial
    with pytest.raises(UnsupportedError, match=r"InstanceNorm.*track_running_stats=False"):
        add_module(graph, torch.nn.InstanceNorm1d(4, track_running_stats=True), [x])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_module_is_evaluated_with_what_was_trained_as_its_page_says(exports: None) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "graphs.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    given: dict[str, Any] = {}
    for part in ("Session(graph, seed=0) as s:", "add_module"):
        exec(next(each for each in examples if part in each), given)

    module = given["module"].train()
    rows = torch.from_numpy(given["rows"])
    descent = torch.optim.SGD(module.parameters(), lr=0.01)
    for each in rows:
        descent.zero_grad()
        (module(each) - 1).square().sum().backward()
        descent.step()
    expected = module.eval()(rows[0]).detach().numpy()
    np.testing.assert_allclose(given["result"], expected, rtol=1e-3, atol=1e-4)


class Tied(torch.nn.Module):
    """A model whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.embedding = torch.nn.Embedding(5, 3)
        self.embedding.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embedding(x))
        return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_weights_that_are_tied_are_one_variable(exports: None) -> None:
    module, graph = Tied(), Graph()
    x = graph.placeholder("int64", [4], name="x")
    (y,), (assign,) = add_module(graph, module, [x])
    (slope,) = gradients(graph, y, [graph.edge("module/head.weight:0")])
    assert slope is not None
    rows = torch.tensor([0, 3, 3, 1])
    expected = module(rows)
    expected.sum().backward()
    with Session(graph) as session:
        session.run((), targets=[assign.name])
        result, gradient = session.run([y, slope], {x: rows.numpy()})

    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert module.head.weight.grad is not None
    np.testing.assert_allclose(gradient, module.head.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


SUMMARIES = [
    constant("a", 2.0),
    constant("values", [0.0, 1.0, 1.0, 3.0]),
    constant("images", [[[[0, 255, 0], [255, 0, 0]]]], "uint8"),
    node("scalar", "ScalarSummary", "a:0", tag="loss"),
    node("histogram", "HistogramSummary", "values:0", tag="weights"),
    node("image", "ImageSummary", "images:0", tag="filters"),
    node("all", "MergeSummary", "scalar:0 histogram:0 image:0"),
    node("b", "Neg", "a:0"),
]


def write_summaries(folder: Path) -> None:
    graph = Graph(SUMMARIES)
    statistics = Statistics()
    with Session(graph) as session, event_file(str(folder)) as events:
        events.summary(session.run("all:0"), 7)
        events.scalar("b", session.run("b:0", statistics=statistics), 1)
        events.histogram("h", np.arange(10.0), 1)
        events.image("i", np.zeros((4, 4, 3), np.uint8), 1)
        events.graph(graph, statistics)


@pytest.mark.slow  # it imports TensorBoard
def test_event_files_have_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_summaries(tmp_path)
    read = EventAccumulator(str(tmp_path))
    read.Reload()

    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(7, 2.0)]
    (histogram,) = read.Histograms("weights")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (0.0, 3.0, 4.0, 5.0)
    (image,) = read.Images("filters")
    with Image.open(io.BytesIO(image.encoded_image_string)) as picture:
        assert np.asarray(picture).tolist() == [[[0, 255, 0], [255, 0, 0]]]
    assert [each.value for each in read.Scalars("b")] == [-2.0]
    assert [each.name for each in read.Graph().node] == [each["name"] for each in SUMMARIES]
    stats = read.RunMetadata("step").step_stats.dev_stats
    assert {each.node_name for device in stats for each in device.node_stats} == {"a", "b"}


#: TensorBoard with four of its plugins. It imports pkg_resources, which setuptools no longer has, and calls nothing of
#: it where it reads its own files.
BOARD = """
import sys, types
try:
    import pkg_resources
except ImportError:
    sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
from tensorboard.plugins.core.core_plugin import CorePluginLoader
from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin
from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin
from tensorboard.plugins.image.images_plugin import ImagesPlugin
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from tensorboard.program import TensorBoard

board = TensorBoard([CorePluginLoader(), GraphsPlugin, HistogramsPlugin, ImagesPlugin, ScalarsPlugin])
board.configure(["", "--logdir", sys.argv[1], "--port", sys.argv[2], "--load_fast", "false"])
board.main()
"""


@pytest.mark.slow
def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    """A TensorBoard process reads the folder, and its web interface says what it found."""
    write_summaries(tmp_path / "run")
    waited = np.zeros(2, SPAN)
    waited["kind"], waited["end"] = [Kind.WAIT, Kind.STEP], [0.5, 1.5]
    export_trace(Trace(waited), "tensorboard", tmp_path / "trace")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    port = address.rpartition(":")[2]
    board = subprocess.Popen([sys.executable, "-c", BOARD, str(tmp_path), port], stderr=subprocess.DEVNULL)

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{address}/data/plugin/{path}", timeout=patient(10)) as answer:
            return json.loads(answer.read())

    def loss() -> Any:
        assert board.poll() is None, "TensorBoard ended"
        with contextlib.suppress(OSError):  # it does not listen yet
            return get("scalars/tags").get("run", {}).get("loss")
        return None

    try:
        wait_until(loss, seconds=60)
        assert get("scalars/scalars?run=run&tag=loss")[0][1:] == [7, 2.0]
        assert get("scalars/scalars?run=trace&tag=step/stall_seconds")[0][1:] == [0, 0.5]
        assert {"weights", "h"} <= get("histograms/tags")["run"].keys()
        assert {"filters", "i"} <= get("images/tags")["run"].keys()
        assert get("graphs/info")["run"]["run_graph"]
    finally:
        board.terminate()
        board.wait()


def test_runs_are_steps_of_a_trace_with_a_span_for_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ninety iterations overflow the ring unless it is drained while they run; a run that waits for another's element
    stalls, and shows who it waited for."""
    count = [
        node("t", "Less", "i limit:0"),
        node("fail", "Call", "i", function="check", outputs=[["int32", []]]),
        constant("one", 1, "int32"),
        node("n", "Add", "fail one"),
    ]
    nodes = [
        constant("zero", 0, "int32"),
        constant("limit", 90, "int32"),
        node("loop", "While", "zero:0", cond=body("i", count[:1], "t"), body=body("i", count[1:], "n")),
        node("q", "FIFOQueue", capacity=1, components=[["int32", []]]),
        node("put", "Enqueue", "q:0 zero:0"),
        node("get", "Dequeue", "q:0"),
    ]
    monkeypatch.setattr(timeline, "_RING_SPANS", 64)
    path = tmp_path / "run.trace"
    with Session(Graph(nodes), functions={"check": lambda value: value}, trace=path) as session:
        session.run("loop:0")
        taker = threading.Thread(target=session.run, args=("get:0",))
        taker.start()
        wait_until(session.waits)
        session.run("put")
        taker.join()
    trace = read_trace(path)
    spans = trace.spans[trace.spans["kind"] == Kind.NODE]
    names = [trace.name_of(int(each)) for each in spans["sample"]]

    assert trace.is_complete
    assert names.count("loop/fail") == 90
    (got,) = np.flatnonzero([name == "get" for name in names])
    waits = trace.spans[(trace.spans["kind"] == Kind.WAIT) & (trace.spans["step"] == spans[got]["step"])]
    assert len(waits) == 1
    assert spans[got]["start"] <= waits[0]["start"] <= waits[0]["end"] <= spans[got]["end"]
    (epoch,) = trace.epochs()
    assert epoch.steps == 3
    assert len(np.unique(spans["worker"])) == 2  # the put ran while the get waited
    write_chrome(trace, tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [each["name"] for each in events].count("loop/fail") == 90

    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    with Session(Graph(nodes[:1])) as session:  # under penstock watch
        session.run("zero:0")
    (joined,) = set(tmp_path.glob("*.trace")) - {path}
    assert list(read_trace(joined).names.values()) == ["zero"]
    monkeypatch.setattr(timeline, "path_in_run", lambda: tmp_path)
    with Session(Graph(nodes[:1])) as session:
        session.run("zero:0")
    assert "the graph is not recorded in the run of penstock watch: " in capsys.readouterr().err


def test_parts_of_a_graph_are_compared_with_those_of_a_module_each_on_what_that_was_given() -> None:
    """The first of two layers is wrong: it is named, and the second, given what the module's was, is not."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    module = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    graph = Graph()
    x = graph.placeholder("float32", [5, 3])
    rate = graph.placeholder("float32", [])
    handles, edges = [], [x]
    for layer in layers:
        w = graph.variable("float32", list(layer.weight.T.shape), initial=layer.weight.detach().T.numpy())
        b = graph.variable("float32", list(layer.bias.shape), initial=layer.bias.detach().numpy())
        handles += [w, b]
        edges.append(edges[-1] @ graph.add("Read", w) + graph.add("Read", b))
        if layer is layers[0]:
            edges.append(graph.add("aten.tanh.default", edges[-1]))
    y = edges[-1]
    slopes = gradients(graph, graph.add("Square", y), handles)
    train = [graph.add("AssignAdd", each, slope * rate) for each, slope in zip(handles, slopes, strict=True)]
    parts = {"0": ([x], edges[1]), "1": ([edges[1]], edges[2]), "2": ([edges[2]], y), "": ([x], y)}
    batch = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    with Session(graph) as session:
        session.run(graph.initialize_all())
        assert all(each.is_within for each in compare_parts(session, parts, module, [batch]))
        assert changed_variables(session, train, {x: batch, rate: 0.0}) == []
        assert len(changed_variables(session, train, {x: batch, rate: -0.1})) == 4

        session.run(graph.initialize_all())
        with torch.no_grad():
            layers[0].bias[2] += 0.5
        differences = compare_parts(session, parts, module, [batch])
        assert [each.is_within for each in differences] == [False, True, True, False]
        assert differences[0].largest == pytest.approx(0.5, rel=1e-5)
        assert differences[0].worst[1] == 2
        with pytest.raises(GraphError, match="no part '00'") as caught:
            compare_parts(session, {"00": ([x], y)}, module, [batch])
    assert caught.value.kind == "not_found"


def test_a_loader_is_a_node_whose_position_is_saved(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    root = str(image_folder(images=12, width=24, height=24))
    nodes = [
        node("batch", "NextBatch", batches="train", outputs=[["float32", [3, 3, 16, 16]], ["int64", [3]]])
    ]

    def run(count: int, *, restore: bool) -> Any:
        with (
            Loader(
                root, batch_size=3, epochs=2, seed=1, transforms=[CenterCrop(16), ToTensor()], report=None
            ) as loader,
            Session(Graph(nodes), batches={"train": loader}) as session,
        ):
            if restore:
                session.restore(str(tmp_path / "state"))
            results = [session.run(["batch:0", "batch:1"]) for _ in range(count)]
            if not restore:
                session.save(str(tmp_path / "state"))
                results = [session.run(["batch:0", "batch:1"]) for _ in range(2)]
            return results

    made: list[Loader] = []

    def make() -> Loader:
        made.append(
            Loader(root, batch_size=3, epochs=2, seed=1, transforms=[CenterCrop(16), ToTensor()], report=None)
        )
        return made[-1]

    def restored_after_a_batch(batches: Any) -> Any:
        with Session(Graph(nodes), batches={"train": batches}) as session:
            session.run("batch:0")
            session.restore(str(tmp_path / "state"))
            return [session.run(["batch:0", "batch:1"]) for _ in range(2)]

    expected = run(1, restore=False)
    with make() as loader, pytest.raises(GraphError, match="lambda: Loader") as caught:
        restored_after_a_batch(loader)
    assert caught.value.kind == "unsupported"
    for one, other in zip(restored_after_a_batch(make), expected, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
    assert len(made) == 3
    for each in made:
        with pytest.raises(ClosedError):
            each.start()
    for one, other in zip(run(2, restore=True), expected, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
