"""What a run shows of itself: event files for TensorBoard, counts of parameters.

Needs the package tensorboard, whose writer works without TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.graph.model.dtypes import is_known
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Node
from penstock.graph.run.statistics import Statistics


def parameter_counts(graph: Graph) -> dict[str, int]:
    """Return how many elements each variable has, by name; those with sizes that are not known are left out."""
    counts = {}
    for node in graph.nodes.values():
        if node.op == "Variable":
            shape = node.outputs[0].shape
            if is_known(shape):
                counts[node.name] = math.prod(shape)
    return counts


class Events:
    """Writes scalars, histograms, images and the graph, by step."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def summary(self, value: Any, step: int) -> None:
        """Write what a summary node gave."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer._get_file_writer().add_summary(Summary.FromString(np.asarray(value).item()), step)

    def scalar(self, name: str, value: Any, step: int) -> None:
        """Write a number."""
        self._writer.add_scalar(name, float(value), step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        """Write how values are distributed."""
        self._writer.add_histogram(name, values, step)

    def image(self, name: str, image: Any, step: int) -> None:
        """Write an image: uint8 or float in [0, 1], [height, width, channels]."""
        self._writer.add_image(name, image, step, dataformats="HWC")

    def graph(self, graph: Graph, statistics: Statistics | None = None) -> None:
        """Write the graph with its scopes and devices; with statistics, also the seconds of each node."""
        from tensorboard.compat.proto.graph_pb2 import GraphDef
        from tensorboard.compat.proto.step_stats_pb2 import DeviceStepStats, NodeExecStats, StepStats

        definition = GraphDef(node=[_definition(node) for node in graph.nodes.values()])
        self._writer._get_file_writer().event_writer.add_event(
            _event(graph_def=definition.SerializeToString())
        )
        if statistics is None:
            return
        by_device: dict[str, list[Any]] = {}
        for name, seconds in statistics.seconds.items():
            microseconds = max(int(seconds * 1e6), 1)
            each = NodeExecStats(
                node_name=name, all_end_rel_micros=microseconds, op_end_rel_micros=microseconds
            )
            by_device.setdefault(statistics.devices[name], []).append(each)
        stats = StepStats(
            dev_stats=[DeviceStepStats(device=device, node_stats=each) for device, each in by_device.items()]
        )
        from tensorboard.compat.proto.config_pb2 import RunMetadata
        from tensorboard.compat.proto.event_pb2 import TaggedRunMetadata

        tagged = TaggedRunMetadata(tag="step", run_metadata=RunMetadata(step_stats=stats).SerializeToString())
        self._writer._get_file_writer().event_writer.add_event(_event(tagged_run_metadata=tagged))


def _event(**fields: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(**fields)


def _definition(node: Node) -> Any:
    from tensorboard.compat.proto.node_def_pb2 import NodeDef

    inputs = [each.node if each.port == 0 else str(each) for each in node.inputs]
    return NodeDef(
        name=node.name,
        op=node.op,
        device=node.device,
        input=[*inputs, *(f"^{name}" for name in node.controls)],
    )


@contextmanager
def event_file(folder: str) -> Iterator[Events]:
    """Open an event file in a folder, for TensorBoard to read."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    try:
        yield Events(writer)
    finally:
        writer.close()
