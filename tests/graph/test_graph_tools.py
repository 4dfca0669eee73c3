"""Placement of a graph, drawings, modules, lossy values, event files, batches of a loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.graphs import body, constant, node

from penstock.graph import (
    Graph,
    GraphError,
    Session,
    Statistics,
    add_module,
    event_file,
    from_upper_half,
    gradients,
    parameter_counts,
    place_graph,
    to_dot,
    to_upper_half,
)
from penstock.loader import Loader
from penstock.loader.transforms import CenterCrop, ToTensor


def test_a_graph_is_placed_by_the_fields_of_its_nodes() -> None:
    cost = {"/job:a/task:0/device:cpu:0": 2.0, "/job:a/task:1/device:cpu:0": 1.0}
    nodes = [
        constant("a", 1.0, cost=cost, bytes=8, group="g", only="task:0"),
        node("b", "Neg", "a:0", cost=cost, group="g"),
        node("c", "Exp", "a:0", cost=cost),
    ]
    placed = place_graph(Graph(nodes), list(cost), latency_seconds=1, bytes_per_second=4)

    # a at 2 on task 0, b after it there at 4; c on task 0 at 6, on task 1 at 2 + 1 + 2 + 1: the first device on a tie.
    assert placed.finish_seconds == {"a": 2, "b": 4, "c": 6}
    assert "task:0" in placed.device["c"]
    with pytest.raises(GraphError, match=r"'a'.*task:7") as caught:
        place_graph(Graph([constant("a", 1.0, cost=cost, only="task:7")]), list(cost))
    assert caught.value.kind == "infeasible"
    wrong: list[dict[str, Any]] = [{"group": 7}, {"only": ["cpu"]}]
    for field in wrong:
        with pytest.raises(GraphError, match=rf"'a'.*{min(field)}") as caught:
            place_graph(Graph([constant("a", 1.0, **field)]), list(cost))
        assert caught.value.kind == "mismatch"


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


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(12, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        result: torch.Tensor = torch.cond(y.sum() > 0, lambda v: v * 2, lambda v: v - 1, (y,))
        return result


@pytest.mark.filterwarnings("ignore")  # of torch.export, as it traces cond
@pytest.mark.slow  # torch.export makes PyTorch import its compiler: several seconds
def test_a_module_becomes_nodes_that_give_what_it_gives_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tqdm  # type: ignore[import-untyped]

    monkeypatch.setattr(
        tqdm.tqdm, "monitor_interval", 0
    )  # torch.export shows progress, with a thread that stays
    module = Mixed().eval()
    graph = Graph()
    x = graph.placeholder("float32", [2, 2, 4, 4], name="x")
    (y,), assigns = add_module(graph, module, [x])
    total = graph.add("Sum", graph.add("Square", y))
    (slope,) = gradients(graph, total, [x])
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
    assert parameter_counts(graph)["module/layers.4.weight"] == 48


@pytest.mark.slow  # it imports TensorBoard
def test_event_files_have_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    graph = Graph([constant("a", 2.0), node("b", "Neg", "a:0")])
    statistics = Statistics()
    with Session(graph) as session, event_file(str(tmp_path)) as events:
        events.scalar("b", session.run("b:0", statistics=statistics), 1)
        events.histogram("h", np.arange(10.0), 1)
        events.image("i", np.zeros((4, 4, 3), np.uint8), 1)
        events.graph(graph, statistics)
    read = EventAccumulator(str(tmp_path))
    read.Reload()

    assert [each.value for each in read.Scalars("b")] == [-2.0]
    assert [each.name for each in read.Graph().node] == ["a", "b"]
    stats = read.RunMetadata("step").step_stats.dev_stats
    assert {each.node_name for device in stats for each in device.node_stats} == {"a", "b"}


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

    expected = run(1, restore=False)
    for one, other in zip(run(2, restore=True), expected, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
